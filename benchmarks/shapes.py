"""Models of a given shape with random weights, made where they are used: nothing is downloaded or written but a folder
with a configuration and a tokenizer of one word a token.

    folder = make("8b", prompt_tokens=512)
    with random_models():
        Trainer(TrainConfig(model=folder, ...))

``limits`` says what no implementation of a step can be faster than, from the shape alone.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from klamp import models

BANDWIDTH = 4.2e12
"""Bytes a second that a copy reaches on an H200."""
PRODUCTS = 790e12
"""Operations a second of a large bfloat16 product there."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama; ``tied`` says that the head is the embedding."""

    hidden: int
    inner: int
    layers: int
    heads: int
    groups: int
    size: int
    vocabulary: int
    tied: bool

    @property
    def read(self) -> int:
        """Weights that a forward pass reads: all but the embedding, of which it takes a few rows."""
        attention = self.hidden * self.size * (2 * self.heads + 2 * self.groups)
        return self.layers * (attention + 3 * self.hidden * self.inner) + self.hidden * self.vocabulary

    @property
    def cached(self) -> int:
        """Keys and values of a token, in numbers."""
        return 2 * self.layers * self.groups * self.size

    def sampling(self, rows: int, prompt: int, tokens: int) -> float:
        """Seconds to read every weight and the filled part of the cache once a token, in bfloat16."""
        kept = rows * self.cached * (prompt + tokens / 2)
        return 2 * tokens * (self.read + kept) / BANDWIDTH

    def update(self, rows: int, prompt: int, tokens: int) -> float:
        """Seconds of the products of three passes: reference, policy, and the gradient of the policy's states."""
        head = self.hidden * self.vocabulary
        body = 2 * (self.read - head) * rows * (prompt + tokens) + 2 * head * rows * tokens
        scores = 2 * self.layers * self.heads * self.size * rows * (prompt + tokens) ** 2
        return (3 * body + 3.5 * scores) / PRODUCTS


SHAPES = {
    "test": Shape(64, 128, 2, 4, 2, 16, 512, True),
    "135m": Shape(576, 1536, 30, 9, 3, 64, 49152, True),
    "1b": Shape(2048, 8192, 16, 32, 8, 64, 128256, True),
    "8b": Shape(4096, 14336, 32, 32, 8, 128, 128256, False),
}


def make(name: str) -> str:
    """A folder with the configuration and a tokenizer of a shape."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as tokenizer_models
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    shape, folder = SHAPES[name], Path(tempfile.mkdtemp()) / name
    LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        head_dim=shape.size,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=16384,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    words = {w: i for i, w in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(shape.vocabulary - 3))])}
    inner = Tokenizer(tokenizer_models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    ).save_pretrained(folder)
    return str(folder)


def prompts(count: int, tokens: int) -> list[str]:
    """``count`` prompts of ``tokens`` tokens each."""
    return [" ".join(f"w{(31 * i + 7 * j) % 400}" for j in range(tokens)) for i in range(count)]


@contextlib.contextmanager
def random_models() -> Iterator[None]:
    """Models are made from their configuration, on their device, in place of being loaded."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def load_model(name: str, *, dtype: torch.dtype, device: Any, trust_remote_code: bool = False) -> Any:
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name), dtype=dtype)
        return model.to(device).eval()

    with mock.patch.object(models, "load_model", load_model):
        yield


def write_prompts(lines: list[str]) -> Path:
    """The prompts as a file."""
    file = Path(tempfile.mkdtemp()) / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": line}) for line in lines))
    return file
