"""What each process of tests/python/test_distributed.py does, on gloo: it keeps what it finds in a
file, and the test looks at it. tests/gpu/ring_cases.py has the same cases on GPUs.

    python distributed_ranks.py FOLDER RANK RANKS
"""

from __future__ import annotations

import datetime
import importlib
import os
import random
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import strobe
from strobe import _ring, _ring_cost, distributed


def sliding(seqlen: int) -> torch.Tensor:
    """Intervals: the first keys, and a window."""
    row = torch.arange(seqlen)
    return torch.stack([0 * row, row.clamp(max=4), row - 40, row + 1], 1)


HEADS, HEADS_KV, HEAD_DIM = 24, 12, 32  # of which 1, 2, 3 and 4 ranks get as many each
SLOPES = torch.linspace(0, 1, HEADS)
SINKS = torch.linspace(-3, 3, HEADS)
SECONDS = 120  # the groups' time-out, but where a rank is late
LATE_SECONDS = 3
RANKS = (1, 2, 3, 4)
DOCUMENTS = (0, 30, 31, 31, 72, 80, 100, 139, 144, 170, 192)  # where they begin
# Names, arguments of strobe.distributed.attention, and seqlen.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "causal": ({"causal": True}, 192),
    "full": ({"method": "ring"}, 96),
    "ragged window": ({"causal": True, "window": (40, 0), "seqlen": 149}, 149),
    "ulysses": ({"causal": True, "method": "ulysses", "seqlen": 101}, 101),
    "deterministic": ({"causal": True, "deterministic": True, "softcap": 20.0}, 192),
    "few rows": ({"causal": True, "seqlen": 3}, 3),
    "chunks": ({"causal": True, "attention_chunk": 50, "seqlen": 149, "method": "ring"}, 149),
    "rows in use": ({"causal": True, "seqused": [101], "method": "ring"}, 192),
    "groups": ({"causal": True, "window": (70, 0), "ulysses": 2, "seqlen": 149}, 149),
    "blocks": (
        {"mask": torch.eye(10).bool().roll(3, 1), "mask_block": 20, "method": "ring"},
        192,
    ),
    "intervals in groups": ({"mask": sliding(149), "ulysses": 2, "seqlen": 149}, 149),
    "dropout": (
        {"causal": True, "dropout_p": 0.2, "dropout_seed": 5, "dropout_offset": 1, "seqlen": 149},
        149,
    ),
    # On GPUs blocks begin at multiples of 8 keys.
    "dropout in a ring": (
        {
            "causal": True,
            "dropout_p": 0.2,
            "dropout_seed": 6,
            "dropout_offset": 2,
            "method": "ring",
        },
        192,
    ),
    "ALiBi": ({"causal": True, "alibi_slopes": SLOPES, "method": "ring", "seqlen": 149}, 149),
    "sinks": ({"window": (40, 9), "sinks": SINKS, "method": "ring", "seqlen": 149}, 149),
    "sinks and ALiBi by all-to-all": (
        {"causal": True, "alibi_slopes": SLOPES, "sinks": SINKS, "method": "ulysses"},
        192,
    ),
    "documents": ({"causal": True, "method": "ring", "cu_seqlens": DOCUMENTS}, 192),
    "whole documents": ({"method": "ring", "cu_seqlens": DOCUMENTS, "documents": "whole"}, 192),
    "documents in groups": ({"causal": True, "cu_seqlens": DOCUMENTS, "ulysses": 2}, 192),
}


# Random problems, by their seeds, and how many ranks compute them.
DRAWN = {seed: 2 + seed % 3 for seed in range(280, 290)}


def runs(name: str, ranks: int) -> bool:
    """Whether so many ranks can be the case's groups."""
    inside: int = CASES[name][0].get("ulysses", 1)
    return ranks % inside == 0


def inputs(seqlen: int, device: Any = "cpu") -> list[torch.Tensor]:
    """q, k, v and dout, bfloat16, the same in every process and on every device."""
    generator = torch.Generator().manual_seed(seqlen)
    shapes = [(1, seqlen, n, HEAD_DIM) for n in (HEADS, HEADS_KV, HEADS_KV, HEADS)]
    return [torch.randn(shape, generator=generator).bfloat16().to(device) for shape in shapes]


def per_head(options: dict[str, Any], device: Any) -> dict[str, torch.Tensor]:
    """Of a case's options, those with a number for each head, on the device; sinks are a leaf."""
    names = (name for name in ("alibi_slopes", "sinks") if options.get(name) is not None)
    return {
        name: options[name].to(device, copy=True).requires_grad_(name == "sinks") for name in names
    }


def drawn_way(draw: random.Random, ranks: int) -> tuple[dict[str, Any], int]:
    """Options that say how the work is divided, and what divides the heads."""
    inside = draw.choice([n for n in range(1, ranks + 1) if ranks % n == 0])
    ways: list[tuple[dict[str, Any], int]] = [
        ({"method": "ring"}, 1),
        ({"method": "auto"}, 1),
        ({"method": "ulysses"}, ranks),
        ({"ulysses": inside}, inside),
    ]
    return draw.choice(ways)


class Drawn(NamedTuple):
    """A random problem of one sequence. given: q, k, v and dout; how: the options that say how the
    work is divided.
    """

    given: list[torch.Tensor]
    dlse: torch.Tensor | None
    options: dict[str, Any]
    how: dict[str, Any]


def drawn_problem(seed: int, ranks: int) -> Drawn:
    """Of so many ranks, the same in every process."""
    draw = random.Random(seed)
    how, inside = drawn_way(draw, ranks)
    heads_kv = draw.choice([1, 2, 4]) * inside
    heads = heads_kv * draw.choice([1, 2])
    batch, length = draw.choice([1, 2]), draw.choice([0, 1, 3, 64, 200, draw.randint(1, 300)])
    head_dim = draw.choice([8, 32, 64, 80, 128, 256])
    if head_dim > 80:  # the oracle's time
        length = (length + 1) // 2
    head_dim_v = draw.choice([head_dim, 24])
    torch.manual_seed(seed)
    options: dict[str, Any] = {
        "causal": draw.random() < 0.6,
        "window": draw.choice([(-1, -1), (None, None), (5, 5), (50, 0), (-1, 7), (40, None)]),
        "softcap": draw.choice([0.0, 0.0, 10.0]),
        # Scores, and with them the roundings of lse, no larger where rows are longer.
        "scale": draw.choice([None, None, 0.15 if head_dim > 80 else 0.3]),
        "alibi_slopes": torch.rand(heads) if draw.random() < 0.3 else None,
        "sinks": 3 * torch.randn(heads) if draw.random() < 0.4 else None,
    }
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
    shapes = ((heads, head_dim), (heads_kv, head_dim), (heads_kv, head_dim_v), (heads, head_dim_v))
    given = [torch.randn(batch, length, *shape).to(dtype) for shape in shapes]
    dlse = torch.randn(batch, heads, length) if draw.random() < 0.4 else None
    return Drawn(given, dlse, options, how | {"order": draw.choice([None, "plain", "zigzag"])})


def derived(leaves: list[Any], results: Any, dout: Any, dlse: Any) -> list[Any]:
    """out, lse and the leaves' gradients. results: the first two."""
    out, lse = results
    outputs, gradients = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
    return [out.detach(), lse.detach(), *torch.autograd.grad(outputs, leaves, gradients)]


def split(name: str, group: Any, device: Any = "cpu") -> list[torch.Tensor]:
    """The whole of a case's results, computed by the ranks of a group."""
    options, seqlen = CASES[name]
    given = inputs(seqlen, device)
    if "cu_seqlens" in options:
        given = [x[0] for x in given]
    return over_ranks(given, None, options, group)


def over_ranks(
    given: list[torch.Tensor], dlse: torch.Tensor | None, options: dict[str, Any], group: Any
) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv, and dsinks where there are sinks, of the whole."""
    order: dict[str, Any] = {"causal": options.get("causal", False), "group": group}
    order["order"] = options.get("order")
    packed: dict[str, Any] = {x: options[x] for x in ("cu_seqlens", "documents") if x in options}
    dims, whole = ((0, 1, 0, 0, 0), packed) if packed else ((1, 2, 1, 1, 1), {})
    if not packed:
        whole = {"seqlen": given[0].shape[1]}
    of_heads = per_head(options, given[0].device)
    leaves = [distributed.shard(x, **order, **packed).requires_grad_() for x in given[:3]]
    leaves += [x for x in of_heads.values() if x.requires_grad]
    dout = distributed.shard(given[3], **order, **packed)
    of_lse = None if dlse is None else distributed.shard(dlse, dim=dims[1], **order, **packed)
    both = distributed.attention(*leaves[:3], group=group, return_lse=True, **(options | of_heads))
    found = derived(leaves, both, dout, of_lse)
    of_sinks = found[len(dims) :]
    for x in of_sinks:
        dist.all_reduce(x, group=group)
    wholes = [
        distributed.unshard(x, dim=dim, **whole, **order)
        for x, dim in zip(found, dims, strict=False)
    ]
    return wholes + of_sinks


def by_one_device(given: list[torch.Tensor], dlse: Any, options: dict[str, Any]) -> list[Any]:
    """The same by calls of the library for all rows at once."""
    q, k, v, dout = given
    out, lse = strobe.attention(q, k, v, return_lse=True, **options)
    wanted = {"dlse": dlse, "return_dsinks": options.get("sinks") is not None}
    found: Any = strobe.attention_backward(dout, q, k, v, out, lse, **wanted, **options)
    return [out, lse, *found]


def single(name: str, device: Any = "cpu") -> list[torch.Tensor]:
    """A case's results by one device."""
    options, seqlen = CASES[name]
    apart = ("method", "seqlen", "ulysses", "documents", "cu_seqlens", "seqused", "deterministic")
    whole = {x: options[x] for x in options if x not in apart}
    whole |= {x: value.detach() for x, value in per_head(options, device).items()}
    given, numbers = inputs(seqlen, device), {"dtype": torch.int32, "device": device}
    if "seqused" in options:
        used = torch.tensor(options["seqused"], **numbers)
        whole |= {"seqused_q": used, "seqused_k": used}
    if "mask" in options:
        whole = {"mask": strobe.masks.from_bool(dense(options, seqlen)).to(device)}
    if "cu_seqlens" in options:
        begins, given = options["cu_seqlens"], [x[0] for x in given]
        lengths = tuple(b - a for a, b in pairwise(begins))
        whole |= _ring.packed_options(torch.tensor(begins, **numbers), lengths)
    return by_one_device(given, None, whole)


def dense(options: dict[str, Any], rows: int) -> torch.Tensor:
    """Bools (batch or 1, heads or 1, rows, keys) of a mask of all rows, given in any form."""
    mask, block = options["mask"], options.get("mask_block", 0)
    if mask.dtype == torch.bool:
        mask = mask[(None,) * (4 - mask.ndim)]
        number = torch.arange(rows) // (block or 1)
        return mask[:, :, number][..., number] if block else mask
    intervals = mask[(None,) * (3 - mask.ndim)]
    begins = options.get("cu_seqlens", [0, rows])
    keys = torch.arange(max((b - a for a, b in pairwise(begins)), default=0))
    begin, end = intervals[..., None, ::2], intervals[..., None, 1::2]
    return ((begin <= keys[:, None]) & (keys[:, None] < end)).any(-1)[:, None]


def model_gradients(group: Any, fsdp: bool = False) -> list[torch.Tensor]:
    """Loss and gradients of the example's GPT, of a text over the ranks of a group; fsdp: which
    have a part of each weight.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    char_gpt = importlib.import_module("char_gpt")

    torch.manual_seed(0)
    model, tokens = char_gpt.CharGPT(40), torch.randint(40, (2, 97))
    if group is None:
        loss = torch.nn.functional.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]
    order: dict[str, Any] = {"causal": True, "group": group}

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        return distributed.attention(*qkv, **order)

    for block in model.blocks:
        block.attention = attend
    mine, wanted = (distributed.shard(x, **order) for x in (tokens[:, :-1], tokens[:, 1:]))
    if fsdp:
        from torch.distributed.device_mesh import DeviceMesh  # here: GPUs' tests need neither
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(group, "cpu")
        for block in (*model.blocks, model):
            fully_shard(block, mesh=mesh)
    logits = model(mine, distributed.positions(96, **order))
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), wanted.flatten(), reduction="sum"
    )
    loss = loss / tokens[:, 1:].numel()
    if fsdp:
        # It takes the mean of gradients over ranks, and the loss is a sum over rows.
        (loss * dist.get_world_size(group)).backward()
        dist.all_reduce(loss := loss.detach(), group=group)
        return [loss, *(p.grad.full_tensor() for p in model.parameters())]
    loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters())]
    for x in found:
        dist.all_reduce(x, group=group)
    return found


def error_of(call: Any) -> str:
    """The text of the error that `call` ends with."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    """In one process of many."""
    folder, rank, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    _ring_cost.TWO_LOTS_FROM = 0  # of the heads, as large problems have them
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), ranks),
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=SECONDS),
    )
    groups = {n: dist.new_group(list(range(n))) for n in RANKS}
    late = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=LATE_SECONDS))
    found: dict[str, Any] = {}
    for n, group in groups.items():
        if rank >= n:
            continue
        for name in CASES:
            if runs(name, n):
                found[f"{name} {n}"] = split(name, group)
        found[f"deterministic {n} again"] = split("deterministic", group)
        found[f"model {n}"] = model_gradients(group)
        for seed in (x for x, count in DRAWN.items() if count == n):
            given, dlse, options, how = drawn_problem(seed, n)
            more = options | how | {"seqlen": given[0].shape[1]}
            found[f"drawn {seed}"] = over_ranks(given, dlse, more, group)
    if rank < 2:
        found["model with FSDP"] = model_gradients(groups[2], fsdp=True)
    found["model"] = model_gradients(None)

    # One row: the rank that has it cannot tell its own rows of a mask from all rows. By all-to-all
    # all refuse the mask, and none waits for the others.
    x = distributed.shard(torch.ones(1, 1, 4, 32))
    own = torch.ones(x.shape[1], 1, dtype=torch.bool)
    for method in ("ring", "ulysses"):

        def call(method: str = method, check: bool = True) -> Any:
            return distributed.attention(x, x, x, seqlen=1, mask=own, method=method, check=check)

        found[f"own mask, {method}, compared"] = error_of(call)
        found[f"own mask, {method}"] = error_of(lambda: call(check=False))

    # Blocks are of all rows, also where one rank has these.
    blocks = torch.ones(1, 1, dtype=torch.bool)
    found["blocks of one row"] = error_of(
        lambda: distributed.attention(
            *(x, x, x), seqlen=1, mask=blocks, mask_block=8, method="ulysses", check=True
        )
    )

    # Ranks that differ are told where all are asked.
    x = torch.zeros(1, 4 + (rank == 2), 2, 32)
    found["differ"] = error_of(lambda: distributed.attention(x, x, x, check=True))
    wanted: dict[str, Any] = {"return_lse": rank == 2}
    x = torch.zeros(1, 4, 2, 32)
    found["differ in results"] = error_of(
        lambda: distributed.attention(x, x, x, **wanted, check=True)
    )
    # A rank that comes too late, and one that is gone.
    if rank < 2:
        x = x[:, :4]

        def too_late() -> Any:
            return distributed.attention(x, x, x, group=late, method="ring")

        begin = time.monotonic()
        if rank == 1:
            time.sleep(LATE_SECONDS + 3)
        found["late"] = error_of(too_late)
        found["late seconds"] = time.monotonic() - begin
    begin = time.monotonic()
    if rank == 3:
        torch.save(found, folder / "3.pt")
        os._exit(0)
    x = torch.zeros(1, 4, 2, 32)
    found["gone"] = error_of(lambda: distributed.attention(x, x, x, method="ring"))
    found["gone seconds"] = time.monotonic() - begin
    torch.save(found, folder / f"{rank}.pt")
    os._exit(0)  # a group with a dead rank has no orderly end


if __name__ == "__main__":
    assert strobe.info().cpu_threads
    main()
