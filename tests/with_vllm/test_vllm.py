"""GRPO on ``tiny`` with a real vLLM server as the sampler."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from klamp.train.config import RolloutConfig, TrainConfig
from klamp.train.loop import Trainer
from vllm_process import Vllm


def rows(made: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in made.folder.metrics.read_text().splitlines()]


def made(vllm: Vllm, run: Path, steps: int, **rollout: Any) -> Trainer:
    server = RolloutConfig(engine="vllm", url=vllm.url, **rollout)
    return Trainer(TrainConfig(run=str(run), steps=steps, device="cpu", rollout=server), quiet=True)


@pytest.fixture(scope="module")
def held(vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Thirty steps through the server."""
    run = made(vllm, tmp_path_factory.mktemp("held"), 30)
    run.run()
    return rows(run)


def mean(found: list[dict[str, Any]], key: str) -> float:
    return float(sum(r[key] for r in found) / len(found))


def test_every_version_is_sampled_by_itself(held: list[dict[str, Any]]) -> None:
    """The server's log-probs are the trainer's to 1e-4 at every step; a version behind they differ by a hundred times
    that, as the run with ``ahead`` shows."""
    assert max(r["rollout/gap_max"] for r in held) <= 1e-4
    assert {r["rollout/version_lag"] for r in held} == {0.0}


def test_kl_is_held_through_the_server(held: list[dict[str, Any]]) -> None:
    """The last third stays under the limit of 1.1 x target, give or take the noise of a reading of 32 sequences."""
    last = mean(held[20:], "kl/steered") / held[-1]["kl/target"]
    assert 0.5 < last < 1.15, last
    assert mean(held[20:], "reward/mean") > mean(held[:3], "reward/mean") + 0.1


def test_ahead_earns_the_same_at_the_same_kl(vllm: Vllm, held: list[dict[str, Any]], tmp_path: Path) -> None:
    run = made(vllm, tmp_path / "ahead", 30, ahead=1)
    run.run()
    found = rows(run)
    assert [r["rollout/version_lag"] for r in found] == [0.0] + [1.0] * 29
    assert min(r["rollout/gap_max"] for r in found[1:]) > 1e-2, "these tokens are of another version"
    # 32 rewards of standard deviation 0.5 a step, ten steps each side: the means differ by 0.04 from noise alone.
    assert abs(mean(found[20:], "reward/mean") - mean(held[20:], "reward/mean")) < 0.15
    waited = mean(held[2:], "time/sample"), mean(found[2:], "time/sample")
    print(f"waited for the engine: {waited[0]:.3f} s a step, with ahead {waited[1]:.3f} s")


def test_a_server_killed_in_the_middle_is_waited_for(vllm: Vllm, tmp_path: Path) -> None:
    """Killed while a step is sampled and started again, it gets the adapter once more and the run goes on."""
    run = made(vllm, tmp_path / "killed", 4, retries=9)
    restart = threading.Thread(target=lambda: (vllm.kill(), vllm.start()))

    def kill(step: int, _: Any) -> dict[str, float]:
        if step == 2:
            restart.start()
        return {}

    run.watch = kill
    run.run()
    restart.join()
    assert rows(run)[-1]["step"] == 4
    assert max(r["rollout/gap_max"] for r in rows(run)) <= 1e-4


def test_the_reference_can_be_scored_by_the_server(vllm: Vllm) -> None:
    from klamp import models
    from klamp.sampling.vllm_server import Server

    tokenizer = models.load_tokenizer("tiny")
    ids = [
        tokenizer("The food was good and the staff were kind.")["input_ids"],
        tokenizer("I did not like it.")["input_ids"],
    ]
    server = Server(vllm.url)
    found = server.score("tiny", ids)
    server.close()
    model = models.load_model("tiny", dtype=torch.float32, device="cpu")
    for row, logps in zip(ids, found, strict=True):
        with torch.no_grad():
            own = model(input_ids=torch.tensor([row])).logits[0, :-1].log_softmax(-1)
        own = own.gather(-1, torch.tensor(row)[1:, None])[:, 0]
        assert torch.allclose(torch.tensor(logps), own, atol=1e-4)


def test_clients_of_a_local_backend_are_answered_by_the_server(vllm: Vllm, tmp_path: Path) -> None:
    """A step on what OpenAI clients were answered: the server's tokens, under the step's adapter."""
    pytest.importorskip("openai")
    from klamp.local_backend import LocalBackend, TrainableModel, Trajectory, TrajectoryGroup

    model = TrainableModel("agent", "tests", "tiny", lora_rank=8)
    asked: Any = {"role": "user", "content": "The coffee at this café"}

    async def work() -> list[dict[str, float]]:
        found = []
        async with LocalBackend(tmp_path, url=vllm.url, served="tiny") as backend:
            await model.register(backend)
            async with model.openai_client() as client:
                for step in range(2):
                    wish: dict[str, Any] = {"model": "agent", "messages": [asked], "max_tokens": 12, "n": 4}
                    answers = await asyncio.gather(*(client.chat.completions.create(**wish) for _ in range(4)))
                    choices = [c for a in answers for c in a.choices]
                    assert {c.step for c in choices} == {step}
                    group = [Trajectory([asked, c], reward=-len(c.token_ids)) for c in choices]
                    done = await backend.train(model, [TrajectoryGroup(group)], learning_rate=1e-3, clamp=False)
                    found.append(done.metrics)
        return found

    for metrics in asyncio.run(work()):
        assert metrics["rollout/gap_max"] <= 1e-4
        assert metrics["data/stale"] == metrics["data/retokenised"] == 0
