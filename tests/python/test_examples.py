"""The examples and bench/gpt_training.py run, in short, and show what they say they show."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import math
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")
pytest.importorskip("safetensors.torch")

from programs import module_of  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
GPT_TRAINING = ROOT / "bench" / "gpt_training.py"
# Where the examples in C++ are built, beside the tool.
PROGRAMS = Path(os.environ.get("STROBE_CLI", "")).parent


def run(*words: str | Path, **environment: str) -> str:
    """Standard output of a program, which must succeed."""
    result = subprocess.run(
        [str(word) for word in words],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,  # tests run beside each other
        capture_output=True,
        text=True,
        timeout=6000,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def numbers(output: str) -> dict[str, list[float]]:
    """What a Llama block printed: the name in the first 12 columns, then the values."""
    return {line[:12]: [float(x) for x in line[12:].split()] for line in output.splitlines()[1:]}


def test_llama_block_is_the_same_in_cpp_and_pytorch() -> None:
    program = PROGRAMS / "llama_block"
    if not os.access(program, os.X_OK):
        pytest.skip(f"no {program}: STROBE_CLI names the tool, with the examples beside it")
    cpp = numbers(run(program))
    python = numbers(run(sys.executable, ROOT / "examples" / "llama_block.py"))
    assert list(cpp) == ["first token ", "last token  ", "rms         ", "checksum    "]
    assert python.keys() == cpp.keys()
    for name, values in cpp.items():
        assert python[name] == pytest.approx(values, rel=1e-5, abs=1e-5), name


WEIGHTS = ROOT / "examples" / "data" / "char_gpt.safetensors"
# Of different lengths; the last one's text outgrows what the model sees at once.
PROMPTS = ["a", "Mr. Darcy ", "It is a truth\n", "She was so happy.\n" * 16]


@pytest.fixture
def char_gpt(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("char_gpt")


def generate(folder: Path, *words: str, **environment: str) -> list[tuple[str, Any]]:
    """What bin/generate wrote: for each prompt the text, and (characters, alphabet) logits."""
    program, file = PROGRAMS / "generate", folder / "logits.safetensors"
    if not os.access(program, os.X_OK):
        pytest.skip(f"no {program}: STROBE_CLI names the tool, with the examples beside it")
    output = run(program, *words, "--logits", file, **environment)
    with safetensors.safe_open(file, "pt") as found:
        texts = found.metadata()
        result = [(texts[f"text.{n}"], found.get_tensor(f"logits.{n}")) for n in range(len(texts))]
    # As they were printed.
    printed = re.split(r"^--- \d+ of \d+, which goes on from \".*\"\n", output, flags=re.MULTILINE)
    assert len(printed) == 1 + len(result)
    for (text, _), shown in zip(result, printed[1:], strict=True):
        assert shown.startswith(f"{text}\n")
    ((most, pages, free),) = re.findall(r"over (\d+) of (\d+) pages.* back, (\d+) are", output)
    assert 0 < int(most) <= int(pages) == int(free)
    return result


def windowed_attention(q: Any, k: Any, v: Any) -> Any:
    """(batch, seqlen, heads, head_dim): causal, and nothing of more than 255 characters ago."""
    position = torch.arange(q.shape[1])
    distance = position[:, None] - position
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = (distance >= 0) & (distance < 256)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.transpose(1, 2)


def pytorch_logits(char_gpt: ModuleType, dtype: Any, tokens: list[int]) -> Any:
    """(tokens, alphabet) of the model with the weights that generate reads."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        weights = safetensors.torch.load_file(WEIGHTS)
        model = char_gpt.CharGPT(len(weights["token.weight"]))
        model.load_state_dict(weights)
        for block in model.blocks:
            block.attention = windowed_attention
        with torch.no_grad():
            return model(torch.tensor([tokens]))[0]
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("chunk", ["3", "16", "1000"])  # of a prompt in a step
def test_generate_has_the_logits_of_pytorch(
    tmp_path: Path, char_gpt: ModuleType, chunk: str
) -> None:
    with safetensors.safe_open(WEIGHTS, "pt") as found:
        metadata = found.metadata()
    assert (metadata["context"], metadata["heads"]) == ("256", str(char_gpt.HEADS))
    length = 60
    words = ("--length", str(length), "--temperature", "0", "--chunk", chunk)
    texts = generate(tmp_path, *PROMPTS, *words)
    assert len(PROMPTS[-1]) + length > 256
    for prompt, (text, logits) in zip(PROMPTS, texts, strict=True):
        assert text.startswith(prompt)
        assert len(text) == len(prompt) + length
        tokens = [metadata["alphabet"].index(c) for c in text]
        exact = pytorch_logits(char_gpt, torch.float64, tokens[:-1])[-length:]
        single = pytorch_logits(char_gpt, torch.float32, tokens[:-1])[-length:]
        # As near to exact as PyTorch's own float32, but for the luck of single roundings.
        assert float((logits - exact).abs().max()) <= 3 * float((single - exact).abs().max())
        assert float((single - exact).abs().max()) < 1e-4
        assert logits.argmax(dim=-1).tolist() == tokens[-length:]


@pytest.mark.parametrize(
    ("kv", "most"),
    [
        ("int8", 0.2),
        ("q8_0", 0.2),
        ("e4m3", 1.0),
        ("e5m2", 2.0),
        ("q4_0", 3.0),
        ("q8_0/q4_0", 3.0),
    ],
)
def test_generate_over_a_quantised_cache(
    tmp_path: Path, char_gpt: ModuleType, kv: str, most: float
) -> None:
    """Logits as near to exact ones as the codes are, however prompts are cut."""
    with safetensors.safe_open(WEIGHTS, "pt") as found:
        alphabet = found.metadata()["alphabet"]
    words = ("--length", "40", "--temperature", "0", "--kv", kv)
    for prompt, (text, logits) in zip(
        PROMPTS, generate(tmp_path, *PROMPTS, *words), strict=True
    ):
        assert text.startswith(prompt)
        tokens = [alphabet.index(c) for c in text]
        exact = pytorch_logits(char_gpt, torch.float64, tokens[:-1])[-40:]
        assert 1e-5 < float((logits - exact).abs().max()) < most


@pytest.mark.parametrize("temperature", ["0", "0.9"])
def test_generate_writes_the_same_in_any_batch(tmp_path: Path, temperature: str) -> None:
    words = ("--length", "40", "--temperature", temperature)
    together = generate(tmp_path, *PROMPTS, *words)
    for n, prompt in enumerate(PROMPTS):
        # The n-th again, of a batch where the others are short, and what it is with other pages.
        others = ["b"] * n
        for size, threads in (("16", "1"), ("1", "2"), ("7", "2")):
            text, logits = generate(
                tmp_path, *others, prompt, *words, "--page-size", size, OMP_NUM_THREADS=threads
            )[n]
            assert text == together[n][0]
            assert torch.equal(logits, together[n][1])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["\u20ac"], "has the character"),
        ([""], "a prompt is empty"),
        (["a", "--length", "0"], "--length = 0, expected a whole number from 1"),
        (["a", "--temperature", "-1"], "--temperature = -1, expected a number from 0"),
        (["a", "--weights", "nowhere"], "cannot open nowhere"),
        (["a", "--logits", "nowhere/file"], "cannot write nowhere/file"),
        (["a", "--weights", ROOT / "README.md"], "not a safetensors file"),
        (
            ["a", "--weights", ROOT / "examples" / "data" / "minilm_layer3_512.safetensors"],
            "no alphabet in its metadata",
        ),
    ],
)
def test_generate_says_what_is_wrong(words: list[str | Path], message: str) -> None:
    program = PROGRAMS / "generate"
    if not os.access(program, os.X_OK):
        pytest.skip(f"no {program}: STROBE_CLI names the tool, with the examples beside it")
    command = [str(word) for word in (program, *words)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.startswith("generate: ")


def terminal(*words: str, **environment: str) -> str:
    """What bin/generate writes to a terminal."""
    program = PROGRAMS / "generate"
    if not os.access(program, os.X_OK):
        pytest.skip(f"no {program}: STROBE_CLI names the tool, with the examples beside it")
    try:
        ours, its = pty.openpty()
    except OSError as e:  # as in a chroot without /dev/pts
        pytest.skip(f"no pseudo-terminal: {e}")
    process = subprocess.Popen(
        [program, *words],
        stdout=its,
        env={key: value for key, value in os.environ.items() if key != "NO_COLOR"}
        | {"TERM": "xterm", "OMP_NUM_THREADS": "1"}
        | environment,
    )
    os.close(its)
    written = b""
    with contextlib.suppress(OSError):  # which is how a terminal's end reads
        while part := os.read(ours, 4096):
            written += part
    os.close(ours)
    assert process.wait(timeout=600) == 0
    return written.decode().replace("\r\n", "\n")


def test_generate_gives_prompts_a_colour() -> None:
    words = ("She said", "He", "--length", "30", "--temperature", "0")
    coloured = terminal(*words)
    assert coloured.count("\033[36m") == 2
    assert "\n\033[36mShe said\033[0m" in coloured
    assert "\n\033[36mHe\033[0m" in coloured
    plain = re.sub(r"\033\[\d+m", "", coloured)
    texts = plain[plain.index("--- 1 of 2") : plain.rindex("\n\n")]
    assert '\n--- 1 of 2, which goes on from "She said"\nShe said' in plain
    assert '\n--- 2 of 2, which goes on from "He"\nHe' in plain
    # In a pipe, or where nobody wants it, there is the text alone.
    for output in (run(PROGRAMS / "generate", *words), terminal(*words, NO_COLOR="1")):
        assert "\033" not in output
        assert texts in output


def test_generate_writes_as_it_goes() -> None:
    program = PROGRAMS / "generate"
    if not os.access(program, os.X_OK):
        pytest.skip(f"no {program}: STROBE_CLI names the tool, with the examples beside it")
    words = ["She said ", "--length", "1000000"]  # of hours
    with subprocess.Popen([program, *words], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        written = b""
        # Behind the line that has the prompt in quotes, and the prompt itself.
        while written.count(b"She said ") < 2 or len(written.split(b"She said ")[2]) < 20:
            part = os.read(process.stdout.fileno(), 4096)
            # No more at a time than a step or two write: far less than a buffer of 4096 bytes.
            assert 0 < len(part) < 2000
            written += part
        assert process.poll() is None
        process.kill()


def test_generate_says_what_the_model_is(tmp_path: Path) -> None:
    line = run(PROGRAMS / "generate", "a", "--length", "1").splitlines()[0]
    assert re.fullmatch(
        r"A GPT that reads and writes characters: 4 layers of 4 heads of 32, 0\.8 million "
        r"parameters; trained on Jane Austen's six novels, \d+ steps, "
        r"\d+ minutes of processor time",
        line,
    )
    with safetensors.safe_open(WEIGHTS, "pt") as found:
        metadata = found.metadata()
    for key in ("text", "steps", "processor_seconds"):
        metadata.pop(key)
    file = tmp_path / "silent.safetensors"
    safetensors.torch.save_file(safetensors.torch.load_file(WEIGHTS), file, metadata)
    line = run(PROGRAMS / "generate", "a", "--length", "1", "--weights", file).splitlines()[0]
    assert line.endswith("0.8 million parameters; trained on what its file does not say")


def test_generate_writes_words() -> None:
    """Those that English has most of: the text that the program writes has as many of them."""
    output = run(PROGRAMS / "generate", "--length", "600", "--temperature", "0.5")
    written = re.findall(r"[a-z]+", output.partition("--- 1 of ")[2].lower())
    common = {"the", "and", "of", "to", "a", "in", "was", "her", "it", "she", "he", "that", "had"}
    assert sum(word in common for word in written) > 0.35 * len(written)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, m: t.pop("blocks.1.down.bias"), "no tensor blocks.1.down.bias"),
        (lambda t, m: t.update({"norm.bias": torch.zeros(5)}), "norm.bias is F32 [5], expected"),
        (lambda t, m: t.update({"norm.bias": t["norm.bias"].long()}), "norm.bias is I64 [128]"),
        (lambda t, m: m.update({"heads": "3"}), "heads = 3 in its metadata"),
        (lambda t, m: m.update({"context": "0"}), "context = 0, expected a whole number from 1"),
        (lambda t, m: m.update({"steps": "many"}), "steps = many, expected a whole number from 0"),
        (lambda t, m: m.update({"alphabet": "abc"}), "token.weight is F16 [81, 128], expected"),
        (
            lambda t, m: t.update({"token.weight": torch.zeros(0, 1 << 40)}),
            "token.weight is [0, 1099511627776], expected [characters, dim] with dim from 1 to",
        ),
    ],
)
def test_generate_says_what_is_wrong_with_weights(
    tmp_path: Path, change: Callable[[dict[str, Any], dict[str, str]], object], message: str
) -> None:
    with safetensors.safe_open(WEIGHTS, "pt") as found:
        metadata = found.metadata()
    tensors = safetensors.torch.load_file(WEIGHTS)
    change(tensors, metadata)
    file = tmp_path / "changed.safetensors"
    safetensors.torch.save_file(tensors, file, metadata)
    test_generate_says_what_is_wrong(["a", "--weights", file], message)


def test_generate_takes_weights_in_bfloat16(tmp_path: Path) -> None:
    with safetensors.safe_open(WEIGHTS, "pt") as found:
        metadata = found.metadata()
    rounded = {n: t.bfloat16() for n, t in safetensors.torch.load_file(WEIGHTS).items()}
    for name, tensors in (("half", rounded), ("same", {n: t.float() for n, t in rounded.items()})):
        safetensors.torch.save_file(tensors, tmp_path / name, metadata)
    half, same = (
        generate(tmp_path, "She ", "--length", "20", "--weights", str(tmp_path / name))[0]
        for name in ("half", "same")
    )
    assert half[0] == same[0]
    assert torch.equal(half[1], same[1])


def test_char_gpt_exports_what_generate_reads(tmp_path: Path) -> None:
    script, weights = ROOT / "examples" / "char_gpt.py", tmp_path / "weights.safetensors"
    text = tmp_path / "text.txt"
    text.write_text("Les élèves étaient là, où l'œuvre coûte 5 €.\n" * 10)
    words = ("--alone", "--steps", "2", "--length", "1", "--export", weights, "--title", "élèves")
    output = run(sys.executable, script, "--text", text, *words)
    assert f"weights         {weights}" in output
    assert "figure" not in output
    with safetensors.safe_open(weights, "pt") as found:
        metadata = found.metadata()
        assert {found.get_tensor(name).dtype for name in found.keys()} == {torch.float16}  # noqa: SIM118
    assert metadata["text"] == "élèves"
    assert metadata["text_characters"] == str(len(text.read_text()))
    assert metadata["text_sha256"] == hashlib.sha256(text.read_bytes()).hexdigest()
    assert (metadata["steps"], metadata["batch"]) == ("2", "4")
    ((written, logits),) = generate(tmp_path, "où €", "--length", "5", "--weights", str(weights))
    assert written.startswith("où €")
    assert len(written) == 9
    assert logits.shape == (5, len(set(text.read_text())))


def test_char_gpt_learns_the_same_with_both_attentions(tmp_path: Path) -> None:
    script, figure = ROOT / "examples" / "char_gpt.py", tmp_path / "figure"
    text = ROOT / "examples" / "data" / "text.txt"
    output = run(
        sys.executable, script, "--text", text, "--steps", "5", "--length", "20", "--figure", figure
    )
    lines = dict(re.findall(r"^(\S.*?)  +(.*)$", output, re.MULTILINE))
    assert lines["steps"] == "5"
    for name in ("Strobe", "PyTorch"):
        loss, difference, speed = (float(x.replace(",", "")) for x in lines[name].split())
        assert 3 < loss < 3.9  # nats; it starts near the log of 41 characters, 3.7
        assert difference < 1e-4
        assert speed > 0
    if importlib.util.find_spec("matplotlib") is None:
        assert lines["figure"].startswith("none: ")
    else:
        assert "<svg" in figure.with_suffix(".svg").read_text()
        assert figure.with_suffix(".png").stat().st_size > 0
    assert len(output.split("\n\n", 1)[1].rstrip("\n")) >= 20


@pytest.mark.parametrize(
    "words",
    [
        [],
        # The last block is short, there are fewer blocks than are wanted, all heads go at once.
        ["--tokens", "300", "--block", "64", "--top", "7", "--at-once", "2"],
        ["--tokens", "40", "--heads", "3", "--heads-kv", "3", "--head-dim", "17"],
        ["--tokens", "700", "--dtype", "bfloat16", "--at-once", "5"],
        pytest.param(
            ["--tokens", "2k", "--dtype", "bfloat16", "--device", "cuda", "--block", "256"],
            id="cuda",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
        ),
    ],
)
def test_moba_is_dense_attention_with_its_mask(words: list[str]) -> None:
    output = run(sys.executable, ROOT / "examples" / "moba.py", "--repeat", "1", *words)
    checks = re.findall(
        r"^(.*?) +differs from dense by out (\S+), dq (\S+), dk (\S+), dv (\S+)$", output, re.M
    )
    assert [check[0] for check in checks] == ["each query's choice", "a block's choice"]
    most = 2e-2 if "bfloat16" in words else 5e-6
    assert max(float(x) for check in checks for x in check[1:]) < most
    shares = {name: float(x) for name, x in re.findall(r"^(\S.*?) +([\d.]+)% ", output, re.M)}
    assert list(shares) == ["dense, causal", *(check[0] for check in checks)]
    # A query sees three of at most eight blocks, and of its own a part.
    if not words:
        assert 40 < shares["each query's choice"] < 60


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--top", "1"], "top = 1, expected at least 2"),
        (["--heads", "3"], "heads = 3, expected a multiple of heads_kv = 2"),
        (["--block", "100"], "block = 100, expected a multiple of 64"),
        (["--tokens", "0"], "tokens = 0, expected at least 1"),
    ],
)
def test_moba_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["moba.py", *words])
    with pytest.raises(SystemExit) as stopped:
        module_of(ROOT / "examples" / "moba.py").main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_t5_attention_is_that_of_transformers() -> None:
    pytest.importorskip("transformers")
    output = run(sys.executable, ROOT / "examples" / "t5_attention.py", "--steps", "5")
    losses = re.findall(r"^(\w+): loss ([\d.]+), after 5 steps ([\d.]+)$", output, re.M)
    assert [name for name, _, _ in losses] == ["encoder", "decoder"]
    for _, first, last in losses:
        assert float(last) < float(first)
    apart = re.findall(r"^  (\w+) +differs from transformers' by (\S+) at most$", output, re.M)
    assert [name for name, _ in apart] == ["out", "loss", "gradient", "table"] * 2
    assert max(float(x) for _, x in apart) < 2e-5


def test_moba_rounds_gradients_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a query's blocks give is added up in float32, its own block's share too."""
    moba = module_of(ROOT / "examples" / "moba.py")
    shares: list[Any] = []
    backward = moba.strobe.attention_backward

    def watched(*args: Any, **options: Any) -> Any:
        shares.append(backward(*args, **options))
        return shares[-1]

    monkeypatch.setattr(moba.strobe, "attention_backward", watched)
    torch.manual_seed(0)
    q, dout = torch.randn(2, 300, 4, 16).bfloat16()
    k, v = torch.randn(2, 300, 2, 16).bfloat16()
    chosen = moba.choose(q, k, 64, 3)

    def attend(*tensors: Any) -> Any:
        return moba.Moba.apply(*tensors, chosen, 64, 2)

    _, *found = moba.with_gradients(attend, [q, k, v], dout)
    own, others = shares
    assert all(x.dtype == torch.float32 for x in (*own, *others))
    place = moba.route(chosen, 2, 300, 64).place
    sums = [own[0][0] + others[0][place].view(2, *q.shape).sum(0)]
    for x, y in zip(own[1:], others[1:], strict=True):
        sums.append(x[0] + y.view(2, 300, 16).transpose(0, 1))
    for x, y in zip(found, sums, strict=True):
        assert torch.equal(x, y.bfloat16())


@pytest.fixture
def gpt_training() -> Iterator[ModuleType]:
    """bench/gpt_training.py as a module, on one thread: its work here is too little for more."""
    module = module_of(GPT_TRAINING)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield module
    torch.set_num_threads(threads)


TINY = {
    "model": "tiny",
    "context": 64,
    "batch": 2,
    "checkpointing": False,
    "device": "cpu",
    "steps": 1,
    "warm_up": 1,
}


def test_gpt_training_on_the_cpu(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    options = {"device": "cpu", "model": "tiny", "context": 64, "tokens": 128, "steps": 1}
    options |= {"warm-up": 0, "attention": "Strobe", "output": file}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    output = run(sys.executable, GPT_TRAINING, *words)
    assert "model  context              Strobe\ntiny        64" in output
    (row,) = json.loads(file.read_text())["rows"]
    assert row["status"] == "ok"
    assert row["tflops"] > 0
    assert (row["batch"], row["context"], row["checkpointing"]) == (2, 64, False)


def test_gpt_training_is_the_same_with_every_attention(gpt_training: ModuleType) -> None:
    losses = [
        gpt_training.train(gpt_training.Configuration(**TINY | changes))["last_loss"]
        for changes in (
            {"attention": "standard"},
            {"attention": "FlashAttention-2"},
            {"attention": "Strobe"},
            {"attention": "Strobe", "checkpointing": True},
        )
    ]
    assert losses == pytest.approx([losses[0]] * 4, abs=2e-3)  # bfloat16
    assert losses[0] == pytest.approx(math.log(256), abs=0.1)


def test_gpt_training_says_what_cannot_run(
    gpt_training: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def result(attention: str) -> dict[str, Any]:
        gpt_training.worker(json.dumps(TINY | {"attention": attention}))
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    assert result("cuDNN")["status"] == "failed"  # there is none for the CPU
    assert "backend" in result("cuDNN")["reason"]

    def greedy(q: Any, k: Any, v: Any) -> Any:
        return q.new_empty(1 << 60)

    monkeypatch.setitem(gpt_training.ATTENTIONS, "standard", greedy)
    assert result("standard")["status"] == "out of memory"

    # As Linux does it to a process when memory is short.
    killed = tmp_path / "python"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killed))
    configuration = gpt_training.Configuration(**TINY, attention="standard")
    assert gpt_training.run(configuration, 60)["status"] == "out of memory"


@pytest.mark.parametrize(("model", "billions"), [("1.3B", 1.3), ("2.7B", 2.7)])
def test_gpt_training_has_models_of_these_sizes(
    gpt_training: ModuleType, model: str, billions: float
) -> None:
    size = gpt_training.SIZES[model]
    with torch.device("meta"):
        gpt = gpt_training.Gpt(size, 2048, gpt_training.standard_attention, False)
    parameters = sum(p.numel() for p in gpt.parameters())
    assert parameters == pytest.approx(billions * 1e9, rel=0.03)
    # The FlashAttention-2 paper's formula, written out for 2k tokens.
    attention = 12 * size.layers * size.dim * 2048**2
    assert gpt_training.flop(size, parameters, 2048) == 6 * 2048 * parameters + attention
