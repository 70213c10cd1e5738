"""Rewards: plain functions of prompts, completions and the dataset's columns, one number a completion.

``reward(prompts, completions, **columns) -> sequence of floats``. Written on the command line as a built-in name or as
``module:function``. What a reward does wrong is said with the sample it did it to, or masked and counted. A function
that cannot be called so, or that needs a column which is not there, is refused before anything is sampled.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from klamp import models
from klamp.chat import Prompt, as_text
from klamp.config_io import imported
from klamp.errors import ConfigError, RewardError, require_number, shown, unknown
from klamp.train.config import RewardConfig

RewardFunction = Callable[..., Sequence[float]]


@dataclass(frozen=True)
class Scored:
    """Rewards of a step."""

    total: Tensor
    """[N] weighted sum; 0 where not valid."""
    valid: Tensor
    """[N] False where a reward failed and was masked."""
    parts: dict[str, Tensor]
    """[N] each function's own, unweighted."""
    advantages: Tensor | None = None
    """[N] given from outside, for groups of unequal size; None: GRPO's, from ``total`` and the group size."""
    told: Tensor | None = None
    """[N] with ``advantages``: True for sequences of a group that shows a signal; None: for those that have one."""
    weights: Tensor | None = None
    """[N] weight of each token of a sequence in the loss, with a mean of 1 over counted tokens; None: 1."""


def vader(prompts: list[Prompt], completions: list[str], **_: Any) -> list[float]:
    """VADER's compound sentiment of the completion, from -1 to 1."""
    return [float(_analyser().polarity_scores(text)["compound"]) for text in completions]


def length(prompts: list[Prompt], completions: list[str], *, target: float, **_: Any) -> list[float]:
    """``-|words - target| / target``: 0 at the wanted length."""
    return [-abs(len(text.split()) - target) / max(target, 1.0) for text in completions]


def regex(prompts: list[Prompt], completions: list[str], *, pattern: re.Pattern[str], **_: Any) -> list[float]:
    """1 where the pattern is found in the completion, 0 elsewhere."""
    return [float(pattern.search(text) is not None) for text in completions]


def match(prompts: list[Prompt], completions: list[str], *, column: str, **columns: Any) -> list[float]:
    """1 where the completion is the dataset's answer but for white space, 0 elsewhere."""
    answers = columns[column]
    return [float(text.strip() == str(answer).strip()) for text, answer in zip(completions, answers, strict=True)]


class Classifier:
    """The score of a sequence-classification model for prompt and completion: its only logit, or the last class's."""

    def __init__(self, name: str) -> None:
        self.tokenizer, self.model = models.load_classifier(name)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model.config.pad_token_id = self.tokenizer.pad_token_id

    @torch.no_grad()
    def __call__(self, prompts: list[Prompt], completions: list[str], **_: Any) -> list[float]:
        texts = [self._text(p, c) for p, c in zip(prompts, completions, strict=True)]
        batch = self.tokenizer(texts, return_tensors="pt", padding=True, truncation=True)
        scores = self.model(**batch.to(self.model.device)).logits[:, -1]
        return [float(s) for s in scores.float().cpu()]

    def _text(self, prompt: Prompt, completion: str) -> str:
        """Prompt and completion in a row; a conversation through the classifier's own template where it has one."""
        if isinstance(prompt, str):
            return prompt + completion
        if self.tokenizer.chat_template is None:
            return f"{as_text(prompt)}\n{completion}"
        turns = [*prompt, {"role": "assistant", "content": completion}]
        return str(self.tokenizer.apply_chat_template(turns, tokenize=False))


def resolve(name: str) -> RewardFunction:
    """The reward written as ``name``; everything but a reward model is checked without running it."""
    kind, colon, value = name.partition(":")
    if kind == "vader" and not colon:
        return vader
    if kind == "length":
        way_out = "It is a number of words, as in length:20."
        return partial(length, target=require_number(f"reward {name!r}", value, at_least=0, way_out=way_out))
    if kind == "regex":
        try:
            return partial(regex, pattern=re.compile(value))
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError(f"reward {shown(name)} is not a regular expression: {error}.") from None
    if kind == "match":
        return partial(match, column=value or "answer")
    if kind == "model":
        return Classifier(value)
    module, dot, function = name.rpartition(".")
    if dot and not colon and module.replace(".", "").isidentifier() and function.isidentifier():
        meant = f"{name}:function" if function == "py" else f"{module}:{function}"
        raise ConfigError(f"reward {name!r} has no colon. Write your own function as {meant}.")
    if not colon or not kind or not value:
        raise unknown(
            "reward", name, ("vader", "length:N", "regex:PATTERN", "match:COLUMN", "model:NAME", "module:function")
        )
    found: RewardFunction = imported("reward", name)
    return found


class Scorer:
    """Runs the configured rewards on a step's completions."""

    def __init__(self, config: RewardConfig, functions: Sequence[RewardFunction] | None = None) -> None:
        self.config = config
        given = list(functions) if functions is not None else [resolve(f) for f in config.functions]
        names = list(config.functions) if functions is None else [_label(f) for f in given]
        for name, function in zip(names, given, strict=True):
            _check_call(name, function)
        self.functions = dict(zip(_distinct(names), given, strict=True))
        self.weights = config.weights or (1.0,) * len(given)
        if len(self.weights) != len(given):
            raise ConfigError(
                f"‹reward.weights› has {len(self.weights)} entries for {len(given)} functions. Give one each."
            )

    def check_columns(self, columns: Iterable[str]) -> None:
        """Refuse a function that needs a column which the prompts do not have; names those that they have."""
        there = sorted(columns)
        for name, function in self.functions.items():
            for column in _needed(function):
                if column not in there:
                    have = f"the columns {', '.join(map(repr, there))}" if there else "no column beside the prompt"
                    raise ConfigError(
                        f"reward {name!r} needs the column {column!r}, and the prompts have {have}. Add it to the "
                        "lines of the prompts file, or name the one you mean."
                    )

    def __call__(self, prompts: list[Prompt], completions: list[str], columns: dict[str, list[Any]]) -> Scored:
        """Every function over every completion; :class:`RewardError` or a mask where one fails."""
        self.check_columns(columns)
        parts, valid = {}, torch.ones(len(completions), dtype=torch.bool)
        for name, function in self.functions.items():
            values = self._values(name, function, prompts, completions, columns)
            good = torch.tensor([_finite(v) for v in values], dtype=torch.bool)
            valid &= good
            parts[name] = torch.where(good, torch.tensor(values, dtype=torch.float64), 0.0)
        # Rounded once, so that sums that are equal on paper are equal.
        if not parts:
            raise ConfigError("there is no reward function. Pass at least one.")
        weighted = [weight * part for weight, part in zip(self.weights, parts.values(), strict=True)]
        total = torch.stack(weighted).sum(0).float()
        over = (valid & ~torch.isfinite(total)).nonzero().flatten().tolist()
        if over and self.config.on_error == "stop":
            raise RewardError(
                f"the weighted sum of the rewards is {float(total[over[0]])} for sample {over[0]}. Lower "
                f"‹reward.weights={self.weights}›, or set ‹reward.on_error=mask› to leave such samples out."
            )
        valid[over] = False
        return Scored(torch.where(valid, total, 0.0), valid, {name: part.float() for name, part in parts.items()})

    def _values(
        self,
        name: str,
        function: RewardFunction,
        prompts: list[Prompt],
        completions: list[str],
        columns: dict[str, Any],
    ) -> list[float]:
        """One number a completion, NaN where on_error=mask forgives what is none."""
        try:
            found = _listed(self._timed(name, function, prompts, completions, columns))
        except (ConfigError, KeyboardInterrupt):
            raise
        except _Slow as error:
            return self._failed(name, len(completions), str(error), None)
        except Exception as error:
            return self._one_by_one(name, function, (prompts, completions, columns), error)
        if isinstance(found, str):
            return self._failed(name, len(completions), f"returned {found}, not a list of {len(completions)} numbers")
        if len(found) != len(completions):
            what = f"returned {len(found)} rewards for {len(completions)} completions"
            return self._failed(name, len(completions), what)
        values = [_number(v) for v in found]
        bad = next((i for i, v in enumerate(values) if not _finite(v)), None)
        if bad is not None and self.config.on_error == "stop":
            raise RewardError(
                f"reward {name!r} is {shown(_plain(found[bad]), 80)} for {_sample(bad, prompts, completions)}. Return "
                "a finite number, or set ‹reward.on_error=mask› to leave such samples out."
            )
        return values

    def _one_by_one(self, name: str, function: RewardFunction, args: tuple[Any, ...], cause: Exception) -> list[float]:
        """After a reward raised: each sample alone, to name the one that made it raise, or to mask no others."""
        prompts, completions, columns = args
        values = []
        for i in range(len(completions)):
            one = [prompts[i]], [completions[i]], {k: [v[i]] for k, v in columns.items()}
            try:
                found = _listed(self._timed(name, function, *one))
            except _Slow as error:
                return self._failed(name, len(completions), str(error), cause)
            except Exception as error:
                if self.config.on_error == "stop":
                    raise RewardError(
                        f"reward {name!r} raised {type(error).__name__} ({error}) for "
                        f"{_sample(i, prompts, completions)}. Fix it, or set ‹reward.on_error=mask› to leave such "
                        "samples out."
                    ) from cause
                found = [math.nan]
            values.append(_number(found[0]) if len(found) == 1 else math.nan)
        if self.config.on_error == "stop" or not any(map(math.isnan, values)):  # it is the batch that it cannot take
            what = f"raised {type(cause).__name__} for the batch and for none of its samples: {cause}"
            return self._failed(name, len(completions), what, cause)
        return values

    def _failed(self, name: str, count: int, what: str, cause: Exception | None = None) -> list[float]:
        if self.config.on_error == "mask":
            return [math.nan] * count
        raise RewardError(f"reward {name!r} {what}. Fix it, or set ‹reward.on_error=mask› to go on without.") from cause

    def _timed(self, name: str, function: RewardFunction, *args: Any) -> Sequence[float]:
        prompts, completions, columns = args
        call = partial(function, prompts, completions, **_accepted(function, columns))
        if self.config.timeout is None:
            return call()
        return _within(self.config.timeout, call)


def _listed(found: object) -> list[Any] | str:
    """What a reward returned as a list, or in words where it is no list of anything."""
    if found is None:
        return "None (is its `return` missing?)"
    if isinstance(found, str | bytes | Mapping):
        return f"a {type(found).__name__}"
    try:
        return list(found)  # type: ignore[call-overload,no-any-return]
    except TypeError:  # a number, a tensor without a dimension
        return shown(_plain(found), 80)


def _number(value: object) -> float:
    """The value as a float; NaN for None, text and whatever else is no number."""
    if value is None or isinstance(value, str | bytes):
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def _plain(value: object) -> object:
    """A number of torch or numpy as Python's own, for a message."""
    number = _number(value)
    return value if isinstance(value, str | bytes) or value is None or math.isnan(number) else number


def _sample(index: int, prompts: list[Prompt], completions: list[str]) -> str:
    prompt, completion = shown(as_text(prompts[index])), shown(completions[index])
    return f"sample {index}: prompt {prompt}, completion {completion}"


def _finite(value: float) -> bool:
    """Whether float32, in which rewards are used, holds the value."""
    return abs(value) <= torch.finfo(torch.float32).max


class _Slow(Exception):
    """A reward took longer than it may."""

    def __str__(self) -> str:
        return f"took more than ‹reward.timeout={self.args[0]:g}› s"


def _within(seconds: float, call: Callable[[], Sequence[float]]) -> Sequence[float]:
    """``call()``, given up after ``seconds``. Its thread is a daemon: one that hangs cannot keep the process."""
    done: list[Sequence[float]] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            done.append(call())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not done:
        raise _Slow(seconds)
    return done[0]


def _parameters(function: RewardFunction) -> list[inspect.Parameter] | None:
    """The function's parameters; None where it does not tell them, as some of C's do not."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def _check_call(name: str, function: RewardFunction) -> None:
    """Refuse a function that cannot be called as ``f(prompts, completions, **columns)``."""
    parameters = _parameters(function)
    if parameters is None:
        return
    placed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    enough = len(placed) >= 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if not enough or (placed and placed[0].name == "completions"):
        raise ConfigError(
            f"reward {name!r} is written f{inspect.signature(function)}, and klamp calls f(prompts, completions, "
            "**columns). Write `def f(prompts, completions, **columns)`; docs/rewards.md has a wrapper for TRL's."
        )


def _needed(function: RewardFunction) -> list[str]:
    """The columns that the function cannot do without."""
    if isinstance(function, partial) and function.func is match:
        return [str(function.keywords["column"])]
    parameters = _parameters(function) or []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    placed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:2]
    return [p.name for p in parameters if p.kind in named and p not in placed and p.default is p.empty]


def _accepted(function: RewardFunction, columns: dict[str, Any]) -> dict[str, Any]:
    """The columns the function takes: all with ``**``, otherwise those it names."""
    parameters = _parameters(function)
    if parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return columns
    names = {p.name for p in parameters}
    return {k: v for k, v in columns.items() if k in names}


def _label(function: Any) -> str:
    return str(getattr(function, "__name__", None) or getattr(getattr(function, "func", None), "__name__", "reward"))


def _distinct(names: list[str]) -> list[str]:
    return [f"{n}#{names[:i].count(n) + 1}" if names.count(n) > 1 else n for i, n in enumerate(names)]


@functools.cache
def _analyser() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ModuleNotFoundError:
        raise ConfigError("reward 'vader' needs the package vaderSentiment. pip install 'klamp[train]'.") from None
    return SentimentIntensityAnalyzer()
