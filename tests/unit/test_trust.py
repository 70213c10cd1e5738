"""The gap between sampler and trainer, by enumeration of a small vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from klamp import trust
from klamp.errors import ConfigError


def two(seed: int, vocabulary: int = 7, gap: float = 0.7) -> tuple[Tensor, Tensor]:
    """Log-probs of a trainer and a sampler over a small vocabulary, [V] each, in float64."""
    generator = torch.Generator().manual_seed(seed)
    base, off = torch.randn(2, vocabulary, generator=generator, dtype=torch.float64)
    return base.log_softmax(-1), (base + gap * off).log_softmax(-1)


@pytest.mark.parametrize("seed", range(5))
def test_both_estimates_of_the_gap_are_its_kl(seed: int) -> None:
    """Over every token with the sampler's probability, the expectation of k1 and of k3 is KL(μ‖π)."""
    new, old = two(seed)
    each = [trust.gap(new[None, i : i + 1], old[None, i : i + 1]) for i in range(7)]
    truth = float((old.exp() * (old - new)).sum())
    for name in ("k1", "k3"):
        mean = sum(float(p) * float(getattr(g, name)) for p, g in zip(old.exp(), each, strict=True))
        assert mean == pytest.approx(truth, abs=1e-12)
    assert all(float(g.k3) >= 0 for g in each)
    whole = trust.gap(new[None], old[None])
    assert float(whole.largest) == pytest.approx(float((new - old).abs().max()))
    assert float(whole.absolute) == pytest.approx(float((new - old).abs().sum()))


def test_tokens_that_do_not_count_or_are_not_known_reach_nothing() -> None:
    new = torch.tensor([[-1.0, -2.0, math.nan, -1.0]])
    old = torch.tensor([[-1.5, math.nan, -1.0, -1.0]])
    keep = torch.tensor([[True, True, False, True]])
    found = trust.gap(new, old, keep)
    assert int(found.tokens) == 2
    assert float(found.largest) == 0.5
    w = trust.weights(new, old, keep)
    assert torch.allclose(w, torch.tensor([[math.exp(0.5), 1.0, 1.0, 1.0]]))
    assert trust.mask(new, old, keep, limit=1.2).tolist() == [[False, True, False, True]]


@pytest.mark.parametrize("seed", range(5))
def test_weights_turn_the_samplers_mean_into_the_trainers(seed: int) -> None:
    new, old = two(seed)
    f = torch.arange(7, dtype=torch.float64)
    w = trust.weights(new[None], old[None])[0]
    assert float((old.exp() * w * f).sum()) == pytest.approx(float((new.exp() * f).sum()), abs=1e-12)
    assert float((old.exp() * trust.truncate(w[None], 1.1)[0]).sum()) < 1.0


def test_a_sequences_weight_is_the_product_of_its_tokens() -> None:
    w = torch.tensor([[1.2, 1.5, 9.0], [0.5, 0.5, 1.0]])
    keep = torch.tensor([[True, True, False], [True, True, True]])
    assert torch.allclose(trust.truncate(w, 10.0, per="sequence", keep=keep)[0], torch.full((3,), 1.8))
    assert torch.allclose(trust.truncate(w, 1.5, per="sequence", keep=keep)[0], torch.full((3,), 1.5))
    assert torch.allclose(trust.truncate(w, 1.5, per="sequence", keep=keep)[1], torch.full((3,), 0.25))
    assert torch.allclose(trust.truncate(w, 1.4, keep=keep), torch.tensor([[1.2, 1.4, 1.0], [0.5, 0.5, 1.0]]))


def binary_kl(p: float, q: float) -> float:
    """KL of {q, 1-q} from {p, 1-p} by its definition."""
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


@given(p=st.floats(1e-6, 1 - 1e-6), q=st.floats(1e-6, 1 - 1e-6))
def test_masks_are_their_divergences(p: float, q: float) -> None:
    """A token stays for a limit just above its divergence and goes for one just below."""
    new, old = (torch.tensor([[math.log(x)]], dtype=torch.float64) for x in (p, q))
    for kind, value in (("tv", abs(p - q)), ("kl", binary_kl(p, q)), ("ratio", max(p / q, q / p))):
        if value < (1 + 1e-6 if kind == "ratio" else 1e-9):
            continue
        assert trust.mask(new, old, kind=kind, limit=value * (1 + 1e-6)).all()  # type: ignore[arg-type]
        less = value * (1 - 1e-6)
        if kind != "ratio" or less > 1:
            assert not trust.mask(new, old, kind=kind, limit=less).any()  # type: ignore[arg-type]


def test_certain_tokens_have_a_divergence_too() -> None:
    sure, half = torch.tensor([[0.0]]), torch.tensor([[math.log(0.5)]])
    assert trust.mask(sure, sure, kind="kl", limit=1e-6).all()
    assert not trust.mask(sure, half, kind="kl", limit=100.0).any()  # the trainer rules out half of what was drawn
    assert trust.mask(half, sure, kind="kl", limit=math.log(2) + 1e-6).all()
    assert not trust.mask(half, sure, kind="kl", limit=math.log(2) - 1e-6).any()


def test_one_side_leaves_out_only_what_widens_the_gap() -> None:
    new, old = torch.log(torch.tensor([[0.9, 0.9, 0.1, 0.1]])), torch.log(torch.tensor([[0.5, 0.5, 0.5, 0.5]]))
    up_down = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    stays = trust.mask(new, old, kind="tv", limit=0.2, side="away", advantages=up_down)
    assert stays.tolist() == [[False, True, True, False]]
    with pytest.raises(ConfigError, match="advantages"):
        trust.mask(new, old, kind="tv", limit=0.2, side="away")


def test_replay_is_the_distribution_that_was_drawn_from() -> None:
    logits = torch.randn(3, 9, dtype=torch.float64, requires_grad=True)
    kept = torch.zeros(3, 9, dtype=torch.bool)
    kept[:, :4] = True
    logp = trust.replay(logits, kept)
    assert torch.allclose(logp.exp().sum(-1), torch.ones(3, dtype=torch.float64), atol=1e-12)
    assert torch.isinf(logp[:, 4:]).all()
    assert torch.allclose(logp[:, :4], logits[:, :4].log_softmax(-1), atol=1e-12)
    (grad,) = torch.autograd.grad(logp[:, 0].sum(), logits)
    assert torch.isfinite(grad).all()
    assert (grad[:, 4:] == 0).all()
    with pytest.raises(ConfigError, match="without any token"):
        trust.replay(logits, torch.zeros_like(kept))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x: trust.mask(x, x, kind="hellinger", limit=1.0), "kind"),  # type: ignore[arg-type]
        (lambda x: trust.mask(x, x, kind="ratio", limit=1.0), "limit"),
        (lambda x: trust.mask(x, x, limit=2.0, side="left"), "side"),  # type: ignore[arg-type]
        (lambda x: trust.truncate(x, 0.0), "limit"),
        (lambda x: trust.truncate(x, per="batch"), "per"),  # type: ignore[arg-type]
        (lambda x: trust.gap(x, x[:, :1]), "same shape"),
    ],
)
def test_what_cannot_be_meant_is_refused(call: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        call(torch.full((1, 2), -1.0))  # type: ignore[operator]
