"""Every public function has an example in its docstring, and every example does what it says."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import strobe

# By what they need; the attributes that `__all__` names are public, and of a module without it all
# that do not begin with an underscore.
MODULES = {
    "strobe": (),
    "strobe.distributed": ("torch",),
    "strobe.flash_attn": ("torch",),
    "strobe.flash_attn_3": ("torch",),
    "strobe.jax": ("jax",),
    "strobe.torch": ("torch",),
    "strobe.transformers": ("torch", "transformers"),
    "flash_attn": ("torch", "flit_core"),
    "flash_attn.bert_padding": ("torch", "flit_core"),
    "flash_attn.flash_attn_interface": ("torch", "flit_core"),
    "flash_attn._flash_attn_gpu": ("torch", "flit_core"),
    "flash_attn.layers.rotary": ("torch", "flit_core"),
    "flash_attn.ops.triton.rotary": ("torch", "flit_core"),
}


def public(module: Any) -> Iterator[tuple[str, Any]]:
    """Names and objects that a user calls. Of strobe's errors the first speaks for all, and the
    autograd functions beneath flash_attn's are described by those.
    """
    for name in module.__all__:
        x = getattr(module, name)
        if inspect.isclass(x):
            is_error = issubclass(x, Exception) and x is not strobe.Error
            if is_error or any(base.__name__ == "Function" for base in x.__mro__):
                continue
        if callable(x):
            yield name, x


def examples(name: str, x: Any) -> doctest.DocTest:
    text = inspect.getdoc(x) or ""
    return doctest.DocTestParser().get_doctest(text, {}, name, None, None)


@pytest.fixture
def module(request: pytest.FixtureRequest) -> Any:
    name = request.param
    for package in MODULES[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if name.startswith("flash_attn"):
        request.getfixturevalue("flash_attn")
    return importlib.import_module(name)


@pytest.mark.parametrize("module", MODULES, indirect=True)
def test_every_public_function_has_an_example(module: Any) -> None:
    found = list(public(module))
    assert found
    without = [name for name, x in found if not examples(name, x).examples]
    assert without == []


@pytest.mark.filterwarnings("ignore")  # of other packages about themselves
@pytest.mark.parametrize("module", MODULES, indirect=True)
def test_every_example_does_what_it_says(module: Any) -> None:
    known: set[int] = set()
    for name, x in public(module):
        if id(x) in known or (name == "register" and _is_without_registry(module)):
            continue
        known.add(id(x))
        said: list[str] = []
        failures, _ = doctest.DocTestRunner(verbose=False).run(examples(name, x), out=said.append)
        assert failures == 0, "".join(said)


def _is_without_registry(module: Any) -> bool:
    """PyTorch before 2.11, transformers before 5 (whose Llama is another)."""
    if module.__name__ == "strobe.torch":
        attention = importlib.import_module("torch.nn.attention")
        return not hasattr(attention, "register_flash_attention_impl")
    version = importlib.import_module("transformers").__version__
    return bool(version.startswith("4."))
