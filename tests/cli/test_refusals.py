"""What the command line tool refuses, in which words, and that no file is left."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tool import (
    COUNT,
    DOUT,
    SHAPE,
    K,
    Q,
    Tensors,
    V,
    needs_cli,
    qkv,
    refused,
    save,
    strobe,
)

pytestmark = needs_cli
ALL = "info, run, check, bench, tune, completion and help"


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (".", ["directory", "expected a file name"]),
        ("none/out", ["No such file"]),
        ("/dev/null", ["not a regular file"]),
        ("/dev/full", ["not a regular file"]),
        ("in.safetensors/out", ["not a directory"]),
    ],
)
def test_output_that_cannot_be(plain: Path, tmp_path: Path, output: str, words: list[str]) -> None:
    refused(strobe("run", plain, "-o", tmp_path / output), "cannot write", *words)
    assert [p.name for p in tmp_path.iterdir()] == ["in.safetensors"]


def test_output_on_a_full_disk(plain: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.write_text("old")
    result = strobe("run", plain, "-o", output, limit=1000)
    assert result.returncode == 2
    assert "cannot write" in result.stderr
    assert "File too large" in result.stderr
    assert output.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.safetensors", "out"]


# What is refused.


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["foo"], ["strobe: foo is not a command: there are", ALL]),
        (["benc"], ["strobe: benc is not a command: did you mean bench?", ALL]),
        (["ifno", "--json"], ["did you mean info?"]),
        (["hlep"], ["did you mean help?"]),
        (["comp"], ["did you mean completion?"]),
        (["c"], ["c is not a command: there are"]),  # check, completion
        (["--foo"], ["strobe: --foo is not a flag of `strobe`: see `strobe --help`"]),
        (["--verison"], ["did you mean --version?"]),
        (["--json", "info"], ["--json stands before a command"]),
        (["--causal=no", "bench"], ["--causal=no stands before a command"]),
        (["foo", "bench"], ["strobe: foo", ALL]),
        (["foo", "run"], ["strobe: foo", ALL]),
        (["foo", "bar", "info", "--jsn"], ["strobe: foo", ALL]),
        (["--foo", "check"], ["strobe: --foo is not a flag of `strobe`"]),
        (["", "bench"], ['strobe: ""', ALL]),
        (["--"], ["expected a command: info, run, check, bench, tune, completion or help"]),
        (["info", "bench", "--foo"], ["bench is one argument too many"]),
        (["info", "bench"], ["bench is one argument too many"]),
        (["help", "foo"], ["strobe help: foo is not a command: there are", ALL]),
        (["help", "ben"], ["strobe help: ben is not a command: did you mean bench?", ALL]),
        (["help", "bench", "foo"], ["foo is one argument too many"]),
        (["help", "--foo"], ["--foo is not a flag of `strobe help`"]),
        (["info", "--jsn"], ["--jsn", "did you mean --json?"]),
        (
            ["run"],
            [
                "strobe run: FILE is missing, expected a safetensors file with q, k, v (and dout)",
                "see `strobe help run`",
            ],
        ),
        (
            ["run", "FILE", "--dtype", "bf61"],
            [
                "--dtype = bf61, expected one of float32, bfloat16, float16, fp32, bf16, fp16",
                "did you mean bf16?",
            ],
        ),
        (["run", "FILE", "--layout", "x"], ["--layout = x, expected bshd or bhsd"]),
        (["run", "FILE", "--causl"], ["--causl", "did you mean --causal?"]),
        (["run", "FILE", "--qqqqqqqq"], ["--qqqqqqqq", "strobe run --help"]),
        (["run", "FILE", "-x"], ["-x is not a flag"]),
        (["run", "FILE", "--sinks-outside-lse"], ["expected the tensor sinks in "]),
        (["run", "FILE", "--rotary-interleaved"], ["the tensors rotary_cos and rotary_sin in "]),
        (["run", "FILE", "more"], ["more is one argument too many"]),
        (["run", "FILE", "--window", "3", "2", "1"], ["1 is one argument too many"]),
        (["run", "FILE", "--signed-window", "3", "2", "1"], ["1 is one argument too many"]),
        (["run", "FILE", "--causl", "--"], ["--causl is not a flag", "did you mean --causal?"]),
        (["run", "FILE", "--cuasal"], ["did you mean --causal?"]),
        (["run", "FILE", "--decod"], ["--decod is not a flag", "strobe run --help"]),
        (["run", "FILE", "--attention"], ["did you mean --attention-chunk?"]),
        (["run", "FILE", "--causal=3"], ["--causal = 3, expected no or yes"]),
        (["run", "FILE", "--causal=no,yes"], ["--causal = no,yes, expected no or yes"]),
        (["run", "FILE", "--why=yes"], ["--why takes no value"]),
        (["run", "FILE", "--threads", "many"], ["--threads = many", "expected a whole number"]),
        (["run", "FILE", "--threads", "-1"], ["--threads = -1", "expected a whole number from 1"]),
        (["run", "FILE", "--threads"], ["--threads lacks a value"]),
        (["run", "FILE", "--threads", "99999999999"], ["--threads = 99999999999"]),
        (["run", "FILE", "--threads", "0"], ["--threads = 0", "from 1 to 65536"]),
        (["check", "--threads", "0"], ["--threads = 0"]),
        (["bench", "--threads", "0"], ["--threads = 0"]),
        (["run", "FILE", "--repeat", "0"], ["--repeat = 0", "from 1"]),
        (["run", "FILE", "--device-index", "1"], ["--device-index = 1", "--device cpu"]),
        (["run", "FILE", "--scale", "1e"], ["--scale = 1e", "expected a finite number"]),
        (["run", "FILE", "--scale", "nan"], ["--scale = nan", "expected a finite number"]),
        (["run", "FILE", "--scale", "1e300"], ["--scale = 1e300", "expected a finite number"]),
        (["run", "FILE", "--window", "3"], ["--window lacks a value", "LEFT RIGHT"]),
        (["run", "FILE", "--window", "3", "x"], ["--window = x"]),
        (["run", "FILE", "--window", "-2", "0"], ["--window = -2"]),
        (["run", "FILE", "--signed-window", "2", "x"], ["--signed-window = x"]),
        (["run", "FILE", "--signed-window", "2", "-3"], ["window_left = 2", "no query would see"]),
        (["run", "FILE", "--dropout", "1"], ["--dropout = 1", "below 1"]),
        (["run", "FILE", "--dropout", "-0.1"], ["--dropout = -0.1", "at least 0"]),
        (["run", "FILE", "--dropout", "0.99999999999"], ["--dropout = 0.99999999999", "float32"]),
        (["run", "FILE", "--dropout", "1e-60"], ["--dropout = 1e-60", "float32"]),
        (["run", "FILE", "--softcap", "-1"], ["--softcap = -1"]),
        (["run", "FILE", "--softcap", "1e-50"], ["--softcap = 1e-50", "float32"]),
        (["run", "FILE", "--softcap", "1e39"], ["--softcap = 1e39", "float32"]),
        (["run", "FILE", "--softcap", "1e999"], ["--softcap = 1e999", "positive finite number"]),
        (["run", "FILE", "--softcap", "nan"], ["--softcap = nan"]),
        (["run", "FILE", "--scale", "-1e-46"], ["--scale = -1e-46", "float32"]),
        (["run", "FILE", "--scale", "-inf"], ["--scale = -inf"]),
        (["run", "FILE", "--attention-chunk", "-1"], ["--attention-chunk = -1", "from 0"]),
        (["bench", "--attention-chunk", "x"], ["--attention-chunk = x"]),
        (["bench", "--seqlen-k", "0"], ["--seqlen-k = 0", "from 1"]),
        (["run", "FILE", "--dtype", "float8"], ["--dtype = float8", "float32, bfloat16, float16"]),
        (["run", "FILE", "--dtype", "int8"], ["--dtype = int8", "float32, bfloat16, float16"]),
        (["run", "FILE", "--device", "tpu"], ["--device = tpu", "expected cpu or cuda"]),
        (["run", "FILE", "--layout", "sbhd"], ["--layout = sbhd", "expected bshd or bhsd"]),
        (["run", "FILE", "--forward", "--backward"], ["expected one of them"]),
        (["run", "FILE", "--seed", "-1"], ["--seed = -1"]),
        (["check", "--cases", "0"], ["--cases = 0"]),
        (["check", "--seed", "x"], ["--seed = x"]),
        (["bench", "--seqlen", "1,a"], ["--seqlen = a"]),
        (["bench", "--seqlen", "2g"], ["--seqlen = 2g", "from 1", "k (1024)", "M (1024^2)"]),
        (["bench", "--seqlen", "k"], ["--seqlen = k", "from 1"]),
        (["bench", "--seqlen", "1.5k"], ["--seqlen = 1.5k"]),
        (["bench", "--seqlen", "2kk"], ["--seqlen = 2kk"]),
        (["bench", "--seqlen", "3000M"], ["--seqlen = 3000M", "to 2147483647"]),
        (["bench", "--seqlen", "9223372036854775807k"], ["--seqlen = 9223372036854775807k"]),
        (["run", "FILE", "--window", "-2k", "0"], ["--window = -2k"]),
        (["check", "--threads", "2k"], ["--threads = 2k", "expected a whole number"]),
        (["bench", "--seqlen", "1,,2"], ["--seqlen = ,", "expected a whole number"]),
        (["bench", "--head-dim", "257"], ["--head-dim = 257", "1 to 256"]),
        (["bench", "--causal=maybe"], ["--causal = maybe", "no or yes"]),
        (["bench", "--causal", "no"], ["no is one argument too many: the value of --causal", "="]),
        (["bench", "--json", "no"], ["strobe bench: no is one argument too many"]),
        (["bench", "--device-index", "1"], ["--device-index = 1", "--device cpu"]),
        (["check", "--device-index", "1"], ["--device-index = 1", "--device cpu"]),
        (
            ["bench", "--heads", "8", "--heads-kv", "3"],
            ["--heads = 8", "a multiple of --heads-kv = 3"],
        ),
        (["bench", "--dtype", "float64"], ["--dtype = float64"]),
        (["bench", "--min-time", "-1"], ["--min-time = -1", "from 0"]),
        (["bench", "--min-time", "nan"], ["--min-time = nan"]),
        (["bench", "--min-time", "1e300"], ["--min-time = 1e300", "to 86400"]),
        (["bench", "--batch", "0"], ["--batch = 0"]),
        (["bench", "--heads-kv", "0"], ["--heads-kv = 0"]),
        (["run", "FILE", "--" + "x" * 100_000], ["--xxx", "..."]),
        (["run", "FILE", "--window", "3" * 9_999, "0"], ["--window = 333", "..."]),
        (["run", "FILE", "--dtype", "\x1b" * 9_999], ["--dtype = \\x1b", "..."]),
        (["run", "FILE", "y" * 9_999], ["yyy..."]),
        (["z" * 9_999], ["zzz..."]),
        (["info", "--json=" + "w" * 9_999], ["--json takes no value"]),
    ],
)
def test_bad_flags(plain: Path, tmp_path: Path, args: list[str], words: list[str]) -> None:
    output = tmp_path / "out"
    args = [str(plain) if x == "FILE" else x for x in args]
    more = ["-o", str(output)] if args[:1] == ["run"] and len(args) > 1 else []
    refused(strobe(*args[:2], *more, *args[2:]), *words)
    assert not output.exists()


def test_a_word_too_many_behind_two_dashes(plain: Path) -> None:
    refused(strobe("run", "--", plain, "--causal"), "--causal is one argument too many")


def test_cuda_without_a_gpu_says_why(plain: Path, tmp_path: Path) -> None:
    if json.loads(strobe("info", "--json").stdout)["cuda_devices"]:
        pytest.skip("there is a GPU")
    for args in (["run", plain, "-o", tmp_path / "out"], ["check"], ["bench"]):
        result = strobe(*args, "--device", "cuda")
        assert result.returncode == 2
        assert result.stdout == ""
        assert "no kernel takes" in result.stderr
    assert not (tmp_path / "out").exists()


def test_unknown_instruction_set(plain: Path) -> None:
    result = strobe("run", plain, STROBE_CPU_ISA="sse9")
    assert result.returncode == 2
    assert "STROBE_CPU_ISA = sse9" in result.stderr


def test_missing_file(tmp_path: Path) -> None:
    refused(
        strobe("run", tmp_path / "none", "-o", tmp_path / "out"),
        "cannot open",
        "none",
        "No such file",
    )
    assert not list(tmp_path.iterdir())


def test_directory_and_pipe_as_input(tmp_path: Path) -> None:
    refused(strobe("run", tmp_path), "directory", "expected a safetensors file")
    os.mkfifo(tmp_path / "pipe")
    refused(strobe("run", tmp_path / "pipe"), "not a regular file")


def wrong(change: Tensors, *without: str) -> Tensors:
    return {name: t for name, t in {**qkv(), **change}.items() if name not in without}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, ["no tensor", "expected q, k and v"]),
        ({"x": ("F32", [1], [0.0])}, ["has x", "expected q, k and v"]),
        (wrong({}, "v"), ["has no v"]),
        (wrong({"q": ("F64", list(SHAPE), Q)}), ["q is F64", "expected F32, BF16 or F16"]),
        (wrong({"q": ("I32", list(SHAPE), [0.0] * COUNT)}), ["q is I32"]),
        (
            wrong({"q": ("F8_E4M3", list(SHAPE), [0.0] * COUNT)}),
            ["is F32, expected F8_E4M3 like"],
        ),
        (wrong({"q": ("F8_E5M2", list(SHAPE), [0.0] * COUNT)}), ["q is F8_E5M2 (of k and v"]),
        (wrong({"seqused_k": ("I32", [3], [1.0] * 3)}), ["seqused_k is I32 [3]", "I32 [2]"]),
        (wrong({"prefix": ("F32", [2], [1.0] * 2)}), ["prefix is F32 [2]", "expected I32 [2]"]),
        (
            wrong({"seqused_q": ("I32", [2], [4.0, 10.0])}),
            ["seqused_q[1] = 10, expected 0 to 9"],
        ),
        (wrong({"prefix": ("I32", [2], [-1.0, 0.0])}), ["prefix[0] = -1, expected 0 to 9"]),
        (wrong({"k": ("F16", list(SHAPE), K)}), ["k is F16", "expected F32 like the others"]),
        (
            wrong({"k": ("F32", [18, 3, 8], K)}),
            ["k has the shape [18, 3, 8]", "[batch, seqlen, heads, head_dim]"],
        ),
        (wrong({"k": ("F32", [1, 18, 3, 8], K)}), ["k: batch = 1", "expected 2"]),
        (wrong({"k": ("F32", [2, 9, 6, 4], K)}), ["k: head_dim = 4", "expected 8"]),
        (wrong({"v": ("F32", [2, 27, 1, 8], V)}), ["v: seqlen = 27", "expected 9"]),
        (wrong({"v": ("F32", [2, 9, 1, 24], V)}), ["v: heads = 1", "expected 3"]),
        (
            wrong({n: ("F32", [2, 9, 2, 12], x) for n, x in (("k", K), ("v", V))}),
            ["head_dim = 12", "expected 8"],
        ),
        (wrong({"q": ("F32", [2, 9, 1, 24], Q)}), ["head_dim = 8", "expected 24"]),
        (
            {n: ("F32", [2, 9, 1, 257], [0.0] * 4626) for n in "qkv"},
            ["head_dim = 257", "expected 1 to 256"],
        ),
        ({n: ("F32", [0, 9, 3, 8], []) for n in "qkv"}, ["q: batch = 0", "1 to 2147483647"]),
        ({n: ("F32", [2**30, 0, 2**29, 4], []) for n in "qkv"}, ["2^56"]),
        # What the library takes for "as many as q's" or "q's head_dim".
        (
            {"q": ("F32", [1, 1, 1, 256], [0.0] * 256), "k": ("F32", [1, 8, 1, 256], [0.0] * 2048)}
            | {"v": ("F32", [1, 8, 1, 0], [])},
            ["v: head_dim = 0", "1 to 256"],
        ),
        (
            {"q": ("F32", [1, 8, 4, 16], [0.0] * 512)}
            | {n: ("F32", [1, 8, 0, 16], []) for n in "kv"},
            ["k: heads = 0", "1 to 2147483647"],
        ),
        (
            {"q": ("F32", [1, 8, 4, 16], [0.0] * 512)}
            | {n: ("F32", [1, 2**28, 0, 16], []) for n in "kv"},
            ["k: heads = 0"],
        ),
        ({"qkv": ("F32", [2, 9, 3, 0, 8], [])}, ["qkv: heads = 0"]),
        ({"qkv": ("F32", [2, 9, 3, 3, 0], [])}, ["qkv: head_dim = 0"]),
        (
            {"q": ("F32", list(SHAPE), Q), "kv": ("F32", [2, 9, 2, 0, 8], [])},
            ["kv: heads = 0"],
        ),
        (
            wrong({n: ("F32", [2, 9, 2, 8], x[:288]) for n, x in (("k", K), ("v", V))}),
            ["q: heads = 3", "a multiple of 2"],
        ),
        (
            {f"t{i:03}" + "n" * 500: ("F32", [0], []) for i in range(300)},
            ["has t000nnn", "... and 297 more"],
        ),
        (wrong({"q": ("F32", [1] * 31 + [0], [])}), ["[1, 1, 1, 1, 1, ... 32 extents]"]),
        (
            {n: ("F32", [2**30, 2**31, 0, 4], []) for n in "qkv"},
            ["q: seqlen = 2147483648", "0 to 2147483647"],
        ),
        (wrong({"dout": ("F32", [2, 9, 1, 24], DOUT)}), ["dout: heads = 1"]),
        (wrong({"dout": ("BF16", list(SHAPE), DOUT)}), ["dout is BF16"]),
        (wrong({"dlse": ("F32", [2, 9, 3], [0.0] * 54)}), ["dlse", "expected F32 [2, 3, 9]"]),
        (wrong({"alibi_slopes": ("F32", [4], [0.0] * 4)}), ["alibi_slopes", "expected F32 [3]"]),
        (wrong({"alibi_slopes": ("F16", [3], [0.0] * 3)}), ["alibi_slopes is F16"]),
        (wrong({"alibi_slopes": ("F32", [3, 2], [0.0] * 6)}), ["expected F32 [2, 3]"]),
        (
            wrong({"qkv": ("F32", [2, 9, 2, 3, 4], Q)}),
            ["qkv has the shape", "[batch, seqlen, 3, heads, head_dim]"],
        ),
        (
            wrong({"cu_seqlens_q": ("I32", [3], [0, 9, 18])}),
            ["cu_seqlens_k", "expected batch + 1 of each"],
        ),
        (
            wrong({"cu_seqlens": ("I32", [3], [0, 9, 18])}),
            ["[total, heads, head_dim]", "cu_seqlens"],
        ),
        (
            wrong({"cu_seqlens": ("I64", [3], [0, 9, 18])}),
            ["cu_seqlens is I64", "expected I32 [batch + 1]"],
        ),
        (wrong({"cu_seqlens": ("I32", [1], [0])}), ["cu_seqlens is I32 [1]"]),
    ],
)
def test_wrong_tensors(tmp_path: Path, tensors: Tensors, words: list[str]) -> None:
    path = save(tmp_path / "in.safetensors", tensors)
    refused(strobe("run", path, "-o", tmp_path / "out"), *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ([0, 9, 19], ["ends with 19", "expected at most 18"]),
        ([1, 9, 18], ["cu_seqlens[0] = 1", "expected 0"]),
        ([0, 19, 18], ["cu_seqlens[2] = 18 after 19"]),
        ([0, -(2**31), 18], ["cu_seqlens[1] = -2147483648 after 0"]),
        ([0, 2**31 - 1, 18], ["cu_seqlens[2] = 18 after 2147483647"]),
    ],
)
def test_wrong_lengths(tmp_path: Path, offsets: list[int], words: list[str]) -> None:
    tensors: Tensors = {name: ("F32", [18, 3, 8], x) for name, x in (("q", Q), ("k", K), ("v", V))}
    tensors["cu_seqlens"] = ("I32", [3], offsets)
    path = save(tmp_path / "in.safetensors", tensors)
    refused(strobe("run", path, "-o", tmp_path / "out"), *words)
    assert not (tmp_path / "out").exists()
