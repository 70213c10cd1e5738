"""Passes without a gradient that are written out, and replayed where a shape comes again; on a CPU, without a device.

What a GPU adds is elsewhere: the kernels of rotation and ``silu(gate) up`` in tests/unit/test_kernels_layers.py, real
graphs in tests/gpu/test_layers.py. Here PyTorch's operations stand for the one, and a graph runs its pass again for the
other.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from klamp.models import no_gradient_layers, training_layers
from klamp.models.no_gradient_layers import SEEN, Captured, CapturedLayers, Stack
from klamp.models.no_gradient_layers import measured_layers as write_out
from klamp.sampling import decoding_modules


class Replay:
    """A graph of a CPU: the pass once more, over the tensors that it was captured with."""

    made = 0

    def __init__(self, forward: Any, given: list[Tensor]) -> None:
        self.forward, self.given = forward, given
        self.found = self.run().clone()
        Replay.made += 1

    def run(self) -> Tensor:
        x, cos, sin, *mask = self.given
        found: Tensor = self.forward(x, (cos, sin), mask[0] if mask else None)
        return found

    def replay(self) -> None:
        self.found.copy_(self.run())


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, stepwise: bool) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


def captured(self: CapturedLayers, forward: Any, given: list[Tensor]) -> Captured:
    graph = Replay(forward, [t.clone() for t in given])
    return Captured(graph, graph.given, graph.found)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """bfloat16 with a LoRA adapter in float32, written out as on a GPU."""
    stand_in(monkeypatch)
    return made_of(LlamaForCausalLM(LlamaConfig(**SIZES)))


SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "vocab_size": 32,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "attn_implementation": "sdpa",
}


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's operations for those of a GPU."""
    triton_layers = pytest.importorskip("klamp.kernels.triton_layers")
    monkeypatch.setattr(triton_layers, "rotate", rotate)
    monkeypatch.setattr(no_gradient_layers, "in_half", lambda x: x.dtype == torch.bfloat16)
    monkeypatch.setattr(CapturedLayers, "_capture", captured)
    monkeypatch.setattr(Replay, "made", 0)
    torch.manual_seed(0)


def made_of(made: Any) -> Any:
    made = made.bfloat16().eval()
    made = get_peft_model(made, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, p in made.named_parameters():
        if "lora_" in name:
            p.data = 0.2 * torch.randn(p.shape)
    training_layers.fast_lora(made)
    decoding_modules.fast_norms(made)
    write_out(made)
    return made


def stack_of(model: Any) -> Stack | None:
    (stack,) = {layer.forward.stack for layer in model.get_base_model().model.layers}
    assert stack is None or isinstance(stack, Stack)
    return stack


def kept_by(model: Any) -> CapturedLayers:
    stack = stack_of(model)
    assert stack is not None
    return stack.captured


@torch.no_grad()
def states(model: Any, ids: Tensor, *, off: bool = False, alone: bool = False, quick: bool = True) -> Tensor:
    """The last states; ``alone`` layer by layer, and not ``quick`` by transformers' and peft's layers."""
    layers, backbone = decoding_modules.lora_layers(model), model.get_base_model().model
    attention = torch.ones_like(ids)
    attention[0, :2] = 0
    stack = stack_of(model)
    with torch.autocast("cpu", dtype=torch.bfloat16), contextlib.ExitStack() as on:
        if off:
            on.enter_context(training_layers.adapter(layers, None))
        if quick:
            on.enter_context(training_layers.narrowed(layers, model.__dict__.setdefault("kept", {})))
        for layer in backbone.layers:
            layer.forward.stack = None if alone else stack
        found: Tensor = backbone(input_ids=ids, attention_mask=attention, use_cache=False).last_hidden_state
        for layer in backbone.layers:
            layer.forward.stack = stack
    return found[:, 2:]


def test_layers_written_out_are_transformers_layers(model: Any) -> None:
    ids = torch.randint(32, (3, 9))
    for off in (False, True):
        theirs, ours = states(model, ids, off=off, quick=False), states(model, ids, off=off, alone=True)
        assert float((ours - theirs).norm() / theirs.norm()) < 0.02  # bfloat16; rotation is rounded elsewhere
    base, adapter = states(model, ids, off=True), states(model, ids)
    assert float((base - adapter).norm() / base.norm()) > 0.1


def test_a_shape_that_comes_again_is_captured_and_reads_what_there_is_now(model: Any) -> None:
    for times in range(1, SEEN + 3):
        ids = torch.randint(32, (3, 9))
        assert torch.equal(states(model, ids), states(model, ids, alone=True))
        assert torch.equal(states(model, ids, off=True), states(model, ids, off=True, alone=True))
        assert Replay.made == (0 if times <= SEEN else 2), "one with the adapter, one without"
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.mul_(0.5)  # as the clamp does
    assert torch.equal(states(model, ids), states(model, ids, alone=True))
    assert Replay.made == 2
    states(model, ids[:2])
    assert Replay.made == 2, "another shape is met for the first time"


def test_a_weight_that_lies_elsewhere_or_another_scale_is_another_graph(model: Any) -> None:
    ids = torch.randint(32, (3, 9))
    for _ in range(SEEN + 1):
        states(model, ids)
    assert Replay.made == 1
    down = model.get_base_model().model.layers[1].mlp.down_proj
    down.base_layer.weight = torch.nn.Parameter(2 * down.base_layer.weight.detach(), requires_grad=False)
    for _ in range(SEEN + 1):
        assert torch.equal(states(model, ids), states(model, ids, alone=True))
    down.scaling["default"] *= 3
    assert torch.equal(states(model, ids), states(model, ids, alone=True))
    assert Replay.made == 2


def test_layers_with_windows_of_their_own_keep_their_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    windows = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}  # in the layers after the first
    model = made_of(Qwen2ForCausalLM(Qwen2Config(**SIZES, **windows)))
    for _ in range(SEEN + 2):
        ids = torch.randint(32, (3, 9))
        assert torch.equal(states(model, ids), states(model, ids, alone=True))


def test_few_shapes_are_kept_and_a_copy_of_the_model_has_none(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(no_gradient_layers, "KEPT", 2)
    for length in (5, 6, 7):
        for _ in range(SEEN + 1):
            states(model, torch.randint(32, (2, length)))
    graphs = kept_by(model).graphs
    assert len(graphs) == 2
    assert [key[0][0][1] for key in graphs] == [6, 7], "the oldest went"
    for _ in range(SEEN + 1):
        for length in (8, 9, 10):
            states(model, torch.randint(32, (2, length)))
    assert Replay.made == 3, "shapes that alternate with too many others are not captured"
    assert not copy.deepcopy(kept_by(model)).graphs


def test_a_pass_that_cannot_be_captured_runs_layer_by_layer(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Captured:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(CapturedLayers, "_capture", refused)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ids = torch.randint(32, (3, 9))
    for _ in range(SEEN):
        states(model, ids)
    with pytest.warns(UserWarning, match="uncaptured: operation not permitted"):
        assert torch.equal(states(model, ids), states(model, ids, alone=True))
    assert torch.equal(states(model, ids), states(model, ids, alone=True)), "and says so once"
