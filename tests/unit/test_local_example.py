"""The example of LocalBackend learns and holds its KL; the page about it runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_the_example_learns_and_holds_the_kl(tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-W", "error", str(ROOT / "examples/local_backend.py"), str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "no alarm"
    rows = [[float(x.strip("%")) for x in line.split()] for line in done.stdout.splitlines()[1:]]
    steps, rewards, _, kls, _ = zip(*rows, strict=True)
    assert steps == tuple(range(1, 13))
    # A step is 64 answers: its reward is good to 0.03.
    assert fmean(rewards[-8:]) > rewards[0] + 0.05
    # It reads KL with 11 % of noise, and twelve steps are few to find the price in: KL may still be on its way.
    assert fmean(kls[-4:]) == pytest.approx(0.05, rel=0.4)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/local-backend.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/local-backend.md", "exec"), namespace)
    assert len(blocks) >= 3
