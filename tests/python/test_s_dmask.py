"""S_dmask is read as programs read that of flash_attn: its shape, its blocks, its signs."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

import strobe

torch = pytest.importorskip("torch")

from strobe import _s_dmask  # noqa: E402
from strobe.flash_attn import flash_attn_func, flash_attn_varlen_func  # noqa: E402

from tensors import Tensor  # noqa: E402

P = 0.3

# head_dim: with dropout; without and causal; without. As flash_attn's kernels for 8.0 and 9.0 have
# it, then for 8.6 and 8.9.
WIDTHS = {
    32: ((128, 128, 128), (128, 128, 128)),
    33: ((64, 128, 128), (64, 128, 128)),
    64: ((64, 128, 128), (64, 128, 128)),
    96: ((64, 64, 64), (64, 64, 64)),
    128: ((32, 64, 64), (32, 64, 32)),
    160: ((64, 64, 64), (64, 64, 64)),
    192: ((64, 64, 64), (64, 64, 64)),
    256: ((64, 64, 64), (64, 64, 64)),
}


def width_with_dropout(head_dim: int) -> int:
    """Keys that flash_attn's kernels for compute capability 8.0, and so a CPU, take at a time."""
    return next(wide[0][0] for most, wide in WIDTHS.items() if head_dim <= most)


def read(
    s: Tensor, q: Tensor, k: Tensor, bias: Tensor | None, window: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Probabilities and what was kept of one sequence, the usual way, in float64.

    s: (heads, rounded seqlen_q, rounded seqlen_k); bias: (heads, seqlen_q, seqlen_k).
    """
    (seqlen_q, heads, head_dim), seqlen_k = q.shape, k.shape[0]
    s = s[:, :seqlen_q, :seqlen_k]
    keys = k.double().repeat_interleave(heads // k.shape[1], 1)
    score = torch.einsum("qhd,khd->hqk", q.double(), keys) / head_dim**0.5
    if bias is not None:
        score = score + bias
    row = torch.arange(seqlen_q, device=q.device)[:, None] + seqlen_k - seqlen_q
    column = torch.arange(seqlen_k, device=q.device)
    hidden = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device)
    if window[0] >= 0:
        hidden |= column < row - window[0]
    if window[1] >= 0:
        hidden |= column > row + window[1]
    score = score.masked_fill(hidden, -torch.inf)
    s = s.masked_fill(hidden, 0.0)

    lse = score.logsumexp(-1).nan_to_num(neginf=torch.inf)
    probability = torch.zeros_like(score)
    block = width_with_dropout(head_dim)
    for start in range(0, seqlen_k, block):
        maximum = score[..., start:].amax(-1)
        found = s[..., start : start + block].double().abs()
        probability[..., start : start + block] = found * torch.exp(maximum - lse)[..., None]
    return probability, ~torch.signbit(s)


def distances(seqlen_q: int, seqlen_k: int) -> Tensor:
    row = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    return (row - torch.arange(seqlen_k)).abs()


def check(
    s: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, bias: Any, window: tuple[int, int]
) -> Tensor:
    """Compares with softmax and rebuilds `out`; returns what was kept."""
    probability, kept = read(s, q, k, bias, window)
    torch.testing.assert_close(
        probability.sum(-1),
        (probability.sum(-1) > 0.5).double(),  # 0 for rows that see no key
        rtol=1e-5,
        atol=1e-5,
    )
    values = v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)
    rebuilt = torch.einsum("hqk,khd->qhd", probability * kept / (1 - P), values)
    torch.testing.assert_close(out.double(), rebuilt, rtol=1e-4, atol=1e-5)
    return kept


# Lengths in more than one block of each width, and at their edges; 257 keys end a block of one.
@pytest.mark.parametrize(
    ("lengths", "head_dim", "causal", "window", "alibi"),
    [
        ((97, 97), 32, False, (-1, -1), False),
        ((128, 128), 64, True, (-1, -1), False),
        ((50, 257), 40, True, (-1, -1), True),
        ((200, 129), 96, True, (-1, -1), False),  # rows that see no key
        ((65, 190), 128, False, (20, 9), False),
        ((33, 70), 160, False, (-1, -1), True),
        ((40, 130), 256, True, (15, -1), False),
    ],
)
def test_read_the_usual_way(
    lengths: tuple[int, int], head_dim: int, causal: bool, window: tuple[int, int], alibi: bool
) -> None:
    torch.manual_seed(0)
    seqlen_q, seqlen_k = lengths
    q = 3 * torch.randn(2, seqlen_q, 4, head_dim)  # scores far apart: blocks with other maxima
    k, v = torch.randn(2, 2, seqlen_k, 2, head_dim)
    slopes = torch.rand(2, 4) if alibi else None
    out, _, s = flash_attn_func(
        q, k, v, P, None, causal, window, alibi_slopes=slopes, return_attn_probs=True
    )
    rounded = [-(-n // 128) * 128 for n in lengths]
    assert (s.shape, s.dtype) == ((2, 4, *rounded), q.dtype)
    assert not s[:, :, seqlen_q:].any()
    assert not s[..., seqlen_k:].any()
    assert s.abs().max() == 1  # each row's maximum, in its own block and those before it
    seen = (window[0], 0) if causal else window
    dropped = 0.0
    for b in range(2):
        bias = None if slopes is None else -slopes[b, :, None, None] * distances(*lengths)
        kept = check(s[b], q[b], k[b], v[b], out[b], bias, seen)
        dropped += 1 - kept.float().mean().item()
    if not causal and max(window) < 0:  # else some weights are hidden, which counts as kept
        assert dropped / 2 == pytest.approx(P, abs=0.02)


def test_small_weights_of_later_blocks_are_not_lost() -> None:
    """exp(score - lse) of the last block is 0 here; S_dmask holds it against its own maximum."""
    q, k = torch.ones(1, 1, 1, 64), torch.zeros(1, 128, 1, 64)
    k[:, :64] = 60.0  # scores 480 and 0
    s = flash_attn_func(q, k, k, P, return_attn_probs=True)[2]
    assert (s[0, 0, 0].abs() == 1).all()


def test_packed_sequences() -> None:
    torch.manual_seed(0)
    starts_q, starts_k = [0, 9, 9, 150], [0, 140, 150, 220]
    q, k, v = torch.randn(150, 4, 64), torch.randn(220, 2, 64), torch.randn(220, 2, 64)
    slopes = torch.rand(3, 4)
    out, lse, s = flash_attn_varlen_func(
        q,
        k,
        v,
        torch.tensor(starts_q, dtype=torch.int32),
        torch.tensor(starts_k, dtype=torch.int32),
        141,
        140,
        P,
        alibi_slopes=slopes,
        return_attn_probs=True,
    )
    assert lse.shape == (4, 150)
    assert s.shape == (3, 4, 256, 256)
    for b in range(3):
        rows = slice(starts_q[b], starts_q[b + 1])
        keys = slice(starts_k[b], starts_k[b + 1])
        lengths = (rows.stop - rows.start, keys.stop - keys.start)
        assert not s[b, :, lengths[0] :].any()
        assert not s[b, :, :, lengths[1] :].any()
        bias = -slopes[b, :, None, None] * distances(*lengths)
        check(s[b], q[rows], k[keys], v[keys], out[rows], bias, (-1, -1))


def test_without_dropout_it_is_empty() -> None:
    x = torch.randn(1, 9, 2, 16)
    assert flash_attn_func(x, x, x, return_attn_probs=True)[2].shape == (0,)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)])
def test_no_keys_or_queries(lengths: tuple[int, int]) -> None:
    q, k = torch.randn(1, lengths[0], 2, 16), torch.randn(1, lengths[1], 2, 16)
    s = flash_attn_func(q, k, k, P, return_attn_probs=True)[2]
    assert s.shape == (1, 2, 128 * (lengths[0] > 0), 128 * (lengths[1] > 0))
    assert not s.any()


@pytest.mark.parametrize("head_dim", WIDTHS)
def test_widths_of_blocks(head_dim: int) -> None:
    cases = ((True, False), (False, True), (False, False))
    large, small = WIDTHS[head_dim]
    assert tuple(_s_dmask.block_size_n("cpu", head_dim, *case) for case in cases) == large
    for capability, wanted in (((8, 0), large), ((9, 0), large), ((8, 6), small), ((8, 9), small)):
        with (
            mock.patch("torch.cuda.is_available", return_value=True),
            mock.patch("torch.cuda.get_device_capability", return_value=capability),
        ):
            found = tuple(_s_dmask.block_size_n("cuda:0", head_dim, *case) for case in cases)
            assert found == wanted


@pytest.mark.parametrize("head_dim", [0, 257])
def test_widths_of_blocks_that_are_not_there(head_dim: int) -> None:
    with pytest.raises(strobe.InvalidArgument, match=f"head_dim = {head_dim}"):
        _s_dmask.block_size_n("cpu", head_dim, True, False)
