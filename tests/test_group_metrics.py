"""Zero-variance groups are counted from raw rewards, whatever the scaling."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest

torch = pytest.importorskip("torch")

NAN = math.nan


def metrics(rewards: list[float], size: int) -> dict[str, float]:
    from tasks.jobs.group_trainer import group_metrics

    return group_metrics(torch.tensor(rewards, dtype=torch.float32), size)


def test_kinds_of_zero_variance_groups() -> None:
    found = metrics([0, 0, 0, 0, 1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0, 0, 1, 1], 4)
    assert found["zero_variance_share"] == 0.75
    assert found["zero_variance_share/all_zero"] == 0.25
    assert found["zero_variance_share/all_one"] == 0.25
    assert found["within_group_std"] == pytest.approx(0.5 / 4)  # population std of 0,0,1,1 is 0.5
    assert found["unscored_share"] == 0


def test_unscored_completions_are_left_out_of_their_group() -> None:
    found = metrics([1, NAN, 1, NAN, 0, 1, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, 1], 4)
    assert found["zero_variance_share"] == 0.75  # equal; two unequal; none; one alone
    assert found["unscored_share"] == pytest.approx(11 / 16)


def test_float_noise_is_no_variance_and_a_small_term_is() -> None:
    assert metrics([0.1 + 0.2, 0.3, 0.3, 0.3], 4)["zero_variance_share"] == 1
    assert metrics([0.9, 1.0, 1.0, 1.0], 4)["zero_variance_share"] == 0


@dataclass
class Result:
    score: float | None
    status: str
    terms: dict[str, float] = field(default_factory=dict)


class Fixed:
    __name__ = "fixed_v1"

    def results(self, **columns: Any) -> list[Result]:
        return [
            Result(1.0, "correct", {"result": 1.0}),
            Result(0.0, "incorrect", {"result": 0.0}),
            Result(None, "verifier_error"),
        ]


def test_terms_and_statuses_are_logged_and_scores_pass_unchanged() -> None:
    from tasks.jobs.group_trainer import TrackedReward

    logged: dict[str, float] = {}
    reward = TrackedReward(Fixed())
    assert reward.__name__ == "fixed_v1"
    assert reward(log_metric=logged.__setitem__, completions=["a", "b", "c"]) == [1.0, 0.0, None]
    assert logged["reward_status/correct"] == pytest.approx(1 / 3)
    assert (logged["reward_term/result/mean"], logged["reward_term/result/std"]) == (0.5, 0.5)
