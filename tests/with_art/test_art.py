"""klamp under stock ART: ``make test-art`` runs this in an environment of its own."""

from __future__ import annotations

import asyncio
import inspect
import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("art", reason="ART lives in an environment of its own: make test-art")

import art
from art_numbers import TEMPLATE, art_numbers

import klamp
from klamp.integrations.art import KlampBackend
from klamp.local_backend.arguments import ART_DEFAULTS

QUESTION: Any = {"role": "user", "content": "The waiter was"}


def make_model(folder: Path, named: str = "agent", **more: Any) -> Any:
    """As ART's examples write it; in 0.5.23 a run has a name of its own."""
    run = {"run_name": f"{named}-001"} if "run_name" in art.TrainableModel.model_fields else {}
    quiet = {"base_path": str(folder / "logs"), "report_metrics": []}
    return art.TrainableModel(**{"name": named, "project": "demo", "base_model": "tiny", **quiet, **run, **more})


async def rollout(model: Any, client: Any, tokens: int = 6) -> Any:
    """One answer and its worth: the shape of every example of ART's."""
    trajectory = art.Trajectory(messages_and_choices=[QUESTION], reward=0.0)
    answer = await client.chat.completions.create(
        model=model.get_inference_name(), messages=trajectory.messages(), max_tokens=tokens
    )
    trajectory.messages_and_choices.append(answer.choices[0])
    trajectory.reward = -len(answer.choices[0].message.content or "") / 10
    trajectory.metrics["words"] = len((answer.choices[0].message.content or "").split())
    return trajectory.finish()


def test_an_example_of_arts_runs_unchanged(tmp_path: Path) -> None:
    async def run() -> None:
        backend = KlampBackend(tmp_path / "art", controller=klamp.Hold(target=0.02, per="token"))
        model = make_model(tmp_path)
        await model.register(backend)
        assert await model.get_step() == 0
        assert model.inference_base_url.startswith("http://127.0.0.1:")
        client = model.openai_client()
        judged: list[Any] = []

        async def judge(group: Any) -> Any:
            judged.append(group)
            return group

        for step in range(1, 4):
            groups = await art.gather_trajectory_groups(
                (art.TrajectoryGroup(rollout(model, client) for _ in range(4)) for _ in range(3)),
                pbar_desc=None,
                max_exceptions=2,
                after_each=judge,
            )
            result = await backend.train(model, groups, learning_rate=1e-3)
            await model.log(groups, metrics=result.metrics, step=result.step, split="train")
            await model.log(groups, split="val", step=result.step)
            assert model.get_inference_name() == "agent"
            assert result.step == step == await model.get_step()
            assert result.metrics["data/retokenised"] == result.metrics["data/stale"] == 0
            assert abs(result.metrics["kl/sampler/k1"]) < 1e-5
            assert result.metrics["loss/kl_policy_ref"] == result.metrics["kl/ref/k1"]
            assert (Path(result.checkpoint_path) / "adapter_model.safetensors").is_file()
        assert len(judged) == 9
        assert result.metrics["kl/target"] == 0.02
        old = await client.chat.completions.create(
            model=model.get_inference_name(step=0), messages=[QUESTION], max_tokens=3
        )
        assert old.choices[0].step == 0
        [opened] = backend.local._opened.values()
        async with backend.exact_adapter_lease(model, 0):
            await model.delete_checkpoints()
            assert 0 in backend.local.saved_steps(opened.model), "it is still asked"
        await model.delete_checkpoints()
        left = backend.local.saved_steps(opened.model)
        assert 3 in left
        assert 0 not in left
        with pytest.raises(klamp.ConfigError, match="step 0 of agent is not saved"):
            await backend.exact_adapter_lease(model, 0).__aenter__()
        assert len(left) <= 2
        lines = next((tmp_path / "logs/demo/models").glob("*/history.jsonl")).read_text().splitlines()
        history = [json.loads(line) for line in lines]
        assert any("train/kl/ref/exact" in row or "kl/ref/exact" in row for row in history)
        with pytest.raises(klamp.ConfigError, match="does not train_sft"):
            await model.train_sft([art.Trajectory(messages_and_choices=[QUESTION], reward=0.0)])
        await client.close()
        await backend.close()

    asyncio.run(run())


def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    async def step() -> int:
        async with KlampBackend(tmp_path / "art") as backend:
            model = make_model(tmp_path)
            await model.register(backend)
            client = model.openai_client()
            group = await art.TrajectoryGroup([rollout(model, client) for _ in range(4)])
            result = await backend.train(model, [group], learning_rate=1e-4, verbose=True)
            assert result.metrics["kl/beta"] == 0, "ART's default: measured, not priced"
            await client.close()
            return int(result.step)

    assert [asyncio.run(step()) for _ in range(2)] == [1, 2]


def test_tool_turns_side_conversations_and_captured_exchanges_arrive(tmp_path: Path) -> None:
    tool: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

    async def agent(model: Any, client: Any) -> None:
        """Two turns with a tool's answer between, and a question aside."""
        messages: list[Any] = [QUESTION]
        name = model.get_inference_name()
        first = await client.chat.completions.create(model=name, messages=messages, tools=[tool], max_tokens=5)
        messages.append({"role": "assistant", "content": first.choices[0].message.content})
        messages.append({"role": "tool", "tool_call_id": "1", "content": "nothing there"})
        await client.chat.completions.create(model=name, messages=messages, tools=[tool], max_tokens=5)
        await client.chat.completions.create(model=name, messages=[{"role": "user", "content": "Hm"}], max_tokens=5)

    async def captured(model: Any, client: Any, number: int) -> Any:
        """ART 0.5.18 puts what it captured into histories; 0.5.23 keeps the exchanges."""
        old = hasattr(art, "capture_auto_trajectory")
        found = await (art.capture_auto_trajectory if old else art.trajectory)(agent(model, client))
        if old:
            assert len(found.additional_histories) == 1
        else:
            assert len(found.exchanges.chat_completions) == 3
        found.reward = float(number)
        return found

    async def run() -> Any:
        async with KlampBackend(tmp_path / "art") as backend:
            model = make_model(tmp_path, _internal_config={"chat_template": TEMPLATE})
            await model.register(backend)
            client = model.openai_client()
            group = art.TrajectoryGroup([await captured(model, client, n) for n in range(3)])
            result = await backend.train(model, [group], learning_rate=1e-4, kl_penalty_coef=0.1)
            await client.close()
            return result

    result = asyncio.run(run())
    assert result.metrics["data/trajectories"] == 3
    assert result.metrics["data/sequences"] >= 6, "a side conversation is a sequence of its own"
    assert result.metrics["data/retokenised"] == 0
    assert abs(result.metrics["kl/sampler/k1"]) < 1e-5


@pytest.mark.skipif(not hasattr(art, "trajectory"), reason="ART 0.5.18 captures no exchanges")
def test_of_captured_exchanges_the_models_own_are_trained_on(tmp_path: Path) -> None:
    """Streams, several choices, plain text; not what another model said, and nothing without tokens."""

    async def agent(model: Any, client: Any, *, name: str | None = None) -> None:
        wish: dict[str, Any] = {"model": name or model.get_inference_name(), "max_tokens": 4, "temperature": 0.7}
        async for _ in await client.chat.completions.create(messages=[QUESTION], stream=True, **wish):
            pass
        await client.chat.completions.create(messages=[QUESTION], n=2, **wish)
        await client.completions.create(prompt="The soup", **wish)

    async def run() -> Any:
        async with KlampBackend(tmp_path / "art") as backend, KlampBackend(tmp_path / "judge") as other:
            model, judge = make_model(tmp_path), make_model(tmp_path, named="judge")
            await model.register(backend)
            await judge.register(other)
            client, judging = model.openai_client(), judge.openai_client()
            slashed = make_model(tmp_path, named="team/agent", run_name="slashed")
            await slashed.register(backend)
            asking = slashed.openai_client()
            for name in (slashed.get_inference_name(), slashed.get_inference_name(0), "demo/team/agent"):
                answer = await asking.chat.completions.create(model=name, messages=[QUESTION], max_tokens=2)
                assert answer.choices[0].step == 0
            await asking.close()

            async def both(number: int) -> Any:
                async def rollout() -> None:
                    await agent(model, client)
                    await judging.chat.completions.create(model="judge", messages=[QUESTION], max_tokens=4)

                found = await art.trajectory(rollout())
                found.reward = float(number)
                return found

            group = await art.trajectory_group([both(n) for n in range(3)])
            result = await backend.train(model, [group], learning_rate=1e-4)
            alone = await art.trajectory(judging.completions.create(model="judge", prompt="The soup"))
            with pytest.raises(klamp.ConfigError, match="no exchange with 'agent', only with judge"):
                await backend.train(model, [art.TrajectoryGroup([alone, alone])])
            bare = group.trajectories[0].model_copy(deep=True)
            for choice in bare.exchanges.chat_completions[0].response.choices:
                del choice.token_ids
            with pytest.raises(klamp.ConfigError, match="without its tokens"):
                await backend.train(model, [art.TrajectoryGroup([bare, bare])])
            await client.close()
            await judging.close()
            return result

    result = asyncio.run(run())
    assert result.metrics["data/trajectories"] == 3
    assert result.metrics["data/sequences"] == 12, "a stream, two choices and a text each"
    assert result.metrics["data/retokenised"] == 0
    assert abs(result.metrics["kl/sampler/k1"]) < 1e-5, "at the temperature of the request"


@pytest.mark.skipif(not hasattr(art, "trajectory"), reason="the PipelineTrainer of 0.5.23")
def test_arts_pipeline_trainer_trains_and_evaluates(tmp_path: Path) -> None:
    """ART's yes_no_maybe_pipeline but for the model and the reward: rollouts go on while steps are trained."""
    from itertools import cycle

    from art.pipeline_trainer import PipelineTrainer

    async def answers(model: Any, step: int | None, n: int) -> list[Any]:
        client = model.openai_client()
        asked = {"model": model.get_inference_name(step), "messages": [QUESTION], "max_tokens": 5, "n": n}
        found = (await client.chat.completions.create(**asked)).choices
        worth = [-len(c.message.content or "") / 10 for c in found]
        return [art.Trajectory(messages_and_choices=[QUESTION, c], reward=w) for c, w in zip(found, worth, strict=True)]

    async def rollout_fn(model: Any, scenario: Any, config: Any) -> Any:
        return art.TrajectoryGroup(await answers(model, None, 4))

    async def eval_fn(model: Any, step: int, config: Any) -> list[Any]:
        return await answers(model, step, 2)

    async def run() -> None:
        async with KlampBackend(tmp_path / "art") as backend:
            model = make_model(tmp_path)
            await model.register(backend)
            settings = {"learning_rate": 1e-3, "loss_fn": "cispo", "kl_penalty_coef": 0.1, "max_steps": 3}
            sizes = {"num_rollout_workers": 2, "min_batch_size": 1, "max_batch_size": 2}
            trainer = PipelineTrainer(
                model=model,
                backend=backend,
                rollout_fn=rollout_fn,
                scenarios=cycle([{}]),
                config=None,
                eval_fn=eval_fn,
                eval_every_n_steps=3,
                eval_at_start=False,
                **settings,
                **sizes,
            )
            await trainer.train()
            assert await model.get_step() == 3

    asyncio.run(run())
    lines = next((tmp_path / "logs/demo/models").glob("*/history.jsonl")).read_text().splitlines()
    assert any("val/reward" in json.loads(line) for line in lines)


def test_keywords_and_protocol_are_those_of_the_installed_art() -> None:
    """Nothing that ART's own train takes is unknown, and its defaults are taken for what they are."""
    source = Path(inspect.getfile(art)).parent / "local" / "backend.py"
    text = source.read_text(encoding="utf-8").partition("async def train(")[2].partition("->")[0]
    names = {
        line.split(":")[0].strip()
        for line in text.splitlines()
        if ":" in line and "=" in line and not line.strip().startswith(("#", '"'))
    }
    own = set(inspect.signature(klamp.local_backend.LocalBackend.train).parameters)
    assert len(names) > 20
    assert not names - own - set(ART_DEFAULTS)
    wanted = {n for n in vars(art.Backend) if not n.startswith(("__", "_is_", "_abc", "_non_callable"))}
    assert wanted <= set(dir(KlampBackend))


def test_advantages_and_weights_are_arts_on_new_groups() -> None:
    """Against ART's own code, on groups that no file records."""
    import sys

    sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))
    from check_groups import art_groups
    from vectors import Case

    chance = random.Random()
    for number in range(5):
        groups = [
            [
                {"reward": chance.gauss(0, 3), "tokens": [chance.randint(1, 12) for _ in range(chance.choice([1, 2]))]}
                for _ in range(chance.randint(2, 6))
            ]
            for _ in range(chance.randint(1, 4))
        ]
        outputs = art_numbers(groups, scale_rewards=number != 4)
        inputs = {"groups": groups, "scale_rewards": number != 4}
        art_groups(Case("art_groups.json", {"id": "new", "kind": "groups", "inputs": inputs, "outputs": outputs}))
