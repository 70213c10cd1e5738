"""What LocalBackend trains on, what it refuses, and how it behaves in an event loop."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import klamp
from klamp import models
from klamp.chat import Encoder
from klamp.local_backend import (
    Choice,
    LocalBackend,
    Message,
    TrainableModel,
    Trajectory,
    TrajectoryGroup,
    gather_trajectory_groups,
)
from klamp.local_backend.arguments import ART_DEFAULTS, Arguments
from klamp.sampling.rollout import Rollout
from klamp.train import learner as learner_module

MODEL = TrainableModel(name="agent", project="tests", base_model="tiny")
QUESTION = {"role": "user", "content": "The waiter was"}
TEMPLATE = (
    "{% for m in messages %}<|bos|>{{ m.role }}: {{ m.content | trim }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return models.load_tokenizer("tiny")


@pytest.fixture
def encoder(tokenizer: Any) -> Encoder:
    return Encoder(tokenizer, vocabulary=2048, context=256, end=(1,))


@pytest.fixture
def chatty() -> Encoder:
    tokenizer = models.load_tokenizer("tiny")
    tokenizer.chat_template = TEMPLATE
    return Encoder(tokenizer, vocabulary=2048, context=256, end=(1,))


def choice(ids: tuple[int, ...], prompt: tuple[int, ...], text: str = "whatever", **more: Any) -> Choice:
    return Choice(Message("assistant", text), "stop", ids, tuple(-0.1 * i for i in range(len(ids))), prompt, **more)


# Tokens


def test_sampled_tokens_are_trained_on_as_they_are_and_nothing_else_counts(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # " no" is one token, 462; these two spell it another way, and no tokenizer would return them.
    odd = tuple(tokenizer.convert_tokens_to_ids(t) for t in ("Ġ", "n", "o"))
    assert tokenizer.decode(odd) == " no"
    assert tokenizer(" no", add_special_tokens=False)["input_ids"] != list(odd)
    prompt = tuple(tokenizer("The waiter was")["input_ids"])
    said = [choice(odd, prompt, " no"), choice((462, 1), prompt, " no")]
    group = TrajectoryGroup([Trajectory([QUESTION, c], reward=float(n)) for n, c in enumerate(said)])
    seen: list[Rollout] = []
    real = learner_module.Learner.step

    def step(self: Any, number: int, rollout: Rollout, *rest: Any, **more: Any) -> Any:
        seen.append(rollout)
        return real(self, number, rollout, *rest, **more)

    monkeypatch.setattr(learner_module.Learner, "step", step)

    async def run() -> dict[str, float]:
        async with LocalBackend(tmp_path) as backend:
            return (await backend.train(MODEL, [group])).metrics

    metrics = asyncio.run(run())
    [rollout] = seen
    for row, c in enumerate(said):
        keep = rollout.mask[row]
        assert tuple(rollout.tokens[row][keep].tolist()) == c.token_ids
        assert rollout.sampler_logp[row][keep].tolist() == pytest.approx(c.logp)
        assert tuple(rollout.ids[row][rollout.attention[row]].tolist()) == (*prompt, *c.token_ids)
    assert int(rollout.mask.sum()) == 5
    assert metrics["data/retokenised"] == 0
    assert metrics["data/stale"] == 2, "their log-probs are not the model's"


def test_turns_that_go_on_from_one_another_share_a_sequence(tmp_path: Path) -> None:
    async def run() -> tuple[Choice, Choice, Encoder]:
        async with LocalBackend(tmp_path) as backend:
            [first] = await backend.sample(MODEL, [QUESTION], max_tokens=5)
            more = {"role": "user", "content": "The bread was"}
            [second] = await backend.sample(MODEL, [QUESTION, first, more], max_tokens=5)
            [opened] = backend._opened.values()
            assert opened.worker is not None
            return first, second, opened.worker.encoder

    first, second, encoder = asyncio.run(run())
    so_far = (*first.prompt_token_ids, *first.token_ids)
    assert second.prompt_token_ids[: len(so_far)] == so_far
    more = {"role": "user", "content": "The bread was"}
    [row] = encoder.rows(Trajectory([QUESTION, first, more, second]))
    assert row.ids == [*second.prompt_token_ids, *second.token_ids]
    own = [i for i, counted in zip(row.ids, row.counted, strict=True) if counted]
    assert own == [*first.token_ids, *second.token_ids]
    assert [v for v, c in zip(row.logp, row.counted, strict=True) if c] == [*first.logp, *second.logp]
    # A turn drawn after another text than the tokens before it is a sequence of its own, after what it was drawn after.
    apart = encoder.rows(Trajectory([QUESTION, first, more, choice((462,), (0, 5, 7))]))
    assert [r.ids for r in apart] == [list(so_far), [0, 5, 7, 462]]


def test_a_chat_is_rendered_around_the_turns(chatty: Encoder) -> None:
    tokenizer = chatty.tokenizer
    first = SimpleNamespace(message=Message("assistant", "  spaced "), token_ids=[300, 301, 1])
    cut = SimpleNamespace(message=Message("assistant", "cut"), token_ids=[302], finish_reason="length")
    more = {"role": "user", "content": "[turn 0.0] go on"}
    text = "<|bos|>user: The waiter was<|eos|>\n<|bos|>assistant: "
    between = "<|bos|>user: [turn 0.0] go on<|eos|>\n<|bos|>assistant: "

    def ids(piece: str) -> list[int]:
        return list(tokenizer(piece, add_special_tokens=False)["input_ids"])

    expected = [*ids(text), 300, 301, 1, *ids("\n" + between), 302]
    [row] = chatty.rows(Trajectory([QUESTION, first, more, cut]))
    assert row.ids == expected, "the end token that was said is not said twice"
    assert sum(row.counted) == 4
    going_on = chatty.prompt([QUESTION, first, more, cut, QUESTION])
    assert going_on[: len(expected)] == expected
    assert tokenizer.decode(going_on[len(expected) :]) == "<|eos|>\n" + text, "the end that was cut off is put there"


def test_text_is_tokenised_once_and_marked(encoder: Encoder, chatty: Encoder, tmp_path: Path) -> None:
    said = [QUESTION, {"role": "assistant", "content": " very kind"}]
    [row] = encoder.rows(Trajectory(said))
    assert encoder.tokenizer.decode([i for i, c in zip(row.ids, row.counted, strict=True) if c]) == " very kind"
    assert row.retokenised == 1
    assert all(torch.isnan(torch.tensor(v)) for v, c in zip(row.logp, row.counted, strict=True) if c)
    [row] = chatty.rows(Trajectory(said))
    assert row.ids[-1] == 1, "the template shows that the turn ended"
    assert row.counted[-1]
    # With a choice in it, an assistant's message is somebody else's text.
    [row] = encoder.rows(Trajectory([*said, QUESTION, choice((462,), (0, 5))]))
    assert sum(row.counted) == 1

    async def run() -> dict[str, float]:
        async with LocalBackend(tmp_path) as backend:
            worse = Trajectory([QUESTION, {"role": "assistant", "content": " not there"}], reward=-1.0)
            with pytest.raises(klamp.ConfigError, match="no trajectory has any"):
                await backend.train(MODEL, [[Trajectory(said), worse]], kl_penalty_source="sample")
            return (await backend.train(MODEL, [[Trajectory(said), worse]])).metrics

    metrics = asyncio.run(run())
    assert metrics["data/retokenised"] == 2
    assert metrics["kl/sampler/k1"] == 0


def test_the_choices_of_an_openai_client_are_read(encoder: Encoder) -> None:
    entries = [SimpleNamespace(token=f"token_id:{i}", logprob=-0.5 * i) for i in (3, 4)]
    other = SimpleNamespace(
        message=SimpleNamespace(content="x"), logprobs=SimpleNamespace(content=entries), finish_reason="stop"
    )
    [row] = encoder.rows(SimpleNamespace(messages_and_choices=[QUESTION, other], reward=1.0))
    assert row.ids[-2:] == [3, 4]
    assert row.logp[-2:] == [-1.5, -2.0]
    assert row.retokenised == 0
    words = [SimpleNamespace(token=" no", logprob=-1.0)]
    textual = SimpleNamespace(message=SimpleNamespace(content=" no"), logprobs=SimpleNamespace(content=words))
    [row] = encoder.rows(SimpleNamespace(messages_and_choices=[QUESTION, textual], reward=1.0))
    assert row.retokenised == 1


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([QUESTION], "nothing that the model said"),
        ([QUESTION, choice((4096,), (0,))], "token id 4096 is not in the vocabulary of 2048"),
        ([QUESTION, choice((5,) * 300, (0,))], "301 tokens, the model's context is 256"),
        ([QUESTION, replace(choice((5,), (0,)), logp=())], "1 token ids and 0 log-probs"),
        (["hello"], "role and content"),
        ([{"content": "x"}], "must have a role"),
        ([QUESTION, {"role": "assistant", "content": None}], "must be text"),
    ],
)
def test_trajectories_that_cannot_be_trained_on_are_refused(encoder: Encoder, items: list[Any], said: str) -> None:
    with pytest.raises(klamp.ConfigError, match=said):
        encoder.rows(Trajectory(items))


# Arguments


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"lr": 1e-4}, "no argument 'lr'. Write learning_rate"),
        ({"kl_coef": 0.1}, "Write kl_penalty_coef"),
        ({"beta": 0.1}, "Write kl_penalty_coef"),
        ({"target_kl": 0.1}, "Write controller=klamp.Hold"),
        ({"kl_penalty_coeff": 0.1}, "Did you mean 'kl_penalty_coef'"),
        ({"warmup_ratio": 0.1}, r"no argument 'warmup_ratio'\. Choose from"),
        ({"loss_function": "ppo"}, r"no argument 'loss_function'\. Choose from"),
        ({"kimi_k2_tau": 1.0}, r"kimi_k2_tau=1\.0 is an argument of ART's .* default, None"),
        ({"advantage_balance": 0.5}, r"advantage_balance=0\.5 is an argument of ART's .* default, 0\.0"),
        ({"save_checkpoint": False}, "save_checkpoint=False is an argument of ART's"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level='sequence' is an argument of ART's"),
        ({"advantages": "grpo"}, "advantages 'grpo' is not known"),
        ({"loss_fn": "dapo"}, "loss_fn 'dapo' is not known"),
        ({"kl_penalty_coef": -1.0}, "kl_penalty_coef must be >= 0"),
        ({"learning_rate": 0.0}, "learning_rate must be > 0"),
        ({"kl_penalty_step_lag": 0}, "lag must be >= 1"),
        ({"kl_penalty_reference_step": 1.5}, "whole number"),
        ({"kl_penalty_reference_step": 1, "kl_ref_adapter_path": "x"}, "each name a reference. Give one"),
        ({"kl_penalty_step_lag": 1, "kl_penalty_reference_step": 1}, "each name a reference. Give one"),
        ({"kl_ref_adapter_path": "x", "reference": "base"}, "each name a reference. Give one"),
        ({"controller": klamp.Hold(0.05, "token"), "kl_penalty_coef": 1.0}, "both set the price"),
        ({"controller": klamp.Stateful(klamp.Fixed(0.1))}, r"init\(\) and a pure update"),
        ({"controller": 0.1}, r"init\(\) and a pure update"),
        ({"reference": "nonsense"}, "not known"),
        ({"kl_penalty_source": "policy"}, "kl_penalty_source 'policy' is not known"),
        ({"kl_limit": 0.0}, "kl_limit must be > 0"),
        ({"micro_batch": -1}, "micro_batch must be >= 0"),
        ({"epsilon": float("nan")}, "epsilon must be a finite number"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused_before_anything_is_made(
    tmp_path: Path, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(klamp.ConfigError, match=said):
        asyncio.run(LocalBackend(tmp_path).train(MODEL, [], **arguments))
    assert list(tmp_path.iterdir()) == []


def test_the_flat_arguments_become_the_one_configuration(tmp_path: Path) -> None:
    names = set(Arguments.__dataclass_fields__)
    assert names <= set(LocalBackend.train.__annotations__), "every argument of the call is one of the settings"

    async def run() -> Any:
        async with LocalBackend(tmp_path) as backend:
            said = [Trajectory([QUESTION, choice((i, 5), (0, 9))], reward=float(i)) for i in (462, 463)]
            await backend.train(MODEL, [said], learning_rate=2e-4, kl_penalty_step_lag=7, kl_penalty_coef=0.3)

    asyncio.run(run())
    text = (tmp_path / "tests/agent/config.yaml").read_text(encoding="utf-8")
    for line in ("lr: 0.0002", "reference: lag:7", "beta: 0.3", "placement: in_advantage", "estimator: k1"):
        assert line in text


@pytest.mark.parametrize("bad", ["..", "a/b", "/etc", "", ".", "a..b", "a\\b", "x\0", "-x", "a" * 200, None, " a"])
def test_names_cannot_lead_out_of_the_folder(tmp_path: Path, bad: Any) -> None:
    for fields in ({"name": bad, "project": "p"}, {"name": "n", "project": bad}):
        with pytest.raises(klamp.ConfigError, match="not a folder name"):
            TrainableModel(**fields, base_model="tiny")
        with pytest.raises(klamp.ConfigError, match="not a folder name"):
            asyncio.run(LocalBackend(tmp_path).register(SimpleNamespace(**fields, base_model="tiny")))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("link", ["tests", "tests/agent", "tests/agent/checkpoints"])
def test_links_cannot_lead_out_of_the_folder(tmp_path: Path, link: str) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    (root / link).parent.mkdir(parents=True)
    (root / link).symlink_to(outside, target_is_directory=True)
    with pytest.raises(klamp.ConfigError, match="leads out of"):
        asyncio.run(LocalBackend(root).register(MODEL))
    assert list(outside.iterdir()) == []


def test_a_folder_belongs_to_its_base_and_adapter(tmp_path: Path) -> None:
    async def register(model: TrainableModel) -> list[int]:
        async with LocalBackend(tmp_path) as backend:
            await model.register(backend)
            return backend.saved_steps(model)

    assert asyncio.run(register(MODEL)) == [0], "step 0 is saved at registration"
    with pytest.raises(klamp.ConfigError, match="made with rank=16"):
        asyncio.run(register(TrainableModel("agent", "tests", "tiny", lora_rank=8)))


def test_a_step_has_one_temperature_and_finite_rewards(tmp_path: Path) -> None:
    warm, hot = choice((5,), (0,), temperature=1.0), choice((5,), (0,), temperature=1.3)

    async def run() -> None:
        async with LocalBackend(tmp_path) as backend:
            with pytest.raises(klamp.ConfigError, match=r"temperatures 1, 1\.3"):
                await backend.train(MODEL, [[Trajectory([QUESTION, warm]), Trajectory([QUESTION, hot])]])
            bad = Trajectory([QUESTION, warm], reward=float("nan"))
            with pytest.raises(klamp.ConfigError, match="reward of trajectory 1 of group 0"):
                await backend.train(MODEL, [[Trajectory([QUESTION, warm]), bad]])
            with pytest.raises(klamp.ConfigError, match="no trajectory to train on"):
                await backend.train(MODEL, [TrajectoryGroup([ValueError("lost")])])
            assert await backend.get_step(MODEL) == 0

    asyncio.run(run())


# In an event loop


def test_training_is_refused_twice_at_once_and_leaves_the_loop_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, real = threading.Event(), learner_module.Learner.step

    def step(*arguments: Any, **more: Any) -> Any:
        begun.set()
        return real(*arguments, **more)

    monkeypatch.setattr(learner_module.Learner, "step", step)
    said = [Trajectory([QUESTION, choice((i, 5), (0, 9))], reward=float(i)) for i in (462, 463)]

    async def run() -> tuple[int, int]:
        async with LocalBackend(tmp_path) as backend:
            await backend.register(MODEL)
            first = asyncio.ensure_future(backend.train(MODEL, [said]))
            await asyncio.sleep(0)
            with pytest.raises(klamp.KlampError, match="is being trained"):
                await backend.train(MODEL, [said])
            ticks = 0
            while not first.done():
                await asyncio.sleep(0.001)
                ticks += 1
            assert first.result().step == 1
            # Whoever stops waiting does not stop the step, and the next call may not come before its end.
            begun.clear()
            hurried = asyncio.ensure_future(backend.train(MODEL, [said]))
            assert await asyncio.to_thread(begun.wait, 60)
            hurried.cancel()
            with pytest.raises(klamp.KlampError, match="is being trained"):
                await backend.train(MODEL, [said])
            return ticks, await backend.get_step(MODEL)

    ticks, step = asyncio.run(run())
    assert ticks > 3
    assert step == 2


def test_calls_that_wait_together_are_drawn_together_and_alike_every_time(tmp_path: Path) -> None:
    async def run(folder: Path) -> tuple[list[Choice], int]:
        async with LocalBackend(folder) as backend:
            await backend.register(MODEL)
            [opened] = backend._opened.values()
            assert opened.worker is not None
            asked = [backend.sample(MODEL, [QUESTION], n=2, max_tokens=4) for _ in range(5)]
            long = backend.sample(MODEL, [{"role": "user", "content": "a b c d " * 200}])
            *drawn, refused = await asyncio.gather(*asked, long, return_exceptions=True)
            assert isinstance(refused, klamp.ConfigError), "one that does not fit is refused alone"
            return [c for choices in drawn for c in choices], opened.worker.completions.asked

    (first, batches), (second, _) = asyncio.run(run(tmp_path / "a")), asyncio.run(run(tmp_path / "b"))
    assert first == second
    assert len({c.token_ids for c in first}) > 1
    assert batches == 1
    assert [c.index for c in first] == [0, 1] * 5


def test_the_random_numbers_of_the_program_are_its_own(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)

    async def run() -> None:
        async with LocalBackend(tmp_path) as backend:
            [c] = await backend.sample(MODEL, [QUESTION], max_tokens=3)
            await backend.train(MODEL, [[Trajectory([QUESTION, c], reward=1.0)]])

    asyncio.run(run())
    assert torch.equal(torch.rand(3), expected)


def test_a_group_is_gathered_from_coroutines_and_keeps_what_failed() -> None:
    async def rollout(n: int) -> Trajectory:
        if n == 1:
            raise ValueError("lost")
        return Trajectory([QUESTION], reward=float(n))

    group = asyncio.run(TrajectoryGroup.gather(rollout(n) for n in range(3)))
    assert [t.reward for t in group] == [0.0, 2.0]
    assert [str(e) for e in group.exceptions] == ["lost"]


# Rollouts at the same time


async def rollout(n: int) -> Trajectory:
    await asyncio.sleep(0.001 * (5 - n))
    if n == 1:
        raise ValueError("lost")
    return Trajectory([QUESTION], reward=float(n))


def test_a_group_of_coroutines_is_awaited_and_raises_what_fails(tmp_path: Path) -> None:
    async def run() -> TrajectoryGroup:
        pending = TrajectoryGroup((rollout(n) for n in (0, 2, 3)), metadata={"task": "x"})
        with pytest.raises(klamp.ConfigError, match="has not run"):
            await LocalBackend(tmp_path).train(MODEL, [pending])
        with pytest.raises(ValueError, match="lost"):
            await TrajectoryGroup(rollout(n) for n in range(3))
        return await pending

    group = asyncio.run(run())
    assert [t.reward for t in group] == [0.0, 2.0, 3.0], "in the order that they were given in"
    assert group.metadata == {"task": "x"}


@pytest.mark.parametrize(("most", "raises"), [(0, True), (1, True), (2, False), (0.3, True), (0.34, False)])
def test_some_rollouts_of_many_groups_may_fail(most: float, raises: bool) -> None:
    """Two of six fail: more than one, and a third of them."""

    async def run() -> list[TrajectoryGroup]:
        groups = [TrajectoryGroup(rollout(n) for n in range(3)) for _ in range(2)]
        return await gather_trajectory_groups(groups, max_exceptions=most)

    if raises:
        with pytest.raises(ValueError, match="lost"):
            asyncio.run(run())
        return
    groups = asyncio.run(run())
    assert [[t.reward for t in g] for g in groups] == [[0.0, 2.0]] * 2
    assert [len(g.exceptions) for g in groups] == [1, 1]


def test_groups_go_through_a_callback_and_a_failed_group_is_left_out() -> None:
    async def group(n: int) -> TrajectoryGroup:
        if n == 3:
            raise OSError("no such game")
        return TrajectoryGroup([Trajectory([QUESTION], reward=float(n))])

    async def judge(made: TrajectoryGroup) -> TrajectoryGroup | list[TrajectoryGroup] | None:
        [t] = made
        return {0: made, 1: None, 2: [made, made]}[int(t.reward)]  # type: ignore[return-value]

    async def run(**settings: Any) -> list[float]:
        found = await gather_trajectory_groups(map(group, range(4)), after_each=judge, pbar_desc=None, **settings)
        return [t.reward for g in found for t in g]

    assert asyncio.run(run(max_exceptions=float("inf"))) == [0.0, 2.0, 2.0]
    with pytest.raises(OSError, match="no such game"):
        asyncio.run(run())


def test_a_trajectory_notes_how_long_it_took() -> None:
    async def run() -> Trajectory:
        t = Trajectory([QUESTION])
        for _ in range(2):
            async with t.track_duration("tool"):
                await asyncio.sleep(0.01)
        t.log("done")
        return t.finish()

    t = asyncio.run(run())
    assert 0.02 <= t.metrics["tool_duration"] <= t.metrics["duration"]
    assert t.logs == ["done"]


def test_keywords_of_art_at_their_defaults_are_taken(tmp_path: Path) -> None:
    """Whatever is wrong with the call, it is not one of these."""
    with pytest.raises(klamp.ConfigError, match="no trajectory to train on"):
        asyncio.run(
            LocalBackend(tmp_path).train(
                MODEL,
                [],
                **ART_DEFAULTS,
                loss_fn="cispo",
                normalize_advantages=True,
                scale_rewards=True,
                kl_penalty_coef=0.0,
                epsilon=None,
                epsilon_high=None,
                verbose=False,
            )
        )
    given: dict[str, Any] = dict.fromkeys(Arguments.__dataclass_fields__) | {
        "learning_rate": 1e-5,
        "kl_penalty_coef": 0.0,
        "kl_penalty_source": "current_learner",
        "advantages": "art",
        "clamp": True,
        "scale_rewards": True,
        "normalize_advantages": True,
        "max_grad_norm": 1.0,
        "micro_batch": 0,
    }
    clips = [
        Arguments(**{**given, "loss_fn": loss, "epsilon": low, "epsilon_high": high}).clip
        for loss, low, high in (("ppo", None, None), ("ppo", 0.1, None), ("cispo", None, None), ("cispo", 0.5, 2.0))
    ]
    assert clips == [(0.2, 0.2), (0.1, 0.1), (1.0, 4.0), (0.5, 2.0)], "as art.loss has them"
