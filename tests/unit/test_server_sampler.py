"""A run through a server: a stub that serves the real model with its real adapters, and one that misbehaves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from klamp.errors import ConfigError, SamplerError, TrainingError
from klamp.sampling import vllm_server
from klamp.sampling.vllm_server import Request, Server, _check, _completions
from klamp.train.config import CorrectionConfig
from server_stub import Stub, late, serving

pytestmark = pytest.mark.slow


@pytest.fixture
def stub(words_model: str) -> Stub:
    from transformers import AutoModelForCausalLM

    return Stub(words_model, AutoModelForCausalLM.from_pretrained(words_model, dtype=torch.float32))


@pytest.fixture
def url(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(vllm_server, "FIRST_WAIT", 0.01)
    with serving(stub) as address:
        yield address


@pytest.fixture
def run(trainer: Callable[..., Any], url: str) -> Callable[..., Any]:
    """``run(steps=3, ahead=1, ...)``: a trainer through the server; the metrics of its steps come from the folder."""

    def make(steps: int = 3, **rollout: Any) -> Any:
        extra = rollout.pop("more", {})
        return trainer(steps=steps, rollout={"engine": "vllm", "url": url, "retries": 2, **rollout}, **extra)

    return make


def rows(made: Any, name: str = "metrics") -> list[dict[str, Any]]:
    return [json.loads(line) for line in getattr(made.folder, name).read_text().splitlines()]


def test_every_version_is_sampled_by_itself(run: Callable[..., Any], stub: Stub) -> None:
    """The server's log-probs are the trainer's to rounding at every step, though the weights move by 1e-2 a step."""
    made = run(steps=4)
    made.run()
    for row in rows(made):
        assert row["rollout/gap_max"] < 1e-5
        assert row["rollout/version_lag"] == 0
        assert row["kl/sampler/k3"] < 1e-9
    assert rows(made)[-1]["kl/ref/exact"] > 1e-3, "the policy has moved, so a stale adapter would have shown"
    names = [b["lora_name"] for p, b in stub.asked if p == "/v1/load_lora_adapter"]
    assert len(set(names)) == len(names) == 5
    assert {s["version"] for s in rows(made, "samples")} == {0, 3}
    assert not stub.adapters, "the run takes its adapters off the server when it ends"
    assert not list((Path(made.config.run) / "adapters").iterdir())


def test_two_versions_are_served_and_files_stay_one_longer(run: Callable[..., Any], stub: Stub) -> None:
    made = run(steps=5)
    held: list[tuple[int, int]] = []
    made.watch = lambda step, t: held.append((len(stub.adapters), len(list(t.sampler.adapters.folder.iterdir())))) or {}
    made.run()
    assert held[-1] == (2, 3)


def test_ahead_is_one_update_behind_and_says_so(run: Callable[..., Any]) -> None:
    made = run(steps=4, ahead=1)
    made.run()
    found = rows(made)
    assert [r["rollout/version_lag"] for r in found] == [0, 1, 1, 1]
    assert [r["step"] for r in found] == [1, 2, 3, 4]
    assert found[0]["rollout/gap_max"] < 1e-5
    assert all(r["rollout/gap"] > 1e-3 for r in found[1:])
    assert all("rollout/truncated" in r for r in found)


def test_a_restarted_server_gets_the_adapter_again(run: Callable[..., Any], stub: Stub) -> None:
    made = run(steps=3)

    def forget(step: int, _: Any) -> dict[str, float]:
        stub.adapters.clear()
        return {}

    made.watch = forget
    made.run()
    assert all(r["rollout/gap_max"] < 1e-5 for r in rows(made))
    assert rows(made)[-1]["step"] == 3


def test_a_prompt_that_fails_is_left_out_and_counted(run: Callable[..., Any], stub: Stub) -> None:
    seen: list[int] = []

    def fault(path: str, body: dict[str, Any], found: Any) -> Any:
        if path == "/v1/completions" and "n" in body and body["n"] > 1:
            seen.append(1)
            return 400 if len(seen) == 1 else found
        return found

    stub.fault = fault
    made = run(steps=2, on_failure="skip")
    made.run()
    assert [r["rollout/failed"] for r in rows(made)] == [1.0, 0.0]
    assert rows(made)[0]["train/tokens"] < rows(made)[1]["train/tokens"] + 24


def test_a_prompt_that_fails_stops_the_run_unless_told_otherwise(run: Callable[..., Any], stub: Stub) -> None:
    def fault(path: str, body: dict[str, Any], found: Any) -> Any:
        return 400 if body.get("n", 0) > 1 else found

    stub.fault = fault
    with pytest.raises(SamplerError, match="400"):
        run().run()


def test_what_may_pass_is_tried_again(run: Callable[..., Any], stub: Stub) -> None:
    """Every request is refused the first time it is made."""
    seen: set[str] = set()

    def fault(path: str, body: dict[str, Any], found: Any) -> Any:
        asked = f"{path} {json.dumps(body)}"
        if asked in seen:
            return found
        seen.add(asked)
        return 503

    stub.fault = fault
    made = run(steps=2)
    made.run()
    assert rows(made)[-1]["step"] == 2


LIES = [
    (lambda c: {**c, "token_ids": c["token_ids"][:-1]}, "log-probs for"),
    (lambda c: {**c, "logprobs": {"token_logprobs": [math.nan] * len(c["token_ids"])}}, "as a log-prob"),
    (lambda c: {**c, "logprobs": {"token_logprobs": [0.7] * len(c["token_ids"])}}, "as a log-prob"),
    (lambda c: {k: v for k, v in c.items() if k != "token_ids"}, "no token ids"),
    (lambda c: {**c, "token_ids": [3] * 99, "logprobs": {"token_logprobs": [-1.0] * 99}}, "99 tokens"),
    (lambda c: {**c, "token_ids": [1, 1], "logprobs": {"token_logprobs": [-1.0, -1.0]}}, "after the end token"),
    (lambda c: {**c, "token_ids": [], "logprobs": {"token_logprobs": []}}, "0 tokens"),
]


@pytest.mark.parametrize(("lie", "says"), LIES)
def test_a_lying_server_is_told_so(lie: Callable[[Any], Any], says: str) -> None:
    request = Request(n=1, max_tokens=6, end=(1,))
    honest = {"token_ids": [3, 4], "logprobs": {"token_logprobs": [-1.0, -2.0]}, "finish_reason": "length"}
    assert _completions({"choices": [honest]}, request)[0].tokens == [3, 4]
    with pytest.raises(SamplerError, match=says):
        _completions({"choices": [lie(honest)]}, request)
    with pytest.raises(SamplerError, match="2 completions"):
        _completions({"choices": [honest, honest]}, request)
    _check(_completions({"choices": [honest]}, request)[0], request)


def test_a_slow_server_is_given_up(stub: Stub, url: str) -> None:
    stub.fault = late(0.5)
    server = Server(url, timeout=0.05, retries=1)
    (found,) = server.complete(stub.base, [[3, 4]], Request(n=1, max_tokens=2), [0])
    assert isinstance(found, SamplerError)
    assert "2 attempts" in str(found)
    assert "rollout.timeout" in str(found)
    server.close()


def test_a_server_that_is_not_there(trainer: Callable[..., Any]) -> None:
    made = trainer(rollout={"engine": "vllm", "url": "http://127.0.0.1:9", "retries": 0})
    with pytest.raises(SamplerError, match=r"127\.0\.0\.1:9 gave no answer"):
        made.run()


def test_log_probs_of_the_model_instead_of_the_draw(run: Callable[..., Any], stub: Stub) -> None:
    stub.raw_logprobs = True
    with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
        run().run()


def test_other_weights_and_other_names(run: Callable[..., Any], stub: Stub) -> None:
    with torch.no_grad():
        next(stub.model.parameters()).add_(1.0)
        stub.model.lm_head.weight.mul_(-1.0)
    with pytest.raises(ConfigError, match="other weights than the run's base"):
        run().run()
    stub.base = "something-else"
    with pytest.raises(ConfigError, match=r"does not serve .* but something-else"):
        run().run()


@pytest.mark.parametrize(
    ("said", "way"),
    [
        ("400 LoRA rank 16 is greater than max_lora_rank 8", "--max-lora-rank"),
        ("404 Not Found", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ("400 No adapter found for /x", "rollout.adapters"),
    ],
)
def test_a_refused_adapter_names_the_way_out(said: str, way: str) -> None:
    assert way in vllm_server._advice(said, Path("/x"))


def test_a_run_whose_sampler_has_left_it_stops(run: Callable[..., Any]) -> None:
    made = run(steps=4, ahead=1, max_gap=1e-3)
    with pytest.raises(TrainingError, match=r"rollout\.max_gap"):
        made.run()
    assert rows(made)[-1]["step"] == 2, "what was measured is written before it stops"


def test_stopped_while_it_waits_for_the_server_it_saves_what_is_done(run: Callable[..., Any], stub: Stub) -> None:
    made = run(steps=3)

    def hang(step: int, t: Any) -> dict[str, float]:
        if step == 2:
            stub.fault = late(5.0)
            t.stop.asked = 2
            t.stop.agree = lambda _: None
        return {}

    made.watch = hang
    with pytest.raises(SystemExit):
        made.run()
    assert (Path(made.config.run) / "checkpoints" / "step-000002").is_dir()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"full": True, "rollout": {"engine": "vllm", "url": "http://127.0.0.1:1"}}, "adapters over HTTP"),
        ({"rollout": {"engine": "vllm"}}, "rollout.url is missing"),
        ({"rollout": {"url": "http://127.0.0.1:1"}}, r"rollout\.engine=vllm"),
        ({"rollout": {"ahead": 1}}, "rollout.ahead"),
    ],
)
def test_settings_that_do_not_go_together(config: Callable[..., Any], settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(**settings)


def test_a_divergence_needs_its_limit() -> None:
    with pytest.raises(ConfigError, match="limit is missing"):
        CorrectionConfig(kind="mask_tv")


def test_measure_samples_through_a_server(stub: Stub, url: str, words_model: str, words_prompts: str) -> None:
    """The server draws and klamp scores: the sampler's gap is rounding, and KL to itself is nothing."""
    from klamp import measure_kl

    lines = Path(words_prompts).read_text().splitlines()
    how = {"max_tokens": 4, "samples": 2, "device": "cpu", "batch": 4, "chat": False}
    found = measure_kl(words_model, words_model, lines, url=url, **how)
    assert found.sequences == 2 * len(lines)
    assert found.kl.mean == pytest.approx(0, abs=1e-6)
    assert found.sampler_gap is not None
    assert abs(found.sampler_gap.mean) < 1e-5
    assert sum(p == "/v1/completions" for p, _ in stub.asked) >= len(lines)
    with pytest.raises(ConfigError, match="does not serve 'other'"):
        measure_kl(words_model, words_model, lines, url=url, served="other", **how)


def test_local_backend_samples_through_a_server(stub: Stub, url: str, words_model: str, tmp_path: Path) -> None:
    """Before and after a training step the server's log-probs are the policy's, so nothing it drew counts as stale."""
    import asyncio

    from klamp.local_backend import LocalBackend, TrainableModel, Trajectory, TrajectoryGroup

    model = TrainableModel("m", "p", words_model, lora_rank=4)

    async def work() -> list[dict[str, float]]:
        found = []
        async with LocalBackend(tmp_path / "local", device="cpu", url=url) as backend:
            for _ in range(2):
                asked = [{"role": "user", "content": "w1 w2"}]
                choices = await backend.sample(model, asked, n=4, max_tokens=4)
                group = TrajectoryGroup([Trajectory([*asked, c], reward=float(i % 2)) for i, c in enumerate(choices)])
                found.append((await backend.train(model, [group], learning_rate=1e-2)).metrics)
        return found

    for metrics in asyncio.run(work()):
        assert metrics["rollout/gap_max"] < 1e-5
        assert metrics["data/stale"] == 0
    names = [b["lora_name"] for p, b in stub.asked if p == "/v1/load_lora_adapter"]
    assert len(names) == len(set(names)) == 2
