"""flash_attn_with_kvcache, block_table, and strobe.flash_attn_3, whose names and meanings are the
original's: against float64 over caches of `kvcache_cases`, and against each other.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import strobe  # noqa: E402
from strobe import _core, _flash_cache, flash_attn, flash_attn_3  # noqa: E402
from strobe.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache  # noqa: E402

import kvcache_cases  # noqa: E402
from cases import Array  # noqa: E402
from kvcache_cases import Arrays, CacheCase, Sequence  # noqa: E402
from tensors import OnGpu, Tensor, array  # noqa: E402

NAMES = {
    "k_new": "k",
    "v_new": "v",
    "seqused_k": "cache_seqlens",
    "leftpad": "cache_leftpad",
    "scale": "softmax_scale",
    "window": "window_size",
}
# Arrays whose values a launch looks at.
NUMBERS = ("seqused_k", "leftpad", "cache_batch_idx", "block_table", "seqused_q")
NAMES_3 = NAMES | {"block_table": "page_table", "rotary_position": "rotary_seqlens"}


def shared(x: Array) -> Tensor:
    """A tensor in the array's own memory."""
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def arguments(arrays: Arrays, names: dict[str, str]) -> dict[str, Any]:
    given: dict[str, Any] = {"q": arrays.q, "k_cache": arrays.k, "v_cache": arrays.v}
    given |= {names.get(name, name): x for name, x in arrays.arguments.items()}
    if "rotary_cos" in given:
        given.setdefault("rotary_interleaved", False)
    if "k" not in given and all(s.used == arrays.case.capacity for s in arrays.case.sequences):
        del given["cache_seqlens"]
    return {n: shared(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}


def draw(seed: int, three: bool) -> Arrays:
    """A case that the function has arguments for, its positions counted as flash_attn does."""
    rng = np.random.default_rng(seed)
    case = kvcache_cases.draw(rng)
    case.given = ()
    if three:
        case.alibi = False
    else:
        case.packed = case.packed_new = False
        case.options.pop("attention_chunk", None)
        added = case.sequences[0].added
        for s in case.sequences:
            s.added = added
            s.used = min(s.used, case.capacity - added)
            s.leftpad = min(s.leftpad, s.used)
    case.rotary_given = case.rotary_given and three
    # Full caches, of which no length is given.
    if rng.random() < 0.3 and not any(s.added for s in case.sequences):
        for s in case.sequences:
            s.used = case.capacity
    arrays = case.make(rng)
    if case.rotary_dim and not case.rotary_given and any(s.leftpad for s in case.sequences):
        arrays.starts = np.array([s.used for s in case.sequences])
    return arrays


def of_flash_attn_3(arrays: Arrays, rng: np.random.Generator) -> dict[str, Any]:
    """Arguments, some of them the way that FlashAttention-3 alone has: the rows of the page table
    in another order and among others, and positions where nothing is rotated.
    """
    given = arguments(arrays, NAMES_3)
    table = given.get("page_table")
    if table is not None and rng.random() < 0.5:
        index = rng.permutation(len(table) + 3)[: len(table)]
        wider = torch.full((len(table) + 3, table.shape[1]), 2**30, dtype=torch.int32)
        wider[index] = table
        given |= {"page_table": wider, "cache_batch_idx": torch.from_numpy(index).int()}
    if "rotary_cos" not in given and rng.random() < 0.5:
        given["rotary_seqlens"] = torch.full((len(arrays.case.sequences),), -7, dtype=torch.int32)
    return given


@pytest.mark.parametrize("three", [False, True], ids=["flash_attn", "flash_attn_3"])
@pytest.mark.parametrize("seed", range(0, 200, 20))
def test_random_problems(seed: int, three: bool) -> None:
    for each in range(seed, seed + 20):
        arrays = draw(each, three)
        try:
            if three:
                out, lse = flash_attn_3.flash_attn_with_kvcache(
                    **of_flash_attn_3(arrays, np.random.default_rng(each)),
                    return_softmax_lse=True,
                )
            else:
                out, lse = flash_attn_with_kvcache(
                    **arguments(arrays, NAMES), return_softmax_lse=True
                )
            arrays.check(array(out), array(lse))
        except Exception as error:
            raise AssertionError(f"seed {each}: {arrays.case}") from error


@pytest.mark.parametrize("seed", range(0, 60, 20))
def test_block_table_of_packed_queries(seed: int) -> None:
    """cu_seqlens_k gives the lengths; a sequence of none, and padded columns, included."""
    for each in range(seed, seed + 20):
        rng = np.random.default_rng(each)
        case = kvcache_cases.draw(rng, page_size=int(rng.integers(1, 18)), rotary_dim=0)
        case.given, case.packed = (), True
        for name in ("attention_chunk", "rotary_interleaved"):
            case.options.pop(name, None)
        for s in case.sequences:
            s.leftpad = s.added = 0
        arrays = case.make(rng)
        given = arguments(arrays, {"window": "window_size"})
        lengths = [s.used for s in case.sequences]
        given["cu_seqlens_k"] = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        given |= {"k": given.pop("k_cache"), "v": given.pop("v_cache")}
        del given["seqused_k"]
        given |= {"max_seqlen_q": 40, "max_seqlen_k": max(lengths), "return_attn_probs": True}
        out, lse, weights = flash_attn_varlen_func(**given)
        assert weights.numel() == 0
        arrays.check(array(out), array(lse))


# --------------------------------------------------------------------------------- the arguments


def simple(**changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    given = {
        "q": torch.randn(2, 1, 4, 16, generator=generator),
        "k_cache": torch.randn(2, 40, 2, 16, generator=generator),
        "v_cache": torch.randn(2, 40, 2, 16, generator=generator),
    }
    return {**given, **changes}


def test_one_length_for_all_and_none() -> None:
    given = simple()
    lengths = torch.tensor([7, 7], dtype=torch.int32)
    wanted = flash_attn_with_kvcache(**given, cache_seqlens=lengths)
    assert torch.equal(flash_attn_with_kvcache(**given, cache_seqlens=7), wanted)
    full = flash_attn_with_kvcache(**given, cache_seqlens=40)
    assert torch.equal(flash_attn_with_kvcache(**given), full)
    for splits in (0, 1, 7):
        assert torch.equal(flash_attn_with_kvcache(**given, num_splits=splits), full)
    assert isinstance(full, torch.Tensor)
    out, lse = flash_attn_with_kvcache(**given, return_softmax_lse=True)
    assert torch.equal(out, full)
    assert lse.shape == (2, 4, 1)


def test_what_is_not_contiguous_is_copied_but_for_the_cache() -> None:
    given = simple(cache_seqlens=torch.tensor([[3, 9], [5, 9]], dtype=torch.int32)[:, 0])
    new = torch.randn(2, 1, 2, 16)
    wanted = flash_attn_with_kvcache(**{**given, "cache_seqlens": torch.tensor([3, 5]).int()})
    q = given["q"].transpose(1, 3).contiguous().transpose(1, 3)
    assert q.stride(-1) != 1
    assert torch.equal(flash_attn_with_kvcache(**{**given, "q": q}), wanted)
    given["k_cache"] = given["k_cache"].transpose(1, 3).contiguous().transpose(1, 3)
    with pytest.raises(strobe.InvalidArgument, match=r"^k_cache.stride\(3\) = 80 elements"):
        flash_attn_with_kvcache(**given, k=new, v=new)


def test_rows_of_a_page_table_that_sequences_choose() -> None:
    """cache_batch_idx with page_table in flash_attn_3; flash_attn itself refuses both together."""
    given = simple(cache_seqlens=torch.tensor([30, 70]).int(), causal=True)
    new = {name: torch.randn(2, 1, 2, 16) for name in "kv"}
    table = torch.tensor([[0, 1], [9, 9], [1, 0]]).int()  # of the middle row nobody reads
    index = torch.tensor([2, 0]).int()
    other = {**given, "k_cache": given["k_cache"].clone(), "v_cache": given["v_cache"].clone()}
    call = flash_attn_3.flash_attn_with_kvcache
    wanted = call(**given, **new, page_table=table[index])
    found = call(**other, **new, page_table=table, cache_batch_idx=index)
    assert torch.equal(found, wanted)
    assert torch.equal(other["k_cache"], given["k_cache"])
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(**given, page_table=table, cache_batch_idx=index), call(
        **given, page_table=table[index]
    ))  # fmt: skip
    for name, wrong, text in (
        (
            "cache_batch_idx",
            index + 1,
            r"cache_batch_idx\[0\] = 3, expected 0 to 2 \(a row of page_",
        ),
        ("cache_batch_idx", index - 1, r"cache_batch_idx\[1\] = -1, expected 0 to 2"),
        ("cache_batch_idx", index[None], "cache_batch_idx.ndim = 2, expected 1"),
        (
            "cache_batch_idx",
            index.long(),
            "cache_batch_idx.dtype = torch.int64, expected torch.int32",
        ),
        ("cache_batch_idx", index[:1], r"page_table.shape\[0\] = 1, expected 2"),
        ("page_table", table[:0], r"page_table.shape\[0\] = 0, expected at least 1"),
        ("page_table", table.float(), "page_table.dtype = torch.float32, expected torch.int32"),
        ("page_table", [1], "page_table is of type list, expected a torch.Tensor"),
    ):
        arguments = {"page_table": table, "cache_batch_idx": index, name: wrong}
        with pytest.raises(strobe.InvalidArgument, match=f"^{text}"):
            call(**given, **arguments)
    with pytest.raises(strobe.InvalidArgument, match=r"^cache_batch_idx given with block_table"):
        flash_attn_with_kvcache(**given, block_table=table[index], cache_batch_idx=index)


def test_positions_of_a_rotary_embedding_that_there_is_not() -> None:
    """FlashAttention-3 looks at rotary_seqlens beside rotary_cos alone."""
    given = simple(cache_seqlens=torch.tensor([3, 5]).int())
    positions = torch.tensor([1, 2]).int()
    call = flash_attn_3.flash_attn_with_kvcache
    assert torch.equal(call(**given, rotary_seqlens=positions), call(**given))
    with pytest.raises(strobe.InvalidArgument, match=r"^rotary_seqlens is of type list"):
        call(**given, rotary_seqlens=[1, 2])
    with pytest.raises(strobe.InvalidArgument, match=r"^rotary_sin is given, expected rotary_cos"):
        call(**given, rotary_seqlens=positions, rotary_sin=torch.zeros(40, 4))


def test_no_gradient() -> None:
    given, varlen = simple(), cast("Any", flash_attn_varlen_func)
    given["q"].requires_grad_()
    assert not flash_attn_with_kvcache(**given).requires_grad
    packed = given["q"].flatten(0, 1)
    offsets = torch.arange(3, dtype=torch.int32)
    table = torch.zeros(2, 1, dtype=torch.int32)
    pages: Any = (packed, given["k_cache"], given["v_cache"], offsets, offsets, 1, 1)
    def attend(*tensors: Tensor) -> Any:
        return varlen(
            *tensors, *pages[3:], block_table=table, causal=True, return_attn_probs=True
        )[:2]

    # As flash_attn, it computes where a gradient is required, and has no backward pass.
    with torch.no_grad():
        wanted = attend(*pages[:3])
        assert not wanted[0].requires_grad
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for which in range(3):
        tensors = [x.detach().requires_grad_(n == which) for n, x in enumerate(pages[:3])]
        for function in (attend, compiled):
            found = function(*tensors)
            for x, y in zip(found, wanted, strict=True):
                assert torch.equal(x, y)
                with pytest.raises(strobe.Unsupported, match=r"^the gradient of attention with bl"):
                    x.sum().backward(retain_graph=True)
    with pytest.raises(strobe.InvalidArgument, match=r"dropout_p = 0.1 with block_table"):
        varlen(*pages, 0.1, block_table=table)


def table_of(*numbers: int) -> Tensor:
    return torch.tensor([numbers, numbers], dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cache_seqlens": 41}, r"^cache_seqlens\[0\] = 41, expected 0 to 40 \(k_cache.shape"),
        ({"cache_seqlens": "x"}, "^cache_seqlens = 'x', expected an integer"),
        (
            {
                "k_cache": torch.zeros(9, 16, 2, 16),
                "v_cache": torch.zeros(9, 16, 2, 16),
                "cache_seqlens": 20,
            },
            r"^cache_seqlens\[0\] = 20, .*if k_cache and v_cache are pages, block_table is missing",
        ),
        ({"cache_seqlens": torch.tensor([1, 2])}, "^cache_seqlens.dtype = int64, expected int32"),
        ({"block_table": table_of(0, 2)}, r"^block_table\[0\]\[1\] = 2, expected 0 to 1"),
        ({"block_table": table_of(-1)}, r"^block_table\[0\]\[0\] = -1, expected 0 to 1"),
        ({"block_table": [1]}, "^block_table is of type list, expected a torch.Tensor"),
        ({"cache_batch_idx": table_of(0, 2)[0]}, r"^cache_batch_idx\[1\] = 2, expected 0 to 1"),
        ({"cache_leftpad": table_of(9)[0, :1]}, r"^cache_leftpad.shape\[0\] = 1, expected 2"),
        ({"k": torch.zeros(2, 1, 2, 16)}, "^k is given, expected k and v"),
        ({"k": torch.zeros(2, 1, 2, 16), "v": torch.zeros(2, 1, 2, 16)}, "^cache_seqlens is mis"),
        ({"rotary_cos": torch.zeros(9, 4)}, "^rotary_cos is given"),
        ({"window_size": 3}, r"^window_size = 3, expected a pair"),
        ({"softmax_scale": "x"}, "^softmax_scale = 'x', expected a number"),
        ({"q": np.zeros((2, 1, 4, 16), np.float32)}, "^q is of type ndarray"),
        ({"v_cache": torch.zeros(2, 40, 2, 300)}, r"^v_cache.shape\[3\] \(head_dim_v\) = 300"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(strobe.InvalidArgument, match=message):
        flash_attn_with_kvcache(**simple(**change))


# -------------------------------------------------------------------------- values on a GPU, modes


def test_values_are_checked_on_a_gpu_as_on_the_cpu() -> None:
    """`check_values` reads any device; on the CPU the words of the library are its measure."""
    found = 0
    for seed in range(300):
        rng = np.random.default_rng(seed)
        arrays = kvcache_cases.draw(rng).make(rng)
        given = arrays.arguments
        name = rng.choice([n for n in NUMBERS if n in given])
        at = tuple(rng.integers(0, n) for n in given[name].shape)
        given[name][at] = rng.choice([-1, -9, 2**30, 9, 41])
        if name == "leftpad" and given[name][at] > 0 and rng.random() < 0.5:
            given[name][at] = 0
        tensors = {n: shared(x) for n, x in given.items() if isinstance(x, np.ndarray)}
        moving = bool(given.get("causal") or given.get("attention_chunk"))
        moving = moving or given["window"] != (-1, -1)
        words = []
        for call in (
            lambda a=arrays, g=given: strobe.attention_with_kvcache(a.q, a.k, a.v, **g),
            lambda a=arrays, t=tensors, m=moving: _flash_cache.check_values(
                shared(a.q), shared(a.k), t, m
            ),
        ):
            try:
                call()
                words.append("")
            except strobe.InvalidArgument as error:
                words.append(str(error).partition(" (")[0])
        if words[0].startswith("rotary"):
            assert words[1].startswith("rotary_position"), (seed, words)
        elif words[0] != words[1]:  # several are wrong: each names one of them
            assert all(words), (seed, words)
            assert {word.partition("[")[0] for word in words} <= {
                *NUMBERS, "rotary_position",
            }, (seed, words)  # fmt: skip
        found += bool(words[0])
    assert 100 < found < 300


def test_when_values_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU where the environment of that moment says so, and in no other way."""
    on_gpu = torch.zeros(1).as_subclass(OnGpu)
    capturing: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing.pop())
    monkeypatch.delenv("STROBE_CHECK_VALUES", raising=False)
    assert not _flash_cache.wants_value_checks(on_gpu)
    for without in ("", "0"):
        monkeypatch.setenv("STROBE_CHECK_VALUES", without)
        assert not _flash_cache.wants_value_checks(on_gpu)
    monkeypatch.delenv("STROBE_CHECK_VALUES")
    monkeypatch.setenv("STROBE_SKIP_VALUE_CHECKS", "0")
    assert not _flash_cache.wants_value_checks(on_gpu)
    monkeypatch.setenv("STROBE_CHECK_VALUES", "1")
    assert not _flash_cache.wants_value_checks(torch.zeros(1))
    for skip in ("0", "1"):  # a variable of earlier versions
        monkeypatch.setenv("STROBE_SKIP_VALUE_CHECKS", skip)
        capturing += [True, False]
        assert _flash_cache.wants_value_checks(on_gpu)
        assert not _flash_cache.wants_value_checks(on_gpu)
    assert not capturing


def test_strobes_own_function_checks_values_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is asked to."""
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.delenv("STROBE_CHECK_VALUES", raising=False)
    seen: list[Any] = []
    monkeypatch.setattr(_flash_cache, "check_values", lambda *given: seen.append(given))
    given = simple()
    q = given["q"].as_subclass(OnGpu)
    k, v, used = given["k_cache"], given["v_cache"], torch.tensor([1, 2], dtype=torch.int32)
    call = strobe.attention_with_kvcache
    call(q, k, v, seqused_k=used)
    assert not seen
    monkeypatch.setenv("STROBE_CHECK_VALUES", "1")
    for option, moving in (({}, False), ({"causal": True}, True), ({"window": (3, 0)}, True)):
        call(q, k, v, seqused_k=used, **option)
        found = seen.pop()
        assert found[0] is q
        assert found[1] is k
        assert found[2]["seqused_k"] is used
        assert found[3] is moving
    call(given["q"], k, v, seqused_k=used)
    capturing[0] = True
    call(q, k, v, seqused_k=used)
    assert not seen
    # What it cannot read, the launch refuses; what it can, it refuses itself.
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setenv("STROBE_CHECK_VALUES", "1")
    for wrong in (3, None, used.numpy()[:1], used.float(), used[None]):
        with pytest.raises(strobe.InvalidArgument, match=r"^(seqused_k|leftpad)"):
            call(q, k, v, seqused_k=wrong, leftpad=wrong if wrong is not None else -used)  # type: ignore[arg-type]
    monkeypatch.setattr(_core, "kvcache", None)
    with pytest.raises(strobe.InvalidArgument, match=r"^seqused_k\[1\] = 99, expected 0 to 40 \("):
        call(q, k, v, seqused_k=torch.tensor([1, 99], dtype=torch.int32))


def test_compiled_and_fake() -> None:
    given = simple(cache_seqlens=torch.tensor([3, 5], dtype=torch.int32))
    new = torch.randn(2, 1, 2, 16)

    def step(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor) -> Any:
        out = flash_attn_with_kvcache(
            q, k_cache, v_cache, new, new, cache_seqlens=cache_seqlens, causal=True
        )
        return out * 2

    copies = {name: x.clone() for name, x in given.items()}
    wanted = step(**given)
    found = torch.compile(step, backend="aot_eager", fullgraph=True)(**copies)
    assert torch.equal(found, wanted)
    assert torch.equal(copies["k_cache"], given["k_cache"])
    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        out, lse = flash_attn_with_kvcache(
            **{name: mode.from_tensor(x) for name, x in given.items()}, return_softmax_lse=True
        )
    assert out.shape == (2, 1, 4, 16)
    assert lse.shape == (2, 4, 1)


def test_the_operator() -> None:
    q, k, v = simple().values()
    new = torch.randn(2, 2, 1, 2, 16)
    used = torch.tensor([3, 5], dtype=torch.int32)
    plain = (None, None, True, -1, -1, 0.0, 0, False)
    arrays = (used, None, None, None, *new, *[None] * 9)
    operator = torch.ops.strobe.attention_with_kvcache.default
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(operator, (q, k, v, *arrays, *plain), test_utils=checks)
    more = {"sinks": torch.randn(4), "batch_invariant": True, "out_dtype": torch.float32}
    torch.library.opcheck(operator, (q, k, v, *arrays, *plain), more, test_utils=checks)
    out, lse = operator(q.requires_grad_(), k, v, *arrays, *plain)
    assert not out.requires_grad
    assert not lse.requires_grad
    for transform in (torch.vmap, torch.func.grad):
        with pytest.raises(strobe.Unsupported, match=r"under torch.func's transforms"):
            transform(lambda x: flash_attn_with_kvcache(x, k, v).sum())(q.detach()[None][0])


def compiled_case(name: str) -> tuple[Any, dict[str, Any]]:
    """q, and the other arguments of a call of strobe.attention_with_kvcache."""
    q, rows = torch.randn(2, 3, 4, 64), torch.randn(2, 2, 20, 2, 64)
    options: dict[str, Any] = {"seqused_k": torch.tensor([3, 5], dtype=torch.int32)}
    new = torch.randn(2, 2, 1, 2, 64)
    if name == "float8":
        q, options["q_scale"] = strobe.quantize(q, "float8_e4m3fn", scale="batch_head", heads_kv=2)
        for key, x, fresh in zip("kv", rows, new, strict=True):
            options[key], scale = strobe.quantize(x, "float8_e5m2", scale="batch_head")
            options[f"{key}_scale"] = scale
            options[f"{key}_new"], _ = strobe.quantize(fresh, "float8_e5m2", scale=scale)
        return q, options
    options |= {"k_new": new[0], "v_new": new[1], "causal": True, "window": (7, None)}
    for key, x in zip("kv", rows, strict=True):
        form: Any = {"blocks": "q8_0" if key == "k" else "q4_0", "codes": "int8"}.get(name)
        options[key] = x
        if form is not None:
            options[key], scale = strobe.quantize(x, form)
            options |= {f"{key}_scale": scale} if scale is not None else {}
    if name == "pages":
        options["k"], options["v"] = (x.reshape(10, 4, 2, 64) for x in (options["k"], options["v"]))
        options["block_table"] = torch.randperm(10).to(torch.int32).reshape(2, 5)
    elif name == "more":
        options |= {"sinks": torch.randn(4), "sinks_outside_lse": True, "batch_invariant": True}
        options |= {"bias": torch.randn(1, 4, 3, 20), "threads": 1, "softcap": 9.0}
        options["return_lse"] = True
    elif name == "mask":
        options["mask"] = strobe.masks.from_bool(torch.rand(3, 20) < 0.7)
    elif name == "out":
        q, (options["k"], options["v"]), new = q.bfloat16(), rows.bfloat16(), new.bfloat16()
        options |= {"k_new": new[0], "v_new": new[1], "out": torch.empty(2, 3, 4, 64)}
        options["out_dtype"] = torch.float32
    return q, options


def copied(options: dict[str, Any]) -> dict[str, Any]:
    tensors = {name: x for name, x in options.items() if isinstance(x, torch.Tensor)}
    return options | {name: x.clone() for name, x in tensors.items()}


@pytest.mark.parametrize(
    "name", ["floats", "codes", "blocks", "float8", "pages", "more", "mask", "out"]
)
def test_our_function_compiled(name: str) -> None:
    """In one graph, with every kind of option, and to the bits of eager: results, cache, scales."""
    torch._dynamo.reset()
    # Inductor compares strides with those that the operator's fake tells.
    backend = "inductor" if name in ("blocks", "float8") else "aot_eager"
    q, options = compiled_case(name)

    def step(q: Tensor, options: dict[str, Any]) -> Any:
        found = strobe.attention_with_kvcache(q.view(q.shape), **options)
        return found if isinstance(found, tuple) else (found, found * 2)

    ours, theirs = copied(options), copied(options)
    found = torch.compile(step, backend=backend, fullgraph=True)(q, ours)
    for a, b in zip(found, step(q, theirs), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    for key, x in ours.items():
        if isinstance(x, torch.Tensor):
            assert torch.equal(x.view(torch.uint8), theirs[key].view(torch.uint8))
    for key in ("k", "v"):
        assert not torch.equal(ours[key].view(torch.uint8), options[key].view(torch.uint8))


def test_our_function_compiled_with_what_the_compiler_does_not_know() -> None:
    """Other libraries' arrays break the graph, and so does what is refused, by eager's words."""
    q, k, v = simple().values()
    used = torch.tensor([3, 5], dtype=torch.int32).numpy()
    torch._dynamo.reset()
    call = torch.compile(strobe.attention_with_kvcache, backend="aot_eager")
    wanted = strobe.attention_with_kvcache(q, k, v, seqused_k=used)
    assert torch.equal(call(q, k, v, seqused_k=used), wanted)
    for words, wrong in (
        (r"^causal = 'yes', expected a bool", {"causal": "yes"}),
        (r"^out\.dtype = torch\.float16|^out\.dtype = float16", {"out": q.half()}),
        (r"^out\.shape\[1\] = 2|^out\.shape", {"out": torch.empty(2, 2, 4, 16)}),
        (r"^v\.shape\[2\] = 1, expected 2", {"v": v[:, :, :1]}),
    ):
        torch._dynamo.reset()
        with pytest.raises(strobe.InvalidArgument, match=words):
            call(q, k, **{"v": v, **wrong})
    with pytest.raises(TypeError, match="unexpected keyword argument 'cache_seqlens'"):
        call(q, k, v, cache_seqlens=used)


def test_float8_of_flash_attn_3_compiled() -> None:
    torch._dynamo.reset()
    q, options = compiled_case("float8")
    names = {"k": "k_cache", "v": "v_cache", **NAMES}
    given = {names.get(x, x.replace("scale", "descale")): y for x, y in options.items()}
    call: Any = flash_attn_3.flash_attn_with_kvcache
    ours, theirs = copied(given), copied(given)
    found = torch.compile(call, backend="aot_eager", fullgraph=True)(q, **ours)
    assert torch.equal(found, call(q, **theirs))
    assert torch.equal(ours["k_cache"].view(torch.uint8), theirs["k_cache"].view(torch.uint8))
    # One scale for all, with strides of 0, is no tensor that may be written.
    shared = {x: torch.tensor(0.5).expand(2, 2) for x in given if x.endswith("descale")}
    found = torch.compile(call, backend="aot_eager", fullgraph=True)(q, **ours | shared)
    assert torch.equal(found, call(q, **theirs | shared))


@pytest.mark.parametrize("scale", ["row", "head"])
@pytest.mark.parametrize("form", ["int8", "float8_e4m3fn", "q8_0", "q4_0"])
def test_the_operator_over_codes(form: Any, scale: Any) -> None:
    """Compiled and checked; what is appended is quantised, and its scales are written."""
    blocks = form.startswith("q")
    if blocks and scale == "head":
        pytest.skip("blocks have scales of their own")
    q, floats, _ = simple().values()
    q, rows = torch.randn(2, 3, 4, 64), torch.randn(2, *floats.shape[:-1], 64)
    made = [strobe.quantize(x, form, **({} if blocks else {"scale": scale})) for x in rows]
    (k, k_scale), (v, v_scale) = made
    used = torch.tensor([3, 5], dtype=torch.int32)
    # Rows alone have scales that an append can make.
    new = torch.randn(2, 2, 1, 2, 64) if blocks or scale == "row" else (None, None)
    plain = (None, None, True, -1, -1, 0.0, 0, False)
    arrays = (used, None, None, None, *new, *[None] * 9)
    operator = torch.ops.strobe.attention_with_kvcache.default
    checks = ["test_schema"] if not form.startswith("float8") else []  # it multiplies, and cannot
    checks += ["test_faketensor", "test_aot_dispatch_static"]
    scales = () if blocks else (k_scale, v_scale)
    torch.library.opcheck(operator, (q, k, v, *arrays, *plain, *scales), test_utils=checks)

    def step(q: Tensor, k: Tensor, v: Tensor, scales: Any) -> Any:
        out, _ = operator(q.sin(), k, v, *arrays, *plain, *scales)
        return out * 2

    copies = [x.clone() for x in (k, v)], [x.clone() for x in scales]
    given = [x.clone() for x in (k, v)], [x.clone() for x in scales]
    compiled = torch.compile(step, backend="inductor", fullgraph=True)
    found = compiled(q, *copies[0], copies[1])
    wanted = strobe.attention_with_kvcache(
        q.sin(),
        *given[0],
        k_new=new[0],
        v_new=new[1],
        seqused_k=used,
        causal=True,
        **dict(zip(("k_scale", "v_scale"), given[1], strict=False)),
    )
    assert (found - 2 * wanted).abs().max() < 1e-5
    for mine, theirs in zip((*copies[0], *copies[1]), (*given[0], *given[1]), strict=True):
        assert torch.equal(mine, theirs)
    if new[0] is not None:
        assert not torch.equal(copies[0][0], k)
        assert blocks or not torch.equal(copies[1][0], k_scale)
    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        fakes = [x if x is None else mode.from_tensor(x) for x in (q, k, v, *arrays)]
        out, lse = operator(*fakes, *plain, *map(mode.from_tensor, scales))
    assert out.shape == (2, 3, 4, 64)
    assert lse.shape == (2, 4, 3)


def test_plans_know_no_values() -> None:
    given = simple()
    flash_attn_with_kvcache(**given, cache_seqlens=3)
    before = _core.kept()
    for length in range(40):
        flash_attn_with_kvcache(**given, cache_seqlens=length)
    assert _core.kept() == before


# ----------------------------------------------------------------------------------- flash_attn_3


def test_signatures_are_flash_attention_3s() -> None:
    descale = "q_descale=None, k_descale=None, v_descale=None"
    tail = (
        f"softmax_scale=None, causal=False, qv=None, {descale}, window_size=(-1, -1), "
        "attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
        "sm_margin=0, return_attn_probs=False"
    )
    for name, wanted in {
        "flash_attn_func": f"q, k, v, {tail}",
        "flash_attn_varlen_func": (
            "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, "
            f"seqused_k=None, {tail}"
        ),
        "flash_attn_with_kvcache": (
            "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
            "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, "
            "cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, "
            f"{descale}, softmax_scale=None, causal=False, window_size=(-1, -1), "
            "attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, "
            "num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False"
        ),
        "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
        "get_scheduler_metadata": (
            "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, "
            "cache_seqlens, qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, "
            "cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0, "
            "causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, "
            "num_splits=0, pack_gqa=None, sm_margin=0"
        ),
    }.items():
        parameters = inspect.signature(getattr(flash_attn_3, name)).parameters.values()
        found = ", ".join(
            p.name if p.default is p.empty else f"{p.name}={p.default!r}"
            for p in parameters
            if p.kind is p.POSITIONAL_OR_KEYWORD
        )
        assert found == wanted
        ours = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        assert ours == (["s_aux", "learnable_sink"] if "softcap=0.0" in wanted else [])


@pytest.mark.parametrize("chunk", [0, 8])
def test_dense_and_packed(chunk: int) -> None:
    q, k, v = torch.randn(3, 2, 20, 4, 16).requires_grad_()
    out, lse = flash_attn_3.flash_attn_func(
        q, k, v, causal=True, attention_chunk=chunk, return_attn_probs=True
    )
    wanted, wanted_lse = strobe.attention(
        q, k, v, causal=True, attention_chunk=chunk, return_lse=True
    )
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert gradient.abs().max() > 0
    offsets = torch.tensor([0, 20, 40], dtype=torch.int32)
    rows = {name: x.flatten(0, 1) for name, x in (("q", q), ("k", k), ("v", v))}
    rows |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    rows |= {"max_seqlen_q": 20, "max_seqlen_k": 20}
    packed = flash_attn_3.flash_attn_varlen_func(
        **rows, causal=True, attention_chunk=chunk, num_splits=3, pack_gqa=True, sm_margin=2,
    )  # fmt: skip
    torch.testing.assert_close(packed.unflatten(0, (2, 20)), wanted)
    if not chunk:
        assert torch.equal(
            flash_attn_3.flash_attn_func(q, k, v), flash_attn.flash_attn_func(q, k, v)
        )
    used = torch.tensor([20, 7], dtype=torch.int32)
    some = flash_attn_3.flash_attn_varlen_func(**rows, seqused_k=used, attention_chunk=chunk)
    wanted = strobe.attention(q, k, v, seqused_k=used, attention_chunk=chunk)
    torch.testing.assert_close(some.unflatten(0, (2, 20)), wanted)


def test_what_flash_attention_3_has_and_strobe_has_not() -> None:
    given, one = simple(), torch.ones(2, 2)
    metadata = flash_attn_3.get_scheduler_metadata(2, 1, 40, 4, 2, 16, torch.ones(2))
    assert metadata is None
    flash_attn_3.flash_attn_with_kvcache(
        **given, scheduler_metadata=metadata, num_splits=3, pack_gqa=True, sm_margin=4
    )
    for name in ("qv", "scheduler_metadata"):
        with pytest.raises(strobe.Unsupported, match=f"^{name} is given, expected None: "):
            flash_attn_3.flash_attn_with_kvcache(**given, **{name: one})
    with pytest.raises(strobe.InvalidArgument, match=r"^k_descale is given with .* float8"):
        flash_attn_3.flash_attn_with_kvcache(**given, k_descale=one)
    with pytest.raises(strobe.InvalidArgument, match=r"^page_table\[0\]\[0\] = 2, expected 0 to 1"):
        flash_attn_3.flash_attn_with_kvcache(**given, page_table=table_of(2))


def test_combine() -> None:
    q, k, v = torch.randn(3, 2, 6, 4, 16)
    found = [
        strobe.attention(q, k[:, rows], v[:, rows], return_lse=True)
        for rows in (slice(0, 4), slice(4, 6))
    ]
    wanted, wanted_lse = strobe.attention(q, k, v, return_lse=True)
    outs = torch.stack([x for x, _ in found])
    lses = torch.stack([x.transpose(1, 2) for _, x in found])
    out, lse = flash_attn_3.flash_attn_combine(outs, lses, out_dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), wanted, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse, wanted_lse.transpose(1, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out_partial": None}, "^out_partial is of type NoneType"),
        ({"out_partial": torch.zeros(2, 3)}, r"^out_partial.ndim = 2, expected 5: \(parts, batch"),
        ({"out_partial": torch.zeros(2, 1, 3, 4, 8).double()}, "^out_partial.dtype = float64, exp"),
        (
            {"out_partial": torch.zeros(2, 1, 3, 4, 513)},
            r"^out_partial.shape\[4\] \(head_dim_v\) = 513",
        ),
        ({"lse_partial": np.zeros((2, 1, 3, 4))}, "^lse_partial is of type ndarray"),
        (
            {"lse_partial": torch.zeros(2, 1, 4, 3)},
            r"^lse_partial.shape = \(2, 1, 4, 3\), expected",
        ),
        ({"lse_partial": torch.zeros(2, 1, 3, 4).half()}, "^lse_partial.dtype = float16, expected"),
        (
            {"lse_partial": torch.nn.UninitializedParameter()},
            r"^lse_partial \(UninitializedParameter\) cannot",
        ),
        ({"out": torch.zeros(1, 3, 4, 9)}, r"^out.shape\[3\] = 9, expected 8 .* of out_partial"),
    ],
)
def test_what_combine_refuses(change: dict[str, Any], message: str) -> None:
    given = {"out_partial": torch.zeros(2, 1, 3, 4, 8), "lse_partial": torch.zeros(2, 1, 3, 4)}
    with pytest.raises(strobe.InvalidArgument, match=message):
        flash_attn_3.flash_attn_combine(**given | change)


def test_every_sequence_of_a_mixed_batch() -> None:
    """A chunk of a prompt, a decoded token and an empty sequence: appended, turned, in one call."""
    rng = np.random.default_rng(3)
    case = CacheCase(
        [Sequence(16, 20, 16), Sequence(1, 39, 1), Sequence(0, 0, 0), Sequence(4, 7, 4)],
        page_size=4,
        capacity=80,
        packed=True,
        packed_new=True,
        rotary_dim=16,
        options={"causal": True, "rotary_interleaved": True},
    )
    arrays = case.make(rng)
    out, lse = flash_attn_3.flash_attn_with_kvcache(
        **arguments(arrays, NAMES_3), max_seqlen_q=16, return_softmax_lse=True
    )
    arrays.check(array(out), array(lse))


@pytest.mark.parametrize("name", ["page_table", "cache_batch_idx"])
def test_rows_of_a_table_without_memory(name: str) -> None:
    """PyTorch's own operators read a storage that was freed, and the process ends."""
    q, cache = torch.ones(2, 1, 2, 16), torch.ones(3, 4, 2, 16)
    given: dict[str, Any] = {
        "page_table": torch.zeros(2, 1, dtype=torch.int32),
        "cache_batch_idx": torch.zeros(2, dtype=torch.int32),
    }
    given[name].untyped_storage().resize_(0)
    with pytest.raises(strobe.InvalidArgument, match=f"^{name} is a "):
        flash_attn_3.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=4, **given)
