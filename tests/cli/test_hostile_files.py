"""Files that lie about themselves, for the command line tool: truncated, changed, contradictory."""

from __future__ import annotations

import json
import math
import os
import random
import struct
import subprocess
from pathlib import Path

import pytest

from tool import (
    CLI,
    limited,
    limits_address_space,
    needs_cli,
    raw,
    refused,
    strobe,
)

pytestmark = needs_cli


def by_words(value: object) -> str | None:
    """A short test name from the words that the message must have, none from hostile bytes."""
    if isinstance(value, list) and value and all(isinstance(x, str) for x in value):
        return "".join(c if c.isalnum() else "-" for c in "-".join(value))[:60]
    return "x" if isinstance(value, (bytes, dict)) else None


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


EIGHT = b"\0" * 8
BIG = 2**63


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["0 bytes"]),
        (b"\x02\0\0\0\0\0\0", ["7 bytes"]),
        (raw("{}", length=2**64 - 1), ["header length 18446744073709551615"]),
        (raw("{}", length=2**63), ["header length"]),
        (raw("{}", length=99_999_999), ["header length 99999999", "cut off"]),
        (raw("{}", length=3), ["header length 3, but only 2 bytes follow"]),
        (raw(""), ["does not begin with '{'"]),
        (raw("[]"), ["does not begin with '{'"]),
        (b"PK\x03\x04" + b"\0" * 100, ["does not begin with"]),
        (raw("{"), ["not valid JSON"]),
        (raw('{"q":'), ["not valid JSON"]),
        (raw("{} x"), ["not valid JSON"]),
        (raw(b'{"\xff\xfe": 1}'), ["not valid JSON"]),
        (raw("{" + '"a":{' * 100_000), ["expected"]),
        (raw('{"a":{"shape":' + "[" * 100_000), ["holds a list"]),
        (raw('{"a":' + "[" * 100_000), ['"a" is a list']),
        (raw({"q": 3}), ['"q" is 3', "expected an object"]),
        (raw({"q": None}), ['"q" is null']),
        (raw({"q": {}}), ["has no dtype"]),
        (raw({"q": {"dtype": "F32", "shape": [2]}}, EIGHT), ["has no data_offsets"]),
        (raw({"q": {**entry(), "more": 1}}, EIGHT), ['the field "more"']),
        (raw({"q": entry(dtype=1)}, EIGHT), ["dtype is 1", "expected a string"]),
        (raw({"q": entry(dtype="F31")}, EIGHT), ['dtype "F31" is unknown']),
        (raw({"q": entry(dtype="\x1b[31mF32")}, EIGHT), ["\\x1b[31mF32"]),
        (raw({"q": entry(shape=2)}, EIGHT), ["shape is 2", "expected a list"]),
        (raw({"q": entry(shape=[-2])}, EIGHT), ["shape holds -2", "whole numbers"]),
        (raw({"q": entry(shape=[2.0])}, EIGHT), ["shape holds 2.0"]),
        (raw({"q": entry(shape=["2"])}, EIGHT), ["shape holds a string"]),
        (raw({"q": entry(shape=[10**30])}, EIGHT), ["shape holds 1000"]),
        (raw({"q": entry(shape=[True])}, EIGHT), ["shape holds true"]),
        (raw({"q": entry(shape=[1] * 33)}, EIGHT), ["more than 32"]),
        (raw({"q": entry(shape=[BIG, 2])}, EIGHT), ["64 bits"]),
        (raw({"q": entry(shape=[BIG, 0], offsets=[0, 0])}), ["64 bits"]),
        (raw({"q": entry(shape=[2**32, 2**32, 2**32])}, EIGHT), ["64 bits"]),
        (raw({"q": entry(shape=[2**62 + 2])}, EIGHT), ["64 bits"]),
        (raw({"q": entry(offsets=[0])}, EIGHT), ["data_offsets has 1 numbers", "expected 2"]),
        (raw({"q": entry(offsets=[8, 0])}, EIGHT), ["data_offsets [8, 0] lie outside"]),
        (
            raw({"q": entry(offsets=[0, 16])}, EIGHT),
            ["data_offsets [0, 16] lie outside", "cut off"],
        ),
        (raw({"q": entry(offsets=[2**64 - 8, 2**64 - 1])}, EIGHT), ["lie outside"]),
        (raw({"q": entry(shape=[3])}, EIGHT), ["span 8 bytes", "expected 12"]),
        (
            raw({"q": entry(dtype="BF16")}, EIGHT),
            ["span 8 bytes", "expected 4 for shape [2] of BF16"],
        ),
        (raw({"q": entry()}, EIGHT + b"x"), ["9 bytes of data", "take 8"]),
        (raw({"q": entry(offsets=[1, 9])}, b"x" + EIGHT), ["starts at byte 1", "expected 0"]),
        (
            raw({"q": entry(), "k": entry(offsets=[4, 12])}, EIGHT * 2),
            ["starts at byte 4", "expected 8"],
        ),
        (raw({"q": entry(), "k": entry()}, EIGHT), ["neither overlap"]),
        (
            raw('{"q": {"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', EIGHT),
            ["dtype twice"],
        ),
        (
            raw('{"q": {"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}}', EIGHT),
            ["shape twice"],
        ),
        (
            raw(
                f'{{"q": {json.dumps(entry())}, "q": {json.dumps(entry(offsets=[8, 16]))}}}',
                EIGHT * 2,
            ),
            ['"q" twice'],
        ),
        (raw({"__metadata__": {"a": 1}}), ['__metadata__ "a" is 1', "expected a string"]),
        (raw({"__metadata__": {"a": {}}}), ["an object"]),
        (raw('{"__metadata__": {"a": "1", "a": "2"}}'), ['"a" twice']),
        (raw('{"__metadata__": {}, "__metadata__": {}}'), ["__metadata__ twice"]),
        (raw({"q" * 100_000: 1}), ["qqq..."]),
        (raw(b"{}\0"), ["not valid JSON at byte 2", "NUL"]),
        (raw(b'{}\0{"q": 1}'), ["NUL"]),
        (raw(json.dumps({"q": entry()}).encode() + b"  \0\0", EIGHT), ["NUL"]),
        (raw({"q": entry(shape=[2**62] * 32)}, EIGHT), ["64 bits"]),
        (raw({"q" * 900: entry("x" * 900)}, EIGHT), ["qqq...", 'xxx..." is unknown']),
        (raw("{" + ",".join(f'"{i}":{{}}' for i in range(100_000)) + "}"), ["has no dtype"]),
    ],
    ids=by_words,
)
def test_hostile_files(tmp_path: Path, content: bytes, words: list[str]) -> None:
    path = tmp_path / "in.safetensors"
    path.write_bytes(content)
    refused(strobe("run", path, "-o", tmp_path / "out"), str(path), *words)
    assert [p.name for p in tmp_path.iterdir()] == ["in.safetensors"]


def test_every_truncation_is_refused(plain: Path, tmp_path: Path) -> None:
    content = plain.read_bytes()
    cut = tmp_path / "cut.safetensors"
    for size in [*range(0, 300, 7), len(content) - 1]:
        cut.write_bytes(content[:size])
        refused(strobe("run", cut, "-o", tmp_path / "out"), "cut.safetensors")
    assert not (tmp_path / "out").exists()


def test_changed_bytes_never_crash(plain: Path, tmp_path: Path) -> None:
    """Random damage to the header: success or a refusal, nothing else."""
    source = random.Random(5)
    content = plain.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    path = tmp_path / "damaged.safetensors"
    for _ in range(60):
        damaged = bytearray(content)
        for _ in range(source.randint(1, 3)):
            damaged[source.randrange(8 + length)] = source.randrange(256)
        path.write_bytes(damaged)
        assert strobe("run", path, "--repeat", "1").returncode in (0, 2)


# Of the examples beside the tool: a small file, or one that is large and holds nothing, takes no
# memory beyond its own size before it is refused.


def example(name: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run an example in a gigabyte of address space."""
    program = Path(CLI).with_name(name)
    if not os.access(program, os.X_OK):
        pytest.skip(f"no {program}")
    return subprocess.run(
        [*limited("AS", 1 << 30), program, *args],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def zeros(path: Path, shapes: dict[str, list[int]], metadata: dict[str, str]) -> Path:
    """A file of float32 zeros, which takes no room on the disk."""
    header: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for name, shape in shapes.items():
        end = at + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, end]}
        at = end
    content = raw(header)
    path.write_bytes(content)
    os.truncate(path, len(content) + at)
    return path


def char_gpt(dim: int, blocks: int) -> dict[str, list[int]]:
    """What the weights of `generate` are, for an alphabet of one character."""
    shapes = {"token.weight": [1, dim]}
    for n in range(blocks):
        for norm in ("attention_norm", "feed_forward_norm"):
            shapes |= {f"blocks.{n}.{norm}.{x}": [dim] for x in ("weight", "bias")}
        layers = {"qkv": (dim, 3 * dim), "projection": (dim, dim)}
        layers |= {"up": (dim, 4 * dim), "down": (4 * dim, dim)}
        for layer, (first, last) in layers.items():
            shapes |= {f"blocks.{n}.{layer}.weight": [last, first]}
            shapes |= {f"blocks.{n}.{layer}.bias": [last]}
    shapes |= {"norm.weight": [dim], "norm.bias": [dim]}
    return shapes | {"head.weight": [1, dim], "head.bias": [1]}


@limits_address_space
@pytest.mark.parametrize(
    ("dim", "blocks", "numbers", "words"),
    [
        (64, 2, {}, ""),
        (64, 2, {"heads": "32", "context": "2147483647", "rotary_base": "1e30"}, ""),
        (1 << 24, 0, {"heads": "1"}, "heads = 1 in its metadata, expected what divides the 1677"),
        (1 << 24, 0, {"heads": "65536"}, "no tensor blocks.0.qkv.weight"),
        (258, 1, {"heads": "1"}, "heads of an even size of at most 256"),
        (64, 2, {"heads": "2147483647"}, "heads = 2147483647 in its metadata"),
        (64, 2, {"heads": "2147483648"}, "heads = 2147483648, expected a whole number from 1 to"),
        (64, 2, {"context": "-1"}, "context = -1, expected a whole number from 1 to"),
    ],
)
def test_generate_believes_no_weights(
    tmp_path: Path, dim: int, blocks: int, numbers: dict[str, str], words: str
) -> None:
    metadata = {"alphabet": "a", "heads": "2", "context": "8", "rotary_base": "1e4"}
    metadata |= {"norm_epsilon": "1e-5", **numbers}
    path = zeros(tmp_path / "weights", char_gpt(dim, blocks), metadata)
    result = example("generate", "a", "--length", "300", "--weights", path)
    assert result.returncode == (2 if words else 0), result.stderr
    assert words in result.stderr
    assert bool(result.stderr) == bool(words)


@limits_address_space
@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ([1, 1 << 16, 1, 32], "65536 tokens and 1 heads of 32, expected what takes 4 GB at most"),
        ([1, 32, 1 << 10, 32], "32 tokens and 1024 heads of 32, expected what takes 4 GB at most"),
        ([1, 32, 1, 1 << 16], "head_dim 65536, expected at most 256"),
        ([1, 1 << 40, 0, 32], "expected F32 [1, tokens, heads, head_dim]"),
    ],
)
def test_demo_believes_no_capture(tmp_path: Path, shape: list[int], words: str) -> None:
    path = zeros(tmp_path / "capture", dict.fromkeys(("q", "k", "v", "dout"), shape), {})
    result = example("strobe_demo", path)
    assert result.returncode == 2
    assert words in result.stderr
