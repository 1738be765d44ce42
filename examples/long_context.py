"""The GPT of char_gpt.py learns from sequences too long for one device, split over ranks.

    torchrun --nproc-per-node 2 examples/long_context.py                     4k characters, on a CPU
    torchrun --nproc-per-node 8 examples/long_context.py --seqlen 128k       on eight GPUs

Three things differ from training on one device, and stand out below: every rank takes its own rows
of the text (shard), rotary embeddings get the rows' positions, and gradients are added up over the
ranks, as each has the loss of its own rows. Attention alone looks beyond them.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import char_gpt
import strobe
import torch
import torch.distributed as dist

# This module's functions have the default group as a default value, that of the time of its import,
# which PyTorch's optimizers do. If it came after `init_process_group`, it would keep the group, and
# gloo's threads, beyond `destroy_process_group` to the interpreter's end, where they can abort.
import torch.distributed.nn.functional
from char_gpt import CharGPT, read
from strobe.distributed import attention, plan, positions, shard
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


def split_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of this rank's rows, which see the rows of all."""
    out: Tensor = attention(q, k, v, causal=True)
    return out


def split_loss(model: CharGPT, tokens: Tensor) -> Tensor:
    """This rank's part of the mean cross entropy. tokens: (batch, seqlen + 1), whole and the same
    on every rank; the characters but the last predict those but the first.
    """
    seqlen = tokens.shape[1] - 1
    mine = shard(tokens[:, :-1], causal=True)
    wanted = shard(tokens[:, 1:], causal=True)
    logits = model(mine, positions(seqlen, causal=True, device=tokens.device))
    total = cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), reduction="sum")
    return total / (tokens.shape[0] * seqlen)


def add_up_gradients(model: nn.Module) -> None:
    """Over all ranks. FSDP and DDP do it too, and take the mean: multiply the loss by the ranks."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([x.flatten() for x in gradients])
    dist.all_reduce(flat)
    for x, part in zip(gradients, flat.split([x.numel() for x in gradients]), strict=True):
        x.copy_(part.view_as(x))


def number(text: str) -> int:
    """4096, or 4k."""
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


def main() -> None:
    """Reads the text, and trains on one piece of it after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--seqlen", type=number, default=4096, help="characters in a step, 4k is 4096"
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--text", type=Path, nargs="+", default=char_gpt.SOURCES)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="else a GPU, where there is one")
    args = parser.parse_args()

    # ------------------------------------------------ one process a device, as torchrun starts them
    kind = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else kind
    if kind == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    text = read(args.text)
    while len(text) <= args.seqlen:
        text += text
    alphabet = "".join(sorted(set(text)))
    index = {c: i for i, c in enumerate(alphabet)}
    tokens = torch.tensor([index[c] for c in text])

    torch.manual_seed(0)  # the same weights on every rank
    model = CharGPT(len(alphabet)).to(device)
    for block in model.blocks:
        block.attention = split_attention
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.99))
    autocast = torch.autocast("cuda", torch.bfloat16, enabled=kind == "cuda")
    if rank == 0:
        rows = len(positions(args.seqlen, causal=True))
        shape = (1, rows, char_gpt.HEADS, char_gpt.HEAD_DIM)
        x = strobe.ArraySpec(shape, "bfloat16" if kind == "cuda" else "float32", kind)
        told = plan(x, x, x, causal=True, seqlen=args.seqlen)
        print(f"{args.seqlen} characters in a step, {ranks} ranks on {kind}\n{told}", flush=True)

    generator = torch.Generator().manual_seed(1)  # the same pieces, too
    for step in range(1, args.steps + 1):
        begin = time.perf_counter()
        start = int(torch.randint(len(tokens) - args.seqlen, (), generator=generator))
        piece = tokens[None, start : start + args.seqlen + 1].to(device)
        with autocast:
            loss = split_loss(model, piece)
        optimizer.zero_grad()
        loss.backward()
        add_up_gradients(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        if rank == 0:
            seconds = time.perf_counter() - begin
            print(
                f"step {step:3}  loss {whole.item():.4f}  {args.seqlen / seconds:10,.0f} "
                "characters/s",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
