"""Arrays that change while a call reads its arguments: the __dlpack__ of one argument changes
another, as do a tensor's subclass, a mode of PyTorch's, and what else runs in between.

    python late.py DOOR

DOOR is one of `DOORS`. For each pair of arguments and each way to change the one while the other is
read, there is an error of strobe's or a result. Then the same call with arrays that nobody changes
is right: nothing was kept of the other. A program, as a mistake here ends the process.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

import strobe
from strobe import _core

Arrays = dict[str, Any]
F = np.float32


class Late:
    """`array` through DLPack, which does something first."""

    def __init__(self, array: Any, change: Callable[[], Any] = lambda: None) -> None:
        self.array = array
        self.change = change
        self.exported = 0

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **asked: Any) -> Any:
        self.exported += 1
        self.change()
        return self.array.__dlpack__(**asked)


def normal(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(F)


def dense() -> Arrays:
    return {"q": normal(1, 8, 4, 16), "k": normal(1, 8, 2, 16), "v": normal(1, 8, 2, 16)}


def backward() -> Arrays:
    given = dense()
    out, lse = strobe.attention(*given.values(), return_lse=True)
    return {"dout": normal(*out.shape), **given, "out": out, "lse": lse}


def packed() -> Arrays:
    given = {name: x[0] for name, x in dense().items()}
    given = {name: x.copy() for name, x in given.items()}
    lengths = np.array([0, 3, 8], np.int32)
    return {**given, "cu_seqlens_q": lengths, "cu_seqlens_k": lengths.copy()}


def cache() -> Arrays:
    return {
        "q": normal(2, 1, 4, 16),
        "k": normal(6, 4, 2, 16),
        "v": normal(6, 4, 2, 16),
        "seqused_k": np.array([2, 5], np.int32),
        "block_table": np.array([[0, 1], [2, 3]], np.int32),
        "k_new": normal(2, 1, 2, 16),
        "v_new": normal(2, 1, 2, 16),
    }


def parts() -> Arrays:
    return {
        "outs": normal(3, 2, 4, 2, 8),
        "lses": normal(3, 2, 2, 4),
        "out": np.zeros((2, 4, 2, 8), F),
    }


def with_out() -> Arrays:
    return {**dense(), "out": np.zeros((1, 8, 4, 16), F)}


DOORS: dict[str, tuple[Callable[..., Any], Callable[[], Arrays]]] = {
    "attention": (lambda **a: strobe.attention(**a, return_lse=True), dense),
    "out": (lambda **a: strobe.attention(**a, return_lse=True), with_out),
    "packed": (lambda **a: strobe.attention(**a, return_lse=True), packed),
    "backward": (lambda **a: strobe.attention_backward(**a), backward),
    "cache": (lambda **a: strobe.attention_with_kvcache(**a, return_lse=True), cache),
    "merge": (lambda **a: strobe.merge(**a), parts),
    "list": (
        lambda outs, lses, out: strobe.merge(
            [Late(x) for x in outs.array] if isinstance(outs, Late) else list(outs), lses, out=out
        ),
        parts,
    ),
}


# Besides each argument alone, what has to change together to be a problem again.
GROUPS = (("q", "out"), ("k", "v"), ("q", "dout", "out", "lse"), ("k_new", "v_new"))


def longer(x: Any) -> None:
    """With 4000 rows; of an lse, whose rows are its last axis, too."""
    axis = 1 if x.ndim == 4 else x.ndim - 1
    x.resize([4000 if n == axis else size for n, size in enumerate(x.shape)], refcheck=False)


def set_shape(x: Any, shape: tuple[int, ...]) -> None:
    x.shape = shape


# How an argument changes where it lies. Sizes of a page and more: freed memory is gone then.
CHANGES: dict[str, Callable[[Any], None]] = {
    "turned": lambda x: set_shape(x, x.shape[::-1]),
    "swapped": lambda x: set_shape(x, (*x.shape[:-3], *x.shape[-3:][::-1])),
    "flat": lambda x: set_shape(x, (x.size,)),
    "grown": lambda x: x.resize((4000, *x.shape), refcheck=False),
    "longer": longer,
    "shrunk": lambda x: x.resize((1,) * x.ndim, refcheck=False),
    "integers": lambda x: setattr(x, "dtype", np.int32 if x.dtype == F else F),
}


def values(results: Any) -> list[Any]:
    return [np.asarray(x.array if isinstance(x, Late) else x) for x in results]


def check(door: str, changed: tuple[str, ...], changer: str, change: str) -> None:
    function, arrays = DOORS[door]
    _core.forget()
    wanted = [x.copy() for x in values(function(**arrays()))]
    _core.forget()
    given = arrays()
    targets = [given[name] for name in changed]
    given[changer] = Late(given[changer], lambda: [CHANGES[change](x) for x in targets])
    print(door, f"{changer} changes {changed}:", change, flush=True)
    with suppress(strobe.Error):
        function(**given)
    given = arrays()
    given[changer] = Late(given[changer])
    for found, want in zip(values(function(**given)), wanted, strict=True):
        assert found.shape == want.shape, (found.shape, want.shape)
        assert np.array_equal(found, want)


def main() -> None:
    warnings.simplefilter("ignore")
    door = sys.argv[1]
    names = list(DOORS[door][1]())
    groups = [(name,) for name in names] + [x for x in GROUPS if set(x) <= set(names)]
    for changed, changer in itertools.product(groups, names):
        for change in CHANGES if changer not in changed else ():
            check(door, changed, changer, change)


if __name__ == "__main__":
    main()
