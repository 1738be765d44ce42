"""What reaches the C library: a library that writes down the arguments of each strobe_forward, and
is the real one in all else.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import capi
import strobe

_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <strobe/strobe.h>
strobe_status strobe_forward(const strobe_plan* plan, const strobe_forward_args* args) {
  strobe_status (*real)(const strobe_plan*, const strobe_forward_args*) =
      (strobe_status (*)(const strobe_plan*, const strobe_forward_args*))dlsym(RTLD_NEXT,
                                                                              "strobe_forward");
  FILE* file = fopen(RECORD, "ab");
  fwrite(&plan->problem, sizeof plan->problem, 1, file);
  fwrite(args, sizeof *args, 1, file);
  fclose(file);
  return real(plan, args);
}
"""


def compiler() -> str:
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return found
    pytest.skip("no C compiler")


def record(program: str, folder: Path) -> tuple[Any, list[tuple[Any, Any]]]:
    """Runs `program`, in this folder: what it prints, as JSON, and (problem, arguments) of each
    launch but those by which the library is checked when it is loaded.
    """
    source, library, records = folder / "record.c", folder / "libstrobe.so", folder / "records"
    source.write_text(f'#define RECORD "{records}"\n{_SOURCE}')
    command: list[Any] = [compiler(), "-shared", "-fPIC", f"-I{capi.ROOT / 'include'}", source]
    real = Path(strobe.info().library).resolve()
    link: list[Any] = ["-Wl,--no-as-needed", real, f"-Wl,-rpath,{real.parent}"]
    subprocess.run([*command, "-o", library, *link], check=True)
    # The loader looks for the real one by the name that it gives itself; a wheel's has another.
    (folder / f"libstrobe.so.{strobe.__version__.partition('.')[0]}").symlink_to(real)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")]))
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "STROBE_LIBRARY": str(library), "LD_LIBRARY_PATH": path},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    data, seen = records.read_bytes(), []
    sizes = ctypes.sizeof(capi.Problem), ctypes.sizeof(capi.ForwardArgs)
    for start in range(0, len(data), sum(sizes)):
        problem = capi.Problem.from_buffer_copy(data, start)
        seen.append((problem, capi.ForwardArgs.from_buffer_copy(data, start + sizes[0])))
    return json.loads(found.stdout), [each for each in seen if each[0].seqlen_q]
