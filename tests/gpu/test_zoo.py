"""The static cache with captured graphs on a GPU, past the windows, against a float32 forward with eager attention.

Tolerances. In float32 the two ways differ by the order of sums: 1e-4 nats for logits of size 10. In bfloat16 (8 bits)
every layer rounds, and how much that moves a log-prob depends on the model. So the yardstick is measured: what plain
transformers itself loses when it runs the same weights in bfloat16, each sequence alone. The sampler may lose
1.5 times as much (root mean square) and 3 times as much at worst: the roundings are others, their number the same.
The same figures without the window, the mistake this guards against, are several times larger, which is asserted.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

WINDOW = 32
TOKENS = 48
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
BOTH = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma3_text": {"sliding_window": WINDOW, "layer_types": BOTH},
    "gpt_oss": {"sliding_window": WINDOW, "layer_types": BOTH, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {"sliding_window": WINDOW},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
}


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def build(family: str, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    torch.manual_seed(0)
    if family not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"this transformers does not know {family}")
    known = AutoConfig.for_model(family)
    config = AutoConfig.for_model(family, **{k: v for k, v in SIZES.items() if hasattr(known, k)}, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.05)
    return model.to("cuda", dtype).eval()


def drawn(model: Any, *, lora: bool = False) -> tuple[Any, Any]:
    """A sampler and a rollout of ragged prompts, some of them longer than the window."""
    from klamp.models.policy import Policy
    from klamp.sampling.sampler import Sampler
    from klamp.train.config import RolloutConfig
    from small_model import tokenizer, vocabulary

    policy = Policy(model, value_head=False, temperature=0.9, lora=lora)
    sampler = Sampler(
        policy, tokenizer(vocabulary(509)), RolloutConfig(group_size=2, max_tokens=TOKENS, temperature=0.9), 256
    )
    sampler.refresh()
    lengths = [3, 40, 17, 33, 5, 8]
    prompts = [torch.randint(3, 512, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]
    for seed in (0, 1):  # the second time the graph is there
        rollout = sampler.sample(prompts, [""] * len(prompts), torch.Generator("cuda").manual_seed(seed))
    return sampler, rollout


@torch.no_grad()
def alone(model: Any, rollout: Any) -> Tensor:
    """Log-probs of the counted tokens, each sequence by itself, unpadded, by the model's own forward."""
    found = torch.zeros(rollout.mask.shape, device="cuda")
    for row in range(len(rollout)):
        ids, count = rollout.ids[row][rollout.attention[row].bool()][None], int(rollout.mask[row].sum())
        logits = model(input_ids=ids, use_cache=False).logits[0, -count - 1 : -1].float() / 0.9
        found[row, :count] = logits.log_softmax(-1).gather(1, ids[0, -count:, None]).squeeze(1)
    return found


def eager(model: Any, dtype: torch.dtype = torch.float32, **other: Any) -> Any:
    made = copy.deepcopy(model).to(dtype)
    made.set_attn_implementation("eager")
    for name, value in other.items():
        setattr(made.config, name, value)
    return made


def far(a: Tensor, b: Tensor, mask: Tensor) -> tuple[float, float]:
    gap = (a - b)[mask]
    return float(gap.square().mean().sqrt()), float(gap.abs().max())


# torch's product over groups of experts takes bfloat16 only; in float32 it waits for the device, and no graph holds it.
@pytest.mark.filterwarnings("ignore:a decoding step of .* runs uncaptured")
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_is_the_plain_forward(family: str) -> None:
    model = build(family, torch.float32)
    truth = eager(model)
    sampler, rollout = drawn(model)
    rms, worst = far(rollout.sampler_logp, alone(truth, rollout), rollout.mask)
    print(f"\n{family} float32: rms {rms:.1e} worst {worst:.1e} fast {sampler.merged.fast}")
    assert worst <= 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_loses_what_plain_transformers_loses(family: str) -> None:
    model = build(family, torch.bfloat16)
    plain, truth = eager(model, torch.bfloat16), eager(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        sampler, rollout = drawn(model)
    assert not [w for w in said if "uncaptured" in str(w.message)], "the step is replayed as a graph"
    assert sampler.merged.fast == (family != "qwen3_5_text")
    right = alone(truth, rollout)
    rms, worst = far(rollout.sampler_logp, right, rollout.mask)
    usual, most = far(alone(plain, rollout), right, rollout.mask)
    print(f"\n{family} bfloat16: rms {rms:.3f} worst {worst:.3f}; plain transformers {usual:.3f}, {most:.3f}")
    assert rms <= 1.5 * usual
    assert worst <= 3 * most
    if FAMILIES[family].get("sliding_window"):
        blind = alone(eager(model, sliding_window=10_000), rollout)
        assert far(blind, right, rollout.mask)[0] > 3 * usual, "without its window the model is another"


def test_a_merged_adapter_loses_little_more() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build("mistral", torch.bfloat16), LoraConfig(r=8, target_modules="all-linear"))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.data = p.data.float()
                p.add_(torch.randn_like(p), alpha=0.05)
    truth, plain = copy.deepcopy(model).float(), copy.deepcopy(model)
    _, rollout = drawn(model, lora=True)
    right = alone(truth, rollout)
    rms, worst = far(rollout.sampler_logp, right, rollout.mask)
    usual, most = far(alone(plain, rollout), right, rollout.mask)
    print(f"\nmistral with LoRA bfloat16: rms {rms:.3f} worst {worst:.3f}; plain transformers {usual:.3f}, {most:.3f}")
    assert rms <= 2 * usual, "its weights are rounded once more"
    assert worst <= 3 * most


@pytest.mark.parametrize(("width", "dtype"), [(128_256, torch.bfloat16), (1000, torch.float32)])
def test_a_token_is_drawn_in_two_kernels_with_its_log_prob(width: int, dtype: torch.dtype) -> None:
    from klamp.kernels.triton_draw import draw

    torch.manual_seed(0)
    logits = (3 * torch.randn(64, width, device="cuda")).to(dtype)
    token, logp = draw(logits, 0.9, torch.Generator("cuda").manual_seed(0))
    right = (logits.double() / 0.9).log_softmax(-1)
    torch.testing.assert_close(logp.double(), right.gather(1, token[:, None]).squeeze(1), rtol=0, atol=1e-4)
    again = draw(logits, 0.9, torch.Generator("cuda").manual_seed(0))
    assert torch.equal(token, again[0])
    assert torch.equal(logp, again[1])
    # The log-prob of what is drawn is minus the entropy on the mean.
    many = torch.cat([draw(logits, 0.9, torch.Generator("cuda").manual_seed(s))[1] for s in range(1, 101)])
    entropy = -(right.exp() * right).sum(-1)
    spread = (right.exp() * right.square()).sum(-1) - entropy.square()
    assert abs(float(many.mean() + entropy.mean())) < 4 * float((spread.mean() / len(many)).sqrt())
