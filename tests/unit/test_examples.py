"""The examples run as they stand, from anywhere, and do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_own_loop_holds_the_kl(tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    # ResourceWarning: older releases of torch leave a temporary folder to the interpreter's end.
    command = [sys.executable, "-W", "error", "-W", "ignore::ResourceWarning", str(EXAMPLES / "own_loop.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "no alarm"
    summary = re.search(r"KL ([\d.]+) for a target of ([\d.]+), in band (\d+)%", done.stdout)
    assert summary is not None, done.stdout
    kl, target, in_band = (float(x) for x in summary.groups())
    assert abs(kl / target - 1) < 0.2
    assert in_band >= 50, "81 to 99 % with three seeds of two releases of torch"
    rewards = [float(line.split()[1]) for line in done.stdout.splitlines()[1:-1]]
    assert rewards[-1] > 2 * rewards[0], "it must learn, or holding means nothing"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_measure_finetune_says_how_far_and_where(tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-W", "error", "-W", "ignore::ResourceWarning", str(EXAMPLES / "measure_finetune.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=240)
    assert done.returncode == 0, done.stderr
    numbers = re.search(r"KL per token +([\d.]+) +95 % interval ([\d.]+) to ([\d.]+)", done.stdout)
    assert numbers is not None, done.stdout
    kl, low, high = (float(x) for x in numbers.groups())
    assert 0 < low < kl < high < 0.1
    assert "within rounding" not in done.stdout
    assert (Path(done.stdout.split("page: ")[1].strip())).stat().st_size > 10_000


CELLS = ("own_loop", "trl_grpo", "measure_finetune")
"""The three to copy: scripts that an editor opens as notebooks."""


@pytest.mark.parametrize("name", CELLS)
def test_a_script_to_copy_is_a_notebook(name: str) -> None:
    """It begins with text, and text and code take turns; no cell is empty."""
    source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    kinds = re.findall(r"^# %%(?: \[(\w+)\])?$", source, re.M)
    assert source.startswith("# %% [markdown]\n# # ")
    assert kinds.count("markdown") >= 3
    assert len(kinds) >= 6
    for cell in re.split(r"^# %% \[markdown\]\n", source, flags=re.M)[1:]:
        assert cell.split("\n# %%\n")[0].strip("#\n ")


def test_own_loop_needs_torch_and_klamp_alone() -> None:
    source = (EXAMPLES / "own_loop.py").read_text(encoding="utf-8")
    names = set(re.findall(r"^(?:import|from) (\w+)", source, re.M))
    assert names - set(sys.stdlib_module_names) <= {"torch", "klamp", "__future__"}
