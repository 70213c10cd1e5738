"""Which heads the kernels take, which they leave to the model, and how the choice of kernels is made."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from klamp import kernels
from klamp.errors import ConfigError
from klamp.kernels.lm_heads import SOFTCAPS


class Backbone(nn.Module):
    """Embeds and normalises: as much of a transformer as a head sees."""

    def __init__(self, v: int, h: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(v, h)
        self.norm = nn.LayerNorm(h)

    def forward(self, input_ids: Tensor) -> tuple[Tensor]:
        return (self.norm(self.embed(input_ids)),)


class Model(nn.Module):
    """The surface of a transformers CausalLM that is read."""

    base_model_prefix = "model"

    def __init__(
        self,
        v: int = 11,
        h: int = 6,
        *,
        bias: bool = False,
        secret: float = 1.0,
        scale: float | None = None,
        **config: object,
    ) -> None:
        super().__init__()
        self.model = Backbone(v, h)
        self.lm_head = nn.Linear(h, v, bias=bias)
        self.config = SimpleNamespace(**config)
        self.secret = secret
        if scale is not None:
            self.logit_scale = scale

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        x = self.lm_head(self.model(input_ids)[0]) * getattr(self, "logit_scale", 1.0)
        x = x / getattr(self.config, "logits_scaling", 1.0)
        cap = next((getattr(self.config, name) for name in SOFTCAPS if hasattr(self.config, name)), None)
        return SimpleNamespace(logits=self.secret * (x if cap is None else cap * torch.tanh(x / cap)))


class LoraLinear(nn.Linear):
    """Any subclass of Linear does more than a Linear."""


PROBE = torch.arange(8).view(2, 4)
KNOWN = [{}, {"bias": True}, {"scale": 0.25}, {"logits_scaling": 8.0}, *({name: 2.0} for name in SOFTCAPS)]
KNOWN += [{"logit_scale": 0.25}]  # MPT's configuration has one, and transformers does not use it


@pytest.mark.parametrize("config", KNOWN)
def test_a_known_head_gives_the_models_own_log_probs(config: dict[str, object]) -> None:
    model = Model(**config)  # type: ignore[arg-type]
    spec = kernels.head_of(model, probe=PROBE)
    assert spec is not None
    assert model.training
    mine = kernels.token_stats(spec.backbone(PROBE)[0], spec.weight, PROBE, **spec.options())
    truth = model(PROBE).logits.log_softmax(-1).gather(-1, PROBE.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(mine.logp, truth, rtol=1e-5, atol=1e-5)


def test_what_attributes_do_not_show_the_probe_does() -> None:
    model = Model(secret=1.5)
    assert kernels.head_of(model) is not None
    assert kernels.head_of(model, probe=PROBE) is None


def test_other_heads_are_left_to_the_model() -> None:
    lora, hooked, sharded = Model(), Model(), Model()
    lora.lm_head = LoraLinear(6, 11)
    hooked.lm_head.register_forward_hook(lambda *_: None)
    sharded.lm_head.weight.ds_id = 3  # type: ignore[attr-defined]
    for model, reason in (
        (lora, "not a plain Linear"),
        (hooked, "hooks"),
        (sharded, "sharded"),
        (Model(dim_model_base=256), "dim_model_base"),
        (Model(is_encoder_decoder=True), "encoder-decoder"),
        (nn.Linear(2, 3), "no lm_head"),
    ):
        assert kernels.head_of(model) is None
        assert reason in str(kernels.why_full_logits(model))
    assert kernels.why_full_logits(Model()) is None


def test_peft_models_are_looked_into() -> None:
    inner = Model()

    class Peft(nn.Module):
        def __init__(self, prompt: bool) -> None:
            super().__init__()
            self.base_model = inner
            self.peft_config = {"default": SimpleNamespace(is_prompt_learning=prompt)}

        def get_base_model(self) -> nn.Module:
            return inner

    spec = kernels.head_of(Peft(prompt=False))
    assert spec is not None
    assert spec.weight is inner.lm_head.weight
    assert kernels.head_of(Peft(prompt=True)) is None


def test_a_sharded_tensor_is_refused_by_name() -> None:
    class DTensor(Tensor):
        """Same name as torch's, which cannot be made without a process group."""

    head = torch.randn(5, 4).as_subclass(DTensor)
    with pytest.raises(ConfigError, match="DTensor"):
        kernels.token_stats(torch.randn(2, 4), head, torch.tensor([0, 1]))


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**env, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )


def test_importing_the_kernels_does_not_import_triton() -> None:
    done = run("import sys, klamp.kernels as k; assert 'triton' not in sys.modules; print(k.backend('cpu'))")
    assert done.stdout.strip() == "eager", done.stderr


def test_a_bad_choice_is_refused_with_the_nearest() -> None:
    done = run("import klamp.kernels as k; k.backend('cpu')", KLAMP_KERNELS="fuse")
    assert "KLAMP_KERNELS 'fuse' is not known. Did you mean 'fused'?" in done.stderr


def test_eager_can_be_forced_and_the_choice_is_made_once() -> None:
    code = """
import os, klamp.kernels as k
first = k.backend('cuda')
os.environ['KLAMP_KERNELS'] = 'x'
print(first, k.backend('cuda'))
"""
    done = run(code, KLAMP_KERNELS="eager")
    assert done.stdout.split() == ["eager", "eager"], done.stderr
