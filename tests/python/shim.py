"""Builds and installs the distribution flash-attn (python/flash_attn_shim) for tests."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "python" / "flash_attn_shim"


def install(folder: Path) -> Path:
    """Builds its wheel and unpacks that, which is what pip does; returns where."""
    built = subprocess.run(
        [sys.executable, "-m", "flit_core.wheel", "--outdir", str(folder)],
        cwd=SOURCE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    site = folder / "site"
    zipfile.ZipFile(wheel).extractall(site)
    return site
