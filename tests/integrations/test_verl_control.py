"""verl's controller without verl: what it is asked by verl's loop, and that its prices are those of a Control."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import klamp
from klamp.integrations.verl import FILE, HoldKLController, Settings


def batch(seed: int) -> Any:
    """What ``apply_kl_penalty`` gets of verl: two prompts, four completions of six tokens each."""
    generator = torch.Generator().manual_seed(seed)
    logp = -torch.rand(8, 6, generator=generator) - 0.1
    tensors = {
        "old_log_probs": logp,
        "ref_log_prob": logp - 0.3 * torch.randn(8, 6, generator=generator),
        "response_mask": torch.ones(8, 6),
        "token_level_scores": torch.rand(8, 6, generator=generator),
    }
    return SimpleNamespace(batch=tensors, non_tensor_batch={"uid": [0] * 4 + [1] * 4})


def made(kl_coef: float = 0.001) -> HoldKLController:
    return HoldKLController(Settings(target=0.05, per="token", estimator="k3", kl_coef=kl_coef))


def test_its_prices_are_those_of_a_control() -> None:
    verl, control = made(), klamp.Control(klamp.Hold(0.05, per="token"))
    for step in range(6):
        data = batch(step)
        verl.observe(data)
        if not control.started:
            control = control.init(spread=verl.spread, length=6.0, signal=verl.signal)
        assert verl.value == control.beta
        kl = float(klamp.mean(klamp.k3(data.batch["old_log_probs"], data.batch["ref_log_prob"], tail=5.0)))
        control = control.before_update(kl, verl.spread, 8, signal=verl.signal).after_update()
        verl.update(current_kl=123.0, n_steps=8)  # verl's own KL is in another unit, and is not what is steered by
    assert verl.state == control.state.price
    assert verl.state.updates == 6


def test_called_directly_it_takes_the_kl_it_is_given() -> None:
    one, two = made(0.3), made(0.3)
    one.update(current_kl=torch.tensor(0.2), n_steps=8)
    two.update(0.2, 8)
    hold = klamp.Hold(0.05, per="token", init_beta=0.3)
    assert one.state == two.state
    assert two.value == hold.update(hold.init(), 0.2, 8).beta
    with pytest.raises(klamp.ConfigError, match="one KL"):
        one.update()


def test_a_price_that_was_given_is_charged_first_and_counts_if_it_is_near_the_computed_one() -> None:
    far, usual = made(0.02), made()
    for one in (far, usual):
        one.observe(batch(0))
    near = made(0.7 * usual.value)
    near.observe(batch(0))
    assert (far.value, near.value) == (0.02, 0.7 * usual.value)
    computed = usual.state.log_rho
    assert far.state.log_rho == computed
    assert near.state.log_rho == pytest.approx(computed + math.log(0.7))


def test_equal_scores_have_no_spread_though_their_mean_is_rounded() -> None:
    data = batch(0)
    data.batch["token_level_scores"] = torch.zeros(8, 6)
    data.batch["token_level_scores"][:, -1] = torch.tensor([0.7] * 7 + [0.1])  # in groups of three, three and two
    data.non_tensor_batch["uid"] = [0, 0, 0, 1, 1, 1, 2, 2]
    verl = made()
    verl.observe(data)
    assert verl.spread == pytest.approx(math.sqrt(2 * 0.3**2 / 5))  # of five degrees of freedom, all in the third group
    assert verl.signal == pytest.approx(1 / 5)
    unit = math.sqrt(2) * 0.3  # of the third group alone
    assert verl.state.square == pytest.approx(unit**2)
    data.batch["token_level_scores"][7, -1] = 0.7
    again = made()
    again.observe(data)
    assert (again.spread, again.told, again.value) == (0.0, False, made().value)


def test_it_goes_on_from_its_file(tmp_path: Path) -> None:
    first = made()
    for step in range(3):
        first.observe(batch(step))
        first.update(n_steps=8)
    first.save(tmp_path, 3)
    second = made()
    second.load(tmp_path, 3)
    for one in (first, second):
        one.observe(batch(3))
        one.update(n_steps=8)
    assert second.state == first.state


def test_it_says_that_its_file_is_of_the_law_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = made()
    first.observe(batch(0))
    first.update(n_steps=8)
    first.save(tmp_path, 1)
    made().load(tmp_path, 1)
    assert "law" not in caplog.text
    saved = json.loads((tmp_path / FILE).read_text())
    saved["state"]["law"] = 10
    (tmp_path / FILE).write_text(json.dumps(saved))
    made().load(tmp_path, 1)
    assert "the saved state of Hold was written under law 10." in caplog.text
