"""LocalBackend: what it prices and measures, what it holds to, what it trains on, and what it takes up again."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor

import klamp
from klamp import models
from klamp.errors import CheckpointError, ReferencePolicyError
from klamp.local_backend import Choice, LocalBackend, TrainableModel, TrainResult, Trajectory, TrajectoryGroup
from klamp.local_backend import worker as worker_module
from klamp.references import Ema, StepLag
from klamp.references.states import REFERENCE
from klamp.train import learner as learner_module
from klamp.train import update

ROOT = Path(__file__).parents[2]
MODEL = TrainableModel(name="agent", project="tests", base_model="tiny")
QUESTIONS = [[{"role": "user", "content": text}] for text in ("The coffee at this café", "The waiter was")]
FAST = 3e-3


def reward(choice: Choice) -> float:
    """Something that varies: shorter words are better."""
    return -sum(map(len, (choice.message.content or "").split())) / 10


async def groups_of(backend: LocalBackend, n: int = 4, **settings: Any) -> list[TrajectoryGroup]:
    found = []
    for question in QUESTIONS:
        choices = await backend.sample(MODEL, question, n=n, max_tokens=6, **settings)
        found.append(TrajectoryGroup([Trajectory([*question, c], reward=reward(c)) for c in choices]))
    return found


async def steps(backend: LocalBackend, count: int, **arguments: Any) -> list[TrainResult]:
    return [
        await backend.train(MODEL, await groups_of(backend), **{"learning_rate": FAST, **arguments})
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[TrajectoryGroup]]:
    """A model after three steps, in a folder to copy, and groups that it sampled then."""
    path = tmp_path_factory.mktemp("trained")

    async def make() -> list[TrajectoryGroup]:
        async with LocalBackend(path) as backend:
            await steps(backend, 3, kl_penalty_coef=0.0)
            return await groups_of(backend)

    return path, asyncio.run(make())


@pytest.fixture
def once(trained: tuple[Path, list[TrajectoryGroup]], tmp_path: Path) -> Callable[..., TrainResult]:
    """One step from the trained model on its groups, each time on a copy of its own."""
    path, groups = trained
    made = iter(range(100))

    def train(given: Any = None, **arguments: Any) -> TrainResult:
        copy = tmp_path / f"copy-{next(made)}"
        shutil.copytree(path, copy)

        async def run() -> TrainResult:
            async with LocalBackend(copy) as backend:
                return await backend.train(MODEL, given or groups, **{"learning_rate": FAST, **arguments})

        return asyncio.run(run())

    return train


def weights(path: str | Path) -> dict[str, Tensor]:
    return load_file(Path(path) / "adapter_model.safetensors")


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def choices_of(groups: list[TrajectoryGroup]) -> list[Choice]:
    return [t.messages_and_choices[-1] for group in groups for t in group]


@torch.no_grad()
def plain(adapter: Path | None, choices: list[Choice], temperature: float = 1.0) -> list[Tensor]:
    """Log-probs over the whole vocabulary before each sampled token, by transformers and peft alone."""
    model = models.load_model("tiny")
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter)).eval()
    found = []
    for c in choices:
        ids = torch.tensor([[*c.prompt_token_ids, *c.token_ids]])
        before = slice(len(c.prompt_token_ids) - 1, -1)
        found.append((model(ids).logits[0, before] / temperature).log_softmax(-1))
    return found


def at(rows: list[Tensor], choices: list[Choice]) -> Tensor:
    """The log-probs of the sampled tokens, in a row."""
    taken = [row.gather(1, torch.tensor(c.token_ids)[:, None]) for row, c in zip(rows, choices, strict=True)]
    return torch.cat(taken).flatten()


class Spy:
    """Every call of ``in_advantage``: counted tokens' KL and what was added to their advantages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kl: list[Tensor] = []
        self.added: list[Tensor] = []
        real = update.in_advantage

        def watched(advantages: Tensor, kl: Tensor, beta: Any, mask: Tensor, **extra: Any) -> Tensor:
            out = real(advantages, kl, beta, mask, **extra)
            self.kl.append(kl.detach()[mask])
            self.added.append((out - advantages)[mask])
            return out

        monkeypatch.setattr(update, "in_advantage", watched)


# The price


@pytest.mark.parametrize("micro_batch", [0, 1, 3])
def test_the_adjustment_is_the_formula_and_zero_mean_over_the_whole_step(
    trained: Any, once: Any, monkeypatch: pytest.MonkeyPatch, micro_batch: int
) -> None:
    path, groups = trained
    spy = Spy(monkeypatch)
    once(kl_penalty_coef=0.7, micro_batch=micro_batch)
    assert len(spy.added) == {0: 1, 1: 8, 3: 3}[micro_batch]
    choices = choices_of(groups)
    k1 = at(plain(path / "tests/agent/checkpoints/step-000003", choices), choices) - at(plain(None, choices), choices)
    assert k1.abs().mean() > 0.05, "the policy has moved, or this shows nothing"
    # float32 log-probs of another implementation: 1e-5
    torch.testing.assert_close(torch.cat(spy.added), 0.7 * (k1.mean() - k1), atol=3e-5, rtol=0)
    assert abs(float(torch.cat(spy.added).double().sum())) < 1e-4


def test_micro_batches_change_memory_and_not_the_result(once: Any) -> None:
    whole, single = (weights(once(micro_batch=size).checkpoint_path) for size in (0, 1))
    for name in whole:
        torch.testing.assert_close(whole[name], single[name], atol=2e-5, rtol=1e-3)  # Adam magnifies rounding


def test_the_learning_rate_is_that_of_the_call(trained: Any, once: Any) -> None:
    before = weights(trained[0] / "tests/agent/checkpoints/step-000003")
    once_as_far, twice = (weights(once(learning_rate=lr).checkpoint_path) for lr in (1e-3, 2e-3))
    for name, start in before.items():
        torch.testing.assert_close(twice[name] - start, 2 * (once_as_far[name] - start), atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_kl_is_that_of_the_plain_logits_at_the_sampling_temperature(
    trained: Any, tmp_path: Path, temperature: float
) -> None:
    shutil.copytree(trained[0], tmp_path / "copy")

    async def run() -> tuple[TrainResult, list[Choice]]:
        async with LocalBackend(tmp_path / "copy") as backend:
            groups = await groups_of(backend, temperature=temperature)
            return await backend.train(MODEL, groups), choices_of(groups)

    result, choices = asyncio.run(run())
    adapter = tmp_path / "copy/tests/agent/checkpoints/step-000003"
    policy, base = plain(adapter, choices, temperature), plain(None, choices, temperature)
    exact = torch.cat([(p.exp() * (p - b)).sum(-1) for p, b in zip(policy, base, strict=True)]).mean()
    k1 = (at(policy, choices) - at(base, choices)).mean()
    assert result.metrics["kl/ref/exact"] == pytest.approx(float(exact), abs=1e-5)
    assert result.metrics["kl/ref/k1"] == pytest.approx(float(k1), abs=1e-5)
    recorded = torch.tensor([v for c in choices for v in c.logp])
    torch.testing.assert_close(recorded, at(policy, choices), atol=2e-5, rtol=0)
    assert abs(result.metrics["kl/sampler/k1"]) < 1e-5
    assert result.metrics["data/stale"] == 0


def test_coefficient_zero_measures_and_does_not_price(once: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch)
    base, other = once(kl_penalty_coef=0.0), once(kl_penalty_coef=0.0, kl_penalty_reference_step=2)
    assert not torch.cat(spy.added).any()
    assert base.metrics["kl/beta"] == 0
    assert base.metrics["kl/ref/exact"] > other.metrics["kl/ref/exact"] > 1e-3
    assert same(weights(base.checkpoint_path), weights(other.checkpoint_path)), "no price, no pull of the reference"


def test_a_group_without_reward_spread_still_pays(trained: Any, once: Any) -> None:
    flat = [TrajectoryGroup([Trajectory(t.messages_and_choices, reward=1.0) for t in group]) for group in trained[1]]
    before = weights(trained[0] / "tests/agent/checkpoints/step-000003")
    assert not same(before, weights(once(flat, kl_penalty_coef=1.0).checkpoint_path))
    assert once(flat, kl_penalty_coef=0.0).metrics["train/grad_norm"] == 0


def test_recorded_log_probs_are_the_ratios_and_when_asked_the_source(
    trained: Any, once: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = trained[1]
    choices = choices_of(groups)
    shifted = [
        [
            Trajectory([q, replace(c, logp=tuple(v - 0.3 for v in c.logp), step=2)], reward=t.reward)
            for t in group
            for q, c in [t.messages_and_choices]
        ]
        for group in groups
    ]
    # Every ratio is e^0.3, beyond the clip of 0.2 and within one of 0.5: the gradient is so much longer.
    wide = {"kl_penalty_coef": 0.0, "epsilon": 0.5, "max_grad_norm": 0.0}
    longer = once(shifted, **wide).metrics["train/grad_norm"] / once(**wide).metrics["train/grad_norm"]
    assert longer == pytest.approx(math.exp(0.3), rel=1e-3)
    spy = Spy(monkeypatch)
    result = once(shifted, kl_penalty_source="sample")
    recorded = torch.tensor([v - 0.3 for c in choices for v in c.logp])
    torch.testing.assert_close(torch.cat(spy.kl), recorded - at(plain(None, choices), choices), atol=2e-5, rtol=0)
    assert abs(float(torch.cat(spy.added).sum())) < 1e-4
    assert result.metrics["kl/sampler/k1"] == pytest.approx(-0.3, abs=1e-4)


def test_groups_of_any_size_are_compared_within(trained: Any, once: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trajectories = [t for group in trained[1] for t in group]
    groups = [TrajectoryGroup([*trajectories[:3], RuntimeError("lost")]), trajectories[3:7], [trajectories[7]]]
    seen: list[Tensor] = []
    real = learner_module.prepare
    monkeypatch.setattr(learner_module, "prepare", lambda *a: (p := real(*a), seen.append(p.advantages[:, 0]))[0])
    metrics = once(groups).metrics
    r = torch.tensor([t.reward for t in trajectories])
    expected = torch.cat([(g - g.mean()) / (g.std(correction=0) + 1e-6) for g in (r[:3], r[3:7])] + [torch.zeros(1)])
    torch.testing.assert_close(seen[0], expected, atol=1e-5, rtol=1e-4)
    assert (metrics["data/groups"], metrics["data/trajectories"], metrics["data/exceptions"]) == (3, 8, 1)
    assert metrics["reward/mean"] == pytest.approx(float(r.mean()), abs=1e-6)


def test_signal_is_the_share_of_sequences_in_groups_whose_rewards_differ(trained: Any, once: Any) -> None:
    """A trajectory at the mean of its group has no advantage and still is one of a group with a signal."""
    trajectories = [replace(t) for group in trained[1] for t in group]
    for t, given in zip(trajectories, (0.0, 0.5, 1.0, 0.7, 0.7, 0.7, 0.7, 0.7), strict=True):
        t.reward = given
    metrics = once([TrajectoryGroup(trajectories[:3]), TrajectoryGroup(trajectories[3:])]).metrics
    assert metrics["policy/signal"] == pytest.approx(3 / 8)
    assert metrics["policy/spread"] == pytest.approx(math.sqrt(3 / 8), rel=1e-5)  # over their own standard deviation


def test_advantages_and_weights_are_arts_and_klamps_by_name(
    trained: Any, once: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trajectory's tokens weigh one over their number, those of its side conversation among them."""
    groups = trained[1]
    aside = groups[1].trajectories[0].messages_and_choices
    first = Trajectory(groups[0].trajectories[0].messages_and_choices, reward=1.0)
    first.additional_histories = [Trajectory(aside)]
    given = [TrajectoryGroup([first, *groups[0].trajectories[1:]])]
    tokens = torch.tensor([len(t.messages_and_choices[-1].token_ids) for t in given[0]])
    tokens[0] += len(aside[-1].token_ids)
    rewards = torch.tensor([t.reward for t in given[0]])
    seen: list[Any] = []
    real = learner_module.prepare
    monkeypatch.setattr(learner_module, "prepare", lambda *a: (p := real(*a), seen.append(p))[0])
    art = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)
    klamps = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    for kind, expected in (("art", art), ("art_scaled", art / art.abs().mean()), ("klamp", klamps)):
        once(given, advantages=kind)
        torch.testing.assert_close(seen[-1].advantages[[0, 2, 3, 4], 0], expected, atol=1e-5, rtol=1e-4)
        assert seen[-1].advantages[1, 0] == seen[-1].advantages[0, 0]
    assert seen[-1].weights is None, "klamp: all tokens alike"
    weights = (1 / tokens) / (len(tokens) / tokens.sum())
    torch.testing.assert_close(seen[0].weights[[0, 2, 3, 4]], weights, atol=1e-6, rtol=1e-5)
    assert seen[0].weights[1] == seen[0].weights[0]
    once(given, scale_rewards=False)
    once(given, normalize_advantages=False)
    for plain in seen[-2:]:
        torch.testing.assert_close(plain.advantages[[0, 2, 3, 4], 0], rewards - rewards.mean(), atol=1e-6, rtol=1e-5)


def test_the_weighted_loss_is_the_mean_over_trajectories_of_token_means(trained: Any, once: Any) -> None:
    groups = trained[1]
    cut = [
        [Trajectory([q, replace(c, token_ids=c.token_ids[:n], logp=c.logp[:n])], reward=t.reward)]
        for n, t in enumerate((t for g in groups for t in g), start=1)
        for q, c in [t.messages_and_choices]
    ]
    [both] = [[t for g in cut[:4] for t in g]]
    free = {"kl_penalty_coef": 0.0, "max_grad_norm": 0.0}
    r = torch.tensor([t.reward for t in both])
    a = (r - r.mean()) / (r.std(correction=0) + 1e-6)
    # On policy every ratio is 1, so the loss is minus the mean over trajectories of the advantage: 0 here.
    assert once([both], **free).metrics["loss/policy"] == pytest.approx(0.0, abs=1e-6)
    n = torch.tensor([len(t.messages_and_choices[-1].token_ids) for t in both])
    assert len(set(n.tolist())) > 1
    expected = -float((a * n).sum() / n.sum())
    alike = once([both], advantages="klamp", **free).metrics["loss/policy"]
    assert alike == pytest.approx(expected * math.sqrt(3 / 4), rel=1e-3)


def test_cispo_keeps_the_gradient_of_a_token_beyond_the_clip(trained: Any, once: Any) -> None:
    shifted = [
        [Trajectory([q, replace(c, logp=tuple(v - 1.0 for v in c.logp), step=2)], reward=t.reward) for t in group
         for q, c in [t.messages_and_choices]]
        for group in trained[1]
    ]  # fmt: skip
    free = {"kl_penalty_coef": 0.0, "max_grad_norm": 0.0}
    plain = once(**free).metrics["train/grad_norm"]
    # Every ratio is e: between CISPO's 0 and 5, and cut at 1 + epsilon_high.
    for more, factor in (({}, math.e), ({"epsilon_high": 0.5}, 1.5)):
        longer = once(shifted, loss_fn="cispo", **more, **free).metrics["train/grad_norm"] / plain
        assert longer == pytest.approx(factor, rel=1e-3)


def openai_shaped(c: Choice, **more: Any) -> SimpleNamespace:
    """A choice as a server writes it: tokens in the log-probs, no step."""
    entries = [SimpleNamespace(token=f"token_id:{i}", logprob=v) for i, v in zip(c.token_ids, c.logp, strict=True)]
    return SimpleNamespace(
        message=c.message,
        finish_reason=c.finish_reason,
        logprobs=SimpleNamespace(content=entries),
        prompt_token_ids=list(c.prompt_token_ids),
        **more,
    )


def test_stale_counts_the_sequences_of_an_older_policy(trained: Any, once: Any) -> None:
    groups = trained[1]

    def of(change: Callable[[int, Choice], Any]) -> list[TrajectoryGroup]:
        number = iter(range(100))
        return [
            TrajectoryGroup([Trajectory([q, change(next(number), c)], reward=t.reward) for t in g for q, c in
                             [t.messages_and_choices]])
            for g in groups
        ]  # fmt: skip

    assert once(of(lambda _, c: c)).metrics["data/stale"] == 0
    assert once(of(lambda n, c: replace(c, step=2) if n < 3 else c)).metrics["data/stale"] == 3
    assert once(of(lambda _, c: openai_shaped(c))).metrics["data/stale"] == 0, "their log-probs are this policy's"
    assert once(of(lambda _, c: openai_shaped(c, step=3))).metrics["data/stale"] == 0
    assert once(of(lambda _, c: openai_shaped(c, step=1))).metrics["data/stale"] == 8
    other = of(lambda n, c: openai_shaped(replace(c, logp=tuple(v - 0.3 * (n == 5) for v in c.logp))))
    assert once(other).metrics["data/stale"] == 1


# The reference


def test_a_lag_before_its_first_step_is_the_base_by_its_hash(tmp_path: Path) -> None:
    async def run() -> list[dict[str, Any]]:
        async with LocalBackend(tmp_path) as backend:
            base = (await steps(backend, 1, kl_penalty_coef=0.0))[0].reference
            lag = await steps(backend, 2, kl_penalty_step_lag=1)
            return [base, *(r.reference for r in lag)]

    base, before, after = asyncio.run(run())
    assert before == {"reference": "lag:1", "weights": base["weights"]}
    assert after["weights"] != base["weights"], "and then a saved step"


def test_step_adapter_and_lag_name_the_same_weights_to_the_bit(trained: Any, once: Any, tmp_path: Path) -> None:
    adapter = tmp_path / "elsewhere"
    shutil.copytree(trained[0] / "tests/agent/checkpoints/step-000001", adapter)
    ways = [{"kl_penalty_reference_step": 1}, {"kl_ref_adapter_path": adapter}, {"kl_penalty_step_lag": 2}]
    ways += [{"reference": StepLag(2)}, {"reference": "step:1"}]
    found = [once(**way).metrics["kl/ref/exact"] for way in ways]
    assert found == [found[0]] * 5
    assert found[0] > 1e-3


def test_step_zero_is_the_base_and_the_present_step_is_no_distance_away(once: Any) -> None:
    base = once().metrics["kl/ref/exact"]
    assert base > 1e-2
    assert once(kl_penalty_reference_step=0).metrics["kl/ref/exact"] == base
    assert once(reference="model:tiny").metrics["kl/ref/exact"] == pytest.approx(base, abs=1e-6)
    assert once(kl_penalty_step_lag=50).metrics["kl/ref/exact"] == base, "no step so old: the base"
    assert abs(once(kl_penalty_reference_step=3).metrics["kl/ref/exact"]) < 1e-7


def test_references_come_and_go_without_a_trace(trained: Any, tmp_path: Path) -> None:
    shutil.copytree(trained[0], tmp_path / "copy")

    async def run() -> list[str]:
        async with LocalBackend(tmp_path / "copy") as backend:
            for arguments in ({"kl_penalty_reference_step": 1}, {"kl_penalty_step_lag": 1}, {"reference": Ema(0.9)}):
                result = await backend.train(MODEL, trained[1], **arguments)
                folder = Path(result.checkpoint_path)
                assert not [p for p in folder.iterdir() if p.is_dir()], "only the trained adapter is saved"
                assert not any(REFERENCE in name for name in weights(folder))
            await backend.train(MODEL, trained[1])
            [opened] = backend._opened.values()
            assert opened.worker is not None
            return list(opened.worker.learner.policy.model.peft_config)  # type: ignore[arg-type, union-attr]

    assert asyncio.run(run()) == ["default"]


def test_a_path_whose_weights_changed_is_refused_and_another_step_is_not(trained: Any, tmp_path: Path) -> None:
    saved, adapter = trained[0] / "tests/agent/checkpoints", tmp_path / "adapter"
    shutil.copytree(trained[0], tmp_path / "copy")
    shutil.copytree(saved / "step-000001", adapter)

    async def train(**arguments: Any) -> TrainResult:
        async with LocalBackend(tmp_path / "copy") as backend:
            first = await backend.train(MODEL, trained[1], **arguments)
            shutil.copy(saved / "step-000002/adapter_model.safetensors", adapter)
            with pytest.raises(ReferencePolicyError, match="other weights"):
                await backend.train(MODEL, trained[1], **arguments)
            return first

    first = asyncio.run(train(kl_ref_adapter_path=adapter))

    async def again() -> tuple[int, int]:
        async with LocalBackend(tmp_path / "copy") as backend:
            with pytest.raises(ReferencePolicyError, match="other weights"):
                await backend.train(MODEL, trained[1], kl_ref_adapter_path=adapter)
            result = await backend.train(MODEL, trained[1], kl_penalty_reference_step=2)
            return await backend.get_step(MODEL), result.step

    assert asyncio.run(again()) == (first.step + 1, first.step + 1)


def test_a_missing_reference_names_those_there_are(once: Any, tmp_path: Path) -> None:
    with pytest.raises(klamp.ConfigError, match=r"step:40.*Saved steps: 0, 1, 2, 3"):
        once(kl_penalty_reference_step=40)
    with pytest.raises(klamp.ConfigError, match="no folder"):
        once(kl_ref_adapter_path=tmp_path / "nothing")


# Steering and going on


@pytest.mark.parametrize("init_beta", [None, 0.1])
def test_hold_starts_from_the_spread_unless_a_first_price_was_set(tmp_path: Path, init_beta: float | None) -> None:
    """0.1 is what a Hold without a spread starts at; whoever sets it gets it all the same."""
    hold = klamp.Hold(target=0.01, per="token", init_beta=init_beta)

    async def run() -> TrainResult:
        async with LocalBackend(tmp_path) as backend:
            return (await steps(backend, 1, controller=hold))[0]

    assert (asyncio.run(run()).metrics["kl/beta"] == 0.1) == (init_beta is not None)


def test_a_controllers_state_goes_on_over_calls_and_restarts(tmp_path: Path) -> None:
    ziegler = klamp.Ziegler(target=0.01, per="token", horizon=20)

    async def run(count: int, **arguments: Any) -> list[TrainResult]:
        async with LocalBackend(tmp_path) as backend:
            return await steps(backend, count, clamp=False, **arguments)

    results = asyncio.run(run(2, controller=ziegler)) + asyncio.run(run(2, controller=ziegler))
    state = ziegler.init()
    for result in results:
        assert result.metrics["kl/beta"] == state.beta
        state = ziegler.update(state, result.metrics["kl/steered"], 8)
    assert state.beta != ziegler.init_beta
    [other] = asyncio.run(run(1, kl_penalty_coef=0.5))
    assert other.metrics["kl/beta"] == 0.5
    [anew] = asyncio.run(run(1, controller=ziegler))
    assert anew.metrics["kl/beta"] == ziegler.init_beta, "another price came between"


@pytest.mark.slow
def test_a_restart_is_invisible_to_the_bit(tmp_path: Path) -> None:
    hold = klamp.Hold(target=0.02, per="token")

    async def run(folder: Path, count: int) -> list[TrainResult]:
        async with LocalBackend(folder) as backend:
            return await steps(backend, count, controller=hold)

    straight = asyncio.run(run(tmp_path / "straight", 5))
    resumed = [r for count in (2, 1, 2) for r in asyncio.run(run(tmp_path / "resumed", count))]
    for a, b in zip(straight, resumed, strict=True):
        timeless = [{k: v for k, v in r.metrics.items() if not k.startswith("time/")} for r in (a, b)]
        assert timeless[0] == timeless[1]
        assert same(weights(a.checkpoint_path), weights(b.checkpoint_path))
    assert [r.step for r in resumed] == [1, 2, 3, 4, 5]
    assert straight[-1].metrics["kl/clamp/after"] > 0
    assert (tmp_path / "resumed/tests/agent/metrics.jsonl").read_text(encoding="utf-8").count("\n") == 5


@pytest.mark.slow
def test_a_moving_reference_goes_on_where_it_was(tmp_path: Path) -> None:
    async def run(folder: Path, count: int) -> list[TrainResult]:
        async with LocalBackend(folder) as backend:
            return await steps(backend, count, reference=Ema(0.5))

    straight = asyncio.run(run(tmp_path / "straight", 3))
    resumed = asyncio.run(run(tmp_path / "resumed", 2)) + asyncio.run(run(tmp_path / "resumed", 1))
    assert straight[-1].reference == resumed[-1].reference
    assert straight[-1].metrics["kl/ref/exact"] == resumed[-1].metrics["kl/ref/exact"] > 0
    assert same(weights(straight[-1].checkpoint_path), weights(resumed[-1].checkpoint_path))


def test_retention_keeps_what_the_reference_needs(tmp_path: Path) -> None:
    async def run() -> list[int]:
        async with LocalBackend(tmp_path, keep=1) as backend:
            await steps(backend, 4, kl_penalty_step_lag=2)
            return backend.saved_steps(MODEL)

    assert asyncio.run(run()) == [2, 3, 4]


def test_checkpoints_are_deleted_by_name_and_never_the_newest_nor_the_references(trained: Any, tmp_path: Path) -> None:
    shutil.copytree(trained[0], tmp_path / "copy")

    async def run() -> list[list[int]]:
        async with LocalBackend(tmp_path / "copy") as backend:
            await backend.train(MODEL, trained[1], kl_penalty_reference_step=1)
            left = [await backend.delete_checkpoints(MODEL, keep=[2])]
            await backend.train(MODEL, trained[1])
            return [*left, await backend.delete_checkpoints(MODEL)]

    assert asyncio.run(run()) == [[1, 2, 4], [5]]


def test_a_damaged_checkpoint_is_named_and_nothing_is_touched(trained: Any, tmp_path: Path) -> None:
    """Removed, as the error says, the model goes on from the step before."""
    shutil.copytree(trained[0], tmp_path / "copy")
    folder = tmp_path / "copy" / MODEL.project / MODEL.name
    newest = folder / "checkpoints" / "step-000003"
    file = newest / "adapter_model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    async def step() -> int:
        async with LocalBackend(tmp_path / "copy") as backend:
            return await backend.get_step(MODEL)

    with pytest.raises(CheckpointError, match=r"step-000003' is damaged: adapter_model\.safetensors does not match"):
        asyncio.run(step())
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    shutil.rmtree(newest)
    assert asyncio.run(step()) == 2


@pytest.mark.parametrize("done", [0, 3])
def test_a_step_that_fails_leaves_the_model_at_the_one_before(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    if done:
        shutil.copytree(trained[0], tmp_path / "broken")
        shutil.copytree(trained[0], tmp_path / "whole")

    async def run(folder: str, *, fails: bool) -> TrainResult:
        async with LocalBackend(tmp_path / folder) as backend:
            if not fails:
                return await backend.train(MODEL, trained[1], learning_rate=FAST)
            with monkeypatch.context() as patch:
                patch.setattr(worker_module.checkpoint, "save", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
                with pytest.raises(OSError, match="disk full"):
                    await backend.train(MODEL, trained[1], learning_rate=FAST)
            assert await backend.get_step(MODEL) == done
            return await backend.train(MODEL, trained[1], learning_rate=FAST)

    broken, whole = asyncio.run(run("broken", fails=True)), asyncio.run(run("whole", fails=False))
    assert broken.step == whole.step == done + 1
    assert same(weights(broken.checkpoint_path), weights(whole.checkpoint_path))
