"""Dropout in compiled functions whose backward pass computes parts of the forward pass again: its
gradients belong to the weights that the forward pass dropped, and each call drops its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import strobe

torch = pytest.importorskip("torch")

from torch.nn.functional import scaled_dot_product_attention  # noqa: E402
from torch.utils import checkpoint as checkpoints  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import strobe.torch  # noqa: E402
from strobe import _operators as operators  # noqa: E402
from strobe.flash_attn import flash_attn_func  # noqa: E402

from tensors import Tensor  # noqa: E402

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
pytestmark = pytest.mark.skipif(
    VERSION < (2, 6), reason="has no rules for how an operator is traced, or no memory budget"
)

P = 0.5
BUDGETS = (1.0, 0.5, 0.2, 0.0)
CALLS = 2  # of attention, on the same arguments
PARTITIONED = "aot_eager_decomp_partition"  # as inductor divides a graph, without its compiler


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> None:
    torch._dynamo.reset()


def memory_budget(budget: float) -> Any:
    """How much of what it might save the partitioner may: 1 for all, 0 for nothing but inputs."""
    return torch._functorch.config.patch(activation_memory_budget=budget)


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_func(q, k, v, P)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(query, key, value, dropout_p=P).transpose(1, 2)


def plain(keep: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention that keeps these weights, of tensors (batch, seqlen, heads, head_dim)."""
    weights = torch.softmax(torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5, -1)
    return torch.einsum("bhij,bjhd->bihd", weights * keep / (1 - P), v)


def function(attentions: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Something around them that is worth computing again."""
    q, k, v = q.sin(), k.sin(), v.sin()
    parts = [(attend(q, k, v).sin() * 2).cos() * (n + 1) for n, attend in enumerate(attentions)]
    return sum(parts)


def seeded(run: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Of the generator in one state: out, and the gradients, by backward(), as reentrant
    checkpoints know no other way.
    """
    torch.manual_seed(7)
    with strobe.torch.sdpa_kernel():
        out = run(*leaves)
    out.square().sum().backward()
    found = [out.detach(), *(x.grad for x in leaves)]
    for x in leaves:
        x.grad = None
    return found


def wanted(leaves: list[Tensor]) -> list[Tensor]:
    """In plain operations, of the weights that the generator in that state keeps."""
    batch, seqlen, heads, _ = leaves[0].shape
    torch.manual_seed(7)
    attentions = []
    for _ in range(CALLS):
        seed, offset = operators.seed_and_offset(
            operators.dropout_state(device=torch.device("cpu"))
        )
        keep = strobe.dropout_mask(
            batch, heads, seqlen, seqlen, dropout_p=P, dropout_seed=seed, dropout_offset=offset
        )
        attentions.append(partial(plain, torch.from_numpy(keep)))
    return seeded(partial(function, attentions), leaves)


def check(run: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(2, 9, 2, 16, requires_grad=True) for _ in range(3)]
    for name, a, b in zip(
        ("out", "dq", "dk", "dv"), seeded(run, leaves), wanted(leaves), strict=True
    ):
        torch.testing.assert_close(
            a, b, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("attend", [flash, sdpa])
@pytest.mark.parametrize("budget", BUDGETS)
def test_partitioner(budget: float, attend: Any) -> None:
    run = partial(function, [attend] * CALLS)
    with memory_budget(budget):
        check(torch.compile(run, backend=PARTITIONED, fullgraph=True))


def test_partitioner_of_inductor() -> None:
    with memory_budget(0.2):
        check(torch.compile(partial(function, [flash] * CALLS), fullgraph=True))


@pytest.mark.parametrize("attend", [flash, sdpa])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", PARTITIONED])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool, backend: str, attend: Any) -> None:
    run = partial(function, [attend] * CALLS)

    def again(*leaves: Tensor) -> Tensor:
        out: Tensor = checkpoint(run, *leaves, use_reentrant=reentrant)
        return out

    check(again if backend == "eager" else torch.compile(again, backend=backend, fullgraph=True))


@pytest.mark.parametrize("budget", [None, *BUDGETS])
@pytest.mark.parametrize(
    "policy",
    ["draw alone", "attention alone", "PREFER_SAVE", "PREFER_RECOMPUTE", "MUST_RECOMPUTE"],
)
def test_selective_checkpoint(policy: str, budget: float | None) -> None:
    """budget: None for eager mode."""
    policies = checkpoints.CheckpointPolicy
    saved = {
        "draw alone": operators.dropout_state,
        "attention alone": operators.attention_forward,
    }.get(policy)
    if policy == "attention alone" and budget not in (None, 1.0, 0.0):
        pytest.skip("PyTorch's partitioner cannot save an operator of several results there")

    def choose(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        if saved is None:
            return policies[policy]
        return policies.MUST_SAVE if operator is saved else policies.PREFER_RECOMPUTE

    contexts = partial(checkpoints.create_selective_checkpoint_contexts, choose)
    run = partial(function, [flash] * CALLS)

    def again(*leaves: Tensor) -> Tensor:
        out: Tensor = checkpoint(run, *leaves, use_reentrant=False, context_fn=contexts)
        return out

    if budget is None:
        check(again)
    else:
        with memory_budget(budget):
            check(torch.compile(again, backend=PARTITIONED, fullgraph=True))


@pytest.mark.parametrize("attend", [flash, sdpa])
@pytest.mark.parametrize("backend", ["aot_eager", PARTITIONED, "inductor"])
def test_calls_alike_drop_weights_of_their_own(backend: str, attend: Any) -> None:
    """A compiler that joins calls with the same arguments must not join their draws."""
    compiled = torch.compile(
        lambda q: torch.stack([attend(q, q, q) for _ in range(3)]), backend=backend, fullgraph=True
    )
    for grad in (False, True):
        with strobe.torch.sdpa_kernel():
            a, b, c = compiled(torch.randn(1, 16, 2, 16, requires_grad=grad))
        assert not torch.equal(a, b)
        assert not torch.equal(b, c)
        assert not torch.equal(a, c)
