"""What a user of PyTorch or JAX may write: for type checkers (tests/python/test_typed.py), which
find nothing: tensors in, tensors out.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from typing_extensions import assert_type

import strobe


def plain(q: Tensor, k: Tensor, v: Tensor, used: Tensor) -> Tensor:
    assert_type(strobe.attention(q, k, v, causal=True, seqused_k=used), Tensor)
    out, lse = strobe.attention(q, k, v, return_lse=True)
    assert_type(lse, Tensor)
    assert_type(strobe.attention_backward(out, q, k, v, out, lse), tuple[Tensor, Tensor, Tensor])
    cached, _ = strobe.attention_with_kvcache(
        q, k, v, seqused_k=used, return_lse=True, out_dtype=torch.float32
    )
    assert_type(cached, Tensor)
    merged, _ = strobe.merge([out, out], [lse, lse])
    return merged


def recorded(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *, probs: bool) -> Tensor:
    assert_type(strobe.torch.attention(q, k, v, prefix=offsets), Tensor)
    out, lse = strobe.torch.attention(q, k, v, causal=True, return_lse=True)
    assert_type(lse, Tensor)
    flash = strobe.flash_attn
    assert_type(flash.flash_attn_func(q, k, v, causal=True), Tensor)
    found = flash.flash_attn_func(q, k, v, return_attn_probs=True)
    assert_type(found, tuple[Tensor, Tensor, Tensor])
    either = flash.flash_attn_varlen_func(
        q, k, v, offsets, offsets, 9, 9, return_attn_probs=probs
    )
    if isinstance(either, tuple):
        return either[1]
    assert_type(strobe.flash_attn_3.flash_attn_with_kvcache(q, k, v), Tensor)
    return out


def of_numpy(x: np.ndarray[tuple[int, ...], np.dtype[np.float32]], tensor: Tensor) -> str:
    out, lse = strobe.attention(x, x, x, return_lse=True, alibi_slopes=x)
    answer: str = strobe.why(x, x, x, prefix=strobe.ArraySpec((2,), "int32"))
    return answer + str(out.ndim) + str(lse.dtype) + str(tensor.is_cuda)
