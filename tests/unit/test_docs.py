"""The docs run, link to what exists, and their table says what the code and the audit say."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import Any

import pytest

import klamp
from klamp.audit import Finding, audit_matrix

ROOT = Path(__file__).parents[2]
PAGES = [
    "docs/index.md",
    "docs/own-loop.md",
    "docs/estimators.md",
    "docs/placements.md",
    "docs/metrics.md",
    "docs/controllers.md",
    "docs/rewards.md",
    "README.md",
]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run_in_order(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # what a block writes stays out of the checkout
    text = read(page)
    namespace: dict[str, Any] = {"__name__": "docs"}
    found = list(BLOCK.finditer(text))
    assert found or page == "README.md"
    for match in found:
        line = text[: match.start(1)].count("\n")
        exec(compile("\n" * line + match.group(1), page, "exec"), namespace)


def test_the_packages_docstring_runs() -> None:
    result = doctest.testmod(klamp)
    assert result.attempted > 0
    assert result.failed == 0


EVERY = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").rglob("*.md"))
TEXTS = [*EVERY, "README.md", "CONTRIBUTING.md", "CHANGELOG.md"]


@pytest.mark.parametrize("page", TEXTS)
def test_links_and_images_lead_somewhere(page: str) -> None:
    """Files of relative links exist; `make docs`, which is strict, looks at their anchors too."""
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", without_code(read(page))):
        assert ((ROOT / page).parent / target).exists(), target


def test_every_page_is_in_the_navigation_and_in_no_other_place() -> None:
    named = re.findall(r"[\w/-]+\.md(?=\n)", read("mkdocs.yml"))
    assert sorted(f"docs/{name}" for name in named) == EVERY


@pytest.mark.parametrize("page", [p for p in TEXTS if not p.startswith("docs/log/")])
def test_history_is_in_the_log(page: str) -> None:
    """A commit belongs to history: hexadecimal, seven digits or more, letters and figures mixed."""
    found = [w for w in re.findall(r"(?<![\w-])[0-9a-f]{7,40}(?![\w-])", read(page)) if re.search("[a-f]", w)]
    assert [w for w in found if re.search(r"\d", w)] == []


NAMED = re.compile(r"`((?:src|tests|docs|examples|benchmarks|scripts|\.ci)/[\w./-]*)(?:::\w+)?`")


@pytest.mark.parametrize("page", [p for p in TEXTS if not p.startswith("docs/log/") and p != "CHANGELOG.md"])
def test_files_that_are_named_exist(page: str) -> None:
    assert [path for path in NAMED.findall(read(page)) if not (ROOT / path).exists()] == []


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)


# The table of placements.md


def table() -> dict[str, list[str]]:
    rows = [line.replace("\\|", "/") for line in read("docs/placements.md").splitlines() if " · " in line]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in rows if line.startswith("|")]
    return {row[0]: row[1:] for row in cells if row[0] != "estimator · placement"}


@pytest.fixture(scope="module")
def findings() -> dict[str, Finding]:
    return {f.name: f for f in audit_matrix(range(20))}


def test_the_table_has_every_row_of_the_audit_in_its_half(findings: dict[str, Finding]) -> None:
    assert set(table()) == set(findings)
    text = read("docs/placements.md")
    accepted, refused = text[text.index("\nAccepted:") : text.index("\nRefused:")], text[text.index("\nRefused:") :]
    for name, finding in findings.items():
        assert f"| {name} |" in (accepted if finding.accepted else refused)


def test_the_table_says_what_check_says(findings: dict[str, Finding]) -> None:
    for name, (on, off, *_) in table().items():
        estimator, placement = (part.split("(")[0].split(",")[0].strip() for part in name.split(" · "))
        if estimator == "k1 of the sampler":  # no estimator of its own: k1 with the wrong log-probs
            assert on == findings[name].descends_on
            continue
        pair = klamp.check(estimator, placement, allow_biased=True)
        assert (on, off) == (pair.on_policy, pair.off_policy), name


def test_the_table_says_what_the_audit_finds(findings: dict[str, Finding]) -> None:
    labels = {"KL(π‖ref) of the sequence", "KL(π‖ref) token by token"}
    for name, (on, _, bias_on, bias_off, std) in table().items():
        finding = findings[name]
        assert (on in labels) == (finding.descends_on in labels), name
        if finding.descends_on in labels:
            assert on == finding.descends_on
        written = [float(x) for cell in (bias_on, bias_off, std) for x in cell.split("/")]
        measured = [*finding.bias_on, *finding.bias_off, finding.std_on[-1]]
        assert written == pytest.approx(measured, abs=0.006), name  # two decimals are written


def test_the_names_of_estimators_md_are_those_of_the_code() -> None:
    text = read("docs/estimators.md")
    names = set(re.findall(r"^\| `(\w+)`", text[text.index("## The list") :], re.M))
    assert names == set(klamp.estimators.ESTIMATORS)
    aliases = dict(re.findall(r"^\| `(\w+)` \(`(\w+)`\)", text, re.M))
    assert {alias: name for name, alias in aliases.items()} == klamp.estimators.ALIASES


def test_the_rewards_of_rewards_md_train_a_model(trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's code as the file that it says to write, named as it says to name it."""
    from klamp.train.config import RewardConfig

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_rewards_of_the_page.py").write_text("\n".join(BLOCK.findall(read("docs/rewards.md"))))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w1 w2", "answer": "7"}\n{"prompt": "w3", "answer": "8"}\n')
    named = ("my_rewards_of_the_page:short", "my_rewards_of_the_page:arithmetic", "length:3")
    last = trainer(
        rewards=None, steps=1, prompts="prompts.jsonl", reward=RewardConfig(functions=named, weights=(1.0, 2.0, 0.5))
    ).run()
    assert set(named) <= {name.removeprefix("reward/") for name in last}
    assert last["reward/failed"] == 0


def test_the_built_ins_of_rewards_md_are_those_of_the_code() -> None:
    from klamp.train.rewards import resolve

    text = read("docs/rewards.md")
    table = text[text.index("## Built-in rewards") : text.index("## Several at once")]
    with pytest.raises(klamp.ConfigError) as error:
        resolve("no such reward")
    known = str(error.value).partition("Choose from: ")[2].rstrip(".").split(", ")
    assert sorted(re.findall(r"^\| `([\w:]+)`", table, re.M)) == known


def test_the_presets_and_defaults_of_controllers_md_are_those_of_the_code() -> None:
    text = read("docs/controllers.md")
    for name, target in re.findall(r'`Hold.preset\("(\w+)"\)` \| ([\d.]+)', text):
        assert klamp.Hold.preset(name).target == float(target)
    ziegler, exponential, doubling = (k(1.0, "token") for k in (klamp.Ziegler, klamp.Exponential, klamp.Doubling))
    assert f"init_beta={ziegler.init_beta}, horizon={ziegler.horizon:_}, max_error={ziegler.max_error}" in text
    assert f"Exponential(target, per, init_beta={exponential.init_beta}, gain={exponential.gain})" in text
    assert f"Doubling(target, per, init_beta={doubling.init_beta})" in text
    assert f"Hold(target, per, init_beta={klamp.Hold(1.0, 'token').init_beta})" in text
    assert "| 1e-4 to 10 |" in text
    assert exponential.bounds == (1e-4, 10)
    assert "| 1e-6 to 1e6 |" in text
    assert doubling.bounds == (1e-6, 1e6)
