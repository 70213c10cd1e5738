"""No name, link or archive member makes klamp write outside the folder it was given."""

from __future__ import annotations

import json
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from klamp.errors import ConfigError, KlampError
from klamp.experiments import sweep_grammar
from klamp.experiments.folder import Folder
from klamp.local_backend import LocalBackend, TrainableModel
from klamp.measure.run import Settings, Store
from klamp.models import fetch
from klamp.report import write_runs
from klamp.train.config import TrainConfig
from klamp.train.run_folder import RunFolder

NAMES = [
    "..",
    ".",
    "../x",
    "/etc",
    "a/b",
    "a\\b",
    "a\0b",
    "",
    " x",
    "x ",
    "a..b",
    "~root",
    "\u202eabc",
    "x" * 300,
    "a\nb",
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_local_backend_names_are_names(tmp_path: Path, name: str) -> None:
    for field in ("name", "project"):
        with pytest.raises(ConfigError, match="not a folder name"):
            TrainableModel(**{"name": "a", "project": "b", "base_model": "tiny", field: name})
        foreign = type("Model", (), {"name": "a", "project": "b", "base_model": "tiny", field: name})
        with pytest.raises(ConfigError, match="not a folder name"):
            LocalBackend(tmp_path).folder(foreign)


@pytest.mark.parametrize("place", ["demo", "demo/agent", "demo/agent/checkpoints"])
def test_local_backend_follows_no_link_out(tmp_path: Path, place: str) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    (root / place).parent.mkdir(parents=True)
    (root / place).symlink_to(outside)
    with pytest.raises(ConfigError, match="leads out of the backend's path"):
        LocalBackend(root).folder(TrainableModel("agent", "demo", "tiny"))
    assert not any(outside.iterdir())


@pytest.mark.parametrize(
    "name", ["checkpoints", "metrics.jsonl", "samples.jsonl", "alarms.jsonl", ".lock", "checkpoints/step-000009"]
)
def test_a_run_follows_no_link_out(trainer: Callable[..., Any], tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    place = tmp_path / "run" / name
    place.parent.mkdir(parents=True)
    place.symlink_to(outside / "file" if "." in name else outside)
    with pytest.raises(ConfigError, match="is a link that leads out"):
        trainer(steps=1)
    assert [p.name for p in outside.iterdir()] == ["file"]
    assert (outside / "file").read_text() == "mine"


def test_a_whole_run_may_be_a_link_and_links_inside_it_may_stay_inside(
    trainer: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    trainer(steps=1).run()
    assert (tmp_path / "disk" / "checkpoints" / "step-000001").is_dir()
    (tmp_path / "disk" / "newest").symlink_to("checkpoints/step-000001")
    trainer(steps=2, resume=True).run()


def test_an_experiment_and_a_measurement_follow_no_link_out(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("compare", "measure"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ("runs" if name == "compare" else "settings.json")).symlink_to(outside)
    with (
        pytest.raises(ConfigError, match="is a link that leads out"),
        Folder(tmp_path / "compare").claimed("compare", {}),
    ):
        pass
    settings = Settings("tiny", "tiny", 1, 4, 1, 1.0, 1, 0, None, False)
    with pytest.raises(ConfigError, match="is a link that leads out"):
        Store(tmp_path / "measure", settings, 0)
    assert not any(outside.iterdir())


def test_a_sweeps_folders_are_plain_whatever_is_swept() -> None:
    axis = sweep_grammar.parse("prompts=../../etc/passwd,/abs,a\\b,~,\u202ex")
    made = [sweep_grammar.folder({axis.field: value}, n) for n, value in enumerate(axis.values)]
    for name in made:
        assert Path(name).name == name
        assert not name.startswith((".", "/", "~"))
        assert ".." not in name
    assert len(set(made)) == len(made)


def test_reports_and_settings_replace_a_link_instead_of_following_it(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").symlink_to(tmp_path / "mine")
    RunFolder(run).write_config(TrainConfig())
    assert not (run / "config.yaml").is_symlink()
    (run / "metrics.jsonl").write_text('{"step": 1, "kl/steered": 0.1, "kl/beta": 0.1, "reward/mean": 0.5}\n')
    page = write_runs([run])
    page.unlink()
    page.symlink_to(tmp_path / "mine")
    assert write_runs([run]) == page
    assert not page.is_symlink()
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("member", ["../../x", "/abs", "a/../../x", "C:\\x", "..\\x", "link"])
def test_an_archive_that_leads_out_is_refused_whole(tmp_path: Path, member: str) -> None:
    archive = tmp_path / "a.whl"
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("good/model.gguf", b"weights")
        info = zipfile.ZipInfo(member)
        if member == "link":
            info.external_attr = (stat.S_IFLNK | 0o777) << 16
        made.writestr(info, "/etc/passwd")
    target = tmp_path / "out" / "model.gguf"
    target.parent.mkdir()
    with pytest.raises(KlampError, match="leads out of its folder"):
        fetch.extract(archive, "good/model.gguf", target)
    assert not any(target.parent.iterdir())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.whl", "out"]


def test_a_runs_own_config_cannot_send_its_resumption_elsewhere(trainer: Callable[..., Any], tmp_path: Path) -> None:
    trainer(steps=1).run()
    file = tmp_path / "run" / "config.yaml"
    file.write_text(file.read_text().replace(str(tmp_path / "run"), str(tmp_path / "elsewhere")))
    trainer(steps=2, resume=True).run()
    assert not (tmp_path / "elsewhere").exists()
    steps = [json.loads(x)["step"] for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]
