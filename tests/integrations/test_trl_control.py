"""KLControl in real TRL runs on a random model: what it observes, how it steers and stops, what it leaves behind."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from klamp import Fixed, Hold, Ziegler
from klamp.clamp import Clamped, Gauge, GaugeState
from klamp.integrations.trl import KlampGRPOTrainer, KLControl
from klamp.integrations.trl.callback import LIMIT, MOVED, SAVED, _count
from klamp.integrations.trl.tokens import OwnKL, counted, policy_of, text_of, with_signal

pytestmark = pytest.mark.slow

Make = Callable[..., Any]
HOLD = Hold(target=0.05, per="token")


def controlled(trainer: Any, controller: Any = HOLD, **settings: Any) -> tuple[Any, KLControl]:
    control = KLControl(trainer, controller, **settings)
    trainer.add_callback(control)
    trainer.train()
    return trainer, control


def logged(trainer: Any, key: str) -> list[float]:
    return [row[key] for row in trainer.state.log_history if key in row]


def assert_held(t: Any) -> None:
    """After every step KL on its own tokens was under the clamp's limit for them, and that one never runs away."""
    for own, limit in zip(logged(t, "klamp/own_kl"), logged(t, "klamp/own_limit"), strict=True):
        assert own <= limit * (1 + 1e-6)
        assert limit < 3 * LIMIT * HOLD.target  # the gauge's own bound


def weights(trainer: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters() if p.requires_grad])


def replayed(t: Any, controller: Any) -> list[float]:
    """The prices that ``controller`` asks for when it is told what TRL logged, the first step left out."""
    kls, efforts = logged(t, "klamp/kl"), logged(t, "klamp/effort") or [0.0] * 100
    state, betas = controller.init(), [controller.init().beta] * 2
    told = zip(logged(t, "klamp/spread"), logged(t, "klamp/signal"), strict=True)
    for kl, effort, (spread, signal) in list(zip(kls, efforts, told, strict=False))[1:]:
        state = controller.update(state, kl, 8, effort=effort, spread=spread, signal=signal)
        betas.append(state.beta)
    return betas


@pytest.mark.parametrize("clamp", [False, True])
def test_the_price_is_the_controllers_answer_to_trls_own_kl(trainer: Make, clamp: bool) -> None:
    t, _ = controlled(trainer(max_steps=6, learning_rate=0.1), clamp=clamp, feed_forward=False)
    kls, efforts = logged(t, "klamp/kl"), logged(t, "klamp/effort")
    assert kls == pytest.approx(logged(t, "kl"), rel=1e-6, abs=1e-12)  # one micro-batch a step: TRL's figure itself
    assert kls[0] == 0.0
    assert kls[-1] > 0
    assert (max(efforts, default=0.0) > 0) is clamp
    assert [*logged(t, "klamp/beta"), t.beta] == pytest.approx(replayed(t, HOLD), rel=1e-12)


@pytest.mark.parametrize(("clamp", "often"), [(False, 1), (False, 2), (True, 1)])
def test_the_first_price_comes_from_the_first_batch(trainer: Make, clamp: bool, often: int) -> None:
    settings = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "num_iterations": often}
    t, _ = controlled(trainer(max_steps=2, **settings), clamp=clamp)
    # Four advantages over their own standard deviation (Bessel's) have mean square 3/4; TRL adds 1e-4 to it,
    # which is 5e-4 of the 0.19 that these rewards spread.
    few = None if clamp else 32 / often  # without a clamp the noise of 32 completions counts, as often as they are used
    expected = HOLD.init(spread=math.sqrt(3 / 4), length=logged(t, "completions/mean_length")[0], n=few).beta
    assert logged(t, "klamp/beta")[1] == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("equal", [0.7, 66.7])
def test_the_price_is_in_units_of_the_spread_of_groups_that_show_a_signal(
    trainer: Make, scale: str, equal: float
) -> None:
    """Two of eight prompts are rewarded. The rewards of the others are equal, at a number whose mean is rounded."""

    def sparse(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        first = list(dict.fromkeys(prompts))[:2]
        return [math.sqrt(sum(map(ord, c))) if p in first else equal for p, c in zip(prompts, completions, strict=True)]

    settings = {"per_device_train_batch_size": 56, "num_generations": 7, "scale_rewards": scale}
    t, _ = controlled(trainer(max_steps=1, reward_funcs=sparse, **settings), clamp=False)
    spread = logged(t, "klamp/spread")[0]
    assert logged(t, "klamp/signal") == [0.25]
    if scale == "group":  # seven advantages over their own standard deviation (Bessel's) and 1e-4
        assert spread == pytest.approx(math.sqrt(6 / 7 / 4), rel=5e-3)
    unit = t.state.stateful_callbacks[SAVED]["controller"]["square"] ** 0.5
    assert unit == pytest.approx(2 * spread, rel=1e-9)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_rewards_that_hardly_differ_are_a_signal(trainer: Make, scale: str) -> None:
    def tiny(completions: list[str], **_: Any) -> list[float]:
        return [1e-6 * sum(map(ord, c)) / 100 for c in completions]

    t, _ = controlled(trainer(max_steps=1, reward_funcs=tiny, scale_rewards=scale), clamp=False)
    assert logged(t, "klamp/signal") == [1.0]
    assert logged(t, "klamp/spread")[0] > 0


@pytest.mark.parametrize("micro", [40, 8])
def test_a_completion_at_the_mean_of_its_group_belongs_to_a_group_with_a_signal(trainer: Make, micro: int) -> None:
    """Graded rewards: three of five completions of a rewarded prompt have no advantage, in whatever micro-batch."""

    def graded(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        first, seen = list(dict.fromkeys(prompts))[:2], dict.fromkeys(prompts, 0)
        found = []
        for prompt in prompts:
            found.append((0.0, 0.5, 0.5, 0.5, 1.0)[seen[prompt]] if prompt in first else 0.0)
            seen[prompt] += 1
        return found

    settings = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": 40 // micro, "num_generations": 5}
    t, _ = controlled(trainer(max_steps=1, reward_funcs=graded, **settings), clamp=False)
    assert logged(t, "klamp/signal") == [0.25]
    unit = t.state.stateful_callbacks[SAVED]["controller"]["square"] ** 0.5
    assert unit == pytest.approx(math.sqrt(4 / 5), rel=1e-3)  # over their own standard deviation and 1e-4


@pytest.mark.parametrize("scale", ["group", "batch"])
@pytest.mark.parametrize(("reward", "size"), [(0.7, 7), (2.9, 6), (9.7, 10), (100.1, 8)])
def test_equal_rewards_are_no_signal_though_trl_divides_their_rounding(
    trainer: Make, reward: float, size: int, scale: str
) -> None:
    settings = {"per_device_train_batch_size": 2 * size, "num_generations": size, "scale_rewards": scale}
    t, control = controlled(
        trainer(max_steps=2, reward_funcs=lambda completions, **_: [reward] * len(completions), **settings), clamp=False
    )
    assert logged(t, "klamp/spread") == [0, 0]
    assert control.state.square == 0
    assert control.state.beta > 0.1, "a first price without a signal, and not one of rounding"


def test_completions_that_are_masked_whole_count_neither_as_rows_nor_as_signal() -> None:
    """``mask_truncated_completions`` leaves some out; here two of the told prompt."""
    trainer = alone("group", 4)
    inputs = {
        "prompt_ids": torch.tensor([[0, 5]] * 4 + [[6, 5]] * 4),
        "prompt_mask": torch.tensor([[0, 1]] * 4 + [[1, 1]] * 4),
        "completion_mask": torch.tensor([1, 0, 1, 0, 1, 1, 1, 0])[:, None].expand(8, 3),
        "advantages": torch.tensor([1.5, -0.5, -0.5, -0.5, 0.0, 1e-4, 0.0, 0.0]),
    }
    halves = [{name: x[i::2] for name, x in inputs.items()} for i in (0, 1)]  # groups lie over both micro-batches
    told = with_signal(trainer, halves)
    assert [each.tolist() for each in told] == [[True, True, False, False], [False] * 4]
    tokens, rows, squares, signal = (sum(x) for x in zip(*map(_count, halves, told), strict=True))
    assert (tokens, rows, squares, signal) == (15, 5, 1.5**2 + 0.5**2, 2)


def alone(scale: str, size: int, **args: Any) -> Any:
    """As much of a trainer in one process as ``with_signal`` reads."""
    settings = SimpleNamespace(scale_rewards=scale, device="cpu", **args)
    return SimpleNamespace(args=settings, num_generations=size, accelerator=SimpleNamespace(gather=lambda x: x))


def shares(scale: str, groups: list[list[float]], seen: int | None = None, **args: Any) -> list[bool]:
    """Whether each group shows a signal where a step holds ``seen`` of its completions, all of them without it."""
    size = len(groups[0])
    each = torch.tensor([g[:seen] for g in groups])
    rows = each.numel()
    inputs = {
        "prompt_ids": torch.arange(len(groups)).repeat_interleave(each.size(1))[:, None],
        "prompt_mask": torch.ones(rows, 1),
        "completion_mask": torch.ones(rows, 2),
        "advantages": each.flatten(),
    }
    [told] = with_signal(alone(scale, size, **args), [inputs])
    return told.view(len(groups), -1).all(1).tolist()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_whole_group_has_a_signal_where_its_advantages_differ(scale: str) -> None:
    rounding, graded = [0.2] * 4, [-0.2, 0.0, 0.0, 0.2]
    assert shares(scale, [rounding, graded]) == [False, True], "however large the rounding of equal rewards is"
    on_paper = [6e-4, 0.0, 0.0, -3e-4] if scale != "none" else [1e-6, 0.0, 0.0, -1e-6]
    assert shares(scale, [on_paper, graded]) == [False, True], "and sums that are equal on paper"


def test_a_completion_without_a_reward_makes_no_signal_of_the_rounding_of_the_others() -> None:
    """TRL gives it an advantage of exactly 0, and the others that of their mean's rounding."""
    assert shares("group", [[0.0024, 0.0024, 0.0, 0.0024], [0.5, 0.0, 0.0, -0.5], [0.0] * 4]) == [False, True, False]


def test_advantages_of_tokens_show_a_signal_by_their_size() -> None:
    inputs = {
        "prompt_ids": torch.tensor([[1]] * 4 + [[2]] * 4),
        "prompt_mask": torch.ones(8, 1),
        "completion_mask": torch.ones(8, 3),
        "advantages": torch.cat([torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]]), torch.zeros(4, 3)]),
    }
    [told] = with_signal(alone("group", 4), [inputs])
    assert told.tolist() == [True] * 4 + [False] * 4


def test_of_a_group_that_is_here_in_part_an_advantage_beyond_rounding_shows_a_signal() -> None:
    groups = [[0.009] * 4, [0.5, 0.5, -0.5, -0.5]]
    assert shares("group", groups, seen=2) == [False, True]
    assert shares("none", groups, seen=2) == [True, True], "nothing divided"
    assert shares("none", [[4e-6] * 4, groups[1]], seen=2) == [False, True]
    assert shares("none", groups, seen=2, multi_objective_aggregation="normalize_then_sum") == [False, True]
    beside_an_outlier = [[300.0, -0.004, -0.004, -0.004], [-0.004, 0.002, 0.0, 0.0]]
    assert shares("batch", beside_an_outlier, seen=2) == [True, True]
    assert shares("batch", [[0.004] * 4, [0.006] * 4], seen=2) == [False, False]


def test_a_first_price_far_from_the_computed_one_is_left_at_the_first_update(trainer: Make) -> None:
    far = Hold(target=0.05, per="token", init_beta=0.01)
    t, control = controlled(trainer(max_steps=4, learning_rate=0.1), far, clamp=False)
    computed = HOLD.init(spread=math.sqrt(3 / 4), length=logged(t, "completions/mean_length")[0]).beta
    assert logged(t, "klamp/beta")[:2] == [0.01, 0.01], "the first KL is that of the reference, and steers nothing"
    assert logged(t, "klamp/beta")[2] > 0.4 * computed
    assert control.state.computed


def test_the_first_step_where_policy_and_reference_are_one_is_no_observation(trainer: Make) -> None:
    t, control = controlled(trainer(max_steps=4), clamp=False)
    assert logged(t, "klamp/kl")[0] <= MOVED * 0.05
    assert control.state.updates == 3


def test_a_price_of_zero_still_measures(trainer: Make) -> None:
    t, _ = controlled(trainer(max_steps=3), Fixed(beta=0.0), clamp=False)
    assert t.beta == 1e-8
    assert len(logged(t, "kl")) == len(logged(t, "klamp/kl")) == 3
    assert logged(t, "kl")[-1] > 0


def test_a_lora_may_start_at_beta_zero(trainer: Make) -> None:
    t, _ = controlled(trainer(beta=0.0))
    assert len(logged(t, "kl")) == 3
    assert t.beta > 0.01


@pytest.mark.parametrize("exact", [True, False])
def test_the_clamp_holds_kl_on_the_steps_own_tokens(trainer: Make, exact: bool, monkeypatch: Any) -> None:
    if not exact:
        monkeypatch.setattr("klamp.integrations.trl.tokens.why_no_exact", lambda _: "the test says so")
    free, _ = controlled(trainer(max_steps=4, learning_rate=0.1), clamp=False)
    held, control = controlled(trainer(max_steps=4, learning_rate=0.1))
    assert control.clamp
    assert control._own.exact is exact
    assert max(logged(free, "klamp/kl")) > 0.3
    assert_held(held)
    assert max(logged(held, "klamp/effort")) > 0.1


def test_a_clamp_with_nothing_to_do_changes_no_bit(trainer: Make) -> None:
    free, _ = controlled(trainer(max_steps=4), HOLD, clamp=False, feed_forward=False)  # both from one price
    watched, _ = controlled(trainer(max_steps=4), HOLD, clamp=True, limit=1e6, feed_forward=False)
    assert torch.equal(weights(free), weights(watched))
    assert set(logged(watched, "klamp/effort")) == {0.0}


def test_own_kl_is_the_kl_of_the_whole_vocabulary(trainer: Make) -> None:
    t = trainer(max_steps=2, temperature=0.8)
    control = KLControl(t, HOLD, clamp=False)
    t.add_callback(control)
    batches: list[Any] = []
    control.on_step_end = lambda *_, **__: batches.append(control.recorder.batches)  # type: ignore[method-assign]
    t.train()
    own, (batch,) = OwnKL(t, "token"), batches[-1]
    with torch.no_grad():
        logits, mask = t.model(**text_of(batch)).logits[:, -9:-1] / 0.8, counted(batch)
        with policy_of(t).disable_adapter():
            reference = t.model(**text_of(batch)).logits[:, -9:-1] / 0.8
    logp, ref = logits.log_softmax(-1), reference.log_softmax(-1)
    exact = (logp.exp() * (logp - ref)).sum(-1)
    # float32 throughout; TRL's and klamp's matrix products sum in another order than the model's own head
    assert own.on([batch])() == pytest.approx(float(exact[mask].mean()), rel=1e-4)
    own.exact = False
    d = (logp - ref).gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)
    assert own.on([batch])() == pytest.approx(float((torch.expm1(-d) + d)[mask].mean()), rel=1e-4)
    assert t.model.training


def test_gradient_accumulation_changes_nothing(trainer: Make) -> None:
    """The same eight completions a step, at once and in two micro-batches: dapo's loss is the same, so is the KL."""
    whole, _ = controlled(trainer(max_steps=4))
    parts, control = controlled(trainer(max_steps=4, per_device_train_batch_size=4, gradient_accumulation_steps=2))
    assert len(control.recorder.batches) == 0
    for key in ("klamp/kl", "klamp/beta", "klamp/own_kl", "klamp/effort"):
        # Sums in another order, float32; three updates at a high learning rate enlarge the difference.
        assert logged(parts, key) == pytest.approx(logged(whole, key), rel=2e-3, abs=1e-6)


def test_several_steps_of_one_generation_are_steered_and_clamped(trainer: Make) -> None:
    t, control = controlled(trainer(max_steps=6, steps_per_generation=2, num_iterations=2, learning_rate=0.01))
    assert len(logged(t, "klamp/kl")) == 6
    assert control.control.state.gauge.pairs == 2  # steps 2, 5 and 6 saw new tokens; before step 2 there was no level
    assert_held(t)


def test_the_gauge_reads_a_step_before_its_update(trainer: Make) -> None:
    t, control = controlled(trainer(max_steps=3, learning_rate=0.1, trainer_class=KlampGRPOTrainer))
    # that trainer logs the exact KL of the batch in the loss's own forward; float32, other kernels
    assert control.control.state.gauge.reading == pytest.approx(logged(t, "kl")[-1], rel=1e-4)


def test_tokens_trained_on_before_move_the_level_by_their_growth_alone() -> None:
    before, last = GaugeState(level=0.05, reading=0.06, share=0.8, pairs=5), Clamped(0.07, 0.065, scale=0.96)
    after = Gauge().carry(before, 0.064, last)
    assert after.level == pytest.approx(Gauge().update(before, after.level, last).level)  # it would surprise nobody
    assert after == replace(before, level=after.level, reading=0.064)
    assert Gauge().carry(before, 0.0, last) == before


def test_a_target_per_sequence_is_the_same_wish_times_the_length(trainer: Make) -> None:
    token, _ = controlled(trainer(max_steps=3), clamp=False)
    sequence, _ = controlled(trainer(max_steps=3), Hold(target=0.4, per="sequence"), clamp=False)
    lengths = logged(sequence, "completions/mean_length")
    assert logged(sequence, "klamp/kl")[:2] == pytest.approx(
        [kl * n for kl, n in zip(logged(token, "klamp/kl"), lengths, strict=True)][:2], rel=1e-5
    )


def test_a_full_fine_tune_is_clamped_towards_its_reference(trainer: Make) -> None:
    free, control = controlled(trainer(lora=False, learning_rate=2e-2), clamp=None)
    assert not control.clamp
    held, control = controlled(trainer(lora=False, learning_rate=2e-2), clamp=True)
    assert max(logged(free, "klamp/kl")) > 0.06
    assert_held(held)
    assert max(logged(held, "klamp/effort")) > 0


def test_any_controller_may_steer(trainer: Make) -> None:
    ziegler = Ziegler(target=0.05, horizon=100, per="token", init_beta=0.1)
    t, control = controlled(trainer(max_steps=4), ziegler)
    state = ziegler.init()
    for kl in logged(t, "klamp/kl")[1:]:
        state = ziegler.update(state, kl, 8)
    assert t.beta == pytest.approx(state.beta, rel=1e-12)
    assert control.state == state


def test_alarms_and_the_band_go_through_trls_metrics(trainer: Make) -> None:
    t, _ = controlled(trainer(max_steps=7, learning_rate=0.1))
    assert sum(logged(t, "klamp/alarm/clamp_works_hard")) == 1
    assert max(logged(t, "klamp/alarms")) >= 1
    assert set(logged(t, "klamp/in_band")) <= {0.0, 1.0}
    assert set(logged(t, "klamp/target")) == {0.05}


def test_a_reference_that_is_not_the_start_raises_an_alarm(trainer: Make, model_folder: str) -> None:
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        policy.lm_head.weight.mul_(1.5)  # TRL loads its reference from the folder, not from these weights
    t, _ = controlled(trainer(lora=False, policy=policy, max_steps=1), clamp=False)
    assert logged(t, "klamp/alarm/off_reference") == [1.0]


def test_metrics_average_between_two_logs(trainer: Make) -> None:
    every, _ = controlled(trainer(max_steps=4))
    second, _ = controlled(trainer(max_steps=4, logging_steps=2))
    one = logged(every, "klamp/kl")
    assert logged(second, "klamp/kl") == pytest.approx([(one[0] + one[1]) / 2, (one[2] + one[3]) / 2], rel=1e-12)


def test_the_trainer_is_left_as_it_was_found(trainer: Make) -> None:
    t, _ = controlled(trainer())
    assert "_compute_loss" not in vars(t)
    assert SAVED in t.state.stateful_callbacks


def test_evaluation_neither_steers_nor_counts(trainer: Make) -> None:
    from datasets import Dataset

    held_out = {"eval_dataset": Dataset.from_dict({"prompt": ["w1", "w2"]})}
    every = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 8}
    t, control = controlled(trainer(max_steps=4, trainer_kwargs=held_out, **every))
    assert control.state.updates == 3
    assert len(logged(t, "eval_kl")) == 2
    assert len(logged(t, "klamp/kl")) == 4
