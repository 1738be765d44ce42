"""strobe.tuning: which file of choices is in force, and what calls take of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strobe
from strobe import _core


@pytest.fixture(autouse=True)
def _rules() -> Iterator[None]:
    yield
    strobe.tuning.load(None)


def write(path: Path, **changes: Any) -> Path:
    choice = {
        "problems": "forward fp32 head_dim 16/16, 1 heads of 1, 64 x 64, threads 1",
        "kernel": "cpu_portable",
        "instance": "",
        "block": 64,
        "gain_percent": 5,
    }
    device = {
        "device": "cpu",
        "name": strobe.info().cpu,
        "compute_capability": 0,
        "choices": [choice],
    }
    whole = {"strobe_tuning": 1, "version": strobe.__version__, "devices": [device]}
    path.write_text(json.dumps(whole | changes))
    return path


def test_calls_take_what_is_in_force(tmp_path: Path) -> None:
    if not strobe.info().cpu:
        pytest.skip("this CPU has no name")
    q = np.random.default_rng(1).standard_normal((1, 64, 1, 16)).astype(np.float32)
    by_rules = strobe.attention(q, q, q, threads=1)
    path = write(tmp_path / "tuning.json")
    strobe.tuning.load(path)
    assert strobe.tuning.text() == f"1 choices for this machine: {path}"
    assert strobe.info().tuning == strobe.tuning.text()
    assert f"tuning    {strobe.tuning.text()}" in str(strobe.info())
    assert "cpu_portable, chosen by tuning" in strobe.plan(q, q, q, threads=1)
    assert "takes it: chosen by tuning" in strobe.why(q, q, q, threads=1)
    assert _core.kept() == (0, 0)  # plans of before are not used on
    np.testing.assert_allclose(strobe.attention(q, q, q, threads=1), by_rules, atol=1e-6)
    strobe.tuning.load(str(path))
    strobe.tuning.load(None)
    assert "tuning" not in strobe.plan(q, q, q, threads=1)


def test_what_is_refused_changes_nothing(tmp_path: Path) -> None:
    strobe.tuning.load(write(tmp_path / "good.json"))
    before = strobe.tuning.text()
    with pytest.raises(strobe.InvalidArgument, match=r"is of Strobe 0\.0\.1, and this is"):
        strobe.tuning.load(write(tmp_path / "old.json", version="0.0.1"))
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(strobe.InvalidArgument, match=r"is no tuning file: line 1: expected \{"):
        strobe.tuning.load(tmp_path / "bad.json")
    with pytest.raises(strobe.InvalidArgument, match="No such file"):
        strobe.tuning.load(tmp_path / "none.json")
    with pytest.raises(TypeError):
        strobe.tuning.load(3)  # type: ignore[arg-type]
    assert strobe.tuning.text() == before
