"""Settings of models and adapters that change the logits, the cache or the base: right, or refused in one line."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import PROMPTS, own_words, trained
from families import build
from torch import Tensor

from klamp.errors import ConfigError
from klamp.measure.scoring import both_ways
from klamp.measure.two_models import Pair, load_pair
from klamp.sampling.rollout import collate, part
from klamp.sampling.sampler import Sampler
from klamp.train.config import AlgorithmConfig, KLConfig, OptimConfig, RolloutConfig

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]


def saved(folder: Path, model_type: str, **own: Any) -> str:
    build(model_type, **own).save_pretrained(folder)
    return str(folder)


def batch() -> Any:
    """Ragged sequences of given tokens."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 64, (n,), generator=generator).tolist() for n in (14, 9, 11)]
    firsts = [6, 2, 3]
    counted = [[t >= first for t in range(len(row))] for row, first in zip(rows, firsts, strict=True)]
    return collate(rows, counted, [[0.0] * len(row) for row in rows], pad=0)


def pair_of(policy: str, reference: str) -> Pair:
    with own_words():
        return load_pair(policy, reference, temperature=0.9, device="cpu", dtype="float32")


@torch.no_grad()
def alone(model: Any, rollout: Any) -> list[Tensor]:
    """[c, V] log-probs of each sequence at its counted tokens, alone and unpadded."""
    found = []
    for row in range(len(rollout)):
        ids, count = rollout.ids[row][rollout.attention[row].bool()][None], int(rollout.mask[row].sum())
        logits = model(input_ids=ids, use_cache=False).logits[0, -count - 1 : -1]
        found.append((logits.float() / 0.9).log_softmax(-1))
    return found


def picked(model: Any, rollout: Any) -> Tensor:
    """Log-probs of the counted tokens, row by row."""
    rows = zip(alone(model, rollout), rollout.tokens, rollout.mask, strict=True)
    return torch.cat([logp.gather(1, tokens[mask][:, None]).squeeze(1) for logp, tokens, mask in rows])


def divergence(p: list[Tensor], q: list[Tensor]) -> Tensor:
    return torch.cat([(a.exp() * (a - b)).sum(-1) for a, b in zip(p, q, strict=True)])


def measured(pair: Pair, rollout: Any) -> tuple[Tensor, Tensor]:
    piece = part(rollout, torch.arange(len(rollout)))
    there, back, _ = both_ways(pair, piece)
    assert there.kl is not None
    assert back.kl is not None
    return there.kl[piece.mask].detach(), back.kl[piece.mask].detach()


def close(ours: Tensor, theirs: Tensor, atol: float = 2e-6) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=atol)


def some(names: Any, *always: str) -> list[Any]:
    """``always`` in every run of the tests, the others in ``make test-all``."""
    return [pytest.param(n, marks=() if n in always else pytest.mark.slow) for n in names]


HEADS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("granite", {"logits_scaling": 8.0}, {"logits_scaling": 4.0}),
    ("cohere", {"logit_scale": 0.0625}, {"logit_scale": 0.25}),
    ("nanochat", {"final_logit_softcapping": 15.0}, {"final_logit_softcapping": 2.0}),
    ("gemma2", {"final_logit_softcapping": None}, {"final_logit_softcapping": 2.0}),
    ("hyperclovax", {"logits_scaling": 2.0}, {"logits_scaling": 0.5}),
    ("mpt", {}, {"logit_scale": 0.2}),
]


@pytest.mark.parametrize("name", some([h[0] for h in HEADS], "granite", "nanochat"))
def test_each_model_has_its_own_head_settings(name: str, tmp_path: Path) -> None:
    """The same weights, another scale or soft cap: what differs is the head alone."""
    _, one, other = next(h for h in HEADS if h[0] == name)
    policy, reference = saved(tmp_path / "a", name, **one), saved(tmp_path / "b", name, **other)
    rollout = batch()
    p, q = alone(build(name, **one), rollout), alone(build(name, **other), rollout)
    there, back = measured(pair_of(policy, reference), rollout)
    close(there, divergence(p, q))
    close(back, divergence(q, p))
    assert name == "mpt" or float(there.mean()) > 1e-3, "transformers ignores MPT's alone"


def test_a_reference_model_keeps_its_scale_in_training(tmp_path: Path) -> None:
    policy = saved(tmp_path / "a", "granite", logits_scaling=8.0)
    reference = saved(tmp_path / "b", "granite", logits_scaling=4.0)
    with own_words():
        made = trained(policy, tmp_path / "run", full=False, kl=KLConfig(reference=f"model:{reference}"), steps=1)
    learner, rollout = made.learner, batch()
    look = learner.look(rollout, learner.reference_states(rollout))
    right = divergence(alone(learner.policy.model, rollout), alone(build("granite", logits_scaling=4.0), rollout))
    close(look.kl[rollout.mask], right)


ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rsLoRA": {"use_rslora": True},
    "attention only": {"target_modules": ["q_proj", "v_proj"]},
    "ranks of their own": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "a head that trains": {"modules_to_save": ["lm_head"]},
    "all biases": {"bias": "all"},
    "its layers' biases": {"bias": "lora_only"},
    "biases of its own": {"lora_bias": True},
    "DoRA": {"use_dora": True},
    "trained tokens": {"trainable_token_indices": [3, 5, 8, 20]},
    "replicated layers": {"layer_replication": [[0, 2], [1, 2]]},
    "PiSSA": {"init_lora_weights": "pissa"},
    "parameters": {"target_parameters": ["mlp.experts.gate_up_proj"], "target_modules": ["q_proj"]},
}


def adapter(folder: Path, base: str, settings: dict[str, Any]) -> str:
    """A LoRA adapter of ``base``, moved off its start, as peft saves it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    chosen = {"target_modules": ["q_proj", "v_proj", "o_proj"]} | settings
    model: Any = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **chosen)
    )
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p), alpha=0.2)
    model.save_pretrained(folder)
    return str(folder)


def as_peft_loads(base: str, folder: str) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()


@pytest.fixture(params=some(ADAPTERS, "all biases", "DoRA"))
def adapted(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    settings = ADAPTERS[request.param]
    kind = ("mixtral", {}) if "target_parameters" in settings else ("llama", {"attention_bias": True})
    base = saved(tmp_path / "base", kind[0], **kind[1])
    return base, adapter(tmp_path / "adapter", base, settings)


def test_adapters_are_measured_and_sampled_as_peft_loads_them(adapted: tuple[str, str]) -> None:
    from transformers import AutoModelForCausalLM

    base, folder = adapted
    rollout, model = batch(), as_peft_loads(base, folder)
    p, q = alone(model, rollout), alone(AutoModelForCausalLM.from_pretrained(base).eval(), rollout)
    with own_words():
        pair, turned = pair_of(folder, base), pair_of(base, folder)
    there, back = measured(pair, rollout)
    close(there, divergence(p, q))
    close(back, divergence(q, p))
    assert float(there.mean()) > 1e-3
    close(measured(turned, rollout)[0], divergence(q, p))
    sampler = Sampler(pair.policy, pair.tokenizer, RolloutConfig(group_size=2, max_tokens=6, temperature=0.9), 64)
    sampler.refresh()
    drawn = sampler.sample([[5, 6, 7, 8], [9]], ["", ""], torch.Generator().manual_seed(0))
    close(drawn.sampler_logp[drawn.mask], picked(model, drawn), atol=1e-5)


def test_adapters_are_references_as_peft_loads_them(adapted: tuple[str, str], tmp_path: Path) -> None:
    base, folder = adapted
    rollout = batch()
    made = trained(base, tmp_path / "run", full=False, kl=KLConfig(reference=f"adapter:{folder}"), steps=1)
    learner = made.learner
    look = learner.look(rollout, learner.reference_states(rollout))
    right = divergence(alone(learner.policy.model, rollout), alone(as_peft_loads(base, folder), rollout))
    close(look.kl[rollout.mask], right)


def test_ppo_values_the_input_of_the_head(tmp_path: Path) -> None:
    model = saved(tmp_path / "opt", "opt", word_embed_proj_dim=16)
    made = trained(model, tmp_path / "run", full=False, algorithm=AlgorithmConfig(name="ppo"))
    assert made.learner.policy.value.in_features == 16
    assert made.learner.applied == 2


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    model, prompts = saved(tmp_path / "m", "llama", vocab_size=40), write(tmp_path, [*PROMPTS, "w60 w1"])
    with pytest.raises(ConfigError, match=r"token 63 .* is beyond the model's 40 embeddings"):
        trained(model, tmp_path / "run", full=False, prompts=prompts)


def write(folder: Path, prompts: list[str]) -> str:
    file = folder / "own.txt"
    file.write_text("\n".join(prompts) + "\n")
    return str(file)


def test_longrope_that_would_be_crossed_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    rope["original_max_position_embeddings"] = 14
    settings = {"rope_parameters": rope, "original_max_position_embeddings": 14, "sliding_window": None}
    model = saved(tmp_path / "phi3", "phi3", **settings)
    with pytest.raises(ConfigError, match=r"prompts of 1 to 6 tokens and rollout.max_tokens=12 cross 14"):
        trained(model, tmp_path / "run", full=False)
    below = RolloutConfig(prompts=4, group_size=2, max_tokens=8, temperature=0.9)
    made = trained(model, tmp_path / "run2", full=False, rollout=below)
    made.sampler.refresh()
    rollout = made.sample(3)
    close(rollout.sampler_logp[rollout.mask], picked(made.learner.policy.model, rollout), atol=1e-5)


@pytest.mark.parametrize("full", [False, True])
def test_checkpointing_gives_the_same_gradient_from_fewer_kept_states(full: bool, tmp_path: Path) -> None:
    model, kept, grads = saved(tmp_path / "m", "llama"), {}, {}
    for on in (False, True):
        made = trained(model, tmp_path / f"run-{on}", full=full, optim=OptimConfig(lr=1e-2, checkpointing=on))
        learner, piece = made.learner, part(batch(), torch.arange(3))
        size = 0

        def pack(x: Tensor) -> Tensor:
            nonlocal size
            size += x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            logp = learner.policy.stats(piece, learner.policy(piece).hidden, None).logp
        kept[on] = size
        grads[on] = torch.autograd.grad(logp[piece.mask].sum(), learner.trained)
    assert kept[True] < 0.7 * kept[False]
    for ours, theirs in zip(grads[True], grads[False], strict=True):
        close(ours, theirs, atol=1e-5)


def test_checkpointing_where_there_is_none_is_refused(tmp_path: Path) -> None:
    from klamp.models.policy import recompute

    model = build("llama")
    model.supports_gradient_checkpointing = False
    with pytest.raises(ConfigError, match=r"optim\.checkpointing: LlamaForCausalLM does not support it"):
        recompute(model)


def test_experts_keep_their_weights_and_the_run_says_so(tmp_path: Path) -> None:
    made = trained(saved(tmp_path / "m", "qwen2_moe"), tmp_path / "run", full=False, steps=1)
    names = {n.rpartition(".lora_")[0].rpartition(".")[2] for n in made.learner.policy.trainable()}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert "LoRA is on k_proj, o_proj, q_proj, v_proj; experts and routers stay" in made.learner.policy.note


def test_a_family_that_is_not_known_takes_transformers_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from klamp.sampling import families

    model = build("llama")
    assert families.is_fast(model)
    monkeypatch.setattr(families, "FAST", frozenset())
    assert not families.is_fast(model)
    grouped = copy.deepcopy(model)
    monkeypatch.undo()
    grouped.config._attn_implementation = "flash_attention_2"
    assert not families.is_fast(grouped)


def test_a_model_that_does_not_see_padding_is_found_by_the_probe() -> None:
    from klamp.sampling.families import check_decoding

    model: Any = build("llama")
    check_decoding(model)
    own = type(model).forward

    class Blind(type(model)):  # type: ignore[misc]
        def forward(
            self, input_ids: Tensor, attention_mask: Any = None, past_key_values: Any = None, **other: Any
        ) -> Any:
            other.pop("position_ids", None)
            return own(self, input_ids=input_ids, past_key_values=past_key_values, **other)

    model.__class__ = Blind
    with pytest.raises(ConfigError, match=r"Blind does not see which tokens are padding: .* Choose another model"):
        check_decoding(model)


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2"])
def test_masks_that_are_added_are_those_of_transformers(name: str) -> None:
    """What a GPU's captured step takes in place of transformers' own masks, past the window."""
    from klamp.sampling.caches import DynamicSteps, StaticSteps

    model = build(name)
    ids = torch.randint(3, 64, (3, 16), generator=torch.Generator().manual_seed(0))
    attention = torch.arange(6) >= torch.tensor([0, 4, 2])[:, None]
    static, plain = StaticSteps(model, 3, 16), DynamicSteps(model)
    static.added_masks = True
    with torch.no_grad():
        for steps in (static, plain):
            steps.prefill(ids[:, :6], attention)
        for t in range(6, 16):
            close(static.step(ids[:, t]), plain.step(ids[:, t]), atol=1e-5)
