"""The examples run as they stand, from anywhere, and do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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
    assert in_band >= 90
    rewards = [float(line.split()[1]) for line in done.stdout.splitlines()[1:-1]]
    assert rewards[-1] > 2 * rewards[0], "it must learn, or holding means nothing"
    assert list(tmp_path.iterdir()) == []


def test_own_loop_needs_torch_and_klamp_alone() -> None:
    source = (EXAMPLES / "own_loop.py").read_text(encoding="utf-8")
    names = set(re.findall(r"^(?:import|from) (\w+)", source, re.M))
    assert names - set(sys.stdlib_module_names) <= {"torch", "klamp", "__future__"}
