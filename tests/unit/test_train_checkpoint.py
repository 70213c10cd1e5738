"""Checkpoints: whole or not there, readable by plain transformers and peft, and never of another reference."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from klamp.distributed import digest
from klamp.errors import CheckpointError, ConfigError, ReferencePolicyError
from klamp.models import load_model
from klamp.references.spec import folder_of, saved_steps
from klamp.train import checkpoint
from klamp.train.run_folder import damage

pytestmark = pytest.mark.usefixtures("one_thread")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([[5, 9, 17, 3, 22]])).logits


def test_the_digest_of_weights_sees_every_bit(words_model: str) -> None:
    weight = torch.randn(2, 3)
    before = digest({"w": weight})
    assert digest({"w": weight.clone()}) == before
    nudged = weight.clone()
    nudged[1, 2] = torch.nextafter(nudged[1, 2], torch.tensor(torch.inf))
    others = [{"v": weight}, {"w": nudged}, {"w": weight.reshape(3, 2)}, {"w": weight.view(torch.int32)}]
    scalars = [{"w": torch.tensor(x)} for x in (0.0, -0.0)]
    found = {before, *map(digest, others + scalars), digest({"w": torch.zeros(0)})}
    assert len(found) == 8
    one, two = (dict(load_model(words_model).named_parameters()) for _ in range(2))
    assert digest(one) == digest(two)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_plain_transformers_and_peft_load_it(trainer: Any, words_model: str, full: bool, name: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = trainer(full=full, algorithm={"name": name})
    made.run()
    folder = folder_of(made.folder.path, 3)
    if full:
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        base = AutoModelForCausalLM.from_pretrained(words_model, dtype=torch.float32)
        loaded = PeftModel.from_pretrained(base, folder)
    assert torch.equal(logits(loaded.eval()), logits(made.learner.policy.model))
    assert not torch.equal(logits(loaded), logits(load_model(words_model)))
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == made.tokenizer.get_vocab()
    # The file sampled from, too: merged weights differ from adapter and base by rounding only.
    torch.testing.assert_close(logits(made.sampler.model), logits(loaded), rtol=1e-4, atol=1e-4)
    if not full:  # peft keeps them in a set: unsorted, another process would write the same adapter in other bytes
        named = json.loads((folder / "adapter_config.json").read_text())["target_modules"]
        assert named == sorted(named)
    kinds = {p.suffix for p in folder.rglob("*") if p.is_file()}
    assert kinds <= {".safetensors", ".json", ".md"}, "no pickle, nothing unknown"


def test_a_half_written_folder_is_ignored_and_swept(trainer: Any) -> None:
    made = trainer(steps=2, save_every=1)
    torn = made.folder.path / "checkpoints" / ".step-000001.12345"
    with made.folder.lock():  # the run folder must be its own before something can be torn in it
        made.folder.write_config(made.config)
    torn.mkdir(parents=True)
    (torn / "adapter_model.safetensors").write_bytes(b"half")
    assert saved_steps(made.folder.path) == []
    assert checkpoint.newest(made.folder.path) is None
    made.run()
    assert not torn.exists()
    assert saved_steps(made.folder.path) == [1, 2]


@pytest.fixture
def finished(trainer: Callable[..., Any]) -> Any:
    made = trainer(steps=4, save_every=1, keep=0)
    made.run()
    return made


def test_every_damaged_file_is_found_and_named(finished: Any, trainer: Any) -> None:
    folder = folder_of(finished.folder.path, 4)
    assert damage(folder) is None
    for file in sorted(p for p in folder.iterdir() if p.name != "manifest.json"):
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert damage(folder) == f"{file.name} does not match its hash"
        file.unlink()
        assert damage(folder) == f"{file.name} is missing"
        file.write_bytes(whole)
    (folder / "manifest.json").write_text("{")
    assert damage(folder) == "manifest.json cannot be read"
    with pytest.raises(CheckpointError, match=r"step-000004.*is damaged: manifest\.json cannot be read.*skip-damaged"):
        trainer(steps=6, save_every=1, keep=0, resume=True).run()


def test_a_damaged_checkpoint_is_passed_over_and_written_again(finished: Any, trainer: Any) -> None:
    folder = folder_of(finished.folder.path, 4)
    before = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "optimizer.safetensors").write_bytes(b"")
    trainer(steps=4, save_every=1, keep=2, resume=True, skip_damaged=True).run()
    assert damage(folder) is None
    assert (folder / "adapter_model.safetensors").read_bytes() == before, "step 4 again, from step 3, to the bit"
    assert saved_steps(finished.folder.path) == [3, 4]


def test_a_checkpoint_after_the_step_resumed_from_is_not_taken_for_the_newest(finished: Any, trainer: Any) -> None:
    (folder_of(finished.folder.path, 4) / "optimizer.safetensors").write_bytes(b"")
    (folder_of(finished.folder.path, 3) / "optimizer.safetensors").write_bytes(b"")
    trainer(steps=3, save_every=1, keep=1, resume=True, skip_damaged=True).run()
    assert damage(folder_of(finished.folder.path, 3)) is None, "retention kept the step just saved"


def test_resume_says_where_it_goes_on(finished: Any, config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from klamp.train.loop import Trainer

    made = Trainer(
        config(steps=5, save_every=1, keep=0, resume=True),
        rewards=[lambda prompts, completions: [1.0] * 8],
        quiet=False,
    )
    made.run()
    said = capsys.readouterr().err
    assert f"resuming after step 4 from {folder_of(finished.folder.path, 4)}" in said
    assert "step 5/5" in said


def test_another_reference_under_the_same_name_is_refused(trainer: Any, words_model: str, tmp_path: Path) -> None:
    """The reference's folder was written over between a run and its resumption."""
    folder = tmp_path / "anchor"
    shutil.copytree(words_model, folder)
    trainer(steps=2, save_every=1, kl={"reference": f"model:{folder}"}).run()
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.001
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ReferencePolicyError, match="the reference changed since"):
        trainer(steps=3, save_every=1, resume=True, kl={"reference": f"model:{folder}"}).run()


def test_another_base_under_the_same_name_is_refused(trainer: Any, words_model: str, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    shutil.copytree(words_model, folder)
    trainer(model=str(folder), steps=2, save_every=1).run()
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.001
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ReferencePolicyError, match="the reference changed since"):
        trainer(model=str(folder), steps=3, save_every=1, resume=True).run()


def test_retention_keeps_what_was_asked(trainer: Any) -> None:
    made = trainer(steps=5, save_every=1, keep=2)
    made.run()
    assert saved_steps(made.folder.path) == [4, 5]


def test_a_step_as_reference_is_never_deleted(trainer: Any) -> None:
    trainer(steps=2, save_every=1, keep=0).run()
    made = trainer(steps=5, save_every=1, keep=1, resume=True, kl={"reference": "step:1"})
    made.run()
    assert saved_steps(made.folder.path) == [1, 5]


def test_a_format_of_another_klamp_is_refused(finished: Any, trainer: Any) -> None:
    folder = folder_of(finished.folder.path, 4)
    state = json.loads((folder / "trainer.json").read_text())
    (folder / "trainer.json").write_text(json.dumps(state | {"format": "klamp-checkpoint/99"}))
    (folder / "manifest.json").unlink()
    checkpoint.seal(folder)
    with pytest.raises(CheckpointError, match="klamp-checkpoint/99"):
        trainer(steps=6, save_every=1, keep=0, resume=True).run()


def test_no_room_for_a_checkpoint_is_said_before_anything_is_written(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer()
    full = shutil._ntuple_diskusage(10**9, 10**9 - 10**6, 10**6)  # type: ignore[attr-defined]
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: full)
    with pytest.raises(ConfigError, match=r"1 MiB free, and two checkpoints need \d+ MiB"):
        made.run()
    assert not made.folder.path.exists()


def test_the_base_is_untouched_to_the_bit(trainer: Any, words_model: str) -> None:
    """Ten steps of sampling from merged weights, clamping and adapters off and on leave every base weight alone."""
    made = trainer(steps=10, save_every=10, optim={"lr": 0.1}, kl={"target": 0.02, "per": "token"})
    made.run()
    plain = dict(load_model(words_model).named_parameters())
    own = {
        n.removeprefix("base_model.model.").replace(".base_layer.", "."): p
        for n, p in made.learner.policy.model.named_parameters()
        if "lora_" not in n
    }
    assert own.keys() == plain.keys()
    assert all(torch.equal(own[n], plain[n]) for n in plain)
