"""Random models of transformers, masks, caches and compilers: attn_implementation="strobe" equals
eager (`transformers_cases`).

STROBE_TRANSFORMERS_CASES: how many (40). STROBE_FUZZ_SEED: other cases than the usual ones.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

import transformers_cases  # noqa: E402

CASES = int(os.environ.get("STROBE_TRANSFORMERS_CASES", "40"))
SEED = int(os.environ.get("STROBE_FUZZ_SEED", "1")) * 1000


@pytest.mark.filterwarnings("ignore")  # of transformers about itself
@pytest.mark.parametrize("seed", range(SEED, SEED + CASES))
def test_equal_to_eager(seed: int, transformers: Any) -> None:
    case = transformers_cases.draw(seed)
    try:
        transformers_cases.check(transformers, case)
    except AssertionError as error:
        pytest.fail(f"{case}: {error}")


def test_what_is_drawn() -> None:
    """Every family, padding, task and compiler comes up, and windows in every place."""
    cases = [transformers_cases.draw(seed) for seed in range(2000)]
    assert {case.family for case in cases} == {*transformers_cases.FAMILIES}
    assert {case.padding for case in cases} == {*transformers_cases.PADDING}
    tasks = {"forward", "train", "packed", *transformers_cases.CACHES}
    assert {case.task for case in cases} == tasks
    assert {case.backend for case in cases} == {*transformers_cases.BACKENDS}
    windowed = {(case.padding, case.task) for case in cases if case.window is not None}
    assert len(windowed) > len(tasks) + 4
