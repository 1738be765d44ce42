r"""A character-level GPT learns to write like Strobe's own source code, in two minutes on a CPU.

    python examples/char_gpt.py                  also draws docs/figures/char_gpt
    python examples/char_gpt.py --text war.txt   on a text of yours
    python examples/char_gpt.py --text war.txt --title "War and Peace" \
        --alone --steps 8000 --export war.safetensors      for generate.cpp

A second model, with the same initial weights, takes every step on the same batch, but with
PyTorch's scaled_dot_product_attention. Attention that is exact gives the same training: the figure
has one loss curve over the other. Steps alternate, so that a busy machine slows both alike. --alone
leaves the second model out.

Training amplifies rounding, whoever rounds. --control shows how much: a third model has another of
PyTorch's own kernels, plain matrix products, and drifts from the second likewise.

Architecture: A. Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2), with
rotary positions, with which so small a model learns sooner.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from llama_block import ROTARY_BASE, rotate
from strobe.flash_attn import flash_attn_func
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [ROOT / "include", ROOT / "src"]
SUFFIXES = {".h", ".hpp", ".cpp", ".cu", ".cuh", ".txt", ".md"}

LAYERS, HEADS, HEAD_DIM = 4, 4, 32
DIM = HEADS * HEAD_DIM
CONTEXT = 256  # characters that the model sees
BATCH = 4  # pieces of the text in each step
LEARNING_RATE, WARM_UP = 2e-3, 100  # the largest, reached after so many steps
LAST = 20  # steps at the end, whose mean loss is the final one

# Causal attention over q, k, v, each (batch, seqlen, heads, head_dim).
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def strobe_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Takes (batch, seqlen, heads, head_dim), which is how the projections leave it."""
    out: Tensor = flash_attn_func(q, k, v, causal=True)
    return out


def pytorch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Takes (batch, heads, seqlen, head_dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def pytorch_math_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same in plain matrix products and a softmax."""
    with sdpa_kernel(SDPBackend.MATH):
        return pytorch_attention(q, k, v)


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and beside a residual connection."""

    def __init__(self) -> None:
        """Of the sizes at the top of this file."""
        super().__init__()
        self.attention: Attention = strobe_attention
        self.attention_norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.projection = nn.Linear(DIM, DIM)
        self.feed_forward_norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """(batch, seqlen, dim) to the same. positions: as in CharGPT.forward."""
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        q, k = rotate(q, positions), rotate(k, positions)
        x = x + self.projection(self.attention(q, k, v).flatten(-2))
        return x + self.down(gelu(self.up(self.feed_forward_norm(x))))


class CharGPT(nn.Module):
    """Predicts each next character."""

    def __init__(self, characters: int) -> None:
        """characters: how many different ones there are."""
        super().__init__()
        self.token = nn.Embedding(characters, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, characters)
        for layer in self.modules():
            if isinstance(layer, (nn.Linear, nn.Embedding)):
                nn.init.normal_(layer.weight, std=0.02)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """(batch, seqlen) to logits, (batch, seqlen, characters). positions: (seqlen,), of the
        tokens, where these are not a sequence's first ones, as in long_context.py.
        """
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x, positions)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Training:
    """A model, its optimiser, and what happened so far: a loss and a time for each step."""

    def __init__(self, model: CharGPT) -> None:
        """The model is trained where it is."""
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.1)
        self.losses: list[float] = []  # mean cross entropy, in nats for each character
        self.seconds: list[float] = []
        self.processor_seconds = 0.0

    def step(self, batch: Tensor, steps: int) -> None:
        """batch: (batch, CONTEXT + 1); the characters but the last predict those but the first.

        steps: how many there will be in all, or 0 where nobody knows.
        """
        begin, begin_processor = time.perf_counter(), time.process_time()
        n = len(self.losses) + 1
        for group in self.optimizer.param_groups:
            # Rises in proportion, then falls: to zero along half a cosine, or with the inverse
            # square root, for which there is no need to know the end.
            falling = (1 + math.cos(math.pi * n / steps)) / 2 if steps else (WARM_UP / n) ** 0.5
            group["lr"] = LEARNING_RATE * min(n / WARM_UP, falling)
        logits = self.model(batch[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - begin)
        self.processor_seconds += time.process_time() - begin_processor


@torch.no_grad()
def generate(model: CharGPT, alphabet: str, prompt: str, length: int) -> str:
    """`length` characters that the model writes after the prompt, at temperature 0.7."""
    generator = torch.Generator().manual_seed(0)
    tokens = [alphabet.index(c) for c in prompt]
    for _ in range(length):
        logits = model(torch.tensor([tokens[-CONTEXT:]]))[0, -1]
        weights = torch.softmax(logits / 0.7, dim=-1)
        tokens.append(int(torch.multinomial(weights, 1, generator=generator)))
    return "".join(alphabet[t] for t in tokens)


def export(training: Training, alphabet: str, text: str, title: str, path: Path) -> None:
    """The weights in float16 under their names in CharGPT, as a safetensors file.

    What the weights' shapes do not say is in the file's metadata: with it, examples/generate.cpp
    has all that it needs, and can say what the model was trained on (text and title) and how long.
    """
    from safetensors.torch import save_file  # only the export needs it

    metadata = {
        "alphabet": alphabet,  # the characters, in the order of their numbers
        "heads": str(HEADS),
        "context": str(CONTEXT),
        "rotary_base": str(ROTARY_BASE),
        "norm_epsilon": str(training.model.norm.eps),
        "text": title,
        "text_characters": str(len(text)),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "steps": str(len(training.losses)),
        "batch": str(BATCH),
        "processor_seconds": f"{training.processor_seconds:.0f}",
        "loss": f"{statistics.mean(training.losses[-LAST:]):.4f}",
    }
    # Half the file, and the same loss to four digits.
    weights = {name: weight.half() for name, weight in training.model.state_dict().items()}
    save_file(weights, path, metadata)


def read(paths: list[Path]) -> str:
    """Files, and all texts in folders, one after the other."""
    files: list[Path] = []
    for path in paths:
        inside = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES)
        files += inside if path.is_dir() else [path]
    return "\n".join(file.read_text() for file in files)


def progress(done: float, text: str) -> None:
    """Draws the bar over itself on a terminal, and prints nothing elsewhere. done: 0 to 1."""
    if sys.stdout.isatty():
        bar = "#" * round(12 * done)
        end = "\n" if done >= 1 else ""
        print(f"\r[{bar:-<12}] {100 * done:3.0f} %  {text}\033[K", end=end, flush=True)


def train(
    trainings: dict[str, Training], batches: Iterator[Tensor], steps: int, seconds: float
) -> None:
    """All in turns: so many steps, or if that is 0, until Strobe's took so many seconds."""
    done = 0.0
    while done < 1:
        batch = next(batches)
        for training in trainings.values():
            training.step(batch, steps)
        strobe = trainings["Strobe"]
        n = len(strobe.losses)
        done = min(1.0, n / steps if steps else sum(strobe.seconds) / seconds)
        remaining = sum(sum(t.seconds) for t in trainings.values()) * (1 - done) / done
        losses = ", ".join(f"{name} {t.losses[-1]:.3f}" for name, t in trainings.items())
        progress(done, f"{remaining:3.0f} s left, step {n}, loss: {losses}")


def differences(a: Training, b: Training) -> list[float]:
    """Of the losses, step for step."""
    return [abs(x - y) for x, y in zip(a.losses, b.losses, strict=True)]


def plot(trainings: dict[str, Training], path: Path) -> None:
    """The loss curves, and how far each is from PyTorch's, as path.svg and path.png."""
    import matplotlib as mpl  # only the figure needs it

    mpl.use("agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator

    # Transparent, with ink of middle brightness: reads on a light page and on a dark one.
    ink = "#7d8590"
    mpl.rcParams.update({f"{part}.color": ink for part in ("text", "xtick", "ytick", "grid")})
    mpl.rcParams.update({"axes.labelcolor": ink, "axes.edgecolor": ink, "font.size": 9})
    mpl.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True})
    mpl.rcParams.update({"grid.alpha": 0.3, "svg.fonttype": "none", "svg.hashsalt": "strobe"})
    figure, (above, below) = plt.subplots(
        2, 1, sharex=True, figsize=(7, 4.8), height_ratios=(5, 3), layout="constrained"
    )
    strobe, pytorch = trainings["Strobe"], trainings["PyTorch"]
    steps = range(1, len(strobe.losses) + 1)
    above.plot(steps, pytorch.losses, color="#4dabf7", lw=4, label="PyTorch")
    above.plot(steps, strobe.losses, color="#e8590c", lw=0.9, label="Strobe")
    above.set_ylabel("loss, nats per character")
    above.legend(frameon=False)
    colors = {"Strobe": "#e8590c", "PyTorch's math": "#74b816"}
    for name in [name for name in colors if name in trainings]:
        apart = [max(x, 1e-7) for x in differences(trainings[name], pytorch)]  # no log of 0
        below.plot(steps, apart, color=colors[name], lw=0.5, label=f"{name} to PyTorch")
    below.legend(frameon=False, loc="lower right")
    below.set_yscale("log")
    below.yaxis.set_major_locator(LogLocator(numticks=4))
    below.yaxis.set_minor_locator(NullLocator())
    below.set_ylabel("difference")
    below.set_xlabel("step")
    figure.suptitle("Character-level GPT, trained on a CPU in float32", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path.with_suffix(".svg"), transparent=True, metadata={"Date": None})
    figure.savefig(path.with_suffix(".png"), transparent=True, dpi=110)
    plt.close(figure)


def main() -> None:
    """Reads the text, trains, plots, and lets the model write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, nargs="+", default=SOURCES, help="files or folders")
    parser.add_argument("--title", help="what the text is, for --export; else the paths' names")
    parser.add_argument("--seconds", type=float, default=120, help="of training with Strobe")
    parser.add_argument("--steps", type=int, default=0, help="instead of --seconds")
    others = parser.add_mutually_exclusive_group()
    others.add_argument("--control", action="store_true", help="a third training; see above")
    others.add_argument("--alone", action="store_true", help="no second training, and no figure")
    parser.add_argument("--export", type=Path, help="safetensors file for the weights")
    parser.add_argument("--length", type=int, default=600, help="characters to write at the end")
    parser.add_argument(
        "--figure", type=Path, default=ROOT / "docs" / "figures" / "char_gpt", help="path to write"
    )
    args = parser.parse_args()

    text = read(args.text)
    if len(text) <= CONTEXT:
        parser.error(f"--text has {len(text)} characters, expected more than {CONTEXT}")
    alphabet = "".join(sorted(set(text)))
    index = {c: i for i, c in enumerate(alphabet)}
    pieces = torch.tensor([index[c] for c in text]).unfold(0, CONTEXT + 1, 1)
    generator = torch.Generator().manual_seed(1)

    def batches() -> Iterator[Tensor]:
        while True:
            yield pieces[torch.randint(len(pieces), (BATCH,), generator=generator)]

    torch.manual_seed(0)
    model = CharGPT(len(alphabet))
    attentions = {"Strobe": strobe_attention}
    if not args.alone:
        attentions["PyTorch"] = pytorch_attention
    if args.control:
        attentions["PyTorch's math"] = pytorch_math_attention
    trainings = {name: Training(copy.deepcopy(model)) for name in attentions}
    for name, attention in attentions.items():
        for block in trainings[name].model.blocks:
            block.attention = attention
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{parameters / 1e6:.1f} million parameters, {LAYERS} layers of {HEADS} heads of "
        f"{HEAD_DIM}, context {CONTEXT}\n"
        f"{len(text):,} characters of text, {len(alphabet)} different ones; "
        f"{BATCH} x {CONTEXT} in a step; threads: {torch.get_num_threads()}",
        flush=True,
    )
    train(trainings, batches(), args.steps, args.seconds)

    print(f"{'':<16}{'final loss':>12}{'largest difference':>20}{'characters/s':>16}")
    for name, training in trainings.items():
        final = statistics.mean(training.losses[-LAST:])
        pytorch = trainings.get("PyTorch")
        apart = f"{max(differences(training, pytorch)):.1e}" if pytorch else "-"
        speed = BATCH * CONTEXT / statistics.median(training.seconds)
        print(f"{name:<16}{final:12.4f}{apart:>20}{speed:16,.0f}")
    print(f"steps           {len(trainings['Strobe'].losses):12}")
    if args.export:
        title = args.title or ", ".join(path.name for path in args.text)
        export(trainings["Strobe"], alphabet, text, title, args.export)
        print(f"weights         {args.export}, {args.export.stat().st_size:,} bytes")
    try:
        if not args.alone:
            plot(trainings, args.figure)
            print(f"figure          {args.figure.with_suffix('.svg')} and .png")
    except ModuleNotFoundError as error:
        print(f"figure          none: {error} (python/requirements-plots.txt)")
    print(f"\n{generate(trainings['Strobe'].model, alphabet, text[:64], args.length)}")


if __name__ == "__main__":
    main()
