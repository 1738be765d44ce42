"""`pip install .` begins with the distribution's name and version, which the build backend takes
from pyproject.toml and the C header: that step, as pip calls it, without the build.
"""

from __future__ import annotations

import re
import subprocess
import sys
from email.parser import HeaderParser
from pathlib import Path

from documents import ROOT

STEP = """
import sys
from scikit_build_core.build import prepare_metadata_for_build_wheel
prepare_metadata_for_build_wheel(sys.argv[1])
"""


def test_the_version_is_that_of_the_header(tmp_path: Path) -> None:
    step = [sys.executable, "-c", STEP, str(tmp_path)]
    made = subprocess.run(step, cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    read = HeaderParser().parsestr(metadata.read_text())
    assert read["Name"] == "strobe-attention"
    header = (ROOT / "include" / "strobe" / "strobe.h").read_text()
    numbers = [
        re.search(rf"^#define STROBE_VERSION_{part} (\d+)$", header, re.MULTILINE)
        for part in ("MAJOR", "MINOR", "PATCH")
    ]
    assert read["Version"] == ".".join(number[1] for number in numbers if number)
