"""The first calls of a process, of every public function, and what each imports: nothing.

    python first_calls.py numpy|torch

A process that forks while one of its threads imports leaves its child with the import's lock, which
nobody gives back. Prints what was imported, if anything was.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

KIND = sys.argv[1]
if KIND == "torch":
    import torch

import strobe  # noqa: E402

if KIND == "torch":
    import strobe.flash_attn as fa
    import strobe.flash_attn_3 as fa3
    import strobe.torch


def array(*shape: int) -> Any:
    return torch.ones(*shape) if KIND == "torch" else np.ones(shape, np.float32)


def integers(*numbers: int) -> Any:
    return torch.tensor(numbers, dtype=torch.int32) if KIND == "torch" else np.array(numbers, "i4")


class Shared:
    """An array of which only DLPack is known."""

    def __init__(self, x: Any) -> None:
        self.__dlpack__ = x.__dlpack__
        self.__dlpack_device__ = x.__dlpack_device__


q = array(1, 4, 2, 8)
lengths = integers(0, 4)
WRONG: list[dict[str, Any]] = [
    {"q": [1]},
    {"q": q[..., ::2]},
    {"k": q[:, :, :1, :3]},
    {"out": array(1)},
    {"scale": "x"},
    {"softcap": -1.0},
    {"causal": "False"},
    {"window": (-3, 0)},
    {"window": 3},
    {"unknown": 3},
    {"cu_seqlens_q": lengths},
]


def attend(**more: Any) -> Any:
    return strobe.attention(**({"q": q, "k": q, "v": q} | more))


CALLS: list[Callable[[], Any]] = [
    attend,
    lambda: attend(q=Shared(np.ones((1, 4, 2, 8), np.float32))),
    lambda: attend(attention_chunk=2, causal=np.True_, out=array(1, 4, 2, 8)),
    lambda: attend(dropout_p=0.5),
    lambda: attend(**dict.fromkeys("qkv", q[0]), cu_seqlens_q=lengths, cu_seqlens_k=lengths),
    lambda: attend(
        **dict.fromkeys("qkv", q[0]), cu_seqlens_q=integers(0, 9), cu_seqlens_k=integers(0, 9)
    ),
    lambda: attend(**{x: array(1, 1024, 8, 128) for x in "qkv"}),  # long: signals are heard
    lambda: strobe.attention_backward(q, q, q, q, q, array(1, 2, 4)),
    lambda: strobe.attention_with_kvcache(
        q[:, :1], q * 1, q * 1, seqused_k=integers(2), k_new=q[:, :1], v_new=q[:, :1]
    ),
    lambda: strobe.attention_with_kvcache(q[:, :1], q, q, seqused_k=integers(9)),
    lambda: strobe.merge(array(2, 1, 4, 2, 8), array(2, 1, 2, 4)),
    lambda: strobe.merge([array(1, 4, 2, 8)] * 2, [array(1, 2, 4)] * 2),
    lambda: strobe.merge(q, q),
    lambda: strobe.plan(q, q, q, causal=True),
    lambda: strobe.why(q, q, q),
    lambda: strobe.why(q, q[:, :, :1, :3], q),
    strobe.why,
    lambda: strobe.dropout_mask(1, 1, 2, 2, dropout_p=0.5),
    strobe.info,
    *(lambda more=more: attend(**more) for more in WRONG),
]
if KIND == "torch":
    r = q.clone().requires_grad_()
    CALLS += [
        lambda: fa.flash_attn_func(q, q, q),
        lambda: fa.flash_attn_func(r, r, r).sum().backward(),
        lambda: fa.flash_attn_func(q, q, q, dropout_p=0.5, return_attn_probs=True),
        lambda: fa.flash_attn_func(q, q, q, softcap=-1.0),
        lambda: fa.flash_attn_varlen_func(q[0], q[0], q[0], lengths, lengths, 4, 4),
        lambda: fa.flash_attn_with_kvcache(
            q, q.clone(), q.clone(), q[:, :1], q[:, :1], cache_seqlens=1
        ),
        lambda: fa3.flash_attn_func(q, q, q, attention_chunk=2),
        lambda: fa3.flash_attn_combine(array(2, 1, 4, 2, 8), array(2, 1, 4, 2)),
        lambda: torch.ops.strobe.attention_forward(
            q, q, q, *[None] * 6, 0.0, None, False, -1, -1, 0.0, False
        ),
        lambda: strobe.torch.why(q, q, q),
        lambda: attend(out=r),
    ]


def main() -> int:
    known, failures = set(sys.modules), 0
    for number, call in enumerate(CALLS):
        try:
            call()
        except (strobe.Error, TypeError):
            failures += 1
        new = set(sys.modules) - known
        known |= new
        if new:
            print(f"call {number} imported {sorted(new)[:9]}")
    assert failures >= len(WRONG)
    if KIND != "torch":
        assert "torch" not in sys.modules
    return 0


if __name__ == "__main__":
    sys.exit(main())
