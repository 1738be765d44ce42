"""What is beneath flash_attn's functions in the distribution flash-attn: the functions without
autograd, the extension module's, PyTorch's operators and the autograd functions.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest

import strobe

torch = pytest.importorskip("torch")
if importlib.util.find_spec("flit_core") is None:
    pytest.skip("flit_core is not installed", allow_module_level=True)

from tensors import Tensor  # noqa: E402

OFFSETS = torch.tensor([0, 7, 7, 19], dtype=torch.int32)
# What forward returns with PyTorch's generator at this seed.
SEED = 1


@pytest.fixture
def interface(flash_attn: Any) -> Any:
    return importlib.import_module("flash_attn.flash_attn_interface")


def inputs(packed: bool, head_dim: int = 16) -> tuple[list[Tensor], tuple[Any, ...]]:
    """q, k, v, dout, which require gradients, and what says how they are packed."""
    torch.manual_seed(0)
    shape = (19, 2, head_dim) if packed else (2, 19, 2, head_dim)
    tensors = [torch.randn(shape, requires_grad=True) for _ in range(4)]
    return tensors, (OFFSETS, OFFSETS, 12, 12) if packed else ()


def results(function: Any, *arguments: Any) -> Any:
    torch.manual_seed(SEED)
    return function(*arguments)


def assert_equal(found: Any, wanted: Any) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


def delta(dout: Tensor, out: Tensor, packed: bool, p: float) -> Tensor:
    """softmax_d, one row after the other."""
    rows = (dout * out).sum(-1).detach() * (1 - p)
    if not packed:
        found = torch.zeros(2, 2, 128)
        found[..., :19] = rows.transpose(1, 2)
        return found
    found = torch.zeros(2, 19 + 3 * 128)
    for row in range(19):
        sequence = 0 if row < 7 else 2  # that in between is empty
        found[:, row + 128 * sequence] = rows[row]
    return found


@pytest.mark.parametrize("kind", ["_", "_wrapped_"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_functions_without_autograd(
    kind: str, packed: bool, dropout_p: float, interface: Any
) -> None:
    (q, k, v, dout), lengths = inputs(packed)
    form = "varlen_" if packed else ""
    forward = getattr(interface, f"{kind}flash_attn_{form}forward")
    backward = getattr(interface, f"{kind}flash_attn_{form}backward")
    function = interface.flash_attn_varlen_func if packed else interface.flash_attn_func
    slopes = torch.rand(2)
    p, scale, causal, left, right, softcap = (dropout_p, 0.2, True, 5, -1, 0.0)
    options = (p, scale, causal, left, right, softcap, slopes)
    tail = (p, scale, causal, (left, right), softcap, slopes, False, True)
    wanted = results(function, q, k, v, *lengths, *tail)
    gradients = torch.autograd.grad(wanted[0], (q, k, v), dout)

    with torch.no_grad():
        out, lse, weights, rng_state = results(forward, q, k, v, *lengths, *options, True)
        assert_equal((out, lse, weights), wanted)
        assert (rng_state.shape, rng_state.dtype) == ((2,), torch.int64)
        # dk in the middle of something larger; dv is not wanted
        room = torch.zeros(*k.shape[:-2], 3, *k.shape[-2:])
        dq, dk = torch.empty_like(q), room.select(-3, 1)
        arguments = (dout, q, k, v, out, lse, dq, dk, None, *lengths, *options, False)
        softmax_d = backward(*arguments, rng_state=rng_state)
    assert_equal((dq, dk), gradients[:2])
    assert not room.select(-3, 0).any()
    assert softmax_d.dtype == torch.float32
    torch.testing.assert_close(softmax_d, delta(dout, out, packed, p))
    # Without gradients of autograd's
    if kind == "_":
        assert not results(forward, q, k, v, *lengths, *options, True)[0].requires_grad


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_extension_module(packed: bool, dropout_p: float, interface: Any) -> None:
    (q, k, v, dout), lengths = inputs(packed)
    gpu = interface.flash_attn_gpu
    slopes = torch.rand(2)
    form = "varlen_" if packed else ""
    reference = results(
        getattr(interface, f"_flash_attn_{form}forward"),
        *(q, k, v, *lengths, dropout_p, 0.2, True, 5, 0, 0.0, slopes, True),
    )
    offsets, longest = lengths[:2], lengths[2:]
    target = torch.empty_like(q)
    zero_tensors = (False,) if packed else ()
    mask = (True, 5, 0, 0.0)
    caches = (None, None, None) if packed else ()
    found = results(
        gpu.varlen_fwd if packed else gpu.fwd,
        *(q, k, v, target, *offsets, *caches, slopes, *longest),
        *(dropout_p, 0.2, *zero_tensors, *mask, True, None),
    )
    assert isinstance(found, list)
    assert found[0] is target
    assert_equal(found, reference)
    out, lse, _, rng_state = found

    def backward(*gradients: Any) -> Any:
        return (gpu.varlen_bwd if packed else gpu.bwd)(
            *(dout, q, k, v, out, lse, *gradients, *offsets, slopes, *longest),
            *(dropout_p, 0.2, *zero_tensors, *mask, False, None, rng_state),
        )

    with torch.no_grad():
        made = backward(None, None, None)
        given = [torch.empty_like(q) for _ in range(3)]
        written = backward(*given)
    assert len(made) == 4
    assert_equal(written, made)
    for a, b in zip(written, given, strict=False):
        assert a is b


def test_a_cache_by_position(interface: Any) -> None:
    """fwd_kvcache, and varlen_fwd with a block_table: what flash_attn_with_kvcache gives."""
    gpu = interface.flash_attn_gpu
    q, new = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16)
    cache = [torch.randn(3, 8, 2, 16) for _ in range(2)]
    copies = [x.clone() for x in cache]
    used, table = torch.tensor([3, 9]).int(), torch.tensor([[2, 7], [1, 0]]).int()
    wanted = interface.flash_attn_with_kvcache(
        q, *cache, new, new, cache_seqlens=used, block_table=table, causal=True,
        return_softmax_lse=True,
    )  # fmt: skip
    out = torch.empty_like(q)
    found = gpu.fwd_kvcache(
        *(q, *copies, new, new, used, None, None, None, None, table, None, out, None, True),
        *(-1, -1, 0.0, True, 0),
    )
    assert found[0] is out
    assert_equal(found, wanted)
    assert_equal(copies, cache)
    offsets = torch.arange(3, dtype=torch.int32)
    lengths = (offsets, torch.tensor([0, 4, 14]).int(), 1, 10)
    packed = interface._flash_attn_varlen_forward(
        q[:, 0], *cache, *lengths, 0.0, None, True, block_table=table
    )
    assert_equal((packed[0][:, None], packed[1].t()[..., None]), wanted)
    again = interface._flash_attn_varlen_forward(
        *(q[:, 0], *cache, *lengths, 0.0, None, True), block_table=table, num_splits=3
    )
    assert_equal(again, packed)
    for name in ("num_splits", "zero_tensors"):
        wrong = {name: torch.ones(2)}
        with pytest.raises(strobe.InvalidArgument, match=f"^{name} .*shape"):
            interface._flash_attn_varlen_forward(
                *(q[:, 0], *cache, *lengths, 0.0, None, True), block_table=table, **wrong
            )
    with pytest.raises(strobe.InvalidArgument, match=r"dropout_p = 0.3 with block_table"):
        interface._flash_attn_varlen_forward(
            q[:, 0], *cache, *lengths, 0.3, None, True, block_table=table
        )


@pytest.mark.parametrize("return_softmax", [False, True])
def test_the_autograd_function_of_pages_has_no_backward_pass(
    return_softmax: bool, interface: Any
) -> None:
    """As flash_attn's own, it computes where a gradient is required; then it says no."""
    q = torch.randn(2, 4, 16, requires_grad=True)
    cache = [torch.randn(3, 8, 2, 16) for _ in range(2)]
    table, offsets = torch.tensor([[2, 1], [1, 0]]).int(), torch.arange(3, dtype=torch.int32)
    lengths = (offsets, torch.tensor([0, 4, 14]).int(), 1, 10)
    tail = (0.0, None, True, (5, -1), 0.0, torch.rand(4), False, return_softmax)
    wanted = interface.flash_attn_varlen_func(q, *cache, *lengths, *tail, block_table=table)
    found = interface.FlashAttnVarlenFunc.apply(q, *cache, *lengths, *tail, table, True)
    if not return_softmax:
        found, wanted = (found,), (wanted,)
    assert_equal(found, wanted)
    for results in (found, wanted):
        for x in results[:2]:
            with pytest.raises(strobe.Unsupported, match=r"gradient of attention with block_table"):
                x.sum().backward(retain_graph=True)


APPLY = ["", "QKVPacked", "KVPacked"]


@pytest.mark.parametrize("form", APPLY)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("is_grad_enabled", [(), (True,)])
def test_autograd_functions(
    form: str, packed: bool, dropout_p: float, is_grad_enabled: tuple[Any, ...], interface: Any
) -> None:
    (q, k, v, dout), lengths = inputs(packed)
    dlse = torch.randn(2, 19) if packed else torch.randn(2, 2, 19)
    axis = 1 if packed else 2
    function = f"flash_attn_{'varlen_' if packed else ''}{form.lower()}_func".replace("__", "_")
    tensors = {
        "": (q, k, v),
        "QKVPacked": (torch.stack((q, k, v), axis),),
        "KVPacked": (q, torch.stack((k, v), axis)),
    }[form]
    tensors = tuple(x.detach().requires_grad_() for x in tensors)
    if form == "QKVPacked":
        lengths = lengths[::2]
    table = (None,) if packed and not form else ()
    tail = (dropout_p, None, True, (5, 3), 0.0, torch.rand(2), True, True)
    wanted = results(getattr(interface, function), *tensors, *lengths, *tail)
    apply = getattr(interface, f"FlashAttn{'Varlen' if packed else ''}{form}Func").apply
    found = results(apply, *tensors, *lengths, *tail, *table, *is_grad_enabled)
    assert_equal(found, wanted)
    assert not found[2].requires_grad
    # out alone, out and lse, lse alone
    for which in ((0,), (0, 1), (1,)):
        a, b = (
            torch.autograd.grad(
                [x[n] for n in which], tensors, [(dout, dlse)[n] for n in which], retain_graph=True
            )
            for x in (found, wanted)
        )
        assert_equal(a, b)
    alone = results(apply, *tensors, *lengths, *tail[:-1], False, *table, *is_grad_enabled)
    assert torch.equal(alone, wanted[0])
    assert alone.grad_fn is not None


def test_autograd_function_inside_another(interface: Any) -> None:
    class Mine(torch.autograd.Function):  # type: ignore[name-defined, misc]
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
            arguments = (q, k, v, 0.0, None, True, (-1, -1), 0.0, None, False, False)
            return interface.FlashAttnFunc.forward(ctx, *arguments, True)

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> Any:
            return interface.FlashAttnFunc.backward(ctx, dout)[:3]

    (q, k, v, dout), _ = inputs(False)
    wanted = interface.flash_attn_func(q, k, v, causal=True)
    out = Mine.apply(q, k, v)
    assert torch.equal(out, wanted)
    assert_equal(*(torch.autograd.grad(x, (q, k, v), dout) for x in (out, wanted)))


@pytest.mark.parametrize("packed", [False, True])
def test_operators_under_compile(packed: bool, interface: Any) -> None:
    """Shapes, dtypes, devices and what is written are as the operators say, dynamic or not."""
    (q, k, v, dout), lengths = inputs(packed)
    q, k, v, dout = (x.detach() for x in (q, k, v, dout))
    form = "varlen_" if packed else ""
    options = (0.0, 0.25, True, -1, -1, 0.0, None)
    forward = getattr(interface, f"_wrapped_flash_attn_{form}forward")
    backward = getattr(interface, f"_wrapped_flash_attn_{form}backward")
    assert str(forward) == f"flash_attn._flash_attn_{form}forward"
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(forward.default, (q, k, v, *lengths, *options, False), test_utils=tests)
    torch.library.opcheck(  # test_schema would want the same numbers twice
        forward.default, (q, k, v, *lengths, 0.3, *options[1:], True), test_utils=tests[1:]
    )
    out, lse, *_ = forward(q, k, v, *lengths, *options, False)
    gradients = [torch.zeros_like(q) for _ in range(3)]
    torch.library.opcheck(
        backward.default,
        (dout, q, k, v, out, lse, *gradients, *lengths, *options, False),
        test_utils=tests,
    )

    def step(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        out, lse, _, _ = forward(q, k, v, *lengths, *options, False)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        rest = backward(dout, q, k, v, out, lse, dq, dk, dv, *lengths, *options, False)
        return out * 2, dq, dk, dv, rest

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert_equal(compiled(q, k, v, dout), step(q, k, v, dout))


def test_keys_in_use(interface: Any) -> None:
    (q, k, v, _), lengths = inputs(True)
    cu_k = lengths[1]
    used = (cu_k[1:] - cu_k[:-1]) // 2
    forward = interface._flash_attn_varlen_forward
    for b, count in enumerate(used.tolist()):
        for x in (k, v):
            x.detach()[cu_k[b] + count : cu_k[b + 1]] = float("nan")
    out, lse, _, _ = forward(q, k, v, *lengths, 0.0, 0.2, True, seqused_k=used)
    wanted = strobe.attention(
        *(x.detach() for x in (q, k, v)),
        scale=0.2,
        causal=True,
        return_lse=True,
        **dict(
            zip(
                ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
                lengths,
                strict=True,
            )
        ),
        seqused_k=used,
    )
    assert torch.equal(out, wanted[0])
    assert torch.equal(lse, wanted[1])
    assert torch.isfinite(out).all()
    with pytest.raises(NotImplementedError, match="return_softmax with seqused_k"):
        forward(q, k, v, *lengths, 0.3, 0.2, True, return_softmax=True, seqused_k=used)


def test_refusals(interface: Any) -> None:
    (q, k, v, dout), lengths = inputs(True)
    forward, backward = interface._flash_attn_varlen_forward, interface._flash_attn_varlen_backward
    with pytest.raises(NotImplementedError, match=r"^leftpad_k without block_table"):
        forward(q, k, v, *lengths, 0.0, 0.2, True, leftpad_k=OFFSETS[:2])
    out, lse, _, _ = forward(q, k, v, *lengths, 0.3, 0.2, True)
    tensors = (dout, q, k, v, out, lse)
    rest = (*lengths, 0.3, 0.2, True, -1, -1, 0.0, None, False)
    with pytest.raises(strobe.InvalidArgument, match=r"^rng_state = None with dropout_p = 0.3"):
        backward(*tensors, None, None, None, *rest)
    state = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(strobe.InvalidArgument, match=r"^dk.shape = \(18, 2, 16\), expected \(19"):
        backward(*tensors, None, k.detach()[1:].clone(), None, *rest, rng_state=state)

    forward = interface._flash_attn_forward
    q, k, v = (x.detach()[None] for x in (q, k, v))
    for arguments, text in (
        ((q, k, None, 0.0, 0.2, True, -1, -1, 0.0, None, False), "v is of type NoneType"),
        ((q[0], k, v, 0.0, 0.2, True, -1, -1, 0.0, None, False), "q.ndim = 3, expected 4"),
        ((q, k, v, 1.5, 0.2, True, -1, -1, 0.0, None, False), "dropout_p = 1.5"),
        ((q, k, v, 0.0, "x", True, -1, -1, 0.0, None, False), "softmax_scale = 'x'"),
        ((q, k, v, 0.0, float("nan"), True, -1, -1, 0.0, None, False), "softmax_scale = nan"),
        ((q, k, v, 0.0, 0.2, False, "x", 2, 0.0, None, False), "window_size_left = 'x'"),
        ((q, k, v, 0.0, 0.2, False, -1, 1.5, 0.0, None, False), "window_size_right = 1.5"),
        (
            (q, k, v, (), 0.2, False, -1, -1, 0.0, None, False),
            r"dropout_p = \(\), expected a number",
        ),
        ((q, k, v, 0.0, 0.2, torch.ones(2), -1, -1, 0.0, None, False), "causal = <Tensor of"),
        ((q, k, v, 0.0, 0.2, False, -1, -1, "x", None, False), "softcap = 'x'"),
        ((q, k, v, 0.0, 0.2, False, -1, -1, 0.0, 1.0, False), "alibi_slopes is of type float"),
    ):
        with pytest.raises(strobe.InvalidArgument, match=f"^{text}"):
            forward(*arguments)
    with pytest.raises(strobe.InvalidArgument, match=r"^out.ndim = 3, expected 4"):
        interface.flash_attn_gpu.fwd(
            *(q, k, v, q[0].clone(), None, 0.0, 0.2, True, -1, -1, 0.0, False, None)
        )
    with pytest.raises(NotImplementedError, match=r"^gen: a generator"):
        interface.flash_attn_gpu.fwd(
            *(q, k, v, None, None, 0.1, 0.2, True, -1, -1, 0.0, False, torch.Generator())
        )


def test_what_results_are_written_to(interface: Any) -> None:
    (q, k, v, dout), _ = inputs(False)
    q, k, v, dout = (x.detach() for x in (q, k, v, dout))
    options = (0.0, 0.2, True, -1, -1, 0.0, None, False)
    out, lse, _, _ = interface._flash_attn_forward(q, k, v, *options)
    dq = torch.full_like(q, 7.0)
    for dk, text in (
        (k.double(), r"dk.dtype = torch.float64, expected torch.float32 as q and k"),
        (k[:1].clone(), r"dk.shape = \(1, 19, 2, 16\), expected \(2, 19, 2, 16\)"),
        (k.to("meta"), "dk.device = meta, expected cpu"),
        (torch.zeros(19, 2, 16).expand(k.shape), "dk cannot be written"),
    ):
        with pytest.raises(strobe.InvalidArgument, match=f"^{text}"):
            interface._flash_attn_backward(dout, q, k, v, out, lse, dq, dk, None, *options)
        assert (dq == 7).all() or "written" in text
    # The negative bit is PyTorch's to resolve.
    negative, dq = (torch._neg_view(x) for x in (q, torch.empty_like(q)))
    found = interface._flash_attn_forward(negative, k, v, *options)
    assert_equal(found[:2], interface._flash_attn_forward(-q, k, v, *options)[:2])
    plain = torch.empty_like(q)
    for given, target in ((q, plain), (torch._neg_view(-q), dq)):
        interface._flash_attn_backward(dout, given, k, v, out, lse, target, None, None, *options)
    assert torch.equal(dq, plain)


def test_out_is_freed_while_a_table_is_read(interface: Any) -> None:
    """Of the calls of a tensor that does so at its nth function, for each n until none does."""
    q, pages, out = torch.randn(8, 2, 16), torch.randn(4, 16, 2, 16), torch.empty(8, 2, 16)
    offsets, table = torch.tensor([[0, 3, 8], [0, 9, 20]], dtype=torch.int32), [[0, 1], [2, 3]]
    options = (8, 20, 0.0, 0.25, False, True, -1, -1, 0.0, False)

    class Freeing(torch.Tensor):  # type: ignore[misc, name-defined]
        left = 0

        @classmethod
        def __torch_function__(
            cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            cls.left -= 1
            if cls.left == 0:
                target.untyped_storage().resize_(0)
            return super().__torch_function__(function, types, args, kwargs or {})

    texts = []
    for Freeing.left in range(1, 60):
        target = out.clone()
        block_table = torch.tensor(table, dtype=torch.int32).as_subclass(Freeing)
        given = (q, pages, pages, target, *offsets, None, None, block_table, None)
        try:
            interface.flash_attn_gpu.varlen_fwd(*given, *options)
        except strobe.InvalidArgument as error:
            texts.append(str(error))
    assert texts
    assert all("freed" in text for text in texts)


def test_helpers(interface: Any) -> None:
    x = torch.randn(3, 4)
    assert interface.maybe_contiguous(None) is None
    assert interface.maybe_contiguous(x) is x
    assert interface.maybe_contiguous(x.t()).stride() == (3, 1)
    assert [interface.round_multiple(n, 128) for n in (0, 1, 128, 129)] == [0, 128, 128, 256]
    assert interface._get_block_size_n(torch.device("cpu"), 64, True, False) == 64
    assert interface.USE_TRITON_ROCM is False
