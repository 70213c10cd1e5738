"""The command line as people call it: a subprocess, its output and its exit code."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import Tensor

import klamp
from klamp.cli import main
from klamp.train.config import RewardConfig


def run(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(
        [sys.executable, "-m", "klamp", *args], capture_output=True, text=True, encoding="utf-8", cwd=cwd, env=env
    )


def code(args: list[str]) -> object:
    """The exit code of a call in this process, returned or raised."""
    try:
        return main(args)
    except SystemExit as end:
        return end.code


@pytest.fixture
def module(tmp_path: Path) -> Path:
    (tmp_path / "my_module.py").write_text(
        "import torch\n"
        "def f(logp, ref_logp, old_logp, mask):\n"
        "    return torch.where(mask, 0.5 * (logp - ref_logp) ** 2, 0.0).mean()\n"
        "def broken(logp):\n    return logp.sum()\n"
        "def many(logp, ref_logp, old_logp, mask):\n    return logp\n"
    )
    (tmp_path / "bad_module.py").write_text("def f(:\n")
    return tmp_path


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"klamp {klamp.__version__}\n")


def test_the_usage_needs_no_torch() -> None:
    code = "import sys, klamp.cli; klamp.cli.main(['--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="GNU OpenMP's way of showing what it read")
@pytest.mark.parametrize(("given", "read"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_wait_quietly_unless_the_user_says_otherwise(given: str | None, read: str) -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "TOKENIZERS_PARALLELISM")}
    env |= {"OMP_DISPLAY_ENV": "TRUE", "OMP_NUM_THREADS": "1", **({} if given is None else {"OMP_WAIT_POLICY": given})}
    done = subprocess.run([sys.executable, "-m", "klamp", "audit", "x"], capture_output=True, text=True, env=env)
    assert f"OMP_WAIT_POLICY = '{read}'" in done.stderr


def test_audit_json_is_the_whole_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--json", "--worlds", "2"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [r["name"] for r in rows] == list(klamp.audit.matrix.ROWS)
    first = next(r for r in rows if r["name"] == "exact · sequence_exact(max_weight=None)")
    assert first["descends_on"] == first["descends_off"] == "KL(π‖ref) of the sequence"
    assert first["drifts"] == [0.03, 0.47]
    assert max(first["bias_on"]) < 1e-8


def test_audit_prints_a_table_with_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--worlds", "1"]) == 0
    out = capsys.readouterr().out
    for name in klamp.audit.matrix.ROWS:
        assert name in out
    assert "bias at 0.47" in out
    assert "refused by klamp.check and the trainer" in out  # placements are functions of any KL and refuse none


@pytest.mark.parametrize("width", [80, klamp.audit.matrix.WIDE - 1, klamp.audit.matrix.WIDE])
def test_the_audit_of_a_narrow_terminal_says_what_each_term_descends(width: int) -> None:
    def loss(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
        return ((logp - ref_logp) * mask).sum()

    long = "a_function_of_ones_own_whose_name_is_longer_than_any_of_klamps_terms"
    findings = [*klamp.audit.audit_matrix(range(1)), klamp.audit.audit_function(loss, name=long, seeds=range(1))]
    console = Console(width=width, file=io.StringIO())
    console.print(klamp.audit.render(findings, width=width))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(f.descends_on in said for f in findings)
    assert "bias at 0.47" in said
    assert ("stale: bias" in said) is (width == klamp.audit.matrix.WIDE)
    assert "…" not in said
    assert all(len(line) <= width for line in said.splitlines())


@pytest.mark.slow
def test_audit_of_a_function_in_the_working_folder(module: Path) -> None:
    done = run("audit", "my_module:f", "--worlds", "2", cwd=module)
    assert done.returncode == 0, done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith(
        "right token by token: my_module:f descends KL(π‖ref) token by token; exact with sequence_exact"
    )
    assert "std: of one sequence's gradient" in done.stdout  # the legend


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["my_module"], "module:function"),
        (["my_module:g"], "'f'"),
        (["no_such_module_x:f"], "no_such_module_x"),
        (["my_module:broken"], "raised TypeError"),
        (["my_module:many"], "one number"),
        (["bad_module:f"], "SyntaxError"),
        (["no_such_module_x.py:f"], "no_such_module_x"),
        (["my_module:f", "--worlds", "0"], "--worlds"),
    ],
)
def test_a_bad_call_is_one_line_and_exit_code_2(
    args: list[str], says: str, module: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(module)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("my_module", "bad_module"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert main(["audit", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("klamp: ")
    assert says in captured.err


def test_exit_code_2_reaches_the_shell() -> None:
    done = run("audit", "nothing")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert code(["audot"]) == 2
    assert "audot" in capsys.readouterr().err


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert code([]) == 0
    assert "audit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--kl.target", "0.1"], "--kl.target 0.1 has no unit: nats per what? Add --kl.per token, --kl.per sequence"),
        (["--kl.limit=0.1"], "--kl.limit 0.1 has no unit"),
        (["--kl.per", "sequence"], "--kl.per sequence needs a --kl.target in nats per sequence"),
        (["--kl.target", "-1", "--kl.per", "token"], "--kl.controller fixed with --kl.beta"),
        (["--kl.controller", "fixed"], "--kl.beta is missing for --kl.controller fixed."),
        (["--kl.beta", "-1"], "--kl.beta must be > 0, got -1.0."),
        (["--kl.estimator", "k1", "--kl.placement", "in_loss"], "or --kl.allow-biased to reproduce"),
        (["--kl.estimator", "k9"], "--kl.estimator 'k9' is not known"),
        (["--kl.reference", "ema:2"], "--kl.reference 'ema:2': Ema.decay must be < 1"),
        (["--steps", "0"], "--steps must be >= 1"),
        (["--rollout.max-tokens", "0"], "--rollout.max-tokens must be >= 1"),
        (["--rollout.group-size", "1"], "or --algorithm.name ppo."),
    ],
)
def test_an_error_about_a_flag_names_the_flag(
    args: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from klamp.train import loop

    monkeypatch.setattr(loop, "train_policy", lambda config: pytest.fail("it ran"))
    assert main(["train", *args]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert not any(form in said for form in ("Hold", "Fixed(", "=True", "per='"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ("--kl.clamp", "false"),
            "--kl.clamp is a switch and takes no value, got 'false'. --kl.clamp is on, --kl.no-clamp",
        ),
        (("--kl.clamp=false",), "--kl.no-clamp is off"),
        (("--no-resume", "true"), "--resume is on, --no-resume is off"),
        (("--nonsense", "true"), "Unrecognized options: --nonsense, true"),
    ],
)
def test_a_switch_given_a_value_is_named(given: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code(["train", *given]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_flags_on_top_of_a_file_may_lean_on_its_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from klamp.train import loop

    seen: list[Any] = []
    monkeypatch.setattr(loop, "train_policy", seen.append)
    file = tmp_path / "run.yaml"
    file.write_text("kl: {target: 6, per: sequence}\n")
    assert main(["train", "--config", str(file), "--kl.target", "7"]) == 0
    assert (seen[0].kl.target, seen[0].kl.per) == (7.0, "sequence")
    file.write_text("kl: {target: 6}\n")
    assert main(["train", "--config", str(file)]) == 2
    assert f"klamp: {file}: kl.target 6.0 has no unit" in capsys.readouterr().err
    file.write_text("steps: 3\n")
    assert main(["train", "--config", str(file), "--kl.target", "0.1"]) == 2
    assert "--kl.target 0.1 has no unit" in capsys.readouterr().err


def test_compare_names_its_own_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--target", "0.1"]) == 2
    assert "give --per token, --per sequence (the sum" in capsys.readouterr().err


def test_train_names_its_run_and_says_when_there_was_nothing_to_do(
    config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from klamp.config_io import to_yaml

    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(config(steps=2, reward=RewardConfig(functions=("length:4",)))))
    run = str(tmp_path / "run")
    assert main(["train", "--config", str(file)]) == 0
    assert capsys.readouterr().out == f"run: {run}, 2 steps. klamp report {run} draws it\n"
    assert main(["train", "--config", str(file), "--resume"]) == 0
    assert (
        f"complete: 2 steps were done before. klamp train --resume {run} --steps 4 goes on" in capsys.readouterr().out
    )
    assert main(["train", "--config", str(file), "--resume", "--steps", "3"]) == 0
    assert capsys.readouterr().out.startswith(f"run: {run}, 3 steps.")


def test_a_refused_comparison_claims_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args, says in [
        (["--steps", "0"], "--steps must be >= 1"),
        (["--lr", "0"], "--lr must be > 0"),
        (["--group-size", "1"], "--group-size must be >= 2"),
        (["--max-tokens", "0"], "--max-tokens must be >= 1"),
    ]:
        assert main(["compare", "--out", str(tmp_path / "out"), *args]) == 2
        assert says in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_a_field_given_to_sweep_as_a_flag_is_shown_as_it_is_written_there(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["--optim.lr", "3"], ["--optim.lr=3"]):
        assert main(["sweep", "--over", "kl.beta=1,2", *args]) == 2
        assert "klamp sweep has no --optim.lr. Write --set optim.lr=3, or" in capsys.readouterr().err


def test_help_is_a_word_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert code(["help"]) == 0
    assert "usage: klamp [-h]" in capsys.readouterr().out
    assert code(["help", "sweep"]) == 0
    assert "usage: klamp sweep" in capsys.readouterr().out


@pytest.mark.slow
def test_where_ascii_alone_can_be_printed_the_table_is_printed() -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-m", "klamp", "audit", "--worlds", "1"], capture_output=True, env=env)
    assert done.returncode == 0, done.stderr
    assert b"in_loss" in done.stdout


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    words = f"{shlex.quote(sys.executable)} -m klamp audit --worlds 1 | head -n 1 > /dev/null; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("0\n", "")
