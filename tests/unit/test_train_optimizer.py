"""AdamW with moments in 8 bits: what it needs, that it trains, and that a resumed run goes on to the bit."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from klamp.errors import ConfigError, MissingExtra
from klamp.models.optimizer import check_optimizer, moments, optimizer_of, restore_moments, set_rate
from klamp.models.policy import Policy
from klamp.train.config import OptimConfig, ResolvedOptim, RewardConfig, RolloutConfig, TrainConfig
from klamp.train.loop import Trainer, train_policy

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")


def config(run: Path, model: str, prompts: str, **fields: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "model": model,
        "prompts": prompts,
        "run": str(run),
        "device": "cpu",
        "full": True,
        "dtype": "bfloat16",
        "rollout": RolloutConfig(prompts=2, group_size=4, max_tokens=6),
        "optim": OptimConfig(name="adamw8bit", lr=1e-3),
        "reward": RewardConfig(functions=("length:4",)),
    }
    return TrainConfig(**{**settings, **fields})


def test_without_torchao_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words_model: str, words_prompts: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao", None)
    with pytest.raises(MissingExtra, match=r"adamw8bit.*needs torchao.*pip install 'klamp\[adamw8bit\]'"):
        Trainer(config(tmp_path / "run", words_model, words_prompts), quiet=True)
    check_optimizer(OptimConfig(), 8)  # PyTorch's own needs nothing


@needs_torchao
def test_several_processes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"one process, and there are 2.*FSDP2"):
        check_optimizer(OptimConfig(name="adamw8bit"), 2)


def policy_of(weights: list[nn.Parameter]) -> Any:
    model = nn.ParameterList(weights)
    named = {f"model.{n}": p for n, p in model.named_parameters()}
    return SimpleNamespace(model=model, value=None, named_parameters=lambda: named.items(), trainable=lambda: named)


@needs_torchao
def test_it_is_adamw_up_to_its_moments_rounding_and_its_state_can_be_put_back() -> None:
    start = [torch.randn(32, 256), torch.randn(10)]
    grads = [[torch.randn_like(t) for t in start] for _ in range(6)]

    def trained(name: str, again: int = -1) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        policy: Policy = policy_of([nn.Parameter(t.clone()) for t in start])
        optim = ResolvedOptim(name=name, lr=1e-2, schedule="linear")  # type: ignore[arg-type]
        optimizer = optimizer_of(policy, optim)
        for step, given in enumerate(grads, 1):
            if step == again:  # as after a resume
                saved = {k: v.clone() for k, v in moments(policy, optimizer).items()}
                optimizer = optimizer_of(policy, optim)
                restore_moments(policy, optimizer, saved)
            for p, g in zip(policy.model.parameters(), given, strict=True):
                p.grad = g.clone()
            set_rate(optimizer, optim, step, len(grads))
            optimizer.step()
        return [p.detach() for p in policy.model.parameters()], moments(policy, optimizer)

    (plain, _), (eight, state), (resumed, other) = trained("adamw"), trained("adamw8bit"), trained("adamw8bit", 4)
    moved = (plain[0] - start[0]).norm()
    assert float((eight[0] - plain[0]).norm() / moved) < 0.03  # 0.012 here: a code has 256 levels
    torch.testing.assert_close(eight[1], plain[1])  # too small to be coded
    assert state["model.0::exp_avg::codes"].dtype == torch.uint8
    assert all(torch.equal(a, b) for a, b in zip(eight, resumed, strict=True))
    assert state.keys() == other.keys()
    assert all(torch.equal(state[k], other[k]) for k in state)


@needs_torchao
def test_the_second_moment_of_a_small_bfloat16_tensor_falls_with_its_gradients() -> None:
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        policy: Policy = policy_of([nn.Parameter(torch.ones(10, dtype=dtype))])
        optimizer = optimizer_of(policy, ResolvedOptim(name="adamw8bit", lr=1e-3))
        for step in range(60):
            policy.model[0].grad = torch.full((10,), 1.0 if step < 10 else 0.0, dtype=dtype)  # type: ignore[index]
            optimizer.step()
        saved = moments(policy, optimizer)
        restore_moments(policy, optimizer, saved)
        found[dtype] = moments(policy, optimizer)["model.0::exp_avg_sq"].float()
    torch.testing.assert_close(found[torch.bfloat16], found[torch.float32], rtol=1e-6, atol=0)


@needs_torchao
@pytest.mark.slow
def test_a_full_fine_tune_in_bfloat16_is_held_by_its_clamp_and_resumes_to_the_bit(
    tmp_path: Path, words_model: str, words_prompts: str
) -> None:
    from klamp.train.config import KLConfig

    def run(name: str, steps: int, **more: Any) -> list[dict[str, float]]:
        kl = KLConfig(target=1e-3, per="token")
        settings = config(tmp_path / name, words_model, words_prompts, steps=steps, save_every=2, kl=kl, **more)
        train_policy(settings, quiet=True)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines]

    straight = run("straight", 4)
    run("broken", 2)
    assert run("broken", 4, resume=True) == straight
    acted = [row for row in straight if row["kl/clamp/effort"] > 0]
    assert acted, "a target far below what such steps make of KL"
    for row in acted:
        assert row["kl/clamp/after"] <= row["kl/clamp/limit"] * (1 + 1e-6)
