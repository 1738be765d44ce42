"""With batch_invariant a sequence's bits are the same alone and in any batch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import strobe

torch = pytest.importorskip("torch")

LENGTHS = (1, 70, 300, 0, 1025)


def tensors(rows: tuple[int, ...], head_dim: int, dtype: Any, device: str) -> list[Any]:
    generator = torch.Generator().manual_seed(sum(rows) + head_dim)
    return [
        torch.randn(*rows, heads, head_dim, generator=generator).to(device, dtype)
        for heads in (4, 2, 2, 4)
    ]


def both(q: Any, k: Any, v: Any, dout: Any, **options: Any) -> list[Any]:
    """out, lse, dq, dk, dv."""
    options["batch_invariant"] = True
    out, lse = strobe.attention(q, k, v, return_lse=True, **options)
    grads = strobe.attention_backward(dout, q, k, v, out, lse, deterministic=True, **options)
    return [out, lse, *grads]


def dtypes_of(device: str) -> list[Any]:
    return [torch.bfloat16] if device == "cuda" else [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_dense(causal: bool, head_dim: int, device: str) -> None:
    for dtype in dtypes_of(device):
        for seqlen in (130, 1025):
            of_all = tensors((5, seqlen), head_dim, dtype, device)
            together = both(*of_all, causal=causal)
            for b in (0, 4):
                alone = both(*(x[b : b + 1] for x in of_all), causal=causal)
                for name, x, y in zip(
                    ("out", "lse", "dq", "dk", "dv"), together, alone, strict=True
                ):
                    assert torch.equal(x[b], y[0]), f"{name} of sequence {b}, {dtype}, {seqlen}"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("queries", [1, 20, 70])
def test_few_queries_on_many_keys(queries: int, head_dim: int, device: str) -> None:
    """Keys that a GPU divides among its thread blocks."""
    for dtype in dtypes_of(device):
        q, _, _, dout = tensors((6, queries), head_dim, dtype, device)
        _, k, v, _ = tensors((6, 3001), head_dim, dtype, device)
        together = both(q, k, v, dout)
        for few in (slice(0, 1), slice(2, 5)):
            fewer = both(q[few], k[few], v[few], dout[few])
            for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), together, fewer, strict=True):
                assert torch.equal(x[few], y), f"{name} of sequences {few}, {dtype}"


def test_a_window_and_many_threads(device: str) -> None:
    """Tiles of one row, whose reference must not depend on how the batch's work is cut."""
    dtype = torch.bfloat16
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(4, 2049, 16, 128, generator=generator).to(device, dtype) for _ in range(3)
    )
    options: dict[str, Any] = {"causal": True, "window": (512, 0), "batch_invariant": True}
    out, lse = strobe.attention(q, k, v, return_lse=True, threads=16, **options)
    for threads in (1, 16):
        alone, alone_lse = strobe.attention(
            q[:1], k[:1], v[:1], return_lse=True, threads=threads, **options
        )
        assert torch.equal(lse[0], alone_lse[0])
        assert torch.equal(out[0], alone[0])


def test_a_layout_that_only_a_batch_has(device: str) -> None:
    """Keys that the whole batch shares have a batch stride of 0; a batch of one has any."""
    dtype = torch.bfloat16
    q, k, v, _ = tensors((3, 200), 64, dtype, device)
    k, v = (x[:1].expand(3, -1, -1, -1) for x in (k, v))
    out = strobe.attention(q, k, v, batch_invariant=True)
    assert torch.equal(out[2], strobe.attention(q[2:], k[2:], v[2:], batch_invariant=True)[0])


@pytest.mark.parametrize("head_dim", [64, 256])
def test_varlen(head_dim: int, device: str) -> None:
    for dtype in dtypes_of(device):
        of_all = tensors((sum(LENGTHS),), head_dim, dtype, device)

        def run(parts: list[Any], lengths: tuple[int, ...]) -> list[Any]:
            ends = torch.tensor((0, *lengths)).cumsum(0).to(device, torch.int32)
            longest = max(lengths)
            return both(
                *parts, causal=True, cu_seqlens_q=ends, cu_seqlens_k=ends,
                max_seqlen_q=longest, max_seqlen_k=longest,
            )  # fmt: skip

        together = run(of_all, LENGTHS)
        begin = 0
        for length in LENGTHS:
            rows = slice(begin, begin + length)
            begin += length
            if length == 0:
                continue
            alone = run([x[rows] for x in of_all], (length,))
            for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), together, alone, strict=True):
                mine = x[:, rows] if name == "lse" else x[rows]
                assert torch.equal(mine, y), f"{name} of the sequence of {length}, {dtype}"


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("page_size", [0, 16, 256])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_a_cache(head_dim: int, page_size: int, queries: int, device: str) -> None:
    """Alone, and at several positions of batches whose sizes decide elsewhere how keys are divided
    among the threads or thread blocks.
    """
    for dtype in dtypes_of(device):
        run = cached(head_dim, page_size, queries, dtype, device)
        for b in (0, 2, 3):
            out, lse = run([b])
            others = [n for n in range(5) if n != b]
            for batch in ([b, *others], [*others, b], [1, b], 16 * others + [b], 70 * [b]):
                at = batch.index(b)
                together, lses = run(batch)
                what = f"of sequence {b} at {at} of {len(batch)}, {dtype}"
                assert torch.equal(together[at], out[0]), f"out {what}"
                assert torch.equal(lses[at], lse[0]), f"lse {what}"


def where_keys_are(pages: Any, members: list[int], page_size: int) -> dict[str, Any]:
    """Arguments that say where some sequences' keys lie; page_size 0: in entries of the cache."""
    if page_size:
        return {"block_table": pages[members]}
    return {"cache_batch_idx": pages[members, 0]}


def cached(
    head_dim: int, page_size: int, queries: int, dtype: Any, device: str
) -> Callable[[list[int]], tuple[Any, Any]]:
    """What computes out and lse of some of five sequences, of 7 to 3072 keys."""
    most, used = 3072, torch.tensor((2900, 7, 3072, 1025, 513))
    columns = most // page_size if page_size else 1
    generator = torch.Generator().manual_seed(head_dim + page_size)
    shape = (len(used) * columns, page_size or most, 2, head_dim)
    k, v = (torch.randn(*shape, generator=generator).to(device, dtype) for _ in range(2))
    q = torch.randn(len(used), queries, 8, head_dim, generator=generator).to(device, dtype)
    pages = torch.randperm(shape[0], generator=generator).view(len(used), columns)

    def run(members: list[int]) -> tuple[Any, Any]:
        where = {"seqused_k": used[members], **where_keys_are(pages, members, page_size)}
        numbers = {name: x.to(device, torch.int32) for name, x in where.items()}
        out, lse = strobe.attention_with_kvcache(
            q[members], k, v, **numbers, causal=True, batch_invariant=True, threads=16,
            return_lse=True,
        )  # fmt: skip
        return out, lse

    return run


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("head_dim", [128, 192])
def test_prompts_on_a_cache(head_dim: int, page_size: int, device: str) -> None:
    """Packed queries of prompts and of sequences that decode: alone, and beside each other. Also
    where not all queries of a sequence are in use.
    """
    most, used_k, queries = 2048, torch.tensor((1900, 300, 2048, 700, 513)), (1, 140, 3, 70, 20)
    columns = most // page_size if page_size else 1
    generator = torch.Generator().manual_seed(head_dim + page_size)
    shape = (len(used_k) * columns, page_size or most, 2, head_dim)
    dtype = torch.bfloat16
    k, v = (torch.randn(*shape, generator=generator).to(device, dtype) for _ in range(2))
    q = [torch.randn(n, 8, head_dim, generator=generator).to(device, dtype) for n in queries]
    pages = torch.randperm(shape[0], generator=generator).view(len(used_k), columns)

    def run(members: list[int], used_q: list[int] | None = None) -> list[tuple[Any, Any]]:
        lengths = [queries[n] for n in members]
        ends = torch.tensor([0, *lengths]).cumsum(0)
        numbers = {"seqused_k": used_k[members], "cu_seqlens_q": ends}
        if used_q:
            numbers["seqused_q"] = torch.tensor([used_q[n] for n in members])
        numbers |= where_keys_are(pages, members, page_size)
        numbers = {name: x.to(device, torch.int32) for name, x in numbers.items()}
        out, lse = strobe.attention_with_kvcache(
            torch.cat([q[n] for n in members]), k, v, **numbers, max_seqlen_q=max(lengths),
            causal=True, batch_invariant=True, return_lse=True,
        )  # fmt: skip
        return list(zip(out.split(lengths), lse.split(lengths, 1), strict=True))

    for used_q in (None, [1, 20, 3, 1, 20]):
        for b in range(len(queries)):
            ((out, lse),) = run([b], used_q)
            others = [n for n in range(len(queries)) if n != b]
            for batch in ([b, *others], [*others, b], [0, b], [b, b, 1], 5 * others + [b]):
                together, lses = run(batch, used_q)[batch.index(b)]
                what = f"of sequence {b} in {batch}, used {used_q}"
                assert torch.equal(together, out), f"out {what}"
                assert torch.equal(lses, lse), f"lse {what}"


def test_the_plan_says_so() -> None:
    q = strobe.ArraySpec((2, 9, 4, 64))
    assert "batch-invariant" in strobe.plan(q, q, q, batch_invariant=True)


def test_a_plan_says_what_rows_get() -> None:
    q = np.ones((1, 3, 2, 8), np.float32)
    said = "takes it: all rows of a sequence get the same bits here"
    assert said in strobe.why(q, q, q, batch_invariant=True)
    assert said in strobe.plan(q, q, q, batch_invariant=True)
    assert said not in strobe.why(q, q, q)
    assert said not in strobe.why(q, q, q, batch_invariant=True, backward=True)


@pytest.mark.amx
@pytest.mark.parametrize("option", [{}, {"softcap": 5.0}, {"dropout_p": 0.5}, {"dtype": "float32"}])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_a_plan_says_chunks_tiles_and_faster_kernels(option: dict[str, Any], head_dim: int) -> None:
    """Of whichever kernel takes it on this machine, with the flag and without."""
    options = dict(option)
    q = strobe.ArraySpec((2, 300, 4, head_dim), options.pop("dtype", "bfloat16"))

    def kernel_and_remark(**more: Any) -> tuple[str, str]:
        text = strobe.plan(q, q, q, **options, **more)
        (kernel,) = re.findall(r"^kernel +(\w+)", text, re.M)
        remarks = re.findall(rf"^  {kernel} +takes it: (.*)", text, re.M)
        return kernel, "".join(remarks)

    without, nothing = kernel_and_remark()
    assert nothing == kernel_and_remark(batch_invariant=True, backward=True)[1] == ""
    kernel, remark = kernel_and_remark(batch_invariant=True)
    parts = remark.split("; ")
    assert parts[0].endswith("same bits here, whatever they are computed with")
    if kernel == "cpu_amx":
        assert options == {}
        chunk = 512 if head_dim > 128 else 1024
        assert parts[1:] == [f"keys have chunks of {chunk}, and tiles 32 rows, decoded ones too"]
    elif without == kernel:
        assert parts[1:] == ["keys have chunks of 256"]
    else:  # a kernel that multiplies bf16, for which the flag is too much
        assert parts[1] == "keys have chunks of 256"
        assert parts[2].startswith("in float32 arithmetic, where prompts take several times as")
        assert without in parts[2]
