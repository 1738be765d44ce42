"""From the arguments of a call to its problem, the fields of strobe_problem, and every check that
needs several arrays. A message names the argument, what was got and what was wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from . import _core
from ._arrays import Spec, spec_of
from ._errors import InvalidArgument, Unsupported, shown
from ._options import ARRAYS, fields_of
from ._values import integer

# strobe_dtype of floats, and of what q, k and v of float8 attention are
DTYPE_CODES: Final[dict[str, int]] = {"float32": 0, "bfloat16": 1, "float16": 2}
FLOAT8_CODES: Final[dict[str, int]] = {"float8_e4m3fn": 3, "float8_e5m2": 4}
# strobe_kv_scale of float8 attention
_SCALES_OF_BATCH_AND_HEAD: Final = 4
# strobe_alibi of include/strobe/strobe.h, by the dimensions of the slopes
ALIBI_CODES: Final = {1: 1, 2: 2}
# Arrays of one number for each sequence; the last three go with a cache.
NUMBERS: Final = (*ARRAYS, "cache_batch_idx", "leftpad", "rotary_position")
# The axes of a bias, and their names among a tensor's strides in the library.
BIAS_AXES: Final = ("batch", "heads", "seqlen_q", "seqlen_k")
BIAS_STEPS: Final = ("batch", "head", "seqlen", "dim")

_HEADS_AND_ROWS: Final = ({"heads", "seqlen"}, {"heads", "total"})


def axes_of(name: str, packed: bool) -> tuple[str, ...]:
    """The axes of q, k, v, out, lse and of their gradients, by the names of their sizes."""
    queries = ("total_q",) if packed else ("batch", "seqlen_q")
    keys = ("total_k",) if packed else ("batch", "seqlen_k")
    return {
        "q": (*queries, "heads", "head_dim"),
        "k": (*keys, "heads_kv", "head_dim"),
        "v": (*keys, "heads_kv", "head_dim_v"),
        "out": (*queries, "heads", "head_dim_v"),
        "lse": (*queries[:-1], "heads", queries[-1]),
        "elta": (*queries[:-1], "heads", queries[-1]),
        "sinks": ("heads",),
    }[name.removeprefix("d")]


@dataclass(slots=True)
class Problem:
    """What is known of a call while its arrays are looked at, one after the other."""

    fields: dict[str, Any]  # of strobe_problem
    packed: bool
    q: Spec  # of whose dtype and place the others are
    sizes: dict[str, int] = field(default_factory=dict)  # of axes, by name
    found: dict[str, str] = field(default_factory=dict)  # where: "q.shape[0] (batch)"
    tensors: dict[str, Spec] = field(default_factory=dict)  # those with strides in the problem
    first: str = "q"  # what the caller calls q

    @classmethod
    def begin(cls, specs: dict[str, Spec], packed: bool, options: dict[str, Any]) -> Problem:
        """What the options say, and q's dtype and place."""
        q = specs["q"]
        check_query(q)
        fields = fields_of(options) | {
            "dtype": (DTYPE_CODES | FLOAT8_CODES)[q.dtype],
            "device": int(q.device == "cuda"),
            "device_index": q.device_index,
        }
        return cls(fields, packed, q)

    @property
    def is_float8(self) -> bool:
        return self.q.dtype in FLOAT8_CODES

    def out_dtype(self, out: Spec | None = None, wanted: str = "") -> str:
        """What out is. Of float8 attention the caller's own array may be any float."""
        if not self.is_float8:
            return wanted or self.q.dtype
        if out is None:
            return wanted or "bfloat16"
        allowed = (wanted,) if wanted else tuple(DTYPE_CODES)
        if out.dtype not in allowed:
            why = "out_dtype" if wanted else "q is float8"
            raise InvalidArgument(
                f"out.dtype = {out.dtype:.60}, expected {' or '.join(allowed)} ({why})"
            )
        return out.dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Of q, k, v, out, lse, bias or a gradient."""
        if name.removeprefix("d") == "bias":
            return self.tensors["bias"].shape
        return tuple(self.sizes[axis] for axis in axes_of(name, self.packed))

    def take(
        self,
        name: str,
        spec: Spec,
        like: str,
        axes: tuple[str, ...] = (),
        dtype: str = "",
        why: str = "that of q",
    ) -> None:
        """Checks an array of any strides with a contiguous last dimension. like: what must have
        the same sizes; dtype: another than that of q; why: what its dtype follows from.
        """
        axes = axes or axes_of(name, self.packed)
        self.check(name, spec, axes, like, dtype or self.q.dtype, why)
        axis = len(axes) - 1
        if spec.shape[axis] > 1 and spec.strides[axis] != 1 and 0 not in spec.shape:
            raise InvalidArgument(
                f"{_stride(name, spec, axis)}, expected 1 (last dimension contiguous): "
                f"pass {spec.kind.contiguous_hint.format(name)}"
            )
        self.tensors[name] = spec
        self.fields[name] = _strides(spec)

    def take_packed(
        self, name: str, spec: Spec, axes: tuple[str, ...], like: str, dtype: str, why: str
    ) -> None:
        """Checks an array that is contiguous in C order; axes of one element may have any stride.
        why: what its dtype follows from.
        """
        self.check(name, spec, axes, like, dtype, why)
        step = 1
        for axis in range(len(axes) - 1, -1, -1):
            if spec.shape[axis] > 1 and spec.strides[axis] != step and 0 not in spec.shape:
                raise InvalidArgument(
                    f"{_stride(name, spec, axis)}, expected {step} (contiguous): "
                    f"pass {spec.kind.contiguous_hint.format(name)}"
                )
            step *= spec.shape[axis]

    def check(
        self, name: str, spec: Spec, axes: tuple[str, ...], like: str, dtype: str, why: str
    ) -> None:
        """Checks axes, dtype, place and shape; sizes that are new become known."""
        check_ndim(name, spec, axes)
        if spec.dtype != dtype:
            raise InvalidArgument(f"{name}.dtype = {spec.dtype:.60}, expected {dtype} ({why})")
        if spec.place != self.q.place:
            raise InvalidArgument(
                f"{name} is on {spec.place}, expected {self.q.place} as {self.first}"
            )
        wanted = [self.sizes.get(axis, n) for axis, n in zip(axes, spec.shape, strict=True)]
        for axis, (got, want) in enumerate(zip(spec.shape, wanted, strict=True)):
            if got != want:
                raise InvalidArgument(
                    f"{name}.shape[{axis}] = {got}, expected {want} ({axes[axis]} of {like})"
                    + _swapped(name, spec, wanted, axes)
                )
        self.sizes.update(zip(axes, spec.shape, strict=True))
        for axis, size in enumerate(axes):
            self.found.setdefault(size, f"{name}.shape[{axis}] ({size})")

    def take_more(self, specs: dict[str, Spec]) -> None:
        """Checks the slopes, and the arrays of one number for each sequence."""
        fields, of = self.fields, "cu_seqlens_q" if self.packed else "q"
        # The library reads 0 in these two as "not given"; here they are given.
        if fields["heads_kv"] == 0 and fields["heads"] != 0:
            axis = len(specs["k"].shape) - 2
            raise InvalidArgument(f"k.shape[{axis}] = 0, expected at least 1 (heads_kv)")
        if fields["head_dim_v"] == 0 and fields["head_dim"] != 0:
            axis = len(specs["v"].shape) - 1
            raise InvalidArgument(f"v.shape[{axis}] = 0, expected 1 to 256 (head_dim_v)")
        if "alibi_slopes" in specs:
            take_alibi(self, specs["alibi_slopes"])
        if "sinks" in specs:
            take_sinks(self, specs["sinks"], "q")
            fields["has_sinks"] = 1
        take_mask(self, specs.get("mask"))
        if "bias" in specs:
            take_bias(self, specs["bias"])
        for name in NUMBERS:
            if name in specs:
                words = "one number for each sequence"
                self.take_packed(name, specs[name], ("batch",), of, "int32", words)
                fields[f"has_{name}"] = 1


def check_ndim(name: str, spec: Spec, axes: tuple[str, ...]) -> None:
    if len(spec.shape) != len(axes):
        raise InvalidArgument(
            f"{name}.ndim = {len(spec.shape)}, expected {len(axes)}: ({', '.join(axes)})"
        )


def _stride(name: str, spec: Spec, axis: int) -> str:
    return f"{spec.kind.stride_hint.format(name, axis)} = {spec.strides[axis]} elements"


def _strides(spec: Spec) -> tuple[int, ...]:
    """Of one tensor. An empty one keeps zeros: contiguous."""
    if 0 in spec.shape:
        return (0, 0, 0, 0)
    last = 1 if spec.shape[-1] == 1 else spec.strides[-1]  # an axis of one element has no step
    return (*(0,) * (4 - len(spec.strides)), *spec.strides[:-1], last)


def _swapped(name: str, spec: Spec, wanted: Sequence[int], axes: Sequence[str]) -> str:
    """A guess, where heads and rows in the other order would have been right."""
    for axis in range(len(axes) - 1):
        if {axes[axis].partition("_")[0], axes[axis + 1].partition("_")[0]} in _HEADS_AND_ROWS:
            order = list(range(len(axes)))
            order[axis], order[axis + 1] = axis + 1, axis
            if [spec.shape[i] for i in order] == list(wanted):
                there = [axes[i] for i in order]
                return in_other_layout([(name, spec)], there, (axis, axis + 1))
    return ""


def in_other_layout(
    named: Sequence[tuple[str, Spec]], axes: Sequence[str], swapped: tuple[int, int]
) -> str:
    """What to pass if these arrays are laid out as `axes`."""
    names = [name for name, _ in named]
    listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    passed = ", ".join(spec.kind.swapped_hint.format(name, *swapped) for name, spec in named)
    return f"; if {listed} {'is' if len(names) == 1 else 'are'} ({', '.join(axes)}), pass {passed}"


def make_problem(backward: bool, arrays: dict[str, Any], options: dict[str, Any]) -> Problem:
    """arrays: by the names that messages use. options: all plain ones of the call, by name.

    Raises InvalidArgument for what only Python can see: that shapes, dtypes or devices of several
    arrays contradict each other. The library checks the rest.
    """
    specs = {name: spec_of(name, array) for name, array in arrays.items()}
    packed = "cu_seqlens_q" in specs or "cu_seqlens_k" in specs
    for name in "qkv":  # first of all, as it is here that arrays of another layout show
        check_ndim(name, specs[name], axes_of(name, packed))
    problem = Problem.begin(specs, packed, options)
    fields = problem.fields
    fields |= {"direction": int(backward), "has_dlse": int("dlse" in specs)}
    fields["has_delta"] = int("delta" in specs)
    fields["has_dsinks"] = int(fields.pop("return_dsinks", False))
    wants_dbias = fields.pop("wants_dbias", False)
    float_grads = fields.pop("float_grads", False)
    if float_grads:
        fields["grad_dtype"] = DTYPE_CODES["float32"]
    longest = {name: fields.pop(name) for name in ("max_seqlen_q", "max_seqlen_k")}
    if packed:
        _take_offsets(problem, specs)
    problem.take("q", specs["q"], "cu_seqlens_q")
    if problem.is_float8:
        if backward:
            raise Unsupported(
                f"q.dtype = {problem.q.dtype}: no kernel computes gradients from float8, expected "
                "float32, bfloat16 or float16"
            )
        take_float8(problem, specs)
    else:
        problem.take("k", specs["k"], "q")
        problem.take("v", specs["v"], "k")
        refuse_scales(problem, specs)
    fields |= problem.sizes
    if packed:
        del fields["batch + 1"]
        fields["varlen"] = 1
        for name, value in longest.items():
            fields[name.removeprefix("max_")] = integer(name, value)
    for name, value in longest.items():
        if value is not None and not packed:
            raise InvalidArgument(
                f"{name} = {shown(value)}, expected None: it belongs to cu_seqlens_q and "
                "cu_seqlens_k"
            )
    problem.take_more(specs)
    if "dout" in specs:
        problem.take("dout", specs["dout"], "q and v")
    if "out" in specs:
        # The caller's own array says itself what it is.
        out = specs["out"]
        wide = out.dtype == "float32" and not problem.is_float8
        dtype = "float32" if wide else problem.out_dtype(out)
        if dtype != problem.q.dtype:
            fields["out_dtype"] = DTYPE_CODES[dtype]
        words = "that of q" if problem.q.dtype == "float32" else "that of q, or float32"
        problem.take("out", out, "q and v", dtype=dtype, why=words)
    for name in ("lse", "dlse", "delta"):
        if name in specs:
            axes, words = axes_of(name, packed), "whatever the dtype of q"
            problem.take_packed(name, specs[name], axes, "q", "float32", words)
    if "dsinks" in specs:
        words = "whatever the dtype of q"
        problem.take_packed("dsinks", specs["dsinks"], ("heads",), "q", "float32", words)
    for name in ("dq", "dk", "dv"):
        if name in specs:
            words = "grad_dtype" if float_grads else "that of q, or float32 for all three"
            problem.take(
                name, specs[name], name[1:], dtype="float32" if float_grads else "", why=words
            )
    if wants_dbias:
        take_dbias(problem, specs.get("dbias"), float_grads)
    return problem


def check_query(q: Spec) -> None:
    wanted = "expected float32, bfloat16 or float16, or float8_e4m3fn"
    if q.dtype in DTYPE_CODES or q.dtype == "float8_e4m3fn":
        return
    if "float8" in q.dtype:
        raise Unsupported(f"q.dtype = {q.dtype:.60}: no kernel takes such queries, {wanted}")
    raise InvalidArgument(f"q.dtype = {q.dtype:.60}, {wanted}")


def take_float8(
    problem: Problem, specs: dict[str, Spec], extents: tuple[str, ...] = ()
) -> None:
    """The keys and values of float8 attention, and the scales. extents: of a cache."""
    fields, dtype = problem.fields, specs["k"].dtype
    if "rotary_cos" in specs:
        raise Unsupported(
            f"rotary_cos is given with q.dtype = {problem.q.dtype}, expected None: codes that are "
            "rotated would have to be quantised anew (rotate before quantising)"
        )
    if dtype not in FLOAT8_CODES:
        raise InvalidArgument(
            f"k.dtype = {dtype:.60}, expected float8_e4m3fn or float8_e5m2 (q is float8)"
        )
    axes = {x: (*extents, *axes_of(x, problem.packed)[-2:]) if extents else () for x in "kv"}
    problem.take("k", specs["k"], "q", axes["k"], dtype)
    problem.take("v", specs["v"], "k", axes["v"], dtype, "that of k")
    fields["kv_dtype"] = FLOAT8_CODES[dtype]
    for one, other in (("k_scale", "v_scale"), ("v_scale", "k_scale")):
        if one in specs and other not in specs:
            raise InvalidArgument(f"{other} = None, expected an array, as {one} is given")
    for name in ("q_scale", "k_scale", "v_scale"):
        if name not in specs:
            continue
        spec, batch = specs[name], problem.sizes["batch"]
        check_ndim(name, spec, ("batch", "heads_kv"))
        if spec.shape[0] not in (1, batch):
            raise InvalidArgument(
                f"{name}.shape[0] = {spec.shape[0]}, expected {batch}{' or 1' * (batch != 1)} "
                "(batch of q and k)"
            )
        first = "batch" if spec.shape[0] == batch else "one for all sequences"
        problem.check(name, spec, (first, "heads_kv"), "q and k", "float32", "of float8 q")
        problem.sizes.pop("one for all sequences", None)
        if 0 not in spec.shape:
            # A step of 0 is one row for all, or one number.
            steps = [int(n > 1) * s for n, s in zip(spec.shape, spec.strides, strict=True)]
            fields[name] = (steps[0], 0, steps[1], 1)
        if name == "q_scale":
            fields["has_q_scale"] = 1
        else:
            fields["kv_scale"] = _SCALES_OF_BATCH_AND_HEAD


def refuse_scales(
    problem: Problem,
    specs: dict[str, Spec],
    names: Sequence[str] = ("q_scale", "k_scale", "v_scale"),
) -> None:
    """Where nothing is float8 that they would belong to."""
    for name in names:
        if name in specs:
            raise InvalidArgument(
                f"{name} is given with q.dtype = {problem.q.dtype:.60}, expected None: it belongs "
                f"to {'a float8 q' if name == 'q_scale' else 'float8 q, k and v'}"
            )


def _take_offsets(problem: Problem, specs: dict[str, Spec]) -> None:
    """Checks both arrays of cumulative lengths, and so finds the batch."""
    for missing, given in (("q", "k"), ("k", "q")):
        if f"cu_seqlens_{missing}" not in specs:
            raise InvalidArgument(
                f"cu_seqlens_{missing} = None, expected an array, as cu_seqlens_{given} is given"
            )
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        take_offsets(problem, name, specs[name])
    problem.sizes["batch"] = problem.sizes["batch + 1"] - 1


def take_offsets(problem: Problem, name: str, spec: Spec) -> None:
    axes = ("batch + 1",)
    problem.take_packed(name, spec, axes, "cu_seqlens_q", "int32", "cumulative lengths")
    if spec.shape[0] == 0:
        raise InvalidArgument(f"{name}.shape[0] = 0, expected at least 1 (batch + 1)")


def take_alibi(problem: Problem, spec: Spec) -> None:
    name, ndim = "alibi_slopes", len(spec.shape)
    if ndim not in ALIBI_CODES:
        raise InvalidArgument(f"{name}.ndim = {ndim}, expected 1: (heads) or 2: (batch, heads)")
    axes = ("batch", "heads")[-ndim:]
    problem.take_packed(name, spec, axes, "q", "float32", "whatever the dtype of q")
    problem.fields["alibi"] = ALIBI_CODES[ndim]


def take_sinks(problem: Problem, spec: Spec, like: str) -> None:
    words = "whatever the dtype of q"
    problem.take_packed("sinks", spec, ("heads",), like, "float32", words)


def take_bias(problem: Problem, spec: Spec) -> None:
    """Checks a bias of any strides. The lengths of packed sequences, which are bounds, become what
    it has room for.
    """
    fields, name = problem.fields, "bias"
    check_ndim(name, spec, BIAS_AXES)
    _check_bias(problem, name, spec, tuple(DTYPE_CODES))
    wanted = (problem.sizes["batch"], problem.sizes["heads"], fields["seqlen_q"])
    every = zip(spec.shape, (*wanted, fields["seqlen_k"]), strict=True)
    for axis, (got, whole) in enumerate(every):
        bound = axis >= 2 and problem.packed and (axis == 2 or "cache" not in fields)
        if got == whole or (got == 1 and axis < 3) or (bound and got > whole):
            continue
        least = "at least " if bound else ""
        raise InvalidArgument(
            f"{name}.shape[{axis}] = {got}, expected {'1 or ' if axis < 3 else ''}{least}{whole} "
            f"({BIAS_AXES[axis]})"
        )
    if problem.packed:
        if spec.shape[2] != 1:
            fields["seqlen_q"] = spec.shape[2]
        fields["seqlen_k"] = spec.shape[3]
    problem.tensors[name] = spec
    fields |= {"has_bias": 1, "bias_dtype": DTYPE_CODES[spec.dtype]}
    fields |= dict(zip(("bias_batch", "bias_heads", "bias_seqlen_q"), spec.shape[:3], strict=True))
    fields[name] = _bias_strides(spec)


def take_dbias(problem: Problem, given: Spec | None, float_grads: bool) -> None:
    """The gradient of a bias, new where none is given."""
    bias = problem.tensors.get("bias")
    if bias is None:
        raise InvalidArgument("dbias is asked for with bias = None, expected an array")
    fields, dtype = problem.fields, "float32" if float_grads else bias.dtype
    if given is not None:
        check_ndim("dbias", given, BIAS_AXES)
        _check_bias(problem, "dbias", given, (bias.dtype, "float32"))
        if given.shape != bias.shape:
            raise InvalidArgument(
                f"dbias.shape = {shown(given.shape)}, expected {shown(bias.shape)} (that of bias)"
            )
        dtype = given.dtype
        problem.tensors["dbias"] = given
        fields["dbias"] = _bias_strides(given)
    fields |= {"has_dbias": 1, "dbias_dtype": DTYPE_CODES[dtype]}


def _check_bias(problem: Problem, name: str, spec: Spec, dtypes: tuple[str, ...]) -> None:
    if spec.dtype not in dtypes:
        words = " or ".join(dict.fromkeys(dtypes))
        raise InvalidArgument(f"{name}.dtype = {spec.dtype:.60}, expected {words}")
    if spec.place != problem.q.place:
        raise InvalidArgument(
            f"{name} is on {spec.place}, expected {problem.q.place} as {problem.first}"
        )


def _bias_strides(spec: Spec) -> tuple[int, ...]:
    """As the library orders them. An empty one keeps zeros: contiguous."""
    if 0 in spec.shape:
        return (0, 0, 0, 0)
    batch, head, seqlen, dim = spec.strides
    if not any(spec.strides):  # one number for all pairs; the library would take it for contiguous
        if 1 not in spec.shape:
            raise InvalidArgument(
                "the strides of bias are all 0, expected one that is not: pass "
                f"{spec.kind.contiguous_hint.format('bias')}"
            )
        # The stride of an axis of one element leads nowhere.
        batch, head, seqlen, dim = (int(n == 1) for n in spec.shape)
    return (batch, seqlen, head, dim)
# A mask as data: the fields of strobe_mask in one number, as an operator's schema has room for it.
# From the lowest bit on: log2(block_q / 64), log2(block_k / 64), whether there is a mask of each
# sequence, of each head, capacity and partial_capacity.
_BLOCK_BITS: Final = 2
_CAPACITY_BITS: Final = 28
MOST_CAPACITY: Final = (1 << _CAPACITY_BITS) - 1


def mask_layout(
    blocks: tuple[int, int],
    of_each_sequence: bool,
    of_each_head: bool,
    capacity: int,
    partial_capacity: int,
) -> int:
    """The number of a mask with these blocks and capacities."""
    number = 0
    for value, bits in (
        (partial_capacity, _CAPACITY_BITS),
        (capacity, _CAPACITY_BITS),
        (int(of_each_head), 1),
        (int(of_each_sequence), 1),
        ((blocks[1] // 64).bit_length() - 1, _BLOCK_BITS),
        ((blocks[0] // 64).bit_length() - 1, _BLOCK_BITS),
    ):
        number = number << bits | value
    return number


def mask_fields(layout: int, batch: int, heads: int, packed: bool) -> dict[str, int]:
    """The fields of strobe_problem that a number of `mask_layout` stands for."""
    taken = []
    for bits in (_BLOCK_BITS, _BLOCK_BITS, 1, 1, _CAPACITY_BITS, _CAPACITY_BITS):
        taken.append(layout & (1 << bits) - 1)
        layout >>= bits
    return {
        "mask_kind": 1,
        "mask_block_q": 64 << taken[0],
        "mask_block_k": 64 << taken[1],
        "mask_batch": batch if taken[2] or packed else 1,
        "mask_heads": heads if taken[3] else 1,
        "mask_capacity": taken[4],
        "mask_partial_capacity": taken[5],
    }


def take_mask(problem: Problem, spec: Spec | None) -> None:
    """Checks a packed mask, and finds its fields from `mask_layout`."""
    fields = problem.fields
    layout = fields.pop("mask_layout", 0)
    if spec is None:
        if layout:
            raise InvalidArgument("mask_layout is given with mask = None, expected 0")
        return
    if not layout:
        hint = ": strobe.masks.from_bool(keep) makes one of bools" if spec.dtype == "bool" else ""
        raise InvalidArgument(
            f"mask is an array with mask_layout = 0, expected a strobe.masks.Mask{hint}"
        )
    words = "as strobe.masks packs it"
    problem.take_packed("mask", spec, ("words of the mask",), "", "int32", words)
    del problem.sizes["words of the mask"]
    heads, batch = fields["heads"], fields["batch"]
    fields |= mask_fields(layout, batch, heads, problem.packed)
    if batch == 0:
        return
    wanted = _core.mask_bytes(fields) // 4
    if spec.shape[0] != wanted:
        raise InvalidArgument(
            f"mask has {spec.shape[0]} words, expected {wanted} for a mask of these lengths, batch "
            "and heads: it was made for others"
        )
