"""Random calls of every public function, most of them wrong in one to three arguments.

    python fuzz.py SEED FIRST COUNT

Each case is a function of SEED and its index alone. Its line is printed before it runs, so that
the last one is the culprit where the process ends. `test_fuzz` runs this in processes of its own.

What holds of every case: the process lives, and either there is a result, or an exception of
`strobe.Error`'s family whose text is short and names the argument as the caller does.
"""

from __future__ import annotations

import random
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import strobe
from strobe import flash_attn, flash_attn_3

from producer import Producer

Make = Callable[[random.Random, Any], Any]

# ------------------------------------------------------------------------------------ odd tensors


class Subclass(torch.Tensor):  # type: ignore[misc]
    """Ordinary."""


class Wrapper(torch.Tensor):  # type: ignore[misc]
    """No memory of its own, and no operators."""

    @staticmethod
    def __new__(cls: Any, x: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return NotImplemented


class Lies(np.ndarray[Any, Any]):
    """Says that it is larger than it is."""

    @property  # type: ignore[misc]
    def shape(self) -> Any:
        return tuple(1000 * n for n in super().shape)


class Broken:
    """Raises at whatever is asked."""

    def _raise(self, *arguments: Any, **named: Any) -> Any:
        raise RuntimeError("x" * 5000)

    __float__ = __index__ = __bool__ = __iter__ = __len__ = __dlpack__ = __dlpack_device__ = _raise
    __repr__ = _raise
    shape = property(_raise)


class LongName:
    """Its repr has a megabyte."""

    def __repr__(self) -> str:
        return "é" * 1_000_000


LongName.__name__ = "L" * 5000


def freed(x: Any) -> Any:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def freed_slice(x: Any) -> Any:
    """At an offset into no memory."""
    whole = torch.cat([x, x]) if x.ndim else x.expand(4).clone()
    part = whole[whole.shape[0] // 2 :]
    whole.untyped_storage().resize_(0)
    return part


def fake(x: Any) -> Any:
    with FakeTensorMode():
        return torch.empty(x.shape, dtype=x.dtype)


def fake_slice(x: Any) -> Any:
    with FakeTensorMode():
        return torch.empty((2 * x.shape[0], *x.shape[1:]), dtype=x.dtype)[x.shape[0] :]


def with_axis(x: Any, axis: int, length: int) -> Any:
    shape = list(x.shape)
    shape[axis] = length
    return torch.zeros(shape, dtype=x.dtype)


def huge(x: Any, axis: int) -> Any:
    """More rows than any kernel counts, all of them the first."""
    return x.narrow(axis, 0, 1).expand([2**40 if a == axis else -1 for a in range(x.ndim)])


TENSORS: dict[str, Make] = {
    "nested": lambda r, x: torch.nested.nested_tensor(list(x.unbind(0))),
    "jagged": lambda r, x: torch.nested.nested_tensor(list(x.unbind(0)), layout=torch.jagged),
    "coo": lambda r, x: x.to_sparse(),
    "csr": lambda r, x: x.reshape(x.shape[0], -1).to_sparse_csr(),
    "mkldnn": lambda r, x: x.float().to_mkldnn(),
    "quantised": lambda r, x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    "meta": lambda r, x: x.to("meta"),
    "fake": lambda r, x: fake(x),
    "fake slice": lambda r, x: fake_slice(x),
    "subclass": lambda r, x: x.as_subclass(Subclass),
    "wrapper": lambda r, x: Wrapper(x),
    "masked": lambda r, x: torch.masked.masked_tensor(x, torch.ones_like(x, dtype=torch.bool)),
    "negative bit": lambda r, x: torch._neg_view(x),
    "conjugate": lambda r, x: x.to(torch.complex64).conj(),
    "imaginary": lambda r, x: x.to(torch.complex64).conj().imag,
    "zero tensor": lambda r, x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "freed": lambda r, x: freed(x),
    "freed slice": lambda r, x: freed_slice(x),
    "batched": lambda r, x: torch._C._functorch._add_batch_dim(x[None], 0, 1),
    "functional": lambda r, x: torch._to_functional_tensor(x),
    "uninitialised": lambda r, x: torch.nn.UninitializedParameter(),
    "parameter": lambda r, x: torch.nn.Parameter(x, requires_grad=x.is_floating_point()),
    "gradient": lambda r, x: x.clone().float().requires_grad_(),
    "dtype": lambda r, x: x.to(
        r.choice([torch.float64, torch.int64, torch.bool, torch.float16, torch.float8_e5m2])
    ),
    "rank": lambda r, x: r.choice([x[0], x[None], x.reshape(-1), x.reshape(-1)[0]]),
    "empty axis": lambda r, x: with_axis(x, r.randrange(x.ndim), 0),
    "longer axis": lambda r, x: with_axis(x, r.randrange(x.ndim), r.choice([7, 300])),
    "swapped axes": lambda r, x: x.transpose(0, -1) if x.ndim < 3 else x.transpose(-2, -3),
    "huge axis": lambda r, x: huge(x, r.randrange(x.ndim)) if x.numel() else x,
    "broadcast": lambda r, x: torch.zeros((), dtype=x.dtype).expand(x.shape),
    "strided": lambda r, x: torch.stack([x, x], -1)[..., 0],
    "numpy": lambda r, x: x.numpy(),
    "reversed": lambda r, x: np.flip(x.numpy(), r.randrange(x.ndim)),
    "masked array": lambda r, x: np.ma.masked_array(x.numpy()),
    "lies": lambda r, x: x.numpy().view(Lies),
    "read-only": lambda r, x: np.broadcast_to(x.numpy()[:1], x.shape),
    "byte order": lambda r, x: x.numpy().astype(x.numpy().dtype.newbyteorder()),
    "objects": lambda r, x: x.numpy().astype(object),
    "fields": lambda r, x: np.zeros(x.shape, [("a", "f4"), ("b", "i4")]),
    "unaligned": lambda r, x: (
        np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.numpy().dtype).reshape(x.shape)
    ),
    "list": lambda r, x: x.tolist(),
    "spec": lambda r, x: odd_spec(r, tuple(x.shape)),
    "dlpack": lambda r, x: odd_producer(r, x.numpy()),
}


def odd_spec(r: random.Random, shape: tuple[int, ...]) -> Any:
    return r.choice(
        [
            strobe.ArraySpec(shape),
            strobe.ArraySpec((2**64 + 2, *shape[1:])),
            strobe.ArraySpec((*shape[:-1], -1)),
            strobe.ArraySpec(3),  # type: ignore[arg-type]
            strobe.ArraySpec(shape, strides=(2**64,) * len(shape)),
            strobe.ArraySpec(shape, strides=(0,) * len(shape)),
            strobe.ArraySpec(shape, strides=(1.5, None)),  # type: ignore[arg-type]
            strobe.ArraySpec(shape, device="cuda:" + "9" * 5000),
            strobe.ArraySpec(shape, device="cuda:1023"),
            strobe.ArraySpec(shape, device=7),  # type: ignore[arg-type]
            strobe.ArraySpec(shape, dtype=["float32"]),  # type: ignore[arg-type]
            strobe.ArraySpec(shape, dtype="f" * 10_000),
        ]
    )


def odd_producer(r: random.Random, array: Any) -> Any:
    if array.dtype.name not in ("float32", "int32"):
        array = array.astype(np.float32)
    producer = Producer(
        array,
        r.choice([None, (1, 0), (2, 0)]),
        flags=r.choice([0, 1, 2]),
        offset=r.choice([0, 4, 2**62]),
        null_strides=r.random() < 0.5,
        lanes=r.choice([1, 1, 4]),
    )
    odd = r.choice([(1, 0), (1, 0), (1, 2**31 - 1), (2, 0), (2**64 + 1, 0), None, 3, ("x", "y")])
    producer.__class__ = r.choice([Producer, OddDevice])
    producer.odd = odd  # type: ignore[attr-defined]
    return producer


class OddDevice(Producer):
    """With a __dlpack_device__ that says something else, or nothing."""

    def __dlpack_device__(self) -> Any:
        if self.odd is None:  # type: ignore[attr-defined]
            raise OSError("no device today")
        return self.odd  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------- odd values

VALUES: list[Callable[[], Any]] = [
    lambda: None,
    lambda: True,
    lambda: -1,
    lambda: 0,
    lambda: 3,
    lambda: 2**31,
    lambda: 2**63,
    lambda: -(2**63) - 1,
    lambda: 2**64,
    lambda: 10**400,
    lambda: 10**5000,
    lambda: 0.5,
    lambda: -0.0,
    lambda: 1.5,
    lambda: 1e-320,
    lambda: 1e300,
    lambda: float("nan"),
    lambda: float("inf"),
    lambda: 1j,
    lambda: "1",
    lambda: "é\udc80" * 100_000,
    lambda: b"\0" * 1000,
    lambda: (),
    lambda: [1],
    lambda: (1, 2),
    lambda: (-2, 0),
    lambda: (2**64, 0),
    lambda: (0.5, "x"),
    lambda: (None, None),
    lambda: list(range(1_000_000)),
    lambda: {1: 2},
    lambda: {3, 4},
    lambda: object(),
    lambda: Broken(),
    lambda: (Broken(), Broken()),
    lambda: LongName(),
    lambda: LongName,
    lambda: np.float32(0.25),
    lambda: np.int64(-7),
    lambda: np.array(1),
    lambda: np.array([1.0, 2.0]),
    lambda: np.array("x"),
    lambda: torch.tensor(2),
    lambda: torch.tensor([1.0, 2.0]),
    lambda: torch.tensor(1.0, requires_grad=True),
    lambda: freed(torch.tensor(1.0)),
    lambda: freed_slice(torch.tensor(1)),
    lambda: torch.tensor(1.0, device="meta"),
    lambda: fake(torch.tensor(1)),
    lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    lambda: np.float32,
]

# --------------------------------------------------------------------------------- right calls

SCALARS = ("causal", "window", "scale", "softcap", "dropout_p", "dropout_seed", "dropout_offset")
OURS = (*SCALARS, "max_seqlen_q", "max_seqlen_k", "batch_invariant", "threads", "attention_chunk")
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
    batch, heads_kv, head_dim = r.randint(1, 2), r.randint(1, 2), r.choice([8, 16])
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
    more = {"dlse": torch.randn_like(lse)} if r.random() < 0.3 else {}
    if r.random() < 0.3:
        more["grads"] = tuple(torch.empty_like(given[name]) for name in "qkv")
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


def without(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: x for name, x in given.items() if name not in names}


def cached(r: random.Random) -> dict[str, Any]:
    """Of attention_with_kvcache: a cache of pages or none, maybe appended to, maybe turned."""
    batch, heads_kv, head_dim = r.randint(1, 2), r.randint(1, 2), r.choice([8, 16])
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
        given["q"] = given["q"].unflatten(0, (len(given.pop("cu_seqlens_q")) - 1, -1))
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


def partial_results(r: random.Random) -> dict[str, Any]:
    shape = [r.randint(1, 3) for _ in range(r.choice([3, 4]))]
    return {
        "outs": torch.randn(*shape, 8),
        "lses": torch.randn(*shape[:-2], shape[-1], shape[-2]),
    }


def forward(r: random.Random) -> dict[str, Any]:
    given = ours(r)
    if r.random() < 0.3:
        given["out"] = torch.empty_like(given["q"])
    return given


def mask(r: random.Random) -> dict[str, Any]:
    return {"batch": 1, "heads": 2, "seqlen_q": 3, "seqlen_k": 4, "dropout_p": 0.5}


# name: (function, right arguments, further options)
FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[[random.Random], Any], tuple[str, ...]]] = {
    "attention": (strobe.attention, forward, (*OURS, "return_lse", "out")),
    "attention_backward": (
        strobe.attention_backward,
        lambda r: one_a_sequence(r, with_gradients(r)),
        (*OURS, "deterministic", "grads", "dlse"),
    ),
    "plan": (
        strobe.plan,
        ours,
        (
            *[name for name in OURS if "seed" not in name and "offset" not in name],
            "backward",
            "dlse",
        ),
    ),
    "why": (
        strobe.why,
        ours,
        (
            *[name for name in OURS if "seed" not in name and "offset" not in name],
            "backward",
            "dlse",
        ),
    ),
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
        cached,
        (*OURS[:4], "max_seqlen_q", "batch_invariant", "threads", "attention_chunk", "out",
         "out_dtype", "rotary_interleaved", "return_lse"),
    ),
    "merge": (strobe.merge, partial_results, ("out", "out_dtype", "threads")),
    "flash_attn_with_kvcache": (
        flash_attn.flash_attn_with_kvcache,
        lambda r: renamed_cache(r, "block_table"),
        (*FLASH[1:5], "rotary_interleaved", "num_splits", "cache_seqlens", "return_softmax_lse"),
    ),
    "flash_attn_3.flash_attn_with_kvcache": (
        flash_attn_3.flash_attn_with_kvcache,
        lambda r: renamed_cache(r, "page_table"),
        (*FLASH[1:5], "rotary_interleaved", "cache_seqlens", "max_seqlen_q", "attention_chunk",
         "q_descale", "scheduler_metadata"),
    ),
    "flash_attn_3.flash_attn_varlen_func": (
        flash_attn_3.flash_attn_varlen_func,
        lambda r: one_a_sequence(r, without(packed(r), "alibi_slopes"), ("seqused_q", "seqused_k")),
        (*FLASH[1:], "attention_chunk", "qv"),
    ),
}  # fmt: skip

# ------------------------------------------------------------------------------------- one case


def draw(seed: int, index: int) -> tuple[str, dict[str, Any], dict[str, str]]:
    """A function's name, its arguments, and which of them are odd in what way."""
    r = random.Random(f"{seed}:{index}")
    torch.manual_seed(index)
    name = r.choice(list(FUNCTIONS))
    _, right, options = FUNCTIONS[name]
    given: dict[str, Any] = right(r)
    odd: dict[str, str] = {}
    for _ in range(r.choice([1, 1, 1, 2, 3])):
        argument = r.choice([*given, *options])
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
    if r.random() < 0.05:
        rows = [torch.randn(3, 2, 8), torch.randn(1, 2, 8)]
        given |= {key: torch.nested.nested_tensor(rows) for key in given if key in "qkv"}
        odd |= {key: "nested" for key in given if key in "qkv"}
    return name, given, odd


# Names of the layers beneath, and what only PyTorch says.
FOREIGN = re.compile(
    r"Internal error|NULL|window_(left|right)\b|\bstride of\b|\btotal_[qk] =|has_[a-z]"
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
    names = {*odd, *(["dq", "dk", "dv"] if "grads" in odd else [])}
    if not isinstance(error, strobe.Unsupported) and not any(
        re.search(rf"(?<!\w){re.escape(argument)}(?!\w)", text) for argument in names
    ):
        return f"names none of {sorted(names)}"
    return ""


def run(seed: int, index: int) -> str:
    """Runs a case; what is wrong with its answer, or ""."""
    name, given, odd = draw(seed, index)
    print(f"case {index}: {name} with {odd}", flush=True)
    function = FUNCTIONS[name][0]
    if name.startswith("flash_attn"):
        q = torch.ones(1, 2, 2, 8)
        for _ in range(3):  # the short way is open
            flash_attn.flash_attn_func(q, q + 1, q + 2)
    try:
        function(**given)
    except Exception as error:
        if not isinstance(error, strobe.Error) and re.search("allocate|memory", str(error)):
            return ""  # for a result: NumPy's error or PyTorch's
        wrong = judge(name, odd, error)
        return f"{wrong}: {str(error)[:1000]}" if wrong else ""
    return ""


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
