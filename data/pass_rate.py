"""Success statistics of sampled completions: pass@k, mean@k, pass rates under early stopping, and their intervals.

Numbers only: what counts as a success is decided by the reward's status, which prompts are kept by the
selection stage. numpy and scipy are imported inside functions (half a second that the flows must not pay).

Pass rates under early stopping. The sequential plan stops a prompt as soon as it has shown both outcomes, so
successes / trials is biased: it is pulled towards the middle, and prompts that show 3 of 4 have a mean true rate well
below 0.75. The likelihood of what was seen, p^c (1 - p)^(n - c), does not depend on when the drawing stopped, so an
estimate that uses the data through the likelihood alone is not misled: `fit_beta` learns from all prompts how pass
rates are spread, `posterior` combines that with one prompt's counts (empirical Bayes: Robbins, "An Empirical Bayes
Approach to Statistics", 1956; Efron and Morris, "Data Analysis Using Stein's Estimator", 1975). It is right in the
direction that a reader needs: prompts with an estimate near x have a mean true rate near x. No estimate is right for
those prompts of true rate 0.1 that happened to come out mixed: they all had luck.

Why not the unbiased estimator of one prompt under sequential sampling (Girshick, Mosteller and Savage, "Unbiased
Estimates for Certain Binomial Sampling Problems", 1946): it averages right over prompts and says odd things of each.
Four failures first and then one success in four gives exactly 0 for a prompt that was just solved.

Not covered: pass rates that no Beta resembles. With 30 % of prompts at exactly 0, 20 % at exactly 1 and the rest between
them, simulated estimates were off by up to 0.1 near 0.3 and 0.7, while the intervals kept their coverage. After
re-scoring with another reward, the stops followed the first reward's verdicts, and the estimate is an approximation.
Samples that could not be scored count as never drawn.
"""

from __future__ import annotations

import math
import numbers
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike

MIN_PROMPTS = 20
"""Fewer prompts than this say too little about the spread of pass rates: Jeffreys' prior is used."""
_BOUNDS = (0.1, 20.0)
"""Of a and b. Below 0.1 four equal outcomes would pass for certainty; above 20 a few equal prompts would outweigh what
the next one shows."""


class Interval(NamedTuple):
    low: float
    high: float


class Beta(NamedTuple):
    """A Beta distribution of pass rates over prompts; mean a / (a + b)."""

    a: float
    b: float


JEFFREYS = Beta(0.5, 0.5)


class Posterior(NamedTuple):
    """Estimates of each prompt's pass rate, arrays of one length: low <= mean <= high."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def pass_at_k(trials: Sequence[int], successes: Sequence[int], k: int) -> float:
    """Mean over prompts of the unbiased estimate of P(at least one success in k draws).

    Args:
        trials: scored samples of each prompt, for example [8, 8, 8].
        successes: those of them that succeeded, in the same order.

    Raises:
        TypeError: counts that are not sequences, one number a prompt. A single number of prompts and of solved prompts
            looks alike and means something else: 41 of 160 prompts solved once each is no pass@10 of 95 %.
        ValueError: no prompt, sequences of different lengths, or a prompt with fewer trials than k (its estimate does
            not exist: draw more, or leave the prompt out and count it).
    """
    for name, counts in (("trials", trials), ("successes", successes)):
        if isinstance(counts, (numbers.Number, str, bytes)) or not hasattr(counts, "__len__"):
            raise TypeError(
                f"pass_at_k: {name} is {counts!r}; expected a sequence with one count a prompt, such as [8, 8, 8]. "
                f"Numbers of prompts and of solved prompts do not give pass@k"
            )
    if not len(trials) or len(trials) != len(successes):
        raise ValueError(
            f"pass_at_k: found {len(trials)} trials and {len(successes)} successes; expected one of each a prompt, "
            f"and at least one prompt"
        )
    pairs = Counter(zip(trials, successes, strict=True))
    return math.fsum(times * prompt_pass_at_k(n, c, k) for (n, c), times in pairs.items()) / len(trials)


def prompt_pass_at_k(trials: int, successes: int, k: int) -> float:
    """The same for one prompt: 1 - C(n - c, k) / C(n, k).

    Source: Chen et al., "Evaluating Large Language Models Trained on Code" (2021).

    Raises:
        TypeError: counts that are not whole numbers.
        ValueError: fewer trials than k, or counts that make no sense.
    """
    for count in (trials, successes, k):
        if isinstance(count, bool) or not isinstance(count, numbers.Integral):
            raise TypeError(f"pass@k counts samples: expected whole numbers, found {count!r}")
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes of {trials} trials: expected 0 <= successes <= trials")
    if not 1 <= k <= trials:
        raise ValueError(
            f"pass@{k} needs at least {k} samples a prompt, found {trials}: draw more, or lower k"
        )
    n, c = int(trials), int(successes)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def fit_beta(successes: ArrayLike, trials: ArrayLike) -> Beta:
    """How pass rates are spread over prompts: the Beta distribution under which the counts are most likely.

    Maximum of the marginal (beta-binomial) likelihood, with a and b between 0.1 and 20. Prompts without trials say
    nothing; with fewer than MIN_PROMPTS others, or equal outcomes of one trial only, it is Jeffreys' (1/2, 1/2).

    Args:
        successes, trials: scored counts, one a prompt, however early each prompt was stopped.

    Raises:
        ValueError: lengths differ, or successes are not within 0..trials.
    """
    import numpy as np
    from scipy.optimize import minimize
    from scipy.special import betaln, psi

    c, n, _, times = _pairs(successes, trials)
    c, n, times = c[n > 0], n[n > 0], times[n > 0]
    if (
        times.sum() < MIN_PROMPTS or n.max() < 2
    ):  # one trial a prompt tells the mean and nothing of the spread
        return JEFFREYS

    def loss(logs: np.ndarray) -> tuple[float, np.ndarray]:
        a, b = np.exp(logs)
        value = -(times * (betaln(a + c, b + n - c) - betaln(a, b))).sum()
        shared = psi(a + b + n) - psi(a + b)
        slope_a = -(times * (psi(a + c) - psi(a) - shared)).sum() * a
        slope_b = -(times * (psi(b + n - c) - psi(b) - shared)).sum() * b
        total = (
            times.sum()
        )  # per prompt, so that the stopping tolerance means the same for 20 and for a million
        return value / total, np.array([slope_a, slope_b]) / total

    limits = [tuple(np.log(_BOUNDS))] * 2
    found = minimize(loss, np.log([1.0, 1.0]), jac=True, bounds=limits, method="L-BFGS-B")
    a, b = np.exp(found.x)
    return Beta(float(a), float(b))


def posterior(prior: Beta, successes: ArrayLike, trials: ArrayLike, confidence: float = 0.95) -> Posterior:
    """Mean and equal-tailed credible interval of each prompt's pass rate, given its counts.

    The posterior is Beta(a + c, b + n - c), for any rule that stopped the drawing by what had been seen. Without a
    success the interval begins at 0, without a failure it ends at 1 (as Brown, Cai and DasGupta, "Interval Estimation
    for a Binomial Proportion", 2001, do with Jeffreys'): a rate of exactly 0 or 1 is possible and must be inside. Where
    the posterior is so skewed that the mean lies outside, the interval is widened to reach it.

    Raises:
        ValueError: as `fit_beta`.
    """
    import numpy as np
    from scipy.stats import beta

    c, n, place, _ = _pairs(successes, trials)
    a, b = prior.a + c, prior.b + n - c
    mean = a / (a + b)
    tail = (1 - confidence) / 2
    low = np.where(c == 0, 0.0, beta.ppf(tail, a, b))
    high = np.where(c == n, 1.0, beta.ppf(1 - tail, a, b))
    return Posterior(mean[place], np.minimum(low, mean)[place], np.maximum(high, mean)[place])


def first_phase_rate(successes: ArrayLike, trials: ArrayLike) -> float:
    """Mean over prompts of successes / trials, from the samples of the first phase alone; NaN without any.

    Every prompt gets its first phase whatever comes out (unless a total budget ends within it: prompts are then left out
    by their ids, not by what came out), so this mean has no bias. Prompts without a scored sample are left out.

    Args:
        successes, trials: scored counts of the first phase, one a prompt.
    """
    c, n, _, times = _pairs(successes, trials)
    seen = n > 0
    return float((times[seen] * c[seen] / n[seen]).sum() / times[seen].sum()) if seen.any() else math.nan


def _pairs(successes: ArrayLike, trials: ArrayLike) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The different (successes, trials), where each prompt's is, and how often each occurs.

    A million prompts have a few hundred different pairs: what is computed once a pair costs nothing.
    """
    import numpy as np

    c, n = np.asarray(successes, dtype=np.int64), np.asarray(trials, dtype=np.int64)
    if c.shape != n.shape or c.ndim != 1:
        raise ValueError(
            f"successes have shape {c.shape}, trials {n.shape}; expected one count of each a prompt"
        )
    if ((c < 0) | (c > n)).any():
        wrong = int(np.argmax((c < 0) | (c > n)))
        raise ValueError(f"{c[wrong]} successes of {n[wrong]} trials: expected 0 <= successes <= trials")
    width = int(n.max(initial=0)) + 1
    codes, place, times = np.unique(c * width + n, return_inverse=True, return_counts=True)
    return codes // width, codes % width, place, times


def wilson(successes: int, trials: int, confidence: float = 0.95) -> Interval:
    """Wilson score interval of a binomial proportion; (0, 1) when there are no trials."""
    from scipy.stats import binomtest

    if trials == 0:
        return Interval(0.0, 1.0)
    found = binomtest(successes, trials).proportion_ci(confidence, method="wilson")
    return Interval(float(found.low), float(found.high))


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Student-t interval of the mean of independent values, one a prompt or one a seed.

    Several samples of one prompt are not independent: average them first. A single value has no interval;
    (-inf, inf) says so.
    """
    from scipy.stats import t

    count = len(values)
    if count < 2:
        return Interval(-math.inf, math.inf)
    mean = math.fsum(values) / count
    error = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)
    half = float(t.ppf((1 + confidence) / 2, count - 1)) * error
    return Interval(mean - half, mean + half)
