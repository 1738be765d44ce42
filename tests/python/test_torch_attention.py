"""strobe.torch.attention, packed and with prefixes, and strobe.attention of the same on NumPy's
arrays: against softmax(scale * q k^T + bias) v in float64, gradients by autograd.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import strobe
from strobe import _options

torch = pytest.importorskip("torch")

import strobe.torch  # noqa: E402

from tensors import Tensor  # noqa: E402

OFFSETS_Q = [0, 3, 3, 12, 20]
OFFSETS_K = [0, 7, 9, 20, 26]
BATCH = 4


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


PACKED: dict[str, Any] = {"cu_seqlens_q": numbers(*OFFSETS_Q), "cu_seqlens_k": numbers(*OFFSETS_K)}
CASES: dict[str, dict[str, Any]] = {
    "packed": PACKED,
    "packed, causal": PACKED | {"causal": True},
    "packed, with their longest": PACKED | {"max_seqlen_q": 9, "max_seqlen_k": 11, "causal": True},
    "packed, prefix": PACKED | {"causal": True, "prefix": numbers(5, 1, 4, 0)},
    "packed, lengths in use": PACKED
    | {"seqused_q": numbers(2, 0, 9, 5), "seqused_k": numbers(7, 1, 8, 0), "causal": True},
    "packed, window and ALiBi": PACKED | {"window": (4, 1), "alibi_slopes": torch.rand(BATCH, 4)},
    "packed, open window": PACKED | {"window": (None, -1)},
    "prefix": {"causal": True, "prefix": numbers(0, 3, 8, 13)},
    "prefix of a position": {"causal": True, "prefix": numbers(0, 3, 8, 13)}
    | {"q_position": numbers(0, 1, 2, 8)},
    "chunks": {"attention_chunk": 4, "causal": True},
    "signed window": {"window": (8, -3), "window_signed": True},
    "softcap": {"softcap": 1.5, "scale": 0.4},
    "plain": {},
}


def inputs(options: dict[str, Any], dtype: Any = torch.float32) -> list[Tensor]:
    torch.manual_seed(7)
    rows, keys = (20,), (26,)
    if "cu_seqlens_q" not in options:
        rows, keys = (BATCH, 6), (BATCH, 13)  # type: ignore[assignment]
    shapes = (*rows, 4, 16), (*keys, 2, 16), (*keys, 2, 24)
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def of_one(q: Tensor, k: Tensor, v: Tensor, b: int, options: dict[str, Any]) -> Any:
    """One sequence, (rows, heads, head_dim): by the definitions of docs/semantics.md."""
    used_q, used_k = (
        int(options[name][b]) if name in options else x.shape[0]
        for name, x in (("seqused_q", q), ("seqused_k", k))
    )
    position = int(options["q_position"][b]) if "q_position" in options else used_k - used_q
    i, j = position + torch.arange(used_q)[:, None], torch.arange(used_k)
    left, right = options.get("window", (-1, -1))
    signed = options.get("window_signed", False) or None in (left, right)
    seen = torch.ones(used_q, used_k, dtype=torch.bool)
    if left is not None and (signed or left >= 0):
        seen &= j >= i - left
    if right is not None and (signed or right >= 0):
        seen &= j <= i + right
    if options.get("causal"):
        seen &= j <= i
    if options.get("attention_chunk"):
        seen &= i // options["attention_chunk"] == j // options["attention_chunk"]
    if "prefix" in options:
        seen |= j < options["prefix"][b]
    group = q.shape[1] // k.shape[1]
    keys, values = (x[:used_k].repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q[:used_q], keys)
    scores = scores * options.get("scale", 1 / math.sqrt(q.shape[-1]))
    if options.get("softcap"):
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    if "alibi_slopes" in options:
        scores = scores - options["alibi_slopes"][b].double()[:, None, None] * (i - j).abs()
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.where(seen.any(-1)[:, None], scores, 0.0).softmax(-1) * seen.any(-1)[:, None]
    rest = q.shape[0] - used_q
    out = torch.nn.functional.pad(
        torch.einsum("hij,jhd->ihd", weights, values), [0] * 4 + [0, rest]
    )
    return out, torch.nn.functional.pad(lse, [0, rest], value=-torch.inf)


def reference(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    q, k, v = q.double(), k.double(), v.double()
    if "cu_seqlens_q" not in options:
        found = [of_one(*rows, b, options) for b, rows in enumerate(zip(q, k, v, strict=True))]
        outs, lses = zip(*found, strict=True)
        return torch.stack(outs), torch.stack(lses)
    found = []
    for b in range(BATCH):
        rows, keys = (slice(*x[b : b + 2]) for x in (OFFSETS_Q, OFFSETS_K))
        found.append(of_one(q[rows], k[keys], v[keys], b, options))
    outs, lses = zip(*found, strict=True)
    return torch.cat(outs), torch.cat(lses, -1)


def check(function: Callable[..., Any], options: dict[str, Any]) -> None:
    q, k, v = inputs(options)
    out, lse = function(q, k, v, return_lse=True, **options)
    wanted, wanted_lse = reference(q, k, v, options)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)
    dout = torch.randn_like(out)
    dlse = torch.where(wanted_lse.isfinite(), torch.randn_like(lse), 0.0)

    def loss(out: Tensor, lse: Tensor) -> Tensor:
        finite = torch.where(lse.isfinite(), lse, 0.0)
        return (out * dout).sum() + (finite * dlse).sum()

    gradients = torch.autograd.grad(loss(out, lse), (q, k, v))
    expected = torch.autograd.grad(loss(wanted, wanted_lse), (q, k, v))
    for name, found, right in zip("qkv", gradients, expected, strict=True):
        torch.testing.assert_close(
            found, right, rtol=1e-4, atol=1e-4, msg=lambda said, name=name: f"d{name}: {said}"
        )


@pytest.mark.parametrize("name", CASES)
def test_against_plain_operations(name: str) -> None:
    check(strobe.torch.attention, CASES[name])


@pytest.mark.parametrize("name", ["packed, prefix", "packed, lengths in use", "prefix"])
def test_compiled(name: str) -> None:
    """One graph, forward and backward."""
    torch._dynamo.reset()
    compiled = torch.compile(strobe.torch.attention, backend="aot_eager", fullgraph=True)
    check(compiled, CASES[name])
    torch._dynamo.reset()


@pytest.mark.parametrize("name", CASES)
def test_numpys_arrays(name: str) -> None:
    """strobe.attention and its derivative take the same options, without autograd."""
    options = CASES[name]
    arrays = {x: y.numpy() if isinstance(y, torch.Tensor) else y for x, y in options.items()}
    q, k, v = inputs(options)
    plain = [x.detach().numpy() for x in (q, k, v)]
    out, lse = strobe.attention(*plain, return_lse=True, **arrays)
    wanted, _ = reference(q, k, v, options)
    np.testing.assert_allclose(out, wanted.detach(), rtol=1e-5, atol=1e-5)
    dout = torch.randn(wanted.shape)
    backward: Any = strobe.attention_backward
    gradients = backward(dout.numpy(), *plain, out, lse, **arrays)
    expected = torch.autograd.grad((wanted * dout).sum(), (q, k, v))
    for found, right in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-4)


def test_shapes_of_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for options in (PACKED | {"prefix": numbers(5, 1, 4, 0), "causal": True}, {"causal": True}):
        real = inputs(options)
        plain = [x.detach() for x in real]
        wanted = strobe.torch.attention(*plain, return_lse=True, **options)
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(x) for x in plain]
            given: Any = {
                x: mode.from_tensor(y) if isinstance(y, torch.Tensor) else y
                for x, y in options.items()
            }
            found = strobe.torch.attention(*fake, return_lse=True, **given)
        for x, y in zip(found, wanted, strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)


def test_vmap_and_functional_gradients() -> None:
    options: dict[str, Any] = {"causal": True, "prefix": numbers(0, 3, 8, 13)}
    q, k, v = (x.detach() for x in inputs(options))

    def loss(q: Tensor) -> Any:
        return strobe.torch.attention(q, k, v, **options).square().sum()

    leaf = q.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(leaf), leaf)
    assert torch.equal(torch.func.grad(loss)(q), wanted)
    each = torch.func.vmap(lambda q: strobe.torch.attention(q, k, v, **options))
    both = each(torch.stack((q, 2 * q)))
    torch.testing.assert_close(both[1], strobe.torch.attention(2 * q, k, v, **options))


LEARNED: dict[str, Callable[[], dict[str, Tensor]]] = {
    "none": dict,
    "sinks": lambda: {"sinks": torch.randn(2, requires_grad=True)},
    "bias": lambda: {"bias": torch.randn(1, 2, 5, 7, requires_grad=True)},
    "both": lambda: LEARNED["sinks"]() | LEARNED["bias"](),
}


def small() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, n, 2, 8, requires_grad=True) for n in (5, 7, 7)]


@pytest.mark.parametrize("name", LEARNED)
def test_a_gradient_of_gradients_is_refused_by_name(name: str) -> None:
    """And does not count as 0, whatever else has a gradient."""
    learned = LEARNED[name]()
    leaves = [*small(), *learned.values()]
    loss = strobe.torch.attention(*leaves[:3], **learned).square().sum()
    found = torch.autograd.grad(loss, leaves, create_graph=True)
    for first in found:
        with pytest.raises(strobe.Unsupported, match="double backward"):
            first.square().sum().backward(retain_graph=True)


@pytest.mark.parametrize("name", LEARNED)
def test_many_gradients_at_once(name: str) -> None:
    learned = LEARNED[name]()
    leaves = [*small(), *learned.values()]
    out, lse = strobe.torch.attention(*leaves[:3], **learned, return_lse=True)
    douts, dlses = torch.randn(3, *out.shape), torch.randn(3, *lse.shape)

    def gradients(dout: Tensor, dlse: Tensor, **options: Any) -> Any:
        return torch.autograd.grad((out, lse), leaves, (dout, dlse), retain_graph=True, **options)

    if learned:
        with pytest.raises(strobe.Unsupported, match=r"many gradients at once .* sinks or a bias"):
            gradients(douts, dlses, is_grads_batched=True)
        return
    each = [gradients(*x) for x in zip(douts, dlses, strict=True)]
    for got, right in zip(
        gradients(douts, dlses, is_grads_batched=True), zip(*each, strict=True), strict=True
    ):
        torch.testing.assert_close(got, torch.stack(right))


def test_many_gradients_at_once_of_pytorchs_function() -> None:
    q, k, v = (x.transpose(1, 2).contiguous() for x in small())
    with strobe.torch.sdpa_kernel() as served:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert served.calls == 1
    with pytest.raises(strobe.Unsupported, match="many gradients at once"):
        torch.autograd.grad(out, q, torch.randn(3, *out.shape), is_grads_batched=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_sink_for_all_heads(dtype: Any) -> None:
    """Expanded, and every other number of a tensor."""
    q, k, v = small()
    sink = torch.tensor([0.5, 2.0, 1.0], dtype=dtype, requires_grad=True)
    for view in (sink[:1].expand(2), sink[::2]):
        assert not view.is_contiguous()
        plain = view.contiguous()
        found, wanted = (strobe.torch.attention(q, k, v, sinks=x) for x in (view, plain))
        assert torch.equal(found, wanted)
        dfound, dwanted = (torch.autograd.grad(x.sum(), sink)[0] for x in (found, wanted))
        torch.testing.assert_close(dfound, dwanted)


def test_autocast_and_dropout() -> None:
    q, k, v = (x.detach() for x in inputs(PACKED))
    with torch.autocast("cpu", torch.bfloat16):
        assert strobe.torch.attention(q, k, v, **PACKED).dtype == torch.bfloat16
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(strobe.torch.attention(q, k, v, dropout_p=0.5, **PACKED))
    assert torch.equal(*results)
    assert not torch.equal(results[0], strobe.torch.attention(q, k, v, dropout_p=0.5, **PACKED))


def test_its_options_are_the_tables() -> None:
    """All but those that operators have no place for; their defaults too."""
    parameters = inspect.signature(strobe.torch.attention).parameters
    named = strobe.torch.attention.__globals__["Options"].__annotations__
    assert {*named, "q", "k", "v", "return_lse"} == set(parameters)
    own = {"q", "k", "v", "deterministic", "return_lse"}
    absent = {"dropout_seed", "dropout_offset", "batch_invariant", "threads", "mask_layout"}
    absent |= {"q_scale", "k_scale", "v_scale"}  # of float8, which has no gradients
    absent |= {f"dropout_{place}" for place in ("first_query", "first_key", "first_head", "heads")}
    rows = {row.name: row.default for row in _options.ROWS if row.name not in absent}
    assert {name: p.default for name, p in parameters.items() if name not in own} == rows


def test_numbers_in_tensors() -> None:
    """Of one element, as seqlens.max() gives them; a learned scale is refused."""
    q, k, v = (x.detach() for x in inputs(PACKED))
    wanted = strobe.torch.attention(q, k, v, **PACKED, window=(3, 0))
    longest = {"max_seqlen_q": torch.tensor(9), "max_seqlen_k": torch.tensor(11)}
    limits: Any = (torch.tensor(3), 0)
    assert torch.equal(strobe.torch.attention(q, k, v, **PACKED, **longest, window=limits), wanted)
    learned: Any = torch.tensor(0.5, requires_grad=True)
    with pytest.raises(strobe.Unsupported, match=r"^scale requires a gradient"):
        strobe.torch.attention(q, k, v, scale=learned, **PACKED)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": 3}, r"window = 3, expected a pair .*, -1 or None for no limit"),
        ({"window": (-2, 0)}, r"window\[0\] = -2, expected -1 \(no limit\) or more"),
        ({"prefix": [1, 2]}, "prefix is of type list, expected a torch.Tensor"),
        ({"prefix": numbers(1, 2)}, r"prefix.shape\[0\] = 2, expected 4"),
        ({"seqused_k": numbers(99, 1, 1, 1)}, r"seqused_k\[0\] = 99, expected 0 to 13"),
        ({"causal": "yes"}, "causal = 'yes', expected a bool"),
        ({"dropout_p": 1.0}, r"dropout_p = 1.0, expected a number in \[0, 1\)"),
        ({"cu_seqlens_q": numbers(0, 24)}, "q.ndim = 4, expected 3"),
        ({"max_seqlen_q": 6}, "max_seqlen_q = 6, expected None: it belongs to cu_seqlens_q"),
        ({"return_lse": 2}, "return_lse = 2, expected a bool"),
        ({"deterministic": None}, "deterministic = None, expected a bool"),
    ],
)
def test_errors_name_the_argument(options: dict[str, Any], words: str) -> None:
    q, k, v = inputs({})
    with pytest.raises(strobe.InvalidArgument, match="^" + words):
        strobe.torch.attention(q, k, v, **options)


def test_one_array_of_lengths_alone() -> None:
    q, k, v = inputs(PACKED)
    with pytest.raises(strobe.InvalidArgument, match=r"^cu_seqlens_k = None, expected an array"):
        strobe.torch.attention(q, k, v, cu_seqlens_q=PACKED["cu_seqlens_q"])
    slopes = torch.rand(4, requires_grad=True)
    with pytest.raises(strobe.Unsupported, match=r"^alibi_slopes requires a gradient"):
        strobe.torch.attention(q, k, v, alibi_slopes=slopes, **PACKED)
