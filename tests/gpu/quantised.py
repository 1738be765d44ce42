"""Attention over quantised KV caches on the GPU against float64 over what the codes stand for; appends and
strobe.quantize there against the CPU's, to the bit.

    python tests/gpu/quantised.py                             random problems, by the kernels that the planner chooses
    python tests/gpu/quantised.py --count 2000 --first 1000   some of them
    python tests/gpu/quantised.py --graph 40                  captured launches, replayed with other lengths and tables
    python tests/gpu/quantised.py --device cpu                the CPU library

Codes are decoded here, without the library. A case passes where out is off by at most twice what plain attention in q's
dtype, in PyTorch, is off by over the same values (its roundings drawn up to 24 times while the result fails), and lse by
what float32 sums of its scores' terms give: there what codes stand for is rounded to q's dtype where the plan says that
codes are unpacked first, and nowhere else.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

try:
    import torch
except ImportError:
    print("gpu quantised: skipped (no PyTorch, whose float64 is the reference)")
    sys.exit(0)

import strobe
import strobe_torch as st

DRAWS = 24  # of the comparator's roundings: docs/testing.md
FORMS = ("int8", "float8_e4m3fn", "q8_0", "q4_0")
BLOCKS = {"q8_0": 34, "q4_0": 18}


def values_of(codes: torch.Tensor, scale: torch.Tensor | None, form: str) -> torch.Tensor:
    """What codes stand for, in float64."""
    if form == "float":
        return codes.double()
    if form not in BLOCKS:
        assert scale is not None
        by = scale.double().where(scale.double().isfinite(), math.nan)
        return codes.double() * (by[..., None] if by.ndim > 1 or by.numel() > 1 else by)
    blocks = codes.reshape(*codes.shape[:-1], -1, BLOCKS[form])
    by = blocks[..., :2].contiguous().view(torch.float16).double()
    by = by.where(by.isfinite(), math.nan)
    rest = blocks[..., 2:]
    if form == "q8_0":
        numbers = rest.contiguous().view(torch.int8).double()
    else:
        numbers = torch.cat([rest & 15, rest >> 4], -1).double() - 8
    return (numbers * by).reshape(*codes.shape[:-1], -1)


class Case:
    def __init__(self, seed: int, device: str, form: str = "", dtype: str = "") -> None:
        r = self.r = random.Random(seed)
        self.seed, self.device = seed, device
        # Of keys and of values; "float": q's dtype.
        self.forms = [r.choice([form] if form else FORMS)] * 2
        self.scale = r.choice(("row", "row", "head", "tensor"))
        self.scale_dtype = r.choice(("float32", "float16"))
        self.scale_rows = random.Random(seed).choice((None, None, 16, 128))
        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
        self.dtype = dtypes[dtype or r.choice(("bf16", "fp16"))]
        self.batch = r.choice((1, 2, 3, 7, 40))
        self.heads_kv = r.choice((1, 2, 3, 8))
        self.group = r.choice((1, 2, 3, 4, 8, 20))
        many = (100, 300) if self.batch * self.heads_kv * self.group <= 64 else ()  # the reference has all scores
        self.queries = r.choice((1, 1, 1, 2, 5, 17, *many))
        step, widest = 32 if self.forms[0] in BLOCKS else r.choice((16, 16, 1)), r.choice((128, 128, 256))
        self.dim, self.dim_v = (step * r.randint(1, widest // step) for _ in range(2))
        if r.random() < 0.6:
            self.dim = self.dim_v = r.choice((64, 128, 128))
        self.rows = r.choice((40, 200, 1000, 5000 if self.batch < 8 else 600))
        self.page = r.choice((0, 0, 1, 16, 48, 64, 256))
        self.appends = r.choice((0, 0, 1, 3))
        self.rotary = 2 * r.randint(1, self.dim // 2) if self.appends and r.random() < 0.5 and self.dim > 1 else 0
        self.options: dict[str, Any] = {}
        if r.random() < 0.3:
            self.options["causal"] = True
        if r.random() < 0.2:
            self.options["window"] = (r.randint(0, 300), -1)
        if r.random() < 0.2:
            self.options["softcap"] = 15.0
        if r.random() < 0.3:
            self.options["batch_invariant"] = True
        self.special = r.random() < 0.15
        if not form and r.random() < 0.25:
            self.forms = r.sample((*FORMS, "float8_e5m2", "float"), 2)
            self.dim, self.dim_v = (
                -(-dim // 32) * 32 if own in BLOCKS else dim
                for own, dim in zip(self.forms, (self.dim, self.dim_v), strict=True)
            )

        # Heads before rows in the cache, and new rows at any address.
        self.heads_first, self.shifted = r.random() < 0.2, r.random() < 0.2
        if r.random() < 0.1:  # sequences of one key
            self.rows = 1

    def __str__(self) -> str:
        names = ("seed", "forms", "scale", "scale_dtype", "dtype", "batch", "heads_kv", "group", "queries", "dim", "dim_v",
                 "rows", "page", "appends", "rotary", "options", "special", "heads_first", "shifted")  # fmt: skip
        return ", ".join(f"{name} {getattr(self, name)}" for name in names)

    def make(self) -> None:
        r, kind = self.r, {"device": self.device}
        torch.manual_seed(self.seed)
        n = self.rows + self.appends
        self.capacity = -(-n // self.page) * self.page if self.page else n
        self.q = torch.randn(self.batch, self.queries, self.heads_kv * self.group, self.dim, **kind).to(self.dtype)
        self.used = torch.tensor([r.randint(1, self.rows) for _ in range(self.batch)], dtype=torch.int32, **kind)
        self.caches, self.scales = [], []
        for form, dim in zip(self.forms, (self.dim, self.dim_v), strict=True):
            x = torch.randn(self.batch, self.capacity, self.heads_kv, dim)
            codes, scale = self.stored(x, form, self.scale, self.scale_rows if self.scale == "row" else None)
            self.caches.append(codes.to(self.device))
            self.scales.append(None if scale is None else scale.to(self.device))
        if self.special:
            self.make_special()
        self.table = None
        if self.page:
            self.to_pages()
        if self.heads_first:
            self.caches = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in self.caches]
        self.new = [
            torch.randn(self.batch, self.appends, self.heads_kv, dim, **kind).to(self.dtype)
            for dim in (self.dim, self.dim_v)
        ]
        if self.shifted:
            self.new = [torch.nn.functional.pad(x, (1, 2))[..., 1:-2] for x in self.new]
        angles = torch.rand(self.capacity + self.queries, self.rotary // 2, **kind) * 6
        self.turns = [angles.cos().to(self.dtype), angles.sin().to(self.dtype)]

    def stored(
        self, x: torch.Tensor, form: str, scale: Any, scale_rows: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows of the cache as the CPU makes them."""
        if form == "float":
            return x.to(self.dtype), None
        if form in BLOCKS:
            return strobe.quantize(x, form)
        return strobe.quantize(x, form, scale=scale, scale_dtype=self.scale_dtype, scale_rows=scale_rows)

    def make_special(self) -> None:
        """Codes and scales that are odd, in the first sequence."""
        for form, codes, scale in zip(self.forms, self.caches, self.scales, strict=True):
            row = self.r.randrange(self.capacity)
            if form.startswith("float8"):
                codes.view(torch.uint8)[0, row, 0, 0] = 0x7F
            elif form == "int8":
                codes[0, row] = -128
            elif form == "float":
                codes[0, row, 0, 0] = math.nan
            else:
                codes[0, row, 0, :2] = torch.tensor([0, 0x7C], dtype=torch.uint8, device=self.device)
            if scale is not None and scale.ndim == 3:
                scale[0, (row + 5) % self.capacity] = self.r.choice((0.0, math.inf, 6e-8, -0.01))

    def to_pages(self) -> None:
        columns = self.capacity // self.page
        order = list(range(self.batch * columns))
        self.r.shuffle(order)
        table = torch.tensor(order, dtype=torch.int32, device=self.device).reshape(self.batch, columns)
        self.table = table
        places = torch.argsort(table.flatten().long())

        def pooled(x: torch.Tensor) -> torch.Tensor:
            as_bytes = x.view(torch.uint8) if x.element_size() == 1 else x
            return as_bytes.reshape(-1, self.page, *x.shape[2:])[places].view(x.dtype)

        self.caches = [pooled(x) for x in self.caches]
        self.scales = [pooled(x) if x is not None and x.ndim == 3 else x for x in self.scales]

    def arguments(self) -> dict[str, Any]:
        found = {"seqused_k": self.used, **self.options}
        if self.table is not None:
            found["block_table"] = self.table
        scales = zip(("k_scale", "v_scale"), self.scales, strict=True)
        found |= {name: scale for name, scale in scales if scale is not None}
        if self.appends:
            found |= {"k_new": self.new[0], "v_new": self.new[1]}
        if self.rotary:
            found |= {"rotary_cos": self.turns[0], "rotary_sin": self.turns[1]}
        return found

    def call(self) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = strobe.attention_with_kvcache(
            self.q, *self.caches, return_lse=True, **self.arguments()
        )
        self.unpacked = "in the workspace first" in strobe.why()
        return found

    def gathered(self, x: torch.Tensor | None, b: int, n: int) -> torch.Tensor | None:
        """The first n rows of a sequence, of a cache or of its scales; others have no rows."""
        if x is None or x.ndim < 3:
            return x
        if self.table is None:
            return x[b, :n]
        as_bytes = x.view(torch.uint8) if x.element_size() == 1 else x
        return as_bytes[self.table[b].long()].flatten(0, 1)[:n].view(x.dtype)

    def turned(self, x: torch.Tensor, start: int, move: bool) -> torch.Tensor:
        if not self.rotary:
            return x
        half = self.rotary // 2
        at = start + (torch.arange(x.shape[0], device=x.device) if move else torch.zeros(x.shape[0], dtype=torch.long, device=x.device))
        c, s = (t.double()[at][:, None] for t in self.turns)
        a, b = x[..., :half], x[..., half : self.rotary]
        return torch.cat([a * c - b * s, b * c + a * s, x[..., self.rotary :]], -1)

    def wrong(self, out: torch.Tensor, lse: torch.Tensor, used_before: torch.Tensor) -> str:
        """"" or what is wrong with a call's result. used_before: the lengths before it."""
        moves = bool(self.options.get("causal")) or "window" in self.options
        for b in range(self.batch):
            used = int(used_before[b])
            n = used + self.appends
            codes = [self.gathered(x, b, n) for x in self.caches]
            scales = [self.gathered(x, b, n) for x in self.scales]
            k, v = (values_of(*each) for each in zip(codes, scales, self.forms, strict=True))
            q = self.turned(self.q[b].double(), used, moves)
            if self.appends and (text := self.wrong_append(b, used, codes, scales)):
                return text
            wanted = attend(q, k, v, self.options)
            plain = attend(q.to(self.dtype), k.to(self.dtype), v.to(self.dtype), self.options).double()
            if text := self.wrong_lse(lse[b].double(), q, k.to(self.dtype).double() if self.unpacked else k):
                return f"sequence {b}: {text}"
            got = out[b].double()
            if not torch.equal(got.isnan(), wanted.isnan()):
                return f"sequence {b}: other values are NaN"
            there = ~wanted.isnan()
            error, room = ((x - wanted)[there].abs() for x in (got, plain))
            if there.any():
                worst, plain_off, largest = float(error.max()), float(room.nan_to_num(0).max()), float(wanted[there].abs().max())
                limit = 2 * plain_off + 1e-3 * largest
                # Plain attention may be exact by luck, as where a sequence has one key, whose weight is 1 there and is rounded
                # in a kernel that keeps another maximum. So its roundings are drawn again while the result fails.
                generator = torch.Generator(out.device).manual_seed(b)
                for _ in range(DRAWS):
                    if not worst > limit:
                        break
                    rough = [x.to(self.dtype).double() for x in (q, k, v)]
                    drawn = attend(*rough, self.options, (self.dtype, generator))
                    drawn = st.rounded_at_random(drawn, self.dtype, generator).double()
                    plain_off = max(plain_off, float((drawn - wanted)[there].abs().nan_to_num(0).max()))
                    limit = 2 * plain_off + 1e-3 * largest
                if worst > limit:
                    sizes = f"{n} keys, |out| up to {largest:.3g}, unpacked {self.unpacked}, plain attention off by {plain_off:.3g}"
                    return f"sequence {b}: off by {worst:.3g}, expected at most {limit:.3g} ({sizes})"
        return ""

    def wrong_lse(self, got: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> str:
        """Against the bound of oracle/compare.h (LseTolerance); turned queries are rounded besides."""
        scores = scores_of(q, k, self.options)[0]
        wanted = scores.logsumexp(-1)
        if not torch.equal(got.isnan(), wanted.isnan()):
            return "other values of lse are NaN"
        group = q.shape[1] // k.shape[1]
        terms = torch.einsum("ihd,jhd->hij", q.abs(), k.abs().repeat_interleave(group, 1)) / math.sqrt(q.shape[-1])
        size = terms.masked_fill(scores == -math.inf, 0).amax(-1)
        turning = 0.0 if not self.rotary else 2.0**-11 if self.dtype == torch.float16 else 2.0**-8
        limit = 1e-5 + (4e-6 + turning) * size
        there = wanted.isfinite()
        if not torch.equal(got[~there].nan_to_num(1), wanted[~there].nan_to_num(1)):
            return "lse is finite where it should not be"
        over = ((got - wanted).abs() / limit)[there]
        return f"lse off by {float(over.max()):.3g} of what is allowed" if (over > 1).any() else ""

    def wrong_append(self, b: int, used: int, codes: list[Any], scales: list[Any]) -> str:
        """That new rows are what the CPU makes of them; of turned ones that they are near."""
        for i, (name, form) in enumerate(zip("kv", self.forms, strict=True)):
            x = self.new[i][b].double()
            if i == 0:
                x = self.turned(x, used, True)
            of_rows = scales[i] is not None and self.scale == "row"
            got = values_of(codes[i][used:], scales[i][used:] if of_rows else scales[i], form)
            if i == 0 and self.rotary:
                steps = {"float8_e4m3fn": 1 / 14, "float8_e5m2": 1 / 7, "q4_0": 1 / 7}
                step = steps.get(form, 1 / 127)
                if float((got - x).abs().max()) > 1.2 * step * float(x.abs().max()) and self.scale == "row":
                    return f"appended {name} of sequence {b}"
                continue
            shared = None if self.scales[i] is None else self.scales[i].cpu()
            made, scale = self.stored(self.new[i][b : b + 1].cpu(), form, "row" if self.scale == "row" else shared)
            if not torch.equal(codes[i][used:].cpu().view(torch.uint8), made[0].view(torch.uint8)):
                return f"appended {name} of sequence {b}: other codes than the CPU's"
            if scale is not None and self.scale == "row" and not torch.equal(scales[i][used:].cpu(), scale[0]):
                return f"appended {name} of sequence {b}: other scales than the CPU's"
        return ""


def scores_of(q: torch.Tensor, k: torch.Tensor, options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores (heads, queries, keys), and which keys a query does not see, of (queries, heads, dim) and (keys, heads_kv,
    dim)."""
    group, n, m = q.shape[1] // k.shape[1], q.shape[0], k.shape[0]
    k = k.repeat_interleave(group, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
    if "softcap" in options:
        scores = options["softcap"] * (scores / options["softcap"]).tanh()
    distance = torch.arange(n, device=q.device)[:, None] + m - n - torch.arange(m, device=q.device)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if options.get("causal"):
        hidden |= distance < 0
    if "window" in options:
        hidden |= distance > options["window"][0]
    return scores.masked_fill(hidden, -math.inf), hidden


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: dict[str, Any],
    stored_weights: tuple[torch.dtype, torch.Generator] | None = None,
) -> torch.Tensor:
    """(queries, heads, dim) over (keys, heads_kv, dim), in the arrays' dtype; with `stored_weights` over weights that are
    `with_rounded_weights` of strobe_torch.py."""
    scores, hidden = scores_of(q, k, options)
    v = v.repeat_interleave(q.shape[1] // k.shape[1], 1)
    # Of a query that sees no key all weights are 0; what is NaN for another reason stays it.
    weights = scores.softmax(-1).masked_fill(hidden.all(1)[:, None], 0)
    if stored_weights is not None:
        weights = st.with_rounded_weights(weights, *stored_weights)
    # A hidden key's value does not count, whatever it is.
    v = v.masked_fill(hidden.all(0)[:, None, None], 0)
    if hidden.any() and v.isnan().any():
        seen = [v.masked_fill(row[:, None, None], 0) for row in hidden]
        rows = [torch.einsum("hj,jhd->hd", weights[:, i], x) for i, x in enumerate(seen)]
        return torch.stack(rows)
    return torch.einsum("hij,jhd->ihd", weights, v)


def run_case(seed: int, device: str, form: str, dtype: str) -> str:
    c = Case(seed, device, form, dtype)
    c.make()
    before = c.used.clone()
    try:
        out, lse = c.call()
    except strobe.Error as e:
        return f"{type(e).__name__}: {e} ({c})"
    text = c.wrong(out, lse, before)
    return f"{text} ({c})" if text else ""


def run_graph(seed: int, device: str, form: str, dtype: str) -> str:
    """A captured launch, replayed with other lengths and, of pages, another table."""
    c = Case(seed, device, form, dtype)
    c.appends = c.rotary = 0
    c.make()
    c.call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = c.call()
    for n in range(3):
        c.used.copy_(torch.tensor([c.r.randint(0 if n else 1, c.rows) for _ in range(c.batch)], dtype=torch.int32))
        if c.table is not None:
            c.table.copy_(c.table.flip(0).roll(n, 1))
        graph.replay()
        torch.cuda.synchronize()
        empty = (c.used == 0).nonzero().flatten().tolist()
        if any(bool((out[b] != 0).any()) for b in empty):
            return f"replay {n}: a sequence without keys is not 0 ({c})"
        if not empty and (text := c.wrong(out, lse, c.used.clone())):
            return f"replay {n}: {text} ({c})"
    return ""


def run_quantise(seed: int, device: str, form: str, _: str) -> str:
    """strobe.quantize and dequantize there, against the CPU's, to the bit."""
    r = random.Random(seed)
    form = form or r.choice(FORMS)
    dtype = r.choice((torch.float32, torch.bfloat16, torch.float16))
    step = 32 if form in BLOCKS else 1
    torch.manual_seed(seed)
    shape = (r.randint(1, 3), r.randint(1, 300), r.randint(1, 5), step * r.randint(1, 256 // step))
    if seed % 10 == 3:  # so many rows that a thread block has several, one after another
        shape = (shape[0], 20000, *shape[2:])
    x = (torch.randn(shape) * 10 ** r.uniform(-3, 3)).to(dtype)
    if r.random() < 0.3:
        x[0, 0, 0, 0] = r.choice((0.0, math.inf, -math.inf))
    if r.random() < 0.2:
        x[0] = 0
    options: dict[str, Any] = {}
    if form not in BLOCKS:
        options = {"scale": r.choice(("row", "head", "tensor")), "scale_dtype": r.choice(("float32", "float16"))}
        if options["scale"] == "row" and r.random() < 0.5:
            options["scale_rows"] = r.choice((2, 16, 128, 5000))
    wanted, wanted_scale = strobe.quantize(x, form, **options)
    got, scale = strobe.quantize(x.to(device), form, **options)
    name = f"seed {seed}: {form} of {tuple(shape)} {dtype} {options}"
    if not torch.equal(got.cpu().view(torch.uint8), wanted.view(torch.uint8)):
        return f"{name}: other codes than the CPU's"
    if wanted_scale is not None and not torch.equal(scale.cpu().nan_to_num(-1), wanted_scale.nan_to_num(-1)):
        return f"{name}: other scales than the CPU's"
    back_form = form if form in BLOCKS else None
    back = strobe.dequantize(got, scale, form=back_form, dtype=str(dtype).removeprefix("torch."))
    there = strobe.dequantize(wanted, wanted_scale, form=back_form, dtype=str(dtype).removeprefix("torch."))
    if not torch.equal(back.cpu().nan_to_num(-1), there.nan_to_num(-1)):
        return f"{name}: dequantize gives other values than the CPU's"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--graph", type=int, default=0, help="captured launches, in place of single ones")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--form", default="", choices=("", *FORMS), help="of all caches; else drawn")
    parser.add_argument("--dtype", default="", choices=("", "bf16", "fp16"), help="of all queries; else drawn")
    parser.add_argument("--seconds", type=float, default=0, help="at most; 0: no limit")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu quantised: skipped (no GPU)")
        return 0
    begin, failures, done = time.monotonic(), 0, 0
    count = args.graph or args.count
    for seed in range(args.first, args.first + count):
        runs = [run_graph] if args.graph else [run_case, run_quantise]
        for run in runs:
            text = run(seed, args.device, args.form, args.dtype)
            if text:
                failures += 1
                print(text, flush=True)
        done += 1
        if failures > 5 or (args.seconds and time.monotonic() - begin > args.seconds):
            break
    print(f"gpu quantised: {done} {'graphs' if args.graph else 'problems'}, {failures} failures", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
