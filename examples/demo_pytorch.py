"""PyTorch's attention beside Strobe's, for demo.cpp, which starts this where PyTorch is installed.

Standard output gets one line of JSON with PyTorch's version, then one for each line of standard
input, which is "TOKENS forward" or "TOKENS both": seconds (fastest and median of so many runs), and
bytes, by how much the largest resident memory of this process grew beyond inputs and results.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import sys
import time
from pathlib import Path

Result = dict[str, float | int | str]


def say(result: Result) -> None:
    """One line, at once."""
    print(json.dumps(result), flush=True)


def resident(field: str) -> int:
    """VmRSS, the resident memory of this process, or VmHWM, the most that it was; bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


class Peer:
    """The captured tensors, and PyTorch's attention over them at any length."""

    def __init__(self, capture: Path, threads: int) -> None:
        """capture: the safetensors file that the demo reads."""
        import torch

        self.torch = torch
        torch.set_num_threads(threads)
        torch.manual_seed(1)
        data = capture.read_bytes()
        (size,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + size])
        self.captured = {}
        for name in ("q", "k", "v", "dout"):
            shape, (begin, end) = header[name]["shape"], header[name]["data_offsets"]
            values = bytearray(data[8 + size + begin : 8 + size + end])
            self.captured[name] = torch.frombuffer(values, dtype=torch.float32).view(shape)

    def longer(self, name: str, tokens: int):  # type: ignore[no-untyped-def]
        """Repeated to so many tokens with 10 % of noise, as demo.cpp does it.

        (1, heads, tokens, head_dim), and in memory (1, tokens, heads, head_dim), which is how a
        model's projections leave it.
        """
        captured = self.captured[name]
        repeats = math.ceil(tokens / captured.shape[1])
        longer = captured.repeat(1, repeats, 1, 1)[:, :tokens].clone()
        longer += 0.1 * captured.square().mean().sqrt() * self.torch.randn_like(longer)
        return longer.transpose(1, 2)

    def measure(self, tokens: int, backward: bool) -> Result:
        """Once when that takes long; else the fastest of a few, and their median."""
        q, k, v, dout = (self.longer(name, tokens) for name in ("q", "k", "v", "dout"))
        attention = self.torch.nn.functional.scaled_dot_product_attention
        if backward:
            for x in (q, k, v):
                x.requires_grad_()

        def work() -> int:
            out = attention(q, k, v)
            if not backward:
                return out.nbytes  # type: ignore[no-any-return]
            gradients = self.torch.autograd.grad(out, (q, k, v), dout)
            return out.nbytes + sum(x.nbytes for x in gradients)

        def timed() -> float:
            begin = time.perf_counter()
            work()
            return time.perf_counter() - begin

        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here (proc_pid(5))
        before = resident("VmRSS")
        begin = time.perf_counter()
        results = work()
        times = [time.perf_counter() - begin]
        memory = max(0, resident("VmHWM") - before - results)
        if times[0] <= 0.25:
            times = []
            while sum(times) < 0.3 or len(times) < 3:
                times.append(timed())
        times.sort()
        best, median = times[0], times[len(times) // 2]
        return {"best": best, "median": median, "runs": len(times), "bytes": memory}


def main() -> None:
    """Answers until standard input ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("capture", type=Path, help="safetensors file with q, k, v and dout")
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    peer = Peer(args.capture, args.threads)
    peer.measure(peer.captured["q"].shape[1], backward=True)  # what the first call alone does
    say({"version": peer.torch.__version__})
    for line in sys.stdin:
        tokens, directions = line.split()
        say(peer.measure(int(tokens), directions == "both"))


if __name__ == "__main__":
    main()
