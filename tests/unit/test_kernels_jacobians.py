"""A frozen head: the forward pass of token_stats has the gradient of any loss ready, and it is autograd's."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from klamp import kernels
from klamp.errors import ConfigError
from klamp.kernels import autograd, eager
from written_out import SCALINGS, close, problem, written_out

NAMES = [c for k in (1, 2, 3) for c in itertools.combinations(("logp", "kl", "entropy"), k)]


def frozen(p: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v if k == "hidden" else v.detach() for k, v in p.items()}


def ask(p: dict[str, Tensor], **options: Any) -> kernels.TokenStats:
    names = ("ref_hidden", "ref_head", "bias", "ref_bias")
    return kernels.token_stats(p["hidden"], p["head"], p["tokens"], **{k: p[k] for k in names}, **options)


def loss_of(s: kernels.TokenStats, names: tuple[str, ...], weights: Tensor) -> Tensor:
    """A loss that is linear in nothing and uses ``names`` alone."""
    terms = {"logp": lambda: s.logp.exp() * weights, "kl": lambda: s.kl**2 + s.kl, "entropy": lambda: s.entropy**2}  # type: ignore[operator]
    return torch.stack([terms[name]().sum() for name in names]).prod()


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the products with a head that are taken, in either direction."""
    seen: list[tuple[int, ...]] = []
    plain, mm = autograd.logits, torch.mm

    def logits(side: Any, hidden: Tensor, out: Tensor) -> Tensor:
        seen.append(tuple(out.shape))
        return plain(side, hidden, out)

    def counted(a: Tensor, b: Tensor, **named: Any) -> Tensor:
        if a.shape[1] == b.shape[0] and b.shape[0] > b.shape[1]:  # [rows, V] with [V, H]
            seen.append((a.shape[0], b.shape[1]))
        return mm(a, b, **named)

    monkeypatch.setattr("klamp.kernels.jacobians.logits", logits)
    monkeypatch.setattr(autograd, "logits", logits)
    monkeypatch.setattr(torch, "mm", counted)
    return seen


@pytest.mark.parametrize("options", SCALINGS)
@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_any_loss_has_autograds_gradient(
    options: dict[str, float], names: tuple[str, ...], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = frozen(problem(h_ref=3))
    monkeypatch.setattr(eager, "BUDGET", 4 * 7 * chunk)
    (truth,) = torch.autograd.grad(loss_of(written_out(p, **options), names, p["weights"]), p["hidden"])
    for prepared in (names, ("logp", "kl")):  # named, or by default; a statistic that is not there is computed again
        stats = ask(p, **options, gradient_of=prepared)
        (mine,) = torch.autograd.grad(loss_of(stats, names, p["weights"]), p["hidden"])
        close(mine, truth)
    for a, b in zip(stats, written_out(p, **options), strict=True):
        close(a, b)


def test_gradcheck() -> None:
    p = frozen(problem(3, 3, 5))

    def f(hidden: Tensor) -> tuple[Tensor, ...]:
        s = ask({**p, "hidden": hidden}, gradient_of=("logp", "kl", "entropy"))
        assert s.kl is not None
        return s.logp, s.kl, s.entropy

    assert torch.autograd.gradcheck(f, (p["hidden"],))


def test_four_products_in_place_of_five(products: list[tuple[int, ...]]) -> None:
    p = frozen(problem(5, 4, 7))
    s = ask(p)
    assert s.kl is not None
    forward = len(products)
    (s.logp * p["advantages"] + 0.1 * s.kl).sum().backward()
    assert products == [(5, 7), (5, 7), (10, 4)], "policy, reference, and the vectors of both in one"
    assert len(products) == forward, "the backward pass takes none"


def test_named_alone_logp_takes_no_product_for_kl(products: list[tuple[int, ...]]) -> None:
    p = frozen(problem(5, 4, 7))
    ask(p, gradient_of=("logp",)).logp.sum().backward()
    assert products == [(5, 7), (5, 7), (5, 4)]


def test_nothing_is_prepared_where_nothing_is_to_be_differentiated(products: list[tuple[int, ...]]) -> None:
    p = frozen(problem(5, 4, 7))
    with torch.no_grad():
        ask(p)
    ask({**p, "hidden": p["hidden"].detach()})
    assert products == 2 * [(5, 7), (5, 7)]


def test_without_a_reference_and_with_its_log_probs() -> None:
    p = frozen(problem())
    for given in ({}, {"ref_logp": p["old_logp"]}):
        s = kernels.token_stats(p["hidden"], p["head"], p["tokens"], bias=p["bias"], **given)
        (mine,) = torch.autograd.grad((s.logp * p["advantages"]).sum(), p["hidden"])
        truth = written_out(p)
        (right,) = torch.autograd.grad((truth.logp * p["advantages"]).sum(), p["hidden"])
        close(mine, right)


def test_masked_rows_are_neither_read_nor_moved() -> None:
    p = frozen(problem())
    mask = torch.tensor([True, False, True, True, False])
    bad = p["hidden"].detach().clone()
    bad[~mask] = torch.nan
    spoiled = {**p, "hidden": bad.requires_grad_(), "tokens": torch.where(mask, p["tokens"], -100)}
    mine = ask(spoiled, mask=mask)
    assert mine.kl is not None
    (mine.logp.sum() + mine.kl.sum()).backward()
    truth = written_out(p)
    assert truth.kl is not None
    (right,) = torch.autograd.grad((truth.logp + truth.kl)[mask].sum(), p["hidden"])
    assert bad.grad is not None
    close(bad.grad, right)
    assert bool((bad.grad[~mask] == 0).all())


def test_backward_as_often_as_one_likes_and_to_the_bit() -> None:
    p = frozen(problem(dtype=torch.float32))
    s = ask(p)
    assert s.kl is not None
    loss = (s.logp * p["advantages"] + s.kl).sum()
    (one,) = torch.autograd.grad(loss, p["hidden"], retain_graph=True)
    (two,) = torch.autograd.grad(loss, p["hidden"])
    again = ask(p)
    assert again.kl is not None
    (three,) = torch.autograd.grad((again.logp * p["advantages"] + again.kl).sum(), p["hidden"])
    assert torch.equal(one, two)
    assert torch.equal(one, three)


def test_a_head_that_trains_is_computed_again() -> None:
    p = problem()
    with mock.patch("klamp.kernels.jacobians.OnePass.apply", side_effect=AssertionError):
        ask(p).logp.sum().backward()
    assert p["head"].grad is not None


def test_a_name_that_is_no_statistic() -> None:
    with pytest.raises(ConfigError, match="gradient_of"):
        ask(frozen(problem()), gradient_of=("logprob",))
