"""Seeds and offsets of dropout from PyTorch's generators."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import torch

from ._errors import InvalidArgument, Unsupported

Tensor: TypeAlias = torch.Tensor

_UINT64: Final = 2**64 - 1
# Philox numbers that a CUDA generator counts for one call. Weights are told apart by their
# position, so a step of 1 would do; PyTorch wants multiples of 4.
_CUDA_OFFSET_STEP: Final = 4


def draw_dropout_state(*, device: Any) -> Tensor:
    """int64 (2,) in the CPU's memory: seed and offset for one call, from PyTorch's generator.

    device "cpu": two numbers of the CPU's default generator. A CUDA device: that device's seed and
    offset, and the offset moves on; nothing waits for the device.

    Raises:
        Unsupported: while a CUDA graph is captured, which would repeat one mask at each replay.
    """
    if device.type != "cuda":
        return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device="cpu")
    if torch.cuda.is_current_stream_capturing():
        raise Unsupported(
            "dropout_p > 0 while a CUDA graph is captured: seed and offset would be those of the "
            "capture at every replay; capture with dropout_p = 0"
        )
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    seed, offset = generator.initial_seed() & _UINT64, generator.get_offset()
    generator.set_offset(offset + _CUDA_OFFSET_STEP)
    signed = seed - 2**64 if seed >= 2**63 else seed
    return torch.tensor([signed, offset], dtype=torch.int64, device="cpu")


def seed_and_offset(rng_state: Tensor | None) -> tuple[int, int]:
    """What `draw_dropout_state` gave, as the library takes it; (0, 0) without dropout."""
    if rng_state is None:
        return 0, 0
    if rng_state.dtype != torch.int64 or tuple(rng_state.shape) != (2,):
        raise InvalidArgument(
            f"rng_state is {rng_state.dtype} {tuple(rng_state.shape)}, expected torch.int64 (2,): "
            "seed and offset"
        )
    seed, offset = rng_state.tolist()
    return seed & _UINT64, offset & _UINT64
