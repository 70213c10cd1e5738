"""What a loss was computed from is freed with it: a step keeps nothing for the next."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from klamp.kernels import policy_loss, token_stats, token_stats_from_logits


def _statistics(hidden: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
    stats = token_stats(hidden, head, tokens, ref_hidden=torch.zeros_like(hidden))
    assert stats.kl is not None
    return stats.logp.sum() + stats.kl.sum() + stats.entropy.sum()


def _from_logits(hidden: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
    stats = token_stats_from_logits(hidden @ head.T, tokens, ref_logits=torch.zeros(*hidden.shape[:-1], len(head)))
    assert stats.kl is not None
    return stats.logp.sum() + stats.kl.sum() + stats.entropy.sum()


def _loss(hidden: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
    return policy_loss(
        hidden, head, tokens, torch.ones(tokens.shape), beta=0.1, ref_hidden=torch.zeros_like(hidden)
    ).loss


class _Mark:
    def __call__(self, *_: Any) -> None:
        """Changes no gradient."""


def _marked(x: Tensor) -> weakref.ref[_Mark]:
    """Alive as long as the node that made ``x`` is, whoever holds it: Python cannot see into C++."""
    mark = _Mark()
    assert x.grad_fn is not None
    x.grad_fn.register_hook(mark)
    return weakref.ref(mark)


@pytest.mark.parametrize("backward", [True, False], ids=["after backward", "never backward"])
@pytest.mark.parametrize("function", [_statistics, _from_logits, _loss])
def test_hidden_states_are_freed_with_the_loss(function: Any, backward: bool) -> None:
    weights = torch.randn(5, 4, requires_grad=True)
    hidden = torch.randn(3, 5) @ weights  # inside a graph, as a model's states are
    node = _marked(hidden)
    loss = function(hidden, torch.randn(7, 4), torch.zeros(3, dtype=torch.long))
    if backward:
        loss.backward()
    del loss, hidden
    assert node() is None
