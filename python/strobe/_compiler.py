"""What PyTorch's compiler (Dynamo) must not do with a function: compile it by itself, or look into
it. As torch.compiler.disable, which would import the compiler, for seconds, into a program that may
never compile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def only_within(function: Function) -> Function:
    """Lets the compiler follow `function` where it compiles its caller, and never begin with it,
    nor with what it calls. Where a compiled function goes on uncompiled, the compiler takes up
    each function that is called from there.
    """
    compiler = torch._C._dynamo.eval_frame
    code = getattr(function, "__code__", None)  # a function of C++ has none
    try:
        if code is not None:
            skip = compiler._FrameAction.SKIP
            compiler.set_code_exec_strategy(code, compiler._FrameExecStrategy(skip, skip))
    except AttributeError:  # pragma: no cover - an older PyTorch, which looks and breaks more often
        pass
    return function


def uncompiled(function: Function) -> Function:
    """Has the compiler break its graph at calls of `function`, and not look into it."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return only_within(function)
