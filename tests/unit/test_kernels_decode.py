"""A decoder layer's step in few kernels, in Triton's interpreter: the layer's own numbers, for each known family.

The interpreter is chosen when Triton is imported, so the cases run in a process of their own: this file as a script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

WINDOW = 4
BOTH = ["sliding_attention", "full_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, one group, one key head": {"num_key_value_heads": 4},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": None},
    "mistral, past its window": {"sliding_window": WINDOW},
    "qwen2, with a window": {"sliding_window": WINDOW, "use_sliding_window": True, "layer_types": BOTH},
    "gemma2": {"sliding_window": WINDOW, "layer_types": BOTH, "attn_logit_softcapping": 2.0},
    "gemma3_text": {
        "sliding_window": WINDOW,
        "layer_types": BOTH,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
    },
    "gpt_oss": {"sliding_window": WINDOW, "layer_types": BOTH, "num_local_experts": 4, "num_experts_per_tok": 2},
}
TOKENS = 3


def model_of(name: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 40, "initializer_range": 0.3}
    config = AutoConfig.for_model(name.split(",")[0], **{**sizes, **FAMILIES[name]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


@torch.no_grad()
def gaps(name: str) -> dict[str, float]:
    """The largest differences between logits of steps in few kernels and by transformers' own layers."""
    from klamp.sampling.caches import StaticSteps
    from klamp.sampling.decoding_layers import KINDS, LayerForward

    model = model_of(name)
    ids = torch.randint(40, (3, 5))
    attention = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]).bool()
    tokens = torch.randint(40, (TOKENS, 3))

    def run(live: torch.Tensor | None) -> torch.Tensor:
        steps = StaticSteps(model, 3, 5 + TOKENS + 4)
        steps.prefill(ids, attention)
        return torch.stack([steps.step(t, live) for t in tokens])

    usual = run(None)
    layers = [m for m in model.modules() if type(m).__name__ in KINDS]
    assert len(layers) == 2
    found = {}
    for packed in (False, True):
        merged = {m for m in model.modules() if isinstance(m, torch.nn.Linear)} if packed else set()
        for layer in layers:
            layer.__dict__.pop("forward", None)
            layer.forward = LayerForward(layer, merged)
            assert (layer.forward.qkv.weight is not None) == packed
        found[f"packed {packed}"] = float((run(None) - usual).abs().max())
    if layers[0].forward.window is not None:
        layers[0].forward.window = None
        found["blind"] = float((run(None) - usual).abs().max())
        layers[0].forward.window = WINDOW
    some = run(torch.tensor([True, False, True]))
    found["ended"] = float((some - usual)[:, [0, 2]].abs().max())
    found["ended differs"] = float((some - usual)[:, 1].abs().max())
    with torch.no_grad():  # a map that is written to is written in the shared matrix
        layers[0].self_attn.k_proj.weight.add_(1.0)
    found["rewritten"] = float((run(None) - usual).abs().max())
    for layer in layers:
        layer.__dict__.pop("forward", None)
    found["rewritten alike"] = float((run(None) - usual).abs().max()) - found["rewritten"]
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, float]]:
    pytest.importorskip("triton", reason="the interpreter is part of triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "KLAMP_KERNELS": "fused", "PYTHONWARNINGS": "ignore"}
    env["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE"  # a virtual machine may name AMX and not let one use it
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_step_in_few_kernels_is_the_layers_own(name: str, found: dict[str, dict[str, float]]) -> None:
    gaps = found[name]
    assert gaps["packed False"] < 2e-5
    assert gaps["packed True"] < 2e-5
    if FAMILIES[name].get("sliding_window"):
        assert gaps["blind"] > 1e-3, "without its window the model is another"
    assert gaps["ended"] < 2e-5, "the others are as they were"
    assert gaps["ended differs"] > 1e-3, "what has ended is passed over"
    assert gaps["rewritten"] > 1e-3
    assert abs(gaps["rewritten alike"]) < 2e-5


if __name__ == "__main__":
    print(json.dumps({name: gaps(name) for name in FAMILIES}))
