"""Sequences of one prompt laid out in one row, prompts filled in once, packed weights: the same numbers, less work."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

from klamp.models import shared_prompts as shared
from klamp.models import training_layers
from klamp.sampling.rollout import Part
from small_batch import FIRST, model, part

# Llama's norm is float32 whatever the model is: its rounding is what is left. GPT-2 is float64 throughout.
NEAR = {"llama": {"rtol": 1e-5, "atol": 1e-5}, "gpt2": {"rtol": 1e-9, "atol": 1e-9}}


def found(piece: Part) -> shared.Layout:
    return shared.layout(piece.ids[:, : piece.first], piece.attention[:, : piece.first])


@pytest.mark.parametrize("columns", [7, 2, 1])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_states_and_gradients_are_those_of_whole_sequences(name: str, columns: int) -> None:
    backbone, piece = model(name).base_model, part(columns)
    weights = [p for p in backbone.parameters() if p.requires_grad]
    outcomes = []
    for states in (shared.states_whole(backbone, piece), shared.states_shared(backbone, piece, found(piece))):
        assert states.shape == (7, columns, backbone.config.hidden_size)
        counted = states[piece.mask]
        up = torch.randn(counted.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        outcomes.append([counted.detach(), *torch.autograd.grad((counted * up).sum(), weights)])
    torch.testing.assert_close(outcomes[1], outcomes[0], **NEAR[name])
    assert shared.agrees(backbone, piece)


def test_a_model_that_cannot_keeps_whole_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    piece = part()
    assert not shared.possible(model("llama").base_model, piece), "it is narrow"
    monkeypatch.setattr(training_layers, "WIDE", 1)
    assert not shared.agrees(model("mistral", sliding_window=4).base_model, piece), "a window would see too much"
    assert shared.agrees(model("mistral", sliding_window=None).base_model, piece)
    assert not shared.possible(model("llama", attn_implementation="eager").base_model, piece), "its masks are added"
    assert not shared.possible(model("llama").base_model, part(16)), "its prompts are short"
    assert not shared.possible(model("llama", attention_dropout=0.1).train().base_model, piece)
    assert shared.possible(model("llama", attention_dropout=0.1).base_model, piece)
    states = shared.Backbone()
    window = model("mistral", sliding_window=4).base_model
    torch.testing.assert_close(states(window, piece, share=True), shared.states_whole(window, piece), rtol=0, atol=0)


def test_a_model_that_ignores_the_mask_is_found_out() -> None:
    backbone = model("llama").base_model
    own = backbone.forward
    backbone.forward = lambda *args, **given: own(*args, **{k: v for k, v in given.items() if k != "attention_mask"})
    assert not shared.agrees(backbone, part())


def test_it_is_done_where_it_pays() -> None:
    config, piece = model("llama").config, part()
    assert not shared.worthwhile(piece, found(piece), config), "groups of 4, 2 and 1 leave holes"
    same = replace(piece, ids=piece.ids[:1].repeat(8, 1), attention=piece.attention[1:2].repeat(8, 1))
    assert not shared.worthwhile(same, found(same), LlamaConfig(hidden_size=12, num_attention_heads=2)), (
        "scores would outweigh it"
    )
    assert shared.worthwhile(same, found(same), config)
    bare = replace(same, ids=same.ids[:, :FIRST], attention=same.attention[:, :FIRST], mask=same.mask[:, :0])
    assert not shared.worthwhile(bare, found(bare), config), "no token to speak of"
    alone = replace(piece, ids=piece.ids[[0, 1, 4]], attention=piece.attention[[0, 1, 4]])
    assert not shared.worthwhile(alone, found(alone), config)
