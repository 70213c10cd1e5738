"""docs/trl.md runs, names every metric that is published, and the example trains."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "trl.md").read_text(encoding="utf-8")


def test_the_lines_run_and_every_metric_is_in_the_table(trainer: Callable[..., Any]) -> None:
    t = trainer(max_steps=6, learning_rate=0.1)
    names: dict[str, Any] = {"trainer": t}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S):
        exec(compile(block, "docs/trl.md", "exec"), names)
    published = {key for row in t.state.log_history for key in row if key.startswith("klamp/")}
    assert {"klamp/beta", "klamp/kl", "klamp/target", "klamp/in_band", "klamp/effort"} <= published
    documented = set(re.findall(r"^\| `(klamp/[^`]+)`", PAGE, re.M))
    assert {re.sub(r"alarm/.*", "alarm/<kind>", key) for key in published} <= documented


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")  # torch, where there is no GPU
def test_the_example_trains(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("STEPS", "3")
    runpy.run_path(str(ROOT / "examples" / "trl_grpo.py"), run_name="__main__")
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0].split() == ["step", "reward", "kl", "beta", "effort"]
    assert [line.split()[0] for line in lines[1:]] == ["1", "2", "3"]
