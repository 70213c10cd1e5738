"""Models whose layers keep less than everything, runs by their steps, another server behind, and the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from endpoint_tools import connect, plain_logp

from klamp import models
from klamp.serve.app import Server, make_app
from klamp.serve.continuous_batch import Batch
from klamp.serve.engine import Limits

pytestmark = pytest.mark.slow

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def made(kind: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    extra: dict[str, Any] = {"sliding_window": 8} if kind in ("mistral", "gemma2", "gemma3_text") else {}
    if kind.startswith("gemma"):
        extra |= {"head_dim": 8, "query_pre_attn_scalar": 8}
    if kind == "qwen3_5_text":
        extra |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
        extra |= {"linear_value_head_dim": 8, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
    sizes = {k: v for k, v in SIZES.items() if kind != "gpt_neox" or k != "num_key_value_heads"}
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**sizes, **extra)).eval()


class Kept:
    """A row that keeps what it is given, for a while."""

    def __init__(self, prompt: list[int], most: int) -> None:
        self.prompt, self.most = prompt, most
        self.temperature, self.top_p, self.top_logprobs = 1.0, 1.0, 0
        self.ids: list[int] = []
        self.logp: list[float] = []
        self.generator = torch.Generator().manual_seed(sum(prompt))

    def uniform(self) -> float:
        return float(torch.rand((), generator=self.generator))

    def take(self, token: int, logp: float, top: Any) -> bool:
        self.ids.append(token)
        self.logp.append(logp)
        return len(self.ids) < self.most


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gemma3_text", "qwen3_5_text", "gpt_neox"])
def test_log_probs_are_those_of_each_sequence_alone(kind: str) -> None:
    """Ragged rows that end at different times and pass the window; a second lot joins where the cache allows it."""
    model = made(kind)
    rows = [Kept([3 + (5 * i + j) % 60 for j in range(1 + 3 * i)], most=4 + 5 * (i % 3)) for i in range(5)]
    batch, later = Batch(model, rows[:3], 0), None
    for step in range(30):
        if step == 2:
            later = Batch(model, rows[3:], 0)
            if batch.joins:
                batch.join(later)
                later = None
        for one in (batch, later):
            if one is not None and one.rows:
                one.step()
    assert batch.joins == (kind in ("llama", "gpt_neox"))
    for row in rows:
        assert len(row.ids) == row.most
        expected = plain_logp(model, row.prompt, row.ids)
        # Qwen3.5 computes a prompt in chunks and a step by recurrence: two formulas, which agree to 3e-5.
        bound = 5e-5 if kind == "qwen3_5_text" else 1e-5
        torch.testing.assert_close(torch.tensor(row.logp), expected, atol=bound, rtol=0)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with two saved steps of a LoRA adapter."""
    from peft import LoraConfig, get_peft_model

    root = tmp_path_factory.mktemp("runs") / "mine"
    for step in (10, 20):
        torch.manual_seed(step)
        model = get_peft_model(models.load_model("tiny"), LoraConfig(r=4, init_lora_weights=False))
        model.save_pretrained(root / "checkpoints" / f"step-{step:06d}")
    return root


def test_a_run_is_served_by_its_steps(serve: Any, run_folder: Path) -> None:
    from peft import PeftModel

    url, _ = serve(run_folder)
    with connect(url) as client:
        assert [m.id for m in client.models.list()] == ["mine", "mine@10", "mine@20"]
        for name, step in (("mine", 20), ("mine@10", 10), ("mine@20", 20)):
            answer = client.completions.create(
                model=name, prompt="The room", max_tokens=6, logprobs=0, extra_body={"return_token_ids": True}
            ).choices[0]
            folder = run_folder / "checkpoints" / f"step-{step:06d}"
            plain = PeftModel.from_pretrained(models.load_model("tiny"), str(folder)).eval()
            expected = plain_logp(plain, answer.prompt_token_ids, answer.token_ids)  # type: ignore[attr-defined]
            assert answer.logprobs.token_logprobs == pytest.approx(expected.tolist(), abs=3e-5)  # type: ignore[union-attr]
            assert answer.step == step  # type: ignore[attr-defined]


def test_requests_go_on_to_another_server(tiny: Any, client: openai.OpenAI) -> None:
    server = Server(make_app(lambda _: None, list, limits=Limits(), forward=tiny[0]), "127.0.0.1", 0)
    nowhere = Server(make_app(lambda _: None, list, limits=Limits(), forward="http://127.0.0.1:9/v1"), "127.0.0.1", 0)
    wish: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "The waiter"}], "seed": 4}
    try:
        with connect(server.url) as through, connect(nowhere.url) as lost:
            assert [m.id for m in through.models.list()] == ["tiny"]
            direct = client.chat.completions.create(**wish, max_tokens=8).choices[0].message.content
            assert through.chat.completions.create(**wish, max_tokens=8).choices[0].message.content == direct
            stream = through.chat.completions.create(**wish, max_tokens=8, stream=True)
            assert "".join(c.choices[0].delta.content or "" for c in stream) == direct
            with pytest.raises(openai.BadRequestError, match="between 0 and 2"):
                through.chat.completions.create(**wish, temperature=9)
            with pytest.raises(openai.InternalServerError, match="does not answer"):
                lost.models.list()
    finally:
        server.close()
        nowhere.close()


def test_keys_of_this_endpoint_and_of_the_server_behind_it(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    behind, _ = serve("tiny", key="theirs")

    def through(key: str | None) -> Server:
        return Server(make_app(lambda _: None, list, limits=Limits(), key=key, forward=behind), "127.0.0.1", 0)

    plain, own = through(None), through("ours")
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    knows = through("ours")
    try:
        with connect(plain.url, "theirs") as client:
            assert client.models.list().data, "without a key of its own it passes the client's on"
        with connect(own.url, "ours") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()  # its own key stays here, and it knows no other
        with connect(knows.url, "ours") as client:
            assert client.models.list().data
        with connect(knows.url, "theirs") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
    finally:
        for server in (plain, own, knows):
            server.close()


@pytest.mark.slow
def test_the_command_serves_until_it_is_told_to_stop() -> None:
    command = [sys.executable, "-m", "klamp", "serve", "tiny", "--port", "0", "--name", "small"]
    env = {**os.environ, "KLAMP_API_KEY": "secret"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            assert line.startswith("small at http://127.0.0.1:"), line
            assert "with a key" in line
            with connect(line.split()[2].rstrip(","), "secret") as client:
                assert client.completions.create(model="small", prompt="A", max_tokens=2).choices[0].text
        finally:
            process.send_signal(signal.SIGTERM)
    assert process.returncode == 0
