"""Random problems of the kind that flash_attn's own tests go through, forward and backward, against
float64: types of heads, head dimensions, lengths that no tile divides, masks, ALiBi, dropout,
softcap, packing, rows that are not in use. Those over caches are in test_flash_attn_kvcache.py.

STROBE_RANDOM_PROBLEMS says how many; STROBE_RANDOM_SEED which is the first.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from strobe import flash_attn_3  # noqa: E402

import oracle  # noqa: E402
from cases import DTYPES, Array, Case, Inputs  # noqa: E402
from tensors import FUNCTIONS, Function, array, seed_dropout, tensor  # noqa: E402

COUNT = int(os.environ.get("STROBE_RANDOM_PROBLEMS", "60"))
FIRST = int(os.environ.get("STROBE_RANDOM_SEED", "0"))
# What FlashAttention-3's functions are called with besides.
THREE = {
    "dense-3": Function(flash_attn_3.flash_attn_func, False, ""),
    "varlen-3": Function(flash_attn_3.flash_attn_varlen_func, True, ""),
}
HEAD_DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
LENGTHS = (
    (1, 3), (1, 147), (3, 99), (13, 203), (64, 128), (113, 103), (108, 56), (128, 117), (127, 127),
    (40, 1), (211, 96), (5, 0), (0, 7),
)  # fmt: skip


def draw(rng: np.random.Generator) -> tuple[str, Case]:
    """A function, and a problem that it takes."""

    def pick(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    name = pick(*FUNCTIONS, *THREE)
    function = (FUNCTIONS | THREE)[name]
    heads = int(pick(1, 2, 4, 6))
    heads_kv = int(pick(heads, 1, heads // 2 or 1))
    seqlen_q, seqlen_k = pick(*LENGTHS)
    if function.packed == "qkv":
        heads_kv, seqlen_k = heads, seqlen_q
    head_dim = int(pick(*HEAD_DIMS))
    case = Case(
        batch=int(pick(1, 2, 3)),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads=heads,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim if function.packed or rng.random() < 0.8 else int(pick(24, 64, 256)),
        dtype=str(pick(*DTYPES)),
    )
    options: dict[str, Any] = {"causal": bool(pick(0, 1))}
    if pick(0, 1):
        options["window"] = (int(rng.integers(-1, 50)), int(rng.integers(-1, 50)))
    if pick(0, 0, 1):
        options["scale"] = float(rng.uniform(0.02, 0.3))
    if pick(0, 0, 1):
        options["softcap"] = float(pick(0.7, 15.0, 50.0))
    three = name in THREE
    if not three:
        case.alibi = int(pick(0, 0, 1, 2))
        if "softcap" not in options and pick(0, 0, 1):
            options["dropout_p"] = float(pick(0.17, 0.5))
    elif pick(0, 0, 1):
        options["attention_chunk"] = int(pick(1, 16, 50))
    if function.varlen:
        case.batch = int(pick(1, 3, 5))
        case.cu_q, case.cu_k = (
            [0, *np.cumsum([int(n * pick(1, 1, rng.random(), 0)) for _ in range(case.batch)])]
            for n in (seqlen_q, seqlen_k)
        )
        if function.packed == "qkv":
            case.cu_k = case.cu_q
        if three and pick(0, 1):  # rows that are not in use, which hold NaN
            for side, offsets in (("q", case.cu_q), ("k", case.cu_k)):
                if pick(0, 1, 1):
                    used = [int(rng.integers(0, n + 1)) for n in np.diff(offsets)]
                    options[f"seqused_{side}"] = np.array(used, np.int32)
    case.with_dlse = bool(pick(0, 0, 1)) and not function.packed
    case.options = options
    return name, case


def arguments(function: Function, inputs: Inputs, rng: np.random.Generator) -> Any:
    """Tensors, and options as flash_attn has them; some of them said in another way."""
    tensors, options = function.arguments(inputs, "cpu")
    for side in ("left", "right"):  # no limit is any negative number
        at = side == "right"
        window = list(options.get("window_size", (-1, -1)))
        if window[at] == -1 and rng.random() < 0.3:
            window[at] = -int(rng.integers(2, 1000))
            options["window_size"] = tuple(window)
    options["deterministic"] = bool(rng.random() < 0.3)
    if function.varlen and rng.random() < 0.3:
        name = "max_seqlen" if function.packed == "qkv" else "max_seqlen_q"
        options[name] += int(rng.integers(0, 40))
    return tensors, options


def check_gradients(inputs: Inputs, out: Array, gradients: list[Array]) -> None:
    """As `Inputs.check_backward`, and with room for what follows from the rounding of out, which a
    backward pass is given: it takes sum(dout * out) of each row for the mean of the weights'
    gradients. Where a row sees one key or a few, that is most of the error, and none of the
    comparator's, which takes the mean of what it has. In the oracle an error of that sum is a
    gradient of lse.
    """
    wanted, plain = inputs.reference(), inputs.reference(inputs.q.dtype)
    off = (inputs.dout.astype(np.float64) * (out.astype(np.float64) - wanted.out)).sum(-1)
    off = off.T if off.ndim == 2 else np.moveaxis(off, 1, 2)
    dlse = 0.0 if inputs.dlse is None else inputs.dlse.astype(np.float64)
    rounded = dataclasses.replace(inputs, dlse=dlse - off).reference()
    alibi = "alibi_slopes" in inputs.options
    factor = oracle.ALIBI_GRADIENT_FACTOR if alibi else oracle.GRADIENT_FACTOR
    for name, got in zip(("dq", "dk", "dv"), gradients, strict=True):
        exact = getattr(wanted, name)
        errors = [np.abs(getattr(x, name).astype(np.float64) - exact) for x in (plain, rounded)]
        # Both sums are of head_dim_v products in float32.
        room = 1e-5 * max(1, inputs.v.shape[-1] / 64)
        allowed = factor * sum(float(error.max(initial=0)) for error in errors) + room
        oracle.check_within(name, got, exact, np.full(exact.shape, allowed))


def check(seed: int) -> None:
    rng = np.random.default_rng(seed)
    name, case = draw(rng)
    try:
        function = (FUNCTIONS | THREE)[name]
        inputs = case.make(rng)
        tensors, options = arguments(function, inputs, rng)
        if "seqused_q" in inputs.options or "seqused_k" in inputs.options:
            inputs.poison_unused()
            tensors, _ = function.arguments(inputs, "cpu")
        seed_dropout(inputs, "cpu", seed)
        leaves = [x.requires_grad_() for x in tensors]
        out, lse, *_ = function.call(*leaves, **options, return_attn_probs=True)
        inputs.check_forward(array(out), array(lse))
        results, given = [out], [tensor(inputs.dout)]
        if inputs.dlse is not None:
            results, given = [out, lse], [*given, tensor(inputs.dlse)]
        gradients = torch.autograd.grad(results, leaves, given)
        found = [array(x) for x in function.unpack(list(gradients))]
        check_gradients(inputs, array(out), found)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {name}, {case}") from error


@pytest.mark.parametrize("part", range(6))
def test_random_problems(part: int) -> None:
    for seed in range(FIRST + part, FIRST + COUNT, 6):
        check(seed)


def test_what_is_drawn() -> None:
    """Each kind is among the first problems, so that none is left out by a slip of `draw`."""
    drawn = [draw(np.random.default_rng(seed)) for seed in range(400)]
    assert {name for name, _ in drawn} == {*FUNCTIONS, *THREE}
    assert {case.dtype for _, case in drawn} == {*DTYPES}
    assert {case.head_dim for _, case in drawn} == {*HEAD_DIMS}
    options = {name for _, case in drawn for name in case.options}
    assert options == {
        *("causal", "window", "scale", "softcap", "dropout_p", "attention_chunk"),
        *("seqused_q", "seqused_k"),
    }
    assert {case.alibi for _, case in drawn} == {0, 1, 2}
    for sign in (-1, 1):  # of the difference of lengths, where a window or causal mask is
        assert any(
            np.sign(case.seqlen_k - case.seqlen_q) == sign and "window" in case.options
            for _, case in drawn
            if case.cu_q is None
        )
