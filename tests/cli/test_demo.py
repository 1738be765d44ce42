"""The demo: its flags, its page, PyTorch beside it, and what it says of a busy computer."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import stat
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tool import CLI, other_programs, raw

DEMO = Path(CLI).with_name("strobe_demo")
pytestmark = pytest.mark.skipif(
    not CLI or not os.access(DEMO, os.X_OK), reason="STROBE_CLI does not stand beside the demo"
)
CAPTURE = (
    Path(__file__).resolve().parents[2] / "examples" / "data" / "minilm_layer3_512.safetensors"
)


def demo(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [DEMO, *words],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=os.environ | {"OMP_WAIT_POLICY": "passive"} | environment,
    )


def data_of(page: Path) -> Any:
    """What the page draws."""
    (data,) = re.findall(
        r'<script id="data" type="application/json">(.*?)</script>', page.read_text(), re.DOTALL
    )
    return json.loads(data)


def short(page: Path, *words: str | Path, **environment: str) -> tuple[str, Any]:
    """Output and page of a demo with the shortest line of each table alone."""
    result = demo("--longest", "512", "--page", page, *words, **environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    assert result.stdout.endswith(f"\n{page}\n")
    return result.stdout, data_of(page)


def capture(path: Path, tokens: int, metadata: dict[str, str], dim: int = 32) -> Path:
    """A file of one head, with other numbers everywhere."""
    header: dict[str, object] = {"__metadata__": metadata}
    data = b""
    for n, name in enumerate(("q", "k", "v", "dout")):
        values = [math.sin(1.0 + n + 0.37 * i) for i in range(tokens * dim)]
        part = struct.pack(f"<{len(values)}f", *values)
        offsets = [len(data), len(data) + len(part)]
        header[name] = {"dtype": "F32", "shape": [1, tokens, 1, dim], "data_offsets": offsets}
        data += part
    path.write_bytes(raw(header) + data)
    return path


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    page = tmp_path_factory.mktemp("demo") / "page.html"
    return *short(page), page


def test_help_says_what_there_is() -> None:
    result = demo("--help")
    assert result.returncode == 0
    for word in ("Usage: strobe_demo", "--page FILE", "--python PROGRAM", "--longest", "capture"):
        assert word in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--unknown"], "--unknown is not a flag of `strobe_demo`: see `strobe_demo --help`"),
        (["--lonegst", "512"], "did you mean --longest?"),
        (["one", "two"], "two"),
        (["--longest", "511"], "--longest = 511, expected a whole number from 512"),
        (["nowhere"], "cannot open nowhere"),
        (["--page", "nowhere/page.html"], "cannot write nowhere/page.html"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, words: list[str], message: str) -> None:
    result = subprocess.run(
        [DEMO, *words], capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path
    )
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stdout == ""  # before anything is computed
    assert list(tmp_path.iterdir()) == []


def test_the_page_needs_nothing_else(whole: tuple[str, Any, Path]) -> None:
    text = whole[2].read_text()
    rest = re.sub(r'<script id="data".*?</script>', "", text, flags=re.DOTALL)
    # An SVG's namespace is a name, which nobody opens.
    assert set(re.findall(r"\w+://\S*?(?=[\"'`<])", rest)) == {"http://www.w3.org/2000/svg"}
    assert re.findall(r"\b(?:src|href|srcset|import|url|fetch|XMLHttpRequest)\b", rest) == []
    assert "@DATA@" not in text
    assert len(text) < 1_000_000


def test_the_page_has_the_text_and_its_weights(whole: tuple[str, Any, Path]) -> None:
    """Beside a softmax of q and k, which knows nothing of lse."""
    data, attention = whole[1], whole[1]["attention"]
    text = (CAPTURE.parent / "text.txt").read_text()
    said = "".join("".join(sentence["text"]) for sentence in attention["sentences"])
    assert said == text.rstrip()
    assert data["tokens"] == 512
    assert attention["heads"] == 12
    assert attention["row_sum_error"] < 1e-5
    assert attention["unnamed"] is False

    content = CAPTURE.read_bytes()
    (size,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + size])

    def rows(name: str, head: int, begin: int, end: int) -> list[tuple[float, ...]]:
        at = 8 + size + header[name]["data_offsets"][0]
        return [
            struct.unpack_from("<32f", content, at + 4 * 32 * (12 * token + head))
            for token in range(begin, end)
        ]

    first = 1  # [CLS]
    for number, sentence in enumerate(attention["sentences"]):
        n = len(sentence["pieces"])
        assert len(sentence["weights"]) == 12 * n * n
        if number in (0, 7):
            for head in (0, 1, 11):
                keys = rows("k", head, 0, 512)
                for i, q in enumerate(rows("q", head, first, first + n)):
                    scores = [
                        math.exp(sum(x * y for x, y in zip(q, k, strict=True)) / math.sqrt(32))
                        for k in keys
                    ]
                    for j in range(n):
                        weight = sentence["weights"][(head * n + i) * n + j] / attention["unit"]
                        assert weight == pytest.approx(scores[first + j] / sum(scores), abs=6e-5)
        first += n


def test_the_page_has_the_errors_and_costs_that_are_printed(whole: tuple[str, Any, Path]) -> None:
    output, data, _ = whole
    assert [line["dtype"] for line in data["errors"]] == ["fp32", "bf16", "fp16"]
    for line in data["errors"]:
        pairs = zip(line["strobe"], line["standard"], strict=True)
        numbers = [f"{error:.1e}" for pair in pairs for error in pair]
        assert re.search(rf"^  {line['dtype']} +" + " +".join(numbers) + "$", output, re.MULTILINE)
    for direction, memory in (("forward", 512 * 512 * 12 * 4), ("both", 2 * 512 * 512 * 12 * 4)):
        (line,) = data["costs"][direction]
        assert line["tokens"] == 512
        assert line["standard"]["bytes"] == memory
        assert 0 < line["strobe"]["bytes"] < memory / 10
        assert line["strobe"]["seconds"] > 0
        assert line["standard"]["seconds"] > 0
        assert "pytorch" not in line
    assert data["pytorch"] == ""
    assert "PyTorch" not in output


def test_a_busy_computer_gets_no_ratios(tmp_path: Path) -> None:
    file = capture(tmp_path / "small", 32, {})
    with other_programs():
        output, data = short(tmp_path / "page.html", file)
    for direction in ("forward", "both"):
        (line,) = data["costs"][direction]
        assert re.match(r"other programs had [0-9.]+ of the \d+ processors$", line["busy"])
    tables = output[output.index("2. What does it cost?") :]
    # Of time; that of memory is what it is.
    assert len(re.findall(r"^     512 .* busy +[0-9.]+ x$", tables, re.MULTILINE)) == 2
    assert tables.count("busy: this computer was too busy to time them") == 2
    # What holds all the same, and what to do.
    words = " ".join(tables.split())
    assert (
        len(re.findall(r"The memory is what it is: at 512 tokens [0-9.]+ [KM]B in place of", words))
        == 2
    )
    assert words.count("Run `make demo` again when the other programs rest") == 2
    assert max(map(len, tables.splitlines())) <= 110
    for direction in ("forward", "both"):
        (line,) = data["costs"][direction]
        assert line["remedy"].startswith("Run `make demo` again when the other programs rest")


PEER = """#!{python}
import sys
print('{{"version": "9.9"}}', flush=True)
for line in sys.stdin:
    if {dies}: sys.exit(0)
    tokens, directions = line.split()
    size = 3e6 + len(directions)
    print('{{"best": 0.5, "median": 0.5, "runs": 1, "bytes": %d}}' % size, flush=True)
"""


def test_pytorch_stands_beside_where_it_is(tmp_path: Path) -> None:
    """A program that answers as demo_pytorch.py does."""
    peer = program(tmp_path / "peer", PEER.format(python=sys.executable, dies=False))
    file = capture(tmp_path / "small", 32, {})
    output, data = short(tmp_path / "page.html", file, "--python", peer)
    assert data["pytorch"] == "9.9"
    assert data["costs"]["forward"][0]["pytorch"] == {"seconds": 0.5, "bytes": 3e6 + len("forward")}
    assert data["costs"]["both"][0]["pytorch"] == {"seconds": 0.5, "bytes": 3e6 + len("both")}
    assert len(re.findall(r"^     512 .* 500 ms +3\.00 MB ", output, re.MULTILINE)) == 2


def test_pytorch_that_ends_is_left_out(tmp_path: Path) -> None:
    peer = program(tmp_path / "peer", PEER.format(python=sys.executable, dies=True))
    file = capture(tmp_path / "small", 32, {})
    output, data = short(tmp_path / "page.html", file, "--python", peer)
    assert "PyTorch's process gave no answer and was ended." in output
    for direction in ("forward", "both"):
        assert "pytorch" not in data["costs"][direction][0]


@pytest.mark.parametrize(
    "text", [None, "#!/bin/sh\nexit 1\n", "#!/bin/sh\necho no JSON\nexec sleep 600\n"]
)
def test_a_python_without_pytorch_is_named(tmp_path: Path, text: str | None) -> None:
    peer = tmp_path / "no_pytorch"
    if text is not None:
        program(peer, text)
    file = capture(tmp_path / "small", 32, {})
    output, data = short(tmp_path / "page.html", file, "--python", peer)
    assert f"No PyTorch:\n  {peer} cannot import it." in output
    assert data["pytorch"] == ""


def test_pytorch_itself_answers(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    words = (capture(tmp_path / "small", 32, {}), "--python", sys.executable)
    output, data = short(tmp_path / "page.html", *words, OMP_NUM_THREADS="1")
    torch = sys.modules["torch"]
    assert data["pytorch"] == torch.__version__
    assert f"PyTorch {torch.__version__}:" in output
    for direction in ("forward", "both"):
        peer = data["costs"][direction][0]["pytorch"]
        assert 1e-5 < peer["seconds"] < 60
        assert 0 <= peer["bytes"] < 1e8


def test_tokens_without_names_go_by_their_positions(tmp_path: Path) -> None:
    metadata = {"model": "</script><script>alert(1)</script>\xff", "layer": "a layer"}
    file = capture(tmp_path / "one", 32, metadata)
    output, data = short(tmp_path / "page.html", file)
    assert data["attention"]["unnamed"] is True
    assert data["tokens"] == 32
    assert [s["pieces"] for s in data["attention"]["sentences"]] == [
        [str(n) for n in range(16)],
        [str(n) for n in range(16, 32)],
    ]
    # What a file says ends no script of the page's.
    assert data["model"].startswith("</script><script>alert(1)")
    assert (tmp_path / "page.html").read_text().count("<script") == 2
    assert "alert(1)" in output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no JSON", "not such an object"),
        ('{"tokens": 5}', "not such an object"),
        ('{"tokens": [["a", "A"], ["b"]]}', "tokens[1] is no such pair"),
        ('{"tokens": [["a", "A"], ["b", 5]]}', "tokens[1] is no such pair"),
        ('{"tokens": [["a", "A"]]}', "1 pairs, expected"),
    ],
)
def test_other_names_of_tokens_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = capture(tmp_path / "one.safetensors", 32, {})
    (tmp_path / "one.tokens.json").write_text(text)
    result = demo(file, "--page", tmp_path / "page.html")
    assert result.returncode == 2
    assert "one.tokens.json" in result.stderr
    assert message in result.stderr
    assert "with 32 pairs of strings" in result.stderr
    assert not (tmp_path / "page.html").exists()


def drawn_by_a_browser(page: Path, folder: Path) -> str:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium")
    return subprocess.run(
        [
            *(browser, "--headless=new", "--no-sandbox", "--disable-gpu"),
            *(f"--user-data-dir={folder}", "--virtual-time-budget=5000", "--dump-dom"),
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    ).stdout


def test_a_browser_draws_the_headline_of_a_busy_computer(
    whole: tuple[str, Any, Path], tmp_path: Path
) -> None:
    """Memory and errors, which no other program moves, and then how to get the times."""
    data = json.loads(json.dumps(whole[1]))
    for line in (*data["costs"]["forward"], *data["costs"]["both"]):
        line["busy"] = "other programs had 1.9 of the 2 processors"
        line["remedy"] = "Run `make demo` again when the other programs rest."
    page = re.sub(
        r'(<script id="data" type="application/json">).*?(</script>)',
        lambda found: found[1] + json.dumps(data).replace("</", "<\\/") + found[2],
        whole[2].read_text(),
        flags=re.DOTALL,
    )
    (tmp_path / "busy.html").write_text(page)
    drawn = drawn_by_a_browser(tmp_path / "busy.html", tmp_path)
    stats = re.findall(r'<div class="stat"><b>(.*?)</b><span>(.*?)</span>', drawn)
    assert len(stats) == 3
    assert "less memory than standard attention" in stats[0][1]
    assert "error in bfloat16" in stats[1][1]
    assert stats[2] == (
        "not timed",
        f"this computer was too busy: {line['busy']}. {line['remedy'].replace('`', '')}",
    )
    assert "undefined" not in drawn.split('<script id="data"')[0]


def test_a_browser_draws_the_page(whole: tuple[str, Any, Path], tmp_path: Path) -> None:
    data, page = whole[1], whole[2]
    drawn = drawn_by_a_browser(page, tmp_path)
    (shown,) = re.findall(r'<svg id="map".*?</svg>', drawn, re.DOTALL)
    n = len(data["attention"]["sentences"][0]["pieces"])
    assert shown.count("<title>") == n * n
    (errors,) = re.findall(r'<svg id="errors".*?</svg>', drawn, re.DOTALL)
    assert errors.count("<circle") == 24
    # The last thing that the script writes.
    assert len(re.findall(r"<canvas", drawn)) == 12
    assert 'id="source">Q, K, V' in drawn
    assert "NaN" not in drawn.split('<script id="data"')[0]
    assert "undefined" not in drawn.split('<script id="data"')[0]
