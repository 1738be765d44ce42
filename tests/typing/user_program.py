"""What a user may write: for type checkers (tests/python/test_typed.py), which find nothing."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

import strobe
from strobe import Info

Floats = npt.NDArray[np.float32]


def layer(q: Floats, k: Floats, v: Floats, *, window: tuple[int, int] = (-1, -1)) -> Floats:
    out = strobe.attention(q, k, v, causal=True, window=window, scale=0.125, attention_chunk=64)
    return np.asarray(out, np.float32)


def gradients(q: Floats, k: Floats, v: Floats) -> tuple[Floats, Floats, Floats]:
    out, lse = strobe.attention(q, k, v, return_lse=True, seqused_k=np.array([3], np.int32))
    dq, dk, dv = strobe.attention_backward(np.ones_like(out), q, k, v, out, lse)
    return dq, dk, dv


def questions(q: Floats) -> str:
    described = strobe.ArraySpec((1, 128, 8, 64), dtype="bfloat16", device="cuda:0")
    try:
        lines: list[str] = [strobe.why(described, described, described)]
        lines.append(str(strobe.plan(q, q, q, dropout_p=0.1, dropout_seed=7)))
    except strobe.InvalidArgument as error:
        return str(error)
    except strobe.Error:
        raise
    machine: Info = strobe.info()
    names: list[str] = [kernel.name for kernel in machine.kernels]
    memory: list[int] = [device.memory_bytes for device in machine.cuda_devices]
    return "\n".join([*lines, *names, *map(str, memory), strobe.__version__])


class Shared(Protocol):
    """An array of another library."""

    def __dlpack__(self, *, stream: int | None = None) -> Any: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


def of_another_library(tensor: Shared) -> npt.NDArray[Any]:
    return strobe.attention(tensor, tensor, tensor)
