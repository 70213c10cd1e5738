"""A policy of twelve words in verl's own driver: its trainer, config, data, penalty, advantages, loss and checkpoints.

What is left out of verl is what needs GPUs: the worker group is this process, and a "model" is a table of logits.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import verl
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from verl import DataProto
from verl.trainer.ppo import core_algos, ray_trainer
from verl.trainer.ppo.utils import Role
from verl.utils.config import omega_conf_to_dataclass

WORDS, LENGTH, PROMPTS, GROUP = 12, 10, 8, 8
KLAMP = ("algorithm.kl_ctrl.type=klamp", "+algorithm.kl_ctrl.target=0.05", "+algorithm.kl_ctrl.per=token")


def config(folder: Path, *overrides: str) -> DictConfig:
    """verl's own ``ppo_trainer.yaml`` with the overrides of a command line."""
    own = (
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=True",
        "actor_rollout_ref.model.path=none",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.name=hf",
        "data.train_batch_size=4",
        "data.dataloader_num_workers=0",
        "critic.enable=False",
        "trainer.device=cpu",
        f"trainer.default_local_dir={folder}",
    )
    with initialize_config_dir(os.path.join(os.path.dirname(verl.__file__), "trainer", "config"), version_base=None):
        return compose("ppo_trainer", overrides=[*own, *overrides])


class Actor:
    """verl's actor worker group, here: a table of logits, its optimiser, and their checkpoint."""

    def __init__(self) -> None:
        start = 0.5 * torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(0))
        self.logits, self.reference = start.clone().requires_grad_(), start.clone()
        self.optimiser = torch.optim.Adam([self.logits], lr=0.02)

    def logp(self, logits: torch.Tensor, prompts: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """Log-prob of each word after the one before it."""
        before = torch.cat([prompts[:, None], responses[:, :-1]], dim=1)
        return torch.log_softmax(logits, -1)[before, responses]

    def save_checkpoint(self, local_path: str, *_: Any, **__: Any) -> None:
        os.makedirs(local_path, exist_ok=True)
        torch.save({"logits": self.logits.detach(), "optimiser": self.optimiser.state_dict()}, f"{local_path}/actor.pt")

    def load_checkpoint(self, local_path: str, **_: Any) -> None:
        saved = torch.load(f"{local_path}/actor.pt")
        with torch.no_grad():
            self.logits.copy_(saved["logits"])
        self.optimiser.load_state_dict(saved["optimiser"])


def rollout(actor: Actor, step: int) -> DataProto:
    """A batch as verl's driver has it before the penalty: groups of responses, of lengths from 1 to LENGTH."""
    draw = torch.Generator().manual_seed(1000 + step)
    prompts = torch.arange(PROMPTS).repeat_interleave(GROUP) % WORDS
    word, words = prompts, []
    for _ in range(LENGTH):
        word = torch.multinomial(torch.softmax(actor.logits.detach(), -1)[word], 1, generator=draw)[:, 0]
        words.append(word)
    responses = torch.stack(words, 1)
    ended = (responses == 0).cumsum(1) - (responses == 0).long()
    mask = (ended == 0).long()
    scores = torch.zeros(responses.shape)
    scores.scatter_(1, mask.sum(1, keepdim=True) - 1, ((responses < 4) * mask).sum(1, keepdim=True).float())
    tensors = {
        "responses": responses,
        "response_mask": mask,
        "token_level_scores": scores,
        "old_log_probs": actor.logp(actor.logits, prompts, responses).detach(),
        "ref_log_prob": actor.logp(actor.reference, prompts, responses),
        "prompt": prompts,
    }
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array([str(int(p)) for p in prompts], object)})


class SmallTrainer(ray_trainer.RayPPOTrainer):
    """verl's trainer with a worker group that runs here; its driver loop without Ray, generation and validation."""

    def __init__(self, config: DictConfig) -> None:
        rows = [{"prompt": i} for i in range(64)]
        super().__init__(
            config=config,
            tokenizer=None,
            role_worker_mapping={Role.ActorRollout: object},
            resource_pool_manager=None,
            train_dataset=rows,
            val_dataset=rows[:4],
            collate_fn=list,
        )
        self.actor_rollout_wg = Actor()

    def fit(self, steps: int, save_freq: int = 0) -> list[dict[str, float]]:
        """``steps`` steps in all, resumed where verl finds a checkpoint."""
        self.global_steps, history = 0, []
        self._load_checkpoint()
        batches = iter(self.train_dataloader)
        while self.global_steps < steps:
            self.global_steps += 1
            next(batches, None)
            history.append(self.step())
            if save_freq and self.global_steps % save_freq == 0:
                self._save_checkpoint()
        return history

    def step(self) -> dict[str, float]:
        """Penalty, advantages and policy loss by verl's own functions."""
        actor, algorithm = self.actor_rollout_wg, self.config.algorithm
        data = rollout(actor, self.global_steps)
        data, metrics = ray_trainer.apply_kl_penalty(
            data, kl_ctrl=self.kl_ctrl_in_reward, kl_penalty=algorithm.kl_penalty
        )
        data = ray_trainer.compute_advantage(data, algorithm.adv_estimator, config=algorithm)
        batch = data.batch
        actor.optimiser.zero_grad()
        loss, _ = core_algos.compute_policy_loss_vanilla(
            batch["old_log_probs"],
            actor.logp(actor.logits, batch["prompt"], batch["responses"]),
            batch["advantages"],
            batch["response_mask"],
            config=omega_conf_to_dataclass(self.config.actor_rollout_ref.actor),
        )
        loss.backward()
        actor.optimiser.step()
        return metrics


def namespace(**settings: Any) -> SimpleNamespace:
    """A ``kl_ctrl`` with verl's defaults."""
    return SimpleNamespace(**{"type": "klamp", "kl_coef": 0.001, "horizon": 10_000, "target_kl": 0.1} | settings)
