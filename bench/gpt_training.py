"""How fast GPT-3-like models train on one GPU: forward, backward and AdamW, in TFLOP/s, with
standard attention, FlashAttention-2 and cuDNN (both PyTorch's) and Strobe.

    make gpu-training                          1.3B and 2.7B at 2k and 8k context
    python bench/gpt_training.py --device cpu --model tiny --context 128 --tokens 256   a trial

FLOP are those that the model needs, counted as in T. Dao, "FlashAttention-2", arXiv:2307.08691,
section 4.2, which follows Megatron-LM: for each sequence

    6 * seqlen * parameters + 12 * layers * hidden dim * seqlen^2

The causal mask does not halve the second term, and what activation checkpointing computes again is
not counted. Weights and activations are bfloat16, AdamW has float32 weights and moments; tokens are
random, the same for all. Each configuration runs in a process of its own; one that does not fit
into memory, or that this machine cannot run, is reported as such. Under --checkpointing needed (the
default) what does not fit is tried again with activation checkpointing.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).resolve().parent.parent
NO_MEMORY = "out of memory"


@dataclass(frozen=True)
class Size:
    """Of a model."""

    layers: int
    dim: int
    head_dim: int
    vocabulary: int = 50304  # GPT-2's 50257, rounded up to a multiple of 64


# Layers and width of GPT-3 (T. Brown et al., arXiv:2005.14165, table 2.1), head_dim 128 throughout.
SIZES = {
    "1.3B": Size(24, 2048, 128),
    "2.7B": Size(32, 2560, 128),
    "tiny": Size(2, 64, 16, 256),  # to try this script with
}


@dataclass(frozen=True)
class Configuration:
    """Of one process."""

    model: str
    context: int  # tokens of a sequence
    batch: int  # sequences of a step
    attention: str
    checkpointing: bool
    device: str
    steps: int
    warm_up: int


# --------------------------------------------------------------------------------------- attention

# Causal attention over q, k, v, each (batch, seqlen, heads, head_dim); so is what it returns.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def standard_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two matrix products and a softmax, with the seqlen x seqlen matrices in memory."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    weights = torch.softmax(scores.masked_fill_(later, -math.inf), dim=-1)
    return (weights @ v).transpose(1, 2)


def pytorch_attention(backend: SDPBackend) -> Attention:
    """scaled_dot_product_attention by this back end and no other."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return attention


def strobe_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Strobe, imported when asked for: the others run without it."""
    from strobe.flash_attn import flash_attn_func

    out: Tensor = flash_attn_func(q, k, v, causal=True)
    return out


ATTENTIONS: dict[str, Attention] = {
    "standard": standard_attention,
    "FlashAttention-2": pytorch_attention(SDPBackend.FLASH_ATTENTION),
    "cuDNN": pytorch_attention(SDPBackend.CUDNN_ATTENTION),
    "Strobe": strobe_attention,
}

# ------------------------------------------------------------------------------------------- model


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and beside a residual connection."""

    def __init__(self, size: Size, attention: Attention) -> None:
        """attention: one of ATTENTIONS."""
        super().__init__()
        self.heads = (size.dim // size.head_dim, size.head_dim)
        self.attention = attention
        self.attention_norm = nn.LayerNorm(size.dim)
        self.qkv = nn.Linear(size.dim, 3 * size.dim)
        self.projection = nn.Linear(size.dim, size.dim)
        self.feed_forward_norm = nn.LayerNorm(size.dim)
        self.up = nn.Linear(size.dim, 4 * size.dim)
        self.down = nn.Linear(4 * size.dim, size.dim)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seqlen, dim) to the same."""
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, *self.heads)).unbind(2)
        x = x + self.projection(self.attention(q, k, v).flatten(-2))
        return x + self.down(gelu(self.up(self.feed_forward_norm(x)), approximate="tanh"))


class Gpt(nn.Module):
    """Learnt positions; the embedding is also the output's weight, as in GPT-2 and GPT-3."""

    def __init__(self, size: Size, context: int, attention: Attention, checkpointing: bool) -> None:
        """checkpointing: each block keeps its input only, and computes the rest again in backward."""
        super().__init__()
        self.checkpointing = checkpointing
        self.token = nn.Embedding(size.vocabulary, size.dim)
        self.position = nn.Embedding(context, size.dim)
        self.blocks = nn.ModuleList(Block(size, attention) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.dim)
        for layer in self.modules():
            if isinstance(layer, (nn.Linear, nn.Embedding)):
                nn.init.normal_(layer.weight, std=0.02)

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross entropy, in nats, of tokens (batch, seqlen + 1) but the first."""
        x = self.token(tokens[:, :-1]) + self.position.weight[: tokens.shape[1] - 1]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        logits = self.norm(x) @ self.token.weight.T
        return cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Optimizer:
    """AdamW over a float32 copy of a bfloat16 model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        """The model's parameters follow the copy at every step."""
        self.parameters = list(model.parameters())
        self.masters = [p.detach().float() for p in self.parameters]
        self.adamw = torch.optim.AdamW(
            self.masters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    @torch.no_grad()
    def step(self) -> None:
        """Takes the gradients away."""
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        self.adamw.step()
        self.adamw.zero_grad()
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            parameter.copy_(master)


# -------------------------------------------------------------------------- in a process of its own


def flop(size: Size, parameters: int, seqlen: int) -> float:
    """Of forward and backward of one sequence; see the top of this file."""
    return 6.0 * seqlen * parameters + 12.0 * size.layers * size.dim * seqlen**2


def peak_memory(device: str) -> int:
    """Bytes that PyTorch held on a GPU at its most; on the CPU, those of the whole process."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def train(c: Configuration) -> dict[str, Any]:
    """Steps of a new model; returns their speed."""
    size = SIZES[c.model]
    torch.manual_seed(0)
    with torch.device(c.device):
        model = Gpt(size, c.context, ATTENTIONS[c.attention], c.checkpointing).bfloat16()
    optimizer = Optimizer(model)
    # Drawn on the CPU: the same on every device.
    generator = torch.Generator().manual_seed(1)
    shape = (c.warm_up + c.steps, c.batch, c.context + 1)
    batches = torch.randint(size.vocabulary, shape, generator=generator).to(c.device)
    seconds = []
    for batch in batches:
        begin = time.perf_counter()
        loss = model.loss(batch)
        loss.backward()
        optimizer.step()
        last_loss = loss.item()  # waits for all that the GPU has been given, the optimiser too
        seconds.append(time.perf_counter() - begin)
    parameters = sum(p.numel() for p in model.parameters())
    median = statistics.median(seconds[c.warm_up :])
    return {
        "status": "ok",
        "parameters": parameters,
        "step_seconds": median,
        "slowest_step_seconds": max(seconds[c.warm_up :]),
        "tflops": c.batch * flop(size, parameters, c.context) / median * 1e-12,
        "peak_memory_bytes": peak_memory(c.device),
        "last_loss": last_loss,
    }


def worker(configuration: str) -> None:
    """Prints the result of a configuration, as JSON, in the last line."""
    try:
        result = train(Configuration(**json.loads(configuration)))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what became of this configuration
        # PyTorch's allocator on the CPU raises a plain RuntimeError.
        no_memory = "allocate memory" in str(error)
        no_memory |= isinstance(error, (torch.OutOfMemoryError, MemoryError))
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        result = {"status": NO_MEMORY if no_memory else "failed", "reason": reason}
    print(json.dumps(result))


# ------------------------------------------------------------------------------------- all of them


def run(c: Configuration, timeout: float) -> dict[str, Any]:
    """A configuration in a new process, whose memory is given back whatever happens."""
    words = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(asdict(c))]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"status": "failed", "reason": f"took more than {timeout:.0f} s"}
    if done.returncode == 0:
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result
    if done.returncode == -9:  # how Linux ends a process when the machine has no memory left
        return {"status": NO_MEMORY, "reason": "killed"}
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return {"status": "failed", "reason": f"exit status {done.returncode}: {last}"}


def cell(row: dict[str, Any]) -> str:
    """Of the table."""
    if row["status"] != "ok":
        return str(row["status"])
    mark = "*" if row["checkpointing"] else " "
    text = f"{row['tflops']:.0f}" if row["tflops"] >= 10 else f"{row['tflops']:.3g}"
    return f"{text}{mark} {row['peak_memory_bytes'] / 1e9:.3g} GB"


def print_table(rows: list[dict[str, Any]], names: list[str]) -> None:
    """A line for each model and context, a column for each attention."""
    print("\nTFLOP/s, peak memory (*: activation checkpointing)")
    print(f"{'model':<6}{'context':>8}" + "".join(f"{name:>20}" for name in names))
    for (model, context), line in itertools.groupby(rows, lambda r: (r["model"], r["context"])):
        found = {row["attention"]: cell(row) for row in line}
        print(f"{model:<6}{context:>8}" + "".join(f"{found[name]:>20}" for name in names))


def commit() -> str:
    """Of this source tree; empty outside git."""
    words = ("git", "describe", "--always", "--dirty", "--abbrev=12")
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def main() -> None:
    """Runs every configuration asked for, prints each and a table, writes the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", choices=list(SIZES), nargs="+", default=["1.3B", "2.7B"])
    parser.add_argument("--context", type=int, nargs="+", default=[2048, 8192], help="tokens")
    parser.add_argument("--tokens", type=int, default=16384, help="of a step: batch * context")
    parser.add_argument("--attention", choices=list(ATTENTIONS), nargs="+", default=[*ATTENTIONS])
    parser.add_argument("--checkpointing", choices=("never", "needed", "always"), default="needed")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=5, help="timed ones")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before those")
    parser.add_argument("--timeout", type=float, default=600, help="seconds, of a configuration")
    parser.add_argument("--commit", help="of the library, where there is no git to ask")
    parser.add_argument("--output", type=Path, help="default: bench/results/gpt_training.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker)
        return
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpt_training: skipped (no GPU; --device cpu --model tiny tries the script)")
        return

    rows: list[dict[str, Any]] = []
    for model, context, name in itertools.product(args.model, args.context, args.attention):
        retries = {"never": (False,), "needed": (False, True), "always": (True,)}
        for checkpointing in retries[args.checkpointing]:
            c = Configuration(
                model,
                context,
                max(1, args.tokens // context),
                name,
                checkpointing,
                args.device,
                args.steps,
                args.warm_up,
            )
            row = asdict(c) | run(c, args.timeout)
            reason = f", {row['reason']}" if "reason" in row else f", loss {row['last_loss']:.4f}"
            print(f"{model} {context} {name}: {cell(row)}{reason}", flush=True)
            if row["status"] != NO_MEMORY:
                break
        rows.append(row)
    print_table(rows, args.attention)

    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    now = datetime.datetime.now(datetime.timezone.utc)
    result = {
        "device": device,
        "torch": torch.__version__,
        "commit": args.commit or commit(),
        "date": now.isoformat(timespec="seconds"),
        "flop": "6 * seqlen * parameters + 12 * layers * dim * seqlen^2 for each sequence",
        "models": {name: asdict(SIZES[name]) for name in args.model},
        "rows": rows,
    }
    output = args.output or ROOT / "bench" / "results" / "gpt_training.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {output}")


if __name__ == "__main__":
    main()
