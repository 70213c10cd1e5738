"""``klamp measure``: files in, a summary, measure.json and measure.html out."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from klamp.errors import ConfigError
from klamp.experiments.progress import Lines

if TYPE_CHECKING:
    from klamp.measure.run import Measurement


def measure(
    *,
    policy: str,
    reference: str,
    prompts: str | None = None,
    completions: str | None = None,
    out: str = "runs/measure",
    max_tokens: int = 64,
    samples: int = 1,
    temperature: float = 1.0,
    batch: int = 32,
    seed: int = 0,
    chat: bool | None = None,
    device: str = "auto",
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    trust_remote_code: bool = False,
) -> None:
    """Say how far one model is from another, and on which tokens.

    Exact KL in both directions over prompts, with intervals, a noise floor and a map of tokens. Models are folders, Hub
    ids, built-in names or folders of LoRA adapters. An interrupted measurement goes on where it stopped; under torchrun
    several processes share it.

    Args:
        policy: The model whose drift is measured; completions are sampled from it.
        reference: The model it is compared with.
        prompts: JSONL with a "prompt" on each line, or text, one a line. Left out: the built-in policy's own.
        completions: JSONL with a "completion" for each prompt, in order, instead of sampling.
        out: Folder for measure.json, measure.html and the records.
        max_tokens: Longest completion, in tokens.
        samples: Completions of each prompt.
        temperature: Sampling temperature; KL is that of the tempered distributions.
        batch: Prompts a block.
        seed: Of the sampling.
        chat: Wrap prompts in the chat template. None: where the tokenizer has one.
        device: auto, cpu or cuda.
        dtype: Of both models. auto: bfloat16 on a GPU, float32 on a CPU.
        trust_remote_code: Let a model repository run its own code.
    """
    _measure(
        policy,
        reference,
        prompts,
        completions,
        Path(out),
        max_tokens=max_tokens,
        samples=samples,
        temperature=temperature,
        batch=batch,
        seed=seed,
        chat=chat,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )


def _measure(
    policy: str, reference: str, prompts: str | None, completions: str | None, out: Path, **settings: Any
) -> Measurement:
    """Measure, write the files and print the summary; processes other than the first only help."""
    from klamp.measure.run import measure_kl
    from klamp.train import data

    asked = data.load(prompts, policy).texts
    given = None if completions is None else _completions(completions)
    with _progress() as progress:
        result = measure_kl(policy, reference, asked, completions=given, out=out, progress=progress, **settings)
    if int(os.environ.get("RANK", "0")) == 0:
        result.to_json(out / "measure.json")
        result.to_html(out / "measure.html")
        print(summary(result))
        print(f"{out / 'measure.html'}")
    return result


def summary(m: Measurement) -> str:
    """The figures in a few lines."""
    from klamp.measure.page import finding

    rows = [
        ("KL(policy‖reference) per token", m.kl),
        ("KL(policy‖reference) per sequence", m.kl_per_sequence),
        ("KL(reference‖policy) per token", m.forward_kl),
        ("k1 per token", m.k1),
        ("k3 per token", m.k3),
        ("entropy, policy", m.entropy),
        ("entropy, reference", m.reference_entropy),
        ("sampler gap", m.sampler_gap),
        ("noise floor", m.noise_floor),
    ]
    lines = [finding(m), ""]
    lines += [f"  {name:<36}{value}" for name, value in rows if value is not None]
    worst = ", ".join(f"{t['token'].strip()!r} {t['kl']:.2g}" for t in m.top_tokens[:5])
    lines += [f"  {'drifted most':<36}{worst}", f"  {m.prompts} prompts, {m.sequences} completions, {m.tokens} tokens"]
    return "\n".join(lines)


def _completions(path: str) -> list[str]:
    from klamp.train import data

    rows = data.read_jsonl(Path(path), field="completion") if Path(path).is_file() else None
    if rows is None:
        raise ConfigError(f'completions {path!r} is not a file. Give JSONL with a "completion" on each line.')
    return [row["completion"] for row in rows]


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar in a terminal, a line now and then elsewhere; nothing from processes other than the first."""
    if os.environ.get("RANK", "0") != "0":
        yield None
        return
    if not sys.stderr.isatty():
        yield Lines("measure", "prompts").update
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("measuring", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
