"""Sequences of one prompt laid out in one row, prompts filled in once, packed weights: the same numbers, less work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from klamp.sampling import packed_linear as packed
from klamp.sampling.caches import DynamicSteps, StaticSteps
from klamp.sampling.decode import fit_threads
from klamp.train import shared
from klamp.train.algorithms import needs_look, prepare
from klamp.train.batch import Part

FIRST = 5
# Llama's norm is float32 whatever the model is: its rounding is what is left. GPT-2 is float64 throughout.
NEAR = {"llama": {"rtol": 1e-5, "atol": 1e-5}, "gpt2": {"rtol": 1e-9, "atol": 1e-9}}


def model(name: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    if name == "gpt2":
        drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config: Any = GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=40, n_positions=32, **drop, **settings)
        return GPT2LMHeadModel(config).double().eval()
    fields = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.3}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    if name == "mistral":
        return MistralForCausalLM(MistralConfig(vocab_size=40, **fields, **heads, **settings)).eval()
    return LlamaForCausalLM(LlamaConfig(vocab_size=40, **fields, **heads, **settings)).double().eval()


def part(columns: int = 7) -> Part:
    """Groups of four, two (padded on the left) and one, in no order; sequences that end early."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 40, (7, FIRST + columns), generator=generator)
    attention = torch.ones_like(ids, dtype=torch.bool)
    for group in ([0, 2, 3, 6], [1, 5], [4]):
        ids[group, :FIRST] = ids[group[0], :FIRST].clone()
    attention[[1, 5], :2] = False
    ids[1, :2] = 7  # what stands in the padding does not matter
    attention[0, FIRST + 4 :] = False
    attention[5, FIRST + 1 :] = False
    return Part(torch.arange(7), slice(0, columns), ids, attention, attention[:, FIRST:].clone(), FIRST)


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


def test_the_layout_finds_what_is_the_same() -> None:
    rows, which, place, tails = found(part())
    assert len(rows) == 3
    assert tails == 4
    groups = {tuple((which == p).nonzero().flatten().tolist()) for p in range(3)}
    assert groups == {(0, 2, 3, 6), (1, 5), (4,)}
    assert place.tolist() == [0, 0, 1, 2, 0, 1, 3]


def test_a_model_that_cannot_keeps_whole_sequences() -> None:
    piece = part()
    assert not shared.agrees(model("mistral", sliding_window=4).base_model, piece), "a window would see too much"
    assert shared.agrees(model("mistral", sliding_window=None).base_model, piece)
    assert not shared.possible(model("llama", attn_implementation="eager").base_model, piece), "its masks are added"
    assert not shared.possible(model("llama").bfloat16().base_model, piece), "rounding would read as KL"
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


@pytest.fixture(params=[("grpo", False), ("ppo", False), ("grpo", True), ("ppo", True)], ids=str)
def trainer(request: pytest.FixtureRequest, tmp_path: Any, words_model: str, words_prompts: str) -> Any:
    from klamp.train.config import AlgorithmConfig, LoraConfig, RolloutConfig, TrainConfig
    from klamp.train.loop import Trainer

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [len(set(c.split())) / 7 + 0.1 * (i % 3) for i, c in enumerate(completions)]

    algorithm, full = request.param
    config = TrainConfig(
        model=words_model,
        prompts=words_prompts,
        run=str(tmp_path / "run"),
        device="cpu",
        full=full,
        rollout=RolloutConfig(prompts=3, group_size=4, max_tokens=6),
        algorithm=AlgorithmConfig(name=algorithm),
        lora=LoraConfig(rank=4, alpha=8.0),
    )
    made = Trainer(config, rewards=[reward], quiet=True)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in made.learner.policy.trainable().values():
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
    made.sampler.refresh()
    return made


@pytest.mark.parametrize("micro_batch", [0, 3])
def test_the_update_is_that_of_whole_sequences(trainer: Any, micro_batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = trainer.learner
    learner.config = replace(learner.config, optim=replace(learner.config.optim, micro_batch=micro_batch))
    learner.control = learner.control.init(spread=1.0, length=5.0)
    rollout = trainer.sample(1)
    scored = trainer.scorer(rollout.prompts, rollout.completions, rollout.columns)

    def outcome() -> list[Tensor]:
        anchors = learner._anchors(rollout)
        look = learner._look(rollout, anchors)
        needed = look if needs_look(learner.config, False) else None
        prepared = prepare(learner.config, rollout, scored, needed, 0.3, lambda x: x)
        loss = learner.loss_of(rollout, torch.arange(len(rollout)), prepared, anchors, learner.control.beta)
        return [look.kl, look.logp, loss.detach(), *torch.autograd.grad(loss, learner.trained, allow_unused=True)]

    learner.policy.states_of.agreed = False
    whole = outcome()
    monkeypatch.setattr(shared, "worthwhile", lambda *_: True)
    learner.policy.states_of.agreed = None
    ours = outcome()
    assert learner.policy.states_of.agreed, "the layout was tried and used"
    # Float32 through two layers, sums in another order.
    torch.testing.assert_close(ours, whole, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"sliding_window": 3}, {"sliding_window": 3, "attn_implementation": "eager"}])
def test_prompts_filled_in_once_are_prompts_filled_in_each(settings: Any) -> None:
    made, piece = model("mistral", **({"sliding_window": None} | settings)), part()  # also under eager attention
    ids, attention = piece.ids[:, :FIRST], piece.attention[:, :FIRST]
    logits = []
    with torch.no_grad():
        for steps in (StaticSteps(made, len(ids), FIRST + 3), DynamicSteps(made)):
            filled = steps.prefill(ids, attention)
            logits.append(torch.stack([filled, *(steps.step(torch.arange(7) + k) for k in (3, 4))]))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not packed._works(), reason="this torch has no packed linear maps")
@pytest.mark.parametrize("shape", [(8, 1), (1, 1), (3, 70), (300,)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_map_is_the_map(shape: tuple[int, ...], bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(520, 600, generator=generator), torch.randn(*shape, 600, generator=generator)
    shift = torch.randn(520, generator=generator) if bias else None
    assert packed.packs(weight)
    linear = packed.Packed(torch.zeros_like(weight), shift)
    linear.pack(weight)
    # Float32 sums of 600 terms of size 1, in another order.
    torch.testing.assert_close(linear(x), torch.nn.functional.linear(x, weight, shift), rtol=1e-4, atol=1e-3)


def test_small_and_other_weights_stay_as_they_are() -> None:
    assert not packed.packs(torch.zeros(64, 64))
    assert not packed.packs(torch.zeros(600, 600, dtype=torch.float64))
    assert not packed.packs(torch.zeros(600, 600, dtype=torch.bfloat16))


def test_the_sampler_follows_the_policy_through_packed_weights(
    tmp_path: Any, words_model: str, words_prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from klamp.train.config import LoraConfig, RolloutConfig, TrainConfig
    from klamp.train.loop import Trainer

    monkeypatch.setattr(packed, "WEIGHTS", 1)
    config = TrainConfig(
        model=words_model,
        prompts=words_prompts,
        run=str(tmp_path / "run"),
        device="cpu",
        rollout=RolloutConfig(prompts=3, group_size=4, max_tokens=6),
        lora=LoraConfig(rank=4, alpha=8.0),
    )
    made = Trainer(config, rewards=[lambda prompts, completions, **_: [0.0] * len(prompts)], quiet=True)
    with torch.no_grad():
        for p in made.learner.policy.trainable().values():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)), alpha=0.2)
    made.sampler.refresh()
    assert any(isinstance(m, packed.Packed) for m in made.sampler.model.modules()) == packed._works()
    rollout = made.sample(1)
    look = made.learner._look(rollout, made.learner._anchors(rollout))
    torch.testing.assert_close(rollout.sampler_logp[rollout.mask], look.logp[rollout.mask], rtol=1e-4, atol=1e-4)
    assert bool((look.kl[rollout.mask] > 0).any()), "the adapter does something"


def test_sleeping_threads_are_left_asleep_for_small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    made, before = model("llama"), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for policy, rows, expected in (("passive", 8, 1), ("PASSIVE", 8, 1), ("passive", 1 << 14, 2), ("active", 8, 2)):
            monkeypatch.setenv("OMP_WAIT_POLICY", policy)
            with fit_threads(made, rows):
                assert torch.get_num_threads() == expected
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
