"""pass@k and intervals against values worked out by hand or known from the literature."""

from __future__ import annotations

import math
import random

import pytest

from data.pass_rate import mean_interval, pass_at_k, wilson


def test_pass_at_k_of_known_counts() -> None:
    assert pass_at_k(8, 2, 4) == pytest.approx(
        1 - math.comb(6, 4) / math.comb(8, 4)
    )  # 0.7857, not 1-(1-c/n)^k
    assert pass_at_k(8, 0, 8) == 0.0
    assert pass_at_k(8, 8, 1) == 1.0
    assert pass_at_k(8, 3, 1) == pytest.approx(3 / 8)


@pytest.mark.parametrize(
    ("trials", "successes", "k"), [(3, 0, 5), (4, 1, 8), (4, 5, 2), (4, -1, 2), (4, 2, 0)]
)
def test_pass_at_k_that_does_not_exist_is_refused(trials: int, successes: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"samples|expected"):
        pass_at_k(trials, successes, k)


def test_pass_at_k_is_unbiased() -> None:
    rng, rate, trials, k = random.Random(0), 0.3, 8, 4
    draws = [sum(rng.random() < rate for _ in range(trials)) for _ in range(20_000)]
    estimate = sum(pass_at_k(trials, successes, k) for successes in draws) / len(draws)
    assert estimate == pytest.approx(1 - (1 - rate) ** k, abs=0.01)


def test_wilson_interval() -> None:
    low, high = wilson(8, 10)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert wilson(0, 8)[1] == pytest.approx(0.3244, abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


def test_mean_interval_is_students() -> None:
    low, high = mean_interval([0.90, 0.92, 0.94])
    assert (low + high) / 2 == pytest.approx(0.92)
    assert high - 0.92 == pytest.approx(4.3027 * 0.02 / math.sqrt(3), rel=1e-4)
    assert mean_interval([0.5]) == (-math.inf, math.inf)
