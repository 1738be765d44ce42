"""A sequence split over GPUs by `strobe.distributed`, over NCCL: the cases of tests/python/distributed_ranks.py (causal, windows,
chunks, rows in use, masks, dropout, ALiBi, sinks and packed documents; GQA in all), by rings, all-to-all and both, forward and
backward, held against one GPU's call.

    torchrun --nproc-per-node 2 tests/gpu/ring_cases.py [--only "dropout,few rows"] [--device cpu]

All-to-all has its heads in one lot and in two. A case passes where each of its results differs from one device's by at most 2^-6 of
its root mean square (root mean square) and 2^-4 of its largest value (at one place): bfloat16 rounds both. Cases that so many ranks
cannot be the groups of are left out, by name. With --device cpu, over gloo, the test itself is tested.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests/python")]

from device import DEV  # first: ends the script where there is no GPU

# isort: split
import distributed_ranks
import strobe
import torch
import torch.distributed as dist
from distributed_ranks import CASES
from strobe import _ring_cost

SECONDS = 120
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")
LOTS = {"one lot": 1 << 60, "two lots": 0}


def differences(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> list[str]:
    """What differs by too much, in words."""
    found = []
    for name, x, y in zip(NAMES[: len(wanted)], got, wanted, strict=True):
        if x.shape != y.shape or x.dtype != y.dtype:
            found.append(f"{name} is {tuple(x.shape)} {x.dtype}, expected {tuple(y.shape)} {y.dtype}")
            continue
        same = x == y  # infinities, of rows that see nothing
        apart, whole = (x.double() - y.double()).masked_fill(same, 0), y.double().masked_fill(same & y.isinf(), 0)
        error, rms = (part.pow(2).mean().sqrt().item() for part in (apart, whole))
        largest, value = (part.abs().max().item() for part in (apart, whole))
        if not (error <= 2**-6 * rms and largest <= 2**-4 * value):
            found.append(f"{name} differs by {error:.2e} of {rms:.2e}, at one place by {largest:.2e} of {value:.2e}")
    return found


def one(name: str, device: Any) -> list[str]:
    """Runs a case; what is wrong with it."""
    try:
        got = distributed_ranks.split(name, None, device)
        wrong = differences(got, distributed_ranks.single(name, device))
        if CASES[name][0].get("deterministic"):
            again = distributed_ranks.split(name, None, device)
            wrong += [] if all(map(torch.equal, got, again)) else ["other bits at the second run"]
        return wrong
    except Exception as error:  # noqa: BLE001 - every failure is to be reported
        traceback.print_exc()
        return [f"{type(error).__name__}: {error}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help="names of cases, with commas")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    names = args.only.split(",")
    for name in names:
        if name not in CASES:
            parser.error(f"--only has {name!r}, expected some of {', '.join(CASES)}")
    if "RANK" not in os.environ:
        parser.error("there is no RANK, expected torchrun --nproc-per-node 2 before it")
    ranks, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    timeout = datetime.timedelta(seconds=SECONDS)
    if DEV == "cuda":
        wanted, count = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        if count < wanted:
            print(f"ring_cases.py: skipped ({count} GPUs for {wanted} ranks)")
            return 0
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=timeout)
        place = torch.cuda.get_device_name()
    else:
        torch.set_num_threads(1)
        device, place = torch.device("cpu"), "a CPU"
        dist.init_process_group("gloo", timeout=timeout)
    first = dist.get_rank() == 0
    if first:
        print(f"{ranks} x {place}, {dist.get_backend()}, PyTorch {torch.__version__}, Strobe {strobe.__version__}")
    done, failed, left_out = 0, [], []
    for name in names:
        if not distributed_ranks.runs(name, ranks):
            left_out.append(name)
            continue
        for lots, size in LOTS.items():
            _ring_cost.TWO_LOTS_FROM = size
            wrong: list[Any] = [None] * ranks
            dist.all_gather_object(wrong, one(name, device))
            told = [f"rank {rank}: {text}" for rank, texts in enumerate(wrong) for text in texts]
            if first:
                print(f"{name} ({lots}):", "; ".join(told) or "as one device", flush=True)
            done += 1
            failed += [f"{name} ({lots})"] if told else []
    if first:
        print(f"left out, as {ranks} ranks cannot be their groups: {', '.join(left_out) or 'none'}")
        print(f"FAILED: {', '.join(failed)}" if failed else f"{done} runs of {len(names) - len(left_out)} cases: all as one device")
    dist.destroy_process_group()
    return 1 if failed or not done else 0


if __name__ == "__main__":
    sys.exit(main())
