"""Masks as data on the GPU, through Python: packing against the CPU's, word by word; masks that are made there; out, lse and gradients against float64; and
words that are no mask, which have to lead nowhere (compute-sanitizer's memcheck sees more of that). A fifth of the problems have
their keys in a cache.

    python tests/gpu/masks.py [--count 300] [--first 0] [--device cpu]
    python tests/gpu/masks.py --hostile --count 8      words that are no mask, and nothing else, every third problem over a cache

`strobe check --device cuda` draws masks with every option of the C ABI. With --device cpu the test itself is tested, on the CPU's
kernels, which refuse what is no mask.
"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "python")]

from device import (  # first: ends the script where there is no GPU
    BIASED,
    BOTH_WAYS,
    CACHED,
    DEV,
    HALVES,
    TURING,
    narrowed,
)

# isort: split
import numpy as np
import strobe
import torch
from seeds import Tensor, check, run, twice
from strobe import _core
from strobe._problem import mask_fields, mask_layout


def draw_pairs(r: random.Random, shape: tuple[int, int, int, int]) -> Tensor:
    """Bools in regions that are seen, hidden or mixed, so that blocks of all kinds come; some rows see nothing."""
    density = r.choice((0.05, 0.3, 0.6, 0.9))
    q, k = (-(-n // side) for n, side in zip(shape[2:], (48, 80), strict=True))
    u = torch.rand(*shape[:2], q, k).repeat_interleave(48, 2).repeat_interleave(80, 3)[:, :, : shape[2], : shape[3]]
    half = (1 - density) / 2
    keep = torch.where(u < half, False, torch.where(u > 1 - density / 2, True, torch.rand(shape) < 0.5))
    keep[torch.rand(shape[:3]) < 0.02] = False
    return keep


def packs_alike(r: random.Random, keep: Tensor, intervals: Tensor | None, block: tuple[int, int]) -> None:
    """The words that a device packs are the CPU's, with room for all and with less."""
    batch, heads, n_q, n_k = keep.shape
    room = (r.randint(1, 40), 1) if r.random() < 0.5 else (10**6, 10**5)
    room = room[0], min(room)
    fields = {"batch": batch, "heads": heads, "seqlen_q": n_q, "seqlen_k": n_k, "head_dim": 8}
    fields |= mask_fields(mask_layout(block, batch > 1, heads > 1, *room), batch, heads, False)
    words = _core.mask_bytes(fields) // 4
    found = []
    for where in ("cpu", DEV):
        arrays = {"keep": keep.to(where)} | ({} if intervals is None else {"intervals": intervals.to(where)})
        packed = torch.full((words + 4,), 0x5A5A5A5A, dtype=torch.int32, device=where)
        first = -(packed.data_ptr() // 4) % 4
        numbers = {name: array.data_ptr() for name, array in arrays.items()}
        numbers |= {"packed": packed[first:].data_ptr(), "packed_bytes": 4 * words}
        _core.pack_mask(fields | ({"device": 1} if where != "cpu" else {}), numbers)
        found.append(packed[first : first + words].cpu())
    wrong = (found[0] != found[1]).nonzero().flatten()
    assert not len(wrong), f"word {wrong[0]} of {words} is {found[1][wrong[0]]}, expected {found[0][wrong[0]]}"


def on_device(r: random.Random, keep: Tensor, made: Any) -> Any:
    """The mask `made` where calls run: copied, or packed there, with room for any mask or for this one."""
    if (way := r.choice(("copied", "any", "this"))) == "copied":
        return made.to(DEV)
    room = (made.capacity, made.partial_capacity) if way == "this" else None
    mask = strobe.masks.from_bool(keep.to(DEV), block=made.block, capacity=room)
    assert mask.packed.device.type == DEV and mask.shape == made.shape
    return mask


def exact(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, bias: Tensor | None, softcap: float, dtype: Any
) -> tuple[Tensor, Tensor]:
    q, k, v = (x.to(dtype) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    wide = scores if dtype == torch.float64 else scores.float()
    if softcap:
        wide = softcap * torch.tanh(wide / softcap)
    if bias is not None:
        wide = wide + bias
    sees = seen.any(-1, keepdim=True)
    weights = wide.masked_fill(~seen & sees, -math.inf).softmax(-1).masked_fill(~sees, 0.0).to(dtype)
    lse = wide.double().masked_fill(~seen, -math.inf).logsumexp(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


def gradients(
    inputs: list[Tensor], seen: Tensor, softcap: float, mask: Any, causal: bool, deterministic: bool, dout: Tensor
) -> None:
    """inputs: q, k, v, and a bias where there is one."""

    def ours() -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        bias = leaves[3] if len(leaves) > 3 else None
        options = {"causal": causal, "mask": mask, "bias": bias, "softcap": softcap, "deterministic": deterministic}
        strobe.torch.attention(*leaves[:3], **options).backward(dout)
        return [x.grad for x in leaves]

    def plain(dtype: Any) -> list[Tensor]:
        leaves = [x.detach().to(dtype if n < 3 else torch.float64).requires_grad_() for n, x in enumerate(inputs)]
        bias = leaves[3] if len(leaves) > 3 else None
        exact(*leaves[:3], seen, bias, softcap, dtype)[0].backward(dout.to(dtype))
        return [x.grad for x in leaves]

    found = ours()
    if deterministic:
        assert all(torch.equal(x, y) for x, y in zip(found, ours(), strict=True)), "bits of gradients do not repeat"
    for name, x, y, wanted in zip(
        ("dq", "dk", "dv", "dbias"), found, plain(inputs[0].dtype), plain(torch.float64), strict=False
    ):
        check(name, x, wanted.double(), y, 3)


def one(seed: int) -> str:
    """A problem, twice. Returns its kernel."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    if seed % 10 == 9 and DEV == "cuda":
        return hostile(r)
    if seed % 5 == 3:
        return cached(r)
    dtype = r.choice(HALVES)
    heads_kv, group, dim = r.choice((1, 2)), r.choice((1, 2, 4)), narrowed(r.choice((32, 64, 80, 96, 112, 128, 192, 256)))
    n_q, n_k = r.choice(((1, 300), (7, 500), (64, 64), (130, 130), (129, 300), (300, 450), (700, 1100)))
    batch, heads = r.choice((1, 3)), heads_kv * group
    shape = (r.choice((1, batch)), r.choice((1, heads)), n_q, n_k)
    block = r.choice((64, 128, 256)), r.choice((64, 128, 256))
    keep = draw_pairs(r, shape)
    intervals = None
    if r.random() < 0.4:
        intervals = torch.randint(-50, n_k + 50, (*shape[:3], 4), dtype=torch.int32)
    packs_alike(r, keep, intervals, block)

    causal = r.random() < 0.4
    q, k, v = (
        torch.randn(batch, n, h, dim, device=DEV, dtype=dtype)
        for n, h in ((n_q, heads), (n_k, heads_kv), (n_k, heads_kv))
    )
    bias = torch.randn(1, heads, n_q, n_k, device=DEV) if r.random() < 0.3 else None
    softcap = r.choice((0.0, 0.0, 5.0))
    seen = keep.to(DEV).expand(batch, heads, n_q, n_k)
    if causal:
        seen = seen & torch.ones(n_q, n_k, device=DEV, dtype=torch.bool).tril(n_k - n_q)
    poisoned = r.random() < 0.3
    if poisoned:  # what nobody sees may hold anything
        unseen = ~seen.any(2).view(batch, heads_kv, group, n_k).any(2).transpose(1, 2)
        k[unseen], v[unseen] = math.nan, math.inf
    made = strobe.masks.from_bool(keep, block=block)
    mask = on_device(r, keep, made)

    options = {"causal": causal, "mask": mask, "bias": bias, "softcap": softcap}
    out, lse, kernel = twice(lambda: strobe.torch.attention(q, k, v, **options, return_lse=True))
    clean = k.nan_to_num(0.0), v.nan_to_num(0.0, 0.0, 0.0)
    wanted, other = (exact(q, *clean, seen, bias, softcap, t) for t in (torch.float64, dtype))
    check("out", out, wanted[0], other[0], 2)
    assert torch.allclose(lse.double(), wanted[1], atol=1e-3, rtol=1e-5), "lse"

    # With room for fewer, the last blocks of queries are NaN, and the others the same bits.
    sides = made.tiles()
    if shape[:2] == (1, 1) and sides.any():
        less = strobe.masks.from_bool(keep, block=block, capacity=int(np.count_nonzero(sides)) // 2 + 1).to(DEV)
        words = less.packed.cpu().numpy()
        lists = words[32 : 32 + 2 * len(sides)].reshape(-1, 2)
        lost = torch.from_numpy(np.repeat(lists[:, 1] < 0, block[0])[:n_q]).to(DEV)
        part = strobe.torch.attention(q, k, v, causal=causal, mask=less, bias=bias, softcap=softcap)
        assert part[:, lost].isnan().all(), "rows without room are not NaN"
        if poisoned:  # rows that it reaches beside hidden pairs are computed again pair by pair: which, visits decide
            rows = ~lost.cpu()
            check("rows with room", part[:, rows], wanted[0][:, rows], other[0][:, rows], 2)
        else:
            assert torch.equal(part[:, ~lost], out[:, ~lost]), "rows with room have other bits"

    widest = 256 if not TURING else BOTH_WAYS if bias is None else BIASED
    if dim <= widest and not poisoned:
        inputs = [q, k, v] + ([] if bias is None else [bias])
        gradients(inputs, seen, softcap, mask, causal, r.random() < 0.5, torch.randn_like(out))
    return kernel


def cached(r: random.Random) -> str:
    """Keys in a cache, in pages or not, appended to or not, with a bias or without: against float64; pages of blocks in no list
    have no number; and the same again under words that are no mask, which end."""
    dtype, causal = r.choice(HALVES), r.random() < 0.4
    heads_kv, group, dim = r.choice((1, 2, 8)), r.choice((1, 2, 4, 8)), narrowed(r.choice((64, 96, 128, 256)), CACHED)
    n_q, n_k, batch = r.choice(((1, 300, 20), (1, 2000, 3), (1, 9000, 1), (4, 2000, 3), (16, 600, 2), (100, 1000, 1), (200, 300, 2)))
    heads = heads_kv * group
    page = r.choice((16, 64, 256))
    columns = -(-n_k // page)
    room = columns * page
    shape = (r.choice((1, batch)), r.choice((1, heads)), n_q, room)
    block = r.choice((64, 128, 256)), r.choice((64, 128, 256))
    keep = draw_pairs(r, shape)
    made = strobe.masks.from_bool(keep, block=block)
    listed = torch.from_numpy(np.stack([[made.tiles(b, h) for h in range(shape[1])] for b in range(shape[0])])) != 0
    keys = listed.any(2).any(1).repeat_interleave(block[1], 1)[:, :room].expand(batch, room)  # in some list
    used = torch.randint(n_q, n_k + 1, (batch,), dtype=torch.int32)
    added = n_q if r.random() < 0.4 else 0
    table = torch.randperm(batch * columns).to(torch.int32).view(batch, columns)
    k, v = (torch.randn(batch * columns, page, heads_kv, dim, dtype=dtype, device=DEV) for _ in range(2))
    q, k_new, v_new = (torch.randn(batch, n_q, h, dim, dtype=dtype, device=DEV) for h in (heads, heads_kv, heads_kv))
    places = table.long().to(DEV)
    bias = None
    if r.random() < 0.3:
        bias = torch.randn(1, r.choice((1, heads)), r.choice((1, n_q)), room, device=DEV, dtype=r.choice((torch.float32, dtype)))
    options = {"seqused_k": (used - added).to(DEV), "causal": causal, "mask": on_device(r, keep, made), "bias": bias}
    if added:
        options |= {"k_new": k_new, "v_new": v_new}
    elif DEV == "cuda":  # (the CPU's door looks at all pages)
        table[~keys.reshape(batch, columns, page).any(2)] = -1
    options["block_table"] = table.to(DEV)

    def ours() -> tuple[Tensor, Tensor]:
        return strobe.attention_with_kvcache(q, k, v, return_lse=True, **options)

    out, lse, kernel = twice(ours)
    for b in range(batch):
        n, rows = int(used[b]), slice(b, b + 1)
        there = [x[places[b]].reshape(1, room, heads_kv, dim)[:, :n] for x in (k, v)]
        seen = keep[min(b, shape[0] - 1)][None, ..., :n].to(DEV).expand(1, heads, n_q, n)
        if causal:
            seen = seen & torch.ones(n_q, n, device=DEV, dtype=torch.bool).tril(n - n_q)
        own = None if bias is None else bias[..., :n]
        wanted, other = (exact(q[rows], *there, seen, own, 0.0, t) for t in (torch.float64, dtype))
        check("out", out[rows], wanted[0], other[0], 2)
        assert torch.allclose(lse[rows].double(), wanted[1], atol=1e-3, rtol=1e-5), "lse"
    if DEV == "cuda":
        words, size = options["mask"].packed, r.choice((40, 2**31 - 1))
        strange = torch.randint(-2, size, words.shape, dtype=torch.int32, device="cuda")
        words.copy_(torch.where(torch.rand(words.shape, device="cuda") < r.choice((0.01, 0.2, 1.0)), strange, words))
        ours()
        torch.cuda.synchronize()
    return kernel


def hostile(r: random.Random) -> str:
    """A mask whose words are anything: the launches end, `deterministic` ones too, whose turns may never come."""
    n_q, n_k = r.choice(((130, 300), (700, 1100)))
    block, dim = r.choice((64, 128, 256)), narrowed(r.choice((64, 96, 128, 192, 256)))
    mask = strobe.masks.from_bool(draw_pairs(r, (1, 2, n_q, n_k)), block=block).to("cuda")
    words, size = mask.packed, r.choice((40, 2**31 - 1))
    strange = torch.randint(-2, size, words.shape, dtype=torch.int32, device="cuda")
    words.copy_(torch.where(torch.rand(words.shape, device="cuda") < r.choice((0.01, 0.2, 1.0)), strange, words))
    q, k, v = (torch.randn(1, n, 2, dim, device="cuda", dtype=HALVES[0]) for n in (n_q, n_k, n_k))
    for x in (q, k, v):
        x.requires_grad_()
    strobe.torch.attention(q, k, v, mask=mask, deterministic=r.random() < 0.5).sum().backward()
    torch.cuda.synchronize()
    return "words that are no mask"


def only_hostile(seed: int) -> str:
    r = random.Random(seed)
    torch.manual_seed(seed)
    return cached(r) if seed % 3 == 2 or DEV == "cpu" else hostile(r)


if __name__ == "__main__":
    sys.exit(run(__doc__, 300, one, only_hostile))
