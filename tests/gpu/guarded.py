"""Cases on the GPU between red zones, held against float64: what run_gpu_tests.py's tests are made of. The pass rule is
in its header."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable

import strobe_torch as st
import torch
from device import DEV, synchronize
from spacing import Spacing, place
from strobe_torch import Backward, Case, Forward

_end = math.inf  # time.monotonic() when tests have to stop


def stop_after(seconds: float) -> None:
    global _end
    _end = time.monotonic() + seconds


def seconds_left() -> float:
    return _end - time.monotonic()


def out_of_time() -> bool:
    return seconds_left() < 0


POISON = -6.0e4  # representable, after rounding, in all three types

# Where a problem's tensors stand, by their names.
Spacings = Callable[[str], Spacing]


def alike(_: str) -> Spacing:
    """All as the allocator gives them."""
    return Spacing()


class Guarded:
    """A tensor between red zones, all poisoned."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, spacing: Spacing = Spacing()):  # noqa: B008 - frozen
        self.storage, self.tensor = place(shape, dtype, spacing, POISON, DEV)

    def touched_outside(self) -> bool:
        copy = self.storage.clone()
        poison = torch.full((), POISON, dtype=copy.dtype, device=DEV)
        at = self.tensor
        torch.as_strided(copy, at.shape, at.stride(), at.storage_offset()).fill_(poison)
        return not bool((copy == poison).all())


def make_inputs(case: Case, seed: int, spacings: Spacings = alike, sigma: float = 1.0) -> dict[str, torch.Tensor]:
    g = torch.Generator(device=DEV).manual_seed(seed)

    def one(name: str) -> torch.Tensor:
        tensor = place(case.shape(name), case.dtype, spacings(name), math.nan, DEV)[1]
        fill_random(tensor, g, sigma)
        forget_past(case, name, tensor)
        return tensor

    return {name: one(name) for name in ("q", "k", "v")}


def fill_random(tensor: torch.Tensor, g: torch.Generator, sigma: float = 1.0) -> None:
    one = tensor[..., :1, :] if tensor.stride(-2) == 0 else tensor  # heads that are all one
    one.copy_(torch.randn(one.shape, generator=g, device=DEV) * sigma)


def forget_past(case: Case, name: str, tensor: torch.Tensor) -> None:
    """NaN in the rows that are no sequence's: nothing reads them."""
    past = case.past[0 if name in ("q", "dout") else 1]
    if past:
        tensor[-past:] = math.nan


def worst(x: torch.Tensor, ref: torch.Tensor) -> float:
    """Largest |x - ref| where ref is finite; inf where the special values differ."""
    x, ref = x.double(), ref.double()
    special = ~torch.isfinite(ref)
    same = (torch.isnan(ref) & torch.isnan(x)) | (x == ref)
    if bool((special & ~same).any()):
        return math.inf
    if x.numel() == 0:
        return 0.0
    difference = torch.where(special, 0, (x - ref).abs())
    return math.inf if bool(torch.isnan(difference).any()) else float(difference.max())


def check_close(
    name: str, x: torch.Tensor, ref: torch.Tensor, comparator: torch.Tensor, factor: float = 2.0,
    draws: Callable[[], list[torch.Tensor]] = list,
) -> float:  # fmt: skip
    """`draws`: more comparators, made where the one does not do."""
    got, allowed = worst(x, ref), worst(comparator, ref)
    if not got <= factor * allowed + 1e-5:
        allowed = max(allowed, *(worst(draw, ref) for draw in draws()), 0.0)
    if not math.isfinite(allowed):  # the comparator has no rule for NaN in V: be as strict as for finite data
        allowed = 0.02
    limit = factor * allowed + 1e-5
    if not got <= limit:
        d = (x.double() - ref.double()).abs()
        d = torch.where(torch.isnan(d), math.inf, d)
        at = int(d.flatten().argmax())
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), x.shape))
        raise AssertionError(
            f"{name}: error {got:.3g}, allowed {limit:.3g}; at {place} got "
            f"{float(x.flatten()[at]):.6g}, reference {float(ref.flatten()[at]):.6g}"
        )
    return got / limit if limit else 0.0


def run_case(case: Case, seed: int, spacings: Spacings = alike, sigma: float = 1.0,
             change: Callable[[dict[str, torch.Tensor]], None] | None = None, backward: bool = False) -> float:  # fmt: skip
    """One case against the reference: the worst error over what is allowed."""
    x = make_inputs(case, seed, spacings, sigma)
    if change:
        change(x)
    before = {name: tensor.clone() for name, tensor in x.items()}
    slopes = None
    if case.alibi:
        shape = (case.heads,) if case.alibi == 1 else (case.batch, case.heads)
        slopes = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(DEV) * 0.3
    keep = st.host_dropout_mask(case, seed, 5) if case.dropout_p > 0 else None
    out = Guarded(case.shape("out"), case.dtype, spacings("out"))
    lse = Guarded(case.lse_shape(), torch.float32)
    forward = Forward(case, **x, out=out.tensor, lse=lse.tensor, alibi_slopes=slopes, seed=seed, offset=5)
    forward.run()
    ref, ref_lse = st.full_reference(case, **x, slopes=slopes, keep=keep)
    other, other_lse = st.full_reference(case, **x, slopes=slopes, keep=keep, dtype=case.dtype)
    check_guards({"out": out, "lse": lse}, forward.workspace)

    def draws() -> list[torch.Tensor]:
        # Where one key has all the weight the comparator is exact by luck: that weight is 1. Relative to a reference that
        # is not the maximum it has a rounding error.
        g = torch.Generator(device=DEV).manual_seed(seed)
        drawn = [st.full_reference(case, **x, slopes=slopes, keep=keep, stored_weights=g)[0] for _ in range(4)]
        return [st.rounded_at_random(d, case.dtype, g) for d in drawn]

    ratio = check_close("out", out.tensor, ref, other, draws=draws)
    # lse is float32 whatever the inputs are: hold it to the input dtype's rule.
    check_close("lse", lse.tensor, ref_lse, other_lse)
    if backward:
        ratio = max(ratio, run_backward(case, x, out.tensor, lse.tensor, seed, spacings, slopes, keep))
    for name, tensor in x.items():
        if not torch.equal(tensor.nan_to_num(), before[name].nan_to_num()):
            raise AssertionError(f"{name}: an input has changed")
    return ratio


def run_backward(
    case: Case, x: dict[str, torch.Tensor], out: torch.Tensor, lse: torch.Tensor, seed: int, spacings: Spacings,
    slopes: torch.Tensor | None, keep: torch.Tensor | None,
) -> float:  # fmt: skip
    g = torch.Generator(device=DEV).manual_seed(seed + 1)
    dout = place(case.shape("out"), case.dtype, spacings("dout"), math.nan, DEV)[1]
    fill_random(dout, g)
    forget_past(case, "dout", dout)
    dlse = torch.randn(case.lse_shape(), generator=g, device=DEV) if case.has_dlse else None
    grads = {name: Guarded(case.shape(name), case.dtype, spacings(name)) for name in ("dq", "dk", "dv")}
    tensors = {**x, "out": out, "dout": dout, **{name: guarded.tensor for name, guarded in grads.items()}}
    launch = Backward(case, tensors, lse, dlse, slopes, seed=seed, offset=5)
    launch.run()
    refs = st.full_reference_backward(case, **x, dout=dout, dlse=dlse, slopes=slopes, keep=keep)
    others = st.full_reference_backward(
        case, **x, dout=dout, dlse=dlse, slopes=slopes, keep=keep, dtype=case.dtype
    )
    check_guards(grads, launch.workspace)
    factor = 8.0 if case.alibi else 3.0
    drawn: list[list[torch.Tensor]] = []

    def draws(index: int) -> list[torch.Tensor]:
        # On few keys the comparator may be exact by luck: with one, its weight is 1 and dS is 0 to the last bit. What
        # the interface stores in between has rounding errors that no implementation can do without; so have dS and the
        # results, in their dtype.
        if not drawn:
            exact_out, exact_lse = st.full_reference(case, **x, slopes=slopes, keep=keep)
            for _ in range(4):
                stored = (
                    st.rounded_at_random(exact_out, case.dtype, g),
                    st.rounded_at_random(exact_lse, torch.float32, g),
                )
                gradients = st.full_reference_backward(
                    case, **x, dout=dout, dlse=dlse, slopes=slopes, keep=keep, stored=stored, rounding=g
                )
                drawn.append([st.rounded_at_random(t, case.dtype, g) for t in gradients])
        return [draw[index] for draw in drawn]

    ratios = [
        check_close(name, guarded.tensor, ref, other, factor, functools.partial(draws, index))
        for index, ((name, guarded), ref, other) in enumerate(zip(grads.items(), refs, others, strict=True))
    ]
    if case.deterministic:
        for guarded in grads.values():
            guarded.tensor.fill_(POISON)
        again = {name: guarded.tensor.clone() for name, guarded in grads.items()}
        Backward(case, {**tensors, **again}, lse, dlse, slopes, seed=seed, offset=5).run()
        launch.run()
        for name, tensor in again.items():
            assert torch.equal(tensor, grads[name].tensor), f"{name}: other bits in a second run"
    return max(ratios)


def check_guards(outputs: dict[str, Guarded], workspace: st.Workspace) -> None:
    synchronize()
    for name, guarded in outputs.items():
        if guarded.touched_outside():
            raise AssertionError(f"{name}: wrote outside of the tensor")
    if workspace.touched_outside():
        raise AssertionError("wrote outside of the workspace")
