"""The command line tool, run as a user runs it: results, messages, exit codes, files left."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
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
    other_programs,
    qkv,
    raw,
    refused,
    run,
    save,
    strobe,
)

pytestmark = needs_cli
COMMANDS = ["info", "run", "check", "bench", "completion", "help"]

# What a stranger types first.


def test_version() -> None:
    result = strobe("--version")
    assert result.returncode == 0
    assert result.stdout.startswith("strobe 0.")


def test_no_command_prints_help() -> None:
    result = strobe()
    assert result.returncode == 0
    assert all(command in result.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    result = strobe(command, "--help")
    assert result.returncode == 0
    assert "Example" in result.stdout
    assert f"strobe {command}" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_a_command_too(command: str) -> None:
    words = command.split()
    result = strobe("help", *words)
    assert result.returncode == 0
    assert result.stderr == ""
    assert result.stdout == strobe(*words, "--help").stdout


def test_flags_of_several_commands_take_the_same() -> None:
    """Nothing, one value, two, or one after = alone: --json, --causal[=no|yes], --threads N."""
    forms: dict[str, set[str]] = {}
    count = 0
    for command in COMMANDS:
        text = strobe("help", command).stdout
        for names, optional, value in re.findall(
            r"^  (-[\w,-]+)(\[=.*?\])?(?: (\S+(?: \S+)*))?(?:  .*)?$", text, re.MULTILINE
        ):
            values = len(value.split(" ")) if value else 0
            forms.setdefault(names, set()).add("optional" if optional else f"{values} values")
            count += 1
    assert count > 40
    assert forms["--causal"] == {"optional"}
    assert forms["--window"] == {"2 values"}
    assert forms["--json"] == {"0 values"}
    assert forms["--device-index"] == {"1 values"}
    assert [names for names, found in forms.items() if len(found) > 1] == []


def test_causal_means_the_same_in_every_command(plain: Path) -> None:
    assert run(plain, "--causal") == run(plain, "--causal=yes") != run(plain)
    assert run(plain, "--deterministic=yes", "--batch-invariant=no") == run(plain)
    assert run(plain, "--causal=no") == run(plain) == run(plain, "--causal", "--causal=no")
    for words, causal in (
        ((), [False, True]),
        (("--causal",), [True]),
        (("--causal=no",), [False]),
        (("--causal=yes,no",), [True, False]),
    ):
        result = strobe(
            "bench", *SMALL, "--dtype", "bf16", "--direction", "forward", "--json", *words
        )
        assert [r["causal"] for r in json.loads(result.stdout)["results"]] == causal, words


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


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "avx512_bf16", "amx", "neon"])
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
    out, _ = attention(Q, K, V, SHAPE, scale=0.5, causal=True, window=(3, -1))
    close(result["out"][2], out, 1e-5)


def test_attention_chunk(plain: Path) -> None:
    result = run(plain, "--causal", "--attention-chunk", "4")
    out, _ = attention(Q, K, V, SHAPE, causal=True, attention_chunk=4)
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
    numbers = {"seqused_k": used, "q_position": first, "prefix": prefix}
    out, _ = attention(Q, k, v, SHAPE, causal=True, **numbers)
    close(result["out"][2], out, 1e-5)
    for name in ("dk", "dv"):
        values = result[name][2]
        assert all(map(math.isfinite, values))
        assert not any(values[5 * row : 9 * row])


def test_window_without_limits_changes_nothing(plain: Path) -> None:
    assert run(plain, "--window", "-1", "-1") == run(plain)
    assert run(plain, "--signed-window", "none", "none") == run(plain)


def test_flags_of_two_values_may_stand_before_the_file(plain: Path, tmp_path: Path) -> None:
    for flag in ("--window", "--signed-window"):
        behind = run(plain, flag, "3", "2")
        for name, words in (("one", [flag, "3", "2"]), ("two", [flag, "5", "5", flag, "3", "2"])):
            output = tmp_path / name
            assert strobe("run", *words, plain, "-o", output).returncode == 0
            assert load(output) == behind


def test_a_signed_window(plain: Path) -> None:
    same = run(plain, "--window", "3", "2")
    assert run(plain, "--signed-window", "3", "2") == same
    assert run(plain, "--signed-window", "3", "-1") != run(plain, "--window", "3", "-1")


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


def test_rows_past_the_last_offset(tmp_path: Path) -> None:
    """They belong to no sequence: zeros in the results, and the others are as without them."""
    b, s, h, d = SHAPE
    offsets = ("I32", [2], [0, s])
    lengths = {"without": s, "with": b * s}
    without, whole = (
        run(
            save(
                tmp_path / f"{name}.safetensors",
                {t: ("F32", [n, h, d], x[: n * h * d]) for t, x in (("q", Q), ("k", K), ("v", V))}
                | {"cu_seqlens": offsets},
            ),
            "--backward",
        )
        for name, n in lengths.items()
    )
    for name in ("out", "dq", "dk", "dv"):
        assert whole[name][2][: s * h * d] == without[name][2]
        assert set(whole[name][2][s * h * d :]) == {0.0}


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


def test_sinks_of_the_file(tmp_path: Path) -> None:
    sinks = [0.5, -math.inf, 3.0]
    path = save(tmp_path / "sinks.safetensors", {**qkv(), "sinks": ("F32", [3], sinks)})
    inside, outside = run(path, "--backward"), run(path, "--backward", "--sinks-outside-lse")
    assert inside["out"] == outside["out"]
    assert inside["lse"] != outside["lse"]
    assert inside["dsinks"][:2] == outside["dsinks"][:2] == ("F32", [3])


def test_masks_of_the_file(tmp_path: Path, plain: Path) -> None:
    """Causality, said four times: by the flag, in numbers, in intervals, and in a block's bits."""
    wanted = run(plain, "--causal", "--backward")
    pairs = [int(j <= i) for i in range(9) for j in range(9)]
    intervals = [x for i in range(9) for x in (0, i + 1, 0, 0)]
    bits = [x for i in range(64) for x in ((1 << min(i + 1, 9)) - 1, 0)]
    listed: Tensors = {
        "mask_partial_counts": ("I32", [1, 3, 1], [1] * 3),
        "mask_partial_blocks": ("I32", [1, 3, 1, 1], [0] * 3),
        "mask_partial_bits": ("I32", [1, 3, 1, 1, 64, 2], bits * 3),
    }
    several: tuple[Tensors, ...] = (
        {"mask": ("U8", [1, 1, 9, 9], pairs)},
        {"mask": ("U8", [2, 3, 9, 9], pairs * 6)},
        {"mask_intervals": ("I32", [2, 1, 9, 4], intervals * 2)},
        listed,
    )
    for mask in several:
        path = save(tmp_path / "masked.safetensors", {**qkv(), **mask})
        found = run(path, "--backward", "--mask-block", "64")
        for name, (_, shape, values) in wanted.items():
            assert found[name][1] == shape
            close(found[name][2], values, 1e-5)
    full: Tensors = {
        "mask_full_counts": ("I32", [1, 1, 1], [1]),
        "mask_full_blocks": ("I32", [1, 1, 1, 2], [0, -5]),
    }
    path = save(tmp_path / "full.safetensors", {**qkv(), **full})
    close(run(path)["out"][2], run(plain)["out"][2], 1e-6)
    result = strobe("run", path, "--why")
    assert "mask of blocks 128 x 128, capacity 1/1" in result.stdout
    for wrong, words in (
        ({"mask": ("U8", [1, 2, 9, 9], pairs * 2)}, "expected BOOL or U8 [1 or 2, 1 or 3, 9, 9]"),
        ({"mask": ("I32", [1, 1, 9, 9], pairs)}, "mask is I32"),
        ({"mask_intervals": ("I32", [9, 4], intervals)}, "expected I32 [1 or 2, 1 or 3, 9, 4]"),
        ({**full, "mask": several[1]["mask"]}, "expected I32 [2, 3, 1]: batch and heads as of"),
        ({"mask_full_counts": full["mask_full_counts"]}, "without the other, expected both"),
        ({"mask_partial_bits": ("I32", [1, 3, 1, 0, 128, 4], [])}, "mask_partial_bits without mas"),
        ({"mask_partial_bits": ("I32", [1, 1, 1, 1, 2, 4], [0] * 8)}, "mask_partial_bits without"),
    ):
        refused(strobe("run", save(path, {**qkv(), **wrong})), words)


def test_alibi_slopes_of_the_file_and_of_the_flag(tmp_path: Path, plain: Path) -> None:
    slopes = [2 ** (-8 * (head + 1) / 3) for head in range(3)]
    path = save(tmp_path / "alibi.safetensors", {**qkv(), "alibi_slopes": ("F32", [3], slopes)})
    with_file = run(path)
    close(run(plain, "--alibi")["out"][2], with_file["out"][2], 1e-6)
    assert with_file["out"] != run(plain)["out"]


def test_a_bias_of_the_file(tmp_path: Path, plain: Path) -> None:
    """ALiBi's terms as a bias, in each shape that they have; its gradient comes with the others."""
    b, s, h, _ = SHAPE
    slopes = [2 ** (-8 * (head + 1) / h) for head in range(h)]
    terms = [-slope * abs(i - j) for slope in slopes for i in range(s) for j in range(s)]
    wanted = run(plain, "--alibi")["out"][2]
    for entries in (1, b):
        bias = ("F32", [entries, h, s, s], terms * entries)
        found = run(save(tmp_path / "bias.safetensors", {**qkv(), "bias": bias}), "--backward")
        close(found["out"][2], wanted, 1e-5)
        assert found["dbias"][:2] == ("F32", [entries, h, s, s])
        # Of each row the gradients by its scores sum to 0.
        rows = [found["dbias"][2][n : n + s] for n in range(0, entries * h * s * s, s)]
        assert max(abs(sum(row)) for row in rows) < 1e-4 < max(abs(x) for x in rows[0])


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


# check and bench.


def test_check() -> None:
    result = strobe("check", "--cases", "2", "--seed", "7")
    assert result.returncode == 0, result.stdout
    lines = [line for line in result.stdout.splitlines() if line.endswith(" ok")]
    assert len(lines) >= 20
    assert "FAILED" not in result.stdout
    features = ("forward, bfloat16", "backward, float16", "ALiBi", "prefix", "lengths in use")
    features += ("window of either sign",)
    for feature in (*features, "KV cache in pages, new keys"):
        assert any(line.startswith(feature) for line in lines)


def test_check_json() -> None:
    """One object, whose keys stay."""
    result = strobe("check", "--cases", "2", "--seed", "7", "--json")
    assert result.returncode == 0, result.stdout
    report = json.loads(result.stdout)
    assert list(report) == [
        *("machine", "device", "seed", "threads", "cases", "features", "kernels", "problems"),
        *("failed_features", "seconds", "ok"),
    ]
    assert report["machine"] == json.loads(strobe("info", "--json").stdout)
    assert (report["device"], report["seed"], report["cases"]) == ("cpu", 7, 2)
    assert (report["ok"], report["failed_features"]) == (True, 0)
    lines = strobe("check", "--cases", "2", "--seed", "7").stdout.splitlines()
    for feature in report["features"]:
        assert list(feature) == ["name", "cases", "ok", "error_over_allowed", "failure"]
        assert feature["ok"]
        assert feature["failure"] == ""
        (line,) = (line for line in lines if line.startswith(f"{feature['name']:<28}"))
        if feature["error_over_allowed"] is None:
            assert line.split()[-2] == str(feature["cases"])
        else:
            assert line.split()[-2] == f"{feature['error_over_allowed']:.2f}"
    assert sum(f["cases"] for f in report["features"]) == report["problems"]
    # Twice each but for the refusals and those that no launch follows.
    assert sum(report["kernels"].values()) > report["problems"]
    assert all(name.startswith("cpu_") for name in report["kernels"])


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
        *("--causal=no", "--softcap", "5"),
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


@pytest.mark.parametrize(
    ("given", "length"), [("2k", 2048), ("2K", 2048), ("64", 64), ("1k,3", 1024)]
)
def test_lengths_with_units(given: str, length: int) -> None:
    result = strobe(
        *("bench", "--json", "--dtype", "bf16", "--causal=no", "--head-dim", "8"),
        *("--seqlen", "1", "--seqlen-k", given, "--heads", "1", "--min-time", "0"),
        *("--direction", "forward", "--batch", "1"),
    )
    assert json.loads(result.stdout)["results"][0]["seqlen_k"] == length, result.stderr


def test_a_window_with_units(plain: Path) -> None:
    assert run(plain, "--window", "1k", "-1") == run(plain)
    assert run(plain, "--attention-chunk", "1M") == run(plain)


def on_a_terminal(*args: str | Path) -> tuple[str, str]:
    """Standard output, and what a terminal got as standard error."""
    try:
        ours, theirs = os.openpty()
    except OSError as e:  # as in a chroot without /dev/pts
        pytest.skip(f"no pseudo-terminal: {e}")
    with subprocess.Popen([CLI, *map(str, args)], stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        seen = b""
        with contextlib.suppress(OSError):  # the terminal is gone with the process
            while more := os.read(ours, 4096):
                seen += more
        os.close(ours)
        assert process.stdout is not None
        return process.stdout.read().decode(), seen.decode()


def test_progress_on_a_terminal_alone() -> None:
    """With the time that is left where the whole takes five seconds and more."""
    args = ["bench", *SMALL, "--min-time", "1.5", "--dtype", "bf16"]
    out, seen = on_a_terminal(*args)
    lines = seen.split("\r\033[K")
    assert any(re.search(r"bfloat16 .* \d+ s left$", line) for line in lines)
    assert lines[-1] == ""  # erased
    assert "left" not in out
    assert "\033" not in out
    short = [*args, "--direction", "forward", "--causal=no", "--min-time", "0.01"]
    assert strobe(*short).stderr == ""
    assert " left" not in on_a_terminal(*short)[1]


@pytest.mark.parametrize("decode", [False, True])
def test_bench_says_that_the_computer_is_busy(decode: bool) -> None:
    small = ["--decode", "--batch", "1", "--heads", "2", "--seqlen-k", "64"]
    words = ["bench", *(small if decode else SMALL), "--causal=no", "--dtype", "bf16"]
    words += ["--min-time", "0.3"]
    with other_programs():
        table = strobe(*words).stdout
        report = json.loads(strobe(*words, "--json").stdout)
    lines = [line for line in table.splitlines() if line.startswith("bfloat16")]
    assert lines
    assert all(line.endswith("  busy") for line in lines)
    why = r"other programs had [0-9.]+ of the \d+ processors"
    command = "strobe bench" + " --decode" * decode
    assert re.search(
        rf"\n\nbusy: this computer was too busy to time such a line; "
        rf"at the first of them\n{why}\.\n"
        rf"Run `{command}` again when the other programs rest",
        table,
    )
    said = [result["busy"] for result in report["results"]]
    assert all(re.fullmatch(why, busy) for busy in said), said


def test_bench_says_what_its_columns_are() -> None:
    table = strobe("bench", *SMALL, "--causal=no", "--dtype", "bf16", "--min-time", "0").stdout
    said, head = table.splitlines()[1], table.splitlines()[3]
    assert said.startswith("tensors: the bytes of q, k, v and out, backward of their gradients too")
    assert head.count("tensors") == 2
    assert "[64] behind a default: the default with --decode" in strobe("bench", "--help").stdout


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
