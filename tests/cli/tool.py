"""What the tests of the command line tool share: the tool, files for it, the oracle's answers.

STROBE_CLI names the program.
"""

from __future__ import annotations

import json
import math
import os
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))

import oracle

CLI = os.environ.get("STROBE_CLI", "")
needs_cli = pytest.mark.skipif(not CLI, reason="STROBE_CLI does not name the program")
limits_address_space = pytest.mark.skipif(
    bool(CLI) and b"__asan_init" in Path(CLI).read_bytes(), reason="AddressSanitizer needs it all"
)

FORMATS = {"F32": "f", "I32": "i", "F16": "e", "U8": "B", "F64": "d", "I64": "q"}
FORMATS |= {"F8_E4M3": "B", "F8_E5M2": "B", "I8": "b", "BOOL": "B"}  # float8 as bytes
Tensors = dict[str, tuple[str, list[int], list[float]]]


def strobe(
    *args: str | Path, limit: int | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run the tool. limit: bytes that it may write to a file."""
    before = [] if limit is None else limited("FSIZE", limit)
    return subprocess.run(
        [*before, CLI, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, **env},
    )


def limited(name: str, limit: int) -> list[str]:
    """What stands before a command that shall run under a limit, one of those of `resource`.

    A process of its own sets it: the tests' process may have threads (of JAX, if tests of it ran
    before), and then no code of Python may run between fork and exec.
    """
    program = (
        "import os, resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_{name}, ({limit}, {limit}))\n"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    return [sys.executable, "-S", "-c", program]


def refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 2, nothing on standard output, one line that has all the words."""
    assert result.returncode == 2, (result.returncode, result.stdout, result.stderr)
    assert result.stdout == ""
    assert result.stderr.startswith("strobe")
    assert result.stderr.count("\n") == 1, result.stderr
    assert len(result.stderr.encode()) <= 401, result.stderr
    assert result.stderr.isprintable() or result.stderr[:-1].isprintable(), repr(result.stderr)
    for word in words:
        assert word in result.stderr, (word, result.stderr)


def encode(dtype: str, values: list[float]) -> bytes:
    if (
        dtype == "BF16"
    ):  # truncation: the test's values are exact in bfloat16 or the tolerance is wide
        return b"".join(struct.pack("<f", x)[2:] for x in values)
    code = FORMATS[dtype]
    return struct.pack(f"<{len(values)}{code}", *(int(x) if code in "iqBb" else x for x in values))


def decode(dtype: str, data: bytes) -> list[float]:
    if dtype == "BF16":
        return [struct.unpack("<f", b"\0\0" + data[i : i + 2])[0] for i in range(0, len(data), 2)]
    code = FORMATS[dtype]
    return list(struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data))


def raw(header: bytes | str | dict, data: bytes = b"", length: int | None = None) -> bytes:
    """A file with that header, whatever it is."""
    if isinstance(header, dict):
        header = json.dumps(header)
    if isinstance(header, str):
        header = header.encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def save(path: Path, tensors: Tensors) -> Path:
    header = {}
    data = b""
    for name, (dtype, shape, values) in tensors.items():
        encoded = encode(dtype, values)
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(encoded)],
        }
        data += encoded
    path.write_bytes(raw(header, data))
    return path


def load(path: Path) -> Tensors:
    """Strict: every byte is accounted for, in order."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    data = content[8 + length :]
    header.pop("__metadata__", None)
    tensors: Tensors = {}
    at = 0
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        assert begin == at
        at = end
        tensors[name] = (entry["dtype"], entry["shape"], decode(entry["dtype"], data[begin:end]))
        assert len(tensors[name][2]) == math.prod(entry["shape"])
    assert at == len(data)
    return tensors


def normal(count: int, seed: int) -> list[float]:
    source = random.Random(seed)
    return [struct.unpack("<f", struct.pack("<f", source.gauss(0, 1)))[0] for _ in range(count)]


def attention(
    q: list[float], k: list[float], v: list[float], shape: tuple[int, int, int, int], **options: Any
) -> tuple[list[float], list[float]]:
    """The oracle's out and lse. q, k, v [batch, seqlen, heads, dim]; strobe.attention's options."""
    found = oracle.attention(*(np.reshape(x, shape) for x in (q, k, v)), **options)
    return found.out.ravel().tolist(), found.lse.ravel().tolist()


SHAPE = (2, 9, 3, 8)
COUNT = math.prod(SHAPE)
Q, K, V, DOUT = (normal(COUNT, seed) for seed in range(4))


def qkv(dtype: str = "F32") -> Tensors:
    return {name: (dtype, list(SHAPE), values) for name, values in (("q", Q), ("k", K), ("v", V))}


def run(path: Path, *args: str | Path, **env: str) -> Tensors:
    """`strobe run` to a file beside the input; its tensors."""
    output = path.parent / "out.safetensors"
    result = strobe("run", path, "-o", output, "--repeat", "1", *args, **env)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert not list(path.parent.glob("*.tmp*"))
    return load(output)


def close(got: list[float], wanted: list[float], tolerance: float) -> None:
    assert len(got) == len(wanted)
    # One by one: a maximum may pass over NaN.
    for i, (x, y) in enumerate(zip(got, wanted, strict=True)):
        assert abs(x - y) <= tolerance, (i, x, y)


@contextmanager
def other_programs() -> Iterator[None]:
    """Four for each processor, none of which does anything but run.

    With one for each, a scheduler may keep two of them on one processor for as long as a short
    timing takes, and the program that is timed has the other to itself.
    """
    busy = [
        subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
        for _ in range(4 * (os.cpu_count() or 1))
    ]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()
