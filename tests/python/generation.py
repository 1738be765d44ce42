"""Tokens that a transformers model has generated, against eager attention."""

from __future__ import annotations

from typing import Any

import torch

from tensors import Tensor


def check_generated(
    exact: Any, plain: Any, prompt: list[int], tokens: list[int], scores: Tensor | None = None
) -> None:
    """Each token has the largest score, or one that rounding may put in its place.

    Args:
        exact: the model with eager attention, in float64.
        plain: the same in the dtype of the model that has generated.
        prompt: without padding.
        tokens: what followed it.
        scores: (tokens, vocabulary), by which they were chosen.
    """
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        wanted, near = (
            model(input_ids=ids.to(model.device), use_cache=False).logits[0].double().cpu()
            for model in (exact, plain)
        )
    steps = slice(len(prompt) - 1, -1)
    allowed = 3 * (near - wanted)[steps].abs().max() + 1e-5
    wanted = wanted[steps]
    missing = wanted.max(1).values - wanted[range(len(tokens)), tokens]
    assert missing.max() <= 2 * allowed, f"a token of {tokens} is {missing.max()} below the best"
    if scores is not None:
        error = (scores.double().cpu() - wanted).abs().max()
        assert error <= allowed, f"scores are off by {error}, expected at most {allowed}"
