"""The sentence and the checks say what the numbers say, whoever won."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from klamp.results.records import Record, Series
from klamp.results.statistics import Comparison, Interval
from klamp.results.verdict import _no_worse, judge


def run(kl: float, reward: float, perplexity: float, seed: int, noise: float = 0.02) -> Record:
    rng = random.Random(f"{kl} {reward} {seed}")
    record = Record(Path("made"), config={"seed": seed})
    for step in range(1, 61):
        rise = min(1, step / 10)
        values = {"kl/steered": rise * kl, "reward/mean": rise * reward, "heldout/perplexity": perplexity}
        for key, value in {**values, "kl/beta": 0.04}.items():
            record.series.setdefault(key, Series()).add(step, value * (1 + noise * rng.gauss(0, 1)))
    return record


def comparison(seeds: int = 3, **arms: tuple[float, float, float]) -> Comparison:
    made = {name.replace("_", "-"): [run(*values, seed) for seed in range(seeds)] for name, values in arms.items()}
    reference = {"perplexity": {"heldout": 9.0, "reference": 6.0}, "probes": []}
    return Comparison(Path("made"), 0.05, "token", made, {}, None, reference)


def test_a_win_is_told_with_its_numbers_and_its_price() -> None:
    said = judge(comparison(static=(1.0, 0.95, 18.0), hold=(0.05, 0.5, 9.3)))
    assert said.sentence.startswith("hold kept KL closer to its target of 0.05 nats per token than static did (100.0 %")
    assert re.search(r"perplexity was 4\d % lower \(95 % interval -\d+ % to -\d+ %\)", said.sentence)
    assert re.search(r"reward 0\.4\d* lower", said.sentence)
    assert said.sentence.endswith("what static gained in reward it paid for in English.")
    assert said.arms["hold"] == "holds the band"
    assert "shoots past the band" in said.arms["static"]
    assert "English degraded" in said.arms["static"]


@pytest.mark.parametrize(
    ("arms", "headline"),
    [
        ({"static": (1.0, 0.95, 18.0), "hold": (0.05, 0.5, 9.3)}, "hold kept KL in band for 100.0 % of steps, static"),
        ({"static": (0.05, 0.6, 9.2), "hold": (0.2, 0.5, 9.2)}, "No adaptive arm kept KL closer to its target than"),
        ({"static": (0.001, 0.6, 9.2), "hold": (0.002, 0.5, 9.2)}, "No run entered the band within 60 steps."),
        ({"hold": (0.05, 0.5, 9.2)}, "Nearest to the target was hold: in band for 100.0 % of steps."),
        (
            {"static": (0.2, 0.6, 9.2), "hold_price": (0.05, 0.5, 9.2)},
            "hold-price kept KL in band for 100.0 % of steps,",
        ),
    ],
)
def test_the_headline_has_at_most_fifteen_words(arms: dict[str, tuple[float, float, float]], headline: str) -> None:
    said = judge(comparison(**arms))
    assert said.headline.startswith(headline)
    assert len(said.headline.split()) <= 15
    assert len(said.sentence.split()) > 15, "the rest stands below it"


def test_a_loss_is_told_as_one() -> None:
    said = judge(comparison(static=(0.05, 0.6, 9.2), hold=(0.2, 0.5, 9.2)))
    assert said.sentence.startswith("No adaptive arm kept KL closer")
    assert "did not win" in said.sentence
    assert [c.holds for c in said.checks] == [False, False]


def test_a_collapse_is_told_though_its_size_differs_by_powers_of_ten_between_seeds() -> None:
    made = comparison(static=(1.5, 0.99, 1e3), hold=(0.05, 0.6, 9.3))
    made.arms["static"] = [run(1.5, 0.99, 10.0**power, seed) for seed, power in enumerate((2, 6, 14))]
    said = judge(made)
    assert re.search(r"perplexity was like the reference's, where static's was [\d.]+e\+\d+ times it", said.sentence)
    assert said.sentence.endswith("what static gained in reward it paid for in English.")


def test_what_cannot_be_told_apart_is_not_told_apart() -> None:
    said = judge(comparison(static=(0.05, 0.5, 9.2), hold=(0.0501, 0.5, 9.2)))
    assert said.sentence.count("not clearly different (95 % interval") == 2


def test_one_seed_gives_no_interval_and_says_so() -> None:
    said = judge(comparison(1, static=(1.0, 0.9, 18.0), hold=(0.05, 0.5, 9.3)))
    assert said.sentence.count("(one seed, no interval)") == 2


def test_without_a_static_arm_the_nearest_is_named() -> None:
    said = judge(comparison(ziegler=(0.3, 0.9, 11.0), hold=(0.05, 0.5, 9.3)))
    assert "Nearest to the target of 0.05 nats per token was hold" in said.sentence


def test_nobody_in_band_is_said_and_nothing_is_ticked() -> None:
    made = with_constants(comparison(static=(0.03, 0.4, 9.1), hold=(0.01, 0.3, 9.0), hold_price=(0.02, 0.3, 9.0)))
    quiet = {name: [run(0.01, 0.3, 9.0, seed) for seed in range(3)] for name in made.constants}
    said = judge(replace(made, constants=quiet))
    assert said.sentence.startswith("No run entered the band of 0.8 to 1.2 times 0.05 nats per token within 60 steps")
    assert "static came nearest, with KL 0.03. Give more steps (--steps)" in said.sentence
    assert said.arms["hold"] == "stays below the band"
    assert len(said.checks) == 6
    assert {(c.found, c.holds) for c in said.checks} == {("never in band within 60 steps", None)}


def test_nobody_in_band_for_a_kl_that_went_past_it() -> None:
    said = judge(comparison(static=(9.0, 0.4, 9.1), hold=(8.0, 0.3, 9.0)))
    assert "hold came nearest, with KL 8" in said.sentence
    assert said.sentence.endswith("give a lower learning rate (--lr).")
    assert [c.holds for c in said.checks] == [False, False]


def test_a_seed_that_never_entered_keeps_a_promise_from_being_kept() -> None:
    made = comparison(static=(1.0, 0.9, 18.0), hold=(0.05, 0.5, 9.3))
    made.arms["hold"][2] = run(0.01, 0.5, 9.3, 2)
    said = judge(made)
    assert [c.holds for c in said.checks] == [None, None]
    assert "2 of 3 seeds entered the band" in said.checks[0].found


@pytest.mark.parametrize(
    ("interval", "margin", "higher", "holds"),
    [
        (Interval(0.0437, 0.0232, 0.0641), 0.03, True, True),
        (Interval(-0.00673, -0.207, 0.194), 0.05 * 9.5, False, True),
        (Interval(-0.01, -0.02, 0.01), 0.03, True, True),
        (Interval(0.1, -0.9, 1.1), 0.03, True, None),
        (Interval(0.1, -0.9, 1.1), 0.03, False, None),
        (Interval(-0.02, -0.03, -0.01), 0.04, True, False),
        (Interval(0.2, 0.1, 0.3), 0.04, False, False),
        (Interval(0.1), 0.03, True, None),
    ],
)
def test_no_worse_is_shown_by_an_interval_that_says_something(
    interval: Interval, margin: float, higher: bool, holds: bool | None
) -> None:
    check = _no_worse("x", interval, margin, higher=higher)
    assert check.holds is holds
    wide = holds is None and not math.isnan(interval.low)
    assert ("too wide to show it: the margin is" in check.found) is wide
    assert check.found.startswith(str(interval))


def with_constants(made: Comparison) -> Comparison:
    kls = (0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1)
    constants = {f"beta={k}": [run(k, 0.28 + k**0.5, 9 + 6 * k, s, 0.002) for s in range(3)] for k in kls}
    return replace(made, constants=constants, oracle="beta=0.05")


def test_against_constants_reward_and_perplexity_are_judged_at_equal_kl() -> None:
    made = comparison(static=(1.0, 0.9, 18.0), hold=(0.05, 0.5, 9.3), hold_price=(0.055, 0.5, 9.3))
    made = with_constants(made)
    said = judge(made)
    found = {c.what: c.holds for c in said.checks}
    assert len(found) == 6
    assert all(holds is not None for holds in found.values())
    assert said.figures[-1].arm == "oracle"


@pytest.mark.parametrize(
    ("interval", "text"),
    [(Interval(0.5), "+0.5"), (Interval(-0.25, -0.5, 0.0), "-0.25 [-0.5, +0]")],
)
def test_intervals_read_well(interval: Interval, text: str) -> None:
    assert str(interval) == text
