"""Recorded cases: loading them, comparing with them, and knowing that nothing in them was left unread.

``KLAMP_GOLDEN`` names another folder of vectors in the same format, to run these checks on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(os.environ.get("KLAMP_GOLDEN", Path(__file__).parent / "data"))

DTYPES = {"float32": torch.float32, "float64": torch.float64}
# (relative, absolute). float64: what klamp promises; the originals themselves agree to 2e-12 or 1e-13.
# float32: exp(x) - x - 1 as the originals write it loses about 1.2e-7 near 0; float32 itself carries 6e-8 relative a
# step, and 2e-6 leaves room for the sums.
TOLERANCE = {"float64": (1e-9, 1e-13), "float32": (2e-6, 3e-7)}

Check = Callable[["Case"], None]
CHECKS: dict[tuple[str, str], Check] = {}


def checks(file: str, *kinds: str) -> Callable[[Check], Check]:
    """Register the function that checks cases of these kinds in that file."""

    def register(check: Check) -> Check:
        for kind in kinds:
            assert (file, kind) not in CHECKS, f"{file}: two checks for kind {kind!r}"
            CHECKS[file, kind] = check
        return check

    return register


def load(file: str) -> dict[str, Any]:
    """One file of vectors as JSON has it."""
    return json.loads((FOLDER / file).read_text(encoding="utf-8"))


def files() -> list[str]:
    """The names of all vector files."""
    return sorted(p.name for p in FOLDER.glob("*.json"))


def cases() -> Iterator[Case]:
    """Every case of every file."""
    for file in files():
        for raw in load(file)["cases"]:
            yield Case(file, raw)


@dataclass
class Case:
    """One recorded case, or one part of it, and which of its outputs have been read."""

    file: str
    raw: dict[str, Any]
    dtype: str = ""
    unread: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.dtype = self.dtype or self.raw.get("dtype") or "float64"
        outputs = self.raw.get("outputs", {})
        self.unread = set(outputs) if isinstance(outputs, dict) else set(range(len(outputs)))

    @property
    def id(self) -> str:
        """``file/case``."""
        return f"{self.file.removesuffix('.json')}/{self.raw['id']}"

    @property
    def kind(self) -> str:
        """The layout of the case."""
        return self.raw["kind"]

    @property
    def hazard(self) -> bool:
        """Whether a defect of the original is recorded, which klamp refuses or does better than."""
        return "hazard" in (self.raw.get("tags") or ())

    @property
    def inputs(self) -> dict[str, Any]:
        """The inputs, as JSON has them, with non-finite numbers as floats."""
        return {k: numbers(v) for k, v in self.raw["inputs"].items()}

    def tensor(self, name: str, *, grad: bool = False) -> Tensor:
        """An input in the dtype that the original was given; masks and ids stay integers."""
        whole = name.endswith("mask") or name == "position_ids"
        x = torch.tensor(numbers(self.raw["inputs"][name]), dtype=torch.long if whole else DTYPES[self.dtype])
        return x.requires_grad_() if grad else x

    def parts(self, name: str) -> Iterator[Case]:
        """The steps or chunks of a case, or the entries of a list of outputs."""
        for i, part in enumerate(self.raw[name]):
            raw = {"id": f"{self.raw['id']}[{i}]", "kind": self.kind, "inputs": self.raw["inputs"]}
            own = part if "outputs" in part else {"outputs": part}
            yield Case(self.file, raw | own, self.dtype)

    def entries(self) -> Iterator[Case]:
        """The parts of a case whose outputs are a list, one a setting."""
        self.unread.clear()
        yield from self.parts("outputs")

    def read(self, name: str) -> Any:
        """A recorded output, marked as read."""
        self.unread.discard(name)
        return numbers(self.raw["outputs"][name])

    def same(self, name: str, actual: object) -> None:
        """The recorded output is exactly this."""
        expected = self.read(name)
        assert actual == expected, f"{self.id}: {name} is {actual!r}, recorded {expected!r}"

    def close(self, name: str, actual: Tensor | float, *, dtype: str = "", slack: Tensor | float = 0.0) -> None:
        """The recorded output is this within the tolerance of the dtype, plus an argued ``slack``."""
        near(actual, self.read(name), dtype or self.dtype, slack, f"{self.id}: {name}")


def near(actual: Tensor | float, expected: object, dtype: str, slack: Tensor | float, what: str) -> None:
    """``|actual − expected| ≤ max(rel·|expected|, abs)`` (float32: their sum) ``+ slack``; shapes agree exactly."""
    a = actual.detach().double() if isinstance(actual, Tensor) else torch.tensor(actual, dtype=torch.float64)
    e = torch.tensor(expected, dtype=torch.float64)
    assert a.shape == e.shape, f"{what} has shape {tuple(a.shape)}, recorded {tuple(e.shape)}"
    assert torch.equal(a.isfinite(), e.isfinite()), f"{what} is {a.tolist()}, recorded {e.tolist()}"
    rel, absolute = TOLERANCE[dtype]
    bound = rel * e.abs() + absolute if dtype == "float32" else (rel * e.abs()).clamp(min=absolute)
    off = ((a - e).abs() - bound - slack).nan_to_num(0)
    assert (off <= 0).all(), f"{what} is off by {(a - e).abs().max().item():.3g}: {a.tolist()}, recorded {e.tolist()}"


def numbers(x: Any) -> Any:
    """JSON's strings for non-finite numbers as floats, at any depth."""
    if isinstance(x, list):
        return [numbers(v) for v in x]
    if x in ("NaN", "Infinity", "-Infinity"):
        return float(x.replace("Infinity", "inf"))
    return x


def grad_of(value: Tensor, x: Tensor) -> Tensor:
    """The derivative of the plain sum of ``value`` with respect to ``x``."""
    return torch.autograd.grad(value.sum(), x, retain_graph=True)[0]
