"""Flips of labels: what chance alone brings, and the interval of a stratified share."""

from __future__ import annotations

import numpy as np
import pytest

from data.label_flips import label_chances, stratified_interval
from data.pass_rate import Beta


def test_the_chances_of_a_label_match_simulated_resampling() -> None:
    rng = np.random.default_rng(1)
    prior, cap = Beta(0.6, 0.9), 16
    rates = rng.beta(*prior, size=200_000)
    first = rng.binomial(8, rates)
    again = rng.binomial(cap, rates)
    for seen in (0, 3, 8):
        mine = again[first == seen]
        solved, unsolved = label_chances(prior, [seen], [8], cap)
        assert solved[0] == pytest.approx((mine == cap).mean(), abs=0.01)
        assert unsolved[0] == pytest.approx((mine == 0).mean(), abs=0.01)


def test_strata_count_by_their_size_and_not_by_their_sample() -> None:
    found = stratified_interval([5, 0], [10, 10], [100, 900])
    assert found.share == pytest.approx(0.05)
    assert 0 < found.low < found.share < found.high < 0.25


def test_the_interval_covers_the_truth() -> None:
    rng = np.random.default_rng(2)
    sizes, sampled, rates = [300, 500, 200], [20, 33, 13], np.array([0.3, 0.05, 0.6])
    truth = float(np.dot(rates, sizes) / sum(sizes))
    intervals = [
        stratified_interval(rng.binomial(sampled, rates).tolist(), sampled, sizes) for _ in range(300)
    ]
    covered = np.mean([found.low <= truth <= found.high for found in intervals])
    assert 0.91 <= covered <= 0.99


def test_no_flip_at_all_still_leaves_doubt() -> None:
    found = stratified_interval([0, 0], [8, 8], [50, 50])
    assert found.share == found.low == 0 and found.high > 0.05


@pytest.mark.parametrize(("hits", "sampled"), [([1], [0]), ([3], [2]), ([-1], [2])])
def test_impossible_counts_are_refused(hits: list[int], sampled: list[int]) -> None:
    with pytest.raises(ValueError, match="expected 0 <= hits <= sampled"):
        stratified_interval(hits, sampled, [10])
