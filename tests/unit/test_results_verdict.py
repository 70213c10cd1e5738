"""The sentence and the checks say what the numbers say, whoever won."""

from __future__ import annotations

import io
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from klamp.results.promises import Check, _no_higher, gain_of
from klamp.results.records import Record, Series
from klamp.results.statistics import Comparison, Interval
from klamp.results.verdict import arms_table, judge

TARGET, LIMIT = 0.05, 0.055


def run(kl: float, reward: float, perplexity: float, seed: int, noise: float = 0.02, silent: float = 0.1) -> Record:
    rng = random.Random(f"{kl} {reward} {seed}")
    record = Record(Path("made"), config={"seed": seed})
    for step in range(1, 61):
        rise = min(1, step / 10)
        values = {"kl/steered": rise * kl, "reward/mean": rise * reward, "heldout/perplexity": perplexity}
        for key, value in {**values, "kl/beta": 0.04}.items():
            record.series.setdefault(key, Series()).add(step, value * (1 + noise * rng.gauss(0, 1)))
        at_end = (kl, 0.03) if step == 60 else (math.nan, math.nan)
        values = {"kl/noise": noise, "reward/no_signal": silent, "kl/fresh": at_end[0], "kl/fresh_noise": at_end[1]}
        for key, value in values.items():
            record.series.setdefault(key, Series()).add(step, value)
    return record


def kept(made: Comparison) -> dict[str, bool | None]:
    """The checks by what they begin with."""
    names = {
        "hold gains": "gain",
        "hold-price gains": "gain of price",
        "held-out": "english",
        "KL of hold at the end": "end",
        "KL of hold in every": "way",
        "the clamp": "effort",
        "hold in band": "band",
        "highest KL of hold-price": "highest",
        "hold-price within": "near",
        "hold-price in band": "oracle",
    }
    return {name: c.holds for c in judge(made).checks for start, name in names.items() if c.what.startswith(start)}


def check(made: Comparison, start: str) -> Check:
    return next(c for c in judge(made).checks if c.what.startswith(start))


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
        (
            {"static": (1.0, 0.95, 18.0), "hold": (0.05, 0.5, 9.3)},
            "KL in band over the second half: hold 100.0 %, static never.",
        ),
        ({"static": (0.05, 0.6, 9.2), "hold": (0.2, 0.5, 9.2)}, "No adaptive arm kept KL closer to its target than"),
        ({"static": (0.001, 0.6, 9.2), "hold": (0.002, 0.5, 9.2)}, "No run entered the band within 60 steps."),
        ({"hold": (0.05, 0.5, 9.2)}, "Nearest to the target was hold: 100.0 % of the second half in band."),
        (
            {"static": (0.2, 0.6, 9.2), "hold_price": (0.05, 0.5, 9.2)},
            "KL in band over the second half: hold-price 100.0 %, static 0.0 %.",
        ),
    ],
)
def test_the_headline_has_at_most_fifteen_words(arms: dict[str, tuple[float, float, float]], headline: str) -> None:
    said = judge(comparison(**arms))
    assert said.headline.startswith(headline)
    assert len(said.headline.split()) <= 15
    assert len(said.sentence.split()) > 15, "the rest stands below it"


def test_a_loss_is_told_as_one() -> None:
    made = comparison(static=(0.05, 0.6, 9.2), hold=(0.2, 0.5, 9.2))
    said = judge(made)
    assert said.sentence.startswith("No adaptive arm kept KL closer")
    assert "did not win" in said.sentence
    assert kept(made) == {"gain": None, "end": False, "way": False, "effort": None, "band": False}


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
    assert len(said.checks) == 10
    begun_by_the_band = [c for c in said.checks if "constant" not in c.what]
    assert {c.holds for c in begun_by_the_band} == {None}
    assert {c.found for c in begun_by_the_band} == {
        "never in band within 60 steps",
        "0.18 × its limit (± 6 %)",
        "not measured",
    }


def test_nobody_in_band_for_a_kl_that_went_past_it() -> None:
    made = comparison(static=(9.0, 0.4, 9.1), hold=(8.0, 0.3, 9.0))
    said = judge(made)
    assert "hold came nearest, with KL 8" in said.sentence
    assert said.sentence.endswith("give a lower learning rate (--lr).")
    assert {name for name, holds in kept(made).items() if holds is False} == {"end", "way", "band"}


def test_a_seed_that_never_entered_keeps_a_promise_from_being_kept() -> None:
    made = comparison(static=(1.0, 0.9, 18.0), hold=(0.05, 0.5, 9.3))
    made.arms["hold"][2] = run(0.01, 0.5, 9.3, 2)
    assert set(kept(made).values()) == {None}
    assert "2 of 3 seeds entered the band" in check(made, "hold in band").found


def with_reading(reading: float, noise: float, *, fresh: float = 1.0, fresh_noise: float = 0.03) -> Comparison:
    """Three runs that hold the target; one has a reading of so many targets, and ends at so many limits."""
    made = comparison(hold=(0.05, 0.5, 9.3))
    found = made.arms["hold"][1].series
    found["kl/steered"].values[40], found["kl/noise"].values[40] = reading * TARGET, noise
    found["kl/fresh"].values[-1], found["kl/fresh_noise"].values[-1] = fresh * LIMIT, fresh_noise
    return made


@pytest.mark.parametrize(
    ("reading", "noise", "holds"),
    [
        (1.22, 0.08, True),  # a KL of 1.05 targets reads 1.22 now and then
        (1.20, 0.0, True),
        (1.22, 0.0, False),  # 1.21 targets are 1.1 limits
        (1.50, 0.08, False),  # no KL below 1.29 targets reads 1.5
        (3.00, 0.50, False),  # a noise of half the KL excuses a factor of two, not of three
    ],
)
def test_a_reading_is_judged_by_what_it_shows_beyond_its_own_noise(reading: float, noise: float, holds: bool) -> None:
    made = with_reading(reading, noise)
    assert kept(made)["way"] is holds
    assert judge(made).arms["hold"].startswith("holds the band") is holds
    assert f"highest reading {reading:.2f} × target" in check(made, "KL of hold in every").found


def test_a_limit_that_is_passed_before_the_band_is_entered_is_passed() -> None:
    made = comparison(hold=(0.05, 0.5, 9.3))
    made.arms["hold"][0].series["kl/steered"].values[0] = 2 * TARGET
    assert kept(made)["way"] is False


@pytest.mark.parametrize(
    ("fresh", "noise", "holds"), [(1.09, 0.03, True), (1.13, 0.03, None), (1.3, 0.03, False), (1.3, 0.2, None)]
)
def test_the_last_policy_is_judged_on_fresh_samples(fresh: float, noise: float, holds: bool | None) -> None:
    made = with_reading(1.0, 0.02, fresh=fresh, fresh_noise=noise)
    assert kept(made)["end"] is holds
    assert check(made, "KL of hold at the end").found.startswith(f"{fresh:.2f} × its limit (± {196 * noise:.0f} %)")


@pytest.mark.parametrize(
    ("reading", "noise", "holds"),
    [(0.75, 0.01, False), (0.75, 0.08, None), (1.3, 0.02, False), (1.3, 0.06, None), (0.85, 0.0, True)],
)
def test_readings_out_of_the_band_by_their_noise_alone_decide_nothing(
    reading: float, noise: float, holds: bool | None
) -> None:
    made = comparison(hold=(0.05, 0.5, 9.3))
    for record in made.arms["hold"]:
        for i in range(40, 60, 2):  # a third of the second half
            record.series["kl/steered"].values[i], record.series["kl/noise"].values[i] = reading * TARGET, noise
    assert kept(made)["band"] is holds
    assert ("100.0 % within the noise of the readings" in check(made, "hold in band").found) is (holds is None)


def test_a_kl_that_leaps_over_the_band_counts_as_its_highest() -> None:
    made = comparison(hold_price=(0.05, 0.5, 9.3))
    for record in made.arms["hold-price"]:
        for step in range(2, 6):
            record.series["kl/steered"].values[step] = 4 * TARGET
    found = check(made, "highest KL of hold-price")
    assert (found.holds, found.found[:3]) == (False, "4.0")


def test_a_seed_beyond_the_constants_leaves_the_gain_open() -> None:
    made = comparison(hold=(0.05, 0.5, 9.3))
    made.constants.update(
        {i: [run(kl, 0.5, 9.3, seed) for seed in range(3)] for i, kl in enumerate((0.03, 0.05, 0.08))}
    )
    assert check(made, "hold gains").holds is not None
    made.arms["hold"][1] = run(0.25, 0.05, 9.3, 1)
    found = check(made, "hold gains")
    assert found.holds is None
    assert "no constants enclose the KL of 1 of 3 seeds" in found.found


def test_one_bad_seed_is_enough_whichever_reads_highest() -> None:
    made = with_reading(1.0, 0.02, fresh=1.3, fresh_noise=0.2)  # the highest, and within its noise
    last = made.arms["hold"][2].series
    last["kl/fresh"].values[-1], last["kl/fresh_noise"].values[-1] = 1.25 * LIMIT, 0.01
    assert kept(made)["end"] is False


def test_runs_without_a_fresh_reading_or_its_noise_are_judged_by_what_they_have() -> None:
    made = comparison(hold=(0.05, 0.5, 9.3))
    for record in made.arms["hold"]:
        for key in ("kl/noise", "kl/fresh", "kl/fresh_noise"):
            del record.series[key]
    assert kept(made) == {"gain": None, "end": None, "way": True, "effort": None, "band": True}
    assert check(made, "KL of hold at the end").found.startswith("not measured")


@pytest.mark.parametrize(("effort", "holds"), [(0.02, True), (0.04, False)])
def test_effort_beyond_three_percent_is_told(effort: float, holds: bool) -> None:
    made = comparison(hold=(0.05, 0.5, 9.3))
    for record in made.arms["hold"]:
        for step in range(1, 61):
            record.series.setdefault("kl/clamp/effort", Series()).add(step, effort)
    assert kept(made)["effort"] is holds


@pytest.mark.parametrize(("silent", "holds"), [(0.1, False), (0.9, True)])
def test_without_the_clamp_a_sparse_reward_may_reach_twice_the_target(silent: float, holds: bool) -> None:
    made = comparison(hold_price=(0.05, 0.5, 9.3))
    made.arms["hold-price"] = [run(0.05, 0.5, 9.3, seed, silent=silent) for seed in range(3)]
    made.arms["hold-price"][1].series["kl/steered"].values[30] = 1.8 * TARGET
    assert kept(made)["highest"] is holds
    assert ("(sparse reward)" in check(made, "highest KL of hold-price").what) is holds


def test_without_the_clamp_the_mean_is_near_the_target() -> None:
    assert kept(comparison(hold_price=(0.057, 0.5, 9.3)))["near"] is True
    assert kept(comparison(hold_price=(0.065, 0.5, 9.3)))["near"] is False


@pytest.mark.parametrize(
    ("interval", "margin", "holds"),
    [
        (Interval(-0.00673, -0.207, 0.194), 0.05 * 9.5, True),
        (Interval(0.1, -0.9, 1.1), 0.03, None),
        (Interval(0.2, 0.1, 0.3), 0.04, False),
        (Interval(0.02, 0.01, 0.03), 0.04, False),
        (Interval(-0.2, -0.3, -0.1), 0.04, True),
        (Interval(0.1), 0.03, None),
    ],
)
def test_no_higher_is_shown_by_an_interval_that_says_something(
    interval: Interval, margin: float, holds: bool | None
) -> None:
    found = _no_higher("x", interval, margin)
    assert found.holds is holds
    wide = holds is None and not math.isnan(interval.low)
    assert ("too wide to show it: the margin is" in found.found) is wide
    assert found.found.startswith(str(interval))


def with_constants(made: Comparison) -> Comparison:
    kls = (0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1)
    constants = {f"beta={k}": [run(k, 0.28 + k**0.5, 9 + 6 * k, s, 0.002) for s in range(3)] for k in kls}
    return replace(made, constants=constants, oracle="beta=0.05")


def test_reward_at_equal_kl_comes_first_in_checks_headline_and_sentence() -> None:
    made = with_constants(comparison(static=(1.0, 0.9, 18.0), hold=(0.05, 0.52, 9.3), hold_price=(0.055, 0.52, 9.3)))
    said = judge(made)
    assert list(kept(made))[:3] == ["gain", "gain of price", "english"]
    assert {name for name, holds in kept(made).items() if holds is not True} == {"effort"}, "which these runs lack"
    assert len(kept(made)) == 10
    assert said.figures[-1].arm == "oracle"
    gained = 100 * gain_of(made, "hold").mean
    assert gained == pytest.approx(100 * 0.52 / (0.28 + 0.05**0.5), abs=2)
    assert said.headline == f"hold gained {gained:.0f} % of the reward of constant prices at the same KL."
    assert len(said.headline.split()) <= 15
    assert said.sentence.startswith(
        f"hold gained {gained:.0f} % of the reward that constant prices gain at the same KL"
    )


@pytest.mark.parametrize(
    ("reward", "spread", "holds"),
    [(0.52, 0.002, True), (0.45, 0.002, False), (0.5, 0.1, None)],  # constants get 0.504
)
def test_a_gain_is_kept_broken_or_too_uncertain(reward: float, spread: float, holds: bool | None) -> None:
    made = comparison(hold=(0.05, reward, 9.3))
    made.arms["hold"] = [run(0.05, reward + spread * (seed - 1), 9.3, seed, 0.002) for seed in range(3)]
    assert kept(with_constants(made))["gain"] is holds


def test_without_constants_the_gain_is_still_promised_first_with_the_way_to_measure_it() -> None:
    said = judge(comparison(static=(1.0, 0.9, 18.0), hold=(0.05, 0.5, 9.3)))
    assert said.checks[0].what == "hold gains 97 % of the reward that constants gain at the same KL, or more"
    assert (said.checks[0].found, said.checks[0].holds) == ("not measured: add --oracle", None)


@pytest.mark.parametrize(
    ("interval", "text"),
    [(Interval(0.5), "+0.5"), (Interval(-0.25, -0.5, 0.0), "-0.25 [-0.5, +0]")],
)
def test_intervals_read_well(interval: Interval, text: str) -> None:
    assert str(interval) == text


@pytest.mark.parametrize("width", [80, 90, 100, 106, 116, 160])
def test_every_arm_and_what_it_did_can_be_read_in_a_terminal_of_any_width(width: int) -> None:
    arms = {"static": (2.65, 12.95, 1874.0), "exponential": (0.3, 0.5, 9.3), "hold_price": (0.05, 0.5, 9.3)}
    constants = {"beta=0.0743": [run(0.051, 0.5, 9.3, seed) for seed in range(3)]}
    said = judge(replace(comparison(**arms), constants=constants, oracle="beta=0.0743"))
    console = Console(width=width, file=io.StringIO())
    console.print(arms_table(said, width))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    for row in said.figures:
        figures = (f"{row.reward:.3f}", f"{row.kl:.4f}", f"{row.fresh:.2f} ×", f"{row.beta:.3g}")
        assert any(row.arm in line and all(f in line for f in figures) for line in lines), row.arm
        verdict = said.arms[row.arm].split(";")[0]
        assert any(line.split()[:1] == [row.arm] and verdict in line for line in lines), verdict
    assert not any("…" in line for line in lines)
    assert "beta=0.0743" in "".join(lines)
    assert any("entropy" in line for line in lines) is (width >= 106), "what there is room for is shown"
