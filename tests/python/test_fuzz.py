"""Random wrong calls of every public function (`fuzz`), in processes of their own.

STROBE_FUZZ_CASES: how many (2000). STROBE_FUZZ_SEED: other cases than the usual ones.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import strobe

pytest.importorskip("torch")

CASES = int(os.environ.get("STROBE_FUZZ_CASES", "2000"))
SEED = int(os.environ.get("STROBE_FUZZ_SEED", "1"))
LOWER = [
    f"_flash_attn_{varlen}{direction}"
    for varlen in ("", "varlen_")
    for direction in ("forward", "backward")
]
BATCH = 2000  # cases of one process: PyTorch takes seconds to import


@pytest.mark.usefixtures("flash_attn")  # for this test alone: others ask for it
def test_every_public_function_is_drawn() -> None:
    from strobe import flash_attn, flash_attn_3
    from strobe import torch as strobe_torch

    from fuzz import FUNCTIONS

    modules = {"": strobe, "flash_attn_3.": flash_attn_3, "torch.": strobe_torch}
    modules["flash_attn_gpu."] = importlib.import_module("flash_attn._flash_attn_gpu")
    public = {
        prefix + name
        for prefix, module in modules.items()
        for name in module.__all__
        if not isinstance(getattr(module, name), type)
    }
    public |= {*flash_attn.__all__}
    public |= {f"flash_attn_interface.{x}" for x in LOWER}
    if importlib.util.find_spec("jax") is not None:
        public.add("jax.attention")
    # Modules; and functions without arguments, or with none that is looked at.
    public -= {"masks", "tuning"}
    public -= {"__version__", "info", "torch.register", "flash_attn_3.get_scheduler_metadata"}
    assert public - set(FUNCTIONS) == set()


@pytest.mark.parametrize("first", range(0, CASES, BATCH))
def test_no_argument_gets_past_the_door(first: int) -> None:
    count = min(BATCH, CASES - first)
    fuzz = Path(__file__).with_name("fuzz.py")
    command = [sys.executable, "-X", "faulthandler", str(fuzz), str(SEED), str(first), str(count)]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired as error:
        lines = (error.stdout or b"").decode().splitlines()
        pytest.fail(f"no end: {lines[-1:]}")
    lines = found.stdout.splitlines()
    wrong = [
        f"{lines[i - 1]}\n{line}" for i, line in enumerate(lines) if line.startswith("  WRONG")
    ]
    assert not wrong, "\n".join(wrong)
    # What ended the process, if anything did, is the last line.
    assert found.returncode == 0, f"{lines[-1:]} ended with {found.returncode}\n{found.stderr}"
    assert len(lines) == count
