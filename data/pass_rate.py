"""Success statistics of sampled completions: pass@k, mean@k, and their intervals.

Numbers only: what counts as a success is decided by the reward's status, which prompts are kept by the
selection stage. scipy is imported inside functions (half a second that the flows must not pay).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Interval(NamedTuple):
    low: float
    high: float


def pass_at_k(trials: int, successes: int, k: int) -> float:
    """Unbiased estimate of P(at least one success in k draws) for one prompt, from its samples.

    1 - C(n - c, k) / C(n, k); source: Chen et al., "Evaluating Large Language Models Trained on Code" (2021).

    Raises:
        ValueError: fewer trials than k (the estimate does not exist), or counts that make no sense.
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes of {trials} trials: expected 0 <= successes <= trials")
    if not 1 <= k <= trials:
        raise ValueError(
            f"pass@{k} needs at least {k} samples a prompt, found {trials}: draw more, or lower k"
        )
    return 1.0 - math.comb(trials - successes, k) / math.comb(trials, k)


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
