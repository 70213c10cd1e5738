"""``klamp train --watch`` in a real browser while the run is going: the page waits, fills, follows and ends with it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import chrome
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chrome.found() is None, reason="no chromium here: apt-get install chromium"),
]
COMMAND = [sys.executable, "-m", "klamp", "train", "--watch", "--steps", "12", "--sample-every", "3"]
COMMAND += ["--rollout.prompts", "2", "--rollout.group-size", "4", "--rollout.max-tokens", "8"]
PACED = """
import pathlib, time
steps = []
def paced(prompts, completions, **columns):
    steps.append(1)
    while len(steps) > 8 and not pathlib.Path("GO").exists():
        time.sleep(0.05)
    return [float(len(c)) for c in completions]
"""
"""A reward that holds the run after eight steps until a file is there."""
POINTS = "(document.getElementById('chart-kl')?.data ?? []).filter((t) => t.meta === 'arm').flatMap((t) => t.y).length"


def until(browser: chrome.Browser, expression: str, wanted: Any) -> Any:
    """The value of an expression once ``wanted`` holds of it."""
    deadline = time.monotonic() + chrome.PATIENCE
    while not wanted(found := browser.evaluate(expression)):
        assert time.monotonic() < deadline, (expression, found, browser.problems("http://127.0.0.1"))
        time.sleep(0.1)
    return found


def test_the_page_follows_a_run_and_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "paced.py").write_text(PACED.replace("GO", str(tmp_path / "go")))
    command = [*COMMAND, "--run", str(tmp_path / "mine"), "--reward.functions", "paced:paced"]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=paths) as train,
        chrome.browser() as browser,
    ):
        assert train.stderr is not None
        address = next(line.split()[1] for line in train.stderr if line.startswith("watch: "))
        assert address.startswith("http://127.0.0.1:")
        browser.open(address)
        status = "document.getElementById('live').textContent"
        until(browser, POINTS, lambda n: n == 8)
        assert until(browser, status, lambda s: s != "live") == "live: step 8 of 12"
        assert train.poll() is None, "all this while the run is going"
        browser.evaluate("document.documentElement.dataset.mark = 'the same page'")
        (tmp_path / "go").touch()
        assert until(browser, status, lambda s: not s.startswith("live")) == "finished: step 12 of 12"
        assert browser.evaluate(POINTS) == 12, "the charts follow the run to its last step"
        assert browser.evaluate("document.documentElement.dataset.mark") == "the same page"
        steps = browser.evaluate("[...document.querySelectorAll('.tabs button')].map((b) => b.dataset.step)")
        assert steps == ["1", "3", "6", "9", "12"], "samples are renewed too"
        assert browser.problems(address) == []
        said = train.stderr.read()
        assert train.wait(60) == 0
    assert f"report: {tmp_path / 'mine' / 'report.html'}" in said
    assert (tmp_path / "mine" / "report.html").is_file()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(address, timeout=5)


def test_ctrl_c_saves_and_leaves_no_server(tmp_path: Path) -> None:
    command = [*COMMAND, "--steps", "1000", "--run", str(tmp_path / "mine")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as train:
        assert train.stderr is not None
        address = next(line.split()[1] for line in train.stderr if line.startswith("watch: "))
        next(line for line in train.stderr if line.startswith("step 1/"))
        os.kill(train.pid, 2)
        said = train.stderr.read()
        assert train.wait(60) == 130
    assert "klamp train --resume" in said
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(address, timeout=5)
