"""Random calls of every public function, most of them wrong in one to three arguments.

    python fuzz.py SEED FIRST COUNT

Each case is a function of SEED and its index alone. Its line is printed before it runs, so that
the last one is the culprit where the process ends. `test_fuzz` runs this in processes of its own.

What holds of every case: the process lives, and either there is a result, or an exception of
`strobe.Error`'s family whose text is short and names the argument as the caller does. Arguments
that are in order, however they are laid out, give the right result, in a mode of PyTorch's or after
a call whose arguments changed each other too.
"""

from __future__ import annotations

import importlib.util
import inspect
import random
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import numpy as np
import torch

import strobe
import strobe.torch
from late import Late
from strobe import _core, flash_attn, flash_attn_3

import shim
from odd import CHANGES, LAYOUTS, MADE, TENSORS, VALUES, LateTensor, NewTensors, NewTensorsBelow

if importlib.util.find_spec("flash_attn") is None:
    sys.path.append(str(shim.SOURCE))
from flash_attn import flash_attn_interface

# --------------------------------------------------------------------------------- right calls

SCALARS = ("causal", "window", "scale", "softcap", "dropout_p", "dropout_seed", "dropout_offset")
PLACES = ("dropout_first_query", "dropout_first_key", "dropout_first_head", "dropout_heads")
NOT_OF_OPERATORS = ("dropout_seed", "dropout_offset", "batch_invariant", "threads", *PLACES)
OURS = (
    *(*SCALARS, "max_seqlen_q", "max_seqlen_k", "batch_invariant", "threads", "attention_chunk"),
    *("window_signed", *PLACES),
)
DESCRIBED = (*OURS, "backward", "dlse", "delta", "grad_dtype", "accumulate", "deterministic")
FLASH = (
    "dropout_p",
    "softmax_scale",
    "causal",
    "window_size",
    "softcap",
    "deterministic",
    "return_attn_probs",
)


def dense(r: random.Random) -> dict[str, Any]:
    batch, heads_kv, head_dim = r.choice([0, 1, 1, 2, 2]), r.randint(1, 2), r.choice([8, 16])
    heads, seqlen_q, seqlen_k = heads_kv * r.randint(1, 2), r.randint(1, 5), r.randint(1, 5)
    return {
        "q": torch.randn(batch, seqlen_q, heads, head_dim),
        "k": torch.randn(batch, seqlen_k, heads_kv, head_dim),
        "v": torch.randn(batch, seqlen_k, heads_kv, head_dim),
        **({"alibi_slopes": torch.rand(heads)} if r.random() < 0.3 else {}),
    }


def packed(r: random.Random) -> dict[str, Any]:
    given = dense(r)
    batch = given["q"].shape[0]
    for name, x in (("q", "q"), ("k", "k")):
        length = given[x].shape[1]
        given[f"cu_seqlens_{name}"] = torch.arange(batch + 1, dtype=torch.int32) * length
        given[f"max_seqlen_{name}"] = length
    for name in "qkv":
        given[name] = given[name].flatten(0, 1)
    return given


def joined(r: random.Random, arguments: dict[str, Any], names: str) -> dict[str, Any]:
    """q, k and v, or k and v, in one tensor."""
    parts = [arguments["k"]] * len(names)
    whole = torch.stack(parts, -3)
    given = {
        names: whole,
        **{k: v for k, v in arguments.items() if k not in (*names, "alibi_slopes")},
    }
    if names == "qkv":
        given = {names: whole}
        if "cu_seqlens_k" in arguments:
            given |= {
                "cu_seqlens": arguments["cu_seqlens_k"],
                "max_seqlen": arguments["max_seqlen_k"],
            }
    return given


def with_gradients(r: random.Random) -> dict[str, Any]:
    given = dense(r)
    slopes = {"alibi_slopes": given["alibi_slopes"]} if "alibi_slopes" in given else {}
    out, lse = strobe.attention(given["q"], given["k"], given["v"], return_lse=True, **slopes)
    name = r.choice(["dlse", "delta", "", ""])
    more: dict[str, Any] = {name: torch.randn_like(lse)} if name else {}
    if r.random() < 0.3:
        more["grads"] = tuple(torch.empty_like(given[name]) for name in "qkv")
        more["accumulate"] = r.random() < 0.5
    return {"dout": torch.randn_like(out), **given, "out": out, "lse": lse, **more}


NUMBERS = ("seqused_q", "seqused_k", "q_position", "prefix")


def one_a_sequence(
    r: random.Random, given: dict[str, Any], names: tuple[str, ...] = NUMBERS
) -> dict[str, Any]:
    """`given`, maybe with arrays of one number for each sequence."""
    batch = len(given["cu_seqlens_q"]) - 1 if "cu_seqlens_q" in given else len(given["q"])
    for name in names:
        if r.random() < 0.15:
            given[name] = torch.randint(0, 2, (batch,), dtype=torch.int32)
    return given


def ours(r: random.Random) -> dict[str, Any]:
    return one_a_sequence(r, r.choice([dense, packed])(r))


def planned(r: random.Random) -> dict[str, Any]:
    """The same, with sequences: there is no plan for none."""
    while True:
        given = ours(r)
        if len(given.get("cu_seqlens_q", given["q"])) > ("cu_seqlens_q" in given):
            return given


def without(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: x for name, x in given.items() if name not in names}


def cached(r: random.Random) -> dict[str, Any]:
    """Of attention_with_kvcache: a cache of pages or none, maybe appended to, maybe turned."""
    batch, heads_kv, head_dim = r.choice([0, 1, 1, 2, 2]), r.randint(1, 2), r.choice([8, 16])
    entries, rows = r.randint(2, 4), r.randint(2, 5)
    given = {
        "q": torch.randn(batch, r.randint(1, 3), 2 * heads_kv, head_dim),
        "k": torch.randn(entries, rows, heads_kv, head_dim),
        "v": torch.randn(entries, rows, heads_kv, head_dim),
        "seqused_k": torch.randint(0, 2, (batch,), dtype=torch.int32),
    }
    if r.random() < 0.5:
        given["block_table"] = torch.randint(0, entries, (batch, 2), dtype=torch.int32)
    elif r.random() < 0.5:
        given["cache_batch_idx"] = torch.randperm(entries)[:batch].to(torch.int32)
    if r.random() < 0.3:
        given["leftpad"] = torch.zeros(batch, dtype=torch.int32)
    if r.random() < 0.5:
        given["k_new"] = torch.randn(batch, 1, heads_kv, head_dim)
        given["v_new"] = torch.randn(batch, 1, heads_kv, head_dim)
        if r.random() < 0.5:
            given["rotary_cos"] = given["rotary_sin"] = torch.randn(9, 4)
    if r.random() < 0.3:
        given["cu_seqlens_q"] = torch.arange(batch + 1, dtype=torch.int32) * given["q"].shape[1]
        given["q"] = given["q"].flatten(0, 1)
    return given


def renamed_cache(r: random.Random, table: str) -> dict[str, Any]:
    """The same for flash_attn's functions; those of FlashAttention-3 take packed queries."""
    given = cached(r)
    if table == "block_table" and "cu_seqlens_q" in given:
        batch = len(given.pop("cu_seqlens_q")) - 1
        given["q"] = given["q"].reshape(batch, -1 if batch else 2, *given["q"].shape[1:])
    if table == "page_table":
        pages, batch = given.get("block_table"), len(given["seqused_k"])
        if pages is not None and r.random() < 0.4:  # which rows of a larger table
            given["block_table"] = torch.cat((pages, torch.zeros(2, 2, dtype=torch.int32)))
            given["cache_batch_idx"] = torch.randperm(batch + 2)[:batch].to(torch.int32)
        if r.random() < 0.2:  # with a rotary embedding or without
            given["rotary_seqlens"] = torch.zeros(batch, dtype=torch.int32)
    names = {
        "k": "k_cache",
        "v": "v_cache",
        "k_new": "k",
        "v_new": "v",
        "seqused_k": "cache_seqlens",
        "leftpad": "cache_leftpad",
        "block_table": table,
    }
    return {names.get(name, name): x for name, x in given.items()}


def shared(r: random.Random) -> dict[str, Any]:
    """Without slopes, for those that have no argument for them."""
    return without(dense(r), "alibi_slopes")


def sdpa(r: random.Random) -> dict[str, Any]:
    given = shared(r)
    names = {"query": "q", "key": "k", "value": "v"}
    return {name: given[x].transpose(1, 2) for name, x in names.items()}


def jax_call(r: random.Random) -> dict[str, Any]:
    """NumPy's arrays, whose oddities JAX itself refuses: plain values are what is odd here, and
    lengths and positions of 64 bits.
    """
    given: dict[str, Any] = {name: x.numpy() for name, x in dense(r).items()}
    for name in ("query_seq_lengths", "key_value_seq_lengths", "prefix"):
        if r.random() < 0.2:
            given[name] = np.array([r.choice((0, 2, -(2**40), 2**33 + 1)) for _ in given["q"]], int)
    if r.random() < 0.2:
        given["q_position"] = np.zeros(len(given["q"]), int)
    return given


def lower_options(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """`given`, and what the function demands besides."""
    plain = {"dropout_p": 0.0, "softmax_scale": 0.3, "causal": True, "softcap": 0.0}
    plain |= {"window_size_left": -1, "window_size_right": -1, "num_splits": 0}
    for p in inspect.signature(function).parameters.values():
        if p.default is p.empty and p.name not in given:
            given[p.name] = plain.get(p.name, False if p.annotation == "bool" else None)
    return given


def lower(name: str) -> tuple[Callable[..., Any], Callable[[random.Random], Any], tuple[str, ...]]:
    """A row of FUNCTIONS for one of `flash_attn_interface`, or of its flash_attn_gpu."""
    owner: Any = flash_attn_interface if name[0] == "_" else flash_attn_interface.flash_attn_gpu
    function = getattr(owner, name)
    backward, is_packed = "bwd" in name or "backward" in name, "varlen" in name

    def right(r: random.Random) -> dict[str, Any]:
        if name == "fwd_kvcache":
            return lower_options(function, without(renamed_cache(r, "block_table"), "cu_seqlens_q"))
        given = packed(r) if is_packed else dense(r)
        if backward:
            slopes = given.get("alibi_slopes")
            lengths = {x: given[x] for x in given if "seqlen" in x}
            options = {"alibi_slopes": slopes, "scale": 0.3, "causal": True, **lengths}
            q, k, v = (given[x] for x in "qkv")
            out, lse = strobe.attention(q, k, v, return_lse=True, **options)
            given |= {"dout": torch.randn_like(out), "out": out, "softmax_lse": lse}
            given |= {f"d{x}": torch.empty_like(given[x]) for x in "qkv" if r.random() < 0.8}
            if r.random() < 0.3:
                given |= {"dropout_p": 0.5, "rng_state": torch.tensor([3, 4])}
        else:
            if name[0] != "_" and r.random() < 0.5:
                given["out"] = torch.empty_like(given["q"])
            if is_packed and r.random() < 0.3:
                sequences = len(given["cu_seqlens_k"]) - 1
                given["block_table"] = torch.zeros(sequences, 3, dtype=torch.int32)
                given["k"], given["v"] = torch.randn(2, 1, 2, *given["k"].shape[1:])
                given["max_seqlen_k"] = 5
            elif r.random() < 0.3:
                given |= {"dropout_p": 0.5, "return_softmax": True}
        return lower_options(function, given)

    return function, right, tuple(inspect.signature(function).parameters)


def combined(r: random.Random) -> dict[str, Any]:
    given = partial_results(r)
    return {"out_partial": given["outs"], "lse_partial": given["lses"].transpose(-1, -2)}


def partial_results(r: random.Random) -> dict[str, Any]:
    shape = [r.randint(1, 3) for _ in range(r.choice([3, 4]))]
    shape[r.randrange(len(shape) - 1)] -= r.random() < 0.2  # no parts, no sequences or no rows
    return {
        "outs": torch.randn(*shape, 8),
        "lses": torch.randn(*shape[:-2], shape[-1], shape[-2]),
    }


def forward(r: random.Random) -> dict[str, Any]:
    given = of_float8(r, ours(r))
    if r.random() < 0.3:
        dtype = torch.bfloat16 if given["q"].itemsize == 1 else given["q"].dtype
        given["out"] = torch.empty_like(given["q"], dtype=dtype)
    return given


def mask(r: random.Random) -> dict[str, Any]:
    return {"batch": 1, "heads": 2, "seqlen_q": 3, "seqlen_k": 4, "dropout_p": 0.5}


def floats_to_quantise(r: random.Random) -> dict[str, Any]:
    shape = (r.randint(0, 2), r.randint(0, 3), r.randint(1, 2), 32)
    given: dict[str, Any] = {"x": torch.randn(shape)}
    if r.random() < 0.7:
        given["form"] = r.choice(("int8", "float8_e4m3fn", "float8_e5m2", "q8_0", "q4_0"))
    if given.get("form") not in ("q8_0", "q4_0") and r.random() < 0.5:
        given["scale"] = r.choice(("row", "head", "batch_head", "tensor"))
    if r.random() < 0.3:
        given["hadamard"] = True
    if given.get("form") not in ("q8_0", "q4_0") and given.get("scale", "row") == "row":
        given |= r.choice(({}, {"scale_rows": r.randint(1, 4)}))
    return given


def of_float8(r: random.Random, given: dict[str, Any]) -> dict[str, Any]:
    """Now and then q, k and v as float8, with scales of each sequence's key heads or without."""
    if r.random() < 0.8 or any(given[x].dim() < 3 for x in "qkv"):
        return given
    kv = r.choice((torch.float8_e4m3fn, torch.float8_e5m2))
    dtypes = {"q": torch.float8_e4m3fn} | dict.fromkeys(("k", "v", "k_new", "v_new"), kv)
    for name in dtypes.keys() & given.keys():
        given[name] = given[name].float().to(dtypes[name])
    if r.random() < 0.9:  # codes are not rotated
        given = {name: x for name, x in given.items() if not name.startswith("rotary_")}
    offsets = given.get("cu_seqlens_q")
    batch = given["q"].shape[0] if offsets is None else len(offsets) - 1
    heads_kv = given["k"].shape[-2]
    names = r.choice(((), ("q_scale",), ("k_scale", "v_scale"), ("q_scale", "k_scale", "v_scale")))
    return given | {name: torch.rand(batch, heads_kv) for name in names}


def in_codes(r: random.Random, given: dict[str, Any]) -> dict[str, Any]:
    """Now and then the keys or values of a cache, or both, as codes: each in a form of its own."""
    if r.random() < 0.7 or any(given[x].element_size() == 1 or given[x].dim() != 4 for x in "kv"):
        return given
    scale: Any = r.choice(("row", "head", "tensor"))
    for name in "kv":
        form: Any = r.choice((None, "int8", "float8_e4m3fn", "float8_e5m2", "q8_0", "q4_0"))
        blocks = form in ("q8_0", "q4_0")
        if form is None or not 1 <= given[name].shape[3] <= 256:
            continue
        if not blocks:
            given[name], given[f"{name}_scale"] = strobe.quantize(
                given[name].contiguous(), form, scale=scale
            )
        elif given[name].shape[3] % 32 == 0:
            given[name], _ = strobe.quantize(given[name].contiguous(), form)
    return given


def quantised(r: random.Random) -> dict[str, Any]:
    given = floats_to_quantise(r)
    codes, scale = strobe.quantize(**given)
    form = given.get("form")
    return {"codes": codes, "scale": scale, "form": form if form in ("q8_0", "q4_0") else None}


def drawn(r: random.Random) -> dict[str, Any]:
    keep = np.array([[r.random() < 0.5 for _ in range(r.randint(1, 9))]] * r.randint(1, 9))
    return {"mask": strobe.masks.from_bool(keep)}


def made_mask(r: random.Random, q: torch.Tensor, seqlen_k: int) -> strobe.masks.Mask:
    """A mask as data for these queries and so many keys, for all sequences and heads or each."""
    batch, seqlen_q, heads = q.shape[:3]
    shape = (r.choice((1, batch)) or 1, r.choice((1, heads)), seqlen_q, seqlen_k)
    return strobe.masks.from_bool(np.random.default_rng(r.getrandbits(32)).random(shape) < 0.5)


def masked_cache(r: random.Random) -> dict[str, Any]:
    given = cached(r)
    if "cu_seqlens_q" not in given and r.random() < 0.3:
        rows = given["k"].shape[1] * (2 if "block_table" in given else 1)
        given["mask"] = made_mask(r, given["q"], rows)
    return given


def flexed(r: random.Random) -> dict[str, Any]:
    names = {"q": "query", "k": "key", "v": "value"}
    given = dense(r)
    mask = {}
    if r.random() < 0.5:
        mask["block_mask"] = made_mask(r, given["q"], given["k"].shape[1])
    return {names[x]: given[x].transpose(1, 2) for x in names} | {"enable_gqa": True} | mask


SINKS = ("s_aux", "learnable_sink")


def with_sinks(right: Callable[[random.Random], Any]) -> Callable[[random.Random], Any]:
    """Right arguments, now and then with attention sinks, by either of their names."""

    def drawn_with(r: random.Random) -> dict[str, Any]:
        given: dict[str, Any] = right(r)
        if r.random() < 0.2:
            heads = given["qkv" if "qkv" in given else "q"].shape[-2]
            given[r.choice(SINKS)] = torch.randn(heads).to(r.choice((torch.float32, torch.half)))
        return given

    return drawn_with


# name: (function, right arguments, further options)
FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[[random.Random], Any], tuple[str, ...]]] = {
    "attention": (strobe.attention, forward, (*OURS, "return_lse", "out")),
    "attention_backward": (
        strobe.attention_backward,
        lambda r: one_a_sequence(r, with_gradients(r)),
        (*OURS, "deterministic", "grads", "dlse", "delta", "grad_dtype", "accumulate"),
    ),
    "plan": (strobe.plan, planned, DESCRIBED),
    "why": (strobe.why, planned, DESCRIBED),
    "torch.attention": (
        strobe.torch.attention,
        lambda r: one_a_sequence(r, r.choice((dense, packed))(r)),
        (*(name for name in OURS if name not in NOT_OF_OPERATORS), "deterministic", "return_lse"),
    ),
    "torch.flex_attention": (
        strobe.torch.flex_attention,
        flexed,
        ("block_mask", "scale", "return_lse", "bias"),
    ),
    "draw": (strobe.draw, drawn, ()),
    "dropout_mask": (strobe.dropout_mask, mask, ("dropout_seed", "dropout_offset")),
    "flash_attn_func": (flash_attn.flash_attn_func, dense, FLASH),
    "flash_attn_kvpacked_func": (
        flash_attn.flash_attn_kvpacked_func,
        lambda r: joined(r, dense(r), "kv"),
        FLASH,
    ),
    "flash_attn_qkvpacked_func": (
        flash_attn.flash_attn_qkvpacked_func,
        lambda r: joined(r, dense(r), "qkv"),
        FLASH,
    ),
    "flash_attn_varlen_func": (flash_attn.flash_attn_varlen_func, packed, FLASH),
    "flash_attn_varlen_kvpacked_func": (
        flash_attn.flash_attn_varlen_kvpacked_func,
        lambda r: joined(r, packed(r), "kv"),
        FLASH,
    ),
    "flash_attn_varlen_qkvpacked_func": (
        flash_attn.flash_attn_varlen_qkvpacked_func,
        lambda r: joined(r, packed(r), "qkv"),
        FLASH,
    ),
    "attention_with_kvcache": (
        strobe.attention_with_kvcache,
        lambda r: in_codes(r, of_float8(r, masked_cache(r))),
        (*OURS[:4], "max_seqlen_q", "batch_invariant", "threads", "attention_chunk", "out",
         "out_dtype", "rotary_interleaved", "return_lse"),
    ),
    "quantize": (
        strobe.quantize, floats_to_quantise,
        ("scale_dtype", "heads_kv", "scale_rows", "hadamard", "threads"),
    ),
    "dequantize": (strobe.dequantize, quantised, ("dtype", "hadamard", "threads")),
    "merge": (strobe.merge, partial_results, ("out", "lse", "sinks", "out_dtype", "threads")),
    "flash_attn_with_kvcache": (
        flash_attn.flash_attn_with_kvcache,
        lambda r: renamed_cache(r, "block_table"),
        (*FLASH[1:5], "rotary_interleaved", "num_splits", "cache_seqlens", "return_softmax_lse"),
    ),
    "flash_attn_3.flash_attn_func": (
        flash_attn_3.flash_attn_func,
        shared,
        (*FLASH[1:], "attention_chunk", "qv", "q_descale", "num_splits", "pack_gqa", "sm_margin"),
    ),
    "flash_attn_3.flash_attn_combine": (
        flash_attn_3.flash_attn_combine, combined, ("out", "out_dtype"),
    ),
    "flash_attn_3.flash_attn_with_kvcache": (
        flash_attn_3.flash_attn_with_kvcache,
        lambda r: renamed_cache(r, "page_table"),
        (*FLASH[1:5], "rotary_interleaved", "cache_seqlens", "max_seqlen_q", "attention_chunk",
         "q_descale", "scheduler_metadata", "rotary_seqlens", "cache_batch_idx", "num_splits",
         "pack_gqa", "sm_margin"),
    ),
    "flash_attn_3.flash_attn_varlen_func": (
        flash_attn_3.flash_attn_varlen_func,
        lambda r: one_a_sequence(r, without(packed(r), "alibi_slopes"), ("seqused_q", "seqused_k")),
        (*FLASH[1:], "attention_chunk", "qv"),
    ),
    "torch.why": (
        strobe.torch.why, sdpa, ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
    ),
    **{f"flash_attn_interface.{name}": lower(name)
       for name in dir(flash_attn_interface)
       if re.fullmatch("_flash_attn_(varlen_)?(forward|backward)", name)},
    **{f"flash_attn_gpu.{name}": lower(name)
       for name in flash_attn_interface.flash_attn_gpu.__all__},
}  # fmt: skip
for key, (call_of, right_of, more_of) in FUNCTIONS.items():
    if "s_aux" in inspect.signature(call_of).parameters:
        FUNCTIONS[key] = (call_of, with_sinks(right_of), (*more_of, *SINKS))
if importlib.util.find_spec("jax") is not None:
    import strobe.jax

    FUNCTIONS["jax.attention"] = (
        strobe.jax.attention,
        jax_call,
        tuple(inspect.signature(strobe.jax.attention).parameters),
    )

# ------------------------------------------------------------------------------------- one case


def is_plain(x: Any) -> bool:
    return type(x) is torch.Tensor and x.layout is torch.strided and not x.is_nested


def readable(given: dict[str, Any], odd: dict[str, str]) -> list[str]:
    """The tensors that are as they should be."""
    return [
        name
        for name, x in given.items()
        if is_plain(x) and odd.get(name, "layout").startswith("layout")
    ]


def draw_layouts(r: random.Random, given: dict[str, Any], odd: dict[str, str]) -> None:
    """Lays tensors out in other ways, which changes no result."""
    for argument, x in given.items():
        if argument not in odd and is_plain(x) and x.ndim > 0 and x.numel() > 0:
            kind = r.choice([*LAYOUTS, *[""] * 12])
            if kind:
                given[argument] = LAYOUTS[kind](r, x)
                odd[argument] = f"layout {kind}"


# What is written to, where it is given.
WRITTEN = ("out", "dq", "dk", "dv", "k_cache", "v_cache", "k", "v", "k_new", "v_new", "dout")


def draw_alias(r: random.Random, given: dict[str, Any], odd: dict[str, str]) -> None:
    """Gives one tensor as two arguments, one of which is written to, or views that overlap."""
    plain = [x for x in readable(given, odd) if given[x].is_floating_point()]
    targets = [name for name in ("out", *WRITTEN) if name in plain or name == "out"]
    if not plain or (targets == ["out"] and "out" not in given):
        return
    target, source = r.choice(targets), r.choice(plain)
    if target == source or target not in given:
        return
    x = given[source]
    if r.random() < 0.3 and x.is_contiguous() and x.numel() > 1:
        whole = torch.cat([x.flatten(), x.flatten()])
        given[source] = whole[: x.numel()].view(x.shape)
        x = whole[x.numel() // 2 :][: x.numel()].view(x.shape)
    given[target] = x
    odd[target] = odd[source] = f"alias {source} {target}"


# Those that take arrays of any kind.
ANY_KIND = ("attention", "attention_backward", "attention_with_kvcache", "merge", "plan", "why")


def draw_late_change(
    r: random.Random, name: str, given: dict[str, Any], odd: dict[str, str]
) -> None:
    """Has one argument change another while it is read."""
    plain = [x for x in readable(given, odd) if given[x].numel() > 0]
    if len(plain) < 2:
        return
    changed, changer = r.sample(plain, 2)
    kind, target = r.choice(list(CHANGES)), given[changed].clone()

    def change() -> None:
        with suppress(Exception):  # PyTorch has no such change of this tensor
            CHANGES[kind](target)

    given[changed] = target
    if name in ANY_KIND and given[changer].dtype in (torch.float32, torch.int32):
        given[changer] = Late(given[changer].numpy(), change)
    else:
        given[changer] = given[changer].clone().as_subclass(LateTensor)
        given[changer].change = change
    odd[changer] = f"late, {changed} {kind}"


def draw_mode(seed: int, index: int) -> AbstractContextManager[Any]:
    """A mode of PyTorch's to be called in: nearly always none."""
    r = random.Random(f"mode {seed}:{index}")
    if r.random() >= 0.1:
        return nullcontext()
    kind = r.choice(list(MADE))

    def made(x: Any) -> Any:
        try:
            return MADE[kind](x)
        except Exception:  # PyTorch has no such tensor
            return x

    below: Any = r.choice([NewTensors, NewTensorsBelow])
    mode: AbstractContextManager[Any] = below(made)
    return mode


def draw(seed: int, index: int) -> tuple[str, dict[str, Any], dict[str, str]]:
    """A function's name, its arguments, and which of them are odd in what way."""
    r = random.Random(f"{seed}:{index}")
    torch.manual_seed(index)
    name = r.choice(list(FUNCTIONS))
    _, right, options = FUNCTIONS[name]
    given: dict[str, Any] = right(r)
    odd: dict[str, str] = {}
    if r.random() < 0.1:
        draw_late_change(r, name, given, odd)
        return name, given, odd
    for _ in range(r.choice([0, 1, 1, 1, 2, 3])):
        argument = r.choice([*given, *options])
        if argument == "block_table" and given.get(argument) is None:
            continue  # with it k and v have other axes
        if argument in odd:  # to make an odd tensor of an odd one is PyTorch's to fail at
            continue
        # Sizes that are right but large would be computed: that takes memory and time.
        if isinstance(given.get(argument), torch.Tensor) and r.random() < 0.85:
            kind = r.choice(list(TENSORS))
            try:
                given[argument] = TENSORS[kind](r, given[argument])
            except Exception:  # PyTorch has no such tensor of this shape or dtype
                continue
            odd[argument] = kind
        else:
            which = r.randrange(len(VALUES))
            given[argument] = VALUES[which]()
            odd[argument] = f"value {which}"
    draw_layouts(r, given, odd)
    if r.random() < 0.1:
        draw_alias(r, given, odd)
    if r.random() < 0.1:
        draw_late_change(r, name, given, odd)
    if r.random() < 0.05:
        rows = [torch.randn(3, 2, 8), torch.randn(1, 2, 8)]
        given |= {key: torch.nested.nested_tensor(rows) for key in given if key in "qkv"}
        odd |= {key: "nested" for key in given if key in "qkv"}
    return name, given, odd


# Names of the layers beneath, and what only PyTorch says.
FOREIGN = re.compile(
    r"Internal error|NULL|window_(left|right)\b|\bstride of\b|\btotal_[qk] =|(?<!\.)has_[a-z]"
)
FLASH_FOREIGN = re.compile(r"(?<!softmax_)\bscale\b|\bwindow\b|\bthreads\b|dropout_(seed|offset)")


def judge(name: str, odd: dict[str, str], error: Exception) -> str:
    """What is wrong with this answer; "" if nothing."""
    text = str(error)
    if not isinstance(error, strobe.Error) or isinstance(error, strobe.InternalError):
        return f"is a {type(error).__name__}"
    if len(text.encode()) > 400:
        return f"has {len(text.encode())} bytes"
    if FOREIGN.search(text) or (name.startswith("flash") and FLASH_FOREIGN.search(text)):
        return "says what the caller did not"
    if any(kind.startswith(("late", "mode")) for kind in odd.values()):
        return ""  # whose fault it is depends on what was read first
    # (What does not fit a mask may be told of the mask.)
    names = {*odd, "mask", "block_mask", *(["dq", "dk", "dv"] if "grads" in odd else [])}
    if not isinstance(error, strobe.Unsupported) and not any(
        re.search(rf"(?<!\w){re.escape(argument)}(?!\w)", text) for argument in names
    ):
        return f"names none of {sorted(names)}"
    return ""


def copied(x: Any) -> Any:
    """With the same numbers, contiguous; an argument that changes another changes none."""
    if isinstance(x, tuple):
        return tuple(map(copied, x))
    if isinstance(x, Late):
        return Late(x.array.copy())
    if isinstance(x, LateTensor):
        return x.as_subclass(torch.Tensor).clone().as_subclass(LateTensor)
    return x.clone(memory_format=torch.contiguous_format) if is_plain(x) else x


def differences(found: Any, wanted: Any) -> str:
    """What is wrong with results, of which a second call gave the right ones; "" if nothing."""
    if isinstance(found, list):  # flash_attn_gpu's: what follows out and lse is not always written
        found, wanted = found[:1], wanted[:1]
    if isinstance(found, list | tuple):
        return "".join(differences(x, y) for x, y in zip(found, wanted, strict=True))
    if isinstance(found, torch.Tensor | np.ndarray) and found.dtype not in (torch.bool, np.bool_):
        x, y = torch.as_tensor(found).double(), torch.as_tensor(wanted).double()
        if x.shape != y.shape:
            return f"has shape {tuple(x.shape)}, expected {tuple(y.shape)}"
        if not torch.allclose(x, y, 1e-4, 1e-5, equal_nan=True):
            return f"differs by {(x - y).abs().max()}"
    return ""


def run(seed: int, index: int) -> str:
    """Runs a case; what is wrong with its answer, or ""."""
    name, given, odd = draw(seed, index)
    print(f"case {index}: {name} with {odd}", flush=True)
    function: Callable[..., Any] = FUNCTIONS[name][0]
    if name.startswith("flash_attn"):
        q = torch.ones(1, 2, 2, 8)
        for _ in range(3):  # the short way is open
            flash_attn.flash_attn_func(q, q + 1, q + 2)
    mode = draw_mode(seed, index)
    kept = all(kind.startswith(("layout", "late")) for kind in odd.values())
    copies = {argument: copied(x) for argument, x in given.items()} if kept else {}
    if not isinstance(mode, nullcontext):
        odd["mode"] = f"mode {type(mode).__name__}"
    wrong = answer(name, given, odd, index, mode, copies)
    return wrong or (later(function, copies, index) if copies else "")


def answer(
    name: str,
    given: dict[str, Any],
    odd: dict[str, str],
    index: int,
    mode: AbstractContextManager[Any],
    copies: dict[str, Any],
) -> str:
    """What is wrong with the answer to a call in a mode. copies: of arguments that are in order."""
    function = FUNCTIONS[name][0]
    try:
        torch.manual_seed(index)
        with mode:
            found = function(**given)
        if copies and not any(kind.startswith("late") for kind in odd.values()):
            torch.manual_seed(index)
            return differences(found, function(**{x: copied(y) for x, y in copies.items()}))
    except Exception as error:
        if "mode" in odd and not isinstance(error, strobe.Error):
            return ""  # PyTorch's own functions see the mode too
        if not isinstance(error, strobe.Error) and re.search("allocate|memory", str(error)):
            return ""  # for a result: NumPy's error or PyTorch's
        wrong = judge(name, odd, error)
        return f"{wrong}: {str(error)[:1000]}" if wrong else ""
    return ""


def later(function: Callable[..., Any], copies: dict[str, Any], index: int) -> str:
    """What is wrong with the next call of this kind, which nobody disturbs."""
    found = []
    for _ in range(2):
        torch.manual_seed(index)
        try:
            found.append(function(**{x: copied(y) for x, y in copies.items()}))
        except strobe.Error as error:
            found.append(str(error))
        _core.forget()  # of what was kept the second call knows nothing
    if isinstance(found[0], str) or isinstance(found[1], str):
        return "" if found[0] == found[1] else f"is {found[0]!r:.200} and then {found[1]!r:.200}"
    return differences(*found)


def main() -> int:
    """Prints the cases, each followed by what is wrong with it."""
    seed, first, count = map(int, sys.argv[1:])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    failures = 0
    for index in range(first, first + count):
        wrong = run(seed, index)
        if wrong:
            failures += 1
            print(f"  WRONG: {wrong}", flush=True)
    return 3 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
