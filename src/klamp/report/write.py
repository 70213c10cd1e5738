"""From an experiment, or from run folders, to ``report.html`` with ``figure.png`` and ``figure.pdf`` beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from klamp.errors import ConfigError
from klamp.experiments import compare, sweep
from klamp.experiments.compare import named_arm, parse_arms
from klamp.experiments.folder import SETTINGS, Folder, read_settings
from klamp.report import headline, image
from klamp.report.charts import View, make_arm
from klamp.report.html import render
from klamp.results import records, verdict
from klamp.results.records import Record
from klamp.results.statistics import ORACLE, Comparison
from klamp.train.run_folder import atomic_text

METRICS = "metrics.jsonl"
PLACES = ("*", "*/seed-*", "runs/*", "runs/*/seed-*")
"""Where below a folder its runs may be; nothing deeper is looked through."""
UNSHOWN = ("format", "kind", "run", "resume", "skip_damaged")


def write_comparison(found: Comparison, said: verdict.Verdict, out: Path | None = None) -> Path:
    """The report of a comparison, and results.json with its figures."""
    shown = dict(found.arms)
    if found.oracle is not None:
        shown[ORACLE] = found.constants[found.oracle]
    arms = [
        make_arm(
            name, runs, i, len(shown), found.target, verdict=said.arms[name], summary=_summary(name, found, said.oracle)
        )
        for i, (name, runs) in enumerate(shown.items())
    ]
    settings = read_settings(found.folder)
    first = next(iter(found.arms.values()))[0]
    view = View(
        kind="compare",
        title="compare",
        headline=said.headline,
        sentence=said.sentence,
        arms=arms,
        target=found.target,
        per=found.per,
        checks=[(c.what, c.found, c.holds) for c in said.checks],
        reference=found.reference,
        constants=found.constants,
        settings={**_shown(settings), "run": _shown(first.config)},
        notes=_notes(settings, found.reference),
    )
    results = {
        "headline": said.headline,
        "sentence": said.sentence,
        "oracle": said.oracle,
        "figures": [f.to_dict() for f in said.figures],
        "verdicts": said.arms,
        "checks": [{"what": c.what, "found": c.found, "holds": c.holds} for c in said.checks],
    }
    atomic_text(found.folder / "results.json", json.dumps(results, indent=1) + "\n")
    atomic_text(found.folder / "results.md", verdict.markdown(said))
    return _write(view, out or found.folder / "report.html")


def write_sweep(found: sweep.Sweep, out: Path | None = None) -> Path:
    """The report of a sweep, and results.json with its figures."""
    front = {p.label for p in found.frontier}
    arms = [
        make_arm(
            p.label, p.runs, i, len(found.points), found.target, verdict="on the frontier" if p.label in front else ""
        )
        for i, p in enumerate(found.points)
    ]
    settings = read_settings(found.folder)
    sentence = sweep.sentence(found)
    view = View(
        kind="sweep",
        title="sweep",
        headline=sweep.headline(found),
        sentence=sentence,
        arms=arms,
        target=found.target,
        per=found.per,
        reference=found.reference,
        settings={**_shown(settings), "run": _shown(found.points[0].runs[0].config)},
        notes=f"{len(found.points)} points over {', '.join(settings['over'])}.",
    )
    results = {"sentence": sentence, "frontier": sorted(front), "figures": [p.figures.to_dict() for p in found.points]}
    atomic_text(found.folder / "results.json", json.dumps(results, indent=1) + "\n")
    return _write(view, out or found.folder / "report.html")


def write_runs(paths: Sequence[Path], out: Path | None = None) -> Path:
    """A report from run folders; the folder of a compare or a sweep gives its own report again."""
    if not paths:
        raise ConfigError("report needs at least one folder: of a run, a compare or a sweep.")
    if len(paths) == 1 and (paths[0] / SETTINGS).is_file():
        return _again(paths[0], out)
    view = runs_view([records.read(p) for path in paths for p in _runs(path)])
    place = out or (paths[0] if len(paths) == 1 else Path()) / "report.html"
    return _write(view, place)


def runs_view(found: list[Record]) -> View:
    """The page of runs."""
    groups = _grouped(found)
    targets = {r.target for r in found}
    units = {_unit(r) for r in found}
    if len(units) > 1:
        raise ConfigError(
            f"these runs measure KL per {' and per '.join(sorted(units))}: not on one axis. Report them apart."
        )
    target, per = targets.pop() if len(targets) == 1 else None, units.pop()
    arms = [make_arm(name, runs, i, len(groups), target) for i, (name, runs) in enumerate(groups.items())]
    arms = [replace(arm, verdict=headline.verdict(arm, target)) for arm in arms]
    return View(
        kind="runs",
        title=arms[0].name if len(arms) == 1 else "report",
        headline=headline.headline(arms, target, per),
        sentence=headline.sentence(arms, target),
        arms=arms,
        target=target,
        per=per,
        settings=_shown(found[0].config),
        notes=headline.notes(found[0].config) if len(arms) == 1 else "",
    )


def _again(path: Path, out: Path | None) -> Path:
    """The report of an experiment that was run before."""
    settings = read_settings(path)
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    kind = values.pop("kind", None)
    values.pop("format", None)
    try:
        if kind == "sweep":
            return write_sweep(sweep.load(sweep.SweepConfig(**values), Folder(path)), out)
        config = compare.CompareConfig(**values).resolved()
    except TypeError as error:
        raise ConfigError(f"{str(path / SETTINGS)!r} is of another version of klamp: {error}.") from None
    found = compare.load(path, config, parse_arms(config.arms, config.static_beta))
    return write_comparison(found, verdict.judge(found), out)


def _write(view: View, page: Path) -> Path:
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        atomic_text(page, render(view))
        image.save(view, page.parent)
    except OSError as error:
        raise ConfigError(f"report {str(page)!r} cannot be written: {error}.") from None
    return page


def _runs(path: Path) -> list[Path]:
    """The run in ``path``, or those where a folder of runs, a compare or a sweep keeps them."""
    if not path.is_dir():
        raise ConfigError(f"{str(path)!r} is no folder. Give the folder of a run, a compare or a sweep.")
    if (path / METRICS).is_file():
        return [path]
    found = sorted({file.parent for place in PLACES for file in path.glob(f"{place}/{METRICS}")})
    if not found:
        raise ConfigError(
            f"{str(path)!r} holds no run: there is no {METRICS} in it, nor in {', '.join(PLACES)} below it. Give the "
            "folder of a run, a compare or a sweep."
        )
    return found


def _grouped(runs: list[Record]) -> dict[str, list[Record]]:
    """Runs that differ in their seed alone under one name: that of their folder, or of the folder around seeds."""
    groups: dict[str, list[Record]] = {}
    names: dict[str, str] = {}
    for run in runs:
        same = {k: v for k, v in run.config.items() if k not in ("seed", "run", "resume", "device")}
        key = json.dumps(same, sort_keys=True, default=str) if same else str(run.path)
        if key not in names:
            folder = run.path.resolve()
            name = folder.parent.name if folder.name.startswith("seed-") else folder.name
            taken = sum(n.split(" #")[0] == name for n in names.values())
            names[key] = f"{name} #{taken + 1}" if taken else name
        groups.setdefault(names[key], []).append(run)
    return groups


def _unit(run: Record) -> str:
    kl = run.config.get("kl")
    per = kl.get("per") if isinstance(kl, dict) else None
    return per if isinstance(per, str) else "token"


def _summary(name: str, found: Comparison, oracle: str | None) -> str:
    if name == ORACLE:
        return f"best constant in hindsight: {oracle}"
    kl = found.arms[name][0].config.get("kl")
    beta = kl.get("beta") if isinstance(kl, dict) else None
    return named_arm(name, float(beta) if isinstance(beta, int | float) else 0.0).summary


def _notes(settings: dict[str, Any], reference: dict[str, Any]) -> str:
    seeds, reward = settings["seeds"], "+".join(settings["reward"])
    size = f"{settings['prompts_per_step'] * settings['group_size']} completions of {settings['max_tokens']} tokens"
    start = reference["perplexity"]["heldout"]
    return (
        f"{settings['model']}, {settings['algorithm'].upper()}, reward {reward}, {settings['steps']} steps of {size}, "
        f"{seeds} {'seed' if seeds == 1 else 'seeds'} an arm, the same prompts and random numbers in all. "
        f"Shaded: 95 % intervals over seeds. Held-out perplexity before training: {start:.2f}."
    )


def _shown(values: dict[str, Any]) -> dict[str, Any]:
    """Settings without what says where rather than what."""
    return {k: v for k, v in values.items() if k not in UNSHOWN}
