"""``klamp measure``: files in, a summary, measure.json and measure.html out."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from klamp.errors import ConfigError, first_process
from klamp.progress import Lines

if TYPE_CHECKING:
    from klamp.measure.run import Measurement


def measure(
    model: Annotated[str | None, tyro.conf.arg(metavar="[MODEL]")] = None,
    other: Annotated[str | None, tyro.conf.arg(metavar="[REFERENCE]")] = None,
    /,
    *,
    policy: str | None = None,
    reference: str | None = None,
    prompts: str | None = None,
    completions: str | None = None,
    out: str | None = None,
    max_tokens: int | None = None,
    samples: int = 1,
    temperature: float | None = None,
    batch: int = 32,
    seed: int = 0,
    chat: bool | None = None,
    device: str = "auto",
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    trust_remote_code: bool = False,
    url: str | None = None,
    served: str | None = None,
) -> None:
    """Say how far one model is from another, and on which tokens.

    klamp measure runs/train measures a run's newest checkpoint against its base, on its own prompts; klamp measure A B
    any two models: folders, Hub ids, built-in names, LoRA adapters or runs. Exact KL in both directions, with
    intervals, a noise floor and a map of tokens. An interrupted measurement goes on where it stopped; under torchrun
    several processes share it.

    Args:
        model: The model whose drift is measured; completions are sampled from it.
        other: The model it is compared with. Left out: the base of a run or of an adapter.
        policy: The first model, by name.
        reference: The second model, by name.
        prompts: JSONL with a "prompt" on each line, or text, one per line. Left out: the run's or the built-in's own.
        completions: JSONL with a "completion" for each prompt, in order, instead of sampling.
        out: Folder for measure.json, measure.html and the records. Left out: one under runs/measure.
        max_tokens: Longest completion, in tokens. Left out: the run's, or 64.
        samples: Completions of each prompt.
        temperature: Sampling temperature; KL is that of the tempered distributions. Left out: the run's, or 1.
        batch: Prompts a block.
        seed: Of the sampling.
        chat: Wrap prompts in the chat template. None: as in the run, or where the tokenizer has one.
        device: auto, cpu or cuda.
        dtype: Of both models. auto: bfloat16 on a GPU, float32 on a CPU.
        trust_remote_code: Let a model repository run its own code.
        url: A vLLM server that draws the completions, such as http://127.0.0.1:8000.
        served: What that server calls the first model. Left out: its name here.
    """
    given = {name: value for name, value in locals().items() if name not in ("model", "other", "policy", "reference")}
    _measure(_one("policy", model, policy), _one("reference", other, reference), **given)


def _one(flag: str, placed: str | None, named: str | None) -> str | None:
    """A model given by its place or by its flag."""
    if placed is not None and named is not None:
        raise ConfigError(f"the {flag} was given twice: {placed!r} and --{flag} {named!r}. Give it once.")
    return named if placed is None else placed


def _measure(
    policy: str | None, reference: str | None, prompts: str | None, completions: str | None, out: str | None, **how: Any
) -> Measurement:
    """Measure, write the files and print the summary; processes other than the first only help."""
    import transformers  # noqa: F401  # if it is missing, that is said before anything else is

    from klamp.measure.run import measure_kl
    from klamp.measure.two_models import sides

    asked = sides(policy, reference, prompts)
    folder = asked.out() if out is None else Path(out)
    given = None if completions is None else _completions(completions)
    main = first_process()
    if main:
        print(f"{asked.policy} against {asked.reference}, {len(asked.prompts)} prompts", file=sys.stderr)
    with _progress() as progress:
        result = measure_kl(
            asked.policy, asked.reference, asked.prompts, completions=given, out=folder, progress=progress, **how
        )
    if main:
        result.to_json(folder / "measure.json")
        result.to_html(folder / "measure.html")
        print(summary(result))
        print(f"{folder / 'measure.html'}")
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
    from klamp.prompts import read_jsonl

    rows = read_jsonl(Path(path), field="completion") if Path(path).is_file() else None
    if rows is None:
        raise ConfigError(f'completions {path!r} is not a file. Give JSONL with a "completion" on each line.')
    return [row["completion"] for row in rows]


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar in a terminal, a line now and then elsewhere; nothing from processes other than the first."""
    if not first_process():
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
