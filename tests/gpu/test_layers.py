"""Layers with gradients written out on a GPU, against PyTorch's own operations on the same model.

The yardstick is float32: in bfloat16 both ways round in every operation, the written-out one less often, so it may be
no farther from float32 than 1.2 times what PyTorch's own operations are.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from klamp.models import no_gradient_layers, training_layers
from klamp.models.policy import Policy


def build(family: str) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512}
    config = AutoConfig.for_model(family, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.03)
    return model.cuda().eval()


def outcome(model: Any, ids: Tensor, attention: Tensor, *, half: bool) -> list[Tensor]:
    """The last states and the gradients of all matrices that train."""
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
        states = (
            model.get_base_model().model(input_ids=ids, attention_mask=attention, use_cache=False).last_hidden_state
        )
    loss = (states.float() * torch.linspace(-1, 1, states.shape[-1], device="cuda"))[attention.bool()].sum()
    return [states.detach().float()[attention.bool()], *torch.autograd.grad(loss, trained)]


def bfloat16(model: Any) -> Any:
    for name, p in model.named_parameters():
        if "lora_" not in name:
            p.data = p.data.bfloat16()
    return model


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(512, (4, 40), device="cuda")
    attention = torch.ones_like(ids)
    attention[1, :9] = 0
    return ids, attention


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_written_out_layers_are_autograds(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = batch()
    truth = outcome(build(family), *given, half=False)
    far = {}
    used: list[Any] = []
    plain = training_layers.lora_linear
    monkeypatch.setattr(training_layers, "lora_linear", lambda *given: (used.append(given), plain(*given))[1])
    for wide in (1 << 20, 1):
        monkeypatch.setattr(training_layers, "WIDE", wide)
        model = bfloat16(build(family))
        Policy(model, value_head=False, temperature=1.0, lora=True)
        found = outcome(model, *given, half=True)
        far[wide] = [float((a - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True)]
        assert bool(used) == (wide == 1)
    mean = sum(far[1]) / sum(far[1 << 20])
    print(f"\n{family}: {max(far[1]):.3g} beside {max(far[1 << 20]):.3g} at most; {mean:.2f} of it on the mean")
    assert mean <= 1.25
    assert max(far[1]) <= 2 * max(far[1 << 20])
    again = outcome(model, *given, half=True)
    assert torch.equal(found[0], again[0]), "attention's own backward pass adds in any order, the forward pass does not"


@pytest.mark.parametrize("wide", [1, 1 << 20], ids=["wide", "narrow"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_a_measured_layer_rounds_as_one_with_a_gradient(
    family: str, wide: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = batch()
    truth = outcome(build(family), *given, half=False)[0]
    monkeypatch.setattr(training_layers, "WIDE", wide)
    model = bfloat16(build(family))
    policy = Policy(model, value_head=False, temperature=1.0, lora=True)
    ran: list[Any] = []
    plain = no_gradient_layers.MeasuredLayer.forward
    monkeypatch.setattr(no_gradient_layers.MeasuredLayer, "forward", lambda *a: (ran.append(a), plain(*a))[1])
    backbone = model.get_base_model().model

    def states() -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16), training_layers.narrowed(policy.layers, {}):
            out = backbone(input_ids=given[0], attention_mask=given[1], use_cache=False)
        return out.last_hidden_state.detach()[given[1].bool()]

    usual = states()
    assert not ran, "with a gradient the layer's own forward runs"
    with torch.no_grad():
        mine = states()
    assert len(ran) == 3
    far = [float((found.float() - truth).norm() / truth.norm()) for found in (mine, usual)]
    print(
        f"\n{family}: {far[0]:.3g} from float32 beside {far[1]:.3g}, {float((mine != usual).float().mean()):.2g} differ"
    )
    assert torch.equal(mine, usual), "so that KL between equal policies is 0"


@pytest.mark.parametrize("padded", [False, True])
def test_a_captured_pass_is_the_pass_layer_by_layer(padded: bool) -> None:
    """To the bit, with the adapter and without, after its weights changed in place and after they moved."""
    model = bfloat16(build("llama"))
    policy = Policy(model, value_head=False, temperature=1.0, lora=True)
    backbone, (ids, attention) = model.get_base_model().model, batch()
    if not padded:
        attention = torch.ones_like(attention)
    (stack,) = {layer.forward.stack for layer in backbone.layers}
    kept: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def states(**switched: Any) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16), contextlib.ExitStack() as on:
            if switched:
                on.enter_context(training_layers.adapter(policy.layers, None))
            on.enter_context(training_layers.narrowed(policy.layers, kept))
            return backbone(input_ids=ids, attention_mask=attention, use_cache=False).last_hidden_state

    def alone(**switched: Any) -> Tensor:
        for layer in backbone.layers:
            layer.forward.stack = None
        found = states(**switched)
        for layer in backbone.layers:
            layer.forward.stack = stack
        return found

    for _ in range(no_gradient_layers.SEEN + 2):
        found, base = states(), states(off=True)
    assert len(stack.captured.graphs) == 2
    assert torch.equal(found, alone())
    assert torch.equal(base, alone(off=True))
    assert not torch.equal(found, base)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.mul_(0.5)
    ids = ids.flip(1)
    assert torch.equal(states(), alone()), "weights and tokens are read anew"
    assert len(stack.captured.graphs) == 2
    down = backbone.layers[1].mlp.down_proj.base_layer
    down.weight = torch.nn.Parameter(down.weight.detach() * 2, requires_grad=False)
    for _ in range(no_gradient_layers.SEEN + 2):
        assert torch.equal(states(), alone()), "a weight that lies elsewhere is not read where it was"
    assert copy.deepcopy(stack.captured).graphs == {}


def test_a_long_prompt_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of a prompt in one row, by attention with a mask: the states and gradients of whole sequences."""
    from klamp.models import shared_prompts
    from klamp.sampling.rollout import Part

    monkeypatch.setattr(training_layers, "WIDE", 1)
    model = bfloat16(build("llama"))
    policy = Policy(model, value_head=False, temperature=1.0, lora=True)
    prompts = torch.randint(3, 512, (2, 24), device="cuda").repeat_interleave(4, 0)
    ids = torch.cat([prompts, torch.randint(3, 512, (8, 10), device="cuda")], 1)
    attention = torch.ones_like(ids, dtype=torch.bool)
    attention[:4, :5] = False
    attention[2, 30:] = False
    part = Part(torch.arange(8, device="cuda"), slice(0, 10), ids, attention, attention[:, 24:], 24)
    trained = [p for p in model.parameters() if p.requires_grad]
    weights = torch.linspace(-1, 1, 256, device="cuda")
    rows: list[int] = []
    plain = shared_prompts.states_shared
    monkeypatch.setattr(shared_prompts, "states_shared", lambda *a: (rows.append(len(a[2].rows)), plain(*a))[1])
    found = {}
    for share in (False, True):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            states = policy.states_of(model.get_base_model().model, part, share=share)
        loss = (states.float() * weights)[part.mask].sum()
        found[share] = [states.detach().float()[part.mask], *torch.autograd.grad(loss, trained)]
    assert rows == [1, 2], "tried on four sequences of one prompt, then used"
    far = [float((a - b).norm() / b.norm()) for a, b in zip(found[True], found[False], strict=True)]
    print(f"\nlong prompts: states {far[0]:.3g}, gradients up to {max(far[1:]):.3g}")
    assert far[0] < 0.02
    assert max(far[1:]) < 0.05
