"""``klamp measure``: figures against plain full-logit arithmetic, resume, several processes, refusals, inert text."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from klamp import models
from klamp.errors import ConfigError
from klamp.measure import Measurement, measure_kl
from klamp.measure.page import headline, page, show
from klamp.measure.run import Store
from klamp.measure.summary import Ratio, total
from klamp.results.statistics import student

PROMPTS = ["The coffee", "The movie", "My new phone", "The hotel", "This book", "The park"]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter of tiny that is away from its base."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(
        models.load_model("tiny"), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.05)
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def measured(adapter: Path) -> Measurement:
    return measure_kl(str(adapter), "tiny", PROMPTS, max_tokens=10, batch=4, samples=2)


def plain_kl(adapter: Path, prompts: list[str], completions: list[str]) -> tuple[float, float, int]:
    """Σ KL(P‖R), Σ KL(R‖P) and the token count, from whole logits in float64, one sequence at a time."""
    from peft import PeftModel

    base = models.load_model("tiny").double()
    tuned = PeftModel.from_pretrained(models.load_model("tiny").double(), str(adapter)).double().eval()
    tokenizer = models.load_tokenizer("tiny")
    there, back, count = 0.0, 0.0, 0
    for prompt, completion in zip(models.encode_prompts(tokenizer, prompts), completions, strict=True):
        answer = [*tokenizer.encode(completion, add_special_tokens=False), tokenizer.eos_token_id]
        ids = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            p = tuned(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            q = base(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        there += float((p.exp() * (p - q)).sum())
        back += float((q.exp() * (q - p)).sum())
        count += len(answer)
    return there, back, count


def test_exact_kl_both_ways_against_whole_logits(adapter: Path) -> None:
    completions = ["is great and I love it.", "was bad.", "works", "smells of paint.", "is long!", "closes at noon."]
    there, back, count = plain_kl(adapter, PROMPTS, completions)
    found = measure_kl(str(adapter), "tiny", PROMPTS, completions=completions, batch=4, maps=False)
    # float32 states against float64 ones: about 1e-6 relative in a logit, a little more in a KL of 0.1.
    assert found.kl.mean == pytest.approx(there / count, rel=1e-4)
    assert found.forward_kl.mean == pytest.approx(back / count, rel=1e-4)
    assert found.kl_per_sequence.mean == pytest.approx(there / len(PROMPTS), rel=1e-4)
    assert found.tokens == count
    assert found.sampler_gap is None


def test_the_two_directions_change_places_with_the_models(adapter: Path) -> None:
    completions = ["is great."] * len(PROMPTS)
    ours = measure_kl(str(adapter), "tiny", PROMPTS, completions=completions, maps=False)
    theirs = measure_kl("tiny", str(adapter), PROMPTS, completions=completions, maps=False)
    assert ours.kl.mean == pytest.approx(theirs.forward_kl.mean, rel=1e-5)  # the same float32 sums in another order
    assert ours.entropy.mean == pytest.approx(theirs.reference_entropy.mean, rel=1e-5)


def test_figures_of_a_sampled_measurement(measured: Measurement) -> None:
    assert measured.kl.low < measured.kl.mean < measured.kl.high
    assert measured.kl.mean > 100 * measured.noise_floor.mean
    assert not measured.below_floor
    assert measured.sequences == 2 * len(PROMPTS)
    assert measured.sampler_gap is not None
    assert abs(measured.sampler_gap.mean) < 1e-5  # merged and unmerged weights, float32
    assert len(measured.by_position) <= 10
    assert measured.top_tokens[0]["kl"] >= measured.top_tokens[-1]["kl"]
    assert [p["kl"] for p in measured.top_prompts] == sorted((p["kl"] for p in measured.top_prompts), reverse=True)
    shown = measured.maps[0]["tokens"]
    assert sum(t["kl"] for t in shown) > 0
    assert len(shown[0]["policy"]) == len(shown[0]["reference"]) == 4


def test_the_headline_has_at_most_fifteen_words_whatever_the_models_are_called(measured: Measurement) -> None:
    assert headline(measured) == f"The policy is {measured.kl.mean:.3g} nats per token from its reference."
    named = replace(measured, settings=replace(measured.settings, policy="a name of " + "many words " * 9))
    found = re.search(r"<h1>(.*?)</h1>", page(named))
    assert found is not None
    assert len(found[1].split()) <= 15


def test_the_page_has_the_style_of_the_others(measured: Measurement) -> None:
    from klamp.report.html import asset

    made = page(measured)
    assert asset("style.css") in made
    assert '<header class="top"><div class="bar"><span class="brand">klamp</span>' in made.replace("\n", "")
    assert made.index('id="samples"') < made.index('id="figures"')  # the tokens stand near the top


def test_a_model_against_itself_is_below_the_floor() -> None:
    same = measure_kl("tiny", "tiny", PROMPTS, max_tokens=8, maps=False)
    assert same.kl.mean == 0.0
    assert same.below_floor


def test_two_adapters_share_a_base(adapter: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    other = tmp_path / "half"
    other.mkdir()
    (other / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    weights = load_file(adapter / "adapter_model.safetensors")
    save_file({k: v / 2 if "lora_B" in k else v for k, v in weights.items()}, other / "adapter_model.safetensors")
    completions = ["is great."] * len(PROMPTS)
    near = measure_kl(str(adapter), str(other), PROMPTS, completions=completions, maps=False).kl.mean
    far = measure_kl(str(adapter), "tiny", PROMPTS, completions=completions, maps=False).kl.mean
    assert 0.1 * far < near < 0.5 * far  # KL is nearly quadratic: half the way is about a quarter


def test_an_interrupted_measurement_goes_on(adapter: Path, measured: Measurement, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    settings = {"max_tokens": 10, "batch": 4, "samples": 2, "out": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        measure_kl(str(adapter), "tiny", PROMPTS, progress=stop, **settings)  # type: ignore[arg-type]
    with (tmp_path / "parts-0.jsonl").open("ab") as handle:
        handle.write(b'{"block": 4, "rec')
    again = measure_kl(str(adapter), "tiny", PROMPTS, **settings)  # type: ignore[arg-type]
    assert again == measured
    with pytest.raises(ConfigError, match="max_tokens differ"):
        measure_kl(str(adapter), "tiny", PROMPTS, max_tokens=9, batch=4, samples=2, out=tmp_path)


@pytest.mark.slow
def test_two_processes_find_what_one_finds(adapter: Path, measured: Measurement, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    flags = ["--policy", str(adapter), "--reference", "tiny", "--prompts", str(tmp_path / "prompts.txt")]
    flags += ["--max-tokens", "10", "--batch", "4", "--samples", "2", "--out", str(out)]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "klamp", "measure", *flags],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    assert [p.wait() for p in started] == [0, 0]
    found = json.loads((out / "measure.json").read_text())
    assert found["kl"]["mean"] == measured.kl.mean
    assert found["top_tokens"] == measured.top_tokens
    assert (out / "measure.html").stat().st_size > 1000


@pytest.fixture
def run_folder(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run as `klamp train` leaves it: its configuration and two checkpoints, the newest away from the base."""
    from klamp.train.config import RolloutConfig, TrainConfig
    from klamp.train.run_folder import RunFolder

    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "kind"
    for step in (20, 100):
        (run / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    shutil.copytree(adapter, run / "checkpoints" / "step-000100", dirs_exist_ok=True)
    (tmp_path / "p.txt").write_text("\n".join(PROMPTS))
    RunFolder(run).write_config(
        TrainConfig(model="tiny", prompts="p.txt", run="runs/kind", rollout=RolloutConfig(max_tokens=10))
    )
    return run


def test_a_run_stands_for_its_newest_checkpoint_and_brings_base_prompts_and_lengths(run_folder: Path) -> None:
    whole = measure_kl("runs/kind", batch=4, samples=2)
    newest = "runs/kind/checkpoints/step-000100"
    assert (whole.settings.policy, whole.settings.reference) == (newest, "tiny")
    plain = measure_kl(str(run_folder / "checkpoints/step-000100"), "tiny", PROMPTS, max_tokens=10, batch=4, samples=2)
    assert whole.kl == plain.kl
    assert measure_kl(newest, batch=4, samples=2).kl == plain.kl  # a checkpoint knows its run
    turned = measure_kl("tiny", "runs/kind", completions=["is great."] * len(PROMPTS))
    assert turned.settings.reference == newest


def test_measure_by_place_and_by_name(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from klamp.cli import main

    assert main(["measure", "runs/kind", "--max-tokens", "4"]) == 0
    out = Path("runs/measure/kind-step-100-from-tiny")
    assert capsys.readouterr().out.rstrip().endswith(str(out / "measure.html"))
    one = json.loads((out / "measure.json").read_text())
    assert main(["measure", "runs/kind", "tiny", "--max-tokens", "4", "--out", "b"]) == 0
    assert main(["measure", "--policy", "runs/kind", "--reference", "tiny", "--max-tokens", "4", "--out", "c"]) == 0
    for name in ("b", "c"):
        assert json.loads(Path(name, "measure.json").read_text())["kl"] == one["kl"]
    assert main(["measure", "tiny", "tiny", "--max-tokens", "4", "--prompts", "p.txt"]) == 0  # beside the other one


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "policy is missing"),
        (["tiny"], "what is 'tiny' to be compared with"),
        (["tiny", "--policy", "tiny", "--reference", "tiny"], "policy was given twice"),
        (["runs/begun"], "has no checkpoint yet"),
        (["runs/moved"], r"was trained on the prompts 'gone.txt', which is not a file here"),
    ],
)
def test_what_a_run_cannot_bring_is_said(
    run_folder: Path, args: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from klamp.cli import main

    text = (run_folder / "config.yaml").read_text()
    for name, prompts, step in (("begun", "p.txt", ""), ("moved", "gone.txt", "step-000001")):
        (Path("runs") / name / "checkpoints" / step).mkdir(parents=True)
        (Path("runs") / name / "config.yaml").write_text(text.replace("p.txt", prompts))
    assert main(["measure", *args]) == 2
    assert re.search(says, capsys.readouterr().err)


def test_other_prompts_of_the_same_number_are_another_measurement(tmp_path: Path) -> None:
    measure_kl("tiny", "tiny", PROMPTS[:2], max_tokens=2, maps=False, out=tmp_path)
    with pytest.raises(ConfigError, match="prompts_hash differ"):
        measure_kl("tiny", "tiny", PROMPTS[2:4], max_tokens=2, maps=False, out=tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompts": []}, "prompts is empty"),
        ({"prompts": ["a", ""]}, "prompt 2"),
        ({"prompts": ["word " * 400]}, "prompt 1 has"),
        ({"completions": ["one"]}, "1 completions for 6 prompts"),
        ({"temperature": 0.0}, "temperature"),
        ({"batch": 0}, "batch"),
        ({"reference": "tinny"}, "Did you mean 'tiny'"),
    ],
)
def test_refusals(change: dict[str, object], says: str) -> None:
    asked = {"policy": "tiny", "reference": "tiny", "prompts": PROMPTS, "max_tokens": 4, **change}
    with pytest.raises(ConfigError, match=says):
        measure_kl(**asked)  # type: ignore[arg-type]


def test_another_tokenizer_is_refused_with_what_differs(tmp_path: Path) -> None:
    folder = tmp_path / "other"
    models.load_model("tiny").save_pretrained(folder)
    tokenizer = models.load_tokenizer("tiny")
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(ConfigError, match="2048 and 2049 tokens"):
        measure_kl("tiny", str(folder), PROMPTS)


def test_an_adapter_of_another_base_is_refused(adapter: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    (tmp_path / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    weights = load_file(adapter / "adapter_model.safetensors")
    save_file(
        {k: v[:, :3].contiguous() if "lora_A" in k else v for k, v in weights.items()},
        tmp_path / "adapter_model.safetensors",
    )
    with pytest.raises(ConfigError, match="not made for this base"):
        measure_kl(str(tmp_path), "tiny", PROMPTS)


def test_a_malformed_prompt_file_is_named_by_line(tmp_path: Path) -> None:
    from klamp.cli import main

    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n{"prompt": 3}\n')
    assert main(["measure", "--policy", "tiny", "--reference", "tiny", "--prompts", str(file)]) == 2


def test_intervals_are_over_prompts() -> None:
    # Against the textbook: with equal weights the ratio is the mean of the prompts' means.
    values = [0.1, 0.4, 0.2, 0.7, 0.35]
    ratio = Ratio()
    for v in values:
        ratio.add(10 * v, 10)
    mean = sum(values) / 5
    se = math.sqrt(sum((v - mean) ** 2 for v in values) / 4 / 5)
    estimate = ratio.estimate()
    assert estimate.mean == pytest.approx(mean, rel=1e-12)
    assert estimate.high - estimate.mean == pytest.approx(student(4) * se, rel=1e-9)
    assert Ratio().estimate().mean == 0.0


@pytest.mark.parametrize(
    ("degrees", "exact"), [(1, 12.7062), (4, 2.776445), (15, 2.131450), (16, 2.119905), (30, 2.042272), (511, 1.964625)]
)
def test_student(degrees: int, exact: float) -> None:
    assert student(degrees) == pytest.approx(exact, rel=3e-4)  # the table has four digits


def test_records_may_come_in_any_order() -> None:
    def record(i: int) -> dict[str, object]:
        sums = {k: float(i + 1) for k in ("kl", "forward_kl", "k1", "k3", "entropy", "ref_entropy")}
        top = [{"kl": float(i), "token": "x", "position": 0, "before": ""}]
        return {"prompt": i, "text": "p", "tokens": 3, "sequences": 1, "by_position": [[1.0, 1]], "top": top, **sums}

    rows = [record(i) for i in range(50)]
    ours, theirs = total(rows), total(reversed(rows))
    assert ours.most_drifted("tokens") == theirs.most_drifted("tokens")
    assert ours.most_drifted("prompts") == theirs.most_drifted("prompts")
    assert ours.per_token["kl"].estimate() == theirs.per_token["kl"].estimate()


HOSTILE = ["<script>alert(1)</script>", "\"' onmouseover=alert(1) x='", "\x00\x1b[31m\u202egnp.exe"]


@pytest.mark.parametrize("text", HOSTILE)
def test_text_is_shown_and_never_run(text: str, measured: Measurement) -> None:
    from dataclasses import replace

    shown = [{"token": text, "kl": 0.5, "policy": [(text, 0.5)], "reference": [(text, 0.1)]}]
    spoiled = replace(
        measured,
        maps=[{"prompt": text, "kl": 0.5, "tokens": shown}],
        top_prompts=[{"prompt": 0, "kl": 0.5, "text": text}],
        top_tokens=[{"kl": 0.5, "token": text, "position": 0, "before": text, "prompt": 0}],
    )
    made = page(spoiled)
    assert "<script" not in made
    assert "onmouseover=alert(1) x='" not in made
    assert not any(c in made for c in "\x00\x1b\u202e")
    assert show(text) in made


def test_a_store_without_a_folder_serves_one_process_only() -> None:
    from klamp.measure.run import Settings

    store = Store(None, Settings("a", "b", 1, 1, 1, 1.0, 1, 0, None, False), 0)
    with pytest.raises(ConfigError, match="--out"):
        list(store.everything(1, 2))
