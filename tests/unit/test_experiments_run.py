"""Real comparisons and sweeps in processes: to the end, killed and resumed to the bit, nothing run twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from klamp.errors import ExperimentError
from klamp.experiments import sweep
from klamp.experiments.compare import CompareConfig, run
from klamp.report import write_comparison, write_runs, write_sweep
from klamp.results.verdict import judge

pytestmark = pytest.mark.slow
SMALL: dict[str, Any] = {"steps": 4, "seeds": 1, "prompts_per_step": 2, "group_size": 2, "max_tokens": 6, "lr": 3e-3}


def rows(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without its times."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in found]


def stamps(root: Path) -> dict[Path, int]:
    return {p: p.stat().st_mtime_ns for p in root.rglob("metrics.jsonl")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compare") / "out"
    run(CompareConfig(arms=("static", "hold"), **SMALL), out)
    return out


def test_arms_share_prompts_seeds_and_the_first_batch(whole: Path) -> None:
    static, hold = (rows(whole / "runs" / arm / "seed-0") for arm in ("static", "hold"))
    assert [r["step"] for r in static] == [1, 2, 3, 4]
    assert static[0]["reward/mean"] == hold[0]["reward/mean"]
    assert static[0]["kl/ref/exact"] == pytest.approx(0.0, abs=1e-6)
    assert {r["kl/beta"] for r in static} == {0.04}
    assert "heldout/perplexity" in static[-1]
    assert "heldout/perplexity_reference" in static[-1]
    for found in (static, hold):
        assert [r["step"] for r in found if "kl/fresh" in r] == [4]
        assert 0 < found[-1]["kl/fresh"] < 0.1
        assert 0 < found[-1]["kl/fresh_noise"] < 0.3, "256 samples know the KL well"
    reference = json.loads((whole / "reference.json").read_text())
    # Four steps went 0.02 nats a token away from the reference, which is 1 % of its perplexity.
    assert reference["perplexity"]["heldout"] == pytest.approx(static[-1]["heldout/perplexity"], rel=0.05)
    probes = [
        json.loads(line) for line in (whole / "runs" / "hold" / "seed-0" / "probes.jsonl").read_text().splitlines()
    ]
    assert {p["prompt"] for p in probes} == {p["prompt"] for p in reference["probes"]}
    assert all(len(p["tokens"]) == len(p["kl"]) > 0 for p in probes)


def test_what_is_finished_is_not_run_again_and_an_arm_can_be_added(whole: Path) -> None:
    before = stamps(whole)
    found = run(CompareConfig(arms=("static", "hold", "beta=0.3"), **SMALL), whole)
    assert {p: t for p, t in stamps(whole).items() if p in before} == before
    assert set(found.arms) == {"static", "hold", "beta=0.3"}
    said = judge(found)
    page = write_comparison(found, said)
    assert page == whole / "report.html"
    assert {"report.html", "figure.png", "figure.pdf", "results.json"} <= {p.name for p in whole.iterdir()}
    assert json.loads((whole / "results.json").read_text())["sentence"] == said.sentence
    assert write_runs([whole], whole / "again.html").read_text() == page.read_text()


def test_killed_with_its_workers_and_resumed_it_equals_the_unbroken_run(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = (
        "from klamp.experiments.compare import CompareConfig, run\n"
        f"run(CompareConfig(arms=('static', 'hold'), **{SMALL!r}), {str(out)!r}, at_once=1)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"})
    metrics = out / "runs" / "static" / "seed-0" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and metrics.read_bytes().count(b"\n") >= 2):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    again = subprocess.run([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300)
    assert again.returncode == 0
    for arm in ("static", "hold"):
        assert rows(out / "runs" / arm / "seed-0") == rows(whole / "runs" / arm / "seed-0")


def test_sigterm_saves_says_how_to_go_on_and_leaves_no_process(tmp_path: Path) -> None:
    out = tmp_path / "out"
    settings = {**SMALL, "steps": 400}
    code = (
        "import sys\nfrom klamp.errors import KlampError\nfrom klamp.experiments.compare import CompareConfig, run\n"
        f"try:\n    run(CompareConfig(arms=('static',), **{settings!r}), {str(out)!r})\n"
        "except KlampError as error:\n    print(error)\n    sys.exit(2)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    run_folder = out / "runs" / "static" / "seed-0"
    deadline = time.monotonic() + 120
    while not (run_folder / "metrics.jsonl").is_file():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "Run the same command again" in said
    assert list((run_folder / "checkpoints").iterdir()), "the step at hand was saved"
    last = len(rows(run_folder))
    time.sleep(1)
    assert len(rows(run_folder)) == last, "nobody goes on training"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise RuntimeError('no!')", ("run 'static seed 0' failed", "no!")),
        ("os.kill(os.getpid(), 9)", ("ended by signal 9",)),
    ],
    ids=["raises", "is killed alone"],
)
def test_a_run_that_fails_is_named_with_its_reason(tmp_path: Path, body: str, said: tuple[str, ...]) -> None:
    (tmp_path / "broken_reward.py").write_text(f"import os\ndef reward(prompts, completions):\n    {body}\n")
    code = (
        "from klamp.experiments.compare import CompareConfig, run\n"
        f"run(CompareConfig(arms=('static',), reward=('broken_reward:reward',), **{SMALL!r}), 'out')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert all(words in done.stderr for words in said), done.stderr


def test_a_sweep_runs_and_ends_in_table_and_frontier(tmp_path: Path) -> None:
    config = sweep.SweepConfig(
        over=("kl.beta=0.01:1:2:log",),
        set=("rollout.prompts=2", "rollout.group_size=2", "rollout.max_tokens=6"),
        steps=2,
    )
    found = sweep.run(config, tmp_path / "out")
    assert [p.label for p in found.points] == ["kl.beta=0.01", "kl.beta=1"]
    assert found.frontier
    assert found.target is None, "nothing reads a target under a constant beta"
    assert "reward-KL frontier" in sweep.sentence(found)
    assert sweep.headline(found) == f"{len(found.frontier)} of 2 points are on the reward-KL frontier."
    assert sweep.table(found).row_count == 2
    before = stamps(tmp_path)
    page = write_sweep(sweep.run(config, tmp_path / "out"))
    assert stamps(tmp_path) == before
    assert "kl.beta=0.01" in page.read_text()
    assert f"<h1>{sweep.headline(found)}</h1>" in page.read_text()


def test_ray_runs_the_same_jobs_to_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is an extra: pip install 'klamp[ray]'")
    settings = {
        "over": ("kl.beta=0.01,1",),
        "set": ("rollout.prompts=2", "rollout.group_size=2", "rollout.max_tokens=6"),
        "steps": 2,
    }
    code = (
        "import sys\nfrom klamp.experiments import sweep\n"
        f"sweep.run(sweep.SweepConfig(**{settings!r}), sys.argv[1], engine=sys.argv[2])"
    )
    for engine in ("local", "ray"):
        command = [sys.executable, "-c", code, str(tmp_path / engine), engine]
        # A file, not a pipe: Ray's own processes would keep a pipe open.
        with (tmp_path / f"{engine}.log").open("w+") as log:
            done = subprocess.run(command, stdout=log, stderr=log, timeout=900)
            assert done.returncode == 0, (tmp_path / f"{engine}.log").read_text()
    local, ray = (sorted((tmp_path / engine).rglob("metrics.jsonl")) for engine in ("local", "ray"))
    assert [rows(p.parent) for p in local] == [rows(p.parent) for p in ray]


def test_experiment_error_is_klamps_own() -> None:
    from klamp.errors import KlampError

    assert issubclass(ExperimentError, KlampError)
