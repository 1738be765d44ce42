"""The table of options (src/core/options.def) and the C structs against what Python has of them;
the options that most calls do without, forward and backward, against the oracle.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import capi
import strobe
from strobe import _core, _options
from strobe._problem import ALIBI_CODES, DTYPE_CODES

import cases
from cases import Case

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "src/core/options.def").read_text()


# ---------------------------------------------------------------------------------- the C header


def test_constants_are_those_of_the_header() -> None:
    named = dict(re.findall(r"STROBE_(\w+) = (\d+)", capi.HEADER))
    ours = {"FLOAT32": "float32", "BFLOAT16": "bfloat16", "FLOAT16": "float16"}
    assert {name: DTYPE_CODES[code] for name, code in ours.items()} == {
        name: int(named[name]) for name in ours
    }
    assert {1: int(named["ALIBI_PER_HEAD"]), 2: int(named["ALIBI_PER_BATCH_HEAD"])} == ALIBI_CODES


def test_every_field_of_a_problem_can_be_set() -> None:
    fields = dict(capi.fields("strobe_problem"))
    del fields["struct_size"], fields["mask"]
    fields |= {f"mask_{name}": x for name, x in capi.fields("strobe_mask") if name != "reserved"}
    wrong = {name: (0, 0, 0, "x") if name in STRIDED else "x" for name in fields}
    for name, value in wrong.items():
        with pytest.raises(TypeError):  # known, and no number
            _core.why({name: value})
    with pytest.raises(KeyError, match="field of no strobe_problem"):
        _core.why({"head_dims": 1})


STRIDED = (
    *("q", "k", "v", "out", "dout", "dq", "dk", "dv", "k_new", "v_new", "bias", "dbias"),
    *("k_scale", "v_scale", "q_scale"),
)


# --------------------------------------------------------------------------------------- the table

# How the table's fields are called here where they are written out, and not by keyword of `more`.
WRITTEN_OUT = {
    "scale": "scale",
    "causal": "causal",
    "window_left": "window",
    "window_right": "window",
    "softcap": "softcap",
    "alibi": "alibi_slopes",
    "dropout_p": "dropout_p",
    "dropout_first_query": "dropout_first_query",
    "dropout_first_key": "dropout_first_key",
    "dropout_first_head": "dropout_first_head",
    "dropout_heads": "dropout_heads",
    "has_sinks": "sinks",
    "has_dsinks": "return_dsinks",
    "has_dlse": "dlse",
    "has_delta": "delta",
    "accumulate": "accumulate",
    "has_bias": "bias",
    "has_dbias": "dbias",
    "has_q_scale": "q_scale",
    "deterministic": "deterministic",
    "batch_invariant": "batch_invariant",
    "threads": "threads",
}
ROWS = re.findall(r"^STROBE_(FLAG|CHOICE|INTEGER|REAL|ARRAY)\((\w+), ([^,]+)", TABLE, re.MULTILINE)


# A mask as data is no row of the table: its fields are a struct of their own.
SCALARS = [row for row in _options.TAIL if row.convert is not None and row.name != "mask_layout"]
NAMES = [row.name for row in _options.ROWS]


def test_every_option_of_the_table_is_here() -> None:
    scalars = [name for kind, name, _ in ROWS if kind != "ARRAY" and name not in WRITTEN_OUT]
    assert scalars == [row.name for row in SCALARS]
    assert [name for kind, name, _ in ROWS if kind == "ARRAY"] == list(_options.ARRAYS)
    for function in (strobe.attention_backward, strobe.plan, strobe.why):
        arguments = inspect.signature(function).parameters
        assert {*WRITTEN_OUT.values(), *NAMES} <= set(arguments)
    arguments = inspect.signature(strobe.attention).parameters
    assert {*WRITTEN_OUT.values(), *NAMES} - set(arguments) == {
        *("dlse", "delta", "accumulate", "deterministic", "return_dsinks", "dbias")
    }
    assert set(_options.CallOptions.__annotations__) == set(NAMES)


def test_every_option_has_its_place_in_the_c_structs() -> None:
    """The extension's table: arrays and seeds go into a launch's arguments, the rest into the
    problem, each by its own name but for those whose field is called otherwise.
    """
    problem = dict(capi.fields("strobe_problem"))
    forward, backward = (dict(capi.fields(f"strobe_{way}_args")) for way in ("forward", "backward"))
    elsewhere = {"window": "window_left", "max_seqlen_q": "seqlen_q", "max_seqlen_k": "seqlen_k"}
    elsewhere["mask_layout"] = "mask"
    for name, kind, with_cache, without, tail in _core.OPTIONS:
        assert with_cache or without, name
        if kind in ("array", "seed"):
            assert name in forward, name
            of_forward = name in {"q_scale", "k_scale", "v_scale"}
            assert name in backward or not without or of_forward, name
        else:
            assert elsewhere.get(name, name) in problem, name
        assert not tail or (with_cache and without), name
    every = [name for name, *_ in _core.OPTIONS]
    assert len(set(every)) == len(every)
    assert set(every) == {row.name for row in (*_options.ROWS, *_options.CACHE_ROWS)}
    assert {kind for _, kind, *_ in _core.OPTIONS} == set(_options.KINDS)


def test_every_option_of_a_call_with_a_cache_is_here() -> None:
    rows = [row.name for row in _options.CACHE_ROWS]
    assert set(_options.CacheOptions.__annotations__) == set(rows)
    arguments = inspect.signature(strobe.attention_with_kvcache).parameters
    assert list(arguments) == ["q", "k", "v", "out", "out_dtype", "return_lse", *rows]
    cache_arrays = re.findall(r"^STROBE_CACHE_ARRAY\((\w+)\)", TABLE, re.MULTILINE)
    assert {*_options.ARRAYS, *cache_arrays} < set(rows)


def test_the_tables_defaults_are_the_problems() -> None:
    """A call whose options are given their defaults is the call without them."""
    q = strobe.ArraySpec((1, 8, 2, 16))
    defaults: dict[str, Any] = {row.name: row.default for row in _options.ROWS}
    assert strobe.plan(q, q, q, **defaults) == strobe.plan(q, q, q)
    named = {name: otherwise for kind, name, otherwise in ROWS if kind in ("INTEGER", "REAL")}
    for name, value in defaults.items():
        if name in named and value is not None:
            assert value == int(named[name]), name


def test_every_field_is_a_row_or_a_shape() -> None:
    """A field that is added to the C struct without a row in the table shows here."""
    shapes = {
        *("struct_size", "direction", "dtype", "device", "device_index", "varlen"),
        *("batch", "seqlen_q", "seqlen_k", "heads", "heads_kv", "head_dim", "head_dim_v"),
        *("total_q", "total_k", "q", "k", "v", "out", "dout", "dq", "dk", "dv"),
        *("kv_dtype", "v_dtype", "out_dtype", "cache", "append", "cache_batch", "pages"),
        *("page_size", "pages_per_sequence", "block_table_stride", "seqlen_new", "total_new"),
        *("k_new", "v_new", "rotary_dim", "rotary_rows", "rotary_interleaved", "grad_dtype"),
        *("bias_dtype", "dbias_dtype", "bias_batch", "bias_heads", "bias_seqlen_q"),
        *("bias", "dbias", "mask", "kv_scale", "kv_scale_dtype", "k_scale", "v_scale", "q_scale"),
    }
    rows = {f"has_{name}" if kind == "ARRAY" else name for kind, name, _ in ROWS}
    rows |= {f"has_{name}" for name in re.findall(r"^STROBE_CACHE_ARRAY\((\w+)\)", TABLE, re.M)}
    assert {name for name, _ in capi.fields("strobe_problem")} == shapes | rows


# -------------------------------------------------------------------------------- what they compute


def numbers(*values: int) -> Any:
    return np.array(values, np.int32)


SINKS = np.array([0.5, -30, 8, -np.inf], np.float32)
PACKED: dict[str, Any] = {"batch": 3, "cu_q": [0, 9, 9, 46], "cu_k": [0, 20, 31, 60]}
CALLS: list[dict[str, Any]] = [
    {"attention_chunk": 7, "causal": True},
    {"attention_chunk": 16, "window": (5, 3)},
    {"seqused_q": numbers(20, 37), "seqused_k": numbers(53, 11), "causal": True},
    {"seqused_q": numbers(0, 5), "seqused_k": numbers(9, 0)},
    {"seqused_k": numbers(30, 12), "window": (4, 0), "attention_chunk": 5},
    {"q_position": numbers(-10, 40), "causal": True},
    {"q_position": numbers(2**30, -(2**30)), "causal": True},
    {"prefix": numbers(0, 40), "causal": True},
    {"prefix": numbers(53, 7), "seqused_k": numbers(20, 30), "causal": True, "window": (-1, 2)},
    {"seqused_k": numbers(30, 12), "q_position": numbers(3, 0), "causal": True, "softcap": 3.0},
    {"window": (8, -3), "window_signed": True},
    {"window": (9, -1), "window_signed": True, "causal": True, "q_position": numbers(-10, 40)},
    {"window": (None, -1)},
    {"window": (None, -1), "window_signed": False},
    {"window": (None, -4), "prefix": numbers(3, 20), "causal": True},
    {"window": (-2, None), "seqused_k": numbers(30, 12)},
    {"window": (None, None)},
    {"sinks": SINKS, "causal": True},
    {"sinks": SINKS, "sinks_outside_lse": True, "window": (9, 0)},
    {"sinks": SINKS, "seqused_k": numbers(30, 0), "softcap": 3.0},
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", CALLS)
def test_dense(options: dict[str, Any], dtype: str) -> None:
    inputs = Case(dtype=dtype, with_dlse=True, options=options).make(np.random.default_rng(3))
    inputs.poison_unused()
    inputs.check()


@pytest.mark.parametrize(
    "options",
    [
        {"attention_chunk": 4, "causal": True},
        {"seqused_q": numbers(4, 0, 37), "seqused_k": numbers(0, 11, 20), "causal": True},
        {"q_position": numbers(5, 0, -3), "seqused_k": numbers(7, 1, 29), "causal": True},
        {"prefix": numbers(20, 3, 1), "causal": True, "dropout_p": 0.2, "dropout_seed": 5},
        {"sinks": SINKS, "causal": True, "dropout_p": 0.2, "dropout_seed": 5},
    ],
)
def test_packed(options: dict[str, Any]) -> None:
    inputs = Case(options=options, alibi=2, **PACKED).make(np.random.default_rng(4))
    inputs.poison_unused()
    inputs.check()


def test_defaults_given_are_as_not_given() -> None:
    inputs = Case().make(np.random.default_rng(5))
    plain = strobe.attention(inputs.q, inputs.k, inputs.v, causal=True)
    more: dict[str, Any] = {row.name: row.default for row in _options.ROWS if row.name != "causal"}
    again = strobe.attention(inputs.q, inputs.k, inputs.v, causal=True, **more)
    assert np.array_equal(plain, again)


def test_plans_are_kept_by_the_options_and_not_by_the_numbers() -> None:
    inputs = Case(seqlen_q=9, seqlen_k=9).make(np.random.default_rng(6))
    for used in (3, 9, 0):
        inputs.options = {"seqused_k": numbers(used, 9)}
        inputs.check()


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attention_chunk": -3}, "attention_chunk = -3, expected 0 to"),
        ({"attention_chunk": 1.5}, "attention_chunk = 1.5, expected an integer"),
        ({"seqused_q": numbers(1, 38)}, r"seqused_q\[1\] = 38, expected 0 to 37"),
        ({"seqused_k": numbers(-1, 0)}, r"seqused_k\[0\] = -1, expected 0 to 53"),
        ({"seqused_k": numbers(1)}, r"seqused_k.shape\[0\] = 1, expected 2 \(batch of q\)"),
        ({"seqused_k": np.zeros(2)}, "seqused_k.dtype = float64, expected int32"),
        ({"seqused_k": np.zeros(4, np.int32)[::2]}, r"seqused_k.strides\[0\] = 2 elements"),
        ({"q_position": np.zeros((2, 1), np.int32)}, "q_position.ndim = 2, expected 1"),
        ({"q_position": numbers(0, 2**30 + 1)}, r"q_position\[1\] = 1073741825"),
        ({"prefix": [1, 2]}, "prefix is of type list"),
        ({"prefix": numbers(1, 2), "attention_chunk": 4}, "attention_chunk = 4 with prefix given"),
        ({"prefix": numbers(1, 2), "window": (4, -1)}, r"window\[0\] = 4 with prefix given"),
        ({"window": (8, -3)}, r"window\[1\] = -3, expected -1 .* or window_signed=True"),
        ({"window": (2, -3), "window_signed": True}, r"window\[0\] = 2 with window\[1\] = -3, exp"),
        ({"window_signed": True}, r"window_signed=True with window\[0\] = -1 and .* expected None"),
        (
            {"window_signed": True, "prefix": numbers(1, 2), "window": (4, 4)},
            r"window\[0\] = 4 with prefix given, expected None \(no limit\)",
        ),
        ({"sinks_outside_lse": True}, "sinks_outside_lse = 1 with sinks not given, expected sinks"),
        ({"window": (-1, None), "causal": True}, r"window\[0\] = -1 with window\[1\] = none and"),
        ({"window": (None, -1), "attention_chunk": 4}, r"window\[1\] = -1 with attention_chunk"),
        ({"window": (None, "x")}, r"window\[1\] = 'x', expected an integer"),
    ],
)
def test_errors_name_the_argument(options: dict[str, Any], words: str) -> None:
    inputs = Case().make(np.random.default_rng(7))
    with pytest.raises(strobe.InvalidArgument, match=words):
        strobe.attention(inputs.q, inputs.k, inputs.v, **options)


@pytest.mark.parametrize(
    "row", [row for row in _options.ROWS if row.convert is not None], ids=lambda r: r.name
)
def test_each_number_is_taken_by_its_kind(row: _options.Option) -> None:
    """Whatever door it comes by, a wrong value is refused by the option's name."""
    inputs = Case().make(np.random.default_rng(12))
    functions: list[Any] = [strobe.attention, strobe.plan]
    for function in functions:
        with pytest.raises(strobe.InvalidArgument, match=rf"^{row.name} = .*expected"):
            function(inputs.q, inputs.k, inputs.v, **{row.name: "x"})


@pytest.mark.parametrize("row", SCALARS, ids=lambda r: r.name)
def test_each_scalar_is_handed_on(row: _options.Option) -> None:
    """Into the problem, whose text says every option that has not its default."""
    inputs = Case().make(np.random.default_rng(11))
    plan: Any = strobe.plan
    # What window_signed and sinks_outside_lse change the meaning of.
    given = {"window": (0, 0), "sinks": SINKS}
    plain = plan(inputs.q, inputs.k, inputs.v, **given)
    more = plan(inputs.q, inputs.k, inputs.v, **given, **{row.name: 1})
    assert more.splitlines()[0] != plain.splitlines()[0]
    function: Any = strobe.attention
    with pytest.raises(strobe.InvalidArgument, match=f"^{row.name} = "):
        function(inputs.q, inputs.k, inputs.v, **{row.name: np.ones(2)})


def test_unknown_options_are_refused_as_python_does() -> None:
    inputs = Case().make(np.random.default_rng(8))
    functions: list[Any] = [strobe.attention, strobe.plan, strobe.why]
    for function in functions:
        with pytest.raises(TypeError, match=rf"{function.__name__}\(\) got an unexpected keyword"):
            function(inputs.q, inputs.k, inputs.v, attention_chunks=4)
    with_cache: Any = strobe.attention_with_kvcache
    for name in ("attention_chunks", "dropout_p", "cu_seqlens_k", "max_seqlen_k", "dout", "lse"):
        with pytest.raises(TypeError, match=rf"attention_with_kvcache\(\) got .* {name!r}"):
            with_cache(inputs.q, inputs.k, inputs.v, **{name: None})
    for name in ("block_table", "rotary_interleaved", "leftpad", "dout", "lse"):
        with pytest.raises(TypeError, match=rf"attention\(\) got an unexpected .* {name!r}"):
            functions[0](inputs.q, inputs.k, inputs.v, **{name: None})


def test_an_unknown_option_is_told_what_it_may_be() -> None:
    """The name here, the function that has it, or the nearest name, if one is near."""
    q = np.zeros((1, 8, 2, 16), np.float32)
    lse = np.zeros((1, 2, 8), np.float32)
    attention: Any = strobe.attention
    with_cache: Any = strobe.attention_with_kvcache
    backward: Any = strobe.attention_backward
    plan: Any = strobe.plan
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (attention, (q, q, q)),
        (with_cache, (q, q, q)),
        (backward, (q, q, q, q, q, lse)),
        (plan, (q, q, q)),
    ]
    for function, arrays in calls:
        for name, said in (
            ("casual", ". Did you mean 'causal'?"),
            ("soft_cap", ". Did you mean 'softcap'?"),
            ("window_size", ": it is called 'window' here"),
            ("softmax_scale", ": it is called 'scale' here"),
            ("cache_seqlens", ": it is called 'seqused_k' here"),
            ("colour", ""),
        ):
            with pytest.raises(TypeError) as caught:
                function(*arrays, **{name: 1})
            wanted = f"{function.__name__}() got an unexpected keyword argument {name!r}{said}"
            assert str(caught.value) == wanted
    elsewhere = "strobe.attention_with_kvcache has it"
    for function, arrays, name, said in (
        (attention, (q, q, q), "leftpad", elsewhere),
        (attention, (q, q, q), "page_table", f"{elsewhere}, as 'block_table'"),
        (with_cache, (q, q, q), "page_table", "it is called 'block_table' here"),
        (with_cache, (q, q, q), "dropout_p", "strobe.attention has it"),
        (attention, (q, q, q), "dlse", "strobe.attention_backward has it"),
        (attention, (q, q, q), "return_softmax_lse", "it is called 'return_lse' here"),
        (plan, (q, q, q), "return_attn_probs", "strobe.attention has it, as 'return_lse'"),
    ):
        with pytest.raises(TypeError, match=f"{name}': {said}$"):
            function(*arrays, **{name: 1})


def test_plan_and_why_know_them() -> None:
    inputs = Case().make(np.random.default_rng(9))
    qkv = (inputs.q, inputs.k, inputs.v)
    for backward in (False, True):
        text = strobe.plan(*qkv, attention_chunk=9, seqused_q=numbers(1, 2), backward=backward)
        assert ", attention_chunk 9, seqused_q" in text
    described = strobe.ArraySpec((2,), "int32")
    assert "takes it" in strobe.why(*qkv, prefix=described)
    assert "expected 0 (off)" in strobe.why(*qkv, prefix=described, attention_chunk=3)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3b11fnuz])
def test_some_float8_is_unsupported(dtype: Any) -> None:
    inputs = Case().make(np.random.default_rng(10))
    q, k, v = (x.astype(dtype) for x in (inputs.q, inputs.k, inputs.v))
    words = "no kernel takes such queries, expected float32, bfloat16 or float16, or float8_e4m3fn"
    with pytest.raises(strobe.Unsupported, match=rf"q.dtype = float8_\w+: {words}"):
        strobe.attention(q, k, v)
    with pytest.raises(strobe.InvalidArgument, match=r"k\.dtype = float8"):
        strobe.attention(inputs.q, k, v)
    assert words in strobe.why(q, k, v)
    assert cases.DTYPES.keys() == DTYPE_CODES.keys()
