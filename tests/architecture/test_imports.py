"""Imports go one way, heavy packages stay where they belong, and `import klamp` stays light."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import klamp

ROOT = Path(klamp.__file__).parent
LAYERS = [
    # the library: torch alone
    {"errors", "numerics", "distributed"},
    {"masked", "clamp_scalers", "chat", "strict_json"},
    {"advantages"},
    {"estimators", "controllers", "clamp", "objectives"},
    {"placements", "trust", "kernels", "monitor"},
    {"control_state"},
    {"control"},
    # what is built on it
    {"compat", "progress", "seeds"},
    {"config_io", "rounding_floor"},
    {"audit", "sampling"},
    {"models"},
    {"prompts"},
    {"references"},
    {"train"},
    {"serve", "results"},
    {"local_backend", "experiments"},
    {"integrations", "report"},
    {"measure"},
    {"cli"},
]
"""A room imports from the rooms of the layers above its own in this list, and from no other."""
LIBRARY = 6
"""Layers, of those, that load nothing but torch."""
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
HOMES = {
    "accelerate": ("train/", "measure"),
    "triton": ("kernels/triton_",),
    "trl": ("integrations/trl",),
    "art": ("integrations/art",),
    "fastapi": ("serve/", "integrations/art"),
    "uvicorn": ("serve/",),
    "openai": ("local_backend",),
    "verl": ("integrations/verl",),
}
HEAVY = ["transformers", "peft", "accelerate", "triton", "trl", "plotly", "rich", "tyro", "matplotlib", "datasets"]
FILES = sorted(ROOT.rglob("*.py"))


def imported(path: Path, *, only_at_load: bool = False) -> Iterator[tuple[str, int]]:
    """Absolute names of the modules that a file imports, relative ones resolved, TYPE_CHECKING blocks left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = ["klamp", *path.relative_to(ROOT).parent.parts]
    skipped = {id(n) for top in ast.walk(tree) if _is_type_checking(top) for n in ast.walk(top)}
    if only_at_load:
        functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))
        skipped |= {id(n) for f in functions for n in ast.walk(f)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            # `from klamp import estimators` names a module; `from klamp import k3` a function of the package.
            yield from ((f"{name}.{a.name}" if name == "klamp" else name, node.lineno) for a in node.names)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def part(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    own = part(path)
    if own in ("__init__", "__main__"):
        return
    assert own in LEVEL, f"{own} has no layer yet: add it to LAYERS"
    for name, line in imported(path):
        other = name.split(".")[1] if name.startswith("klamp.") else None
        if other is None or other == own or other not in LEVEL:
            continue
        allowed = LEVEL[other] < LEVEL[own]
        assert allowed, f"{path.name}:{line} imports klamp.{other}, which is not below klamp.{own}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_heavy_packages_stay_where_they_belong(path: Path) -> None:
    where = path.relative_to(ROOT).as_posix()
    for name, line in imported(path):
        homes = HOMES.get(name.split(".")[0])
        assert homes is None or where.startswith(homes), f"{where}:{line} imports {name}; it belongs in {homes}"


@pytest.mark.parametrize("name", [n for level in LAYERS[:LIBRARY] for n in sorted(level)])
def test_the_core_loads_torch_and_the_standard_library_only(name: str) -> None:
    files = [p for p in FILES if part(p) == name and not p.name.startswith("triton_")]
    for path in files:
        for module, line in imported(path, only_at_load=True):
            top = module.split(".")[0]
            light = top in sys.stdlib_module_names or top in ("torch", "klamp", "__future__")
            assert light, f"{path.name}:{line} imports {module}"


def test_import_klamp_is_light_and_leaves_torch_as_it_was() -> None:
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "threads, dtype, seed = torch.get_num_threads(), torch.get_default_dtype(), torch.initial_seed()\n"
        "import klamp\n"
        "assert (threads, dtype, seed) == (torch.get_num_threads(), torch.get_default_dtype(), torch.initial_seed())\n"
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "klamp" in loaded
    assert loaded.isdisjoint(HEAVY)
    assert {m for m in loaded if m not in sys.stdlib_module_names} <= {"klamp", "torch"}


def test_every_lazy_name_is_found_where_it_is_said_to_be() -> None:
    for module, names in klamp.HOMES.items():
        home = importlib.import_module(f"klamp.{module}")
        for name in names:
            assert getattr(klamp, name) is getattr(home, name)
    offered = {name for module, names in klamp.HOMES.items() for name in names}
    assert set(klamp.__all__) - {"clamp_kl"} <= offered
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        klamp.nonsense  # noqa: B018


PROMISED = [
    "k1",
    "k2",
    "k3",
    "absolute",
    "exact",
    "exact_forward",
    "k3_clamped",
    "r_log_r",
    "weighted",
    "straight_through",
    "top_k_exact",
    "fitted",
    "estimator",
    "mean",
    "sum_count",
    "Fixed",
    "Scheduled",
    "Ziegler",
    "Exponential",
    "Doubling",
    "Hold",
    "State",
    "Stateful",
    "in_reward",
    "in_advantage",
    "in_loss",
    "sequence_exact",
    "check",
    "Monitor",
    "Alarm",
    "kl_controller",
    "scale_for",
    "clamp_kl",
    "audit_matrix",
    "audit_function",
    "ConfigError",
    "KlampError",
]


@pytest.mark.parametrize("name", PROMISED)
def test_every_public_name_is_reexported(name: str) -> None:
    assert hasattr(klamp, name)
    assert name in klamp.__all__


def test_all_is_sorted_and_true_and_every_name_has_a_docstring() -> None:
    assert sorted(klamp.__all__) == klamp.__all__
    assert len(set(klamp.__all__)) == len(klamp.__all__)
    for name in klamp.__all__:
        assert getattr(klamp, name).__doc__, name


@pytest.mark.parametrize("name", ["estimators", "controllers", "compat"])
def test_what_a_module_offers_is_offered_by_klamp(name: str) -> None:
    module = getattr(klamp, name)
    fronts = {"AdaptiveKLController", "ExponentialKLController", "FixedKLController", "get_kl_controller"}
    for public in set(module.__all__) - fronts:
        assert getattr(klamp, public) is getattr(module, public)
