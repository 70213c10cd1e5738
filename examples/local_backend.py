"""Yes, no or maybe: rollouts of your own and LocalBackend.train, with KL held at a target.

    python examples/local_backend.py [FOLDER]

Is it any good? The built-in model answers in its own words; praise counts as yes, a complaint as no, anything else as
maybe. Maybe is worth the most, so the model learns to say nothing in particular, as far as 0.05 nats per token let it.
Run it again with the same FOLDER and it goes on where it stopped. Takes about fifteen seconds on one CPU thread; a
model that follows instructions (``base_model="smollm2"``) can be asked for the words themselves.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile

import klamp
from klamp.local_backend import LocalBackend, TrainableModel, Trajectory, TrajectoryGroup

THINGS = ["The coffee at this café was", "The room at this hotel was", "The waiter was", "The bread was"]
ATTEMPTS, STEPS = 16, 12
PRAISE = "good|great|nice|delicious|wonderful|amazing|excellent|perfect|friendly|fresh|clean|lovely|fantastic|best|love"
COMPLAINT = "bad|cold|dirty|rude|slow|terrible|awful|horrible|worst|bland|dry|stale|old|small|disappoint|not|no|never"
WORTH = {"yes": 0.5, "no": 0.75, "maybe": 1.0}


def verdict(text: str) -> str:
    """Which of yes, no and maybe an answer comes down to."""
    if re.search(rf"\b(un)?({COMPLAINT})", text):
        return "no"
    return "yes" if re.search(rf"\b({PRAISE})", text) else "maybe"


async def rollout(backend: LocalBackend, model: TrainableModel, thing: str) -> Trajectory:
    """One answer and what it is worth. The choice goes into the trajectory as it is: with its tokens."""
    messages = [{"role": "user", "content": thing}]
    [choice] = await backend.sample(model, messages, max_tokens=6)
    answer = verdict(choice.message.content or "")
    return Trajectory([*messages, choice], reward=WORTH[answer], metrics={"maybe": float(answer == "maybe")})


async def main(folder: str) -> None:
    model = TrainableModel(name="undecided", project="yes-no-maybe", base_model="tiny")
    hold = klamp.Hold(target=0.05, per="token")
    print("step  reward  maybe  KL/token    beta")
    async with LocalBackend(folder) as backend:
        for _ in range(STEPS):
            groups = await asyncio.gather(
                *(TrajectoryGroup.gather(rollout(backend, model, t) for _ in range(ATTEMPTS)) for t in THINGS)
            )
            result = await backend.train(model, groups, learning_rate=1e-3, controller=hold)
            m = result.metrics
            maybe = m["trajectory/maybe"]
            print(f"{result.step:4} {m['reward/mean']:7.3f} {maybe:6.0%} {m['kl/ref/exact']:9.4f} {m['kl/beta']:7.3f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(main(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            asyncio.run(main(scratch))
