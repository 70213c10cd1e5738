"""Every key a run logs is in docs/metrics.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def documented() -> list[re.Pattern[str]]:
    """Keys of the tables, with NAME standing for anything."""
    keys = re.findall(r"`([a-z]+/[A-Za-z0-9_/]+)`", PAGE.read_text(encoding="utf-8"))
    return [re.compile(re.escape(k).replace("NAME", ".+") + "$") for k in keys]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_every_logged_key_is_documented(trainer: Any, algorithm: str) -> None:
    made = trainer(steps=1, algorithm={"name": algorithm})
    logged = set(made.run())
    known = documented()
    assert {k for k in logged if not any(p.match(k) for p in known)} == set()
    assert {"kl/ref/exact", "kl/beta", "reward/mean", "time/step"} <= logged
