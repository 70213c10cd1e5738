"""Bad input is refused with a sentence that names it, before weights are loaded or a file is written."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from klamp import models
from klamp.config_io import from_dict, from_yaml, to_yaml
from klamp.errors import ConfigError
from klamp.train.config import AlgorithmConfig, KLConfig, RewardConfig, RolloutConfig, TrainConfig
from klamp.train.loop import Trainer
from small_model import vocabulary, write_model


@pytest.fixture
def refused(config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``refused(match, **settings)``: making the run raises, no weights were loaded, nothing was written."""

    def check(match: str, **settings: Any) -> None:
        def loaded(*_: Any, **__: Any) -> None:
            raise AssertionError("weights were loaded")

        monkeypatch.setattr(models, "load_model", loaded)
        made = config(**settings)
        there = sorted(Path(made.run).rglob("*")) if Path(made.run).exists() else None
        with pytest.raises(ConfigError, match=match):
            Trainer(made, rewards=[lambda prompts, completions: [0.0] * len(completions)], quiet=True).run()
        assert (sorted(Path(made.run).rglob("*")) if Path(made.run).exists() else None) == there

    return check


@pytest.mark.parametrize(
    ("model", "match"),
    [
        ("tinny", r"tinny.*tiny"),
        ("no/such/folder", r"no such folder"),
        ("../nowhere", r"no such folder"),
    ],
)
def test_an_unknown_model(refused: Any, model: str, match: str) -> None:
    refused(match, model=model)
    refused(match, model=model, prompts=None)


def test_another_tokenizer_as_reference(refused: Any, tmp_path: Path) -> None:
    swapped = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{28 - i}": i + 3 for i in range(29)}}
    other = write_model(tmp_path / "other", words=swapped)
    refused(r"another tokenizer.*28 tokens differ", kl={"reference": f"model:{other}"})
    wide = write_model(tmp_path / "wide", words=vocabulary(33))
    refused(r"another tokenizer.*4 tokens differ, 'w29' is 32 there and None here", kl={"reference": f"model:{wide}"})


def test_another_vocabulary_behind_the_same_tokenizer(trainer: Any, words_model: str, tmp_path: Path) -> None:
    """A head with more rows than the tokenizer has tokens; only the weights say so."""
    model = models.load_model(words_model)
    model.resize_token_embeddings(40)
    model.save_pretrained(tmp_path / "padded")
    for file in Path(words_model).glob("tokenizer*"):
        shutil.copy(file, tmp_path / "padded")
    with pytest.raises(ConfigError, match=r"vocabulary of 40 tokens, the policy 32"):
        trainer(kl={"reference": f"model:{tmp_path / 'padded'}"})


def test_a_missing_step_lists_those_there(refused: Any, config: Any) -> None:
    refused(r"step:40 is not saved.*Saved steps: none", kl={"reference": "step:40"})
    made = config()
    for step in (3, 6):
        (Path(made.run) / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    from klamp.train.run_folder import RunFolder

    RunFolder(made.run).write_config(made)
    refused(r"step:40 is not saved.*Saved steps: 3, 6", resume=True, kl={"reference": "step:40"})


def test_a_missing_adapter_lists_those_beside_it(refused: Any, tmp_path: Path) -> None:
    for name in ("calm", "wild"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
        (tmp_path / "adapters" / name / "adapter_config.json").write_text("{}")
    refused(r"no folder.*clam.*calm, wild", kl={"reference": f"adapter:{tmp_path / 'adapters' / 'clam'}"})
    refused(r"no adapter_model\.safetensors; pickled", kl={"reference": f"adapter:{tmp_path / 'adapters' / 'calm'}"})
    refused(r"is an adapter, and full=true", full=True, kl={"reference": f"adapter:{tmp_path / 'adapters' / 'calm'}"})


def test_an_adapter_of_another_base(trainer: Any, words_model: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = models.load_model(words_model)
    get_peft_model(base, LoraConfig(r=2, target_modules="all-linear")).save_pretrained(tmp_path / "a")
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "somebody/else"}))
    with pytest.raises(ConfigError, match="was made for 'somebody/else'"):
        trainer(kl={"reference": f"adapter:{tmp_path / 'a'}"})


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("empty.txt", b"\n\n", "has no prompt in it"),
        ("empty.jsonl", b"", "has no prompt in it"),
        ("bad.jsonl", b'{"prompt": "w1"}\n{"prompt": \n', r"line 2: not JSON"),
        ("list.jsonl", b'{"prompt": "w1"}\n\n[1]\n', r"line 3: must be an object"),
        ("none.jsonl", b'{"text": "w1"}\n', r'line 1: there is no "prompt"\. The keys are "text"'),
        ("latin.txt", b"w1\nw\xe9\n", r"line 2: not UTF-8 at byte 1"),
    ],
)
def test_a_dataset_that_cannot_be_read(refused: Any, tmp_path: Path, name: str, content: bytes, match: str) -> None:
    (tmp_path / name).write_bytes(content)
    refused(match, prompts=str(tmp_path / name))
    refused("is not a file", prompts=str(tmp_path / "nothing.txt"))


def test_a_prompt_longer_than_the_context(refused: Any, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("w1\n" + "w2 " * 27 + "\n")
    refused(
        r"prompt 2 has 27 tokens; the model's context of 32 less rollout\.max_tokens=6", prompts=str(tmp_path / "p.txt")
    )


def test_a_folder_of_another_configuration(refused: Any, trainer: Any) -> None:
    trainer(steps=1).run()
    refused(r"^rollout\.max_tokens is 6 in run .* cannot become 7 when it is", resume=True, rollout={"max_tokens": 7})
    refused(r"^kl\.reference is 'base' in run .* cannot become 'ema:0.9'", resume=True, kl={"reference": "ema:0.9"})
    refused(r"exists and has 1 steps\. Add --resume", steps=1)
    refused(r"exists and has 1 steps\. Add --resume", optim={"lr": 0.5})


def test_a_folder_that_is_no_run(refused: Any, config: Any) -> None:
    folder = Path(config().run)
    folder.mkdir()
    (folder / "thesis.tex").write_text("precious")
    refused("is not empty and is no run of klamp")


def test_a_run_in_use_by_another_process(refused: Any, config: Any) -> None:
    from klamp.train.run_folder import RunFolder

    made = config()
    folder = RunFolder(made.run)
    with folder.lock():  # flock is held by an open file, so a second one of this process is another's as well
        folder.write_config(made)
        refused("is in use by another process", resume=True)
    folder.claim(replace(made, resume=True))  # free again


def test_what_the_configuration_alone_can_tell() -> None:
    for make, match in (
        (lambda: RolloutConfig(group_size=0), "group_size"),
        (lambda: TrainConfig(rollout=RolloutConfig(group_size=1)), "GRPO compares completions"),
        (lambda: TrainConfig(algorithm=AlgorithmConfig(minibatches=1000)).resolved(), "minibatches 1000 is more than"),
        (lambda: TrainConfig(seed=2**70), "64 bits"),
        (lambda: RewardConfig(functions=("vader",), weights=(1.0, 2.0)), "2 entries for 1 functions"),
        (lambda: KLConfig(estimator="k1", placement="in_loss"), "its expected gradient is zero"),
        (lambda: KLConfig(estimator="exact_forward", placement="in_loss", allow_biased=True), "cannot price it"),
        (lambda: KLConfig(target=None), "kl.target is None, and kl.controller=.hold. needs one"),
        (lambda: KLConfig(reference="step:many"), "needs a number"),
        (lambda: KLConfig(reference="base:5"), "base takes nothing after it"),
        (lambda: KLConfig(reference="lag:0"), r"kl\.reference .lag:0.: StepLag.lag must be >= 1"),
        (lambda: KLConfig(clamp_share=0.0), "clamp_share"),
        (lambda: KLConfig(target=-1.0, per="token"), r"kl\.target must be > 0.*kl\.controller=fixed"),
        (lambda: KLConfig(beta=-1.0), r"kl\.beta must be > 0"),
        (lambda: KLConfig(beta=1e13), r"kl\.beta must lie in \[1e-12, 1e\+12\]"),
        (lambda: KLConfig(controller="fixed", beta=-1.0), r"kl\.beta must be >= 0.*0 only measures"),
        (lambda: KLConfig(controller="ziegler", horizon=0), r"kl\.horizon must be > 0"),
        (lambda: KLConfig(controller="exponential", gain=0), r"kl\.gain must be > 0"),
    ):
        with pytest.raises(ConfigError, match=match):
            make()


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"target": 0.1}, r"kl\.target 0\.1 has no unit.*kl\.per=token"),
        ({"target": 0.05}, r"kl\.target 0\.05 has no unit"),
        ({"limit": 0.1}, r"kl\.limit 0\.1 has no unit"),
        ({"target": 0.1, "per": None}, r"kl\.target 0\.1 has no unit"),
        ({"per": "sequence"}, r"kl\.per=sequence needs a kl\.target in nats per sequence"),
        ({"target": "usual"}, r"kl\.target.*'usual'.*a number, auto"),
        ({"target": 0.1, "per": "tokens"}, "Did you mean 'token'"),
    ],
)
def test_a_kl_of_ones_own_has_a_unit_of_ones_own(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        KLConfig(**fields)
    with pytest.raises(ConfigError, match=match):
        from_dict(TrainConfig, {"kl": fields})
    with pytest.raises(ConfigError, match=match):
        replace(KLConfig(), **fields)


def test_the_default_pair_stands_and_travels(tmp_path: Path) -> None:
    """Neither given: 0.05 per token, through replace, YAML and the folder of an older run alike."""
    assert (KLConfig().goal, KLConfig().unit) == (0.05, "token")
    assert KLConfig(per="token").resolved() == KLConfig().resolved() == replace(KLConfig(), beta=None).resolved()
    assert (KLConfig().resolved().target, KLConfig().resolved().per) == (0.05, "token")
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(TrainConfig()))
    assert from_yaml(TrainConfig, file) == TrainConfig()
    file.write_text(to_yaml(TrainConfig().resolved()))
    assert "target: 0.05\n  per: token\n" in file.read_text()
    assert from_yaml(TrainConfig, file).resolved() == TrainConfig().resolved()
    assert replace(from_yaml(TrainConfig, file).kl, target=0.1).per == "token"  # the file gave the unit


def test_without_a_target_nothing_is_held_and_it_stays_so_in_the_folder(tmp_path: Path) -> None:
    """None is a run without a target, told from one that nobody set, in Python, in YAML and in folders from before."""
    kl = KLConfig(target=None, controller="fixed", beta=0.1)
    assert (kl.goal, kl.unit, kl.clamp_limit) == (None, "token", None)
    left_out = KLConfig(controller="fixed", beta=0.1)
    assert left_out.clamp_limit == pytest.approx(0.055)
    file = tmp_path / "config.yaml"
    for written, goal in ((kl, None), (left_out, 0.05)):
        file.write_text(to_yaml(TrainConfig(kl=written).resolved()))
        assert from_yaml(TrainConfig, file).resolved().kl.goal == goal


COUNTS = ("prompts", "group_size", "max_tokens")


def test_a_run_is_made_of_numbers() -> None:
    """Nothing a run reads is None, a word or a subclass that stands for a number."""
    config = TrainConfig().resolved()
    numbers = (config.steps, config.optim.lr, config.kl.target, *(getattr(config.rollout, n) for n in COUNTS))
    assert [type(n) for n in numbers] == [int, float, float, int, int, int]
    assert config.resolved() == config


@pytest.mark.parametrize(
    ("estimator", "placement", "means"),
    [
        ("full", "loss", ("exact", "in_loss")),
        ("kl", "reward", ("k1", "in_reward")),
        ("mse", "loss", ("k2", "in_loss")),
        ("exact", "sequence_exact", ("exact", "sequence_exact")),
    ],
)
def test_other_systems_names_mean_klamps(estimator: str, placement: str, means: tuple[str, str]) -> None:
    kl = KLConfig(estimator=estimator, placement=placement)
    assert (kl.estimator, kl.placement) == means


def test_top_p_warns_that_ratios_cannot_correct_for_it(trainer: Any) -> None:
    with pytest.warns(UserWarning, match=r"top_p=0\.9.*cannot correct"):
        trainer(rollout={"top_p": 0.9})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer(rollout={"top_p": 1.0})


def test_more_minibatches_than_a_process_has_completions(config: Any) -> None:
    from klamp.train.loop import _check_processes

    made = config(rollout={"prompts": 2, "group_size": 4}, algorithm={"minibatches": 6})
    _check_processes(made, 1)
    with pytest.raises(ConfigError, match="more than the 4 completions a process has"):
        _check_processes(made, 2)
    with pytest.raises(ConfigError, match="does not divide over 3 processes"):
        _check_processes(made, 3)


def test_a_step_whose_gradient_is_not_finite(trainer: Any) -> None:
    """Skipped and counted, or an error: the weights stay as they were either way."""
    from klamp.errors import TrainingError
    from klamp.train.rewards import Scored

    for choice in ("skip", "stop"):
        made = trainer(optim={"on_nonfinite": choice}, run=str(Path(trainer().config.run).with_name(choice)))
        rollout = made.sample(1)
        wild = Scored(torch.tensor([torch.inf] + [0.0] * 7), torch.ones(8, dtype=torch.bool), {})
        before = [p.detach().clone() for p in made.learner.policy.trainable().values()]
        if choice == "stop":
            with pytest.raises(TrainingError, match=r"the gradient of step 1 is (nan|inf)"):
                made.learner.step(1, rollout, wild)
        else:
            assert made.learner.step(1, rollout, wild).metrics["train/skipped"] == 1.0
        after = made.learner.policy.trainable().values()
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
