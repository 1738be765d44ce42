"""Calls whose inputs end where memory does: each array's last byte is the last one of its page, and
nobody may read the page behind. test_page_ends.py runs this in a process of its own for each
instruction set, as a read too far ends the process.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import ml_dtypes
import numpy as np

import strobe

Array = np.ndarray[Any, Any]

PAGE = mmap.PAGESIZE
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)
# Multiples of a vector's values and of two vectors' and not.
DIMS = (1, 7, 8, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 72, 80, 97, 112, 128, 200)
PROT_NONE, PROT_BOTH, PRIVATE_ANONYMOUS = 0, 3, 0x22

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t, *[ctypes.c_int] * 3], ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Ends:
    """Copies of arrays that end where memory does, as long as this lives."""

    def __init__(self) -> None:
        self._mapped: list[tuple[int, int]] = []

    def __call__(self, x: Array) -> Array:
        size = -(-x.nbytes // PAGE) * PAGE
        begin = libc.mmap(None, size + PAGE, PROT_BOTH, PRIVATE_ANONYMOUS, -1, 0)
        assert libc.mprotect(begin + size, PAGE, PROT_NONE) == 0
        self._mapped.append((begin, size + PAGE))
        memory = (ctypes.c_uint8 * x.nbytes).from_address(begin + size - x.nbytes)
        copy: Array = np.ctypeslib.as_array(memory).view(x.dtype).reshape(x.shape)
        copy[...] = x
        return copy

    def free(self) -> None:
        for begin, size in self._mapped:
            libc.munmap(begin, size)


def same(what: str, found: Array, wanted: Array) -> None:
    assert found.tobytes() == wanted.tobytes(), what


def main() -> None:
    """Every call has the bits that it has for arrays in ordinary memory."""
    rng = np.random.default_rng(5)
    kernels = set()
    for dtype in DTYPES:
        for dim in DIMS:
            dim_v = int(rng.choice(DIMS)) if rng.random() < 0.5 else dim
            queries = int(rng.choice((1, 3, 40)))
            heads, heads_kv = ((2, 1), (2, 2), (4, 1))[rng.integers(3)]
            shapes = ((queries, heads, dim), (77, heads_kv, dim), (77, heads_kv, dim_v))
            plain = [rng.standard_normal((1, *s), np.float32).astype(dtype) for s in shapes]
            dout = rng.standard_normal((1, queries, heads, dim_v), np.float32).astype(dtype)
            ends = Ends()
            told = f"{np.dtype(dtype)}, {shapes}"
            results = []
            for q, k, v, d in ((*plain, dout), map(ends, (*plain, dout))):
                out, lse = strobe.attention(q, k, v, causal=True, return_lse=True)
                kernels.add(strobe.why().splitlines()[0].rpartition(" ")[2])
                gradients = strobe.attention_backward(d, q, k, v, out, lse, causal=True)
                bias = (ends if q is not plain[0] else np.array)(np.ones((1, 1, 1, 77), dtype))
                biased = strobe.attention(q, k, v, bias=bias)
                cached = strobe.attention_with_kvcache(q, k, v)
                results.append((out, lse, *gradients, biased, cached))
            for n, (found, wanted) in enumerate(zip(results[1], results[0], strict=True)):
                same(f"{told}, result {n}", found, wanted)
            for form in ("int8", "float8_e4m3fn"):
                codes: list[Array] = []
                for x in plain[1:]:
                    codes += strobe.quantize(x, form)
                some = [plain[0], *codes]
                calls = [
                    strobe.attention_with_kvcache(q, k, v, k_scale=ks, v_scale=vs)
                    for q, k, ks, v, vs in (some, [ends(x) for x in some])
                ]
                same(f"{told}, {form}", *calls)
            ends.free()
    print(*sorted(kernels))


if __name__ == "__main__":
    main()
