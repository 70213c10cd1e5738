"""Policy-gradient plants: small softmax policies really trained with group-normalised advantages, Adam and a KL loss.

R runs are trained side by side. A run: 8 prompts, vocabulary 8, 8 tokens, 16 samples a prompt; the policy is a Markov
chain per prompt, ``logits = ref + features B`` with 8 fixed random features and B trained from 0, as lora_B is.
Shapes: C = 72 contexts (prompt, previous token or start), V = 8, N = 128 sequences, T = 8 tokens. ``ramp`` sets the
learning rate: that many unpenalised steps carry sqrt(KL) to sqrt(target).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
PROMPTS, V, T, GROUP, RANK = 8, 8, 8, 16, 8
CONTEXTS, N = PROMPTS * (V + 1), PROMPTS * GROUP
KINDS = ("additive", "saturating", "bigram", "mostly unlearnable", "sparse binary")
RARE = {"2 %": 0.02, "0.3 %": 0.003}
"""Sparse rewards by the share of the reference's samples that have them."""
NOTHING = ("pure noise", "never fires")
ALL_KINDS = (*KINDS, *RARE, *NOTHING)
RAMPS = (2.5, 8.0, 25.0, 80.0)


def horizon(ramp: float) -> int:
    """Steps of a run: 200, or 600 where the climb alone takes 80."""
    return 600 if ramp >= 80 else 200


@dataclass(frozen=True)
class Runs:
    """What is fixed in R training runs."""

    ref: Array
    """Reference log-probs [R, C, V]."""
    features: Array
    """[R, C, RANK]."""
    values: Array
    """Reward of a token [R, V], of a pair [R, V + 1, V] for the bigram kind."""
    kind: NDArray[np.int64]
    threshold: Array
    noise: Array
    """Extra multiplicative noise on the measured KL, 0 to 15 %."""
    decays: NDArray[np.bool_]
    """Whether the learning rate falls linearly to a tenth over the run."""
    sampled: NDArray[np.bool_]
    """Whether the KL loss is k3 on the sampled tokens; otherwise over the full vocabulary."""
    target: Array
    """Nats per token."""
    lr: Array
    steps: int
    seed: int
    copies: int = 1
    """How many neighbours repeat one run and share its noise."""

    def __len__(self) -> int:
        return len(self.lr)

    def repeat(self, times: int) -> Runs:
        """Each run ``times`` times in a row, with the same noise, to try several prices on it."""
        arrays = {k: np.repeat(v, times, 0) for k, v in vars(self).items() if isinstance(v, np.ndarray)}
        return replace(self, **arrays, copies=self.copies * times)

    @property
    def feed_forward(self) -> Array:
        """``1 / sqrt(2 KL per sequence)`` for advantages of unit spread."""
        return 1 / np.sqrt(2 * self.target * T)


def draw(seed: int, n: int, ramp: float, kinds: Sequence[str] = KINDS) -> Runs:
    """``n`` runs whose learning rate is set by ``ramp``, their rewards taken in turn from ``kinds``."""
    rng = np.random.default_rng([seed, int(10 * ramp)])
    ref = rng.normal(0, 0.7, (n, CONTEXTS, V))
    runs = Runs(
        ref=ref - np.log(np.exp(ref).sum(-1, keepdims=True)),
        features=rng.normal(0, 1, (n, CONTEXTS, RANK)),
        values=rng.normal(0, 1, (n, V + 1, V)),
        kind=np.array([ALL_KINDS.index(k) for k in kinds])[np.arange(n) % len(kinds)],
        threshold=np.zeros(n),
        noise=rng.uniform(0, 0.15, n),
        decays=rng.random(n) < 0.3,
        sampled=rng.random(n) < 0.5,
        target=rng.choice([0.05, 0.3], n),
        lr=np.full(n, 0.3 / ramp),
        steps=horizon(ramp),
        seed=seed,
    )
    dense = replace(runs, kind=np.where(runs.kind < len(KINDS), runs.kind, 0))  # of a rare reward no pace can be told
    return replace(
        runs, threshold=_threshold(runs), lr=_calibrate(replace(dense, threshold=_threshold(dense)), ramp).lr
    )


def _threshold(runs: Runs) -> Array:
    """The score that a tenth of the reference's own samples exceed, or as few as a sparse reward has."""
    training = Training(runs)
    rare = any(ALL_KINDS[k] in RARE for k in runs.kind)
    scores = np.concatenate([training.score(*training.sample()) for _ in range(40 if rare else 4)], 1)
    above = [1 - RARE.get(ALL_KINDS[k], 0.1) for k in runs.kind]
    return np.array([np.quantile(row, q) for row, q in zip(scores, above, strict=True)])


def _calibrate(runs: Runs, ramp: float) -> Runs:
    """The learning rate at which sqrt(KL / target) crosses 1 after ``ramp`` unpenalised steps."""
    for _ in range(5):
        training, x = Training(replace(runs, decays=np.zeros(len(runs), bool))), [np.zeros(len(runs))]
        for _ in range(int(2 * ramp) + 2):
            training.step(np.zeros(len(runs)))
            x.append(np.sqrt(training.true_kl() / runs.target))
        path = np.maximum.accumulate(np.array(x), 0)
        crossed = np.array([np.interp(1.0, p, np.arange(len(p))) for p in path.T])
        runs = replace(runs, lr=runs.lr * np.clip(np.where(path[-1] < 1, 1.5 / path[-1], crossed / ramp), 0.3, 3))
    return runs


class Training:
    """The moving part of R runs: weights, Adam's moments, the noise."""

    def __init__(self, runs: Runs) -> None:
        self.runs, self.t = runs, 0
        self.rng = np.random.default_rng([runs.seed, 7])
        self.b = np.zeros((len(runs), RANK, V))
        self.m, self.v = np.zeros_like(self.b), np.zeros_like(self.b)
        self.refresh()

    def refresh(self) -> None:
        """Recompute the tables from the weights."""
        self.logp = self.table(slice(None), self.b)
        self.p = np.exp(self.logp)
        self.kl_table = (self.p * (self.logp - self.runs.ref)).sum(-1)

    def table(self, which: slice | int, b: Array) -> Array:
        """Log-probs [.., C, V] of the chosen runs with these B."""
        logits = self.runs.ref[which] + self.runs.features[which] @ b
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    def true_kl(self) -> Array:
        """Exact KL per token, by propagating the distribution over contexts."""
        r = len(self.runs)
        p, kl = self.p.reshape(r, PROMPTS, V + 1, V), self.kl_table.reshape(r, PROMPTS, V + 1)
        total, at = kl[..., V].copy(), p[..., V, :]
        for _ in range(T - 1):
            total += (at * kl[..., :V]).sum(-1)
            at = (at[..., None, :] @ p[..., :V, :])[..., 0, :]
        return total.mean(-1) / T

    def _noise(self, kind: str, *shape: int) -> Array:
        """Random numbers [R, *shape], the same for copies of one run."""
        drawn = getattr(self.rng, kind)((len(self.runs) // self.runs.copies, *shape))
        return np.repeat(drawn, self.runs.copies, 0)

    def sample(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Contexts and tokens, each [R, N, T]; runs that repeat one another share their noise."""
        r, rows = len(self.runs), self.p.cumsum(-1).reshape(-1, V)
        base = np.arange(r)[:, None] * CONTEXTS + np.repeat(np.arange(PROMPTS), GROUP) * (V + 1)
        uniform = self._noise("random", T, N)
        context, token = np.empty((T, r, N), np.int64), np.empty((T, r, N), np.int64)
        previous = np.full((r, N), V)
        for t in range(T):
            context[t] = base + previous
            below = rows[context[t].ravel()] < uniform[:, t].reshape(-1, 1)
            token[t] = previous = np.minimum(below.sum(-1), V - 1).reshape(r, N)
        return context.transpose(1, 2, 0), token.transpose(1, 2, 0)

    def score(self, context: NDArray[np.int64], token: NDArray[np.int64]) -> Array:
        """The sum of token values, or of pair values, over sqrt(T): the learnable score [R, N]."""
        runs = self.runs
        previous = np.where((runs.kind == 2)[:, None, None], context % (V + 1), 0)
        index = (np.arange(len(runs))[:, None, None] * (V + 1) + previous) * V + token
        return runs.values.ravel()[index].sum(-1) / np.sqrt(T)

    def reward(self, score: Array) -> Array:
        """The reward without its unlearnable part."""
        kind = self.runs.kind[:, None]
        binary = (kind == 4) | (kind == 5) | (kind == 6)
        return np.select(
            [kind == 1, kind == 3, binary, kind >= 7],
            [np.tanh(score), 0.5 * score, 1.0 * (score > self.runs.threshold[:, None]), 0.0 * score],
            score,
        )

    def step(self, beta: Array) -> tuple[Array, Array]:
        """Sample, measure, update with this price. Returns the KL measured before the update and the mean reward."""
        context, token = self.sample()
        reward = self.reward(self.score(context, token))
        unlearnable = (self.runs.kind == 3) | (self.runs.kind == 7)
        noisy = reward + unlearnable[:, None] * self._noise("standard_normal", N)
        advantage = self._advantage(noisy)
        self.spread = np.sqrt((advantage**2).mean(-1))
        self.visits = np.bincount(context.ravel(), minlength=len(self.runs) * CONTEXTS).reshape(-1, CONTEXTS)
        self.reading = np.exp(self.runs.noise * self._noise("standard_normal"))
        measured = (self.visits * self.kl_table).sum(-1) / (N * T) * self.reading
        self._adam(self._kl_gradient(context, token) * beta[:, None, None] - self._score(context, token, advantage))
        return measured, reward.mean(-1)

    def own_kl(self, j: int, b: Array) -> float:
        """KL of run j with these weights on the tokens of the last step, under the same measurement noise."""
        logp = self.table(j, b)
        return float(
            (self.visits[j] * (np.exp(logp) * (logp - self.runs.ref[j])).sum(-1)).sum() / (N * T) * self.reading[j]
        )

    def _advantage(self, reward: Array) -> Array:
        grouped = reward.reshape(len(reward), PROMPTS, GROUP)
        centred = grouped - grouped.mean(-1, keepdims=True)
        return (centred / (grouped.std(-1, keepdims=True) + 1e-4)).reshape(reward.shape)

    def _score(self, context: NDArray[np.int64], token: NDArray[np.int64], weight: Array) -> Array:
        """``sum weight d log p / d logits`` per context, over the token count."""
        weights = np.broadcast_to(weight[..., None] if weight.ndim == 2 else weight, token.shape)
        taken = np.bincount((context * V + token).ravel(), weights.ravel(), self.p.size).reshape(self.p.shape)
        return (taken - self.p * taken.sum(-1, keepdims=True)) / (N * T)

    def _kl_gradient(self, context: NDArray[np.int64], token: NDArray[np.int64]) -> Array:
        full = self.p * (self.logp - self.runs.ref - self.kl_table[..., None]) * self.visits[..., None] / (N * T)
        if not self.runs.sampled.any():
            return full
        ratio = np.exp(self.runs.ref - self.logp).ravel()[context * V + token]
        k3 = self._score(context, token, 1 - ratio)
        return np.where(self.runs.sampled[:, None, None], k3, full)

    def _adam(self, logits_gradient: Array) -> None:
        self.t += 1
        g = self.runs.features.transpose(0, 2, 1) @ logits_gradient
        fall = np.where(self.runs.decays, 1 - 0.9 * min(self.t / self.runs.steps, 1), 1.0)
        self.m += 0.1 * (g - self.m)
        self.v += 0.001 * (g * g - self.v)
        unit = (self.m / (1 - 0.9**self.t)) / (np.sqrt(self.v / (1 - 0.999**self.t)) + 1e-8)
        self.b = self.b - (self.runs.lr * fall)[:, None, None] * unit
        self.refresh()
