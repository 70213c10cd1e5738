"""Rewards of many kinds for ``any_reward.py``; some of them were looked at while ``Hold`` was made, others were not.

Sparse ones ask for a word that few of the reference's completions hold. Which word that is depends on the model and is
found by :func:`calibrate`, together with the spread that each reward has at the start.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import fmean
from types import MappingProxyType
from typing import Any

Reward = Callable[..., list[float]]

DEVELOPMENT = ("sentiment", "vowels", "word 2 %", "never")
HELD_OUT = ("commas", "word 0.3 %", "noise", "format", "sentiment x 1000")
HELD_OUT_2 = ("letters", "avoid", "noisy sentiment")
"""Added when the first held-out half had been seen."""
HELD_OUT_3 = ("length", "distinct words", "positive", "turning", "by prompt")
"""Added when the law before this one was settled."""
HELD_OUT_4 = ("alliteration", "no e", "eight words", "late sentiment")
"""Added when the law's model was settled; alliteration was looked at again when BATCH and CALM were chosen."""
HELD_OUT_5 = ("capitals", "delayed", "heavy tails", "grade")
"""Written after the constants of the model; capitals was looked at when CALM was chosen."""
HELD_OUT_6 = ("first letter", "echo", "intermittent", "both")
"""Written later still; echo was looked at when CALM was chosen."""
HELD_OUT_7 = ("word 5 %", "long word", "alphabetical", "negative")
"""Written when all but CALM was settled; the 5 % word was looked at when the unit of the price was chosen."""
HELD_OUT_8 = ("word 10 %", "word 1 %", "exclamation", "last y")
"""Sparse ones, written when the unit of the price was chosen; none of them decided anything."""
HELD_OUT_9 = ("few prompts", "jackpot", "brevity", "repeats")
"""Written last of all; they decided nothing."""
HALVES = {
    "development": DEVELOPMENT,
    "held-out": HELD_OUT,
    "held-out-2": HELD_OUT_2,
    "held-out-3": HELD_OUT_3,
    "held-out-4": HELD_OUT_4,
    "held-out-5": HELD_OUT_5,
    "held-out-6": HELD_OUT_6,
    "held-out-7": HELD_OUT_7,
    "held-out-8": HELD_OUT_8,
    "held-out-9": HELD_OUT_9,
}
DECIDED = {
    "tiny": (
        *("vowels", "sentiment", "word 2 %", "commas", "format", "alliteration", "distinct words"),  # BATCH
        *("capitals", "word 5 %", "both", "delayed"),  # CALM; the unit of the price
    ),
    "smollm2": (
        *("letters", "echo", "capitals", "alliteration", "sentiment", "commas"),  # CALM
        *("vowels", "format", "distinct words", "eight words"),  # how fast a KL above its target is met
    ),
}
"""Rewards that something of the law was chosen on, by the model that it was run with."""
SPARSE = {"word 2 %": 0.02, "word 0.3 %": 0.003, "word 5 %": 0.05, "word 10 %": 0.1, "word 1 %": 0.01}
AVOIDED = {"avoid": 0.05}
"""Rewards for the absence of a word, by the share of the reference's completions that hold it."""
NOTHING = ("never", "noise")
"""Rewards that nothing can be learned from: no constant earns anything there."""
WHAT = {
    "sentiment": "VADER's score, dense",
    "vowels": "share of words that begin with a vowel, dense",
    "word 2 %": "holds a word that 2 % of the reference's completions hold",
    "never": "always 0",
    "commas": "commas, at most two, saturating",
    "word 0.3 %": "holds a word that 0.3 % hold",
    "noise": "a normal random number",
    "format": "at most 16 words and a full stop at the end, verifiable",
    "sentiment x 1000": "another scale",
    "letters": "mean letters of a word, dense",
    "avoid": "does not hold a word that 5 % hold: nearly always 1",
    "noisy sentiment": "VADER's score and twice as much noise",
    "length": "words of the completion, dense: KL per sequence and per token part ways",
    "distinct words": "share of words that are not repeated, dense and nearly saturated",
    "positive": "1 where VADER's score is above 0.5, a step",
    "turning": "vowels, and after 30 steps their absence",
    "by prompt": "vowels or their absence, by the prompt",
    "alliteration": "share of words that begin with the first one's letter, dense",
    "no e": "share of letters that are not e, dense, of a small scale",
    "eight words": "minus the words more or less than eight: the best lies between",
    "late sentiment": "VADER's score of the second half of the words: most of the completion counts for nothing",
    "capitals": "share of words with a capital, dense",
    "delayed": "0 for 20 steps, then letters",
    "heavy tails": "vowels and noise of Student's t with two degrees of freedom: a few numbers are far off",
    "grade": "letters in whole numbers from 3 to 6, as a judge with few grades: most groups hold ties",
    "first letter": "1 where the first word begins with a vowel: one token decides",
    "echo": "share of words that are in the prompt, too",
    "intermittent": "letters in every third batch, 0 in the others",
    "both": "1 where VADER's score is above 0 and no word has more than seven letters: two conditions at once",
    "word 5 %": "holds a word that 5 % hold",
    "long word": "1 where a word has ten letters or more",
    "alphabetical": "share of words that do not come before the word to their left in a dictionary, dense",
    "negative": "minus VADER's score: the policy has to turn round",
    "word 10 %": "holds a word that 10 % hold",
    "word 1 %": "holds a word that 1 % hold",
    "exclamation": "1 where there is an exclamation mark",
    "last y": "1 where the last word ends in a y",
    "few prompts": "letters for a quarter of the prompts, 0 for the others",
    "jackpot": "vowels, and 20 more where the 2 % word is held",
    "brevity": "minus the words: completions shrink",
    "repeats": "share of words that were there before: the reward of a policy that falls apart",
}


def sentiment(prompts: list[str], completions: list[str], *, scale: float = 1.0, **_: Any) -> list[float]:
    from klamp.train.rewards import vader

    return [scale * score for score in vader(prompts, completions)]


def vowels(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    words = [re.findall(r"[a-z]+", text.lower()) for text in completions]
    return [sum(w[0] in "aeiou" for w in each) / max(len(each), 1) for each in words]


def commas(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [min(text.count(","), 2) / 2 for text in completions]


def holds(prompts: list[str], completions: list[str], *, word: str, **_: Any) -> list[float]:
    return [float(word in re.findall(r"[a-z]+", text.lower())) for text in completions]


def letters(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    words = [re.findall(r"[a-z]+", text.lower()) for text in completions]
    return [sum(map(len, each)) / max(len(each), 1) for each in words]


def lacks(prompts: list[str], completions: list[str], *, word: str, **_: Any) -> list[float]:
    return [1.0 - held for held in holds(prompts, completions, word=word)]


def short_sentence(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [float(len(text.split()) <= 16 and text.rstrip().endswith(".")) for text in completions]


def length(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [float(len(text.split())) for text in completions]


def distinct(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    words = [re.findall(r"[a-z]+", text.lower()) for text in completions]
    return [len(set(each)) / max(len(each), 1) for each in words]


def positive(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [float(score > 0.5) for score in sentiment(prompts, completions)]


def by_prompt(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [v if len(p) % 2 else -v for p, v in zip(prompts, vowels(prompts, completions), strict=True)]


def alliteration(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    words = [re.findall(r"[a-z]+", text.lower()) for text in completions]
    return [sum(w[0] == each[0][0] for w in each) / len(each) if each else 0.0 for each in words]


def without_e(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    found = [re.findall(r"[a-z]", text.lower()) for text in completions]
    return [1 - each.count("e") / max(len(each), 1) for each in found]


def eight_words(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [-abs(len(text.split()) - 8.0) for text in completions]


def late_sentiment(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    halves = [" ".join((words := text.split())[len(words) // 2 :]) for text in completions]
    return sentiment(prompts, halves)


def capitals(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    words = [text.split() for text in completions]
    return [sum(w[0].isupper() for w in each) / max(len(each), 1) for each in words]


def grade(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [float(min(max(round(mean), 3), 6)) for mean in letters(prompts, completions)]


def first_letter(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [float(re.sub(r"[^a-z]", "", text.lower())[:1] in tuple("aeiou")) for text in completions]


def echo(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    pairs = [[re.findall(r"[a-z]+", text.lower()) for text in pair] for pair in zip(prompts, completions, strict=True)]
    return [sum(w in asked for w in told) / max(len(told), 1) for asked, told in pairs]


def both(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    longest = [max(map(len, re.findall(r"[a-z]+", text.lower())), default=0) for text in completions]
    return [float(s > 0 and n <= 7) for s, n in zip(sentiment(prompts, completions), longest, strict=True)]


def long_word(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [float(re.search(r"[a-z]{10}", text.lower()) is not None) for text in completions]


def exclamation(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [float("!" in text) for text in completions]


def last_y(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [float(re.search(r"y[^a-z]*$", text.lower()) is not None) for text in completions]


def few_prompts(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [m if len(p) % 4 == 0 else 0.0 for p, m in zip(prompts, letters(prompts, completions), strict=True)]


def jackpot(prompts: list[str], completions: list[str], *, word: str, **_: Any) -> list[float]:
    found = zip(vowels(prompts, completions), holds(prompts, completions, word=word), strict=True)
    return [v + 20 * held for v, held in found]


def brevity(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [-n for n in length(prompts, completions)]


def repeats(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [1 - share for share in distinct(prompts, completions)]


def alphabetical(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    words = [re.findall(r"[a-z]+", text.lower()) for text in completions]
    return [sum(a <= b for a, b in pairwise(each)) / max(len(each) - 1, 1) for each in words]


class Changing:
    """A reward that changes in the run: ``which`` says what it is in a batch, counted from 1."""

    def __init__(self, which: Callable[[int], Reward]) -> None:
        self.which, self.batches = which, 0

    def __call__(self, prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        self.batches += 1
        return self.which(self.batches)(prompts, completions)


def never(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


class Noise:
    """Normal random numbers, of a sequence of its own."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def __call__(self, prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [self.draw.gauss(0, 1) for _ in completions]


class Noisy(Noise):
    """VADER's score, whose spread is about 0.45, under noise of twice that."""

    def __call__(self, prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        noise = super().__call__(prompts, completions)
        return [score + 0.9 * n for score, n in zip(sentiment(prompts, completions), noise, strict=True)]


class HeavyTails(Noise):
    """Vowels, whose spread is about 0.12, under noise that has no variance."""

    def __call__(self, prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        noise = [self.draw.gauss(0, 1) / math.sqrt(self.draw.expovariate(1.0)) for _ in completions]
        return [v + 0.1 * n for v, n in zip(vowels(prompts, completions), noise, strict=True)]


def reward(name: str, words: dict[str, str], seed: int) -> Reward:
    """The reward called ``name``; ``words`` are those of the calibration."""
    if name in SPARSE:
        return partial(holds, word=words[name])
    if name in AVOIDED:
        return partial(lacks, word=words[name])
    if name == "jackpot":
        return partial(jackpot, word=words["word 2 %"])
    plain: dict[str, Reward] = {
        "sentiment": sentiment,
        "vowels": vowels,
        "commas": commas,
        "format": short_sentence,
        "never": never,
        "letters": letters,
        "noisy sentiment": Noisy(seed),
        "sentiment x 1000": partial(sentiment, scale=1000.0),
        "length": length,
        "distinct words": distinct,
        "positive": positive,
        "turning": Changing(lambda batch: vowels if batch <= 30 else consonants),
        "by prompt": by_prompt,
        "alliteration": alliteration,
        "no e": without_e,
        "eight words": eight_words,
        "late sentiment": late_sentiment,
        "capitals": capitals,
        "delayed": Changing(lambda batch: letters if batch > 20 else never),
        "heavy tails": HeavyTails(seed),
        "grade": grade,
        "first letter": first_letter,
        "echo": echo,
        "intermittent": Changing(lambda batch: letters if batch % 3 == 1 else never),
        "both": both,
        "long word": long_word,
        "alphabetical": alphabetical,
        "negative": partial(sentiment, scale=-1.0),
        "exclamation": exclamation,
        "last y": last_y,
        "few prompts": few_prompts,
        "brevity": brevity,
        "repeats": repeats,
    }
    return Noise(seed) if name == "noise" else plain[name]


def settled(name: str, words: dict[str, str]) -> Reward:
    """What the reward called ``name`` is in the last third of a run, free of noise of its own."""
    plain: dict[str, Reward] = {"noisy sentiment": sentiment, "turning": consonants}
    plain |= {"delayed": letters, "intermittent": letters, "heavy tails": vowels}
    return plain.get(name) or reward(name, words, 0)


def consonants(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [-v for v in vowels(prompts, completions)]


def calibrate(
    prompts: Sequence[str], completions: Sequence[str], group: int, chosen: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Words of sparse rewards, but for those ``chosen``; each reward's spread over groups of the reference's
    completions, and its mean."""
    present = Counter(w for text in completions for w in set(re.findall(r"[a-z]{4,}", text.lower())))
    words = dict(chosen)
    for name, share in (SPARSE | AVOIDED).items():
        wanted = share * len(completions)
        words.setdefault(name, min(present, key=lambda w: (abs(math.log(present[w] / wanted)), w)))
    spreads, means = {}, {}
    for name in (name for half in HALVES.values() for name in half):
        spreads[name] = _spread(reward(name, words, 0)(list(prompts), list(completions)), group)
        means[name] = fmean(settled(name, words)(list(prompts), list(completions)))
    shares = {name: present[w] / len(completions) for name, w in words.items()}
    return {"words": words, "shares": shares, "spreads": spreads, "means": means}


def _spread(values: Sequence[float], group: int) -> float:
    """RMS of group-normalised advantages: the root of the share of groups with signal."""
    groups = [values[i : i + group] for i in range(0, len(values), group)]
    return math.sqrt(sum(max(g) > min(g) for g in groups) / len(groups))
