"""docs/coming-from.md says what the tests check: its code is the recipes, its snippets run, its names exist."""

from __future__ import annotations

import builtins
import inspect
import re
import sys
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace

import pytest
import recipes
import torch

import klamp
from klamp import compat
from klamp.compat.foreign_settings import FOREIGN
from klamp.config_io import fields_of, from_yaml
from klamp.train.config import TrainConfig

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
RECIPES = {k: f for k, f in vars(recipes).items() if isinstance(f, FunctionType) and f.__module__ == recipes.__name__}
SYSTEMS = ("ROLL", "trlx", "ART", "The PPO tutorial", "TRL", "verl", "OpenRLHF")


@pytest.mark.parametrize("name", RECIPES)
def test_the_page_shows_the_code_that_is_tested(name: str) -> None:
    assert inspect.getsource(RECIPES[name]).strip() in PAGE


def test_the_page_shows_no_recipe_that_is_not_tested() -> None:
    shown = PAGE[PAGE.index("## The compositions in full") :]
    assert set(re.findall(r"^def (\w+)\(", shown, re.MULTILINE)) == set(RECIPES)


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_has_settings_and_defects(system: str) -> None:
    section = PAGE.split(f"\n## {system}\n")[1].split("\n## ")[0]
    assert "| setting (default) | exactly, in klamp |" in section
    assert "| defect | klamp |" in section


def surroundings() -> dict[str, object]:
    """What a snippet finds around it: the objects of the framework that it is pasted into."""
    trainer = SimpleNamespace(beta=0.04, kl_ctl=compat.FixedKLController(0.1), reward_kl_controller=None)
    return {"trainer": trainer, "pipeline": SimpleNamespace(kl_ctrl=None), **vars(recipes)}


@pytest.fixture
def core_algos(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for verl's module of that name, so that the snippet for it runs without verl."""
    modules = {name: ModuleType(name) for name in ("verl", "verl.trainer", "verl.trainer.ppo")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    modules["verl.trainer.ppo"].core_algos = ModuleType("verl.trainer.ppo.core_algos")
    return modules["verl.trainer.ppo"].core_algos


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_every_snippet_runs(block: str, core_algos: ModuleType) -> None:
    names = surroundings()
    exec(compile(block, "coming-from.md", "exec"), names)
    for put in re.findall(r"^((?:trainer|pipeline)\.\w+) = ", block, re.MULTILINE):
        replaced(eval(put, names))
    if "core_algos.get_kl_controller = " in block:
        config = SimpleNamespace(type="hold", kl_coef=0.001, target_kl=0.1, horizon=10_000)
        replaced(core_algos.get_kl_controller(config))
    if "trainer.beta = " in block:
        for _ in range(20):
            names["on_step_end"]([1e3, 1e3])
        assert names["trainer"].beta == names["control"].value > 0.04


def replaced(controller: klamp.Stateful) -> None:
    """It serves every calling convention, and the price rises above the target."""
    start = controller.value
    for _ in range(20):
        controller.update(current=1e3, n_steps=8)
    assert controller.value > start


SPACES = (klamp, compat, recipes, klamp.Hold, torch.Tensor, builtins)
KNOWN = {name for space in SPACES for name in dir(space)}
THEIRS = {"compute_kl_penalty", "AdaptiveKLController", "compute_reward"}
SPANS = {
    span
    for table in re.findall(r"\| setting \(default\).*?\n\n", PAGE, re.DOTALL)
    for row in table.splitlines()
    for span in re.findall(r"`([^`]+)`", row.partition(" | ")[2])
}


ROWS = [
    row.strip("| ").split(" | ")
    for table in re.findall(r"\| setting \(default\).*?\n\n", PAGE, re.DOTALL)
    for row in table.splitlines()[2:]
    if row.startswith("|")
]


def test_the_column_of_klamp_train_says_what_klamp_train_answers() -> None:
    """A foreign name at the head of a row, and klamp's fields for it in its third column."""
    checked = 0
    for first, _, train, *_ in (row for row in ROWS if not row[0].startswith("metric")):
        names = {re.split(r"[ :(]", span)[0].lstrip("-").rpartition(".")[2] for span in re.findall(r"`([^`]+)`", first)}
        fields = set(re.findall(r"`([a-z]+\.[a-z_]+)", train))
        for name in names & set(FOREIGN):
            meant = set(re.findall(r"[a-z]+\.[a-z_]+", FOREIGN[name].here))
            assert meant & fields or not (meant and fields), (first, train, FOREIGN[name].here)
            checked += 1
    assert checked > 30


def test_the_fields_in_that_column_and_the_metrics_in_it_exist() -> None:
    fields = {name for name, _ in fields_of(TrainConfig)}
    metrics = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    for _, _, train, *_ in ROWS:
        for span in re.findall(r"`([^`]+)`", train):
            name = span.partition("=")[0]
            assert name in fields or f"`{name}`" in metrics, span


def test_the_table_of_names_is_the_table_that_answers() -> None:
    def code(text: str) -> str:
        """Fields, which messages spell as flags or as YAML, are code on the page."""
        return text.replace("‹", "`").replace("›", "`")

    rows = [f"| `{n}` | {f.systems} | {code(f.here) or 'none'} | {code(f.note)} |" for n, f in FOREIGN.items()]
    assert "\n".join(["|---|---|---|---|", *rows, ""]) in PAGE


YAML = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("text", YAML, ids=range(len(YAML)))
def test_every_yaml_is_a_configuration(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    config = from_yaml(TrainConfig, tmp_path / "run.yaml")
    assert config.kl.make_controller().init().beta == config.kl.beta
    assert config.kl.clamp_limit is None
    assert len(YAML) == len(SYSTEMS)


def test_trlx_metrics_with_padding() -> None:
    """trlx's three figures on a padded batch as its code has them, against the expressions of the page."""
    g = torch.Generator().manual_seed(0)
    logp, ref_logp, old_logp = (-3 * torch.rand(4, 9, generator=g, dtype=torch.float64) for _ in range(3))
    attention_mask = torch.arange(10) < torch.tensor([[10], [4], [7], [1]])
    mask = attention_mask[:, 1:].long()
    log_ratio = (logp - ref_logp) * attention_mask[:, :-1]
    kl = log_ratio.exp() - 1 - log_ratio
    drift = (logp - old_logp) * mask
    want = {
        "policy/sqrt_kl": kl.sum(1).mean().sqrt(),
        "policy/kl_per_token": kl.mean().sqrt(),
        "policy/approx_kl": (drift.exp() - 1 - drift).mean(),
    }
    names = {**vars(klamp.estimators), **vars(recipes), "mean": klamp.mean}
    names |= {"logp": logp, "ref_logp": ref_logp, "old_logp": old_logp, "mask": mask, "attention_mask": attention_mask}
    for metric, value in want.items():
        (row,) = (row for row in ROWS if row[0] == f"metric `{metric}`")
        assert eval(row[1].strip("`"), names).item() == pytest.approx(value.item(), rel=1e-12)


@pytest.mark.parametrize("span", sorted(SPANS))
def test_every_function_in_a_table_exists(span: str) -> None:
    called = set(re.findall(r"(\w+)\(", span))
    assert called - THEIRS <= KNOWN, called - THEIRS - KNOWN
