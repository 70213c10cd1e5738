"""The endpoint inside LocalBackend: ``register`` opens it, its choices are trained on, steps are served by name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from endpoint_tools import connect, plain_logp
from peft import PeftModel
from safetensors.torch import load_file

import klamp
from klamp import models
from klamp.local_backend import LocalBackend, TrainableModel, Trajectory, TrajectoryGroup, gather_trajectory_groups

pytestmark = pytest.mark.slow

QUESTION: Any = {"role": "user", "content": "The coffee at this café"}


def new_model() -> TrainableModel:
    return TrainableModel(name="agent", project="tests", base_model="tiny")


async def rollout(model: TrainableModel, client: openai.AsyncOpenAI, step: int | None = None) -> Trajectory:
    """As ART's examples have it: the client's choice goes into the trajectory."""
    answer = await client.chat.completions.create(
        model=model.get_inference_name(step), messages=[QUESTION], max_tokens=6
    )
    choice = answer.choices[0]
    return Trajectory([QUESTION, choice], reward=-len(choice.message.content or "") / 10)


def test_a_model_is_trained_through_its_endpoint(tmp_path: Path) -> None:
    model = new_model()
    for call in (model.openai_client, lambda: asyncio.run(model.get_step())):
        with pytest.raises(klamp.ConfigError, match=r"register\(backend\)"):
            call()

    async def run() -> list[Any]:
        async with LocalBackend(tmp_path) as backend:
            await model.register(backend)
            assert model.inference_base_url is not None
            assert model.inference_base_url.startswith("http://127.0.0.1:")
            assert len(model.inference_api_key or "") > 16
            with connect(model.inference_base_url) as stranger, pytest.raises(openai.AuthenticationError):
                stranger.models.list()
            assert await model.get_step() == 0
            results = []
            async with model.openai_client() as client:
                for _ in range(2):
                    groups = await gather_trajectory_groups(
                        TrajectoryGroup(rollout(model, client) for _ in range(6)) for _ in range(2)
                    )
                    results.append(await backend.train(model, groups, learning_rate=3e-3, kl_penalty_coef=0.1))
                assert await model.get_step() == 2
                names = [m.id async for m in client.models.list()]
                assert names == ["agent", "agent@0", "agent@1", "agent@2"]
                old = [await rollout(model, client, step=1) for _ in range(4)]
                results.append(await backend.train(model, [TrajectoryGroup(old)], learning_rate=3e-3))
            return results

    first, second, third = asyncio.run(run())
    for result in (first, second):
        assert result.metrics["data/retokenised"] == 0
        assert result.metrics["data/stale"] == 0
        assert abs(result.metrics["kl/sampler/k1"]) < 1e-5, "the endpoint draws from the policy that is trained"
    assert first.metrics["kl/ref/exact"] < 1e-6 < second.metrics["kl/ref/exact"]
    assert third.metrics["data/stale"] == 4, "choices say which step drew them"


def test_steps_are_served_by_name_and_leave_the_policy_as_it_was(tmp_path: Path) -> None:
    model = new_model()

    async def run() -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        async with LocalBackend(tmp_path) as backend:
            await model.register(backend)
            async with model.openai_client() as client:
                for _ in range(3):
                    group = await TrajectoryGroup(rollout(model, client) for _ in range(6))
                    await backend.train(model, [group], learning_rate=1e-2, kl_penalty_coef=0.0, clamp=False)
                [opened] = backend._opened.values()
                assert opened.worker is not None
                own = opened.worker.learner.policy.trainable()
                before = {n: p.detach().clone() for n, p in own.items()}
                asked = {
                    name: client.chat.completions.create(model=name, messages=[QUESTION], max_tokens=8, logprobs=True)
                    for name in ("agent", "agent@0", "agent@1", "agent@2", "tests/agent@3")
                }
                found = dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))
                with pytest.raises(openai.NotFoundError, match="no model 'agent@9'"):
                    await client.chat.completions.create(model="agent@9", messages=[QUESTION])
                return found, before, {n: p.detach().clone() for n, p in own.items()}

    found, before, after = asyncio.run(run())
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert not torch.equal(
        *(
            load_file(tmp_path / f"tests/agent/checkpoints/step-00000{n}/adapter_model.safetensors")[
                "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
            ]
            for n in (1, 3)
        )
    )
    for name, answer in found.items():
        step = int(name.partition("@")[2] or 3)
        [choice] = answer.choices
        assert choice.step == step
        folder = tmp_path / f"tests/agent/checkpoints/step-{step:06d}"
        plain = PeftModel.from_pretrained(models.load_model("tiny"), str(folder)).eval()
        expected = plain_logp(plain, answer.prompt_token_ids, choice.token_ids)
        drawn = torch.tensor([e.logprob for e in choice.logprobs.content])
        torch.testing.assert_close(drawn, expected, atol=2e-5, rtol=0)


def test_training_waits_for_what_is_being_answered_and_then_goes_first(tmp_path: Path) -> None:
    model = new_model()

    async def run() -> tuple[set[int], int]:
        async with LocalBackend(tmp_path) as backend:
            await model.register(backend)
            async with model.openai_client() as client:
                group = await TrajectoryGroup(rollout(model, client) for _ in range(4))
                stop = asyncio.Event()
                seen: set[int] = set()

                async def keep_asking() -> None:
                    while not stop.is_set():
                        t = await rollout(model, client)
                        seen.add(t.messages_and_choices[-1].step)

                askers = [asyncio.ensure_future(keep_asking()) for _ in range(3)]
                while 0 not in seen:
                    await asyncio.sleep(0.01)
                result = await asyncio.wait_for(backend.train(model, [group], learning_rate=1e-3), 60)
                while 1 not in seen:
                    await asyncio.sleep(0.01)
                stop.set()
                await asyncio.gather(*askers)
                return seen, result.step

    seen, step = asyncio.run(run())
    assert step == 1
    assert seen == {0, 1}
