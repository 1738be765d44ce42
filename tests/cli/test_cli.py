"""The command line tool, run as a user runs it: results, messages, exit codes, files left."""

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
    COUNT,
    DOUT,
    SHAPE,
    K,
    Q,
    Tensors,
    V,
    attention,
    close,
    decode,
    encode,
    load,
    needs_cli,
    normal,
    qkv,
    raw,
    refused,
    run,
    save,
    strobe,
)

pytestmark = needs_cli
COMMANDS = ["info", "run", "check", "bench"]

# What a stranger types first.


def test_version() -> None:
    result = strobe("--version")
    assert result.returncode == 0
    assert result.stdout.startswith("strobe 0.")


def test_no_command_prints_help() -> None:
    result = strobe()
    assert result.returncode == 2
    assert all(command in result.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    result = strobe(command, "--help")
    assert result.returncode == 0
    assert "Example" in result.stdout
    assert f"strobe {command}" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_info() -> None:
    result = strobe("info")
    assert result.returncode == 0
    for word in ("Strobe", "CPU", "Instruction sets", "Threads", "GPU", "Kernels", "cpu_portable"):
        assert word in result.stdout


def test_info_json() -> None:
    info = json.loads(strobe("info", "--json").stdout)
    assert info["kernels"]
    assert info["cpu_isa"] in info["cpu_isas"].split()
    assert info["cpu_threads"] >= 1


def test_threads_follow_the_environment() -> None:
    assert json.loads(strobe("info", "--json", OMP_NUM_THREADS="1").stdout)["cpu_threads"] == 1


def test_no_colour_without_a_terminal() -> None:
    assert "\033" not in strobe("info").stdout


# run: results.


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "amx", "neon"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("F32", 1e-5), ("F16", 4e-3), ("BF16", 4e-2)])
def test_forward(tmp_path: Path, dtype: str, tolerance: float, isa: str) -> None:
    if isa not in json.loads(strobe("info", "--json").stdout)["cpu_isas"].split():
        pytest.skip(f"no {isa} here")
    path = save(tmp_path / "in.safetensors", qkv(dtype))
    result = run(path, STROBE_CPU_ISA=isa)
    rounded = [decode(dtype, encode(dtype, x)) for x in (Q, K, V)]
    out, lse = attention(*rounded, SHAPE)
    assert set(result) == {"out", "lse"}
    assert result["out"][:2] == (dtype, list(SHAPE))
    assert result["lse"][:2] == ("F32", [2, 3, 9])
    close(result["out"][2], out, tolerance)
    close(result["lse"][2], lse, 1e-4)


def test_causal_window_scale(plain: Path) -> None:
    result = run(plain, "--causal", "--window", "3", "-1", "--scale", "0.5")
    out, _ = attention(Q, K, V, SHAPE, 0.5, lambda i, j: i - 3 <= j <= i)
    close(result["out"][2], out, 1e-5)


def test_attention_chunk(plain: Path) -> None:
    result = run(plain, "--causal", "--attention-chunk", "4")
    out, _ = attention(Q, K, V, SHAPE, visible=lambda i, j: j <= i and i // 4 == j // 4)
    close(result["out"][2], out, 1e-5)


def test_numbers_of_each_sequence(tmp_path: Path) -> None:
    """Lengths in use, positions and prefixes from the file; NaN stands in the keys behind them."""
    used, first, prefix = (5, 9), (2, 0), (4, 1)
    row = math.prod(SHAPE[2:])
    k, v = (
        [x if i // row % 9 < used[i // row // 9] else math.nan for i, x in enumerate(values)]
        for values in (K, V)
    )
    tensors: Tensors = {
        **{name: ("F32", list(SHAPE), x) for name, x in (("q", Q), ("k", k), ("v", v))},
        "seqused_k": ("I32", [2], [float(x) for x in used]),
        "q_position": ("I32", [2], [float(x) for x in first]),
        "prefix": ("I32", [2], [float(x) for x in prefix]),
        "dout": ("F32", list(SHAPE), DOUT),
    }
    result = run(save(tmp_path / "in.safetensors", tensors), "--causal")
    for b in range(2):

        def visible(i: int, j: int, b: int = b) -> bool:
            return j < used[b] and (j < prefix[b] or j <= i + first[b])

        out, _ = attention(Q, K, V, SHAPE, visible=visible)
        half = slice(b * COUNT // 2, (b + 1) * COUNT // 2)
        close(result["out"][2][half], out[half], 1e-5)
    for name in ("dk", "dv"):
        values = result[name][2]
        assert all(map(math.isfinite, values))
        assert not any(values[5 * row : 9 * row])


def test_window_without_limits_changes_nothing(plain: Path) -> None:
    assert run(plain, "--window", "-1", "-1") == run(plain)


def test_backward_follows_finite_differences(tmp_path: Path) -> None:
    result = run(save(tmp_path / "in.safetensors", {**qkv(), "dout": ("F32", list(SHAPE), DOUT)}))
    assert set(result) == {"out", "lse", "dq", "dk", "dv"}

    def loss(tensors: list[list[float]]) -> float:
        return sum(x * y for x, y in zip(attention(*tensors, SHAPE)[0], DOUT, strict=True))

    step = 1e-4
    for which, name in enumerate(("dq", "dk", "dv")):
        for at in range(5, COUNT, 131):
            ends = []
            for sign in (1, -1):
                tensors = [list(Q), list(K), list(V)]
                tensors[which][at] += sign * step
                ends.append(loss(tensors))
            assert result[name][2][at] == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-4)


def test_backward_without_dout_takes_ones(tmp_path: Path, plain: Path) -> None:
    ones = save(
        tmp_path / "ones.safetensors", {**qkv(), "dout": ("F32", list(SHAPE), [1.0] * COUNT)}
    )
    assert run(plain, "--backward") == run(ones)


def test_forward_flag_leaves_out_gradients(tmp_path: Path) -> None:
    path = save(tmp_path / "in.safetensors", {**qkv(), "dout": ("F32", list(SHAPE), DOUT)})
    assert set(run(path, "--forward")) == {"out", "lse"}


def test_gradient_of_lse(tmp_path: Path) -> None:
    """With dout 0 and dlse 1, dv is 0, and dq is the weighted mean of the keys."""
    rows = [2, 3, 9]
    tensors = {
        **qkv(),
        "dout": ("F32", list(SHAPE), [0.0] * COUNT),
        "dlse": ("F32", rows, [1.0] * math.prod(rows)),
    }
    result = run(save(tmp_path / "in.safetensors", tensors))
    close(result["dv"][2], [0.0] * COUNT, 1e-6)
    means, _ = attention(Q, K, K, SHAPE)
    close(result["dq"][2], [x / math.sqrt(8) for x in means], 1e-5)


def transposed(values: list[float], shape: tuple[int, int, int, int]) -> list[float]:
    """[a, b, c, d] to [a, c, b, d]."""
    a, b, c, d = shape
    return [
        values[((i * b + j) * c + k) * d + m]
        for i in range(a)
        for k in range(c)
        for j in range(b)
        for m in range(d)
    ]


def test_heads_first_layout(tmp_path: Path, plain: Path) -> None:
    b, s, h, d = SHAPE
    tensors: Tensors = {
        name: ("F32", [b, h, s, d], transposed(values, SHAPE))
        for name, values in (("q", Q), ("k", K), ("v", V))
    }
    result = run(save(tmp_path / "bhsd.safetensors", tensors), "--layout", "bhsd", "--backward")
    wanted = run(plain, "--backward")
    for name in ("out", "dq", "dk", "dv"):
        assert result[name][1] == [b, h, s, d]
        close(result[name][2], transposed(wanted[name][2], SHAPE), 1e-6)
    assert result["lse"] == wanted["lse"]


def packed(*parts: list[float]) -> list[float]:
    b, s, h, d = SHAPE
    return [
        x for row in range(b * s) for part in parts for x in part[row * h * d : (row + 1) * h * d]
    ]


def test_packed_qkv_and_kv(tmp_path: Path, plain: Path) -> None:
    b, s, h, d = SHAPE
    wanted = run(plain, "--backward")
    result = run(
        save(tmp_path / "qkv.safetensors", {"qkv": ("F32", [b, s, 3, h, d], packed(Q, K, V))}),
        "--backward",
    )
    assert set(result) == {"out", "lse", "dqkv"}
    assert result["dqkv"][1] == [b, s, 3, h, d]
    close(result["out"][2], wanted["out"][2], 1e-6)
    close(result["dqkv"][2], packed(*(wanted[x][2] for x in ("dq", "dk", "dv"))), 1e-5)

    tensors: Tensors = {"q": ("F32", list(SHAPE), Q), "kv": ("F32", [b, s, 2, h, d], packed(K, V))}
    result = run(save(tmp_path / "kv.safetensors", tensors), "--backward")
    assert set(result) == {"out", "lse", "dq", "dkv"}
    close(result["dkv"][2], packed(wanted["dk"][2], wanted["dv"][2]), 1e-5)


@pytest.mark.parametrize("one", [True, False])
def test_sequences_end_to_end(tmp_path: Path, plain: Path, one: bool) -> None:
    """The batch as two sequences of equal length gives what the batch gives."""
    b, s, h, d = SHAPE
    tensors: Tensors = {
        name: ("F32", [b * s, h, d], x) for name, x in (("q", Q), ("k", K), ("v", V))
    }
    names = ["cu_seqlens"] if one else ["cu_seqlens_q", "cu_seqlens_k"]
    tensors |= {name: ("I32", [3], [0, s, 2 * s]) for name in names}
    result = run(save(tmp_path / "varlen.safetensors", tensors), "--backward", "--causal")
    wanted = run(plain, "--backward", "--causal")
    for name in ("out", "dq", "dk", "dv"):
        assert result[name][1] == [b * s, h, d]
        close(result[name][2], wanted[name][2], 1e-5)
    assert result["lse"][1] == [h, b * s]
    close(result["lse"][2], transposed(wanted["lse"][2], (1, b, h, s)), 1e-5)


def test_grouped_heads(tmp_path: Path) -> None:
    b, s, h, d = SHAPE
    few = [x for row in range(b * s) for x in K[row * h * d : row * h * d + d]]
    tensors: Tensors = {
        "q": ("F32", list(SHAPE), Q),
        "k": ("F32", [b, s, 1, d], few),
        "v": ("F32", [b, s, 1, d], few),
    }
    many = [x for row in range(b * s) for _ in range(h) for x in few[row * d : (row + 1) * d]]
    out, _ = attention(Q, many, many, SHAPE)
    close(run(save(tmp_path / "in.safetensors", tensors))["out"][2], out, 1e-5)


def test_alibi_slopes_of_the_file_and_of_the_flag(tmp_path: Path, plain: Path) -> None:
    slopes = [2 ** (-8 * (head + 1) / 3) for head in range(3)]
    path = save(tmp_path / "alibi.safetensors", {**qkv(), "alibi_slopes": ("F32", [3], slopes)})
    with_file = run(path)
    close(run(plain, "--alibi")["out"][2], with_file["out"][2], 1e-6)
    assert with_file["out"] != run(plain)["out"]


def test_softcap_squeezes_towards_the_mean(plain: Path) -> None:
    b, s, h, d = SHAPE
    means = [
        sum(V[((i * s + j) * h + k) * d + m] for j in range(s)) / s
        for i in range(b)
        for _ in range(s)
        for k in range(h)
        for m in range(d)
    ]
    close(run(plain, "--softcap", "1e-4")["out"][2], means, 1e-3)


def test_dropout_is_the_seeds(plain: Path) -> None:
    first = run(plain, "--dropout", "0.5", "--seed", "3")
    assert first == run(plain, "--dropout", "0.5", "--seed", "3")
    assert first == run(plain, "--dropout", "0.5", "--seed", "3", "--threads", "1")
    assert first["out"] != run(plain, "--dropout", "0.5", "--seed", "4")["out"]
    assert first["out"] != run(plain, "--dropout", "0.5", "--seed", "3", "--offset", "1")["out"]
    assert first["lse"] == run(plain)["lse"]


def test_dtype_converts(plain: Path) -> None:
    result = run(plain, "--dtype", "float16")
    assert result["out"][0] == "F16"
    close(result["out"][2], run(plain)["out"][2], 1e-2)


def test_head_dim_of_v(tmp_path: Path) -> None:
    b, s, h, _ = SHAPE
    tensors = {**qkv(), "v": ("F32", [b, s, h, 5], normal(b * s * h * 5, 9))}
    assert run(save(tmp_path / "in.safetensors", tensors))["out"][1] == [b, s, h, 5]


def test_no_keys_gives_zeros(tmp_path: Path) -> None:
    b, _s, h, d = SHAPE
    tensors = {**qkv(), "k": ("F32", [b, 0, h, d], []), "v": ("F32", [b, 0, h, d], [])}
    result = run(save(tmp_path / "in.safetensors", tensors))
    assert set(result["out"][2]) == {0.0}
    assert set(result["lse"][2]) == {-math.inf}


def test_misaligned_data_is_read_all_the_same(tmp_path: Path, plain: Path) -> None:
    content = plain.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    odd = tmp_path / "odd.safetensors"
    odd.write_bytes(raw(content[8 : 8 + length] + b" " * (1 + length % 2), content[8 + length :]))
    assert run(odd) == run(plain)


def test_what_it_prints(plain: Path) -> None:
    result = strobe("run", plain, "--why", "--causal")
    assert result.returncode == 0
    for word in (
        "[2, 9, 3, 8]",
        "F32",
        "forward",
        "workspace",
        "FLOP/s",
        "kernel",
        "takes it",
        "-o",
    ):
        assert word in result.stdout


def test_unused_tensors_are_named(tmp_path: Path) -> None:
    path = save(tmp_path / "in.safetensors", {**qkv(), "hello\x1b[31m": ("F64", [1], [1.0])})
    result = strobe("run", path, "--repeat", "1")
    assert "not used: hello\\x1b[31m" in result.stdout
    assert "\x1b" not in result.stdout


# run: the output file.


def test_output_is_replaced_whole(plain: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.safetensors"
    output.write_text("old")
    assert set(run(plain)) == {"out", "lse"}
    assert output.stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_output_may_be_the_input(plain: Path) -> None:
    assert strobe("run", plain, "-o", plain, "--repeat", "1").returncode == 0
    assert set(load(plain)) == {"out", "lse"}


def test_output_is_written_through_a_link(plain: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    (tmp_path / "out.safetensors").symlink_to(target)
    run(plain)
    assert (tmp_path / "out.safetensors").is_symlink()
    assert set(load(target)) == {"out", "lse"}


def test_output_elsewhere_by_relative_path(plain: Path, tmp_path: Path) -> None:
    result = subprocess.run(
        [Path(CLI).resolve(), "run", plain.name, "-o", "here"],
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert result.returncode == 0
    assert set(load(tmp_path / "here")) == {"out", "lse"}


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
        (["foo"], ["foo", "info, run, check or bench"]),
        (["--foo"], ["--foo"]),
        (["info", "--jsn"], ["--jsn", "did you mean --json?"]),
        (["run"], ["FILE is required"]),
        (["run", "FILE", "--causl"], ["--causl", "did you mean --causal?"]),
        (["run", "FILE", "--qqqqqqqq"], ["--qqqqqqqq", "strobe run --help"]),
        (["run", "FILE", "-x"], ["-x is not a flag"]),
        (["run", "FILE", "more"], ["more is one argument too many"]),
        (["run", "FILE", "--causal=3"], ["--causal takes no value"]),
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
        (["run", "FILE", "--device", "tpu"], ["--device = tpu", "cpu, cuda"]),
        (["run", "FILE", "--layout", "sbhd"], ["--layout = sbhd", "bshd, bhsd"]),
        (["run", "FILE", "--forward", "--backward"], ["expected one of them"]),
        (["run", "FILE", "--seed", "-1"], ["--seed = -1"]),
        (["check", "--cases", "0"], ["--cases = 0"]),
        (["check", "--seed", "x"], ["--seed = x"]),
        (["bench", "--seqlen", "1,a"], ["--seqlen = a"]),
        (["bench", "--seqlen", "1,,2"], ["--seqlen = ,", "expected a whole number"]),
        (["bench", "--head-dim", "257"], ["--head-dim = 257", "1 to 256"]),
        (["bench", "--causal", "maybe"], ["--causal = maybe", "no, yes"]),
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
            ["q is F8_E4M3 (float8, which no kernel takes)", "expected F32, BF16 or F16"],
        ),
        (wrong({"q": ("F8_E5M2", list(SHAPE), [0.0] * COUNT)}), ["q is F8_E5M2 (float8"]),
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
        ([0, 9, 17], ["ends with 17", "expected 18"]),
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


# check and bench.


def test_check() -> None:
    result = strobe("check", "--cases", "2", "--seed", "7")
    assert result.returncode == 0, result.stdout
    lines = [line for line in result.stdout.splitlines() if line.endswith(" ok")]
    assert len(lines) >= 20
    assert "FAILED" not in result.stdout
    features = ("forward, bfloat16", "backward, float16", "ALiBi", "prefix", "lengths in use")
    for feature in (*features, "KV cache in pages, new keys"):
        assert any(line.startswith(feature) for line in lines)


def test_check_repeats_itself() -> None:
    first, second = (strobe("check", "--cases", "1").stdout.splitlines() for _ in range(2))
    assert first[:-1] == second[:-1]  # the last line has the time


SMALL = ["--seqlen", "32", "--head-dim", "16", "--heads", "2", "--min-time", "0.01"]


def test_bench_table() -> None:
    result = strobe("bench", *SMALL)
    assert result.returncode == 0
    rows = [line for line in result.stdout.splitlines() if line.startswith(("float32", "bfloat16"))]
    assert len(rows) == 4
    assert all("FLOP/s" in row for row in rows)


def test_bench_with_other_keys_than_queries() -> None:
    result = strobe(
        *("bench", *SMALL, "--json", "--seqlen-k", "64", "--batch", "3", "--dtype", "bf16"),
        *("--causal", "no", "--softcap", "5"),
    )
    for r in json.loads(result.stdout)["results"]:
        assert (r["seqlen"], r["seqlen_k"]) == (32, 64)
        backward = r["direction"] == "backward"
        assert r["flop"] == (2.5 if backward else 1) * 4 * 32 * 64 * 16 * 2 * 3
        # 16-bit values of q and out, k and v; backward their gradients too.
        assert r["bytes"] == (2 if backward else 1) * 2 * 2 * (32 + 64) * 16 * 2 * 3
        assert r["gbytes_per_second"] == pytest.approx(r["bytes"] / r["median_seconds"] / 1e9)
    table = strobe("bench", *SMALL, "--seqlen-k", "64").stdout
    assert "32/64" in table
    assert "B/s" in table


def test_bench_json() -> None:
    result = strobe(
        "bench", *SMALL, "--json", "--dtype", "float16", "--direction", "backward", "--threads", "1"
    )
    report = json.loads(result.stdout)
    assert report["machine"]["kernels"]
    assert [r["causal"] for r in report["results"]] == [False, True]
    for r in report["results"]:
        assert r["direction"] == "backward"
        assert r["threads"] == 1
        assert r["median_seconds"] > 0
        # 2.5 times forward's 4 seqlen^2 head_dim heads batch, halved when causal.
        assert r["flop"] == 2.5 * 4 * 32 * 32 * 16 * 2 * 128 / (2 if r["causal"] else 1)
