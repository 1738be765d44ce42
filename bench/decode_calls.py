"""Attention over a KV cache through the C ABI, for benchmarks: tensors of PyTorch in, a launch out."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "python"))

import capi

# strobe_dtype of a quantised cache.
KV_DTYPES = {"float8_e4m3fn": 3, "int8": 5, "q8_0": 6, "q4_0": 7}


class Decode:
    """One launch: `run()`, as often as one likes, on the stream that is current when this is made.

    q and out: [batch, seqlen_q, heads, head_dim]. k, v: the cache [batch, capacity, heads_kv, head_dim], or with a
    table (int32 [batch, pages_per_sequence]) its pages, with any strides. used: int32 [batch], the keys in use. new:
    (k_new, v_new), [batch, seqlen_new, heads_kv, head_dim], which follow those; rotary: (cos, sin), [positions,
    rotary_dim / 2], contiguous. form: of a quantised cache, as strobe.quantize names it; scales: its (k_scale, v_scale)
    of rows. q_scale: of a float8 q, whose scales are all float32 [batch, heads_kv].
    """

    def __init__(
        self, q: Any, k: Any, v: Any, used: Any, out: Any, table: Any = None, threads: int = 0,
        new: tuple[Any, Any] = (None, None), rotary: tuple[Any, Any] = (None, None), causal: bool = False,
        batch_invariant: bool = False, form: str = "", scales: tuple[Any, Any] = (None, None), q_scale: Any = None,
    ) -> None:
        import torch

        p = capi.new_problem()
        p.dtype = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3}[q.dtype]
        p.device = capi.CUDA if q.is_cuda else capi.CPU
        p.device_index = q.device.index or 0
        p.batch, p.seqlen_q, p.heads, p.head_dim = q.shape
        p.heads_kv, p.threads, p.has_seqused_k = k.shape[2], threads, 1
        p.causal, p.batch_invariant = int(causal), int(batch_invariant)
        if table is None:
            p.cache, p.cache_batch, p.seqlen_k = 1, k.shape[0], k.shape[1]
        else:
            p.cache, p.pages, p.page_size, p.pages_per_sequence = 2, k.shape[0], k.shape[1], table.shape[1]
            p.seqlen_k = k.shape[1] * table.shape[1]
        strided = {"q": q, "k": k, "v": v, "out": out}
        if form:
            p.kv_dtype = KV_DTYPES[form]
        if scales[0] is not None:
            p.kv_scale, p.kv_scale_dtype = 3, {torch.float32: 0, torch.float16: 2}[scales[0].dtype]
            for strides, tensor in ((p.k_scale, scales[0]), (p.v_scale, scales[1])):
                if q_scale is None:
                    strides.batch, strides.seqlen, strides.head = tensor.stride()
        if q_scale is not None:
            p.has_q_scale, p.kv_scale = 1, 4
            p.out_dtype = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}[out.dtype]
            for strides, tensor in ((p.q_scale, q_scale), (p.k_scale, scales[0]), (p.v_scale, scales[1])):
                strides.batch, strides.head = tensor.stride()
        if new[0] is not None:
            p.append, p.seqlen_new = 1, new[0].shape[1]
            strided |= {"k_new": new[0], "v_new": new[1]}
        if rotary[0] is not None:
            p.rotary_rows, p.rotary_dim = rotary[0].shape[0], 2 * rotary[0].shape[1]
        for name, tensor in strided.items():
            strides = getattr(p, name)
            strides.batch, strides.seqlen, strides.head, strides.dim = tensor.stride()
        self.plan = capi.make_plan(p)
        self.kernel = capi.text(self.plan.kernel)
        size = int(self.plan.workspace_bytes)
        workspace = torch.empty(size + 64, dtype=torch.uint8, device=q.device)
        args = capi.ForwardArgs()
        args.struct_size = ctypes.sizeof(args)
        self.keep = {
            **strided, "seqused_k": used, "block_table": table, "rotary_cos": rotary[0], "rotary_sin": rotary[1],
            "k_scale": scales[0], "v_scale": scales[1], "q_scale": q_scale,
        }  # fmt: skip
        for name, tensor in self.keep.items():
            setattr(args, name, None if tensor is None else tensor.data_ptr())
        args.workspace, args.workspace_bytes = -(-workspace.data_ptr() // 64) * 64, size
        if q.is_cuda:
            args.stream = torch.cuda.current_stream().cuda_stream
        self.keep["workspace"] = workspace
        self.args, self.address, self.forward = bytes(args), ctypes.addressof(self.plan), capi.forward

    def run(self) -> None:
        capi.check(self.forward(self.address, self.args))


def paged(k: Any, page_size: int, seed: int = 1) -> tuple[Any, Any]:
    """A cache [batch, capacity, heads_kv, head_dim], capacity a multiple of page_size, as pages in a random order,
    and their table."""
    import torch

    batch, capacity = k.shape[:2]
    pages = batch * capacity // page_size
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).to(k.device)
    pool = torch.empty(pages, page_size, *k.shape[2:], dtype=k.dtype, device=k.device)
    pool[order] = k.reshape(pages, page_size, *k.shape[2:])
    return pool, order.to(torch.int32).reshape(batch, -1).contiguous()
