"""Masks as data of PyTorch's tensors, made where they are: words like those of NumPy's arrays, on
the CPU and on a GPU. Where there is none, a tensor of the CPU's stands for one of a GPU, and
whatever would wait for one fails.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import strobe
from strobe import _core, _mask_arrays, _mask_sources, _masks, _packed_mask, _sdpa, masks

torch = pytest.importorskip("torch")
if not hasattr(torch.library, "register_autograd"):
    pytest.skip("needs PyTorch 2.4", allow_module_level=True)

RNG = np.random.default_rng(4)
IDS = np.repeat([4, 0, 7, -1, 2], [70, 1, 129, 40, 60])  # 300
IDS_OF_TWO = np.stack([IDS, np.sort(RNG.integers(0, 5, 300))])
KEEP = RNG.random((2, 3, 150, 200)) < 0.2
KEEP[1, 2, 64:128] = False
VISITED = RNG.random((2, 1, 5, 4)) < 0.4
INTERVALS = RNG.integers(-40, 260, (2, 3, 150, 4))
LISTS = RNG.integers(-1, 6, (1, 2, 5, 3))
COUNTS = RNG.integers(-1, 5, (1, 2, 5))
BITS = RNG.integers(-(2**31), 2**31, (1, 2, 5, 3, 64, 4), dtype=np.int32)
PARENTS = np.stack([(np.arange(90) - 1) // 2, np.arange(90) - 1])
CU_Q, CU_K = np.array([0, 30, 30, 130]), np.array([0, 100, 140, 200])
OF_PACKED = RNG.random((2, 130, 100)) < 0.3

Make = Callable[..., masks.Mask]
# Each takes what turns an array into one of the kind that is tested, and options.
MAKES: dict[str, Make] = {
    "bools": lambda on, **o: masks.from_bool(on(KEEP), block=(64, 128), **o),
    "bools of other strides": lambda on, **o: masks.from_bool(on(KEEP).swapaxes(2, 3), **o),
    "bools of one head": lambda on, **o: masks.from_bool(on(KEEP)[:, :1], **o),
    "bools of packed sequences": lambda on, **o: masks.from_bool(
        on(OF_PACKED), cu_seqlens_q=on(CU_Q), cu_seqlens_k=on(CU_K), block=64,
        max_seqlen_q=100, total_k=200, **o,
    ),
    "no bools": lambda on, **o: masks.from_bool(on(KEEP[:, :, :0]), **o),
    "no keys": lambda on, **o: masks.from_bool(on(KEEP[..., :0]), **o),
    "intervals": lambda on, **o: masks.from_intervals(on(INTERVALS), 200, block=64, **o),
    "one interval": lambda on, **o: masks.from_intervals(on(INTERVALS[0, 0, :, :2]), **o),
    "intervals of packed sequences": lambda on, **o: masks.from_intervals(
        on(INTERVALS[0, :1, :130]), cu_seqlens_q=on(CU_Q), cu_seqlens_k=on(CU_K), block=64,
        max_seqlen_q=100, max_seqlen_k=100, total_k=200, **o,
    ),
    "documents": lambda on, **o: masks.documents(on(IDS), block=64, **o),
    "documents of two": lambda on, **o: masks.documents(on(IDS_OF_TWO), on(IDS), block=64, **o),
    "documents of other keys": lambda on, **o: masks.documents(on(IDS[::3]), on(IDS_OF_TWO), **o),
    "no documents": lambda on, **o: masks.documents(on(IDS[:0]), **o),
    "prefix": lambda on, **o: masks.prefix(on(np.array([0, 130, 77])), 200, 260, block=64, **o),
    "blocks": lambda on, **o: masks.blocks(on(VISITED), 300, 240, block=64, **o),
    "lists": lambda on, **o: masks.from_lists(
        on(LISTS), 300, 700, full_counts=on(COUNTS), block=(64, 128), **o
    ),
    "lists of all kinds": lambda on, **o: masks.from_lists(
        on(LISTS[..., :2]), 300, 700, partial_blocks=on(LISTS + 1), partial_counts=on(COUNTS),
        partial_bits=on(BITS), block=(64, 128), **o,
    ),
    "empty lists": lambda on, **o: masks.from_lists(on(LISTS[..., :0]), 300, 700, block=64, **o),
    "tree": lambda on, **o: masks.tree(on(PARENTS), context=100, keys=200, **o),
    "no tree": lambda on, **o: masks.tree(on(PARENTS[:, :0]), context=100, **o),
}  # fmt: skip


def words_of_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that all words of a mask are defined, those that nobody reads too."""
    for kind in (_mask_arrays.NumPyArrays, _mask_arrays.TorchTensors):
        make: Any = kind.words

        def zeros(self: Any, count: int, make: Any = make) -> Any:
            words = make(self, count)
            words[:] = 0
            return words

        monkeypatch.setattr(kind, "words", zeros)


class Pretended(_mask_arrays.TorchTensors):
    """Tensors of the CPU's as those of a GPU, which the CPU packs."""

    def __init__(self, name: str, device: Any) -> None:
        super().__init__(name, device)
        self.on_device = True

    def device_fields(self) -> tuple[dict[str, int], dict[str, int]]:
        return {}, {}

    def captures(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def words(self, count: int) -> Any:
        return torch.zeros(count, dtype=torch.int32)


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Whatever looks at a tensor's values fails."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__"):

            def refused(*_: Any, name: str = name) -> Any:
                raise AssertionError(f"Tensor.{name} would wait")

            patch.setattr(torch.Tensor, name, refused)
        yield


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def arrays_of(name: str, array: Any) -> _mask_arrays.Arrays:
        is_tensor = isinstance(array, torch.Tensor)
        return Pretended(name, array.device) if is_tensor else _mask_arrays.NUMPY_ARRAYS

    for module in (masks, _mask_sources):
        monkeypatch.setattr(module, "arrays_of", arrays_of)


def same_words(found: masks.Mask, wanted: masks.Mask) -> None:
    assert (found.shape, found.block) == (wanted.shape, wanted.block)
    assert (found.capacity, found.partial_capacity) == (wanted.capacity, wanted.partial_capacity)
    assert np.array_equal(found.packed.cpu().numpy(), wanted.packed)


@pytest.mark.parametrize("name", MAKES)
def test_words_of_tensors_are_those_of_arrays(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words_of_zeros(monkeypatch)
    make = MAKES[name]

    def on(x: Any) -> Any:
        return torch.from_numpy(np.array(x)).to(device)

    for capacity in (1000, (9, 2), 1):
        found = make(on, capacity=capacity)
        assert found.packed.device.type == device
        same_words(found, make(np.asarray, capacity=capacity))
    found, wanted = make(on), make(np.asarray)
    if device == "cpu":
        same_words(found, wanted)
    for b in range(wanted.shape[0]):
        for head in range(wanted.shape[1]):
            assert np.array_equal(found.dense(b, head), wanted.dense(b, head))
            assert np.array_equal(found.tiles(b, head), wanted.tiles(b, head))


@pytest.mark.parametrize("name", MAKES)
def test_nothing_waits_for_a_gpu(
    name: str, pretended: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [MAKES[name](np.asarray, capacity=c) for c in (700, (9, 2))]
    given: dict[int, Any] = {}

    def on(x: Any) -> Any:
        return torch.from_numpy(np.array(x))

    with nothing_waits():
        found = [MAKES[name](on, capacity=c) for c in (700, (9, 2))]
        roomy = MAKES[name](on)
    del given
    for got, right in zip(found, wanted, strict=True):
        header, other = got.packed.numpy()[:12], right.packed[:12]
        assert np.array_equal(header, other)
    for b in range(roomy.shape[0]):
        for head in range(roomy.shape[1]):
            assert np.array_equal(roomy.dense(b, head), wanted[0].dense(b, head))
    assert int(roomy.packed[9]) == 0  # there was room for all


def test_blocks_of_flex_attention(pretended: None) -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor([100, 90, 60, 50]))

    def by_head(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (ids[q] == ids[k]) | ((q - k).abs() <= 30 * h + b)

    made = flex.create_block_mask(by_head, 2, 3, 300, 300, device="cpu", BLOCK_SIZE=64)
    whole = flex.create_mask(by_head, 2, 3, 300, 300, device="cpu").numpy()
    looked = masks.from_block_mask(made)
    with nothing_waits():
        blind = masks.from_block_mask(made, capacity=1000)
    for mask in (looked, blind):
        for b in range(2):
            for head in range(3):
                assert np.array_equal(mask.dense(b, head), whole[b, head])
    assert looked.capacity == int((made.kv_num_blocks + made.full_kv_num_blocks).sum())
    # Without lists of full blocks, as BlockMask has them where it is made of lists by hand.
    single = flex.BlockMask.from_kv_blocks(
        made.kv_num_blocks, made.kv_indices, BLOCK_SIZE=64, mask_mod=by_head, seq_lengths=(300, 300)
    )
    with nothing_waits():
        part = masks.from_block_mask(single, capacity=1000)
    listed = masks.from_lists(
        made.kv_indices.numpy(), 300, full_counts=made.kv_num_blocks.numpy(), block=64
    )
    assert np.array_equal(part.dense(1, 2), whole[1, 2] & listed.dense(1, 2))
    assert listed.dense(1, 2).sum() < part.dense(1, 2).size


def _causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def test_a_large_mask_is_looked_at_once(pretended: None, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = torch.from_numpy(KEEP)
    wanted = masks.from_bool(KEEP)
    monkeypatch.setattr(_packed_mask, "MOST_UNSEEN", 10000)
    packed = []
    pack = _core.pack_mask

    class Core:
        mask_bytes = staticmethod(_core.mask_bytes)

        @staticmethod
        def pack_mask(*arguments: Any) -> None:
            packed.append(arguments)
            pack(*arguments)

    monkeypatch.setattr(_packed_mask, "_core", Core)
    found = masks.from_bool(keep)
    assert len(packed) == 2
    assert (found.capacity, found.partial_capacity) == (wanted.capacity, wanted.partial_capacity)
    with nothing_waits(), pytest.raises(AssertionError, match=r"Tensor\.tolist would wait"):
        masks.from_bool(keep)
    # A list has room for itself: nobody looks.
    with nothing_waits():
        masks.from_lists(torch.zeros(1000, 7, dtype=torch.int64), 64 * 1000, block=64)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    made = flex.create_block_mask(_causal, None, None, 300, 300, device="cpu")
    cu = torch.from_numpy(CU_Q)
    packed_keep = torch.from_numpy(OF_PACKED)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: masks.from_bool(keep), "capacity = None of a mask that may need more than 0 MiB"),
        (lambda: masks.from_block_mask(made), "capacity = None, expected an integer: to count"),
        (
            lambda: masks.from_bool(
                packed_keep, cu_seqlens_q=cu, cu_seqlens_k=cu, capacity=9, total_k=130
            ),
            "max_seqlen_q = None, expected an integer: to read cu_seqlens_q would wait",
        ),
    ]
    for call, words in calls:
        with nothing_waits(), pytest.raises(strobe.Unsupported, match=words):
            call()
    with nothing_waits():
        masks.from_bool(keep, capacity=9)


def test_what_is_not_checked_on_a_gpu_hides_keys(pretended: None) -> None:
    ids = torch.tensor([0, 0, 1, 0, 2, 2])
    wanted = (ids[:, None] == ids) & (ids > 0)[:, None]
    assert np.array_equal(masks.documents(ids, block=64).dense(), wanted.numpy())
    # A parent that is none of the tokens before is none.
    parents = torch.tensor([-1, 5, 1, -7, 3, 5])
    roots = torch.tensor([-1, -1, 1, -1, 3, -1])
    assert np.array_equal(masks.tree(parents).dense(), masks.tree(roots).dense())


def test_what_is_wrong_is_said(pretended: None) -> None:
    keep = torch.from_numpy(KEEP)
    cu_q, cu_k = torch.from_numpy(CU_Q), torch.from_numpy(CU_K)
    lists = torch.from_numpy(LISTS)
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: masks.from_bool(keep.float()), "keep is torch.float32"),
        (lambda: masks.from_bool(keep, cu_seqlens_k=cu_q), "cu_seqlens_q = None, expected an arr"),
        (lambda: masks.documents(torch.ones(3)), r"ids is torch\.float32 \(3,\), expected in"),
        (lambda: masks.documents(torch.zeros(3, dtype=int), np.zeros(3, int)), "ids_k is of type"),
        (lambda: masks.from_intervals(torch.zeros(9, 3, dtype=int)), "intervals is torch.int64"),
        (
            lambda: masks.from_intervals(
                torch.zeros(9, 2, dtype=int), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, total_k=200
            ),
            "total_q = 9, expected at least 130",
        ),
        (lambda: masks.from_lists(None, 300), "full_blocks = None and partial_blocks = None"),
        (lambda: masks.from_lists(lists, 300), r"expected integers \(batch, heads, 3 blocks of"),
        (lambda: masks.from_lists(lists, 300, full_counts=lists, block=64), "full_counts is torch"),
        (
            lambda: masks.from_lists(lists, 300, block=64, partial_blocks=lists[:, :1]),
            r"partial_blocks.shape = \(1, 1, 5, 3\), expected \(1, 2, 5, 'columns'\)",
        ),
        (lambda: masks.from_lists(lists, 300, block=64, partial_bits=lists), "partial_bits is g"),
        (
            lambda: masks.from_lists(None, 300, block=64, partial_blocks=lists, partial_bits=lists),
            r"partial_bits is torch.int64 \(1, 2, 5, 3\), expected int32 \(1, 2, 5, 3, 64, 2\)",
        ),
        (lambda: masks.from_lists(lists, 300, block=64, partial_counts=lists), "partial_counts is"),
        (lambda: masks.prefix(torch.ones(2, 2, dtype=int), 9), "length is"),
    ]  # fmt: skip
    for call, words in wrong:
        with pytest.raises(strobe.InvalidArgument, match=words):
            call()


def test_lengths_that_the_caller_knows() -> None:
    """On the CPU they are compared with cu_seqlens."""
    cu: dict[str, Any] = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}
    for more, words in (
        ({"max_seqlen_q": 99}, "max_seqlen_q = 99, expected at least 100"),
        ({"total_k": 199}, "total_k = 199, expected at least 200"),
    ):
        with pytest.raises(strobe.InvalidArgument, match=words):
            masks.from_bool(OF_PACKED, **cu, **more)


# --------------------------------------------------------------------- scaled_dot_product_attention

sdpa = torch.nn.functional.scaled_dot_product_attention
SHAPE = (2, 4, 70, 16)


def qkv(dtype: Any = torch.float32, device: str = "cpu") -> list[Any]:
    torch.manual_seed(6)
    return [torch.randn(SHAPE, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]


def plain(x: list[Any], mask: Any) -> Any:
    """PyTorch's, with 0 for what sees nothing, which not all of its kernels give."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return sdpa(*x, attn_mask=mask)


def check_call(x: list[Any], mask: Any, tolerance: float = 1e-5) -> Any:
    """Forward and backward are PyTorch's, and the call was Strobe's."""
    wanted = plain(x, mask)
    with strobe.torch.sdpa_kernel() as served:
        found = sdpa(*x, attn_mask=mask)
    assert (served.calls, served.fallbacks) == (1, {})
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    dout = torch.randn_like(wanted)
    for a, b in zip(
        torch.autograd.grad(found, x, dout), torch.autograd.grad(wanted, x, dout), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    return found


def random_mask(*shape: int, device: str = "cpu") -> Any:
    """Of no pattern; a query sees nothing."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(9)) < 0.3
    mask[..., 5] = True
    mask[..., 3, :] = False
    return mask.to(device)


class Captured:
    """Whether a CUDA graph is captured, as far as PyTorch says."""

    value = False


@pytest.fixture
def on_gpu(pretended: None, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, type[Captured]]:
    """(marks a mask as one of a GPU, whether a graph is captured)."""
    marked: list[Any] = []
    for name in ("is_cuda", "is_cpu"):
        plain = getattr(torch.Tensor, name)

        def told(x: Any, name: str = name, plain: Any = plain) -> bool:
            if any(x is y for y in marked):
                return name == "is_cuda"
            found: bool = plain.__get__(x)
            return found

        monkeypatch.setattr(torch.Tensor, name, property(told))

    def mark(mask: Any) -> Any:
        """The latest mask, or none, is one of a GPU."""
        marked[:] = [mask]
        return mask

    monkeypatch.setattr(Captured, "value", False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Captured.value)
    monkeypatch.setattr(_masks, "_memory", _masks._Memory())
    return mark, Captured


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[masks.Mask]:
    """The masks that are packed of bools."""
    found: list[masks.Mask] = []
    make = masks.from_bool

    def watched(*args: Any, **kwargs: Any) -> masks.Mask:
        found.append(make(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(masks, "from_bool", watched)
    return found


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Python looks for no cycles."""
    gc.disable()
    yield
    gc.enable()


def test_any_bools_of_a_gpu_are_served(
    on_gpu: Any, made: list[masks.Mask], monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, _ = on_gpu
    x, mask = qkv(), mark(random_mask(2, 1, 70, 70))
    check_call(x, mask)
    check_call(x, mask)
    assert len(made) == 1  # which was kept
    assert "mask of blocks 128 x 128, of each sequence" in strobe.why()
    assert made[0].shape == (2, 1, 70, 70)
    mask[0, 0, 7] ^= True
    check_call(x, mask)
    assert len(made) == 2
    other = mark(random_mask(70, 70))
    check_call(x, other)
    assert made[2].shape == (1, 1, 70, 70)
    # Another stream does not know that it is packed, and nothing is kept of a mask that is gone.
    monkeypatch.setattr(_masks, "current_stream", lambda device: 3)
    check_call(x, other)
    assert len(made) == 4
    kept = [entry.blocks for entry in _masks._memory.kept]
    assert made[3] is kept[0].mask
    mark(None)
    del other
    gc.collect()
    assert _masks._memory.kept[0].blocks.mask is None
    assert _masks._memory.kept[2].blocks.mask is made[1]


def test_packed_masks_of_a_gpu_are_let_go_of_at_once(
    on_gpu: Any, made: list[masks.Mask], no_collection: None
) -> None:
    """With their mask, when it has been written to, and where others take their place."""
    mark, _ = on_gpu
    x = [one.detach() for one in qkv()]
    packed: list[Any] = []

    def call(mask: Any) -> list[bool]:
        """Which masks that were packed are there after the call."""
        with strobe.torch.sdpa_kernel():
            sdpa(*x, attn_mask=mark(mask))
        mark(None)
        packed.extend(weakref.ref(one.packed) for one in made)
        made.clear()
        return [one() is not None for one in packed]

    given = [random_mask(2, 1, 70, 70) for _ in range(6)]
    assert call(given[0]) == [True]
    given[0][0, 0, 7] ^= True
    assert call(given[0]) == [False, True]
    there = [call(mask) for mask in given[1:]][-1]
    assert there == [False] * 3 + [True] * _masks._KEPT
    del given[5]
    assert packed[-1]() is None


def test_heads_of_a_gpu_are_not_compared(on_gpu: Any, made: list[masks.Mask]) -> None:
    mark, _ = on_gpu
    x, mask = qkv(), mark(random_mask(2, 4, 70, 70))
    check_call(x, mask)
    assert made[0].shape == (*SHAPE[:2], 70, 70)
    with nothing_waits(), strobe.torch.sdpa_kernel() as served:
        sdpa(*x, attn_mask=mark(random_mask(4, 70, 70)))
    assert served.calls == 1


@pytest.mark.parametrize("gpu", [False, True])
def test_a_mask_of_inference_mode_is_read_each_time(
    on_gpu: Any, made: list[masks.Mask], gpu: bool
) -> None:
    """Nothing counts the writes to it."""
    mark, _ = on_gpu
    x = [one.detach() for one in qkv()]
    with torch.inference_mode():
        mask = random_mask(2, 1, 70, 70)
        for count in (1, 2):
            with strobe.torch.sdpa_kernel() as served:
                found = sdpa(*x, attn_mask=mark(mask) if gpu else mask)
            assert (served.calls, len(made)) == (1, count)
            torch.testing.assert_close(found, plain(x, mask))
            mask[0, 0, 7] ^= True


def test_padding_of_a_gpu_is_read(on_gpu: Any, made: list[masks.Mask]) -> None:
    mark, _ = on_gpu
    check_call(qkv(), mark((torch.arange(70) < torch.tensor([[70], [44]]))[:, None, None]))
    assert not made


def test_a_captured_call_packs_what_it_finds(on_gpu: Any, made: list[masks.Mask]) -> None:
    mark, captured = on_gpu
    x = qkv()
    mask = mark((torch.arange(70) < torch.tensor([[70], [44]]))[:, None, None])
    check_call(x, mask)  # read, and kept
    captured.value = True
    with nothing_waits(), strobe.torch.sdpa_kernel() as served:
        sdpa(*x, attn_mask=mask).sum().backward()
    assert served.calls == 1
    assert made[0].shape == (2, 1, 70, 70)
    check_call(x, mask)
    check_call(x, mark(random_mask(2, 4, 70, 70)))
    assert len(made) == 3  # nothing is kept
    assert all(int(one.packed[9]) == 0 for one in made)
    bias = mark(torch.zeros(70, 70))
    check_call(x, bias)  # floats are a bias, whatever they hold
    assert len(made) == 3


def test_a_call_that_would_need_much_memory_is_pytorchs(
    on_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, captured = on_gpu
    captured.value = True
    monkeypatch.setattr(_masks, "MOST_UNSEEN", 1000)
    with strobe.torch.sdpa_kernel() as served:
        sdpa(*qkv(), attn_mask=mark(torch.ones(2, 1, 1, 70, dtype=torch.bool)))
    (reason,) = served.fallbacks
    assert "may take more memory than it does itself" in reason


def test_what_no_kernel_takes_as_data_is_pytorchs(
    on_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, captured = on_gpu

    def refused(*_: Any, **__: Any) -> None:
        raise strobe.Unsupported("no such kernel")

    _sdpa._data_verdict.cache_clear()
    x = qkv()
    check_call(x, mark(torch.ones(70, 70, dtype=torch.bool).tril()))
    _sdpa._data_verdict.cache_clear()
    monkeypatch.setattr("strobe._questions.plan", refused)
    for captures in (False, True):
        captured.value = captures
        with strobe.torch.sdpa_kernel() as served:
            sdpa(*x, attn_mask=mark(random_mask(70, 70)))
        assert list(served.fallbacks) == ["no kernel of Strobe takes attn_mask as data"]
        assert "no such kernel" in strobe.why()
    _sdpa._data_verdict.cache_clear()


# -------------------------------------------------------------------------------------- with a GPU

TOLERANCE = 2e-2  # of bf16


def test_attn_mask(device: str) -> None:
    x = qkv(torch.bfloat16, device)
    for shape in ((2, 1, 70, 70), (2, 4, 70, 70), (70, 70)):
        check_call(x, random_mask(*shape, device=device), TOLERANCE)


def test_a_stream_of_its_own(device: str) -> None:
    """What is packed and what is let go of meanwhile is the current stream's."""
    if device == "cpu":
        pytest.skip("no stream")
    q, k, v = (x.detach() for x in qkv(torch.bfloat16, device))
    keeps = [random_mask(2, 4, 70, 70, device=device) ^ (n % 2 == 1) for n in range(20)]
    wanted = [plain([q, k, v], keep) for keep in keeps]
    torch.cuda.synchronize()
    attention: Any = strobe.torch.attention
    with torch.cuda.stream(torch.cuda.Stream()):
        rows = [x.transpose(1, 2) for x in (q, k, v)]
        found = []
        for keep in keeps:
            found.append(attention(*rows, mask=masks.from_bool(keep.clone())).transpose(1, 2))
    torch.cuda.synchronize()
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE)


def captured_graph(device: str, call: Callable[[], Any]) -> tuple[Any, Any]:
    """(graph, what the captured call gives)."""
    if device == "cpu":
        pytest.skip("no graph")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    return graph, found


def test_a_graph_packs_other_masks(device: str) -> None:
    ids = torch.from_numpy(np.array(IDS_OF_TWO)).to(device)
    q, k, v = torch.randn(3, 2, 300, 4, 64, dtype=torch.bfloat16, device=device)
    attention: Any = strobe.torch.attention

    def call() -> Any:
        return attention(q, k, v, mask=masks.documents(ids, block=64, capacity=50))

    graph, found = captured_graph(device, call)
    for _ in range(3):
        ids.copy_(torch.randint(-1, 5, ids.shape).sort(-1)[0])
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(found, call(), rtol=0, atol=0)


def test_a_graph_reads_attn_mask_each_time(device: str) -> None:
    x = qkv(torch.bfloat16, device)
    mask = random_mask(2, 4, 70, 70, device=device)

    def call() -> Any:
        with strobe.torch.sdpa_kernel() as served:
            out = sdpa(*x, attn_mask=mask)
            grads = torch.autograd.grad(out, x, out.detach())
        assert (served.calls, served.fallbacks) == (1, {})
        return out, *grads

    graph, found = captured_graph(device, call)
    for density in (0.2, 0.6, 1.0):
        mask.copy_(torch.rand(mask.shape, device=device) < density)
        graph.replay()
        torch.cuda.synchronize()
        wanted = plain(x, mask)
        for a, b in zip(
            found, (wanted, *torch.autograd.grad(wanted, x, wanted.detach())), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=2 * TOLERANCE, atol=2 * TOLERANCE)


def test_blocks_of_flex_attention_on(device: str) -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor([100, 90, 60, 50])).to(device)

    def by_head(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (ids[q] == ids[k]) | ((q - k).abs() <= 30 * h + b)

    made = flex.create_block_mask(by_head, 2, 4, 300, 300, device=device, BLOCK_SIZE=128)
    whole = flex.create_mask(by_head, 2, 4, 300, 300, device=device)
    x = [torch.randn(2, 4, 300, 64, dtype=torch.bfloat16, device=device) for _ in range(3)]
    wanted = plain(x, whole)
    function: Any = strobe.torch.flex_attention
    found = function(*x, block_mask=made)
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    blind = masks.from_block_mask(made, capacity=1000)
    for b in range(2):
        for head in range(4):
            assert np.array_equal(blind.dense(b, head), whole[b, head].cpu().numpy())
