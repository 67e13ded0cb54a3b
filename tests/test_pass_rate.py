"""pass@k, intervals and estimates under early stopping, against values worked out by hand and simulated truth."""

from __future__ import annotations

import math
import random
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.pass_rate import (
    JEFFREYS,
    MIN_PROMPTS,
    Beta,
    Posterior,
    first_phase_rate,
    fit_beta,
    mean_interval,
    pass_at_k,
    posterior,
    prompt_pass_at_k,
    wilson,
)
from data.sequential import Chunk, Outcome, SamplingPlan, run_plan

# ------------------------------------------------------------------------------------------------- pass@k


@pytest.mark.parametrize(
    ("trials", "successes", "k", "expected"),
    [
        (8, 2, 4, 1 - 15 / 70),  # 0.7857; the shortcut 1 - (1 - c/n)^k says 0.684
        (8, 0, 8, 0.0),
        (8, 8, 1, 1.0),
        (8, 3, 1, 3 / 8),
        (8, 1, 8, 1.0),
        (5, 0, 5, 0.0),
    ],
)
def test_pass_at_k_of_known_counts(trials: int, successes: int, k: int, expected: float) -> None:
    assert prompt_pass_at_k(trials, successes, k) == pytest.approx(expected)
    assert pass_at_k([trials], [successes], k) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("trials", "successes", "k"), [(3, 0, 5), (4, 1, 8), (4, 5, 2), (4, -1, 2), (4, 2, 0), (0, 0, 1)]
)
def test_pass_at_k_that_does_not_exist_is_refused(trials: int, successes: int, k: int) -> None:
    """An unsolved prompt with too few samples is no solved one: the shortcut "n - c < k means 1" would say 1.0."""
    with pytest.raises(ValueError, match=r"samples|expected"):
        pass_at_k([trials], [successes], k)
    with pytest.raises(ValueError, match=r"samples|expected"):
        pass_at_k([8, trials], [4, successes], k)


def test_one_short_prompt_among_many_is_not_passed_over() -> None:
    with pytest.raises(ValueError, match="pass@5 needs at least 5 samples a prompt, found 3"):
        pass_at_k([8, 8, 3], [1, 2, 3], 5)


@pytest.mark.parametrize(("trials", "successes"), [(160, 41), (np.int64(160), np.int64(41)), (160.0, 41.0)])
def test_counts_of_prompts_are_not_counts_of_samples(trials: Any, successes: Any) -> None:
    """41 of 160 prompts solved by one sample each: fed as n and c they "give" pass@10 = 95 %; pass@1 is 26 %."""
    assert prompt_pass_at_k(160, 41, 10) == pytest.approx(0.9532, abs=1e-4), "what the mistake would report"
    with pytest.raises(TypeError, match="expected a sequence with one count a prompt"):
        pass_at_k(trials, successes, 10)
    with pytest.raises(ValueError, match="pass@10 needs at least 10 samples"):
        pass_at_k([1] * 160, [1] * 41 + [0] * 119, 10)
    assert pass_at_k([1] * 160, [1] * 41 + [0] * 119, 1) == pytest.approx(41 / 160)


def test_pass_at_k_is_a_mean_of_values_not_of_truths() -> None:
    """Every value here is above 0, so counting the prompts whose value is "true" would report 1.0."""
    assert pass_at_k([4, 4, 4], [1, 2, 4], 2) == pytest.approx((0.5 + 5 / 6 + 1) / 3)


@pytest.mark.parametrize(
    ("trials", "successes", "error"),
    [
        ([], [], ValueError),
        ([8, 8], [1], ValueError),
        ([8.0], [1.0], TypeError),
        ([True], [True], TypeError),
        ("8", "1", TypeError),
        (None, None, TypeError),
    ],
)
def test_pass_at_k_refuses_what_is_no_list_of_counts(
    trials: Any, successes: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"expected"):
        pass_at_k(trials, successes, 1)


def test_pass_at_k_takes_arrays() -> None:
    assert pass_at_k(np.array([8, 8]), np.array([2, 0]), 4) == pytest.approx((1 - 15 / 70) / 2)  # type: ignore[arg-type]


def test_pass_at_k_is_unbiased() -> None:
    rng, rate, trials, k = random.Random(0), 0.3, 8, 4
    draws = [sum(rng.random() < rate for _ in range(trials)) for _ in range(20_000)]
    assert pass_at_k([trials] * len(draws), draws, k) == pytest.approx(1 - (1 - rate) ** k, abs=0.01)


# ---------------------------------------------------------------------------------------------- intervals


@pytest.mark.parametrize(("samples", "expected"), [(4, 0.656), (8, 0.430), (16, 0.185), (64, 0.001)])
def test_how_often_a_learnable_prompt_looks_unsolved(samples: int, expected: float) -> None:
    """A prompt of true rate 0.1 shows no success this often, so 0 of 8 alone must not drop it."""
    unsolved = 1 - pass_at_k([10_000], [1_000], samples)
    assert unsolved == pytest.approx(expected, abs=2e-3)
    jeffreys = posterior(JEFFREYS, [0], [samples])
    assert (jeffreys.high[0] >= 0.1) == (samples <= 16)
    assert (wilson(0, samples).high >= 0.1) == (samples <= 16)


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


# --------------------------------------------------------------------------- estimates under early stopping

PROMPTS = 4_000
PLAN = SamplingPlan(first=4, more=4, cap=16)
POPULATIONS = ("beta", "mixture")


class Simulated(NamedTuple):
    rate: np.ndarray
    trials: np.ndarray
    successes: np.ndarray
    first_successes: np.ndarray
    found: Posterior

    @property
    def naive(self) -> np.ndarray:
        return self.successes / self.trials

    @property
    def mixed(self) -> np.ndarray:
        return (self.successes > 0) & (self.successes < self.trials)


@cache
def simulate(population: str, seed: int = 0) -> Simulated:
    """Prompts of known rate, run through the real plan."""
    rng = np.random.default_rng(seed)
    if population == "beta":
        rate = rng.beta(0.6, 0.9, PROMPTS)
    else:  # hard, middling and easy prompts: three humps, which no Beta has
        parts = [rng.beta(1, 20, PROMPTS), rng.beta(10, 10, PROMPTS), rng.beta(30, 2, PROMPTS)]
        rate = np.choose(rng.choice(3, PROMPTS, p=[0.5, 0.3, 0.2]), parts)
    outcomes = rng.random((PROMPTS, PLAN.cap)) < rate[:, None]
    ids = [f"{number:05d}" for number in range(PROMPTS)]

    def draw(chunks: Any) -> list[list[Outcome]]:
        return [drawn(chunk) for chunk in chunks]

    def drawn(chunk: Chunk) -> list[Outcome]:
        return [Outcome(bool(won), 1) for won in outcomes[int(chunk.prompt_id), chunk.start : chunk.stop]]

    stops = run_plan(ids, PLAN, draw, batch_size=1000, longest=1)
    trials = np.array([stops[name].trials for name in ids])
    successes = np.array([outcomes[row, :count].sum() for row, count in enumerate(trials)])
    found = posterior(fit_beta(successes, trials), successes, trials)
    return Simulated(rate, trials, successes, outcomes[:, : PLAN.first].sum(1), found)


def worst_bin(estimate: np.ndarray, truth: np.ndarray) -> float:
    """Largest mean error within fifths of the estimate's range, where they hold 100 prompts or more."""
    place = np.minimum((estimate * 5).astype(int), 4)
    errors = [(estimate - truth)[place == at].mean() for at in range(5) if (place == at).sum() >= 100]
    return float(np.abs(errors).max())


@pytest.mark.parametrize("population", POPULATIONS)
def test_the_plan_stops_early_and_that_biases_the_naive_rate(population: str) -> None:
    seen = simulate(population)
    assert set(np.unique(seen.trials)) == {4, 8, 12, 16}
    lucky = seen.mixed & (seen.rate > 0.05) & (seen.rate < 0.15)
    assert lucky.sum() > 100
    assert seen.naive[lucky].mean() > 1.7 * seen.rate[lucky].mean()
    assert worst_bin(seen.naive, seen.rate) > 0.04, "prompts that show x do not have the rate x"


@pytest.mark.parametrize(("population", "allowed"), [("beta", 0.02), ("mixture", 0.05)])
def test_the_estimate_is_calibrated_where_the_naive_rate_is_not(population: str, allowed: float) -> None:
    """Six seeds of the mixture: worst bins 0.015 to 0.035 for the estimate, 0.07 to 0.10 for the naive rate."""
    seen = simulate(population)
    error = seen.found.mean - seen.rate
    assert abs(error.mean()) < 0.01
    assert abs(error[seen.mixed].mean()) < 0.01, "also among those that stopped because they were mixed"
    assert worst_bin(seen.found.mean, seen.rate) < allowed
    assert worst_bin(seen.found.mean, seen.rate) < worst_bin(seen.naive, seen.rate) / 1.5
    assert (error**2).mean() < ((seen.naive - seen.rate) ** 2).mean()


@pytest.mark.parametrize("population", POPULATIONS)
def test_intervals_cover_the_true_rate(population: str) -> None:
    seen = simulate(population)
    covered = (seen.found.low <= seen.rate) & (seen.rate <= seen.found.high)
    assert 0.94 < covered.mean() < 0.975
    half = posterior(fit_beta(seen.successes, seen.trials), seen.successes, seen.trials, confidence=0.5)
    assert (half.high - half.low).mean() < 0.5 * (seen.found.high - seen.found.low).mean()


def test_rates_of_exactly_0_and_1_are_inside_their_intervals() -> None:
    rng = np.random.default_rng(0)
    rate = np.repeat([0.0, 1.0, 0.4], 300)
    trials = np.full(900, 16)
    successes = rng.binomial(trials, rate)
    found = posterior(fit_beta(successes, trials), successes, trials)
    certain = rate != 0.4
    assert ((found.low <= rate) & (rate <= found.high))[certain].all()


@pytest.mark.parametrize("population", POPULATIONS)
def test_the_first_phase_is_unbiased_and_the_naive_mean_is_not(population: str) -> None:
    """Over 12 seeds the naive mean is off in one direction; the first phase's errors cancel."""
    runs = [simulate(population, seed) for seed in range(12)]
    first = [first_phase_rate(run.first_successes, np.full(PROMPTS, 4)) - run.rate.mean() for run in runs]
    naive = [run.naive.mean() - run.rate.mean() for run in runs]
    low, high = mean_interval(first, confidence=0.999)
    assert low < 0 < high
    assert high - low < 0.012, "the test would see a bias of one percent"
    assert mean_interval(naive, confidence=0.999).low > 0.003


def test_what_was_seen_decides_not_why_it_stopped() -> None:
    """The likelihood of 1 of 8 is the same after a plan of 8 and after a stop at the first success."""
    fixed = posterior(Beta(0.6, 0.9), [1, 5], [8, 16])
    alone = posterior(Beta(0.6, 0.9), [1], [8])
    assert alone.mean[0] == fixed.mean[0] == pytest.approx(1.6 / 9.5)


def test_fit_beta_finds_the_population() -> None:
    rng = np.random.default_rng(1)
    rate = rng.beta(2, 5, 20_000)
    a, b = fit_beta(rng.binomial(16, rate), np.full(20_000, 16))
    assert (a, b) == (pytest.approx(2, rel=0.05), pytest.approx(5, rel=0.05))


@pytest.mark.parametrize(
    ("successes", "trials"),
    [
        ([], []),
        ([0] * 30, [0] * 30),
        ([1, 2, 3], [4, 4, 4]),
        ([4] * (MIN_PROMPTS - 1) + [0] * 50, [4] * (MIN_PROMPTS - 1) + [0] * 50),
        ([1] * 50, [1] * 50),
    ],
)
def test_too_little_to_fit_is_jeffreys(successes: list[int], trials: list[int]) -> None:
    assert fit_beta(successes, trials) == JEFFREYS


@pytest.mark.parametrize(
    ("successes", "trials"), [([0] * 40, [16] * 40), ([16] * 40, [16] * 40), ([8] * 40, [16] * 40)]
)
def test_equal_prompts_give_a_bounded_prior(successes: list[int], trials: list[int]) -> None:
    prior = fit_beta(successes, trials)
    assert all(0.1 - 1e-9 <= value <= 20 + 1e-9 for value in prior)


@settings(deadline=None)  # the first call imports scipy
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted), min_size=1, max_size=60),
    st.sampled_from([0.5, 0.9, 0.95, 0.999]),
)
def test_the_estimate_is_always_inside_its_interval(pairs: list[list[int]], confidence: float) -> None:
    successes, trials = [c for c, _ in pairs], [n for _, n in pairs]
    mean, low, high = posterior(fit_beta(successes, trials), successes, trials, confidence)
    assert len(mean) == len(pairs)
    assert ((low >= 0) & (low <= mean) & (mean <= high) & (high <= 1)).all()
    for at, (c, n) in enumerate(pairs):
        assert (low[at] == 0) == (c == 0)
        assert (high[at] == 1) == (c == n)


def test_a_skewed_interval_is_widened_to_its_mean() -> None:
    """Half of Beta(0.1, 20) lies below 0.0001, and its mean is 0.005: above the middle half."""
    mean, low, high = posterior(Beta(0.1, 20), [0], [0], confidence=0.5)
    assert (low[0], high[0]) == (0, 1), "nothing was seen"
    mean, low, high = posterior(Beta(0.1, 20), [0], [4], confidence=0.5)
    assert high[0] == mean[0] == pytest.approx(0.1 / 24.1)
    mean, low, high = posterior(Beta(20, 0.1), [4], [4], confidence=0.5)
    assert low[0] == mean[0] == pytest.approx(24 / 24.1)


def test_a_million_prompts_cost_no_more_than_their_different_counts() -> None:
    rng = np.random.default_rng(0)
    trials = rng.choice([4, 8, 12, 16], 1_000_000)
    successes = rng.binomial(trials, rng.beta(0.6, 0.9, 1_000_000))
    few = fit_beta(successes[:50_000], trials[:50_000])
    many = fit_beta(successes, trials)
    assert many.a == pytest.approx(few.a, rel=0.05)
    assert len(posterior(many, successes, trials).mean) == 1_000_000


@pytest.mark.parametrize(("successes", "trials"), [([5], [4]), ([-1], [4]), ([1, 2], [4]), ([[1]], [[4]])])
def test_counts_that_make_no_sense_are_refused(successes: Any, trials: Any) -> None:
    for call in (fit_beta, first_phase_rate, lambda c, n: posterior(JEFFREYS, c, n)):
        with pytest.raises(ValueError, match="expected"):
            call(successes, trials)


def test_first_phase_rate_weighs_prompts_not_samples() -> None:
    assert first_phase_rate([1, 0, 0], [1, 4, 0]) == pytest.approx(0.5)
    assert math.isnan(first_phase_rate([0], [0]))
