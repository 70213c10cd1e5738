"""The random numbers of a run: seeds mixed from several numbers, and the generators' states saved and restored."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy
import torch


def mix(*numbers: int) -> int:
    """One seed of several numbers (FNV-1a over their bytes): the same everywhere, different for each tuple."""
    value = 0xCBF29CE484222325
    for number in numbers:
        for byte in int(number).to_bytes(8, "little", signed=True):
            value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value >> 1


def seed_everything(seed: int, process: int) -> None:
    """The same start for torch in every process, and one of its own in each for what rewards may draw from."""
    torch.manual_seed(mix(seed, 1))
    random.seed(mix(seed, 1, process))
    numpy.random.seed(mix(seed, 1, process) % 2**32)  # noqa: NPY002 (the generator that others' rewards draw from)


def random_state() -> dict[str, Any]:
    """What torch, Python and NumPy will draw from next in this process, as JSON values."""
    state: dict[str, Any] = {"torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()}
    version, numbers, gauss = random.getstate()
    state["python"] = [version, list(numbers), gauss]
    kind, keys, *rest = numpy.random.get_state(legacy=True)  # noqa: NPY002
    state["numpy"] = [kind, [int(k) for k in keys], *rest]
    if torch.cuda.is_available():
        state["cuda"] = base64.b64encode(torch.cuda.get_rng_state().numpy().tobytes()).decode()
    return state


def restore_random(state: dict[str, Any]) -> None:
    """Draw again from what :func:`random_state` saw."""
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state["torch"])), dtype=torch.uint8))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    numpy.random.set_state(tuple(state["numpy"]))  # noqa: NPY002
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state["cuda"])), dtype=torch.uint8))
