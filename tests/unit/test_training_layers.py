"""The fast forward passes give the numbers and gradients of the modules they stand in for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from klamp.models import no_gradient_layers, training_layers
from klamp.sampling import decoding_modules


def model(dtype: torch.dtype = torch.float64) -> Any:
    """Three query heads to a key head, as SmolLM2 has."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        initializer_range=0.3,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def adapted(dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """The model with a LoRA adapter that does something."""
    from peft import LoraConfig, get_peft_model

    fields = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora_dropout": 0.0} | settings
    made = get_peft_model(model(dtype), LoraConfig(task_type="CAUSAL_LM", **fields), autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) * 0.2)
    return made


def ids() -> Tensor:
    return torch.randint(32, (3, 7), generator=torch.Generator().manual_seed(1))


def outcome(made: Any) -> list[Tensor]:
    """Logits, and the gradient of every trained weight."""
    logits = made(input_ids=ids()).logits
    weights = [p for p in made.parameters() if p.requires_grad]
    grads = torch.autograd.grad(logits.square().mean(), weights)
    return [logits.detach(), *grads]


@pytest.mark.parametrize("settings", [{}, {"lora_alpha": 7}, {"use_rslora": True}, {"use_dora": True}], ids=str)
def test_lora_is_pefts(settings: dict[str, Any]) -> None:
    made = adapted(**settings)
    before = outcome(made)
    training_layers.fast_lora(made)
    torch.testing.assert_close(outcome(made), before, rtol=1e-9, atol=0)


# Scales of 2 and 4 round nothing. Maps that share an input (q, k and v; gate and up) add up its gradient map by map,
# where peft adds product by product: 7e-7 of the largest entry at a scale of 2, 2e-6 at 4. DoRA takes peft's own way.
@pytest.mark.parametrize(("settings", "rtol"), [({}, 1e-5), ({"use_rslora": True}, 1e-4), ({"use_dora": True}, 0)])
def test_lora_in_float32_is_pefts_but_for_the_order_of_sums(settings: dict[str, Any], rtol: float) -> None:
    made = adapted(torch.float32, **settings)
    before = outcome(made)
    training_layers.fast_lora(made)
    torch.testing.assert_close(outcome(made), before, rtol=rtol, atol=1e-6 if rtol else 0)


def test_an_adapter_wider_than_its_base_is_pefts() -> None:
    made = adapted(torch.float32)
    for name, p in made.named_parameters():
        if "lora_" in name:
            p.data = p.data.double()
    before = outcome(made)
    training_layers.fast_lora(made)
    torch.testing.assert_close(outcome(made), before, rtol=0, atol=0)


def test_dropout_in_training_is_pefts_business() -> None:
    made = adapted(lora_dropout=0.5).train()
    training_layers.fast_lora(made)
    torch.manual_seed(3)
    ours = made(input_ids=ids()).logits
    torch.manual_seed(4)
    assert not torch.equal(ours, made(input_ids=ids()).logits)


def test_adapters_are_switched_as_peft_switches_them() -> None:
    made = adapted()
    made.add_adapter("other", copy.deepcopy(made.peft_config["default"]))
    made.set_adapter("other")
    other = made(input_ids=ids()).logits
    made.set_adapter("default")
    with made.disable_adapter():
        base = made(input_ids=ids()).logits
    policy = made(input_ids=ids()).logits
    trained = {n for n, p in made.named_parameters() if p.requires_grad}
    training_layers.fast_lora(made)
    layers = decoding_modules.lora_layers(made)
    with training_layers.adapter(layers, None):
        torch.testing.assert_close(made(input_ids=ids()).logits, base, rtol=1e-9, atol=1e-12)
    with training_layers.adapter(layers, "other"):
        torch.testing.assert_close(made(input_ids=ids()).logits, other, rtol=1e-9, atol=1e-12)
        assert {n for n, p in made.named_parameters() if p.requires_grad} == trained
    with pytest.raises(RuntimeError), training_layers.adapter(layers, None):
        raise RuntimeError
    torch.testing.assert_close(made(input_ids=ids()).logits, policy, rtol=1e-9, atol=1e-12)


def test_a_feed_forward_without_an_adapter_rounds_alike_with_a_gradient_and_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a full fine-tune, or with adapters on attention alone: KL between equal policies would not be 0."""
    from klamp.kernels import layers

    def once(gate: Tensor, up: Tensor) -> Tensor:  # as the kernel does on a GPU
        return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)

    monkeypatch.setattr(layers, "gated", once)
    monkeypatch.setattr(training_layers, "in_half", lambda x: True)
    mlp = model(torch.bfloat16).model.layers[0].mlp
    x = torch.randn(3, 7, 48, dtype=torch.bfloat16, requires_grad=True)
    fast = training_layers.MlpForward(mlp)
    assert torch.equal(fast(x), mlp.down_proj(once(mlp.gate_proj(x), mlp.up_proj(x))))
    mlp.double()
    monkeypatch.setattr(layers, "gated", lambda gate, up: torch.nn.functional.silu(gate) * up)
    wide = x.detach().double().requires_grad_()
    given = [wide, *mlp.parameters()]
    found, usual = (torch.autograd.grad(f(wide).square().sum(), given) for f in (fast, fast.own))
    torch.testing.assert_close(found, usual)


def test_adapters_loaded_one_after_another_are_cast_into_memory_of_their_shapes() -> None:
    from klamp.models.policy import Policy

    made = adapted(torch.float32)
    policy = Policy(made, value_head=False, temperature=1.0, lora=True)
    for _ in range(8):  # as a reference that follows saved steps; new matrices are given old ones' identities
        if "reference" in made.peft_config:
            made.delete_adapter("reference")
        made.add_adapter("reference", copy.deepcopy(made.peft_config["default"]))
        policy.find_layers()
        with torch.no_grad(), policy.with_adapter("reference"), training_layers.narrowed(policy.layers, policy.narrow):
            for layer in policy.layers:
                down, up, _ = layer.forward.narrow
                assert torch.equal(down, layer.lora_A["reference"].weight.bfloat16())
                assert torch.equal(up, layer.lora_B["reference"].weight.bfloat16())
        assert len(policy.narrow) <= 2 * len(policy.layers), "no more memory than the adapters that there are"


def test_norms_are_transformers() -> None:
    made = model(torch.float32)
    for p in made.parameters():
        p.requires_grad_(True)
    before = outcome(made)
    decoding_modules.fast_norms(made)
    norms = [m for m in made.modules() if type(m).__name__ == "LlamaRMSNorm"]
    assert all(isinstance(m.forward, decoding_modules.NormForward) for m in norms)
    # transformers computes the norm in float32 whatever it is given, so float64 says nothing here.
    torch.testing.assert_close(outcome(made), before, rtol=1e-4, atol=1e-6)
    wide = norms[0](torch.ones(2, 48, dtype=torch.bfloat16))
    assert wide.dtype == torch.float32, "mixed dtypes take the norm's own way"


def decoded(made: Any) -> list[Tensor]:
    """Logits of a prompt with padding on the left, then of tokens one at a time over a static cache."""
    from transformers import StaticCache

    cache = StaticCache(config=made.config, max_cache_len=12)
    visible = torch.zeros(3, 12, dtype=torch.bool)
    visible[:, :7] = torch.tensor([[1] * 7, [0] * 2 + [1] * 5, [0] * 4 + [1] * 3], dtype=torch.bool)
    causal = torch.ones(7, 12, dtype=torch.bool).tril()
    mask = (visible[:, None, None, :] | torch.eye(7, 12, dtype=torch.bool)) & causal
    positions = (visible[:, :7].long().cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        out = [made(input_ids=ids(), attention_mask=mask, position_ids=positions, past_key_values=cache).logits[:, -1]]
        for t in range(3):
            visible[:, 7 + t] = True
            token = {"input_ids": ids()[:, t : t + 1], "position_ids": positions[:, -1:] + t + 1}
            out.append(made(**token, attention_mask=visible[:, None, None], past_key_values=cache).logits[:, -1])
    return out


def test_decoding_is_transformers() -> None:
    made = model(torch.float32)
    before = decoded(made)
    decoding_modules.fast_decoding(made)
    assert made.config._attn_implementation == decoding_modules.GROUPED
    # Other orders of float32 sums, and norms with one rounding fewer.
    torch.testing.assert_close(decoded(made), before, rtol=1e-4, atol=1e-5)


def test_without_a_mask_of_its_own_grouped_attention_is_sdpa() -> None:
    made = model(torch.float32)
    attention = torch.tensor([[1] * 7, [0] * 2 + [1] * 5, [1] * 7])
    before = made(input_ids=ids(), attention_mask=attention).logits
    decoding_modules.fast_decoding(made)
    torch.testing.assert_close(made(input_ids=ids(), attention_mask=attention).logits, before, rtol=1e-4, atol=1e-5)


def test_a_copy_of_a_lean_model_runs_on_its_own_weights() -> None:
    made = model(torch.float32)
    decoding_modules.fast_norms(made)
    other = copy.deepcopy(made)
    with torch.no_grad():
        for p in made.parameters():
            p.zero_()
    assert float(other(input_ids=ids()).logits.detach().abs().max()) > 0
    assert other.model.norm.forward.norm is other.model.norm


def test_the_maps_of_a_measured_layer_are_its_lora_layers() -> None:
    made = adapted(torch.float32)
    for name, p in made.named_parameters():
        if "lora_" not in name:
            p.data = p.data.bfloat16()
    training_layers.fast_lora(made)
    decoding_modules.fast_norms(made)
    no_gradient_layers.measured_layers(made)
    layers = decoding_modules.lora_layers(made)
    inner = made.get_base_model().model.layers
    names = [(where, name) for where, each in no_gradient_layers.MAPS for name in each]

    @torch.no_grad()
    def same() -> bool:
        told = []
        for layer in inner:
            maps = layer.forward.maps()
            assert maps is not None
            for (where, name), found in zip(names, maps, strict=True):
                module = layer.get_submodule(f"{where}.{name}")
                x = torch.randn(5, module.in_features, dtype=torch.bfloat16)
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    told.append(torch.equal(module(x), found(x)))
        return all(told)

    kept: dict[int, tuple[Tensor, Tensor]] = {}
    with training_layers.narrowed(layers, kept):
        assert same()
        assert inner[0].forward.maps()[0].down is not None
    assert inner[0].forward.maps() is None, "nothing is cast, so the layer's own forward runs"
    with torch.no_grad():
        layers[0].lora_B["default"].weight.mul_(3)
    with training_layers.narrowed(layers, kept):
        assert same(), "cast anew"
    with training_layers.adapter(layers, None), training_layers.narrowed(layers, kept):
        assert same()
        assert inner[0].forward.maps()[0].down is None
    assert not any(layer._disable_adapters for layer in layers)
    assert all(layer.forward.narrow is None for layer in layers)


def test_adapters_merged_by_products_are_the_sums_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from klamp.models.policy import Policy
    from klamp.sampling import merged_model

    made = adapted(torch.float32)
    for name, p in made.named_parameters():
        if "lora_" not in name:
            p.data = p.data.bfloat16()
    merged = merged_model.MergedModel(Policy(made, value_head=False, temperature=1.0, lora=True))

    def weights() -> list[Tensor]:
        merged.refresh()
        return [linear.weight.detach().float().clone() for linear, _ in merged.merged]

    usual = weights()
    monkeypatch.setattr(merged_model, "_in_one_product", lambda base: True)  # as on a GPU
    for _ in range(2):
        # A and B are rounded to bfloat16 first: 0.4 % of each, of an adapter that is no larger than its weight.
        assert all(float((a - b).norm() / a.norm()) < 0.01 for a, b in zip(weights(), usual, strict=True))
        with torch.no_grad():
            merged.merged[0][1].lora_B["default"].weight.mul_(-1)
        changed = weights()[0]
        assert float((changed - usual[0]).norm() / usual[0].norm()) > 0.1, "read anew"
        with torch.no_grad():
            merged.merged[0][1].lora_B["default"].weight.mul_(-1)
