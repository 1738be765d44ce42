"""Activation checkpointing inside `sdpa_kernel`: what is computed again is computed the same way.

torch.utils.checkpoint runs a function a second time in the backward pass, where the block that it
ran in is no longer at work, be it open or not. PyTorch has no hook for that: it restores random
generators and autocast, not modes. So the two names by which `torch.utils.checkpoint.checkpoint`
finds its implementations are made to hand over functions that enter the block again. Outside of
blocks they hand over what they got.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Final

import torch
from torch.utils import checkpoint

from . import _calls

# Makes the block again whose calls are counted in the argument.
Resume = Callable[[_calls.ServedCalls], AbstractContextManager[Any]]

_WITHOUT_REENTRANT: Final = "_checkpoint_without_reentrant_generator"


def _in_block(function: Any, resume: Resume) -> Any:
    """`function`, in the block that this thread is in."""
    served = _calls.current()
    if served is None:
        return function

    @wraps(function, updated=())
    def again(*args: Any, **kwargs: Any) -> Any:
        with resume(served):
            return function(*args, **kwargs)

    return again


def follow(resume: Resume) -> None:
    """From now on, functions checkpointed inside a block are computed again inside one."""
    reentrant = checkpoint.CheckpointFunction
    generator = getattr(checkpoint, _WITHOUT_REENTRANT, None)

    class CheckpointFunction(reentrant):  # type: ignore[misc,valid-type]
        """torch.utils.checkpoint's own, for functions in a block too."""

        @classmethod
        def apply(cls, run_function: Any, *args: Any, **kwargs: Any) -> Any:
            """As torch.autograd.Function's."""
            return reentrant.apply(_in_block(run_function, resume), *args, **kwargs)

    checkpoint.CheckpointFunction = CheckpointFunction
    if generator is not None:

        @wraps(generator)
        def without_reentrant(function: Any, *args: Any, **kwargs: Any) -> Any:
            return generator(_in_block(function, resume), *args, **kwargs)

        setattr(checkpoint, _WITHOUT_REENTRANT, without_reentrant)


# What PyTorch's compiler puts in the place of torch.utils.checkpoint.checkpoint.
OPERATOR: Final = torch.ops.higher_order.tag_activation_checkpoint


def traced(block: AbstractContextManager[Any], function: Any) -> Callable[..., Any]:
    """`function` for `OPERATOR`, of a call in `block`, which the compiler has left by then.

    To the compiler, a change of the stack of modes is a side effect, which this operator may not
    have. It looks at the first change alone, so that one is made here.
    """
    with block:
        pass

    def again(*args: Any, **kwargs: Any) -> Any:
        with block:
            return function(*args, **kwargs)

    return again
