"""The distribution flash-attn: what it is called, what it has, and what it says it has not."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("flit_core") is None:
    pytest.skip("flit_core is not installed", allow_module_level=True)

import strobe.flash_attn  # noqa: E402


def test_name_and_version(flash_attn: Any) -> None:
    assert flash_attn.__version__ == "2.8.3"
    assert importlib.metadata.version("flash-attn") == "2.8.3"
    major, minor = map(int, strobe.__version__.split(".")[:2])
    depends = [f"strobe-attention>={major}.{minor},<{major}.{minor + 1}"]
    assert importlib.metadata.requires("flash-attn") == depends
    # PyPI refuses what has this classifier: the name is the official package's there.
    assert "Private :: Do Not Upload" in importlib.metadata.metadata("flash-attn").get_all(
        "Classifier", []
    )
    assert "flash-attn" in importlib.metadata.packages_distributions()["flash_attn"]


def test_functions_are_strobes(flash_attn: Any) -> None:
    interface = importlib.import_module("flash_attn.flash_attn_interface")
    for name in strobe.flash_attn.__all__:
        assert getattr(flash_attn, name) is getattr(strobe.flash_attn, name)
        assert getattr(interface, name) is getattr(strobe.flash_attn, name)
    parameters = inspect.signature(flash_attn.flash_attn_varlen_func).parameters
    assert {"dropout_p", "window_size", "softcap", "deterministic"} <= parameters.keys()


# ------------------------------------------------------------------------------------------- names

RANKS = ("FlashAttn", "FlashAttnVarlen")
NAMES = {
    "flash_attn": strobe.flash_attn.__all__,
    "flash_attn.flash_attn_interface": [
        *strobe.flash_attn.__all__,
        *(f"{rank}{packed}Func" for rank in RANKS for packed in ("", "QKVPacked", "KVPacked")),
        *(
            f"_{kind}flash_attn_{form}{pass_}"
            for kind in ("", "wrapped_")
            for form in ("", "varlen_")
            for pass_ in ("forward", "backward")
        ),
        "_get_block_size_n",
        "flash_attn_gpu",
        "maybe_contiguous",
        "round_multiple",
        "USE_TRITON_ROCM",
    ],
    "flash_attn.bert_padding": [
        "IndexFirstAxis",
        "IndexFirstAxisResidual",
        "IndexPutFirstAxis",
        "index_first_axis",
        "index_first_axis_residual",
        "index_put_first_axis",
        "pad_input",
        "unpad_input",
        "unpad_input_for_concatenated_sequences",
    ],
    "flash_attn.layers.rotary": [
        "ApplyRotaryEmb",
        "ApplyRotaryEmbKV_",
        "ApplyRotaryEmbQKV_",
        "RotaryEmbedding",
        "apply_rotary",
        "apply_rotary_emb",
        "apply_rotary_emb_func",
        "apply_rotary_emb_kv_",
        "apply_rotary_emb_qkv_",
        "apply_rotary_emb_torch",
        "rotate_half",
    ],
    "flash_attn.ops.triton.rotary": ["apply_rotary"],
}


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize("module", NAMES)
def test_names(module: str) -> None:
    for name in NAMES[module]:
        exec(f"from {module} import {name}")
    everything: dict[str, Any] = {}
    exec(f"from {module} import *", everything)
    assert {name for name in NAMES[module] if name[0] != "_" and name[0].islower()} <= set(
        everything
    )


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize(
    "name",
    [
        "flash_attn.cute",
        "flash_attn.losses",
        "flash_attn.modules",
        "flash_attn.ops.fused_dense",
        "flash_attn.ops.triton.layer_norm",
        "flash_attn.layers.patch_embed",
    ],
)
def test_absent_modules_say_so_where_they_are_imported(name: str) -> None:
    assert importlib.util.find_spec(name) is None
    for again in (lambda: importlib.import_module(name), lambda: exec(f"import {name}")):
        with pytest.raises(ModuleNotFoundError, match="this flash_attn is Strobe's") as caught:
            again()
        assert caught.value.name == name
        assert "bert_padding, flash_attn_interface, layers.rotary" in str(caught.value)
    package, _, module = name.rpartition(".")
    with pytest.raises(ImportError, match=f"cannot import name {module!r}.*Strobe's"):
        exec(f"from {package} import {module}")
    with pytest.raises(ModuleNotFoundError, match="Strobe's"):
        importlib.import_module(f"{name}.interface")
    with pytest.raises(ModuleNotFoundError):  # as of any package
        importlib.util.find_spec(f"{name}.interface")


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize("module", NAMES)
def test_absent_names_say_so(module: str) -> None:
    found = importlib.import_module(module)
    assert not hasattr(found, "no_such_name")
    assert getattr(found, "no_such_name", 3) == 3
    for name, raises in (
        (lambda: found.no_such_name, AttributeError),
        (lambda: exec(f"from {module} import no_such_name"), ImportError),
    ):
        with pytest.raises(raises, match=r"no_such_name.*this flash_attn is Strobe's") as caught:
            name()
        assert len(str(caught.value)) <= 400
        assert NAMES[module][0] in str(caught.value)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{module}.no_such_name")


@pytest.mark.usefixtures("flash_attn")
def test_other_modules_are_none_of_its_business() -> None:
    assert importlib.util.find_spec("a_module_that_nobody_has") is None
    for name in ("a_module_that_nobody_has", "flash_attn_3", "flash_attn_2_cuda"):
        with pytest.raises(ModuleNotFoundError, match=f"^No module named '{name}'$"):
            importlib.import_module(name)


def test_without_strobe(shim_site: Path) -> None:
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(shim_site),
        "STROBE_LIBRARY": "/none",
    }
    result = subprocess.run(
        [sys.executable, "-c", "import flash_attn"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        "ImportError: this flash_attn is Strobe's, and Strobe cannot be imported" in result.stderr
    )


# ----------------------------------------------------------------------------------------- padding


def test_unpad_and_pad(flash_attn: Any) -> None:
    padding = importlib.import_module("flash_attn.bert_padding")
    x = torch.randn(3, 5, 2, 4, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 0, 0, 0, 0]])
    rows, indices, offsets, longest, used = padding.unpad_input(x, mask)
    assert rows.shape == (7, 2, 4)
    assert torch.equal(rows, x[mask.bool()])
    assert indices.tolist() == [0, 1, 2, 7, 8, 9, 10]
    assert (offsets.tolist(), offsets.dtype) == ([0, 3, 6, 7], torch.int32)
    assert (longest, type(longest), used.tolist()) == (3, int, [3, 3, 1])
    back = padding.pad_input(rows, indices, 3, 5)
    assert torch.equal(back, x * mask[..., None, None])
    back.square().sum().backward()
    assert torch.equal(x.grad, 2 * x * mask[..., None, None])
    assert torch.equal(padding.pad_input(rows, indices.int(), 3, 5), back)
    assert torch.equal(padding.index_first_axis(x.flatten(0, 1), indices), rows)

    reserved = torch.tensor([[0, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]])
    rows, _, offsets, longest, used = padding.unpad_input(x, mask.bool(), reserved)
    assert (offsets.tolist(), longest, used.tolist()) == ([0, 4, 7, 9], 4, [3, 3, 1])
    assert len(rows) == 9


def test_nothing_to_unpad(flash_attn: Any) -> None:
    padding = importlib.import_module("flash_attn.bert_padding")
    rows, indices, offsets, longest, _ = padding.unpad_input(
        torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.bool)
    )
    assert (rows.shape, offsets.tolist(), longest) == ((0, 4), [0, 0, 0], 0)
    assert not padding.pad_input(rows, indices, 2, 3).any()


def test_several_sequences_in_a_row(flash_attn: Any) -> None:
    padding = importlib.import_module("flash_attn.bert_padding")
    x = torch.randn(3, 6, 4)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    rows, indices, offsets, longest = padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert (offsets.tolist(), offsets.dtype) == ([0, 2, 5, 8, 10, 16], torch.int32)
    assert (longest, type(longest)) == (6, int)
    assert indices.tolist() == [*range(5), *range(6, 11), *range(12, 18)]
    assert torch.equal(rows, x.flatten(0, 1)[indices])


def test_rows_by_index(flash_attn: Any) -> None:
    """The functions and the autograd functions of their names, and both against plain indexing."""
    padding = importlib.import_module("flash_attn.bert_padding")
    x = torch.randn(7, 2, 3, requires_grad=True)
    indices = torch.tensor([5, 0, 2])
    weight, other = torch.randn(3, 2, 3), torch.randn(7, 2, 3)

    def gradient(out: Any) -> Any:
        (found,) = torch.autograd.grad(sum((a * b).sum() for a, b in out), x)
        return found

    wanted = gradient([(x[indices], weight)])
    for take in (padding.index_first_axis, padding.IndexFirstAxis.apply):
        assert torch.equal(take(x, indices), x[indices])
        assert torch.equal(gradient([(take(x, indices), weight)]), wanted)
    wanted = gradient([(x[indices], weight), (x, other)])
    for take in (padding.index_first_axis_residual, padding.IndexFirstAxisResidual.apply):
        rows, residual = take(x, indices)
        assert torch.equal(rows, x[indices])
        assert torch.equal(residual, x)
        torch.testing.assert_close(gradient([(rows, weight), (residual, other)]), wanted)
    spread = torch.zeros(9, 2, 3)
    positions = torch.tensor([8, 1, 3, 2, 7, 0, 4])
    spread[positions] = x.detach()
    factor = torch.randn(9, 2, 3)
    for put in (padding.index_put_first_axis, padding.IndexPutFirstAxis.apply):
        out = put(x, positions, 9)
        assert torch.equal(out, spread)
        assert torch.equal(gradient([(out, factor)]), factor[positions])
    twice = torch.tensor([1, 1])
    for take in (padding.index_first_axis, padding.IndexFirstAxis.apply):
        assert gradient([(take(x, twice), 1.0)]).sum() == 12
