"""Fixtures of the command line tool's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tool import qkv, save


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return save(tmp_path / "in.safetensors", qkv())
