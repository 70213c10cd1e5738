"""ART's own numbers for groups of trajectories, by its tokenizer and its packing. Run as a program it records them.

.venv-art-python3/bin/python tests/with_art/art_numbers.py tests/golden/data/art_groups.json
"""

from __future__ import annotations

import functools
import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import art
from art.preprocessing.pack import packed_tensors_from_tokenized_results
from art.preprocessing.tokenize import tokenize_trajectory_groups
from openai.types.chat.chat_completion import Choice

from klamp import models

TEMPLATE = (
    "{% for m in messages %}<|bos|>{{ m.role }}: {{ m.content }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant: {% endif %}"
)


ASKED: Any = {"role": "user", "content": "go"}


@functools.cache
def tokenizer() -> Any:
    """tiny's, with a chat template."""
    found = models.load_tokenizer("tiny")
    found.chat_template = TEMPLATE
    return found


def choice(ids: list[int], logp: float = -1.0) -> Choice:
    """What a server answers with these tokens."""
    entries = [{"token": f"token_id:{i}", "logprob": logp, "bytes": [120], "top_logprobs": []} for i in ids]
    return Choice.model_validate(
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "x"},
            "logprobs": {"content": entries, "refusal": None},
            # ART 0.5.23 reads these; 0.5.18 renders the template.
            "token_ids": ids,
            "prompt_token_ids": tokenizer().apply_chat_template([ASKED], add_generation_prompt=True)["input_ids"],
        }
    )


def trajectory(reward: float, lengths: list[int], fresh: Iterator[int]) -> art.Trajectory:
    """One of so many counted tokens, each used once: the first conversation, and others beside it."""

    def said(length: int) -> list[Any]:
        return [ASKED, choice([next(fresh) for _ in range(length)])]

    return art.Trajectory(
        messages_and_choices=said(lengths[0]),
        additional_histories=[art_history(messages_and_choices=said(n)) for n in lengths[1:]],
        reward=reward,
    )


def art_history(**fields: Any) -> Any:
    """Of the class that ``additional_histories`` has: called LegacyHistory in 0.5.23."""
    import art.trajectories

    return getattr(art.trajectories, "LegacyHistory", art.trajectories.History)(**fields)


def art_numbers(groups: list[list[dict[str, Any]]], *, scale_rewards: bool) -> dict[str, list[list[float | None]]]:
    """By group and trajectory: advantage when tokenised, and advantage and weight of a token when packed.

    None where ART leaves a trajectory out: its advantage is 0.
    """
    fresh = iter(range(300, 2000))
    made = [art.TrajectoryGroup([trajectory(t["reward"], t["tokens"], fresh) for t in group]) for group in groups]
    results = list(
        tokenize_trajectory_groups(
            tokenizer(),
            made,
            allow_training_without_logprobs=False,
            scale_rewards=scale_rewards,
            shuffle_group_trajectories=False,
        )
    )
    place = {id(t): (g, n) for g, group in enumerate(made) for n, t in enumerate(group.trajectories)}
    found: dict[str, list[list[float | None]]] = {
        name: [[None] * len(group) for group in groups]
        for name in ("advantages", "packed_advantages", "packed_weights")
    }
    for result in results:
        g, n = place[id(result.trajectory)]
        found["advantages"][g][n] = float(result.advantage)
    if not results:
        return found
    packed = packed_tensors_from_tokenized_results(
        results, seq_len=max(len(r.token_ids) for r in results), pad_token_id=0, advantage_balance=0.0
    )
    owner = {
        token: place[id(r.trajectory)]
        for r in results
        for token, counted in zip(r.token_ids, r.assistant_mask, strict=True)
        if counted
    }
    for row, column in packed["assistant_mask"].nonzero().tolist():
        g, n = owner[int(packed["tokens"][row, column])]
        found["packed_advantages"][g][n] = float(packed["advantages"][row, column])
        found["packed_weights"][g][n] = float(packed["weights"][row, column])
    return found


def main(file: str) -> None:
    """Record cases."""
    chance = random.Random(7)
    cases = []
    for number in range(12):
        groups = []
        for _ in range(chance.choice([1, 2, 4])):
            size = chance.choice([1, 2, 3, 8])
            kind = chance.choice(["real", "binary", "flat"]) if number % 3 else "real"
            rewards = {
                "real": [round(chance.gauss(0, 2), 6) for _ in range(size)],
                "binary": [float(chance.random() < 0.3) for _ in range(size)],
                "flat": [0.5]
                * size,  # 0.7 eight times has a mean that is not 0.7: rounding that ART keeps as an advantage
            }[kind]
            tokens = [[chance.randint(1, 9) for _ in range(chance.choice([1, 1, 2]))] for _ in range(size)]
            groups.append([{"reward": r, "tokens": t} for r, t in zip(rewards, tokens, strict=True)])
        scale = number % 4 != 3
        outputs = art_numbers(groups, scale_rewards=scale)
        inputs = {"groups": groups, "scale_rewards": scale}
        cases.append(
            {"id": f"groups_{number:02d}", "kind": "groups", "dtype": "float32", "inputs": inputs, "outputs": outputs}
        )
    vectors = {
        "format": "kl-golden/1",
        "set": "public",
        "source": {
            "repo": "OpenPipe/ART",
            "version": "0.5.18",
            "path": "src/art/preprocessing",
            "function": "tokenize_trajectory_groups, packed_tensors_from_tokenized_results",
            "license": "Apache-2.0",
        },
        "description": "Advantages and token weights of groups of trajectories.",
        "fields": {
            "inputs.groups": "trajectories by group: reward, and counted tokens of each of its histories",
            "outputs.advantages": "of each trajectory when it is tokenised; null: left out, its advantage is 0",
            "outputs.packed_advantages": "of each of its tokens after packing, which scales them over the step",
            "outputs.packed_weights": "of each of its tokens after packing",
        },
        "n_cases": len(cases),
        "cases": cases,
    }
    head = json.dumps({k: v for k, v in vectors.items() if k != "cases"}, indent=1)[:-2]
    rows = ",\n".join(f"  {json.dumps(case)}" for case in cases)
    with open(file, "w", encoding="utf-8") as handle:
        handle.write(f'{head},\n "cases": [\n{rows}\n ]\n}}\n')


if __name__ == "__main__":
    main(sys.argv[1])
