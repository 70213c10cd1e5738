"""KlampGRPOTrainer: stock TRL when set to TRL's estimator, the exact KL and its true gradient otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from klamp import ConfigError, Hold
from klamp.integrations.trl import KlampGRPOTrainer, KLControl
from klamp.integrations.trl.tokens import counted, text_of

pytestmark = pytest.mark.slow

Make = Callable[..., Any]
TRL_OWN = {"trainer_class": KlampGRPOTrainer, "trainer_kwargs": {"estimator": "weighted_k3", "placement": "in_loss"}}
# One of each way to reduce in the fast set, the others with the slow ones.
LOSSES = ["dapo", "grpo", "dr_grpo", *(pytest.param(x, marks=pytest.mark.slow) for x in ("bnpo", "luspo"))]
LOSSES += [pytest.param(x, marks=pytest.mark.slow) for x in ("cispo", "sapo", "vespo")]


def run(t: Any) -> dict[str, Any]:
    t.train()
    rows = [row for row in t.state.log_history if "loss" in row]
    figures = {k: [row[k] for row in rows if k in row] for k in ("loss", "grad_norm", "kl", "entropy", "reward")}
    return figures | {"weights": torch.cat([p.detach().flatten() for p in t.model.parameters() if p.requires_grad])}


@pytest.mark.parametrize("loss_type", LOSSES)
def test_equal_to_stock_with_its_own_estimator(trainer: Make, loss_type: str) -> None:
    """Two micro-batches a step and two passes over each batch: accumulation and ratios other than 1 are in it."""
    settings = {"loss_type": loss_type, "learning_rate": 1e-2, "max_steps": 4, "num_iterations": 2, "beta": 0.3}
    settings |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    stock, own = run(trainer(**settings)), run(trainer(**settings, **TRL_OWN))
    assert stock["reward"] == own["reward"]  # the same tokens were sampled all along
    assert stock["kl"][-1] > 1e-3
    for key in ("loss", "grad_norm", "kl"):
        # One sum over tokens became two: float32 rounding of a loss of order 1.
        assert own[key] == pytest.approx(stock[key], rel=1e-4, abs=2e-6), key
    # Adam divides by the gradient's own size, so rounding of a tiny gradient moves a weight by a share of the rate.
    torch.testing.assert_close(own["weights"], stock["weights"], rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("settings", [{}, {"lora": False, "learning_rate": 2e-3}], ids=["lora", "full"])
def test_equal_to_stock_without_accumulation(trainer: Make, settings: dict[str, Any]) -> None:
    stock, own = run(trainer(**settings)), run(trainer(**settings, **TRL_OWN))
    assert own["loss"] == pytest.approx(stock["loss"], abs=1e-6)
    assert own["kl"] == pytest.approx(stock["kl"], rel=1e-4, abs=1e-7)
    torch.testing.assert_close(own["weights"], stock["weights"], rtol=1e-3, atol=2e-4)


def moved(trainer: Make, **settings: Any) -> tuple[Any, Any]:
    """A trainer two steps away from its reference, and its last micro-batch."""
    t = trainer(max_steps=2, trainer_class=KlampGRPOTrainer, beta=0.3, **settings)
    t.train()
    t.current_gradient_accumulation_steps = 1
    return t, t._buffered_inputs[-1]


def gradient(t: Any, loss: torch.Tensor) -> torch.Tensor:
    params = [p for p in t.model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, params, allow_unused=True)
    return torch.cat(
        [torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in zip(params, grads, strict=True)]
    )


def kl_gradient(t: Any, batch: Any) -> torch.Tensor:
    """What the KL term adds to the gradient of the loss."""
    priced = gradient(t, t._compute_loss(t.model, batch))
    beta, t.beta = t.beta, 0.0
    free = gradient(t, t._compute_loss(t.model, batch))
    t.beta = beta
    return priced - free


def whole_logits(t: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, T] exact KL and log-prob of the tokens, from the model's own logits; the formula itself."""
    n = batch["completion_ids"].size(1)
    logp = (t.model(**text_of(batch)).logits[:, -n - 1 : -1] / t.temperature).log_softmax(-1)
    with torch.no_grad():
        if t.ref_model is None:
            with t.model.disable_adapter():
                logits = t.model(**text_of(batch)).logits
        else:
            logits = t.ref_model(**text_of(batch)).logits
        ref = (logits[:, -n - 1 : -1] / t.temperature).log_softmax(-1)
    return (logp.exp() * (logp - ref)).sum(-1), logp.gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_exact_in_the_loss_descends_the_kl_of_each_token(trainer: Make, lora: bool) -> None:
    kwargs = {"estimator": "exact", "placement": "in_loss"}
    t, batch = moved(trainer, lora=lora, learning_rate=1e-2, temperature=0.9, trainer_kwargs=kwargs)
    kl, _ = whole_logits(t, batch)
    mask = counted(batch)
    expected = gradient(t, 0.3 * (kl * mask).sum() / mask.sum())
    torch.testing.assert_close(
        kl_gradient(t, batch), expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()) + 1e-7
    )


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_sequence_exact_adds_the_kl_still_to_come(trainer: Make, lora: bool) -> None:
    t, batch = moved(trainer, lora=lora, learning_rate=1e-2, trainer_kwargs={"baseline": None})
    kl, logp = whole_logits(t, batch)
    mask = counted(batch).float()
    counts = (kl * mask).detach()
    to_come = counts.flip(-1).cumsum(-1).flip(-1) - counts
    expected = gradient(t, 0.3 * ((kl + logp * to_come) * mask).sum() / mask.sum())
    local = gradient(t, 0.3 * (whole_logits(t, batch)[0] * mask).sum() / mask.sum())
    found = kl_gradient(t, batch)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    assert float((found - local).norm()) > 0.05 * float(local.norm())


def test_the_kl_metric_is_exact(trainer: Make) -> None:
    t = trainer(max_steps=3, trainer_class=KlampGRPOTrainer)
    expected: list[float] = []
    inner = t._compute_loss

    def compute_loss(model: Any, inputs: Any) -> Any:
        with torch.no_grad():
            mask = counted(inputs)
            expected.append(float(whole_logits(t, inputs)[0][mask].mean()))
        return inner(model, inputs)

    t._compute_loss = compute_loss
    assert run(t)["kl"] == pytest.approx(expected, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    "pair", [("k2", "in_loss"), ("k3+", "in_loss"), ("k1", "in_advantage"), ("detached_weight_k2", "in_loss")]
)
def test_the_other_pairs_train(trainer: Make, pair: tuple[str, str]) -> None:
    kwargs = dict(zip(("estimator", "placement"), pair, strict=True))
    figures = run(trainer(trainer_class=KlampGRPOTrainer, trainer_kwargs=kwargs, num_iterations=2))
    assert all(torch.isfinite(figures["weights"]))
    assert len(figures["kl"]) == 3


def test_pairs_that_descend_something_else_are_refused(trainer: Make) -> None:
    def made(estimator: str, placement: str, **more: Any) -> Any:
        kwargs = {"estimator": estimator, "placement": placement, **more}
        return trainer(trainer_class=KlampGRPOTrainer, trainer_kwargs=kwargs)

    with pytest.raises(ConfigError, match="descends KL\\(ref‖π\\)"):
        made("k3", "in_loss")
    assert made("k3", "in_loss", allow_biased=True).kl_estimator == "k3"
    with pytest.raises(ConfigError, match="needs a reward for each token"):
        made("k1", "in_reward")


def test_a_head_that_hides_the_exact_kl_is_refused(trainer: Make, model_folder: str) -> None:
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model_folder)
    policy.lm_head.register_forward_hook(lambda module, args, output: output)
    with pytest.raises(ConfigError, match="estimator='exact' cannot be had: lm_head has forward hooks"):
        trainer(trainer_class=KlampGRPOTrainer, policy=policy)


def test_steered_and_clamped_like_any_other(trainer: Make) -> None:
    t = trainer(max_steps=5, learning_rate=0.1, trainer_class=KlampGRPOTrainer)
    t.add_callback(KLControl(t, Hold(target=0.05, per="token")))
    rows = [row for row in run(t) and t.state.log_history if "klamp/kl" in row]
    assert all(row["klamp/kl"] == pytest.approx(row["kl"], rel=1e-6, abs=1e-12) for row in rows)
    assert all(row["klamp/own_kl"] <= row["klamp/own_limit"] * (1 + 1e-6) for row in rows)
