"""Tokens of a small Llama on the CPU: transformers with PyTorch's attention and with Strobe's, in turns, in one process.

    PYTHONPATH=python build/venv/bin/python bench/llama_decode.py [--threads 2] [--hidden 2048] [--seconds 60]

4 layers, 16 query heads, 4 key heads, bf16, random weights, a prompt of 4,096 tokens in the cache, one token a step.
"sdpa" is scaled_dot_product_attention as transformers calls it, "eager" is attention in separate operations, "strobe" is
`strobe.transformers`. The least time of a step counts, and the least processor time of the process: with one thread on a
busy machine the latter says more.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from typing import Any

import strobe.transformers
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache, StaticCache

KINDS = ("sdpa", "eager", "strobe")


def model_of(hidden: int) -> Any:
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=4, vocab_size=32000, max_position_embeddings=8192,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    strobe.transformers.register()
    model = model_of(options.hidden)
    prompt = torch.randint(0, 32000, (1, options.prompt), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        filled: Any = DynamicCache(config=model.config)
        for part in prompt.split(512, dim=1):
            model(part, past_key_values=filled, logits_to_keep=1)
        for name, cache_of in (("dynamic", DynamicCache), ("static", StaticCache)):
            caches: dict[str, Any] = {}
            for kind in KINDS:
                if name == "dynamic":
                    caches[kind] = copy.deepcopy(filled)
                    continue
                cache: Any = cache_of(config=model.config, max_cache_len=options.prompt + 256)
                full: Any
                for layer, full in enumerate(filled.layers):
                    where = {"cache_position": torch.arange(options.prompt)}
                    cache.update(full.keys, full.values, layer, where)
                caches[kind] = cache
            wall: dict[str, list[float]] = {kind: [] for kind in KINDS}
            processor: dict[str, list[float]] = {kind: [] for kind in KINDS}
            logits: dict[str, Any] = {}
            begin, step = time.perf_counter(), 0
            while step < 8 or (time.perf_counter() - begin < options.seconds / 2 and step < 240):
                for kind in KINDS:
                    model.set_attn_implementation(kind)
                    at = torch.tensor([options.prompt + step])
                    t, p = time.perf_counter(), time.process_time()
                    out = model(prompt[:, step : step + 1], past_key_values=caches[kind], cache_position=at)
                    if step > 1:
                        wall[kind].append(time.perf_counter() - t)
                        processor[kind].append(time.process_time() - p)
                    logits[kind] = out.logits[0, -1].float()
                step += 1
            error = (logits["strobe"] - logits["sdpa"]).abs().max().item()
            if not error < 0.05 * logits["sdpa"].abs().max().item():
                raise SystemExit(f"{name} cache: logits differ by {error:g}: not worth timing")
            print(f"{name} cache, {options.threads} threads, {step} steps; largest difference of logits {error:.3g}")
            for kind in KINDS:
                least, cpu = min(wall[kind]), min(processor[kind])
                print(
                    f"  {kind:7} {1e3 * least:8.2f} ms ({least / min(wall['sdpa']):.2f} of sdpa), median "
                    f"{1e3 * statistics.median(wall[kind]):8.2f}; processor {1e3 * cpu:8.2f} ms ({cpu / min(processor['sdpa']):.2f})"
                )


if __name__ == "__main__":
    main()
