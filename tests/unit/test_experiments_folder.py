"""Bad input is refused before anything runs, and nothing is overwritten."""

from __future__ import annotations

import json
import multiprocessing
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from klamp.errors import ConfigError
from klamp.experiments.compare import CompareConfig, _grown, run
from klamp.experiments.folder import Folder, read_settings
from klamp.experiments.sweep import SweepConfig, pareto, plan
from klamp.experiments.sweep import run as run_sweep


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"arms": ("statik",)}, "Did you mean 'static'"),
        ({"model": "tniy"}, "Did you mean 'tiny'"),
        ({"target": 0.05}, "--per"),
        ({"per": "sequence"}, "--target in nats per sequence"),
        ({"target": -1.0, "per": "token"}, "must be > 0"),
        ({"seeds": 0}, "--seeds"),
        ({"reward": ("vaderr",)}, "Did you mean 'vader'"),
        ({"heldout": "nowhere.txt"}, "not a file"),
        ({"prompts": "nowhere.txt"}, "not a file"),
        ({"static_beta": -0.1}, "--static-beta"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_way_out(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CompareConfig(**fields)


def test_a_wrong_run_is_refused_before_its_folder_is_made(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="--jobs"):
        run(CompareConfig(), out, at_once=-1)
    assert not out.exists()


def test_a_folder_of_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="no experiment of klamp's"):
        run(CompareConfig(), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(ConfigError, match="is a file"):
        run(CompareConfig(), tmp_path / "thesis.tex")


def test_another_configuration_is_refused_and_more_arms_are_not(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "out")
    with folder.claimed("compare", {"steps": 60, "arms": ["hold"]}, may_grow=("arms",)):
        pass
    before = folder.settings.read_bytes()
    with (
        pytest.raises(ConfigError, match="steps is 60 there and 61 here"),
        folder.claimed("compare", {"steps": 61, "arms": ["hold"]}),
    ):
        pass
    with pytest.raises(ConfigError, match="it is a compare"), folder.claimed("sweep", {"steps": 60}):
        pass
    assert folder.settings.read_bytes() == before
    with folder.claimed("compare", {"steps": 60, "arms": ["hold", "static"]}, may_grow=("arms",)):
        assert read_settings(folder.path)["arms"] == ["hold", "static"]


def test_asking_for_less_drops_nothing_that_a_folder_holds(tmp_path: Path) -> None:
    folder, whole = Folder(tmp_path), CompareConfig(arms=("static", "hold"), oracle=True).resolved()
    with folder.claimed("compare", asdict(whole)):
        pass
    asked = _grown(CompareConfig(arms=("hold-price", "static"), seeds=1).resolved(), folder)
    assert (asked.arms, asked.seeds, asked.oracle) == (("static", "hold", "hold-price"), 3, True)
    assert _grown(whole, Folder(tmp_path / "new")) is whole


@pytest.mark.parametrize("left_out", [True, False])
def test_a_usual_value_written_out_is_the_same_comparison(tmp_path: Path, left_out: bool) -> None:
    folder, plain = Folder(tmp_path), asdict(CompareConfig().resolved())
    usual = {"target": 0.05, "per": "token", "lr": 1.5e-3}
    with folder.claimed("compare", plain | dict.fromkeys(usual) if left_out else plain):
        pass
    folder.check("compare", asdict(CompareConfig(**usual).resolved()), usual=usual)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"lr is 0\.0015 there and 0\.001 here"):
        folder.check("compare", asdict(CompareConfig(lr=1e-3).resolved()), usual=usual)


def test_a_model_that_cannot_be_fetched_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> str:
        raise ConfigError(f"{name} could be fetched from neither source")

    monkeypatch.setattr("klamp.models.canonical", fail)
    for begin in (
        lambda: run(CompareConfig(model="smollm2"), tmp_path / "out"),
        lambda: run_sweep(SweepConfig(over=("kl.beta=1,2",), model="smollm2"), tmp_path / "out"),
    ):
        with pytest.raises(ConfigError, match="neither source"):
            begin()
    assert not (tmp_path / "out").exists()


def _hold(path: str, ready: Any, leave: Any) -> None:
    with Folder(path).claimed("compare", {}):
        ready.set()
        leave.wait(60)
        os._exit(0)  # without a word, as a killed process would


def test_a_folder_in_use_is_refused_and_a_dead_process_is_no_obstacle(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, leave = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(str(tmp_path / "out"), ready, leave))
    process.start()
    assert ready.wait(60)
    with pytest.raises(ConfigError, match="in use"), Folder(tmp_path / "out").claimed("compare", {}):
        pass
    leave.set()
    process.join(60)
    with Folder(tmp_path / "out").claimed("compare", {}):
        pass


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": "other/1"}', '"x"', "[" * 100_000])
def test_settings_that_are_not_klamps_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "experiment.json").write_text(text)
    with pytest.raises(ConfigError, match=r"experiment\.json"):
        read_settings(tmp_path)


def test_a_sweep_alone_is_arts_plan(tmp_path: Path) -> None:
    config = SweepConfig(over=("kl.beta=0.0001:1.0001:9",))
    planned = [made for _, _, made in plan(config, Folder(tmp_path))]
    assert [m.kl.beta for m in planned] == pytest.approx([0.0001 + i / 8 for i in range(9)])
    assert {(m.steps, m.kl.placement, m.kl.estimator, m.kl.reference, m.kl.clamp) for m in planned} == {
        (20, "in_advantage", "k1", "step:0", False)
    }
    assert len({m.run for m in planned}) == 9


def test_set_and_yaml_change_the_run_that_is_swept(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("steps: 7\nkl: {controller: fixed, beta: 0.3}\n")
    config = SweepConfig(over=("optim.lr=1e-4,1e-3", "seed=0,1"), set=("kl.beta=0.5",), config=str(file))
    planned = [made for _, _, made in plan(config, Folder(tmp_path))]
    assert [(m.optim.lr, m.seed, m.steps, m.kl.beta) for m in planned] == [
        (lr, seed, 7, 0.5) for lr in (1e-4, 1e-3) for seed in (0, 1)
    ]


def test_flags_go_on_top_of_the_file_that_is_swept(tmp_path: Path, words_model: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("steps: 7\nmodel: tiny\nkl: {controller: fixed, beta: 0.3}\n")

    def planned(**fields: Any) -> Any:
        config = SweepConfig(over=("kl.beta=0.1,0.2",), config=str(file), **fields)
        return plan(config, Folder(tmp_path))[0][2]

    assert (planned().steps, planned().model) == (7, "tiny")
    made = planned(steps=3, model=words_model)
    assert (made.steps, made.model, made.kl.controller) == (3, words_model, "fixed")
    assert planned(steps=3, set=("steps=5",)).steps == 5


@pytest.mark.parametrize(
    ("over", "assigned", "message"),
    [
        (
            "kl.target=0.02,0.05",
            ("kl.per=token",),
            r"kl\.target has no effect: beta is constant.*--set kl\.controller=hold",
        ),
        ("kl.horizon=10,100", ("kl.controller=hold",), "hold has no horizon.*--set kl.controller=ziegler"),
        ("kl.gain=0.1,0.2", (), "--set kl.controller=exponential"),
        ("kl.clamp_share=0.5,1", (), "there is no clamp"),
        ("kl.tail=1,5", (), "k1 has no tail"),
        ("kl.max_weight=1,2", (), "in_advantage has no such weight"),
        ("algorithm.lam=0.9,1", (), "--set algorithm.name=ppo"),
        ("lora.rank=4,8", ("full=true",), "without an adapter"),
        ("keep=1,2", (), "not what is learnt. Sweep another field.$"),
        ("kl.target=0.02,0.05", (), r"kl\.target=0\.02: kl\.target 0\.02 has no unit.*kl\.per=token.*--set"),
        ("kl.per=token,sequence", ("kl.target=1", "kl.controller=hold"), "varies kl.per"),
        ("kl.beta=0.1,0.2", ("kl.beta=0.3",), "--set and --over both give kl.beta"),
    ],
)
def test_sweeping_what_no_run_reads_is_refused(
    tmp_path: Path, over: str, assigned: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(SweepConfig(over=(over,), set=assigned), Folder(tmp_path))


def test_sweeping_what_some_run_reads_is_not(tmp_path: Path) -> None:
    for over, assigned in [
        (("kl.target=1,6",), ("kl.per=sequence", "kl.controller=hold")),
        (("kl.target=0.02,0.05",), ("kl.per=token", "kl.clamp=true")),
        (("kl.target=0.02,0.05", "kl.controller=hold,fixed"), ("kl.per=token",)),
    ]:
        assert len(plan(SweepConfig(over=over, set=assigned), Folder(tmp_path))) >= 2


def test_a_wrong_sweep_is_refused_before_anything_runs(tmp_path: Path) -> None:
    for fields, message in [
        ({"over": ()}, "--over is missing"),
        ({"over": ("kl.beta=a:b:c",)}, "not a number"),
        ({"over": ("kl.beta=-1,1",)}, "never negative"),
        ({"over": ("kl.beta=0.1",), "set": ("kl.beta=1,2",)}, "Use --over"),
        ({"over": ("model=tiny,smollm2",)}, "varies model"),
    ]:
        with pytest.raises(ConfigError, match=message):
            run_sweep(SweepConfig(**fields), tmp_path / "out")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_the_frontier_is_what_nothing_beats() -> None:
    from types import SimpleNamespace

    points: Any = [
        SimpleNamespace(label=label, figures=SimpleNamespace(kl=kl, reward=reward))
        for label, kl, reward in [
            ("a", 0.1, 0.5),
            ("b", 0.2, 0.4),
            ("c", 0.3, 0.9),
            ("d", 0.1, 0.6),
            ("e", float("nan"), 1.0),
        ]
    ]
    assert [p.label for p in pareto(points)] == ["d", "c"]


def test_reference_json_that_is_not_klamps_is_named(tmp_path: Path) -> None:
    from klamp.experiments.job_process import read_reference

    file = tmp_path / "reference.json"
    for text in ("", "[]", json.dumps({"probes": []})):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"reference\.json"):
            read_reference(file)
