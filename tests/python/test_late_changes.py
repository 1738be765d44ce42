"""Each array is read once: what changes it later, or changes what PyTorch makes, leads to an error
or to a right result, and later calls know nothing of it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import late
import strobe
from late import Late
from strobe import _core

HERE = Path(__file__).parent


@pytest.mark.parametrize("door", late.DOORS)
def test_an_argument_that_changes_another(door: str) -> None:
    command = [sys.executable, "-X", "faulthandler", "late.py", door]
    found = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, f"{found.stdout.splitlines()[-1:]}\n{found.stderr[-2000:]}"


@pytest.mark.parametrize("function", ["make_problem", "launch_of", "take_more", "spec_of"])
@pytest.mark.parametrize("change", ["turned", "swapped", "longer", "shrunk"])
def test_what_runs_while_python_plans(function: str, change: str) -> None:
    """As the handler of a signal or another thread does."""
    wanted = strobe.attention(**late.dense())
    _core.forget()
    given = late.dense()
    q = given["q"]

    def hook(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == function:
            sys.setprofile(None)
            late.CHANGES[change](q)

    said = "q was changed during the call"
    sys.setprofile(hook)
    try:
        strobe.attention(**given)
    except strobe.InvalidArgument as error:
        said = str(error)
    finally:
        sys.setprofile(None)
    assert "q was changed during the call" in said
    assert np.array_equal(strobe.attention(**late.dense()), wanted)


def test_merge_asks_for_each_array_once() -> None:
    outs, lses = late.normal(3, 2, 4, 2, 8), late.normal(3, 2, 2, 4)
    wanted = strobe.merge(outs, lses)
    x, y, out = Late(outs), Late(lses), Late(np.zeros_like(wanted[0]))
    lse = Late(np.zeros_like(wanted[1]))
    found = strobe.merge(x, y, out=out, lse=lse)
    assert found[0] is out
    assert found[1] is lse
    assert np.array_equal(out.array, wanted[0])
    assert np.array_equal(lse.array, wanted[1])
    assert x.exported == y.exported == out.exported == lse.exported == 1
    parts, others = [Late(x) for x in outs], tuple(Late(x) for x in lses)
    found = strobe.merge(parts, others)
    assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert {x.exported for x in (*parts, *others)} == {1}


def test_lengths_are_asked_for_once() -> None:
    given = late.packed()
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        given[name] = Late(given[name])
    for function in (strobe.attention, strobe.plan, strobe.why):
        before = given["cu_seqlens_q"].exported
        function(**given)
        assert given["cu_seqlens_q"].exported == before + 1


# ---------------------------------------------------------------------------------------- PyTorch

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

from strobe.flash_attn import flash_attn_func, flash_attn_with_kvcache  # noqa: E402

import odd  # noqa: E402


def tensors(given: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.from_numpy(x) for name, x in given.items()}


class Changing(torch.Tensor):  # type: ignore[misc, name-defined]
    """Changes another tensor when it is asked anything."""

    change: Callable[[], Any] = staticmethod(lambda: None)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        cls.change()
        return super().__torch_function__(function, types, args, kwargs or {})


class Asked(TorchFunctionMode):  # type: ignore[misc]
    """Does something at every function."""

    def __init__(self, change: Callable[[], Any]) -> None:
        super().__init__()
        self.change = change

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.change()
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("change", odd.CHANGES)
@pytest.mark.parametrize("how", ["subclass", "mode"])
@pytest.mark.parametrize("known", [False, True])
def test_a_tensor_that_changes_another(change: str, how: str, known: bool) -> None:
    rows = torch.randn(3, 1, 2048, 2, 16)
    wanted = strobe.attention(*rows)
    if not known:
        _core.forget()
    q, k, v = (x.clone() for x in rows)

    def alter() -> None:
        Changing.change = staticmethod(lambda: None)
        if sys._getframe(2).f_code.co_name != "alter":
            odd.CHANGES[change](q)

    mode: AbstractContextManager[Any] = nullcontext()
    if how == "subclass":
        k = k.as_subclass(Changing)
        Changing.change = staticmethod(alter)
    else:
        calls = iter(range(10**6))
        asked: Any = Asked
        mode = asked(lambda: alter() if next(calls) == 1 else None)
    try:
        with mode:
            strobe.attention(q, k, v)
    except strobe.Error:
        pass
    finally:
        Changing.change = staticmethod(lambda: None)
    assert torch.equal(strobe.attention(*rows), wanted)
    assert torch.equal(strobe.attention(rows[0], rows[1].as_subclass(Changing), rows[2]), wanted)


MADE: dict[str, Callable[[Any], Any]] = {
    **odd.MADE,
    "array": lambda x: x.numpy(),
    "none": lambda x: None,
}


def calls() -> dict[str, tuple[Callable[[], Any], str]]:
    """Calls, and the results that they make."""
    given, back, appended = (tensors(f()) for f in (late.dense, late.backward, late.cache))
    q, k, v = given.values()
    outs, lses, _ = tensors(late.parts()).values()
    kept = {"k": appended["k"].clone(), "v": appended["v"].clone()}
    return {
        "attention": (lambda: strobe.attention(q, k, v), "out"),
        "lse": (
            lambda: strobe.attention(q, k, v, out=torch.zeros(q.shape), return_lse=True),
            "lse",
        ),
        "backward": (lambda: strobe.attention_backward(**back), "d[qkv]"),
        "cache": (lambda: strobe.attention_with_kvcache(**appended | kept), "out"),
        "merge": (lambda: strobe.merge(outs, lses), "out"),
        "flash_attn_func": (lambda: flash_attn_func(q, k, v), "out"),
        "flash_attn_with_kvcache": (lambda: flash_attn_with_kvcache(q, k, v), "out"),
    }


def test_a_tensor_that_is_freed_before_it_is_copied() -> None:
    """flash_attn's functions copy what is not contiguous, once that was refused."""
    q = torch.randn(2, 1, 16, 4).transpose(2, 3)
    cache = torch.randn(2, 8, 4, 16)
    wanted = flash_attn_with_kvcache(q.contiguous(), cache, cache)
    assert torch.equal(flash_attn_with_kvcache(q, cache, cache), wanted)

    def hook(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == "_straight":
            sys.setprofile(None)
            q.untyped_storage().resize_(0)

    sys.setprofile(hook)
    try:
        with pytest.raises(strobe.InvalidArgument, match=r"^q\b"):
            flash_attn_with_kvcache(q, cache, cache)
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("mode", [odd.NewTensors, odd.NewTensorsBelow])
@pytest.mark.parametrize("known", [False, True])
def test_new_tensors_are_checked(made: str, mode: Any, known: bool) -> None:
    if mode is odd.NewTensorsBelow and made in ("array", "none"):
        pytest.skip("PyTorch itself refuses them")
    seen = 0

    def alter(x: Any) -> Any:
        nonlocal seen
        seen += 1
        return MADE[made](x)

    for name, (function, result) in calls().items():
        wanted = function()
        if not known:
            _core.forget()
        before = seen
        with mode(alter):
            if name.startswith("flash"):  # an operator, in which the mode does not see what is new
                assert torch.equal(function(), wanted)
                assert seen == before
                continue
            with pytest.raises(strobe.InvalidArgument, match=f"^{result}, a new array") as caught:
                function()
        assert "expected float32 (" in str(caught.value)
        assert seen > before
        found = function()
        both = (found, wanted) if isinstance(found, tuple) else ((found,), (wanted,))
        assert all(torch.equal(a, b) for a, b in zip(*both, strict=True)), name


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("mode", [odd.NewTensors, odd.NewTensorsBelow])
def test_codes_are_written_to_tensors_of_their_own(made: str, mode: Any) -> None:
    x = torch.randn(2, 3, 2, 32)
    wanted = strobe.quantize(x)
    values = strobe.dequantize(*wanted)
    with mode(MADE[made]):
        found = strobe.quantize(x)
        again = strobe.dequantize(*found)
    assert torch.equal(again, values)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_new_tensors_of_a_compiler() -> None:
    q, k, v = tensors(late.dense()).values()
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(strobe.InvalidArgument, match=r"^out, a new array, .* fake tensor"),
    ):
        strobe.attention(q, k, v)
    with torch.device("meta"):  # is for tensors without a device of their own
        assert strobe.attention(q, k, v).is_cpu
