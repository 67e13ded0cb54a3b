"""Zero-variance groups are counted from raw rewards, whatever the scaling."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from rewards.base import RewardResult, Status

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


class Fixed:
    __name__ = "fixed_v1"

    def results(self, **columns: Any) -> list[RewardResult]:
        return [
            RewardResult.of(Status.CORRECT, terms={"result": 1.0}),
            RewardResult.of(Status.INCORRECT, terms={"result": 0.0}),
            RewardResult.of(Status.VERIFIER_ERROR),
        ]


def test_scores_pass_unchanged_and_every_status_has_a_share() -> None:
    from tasks.jobs.group_trainer import TrackedReward, result_metrics

    reward = TrackedReward(Fixed())  # type: ignore[arg-type]
    assert reward.__name__ == "fixed_v1"
    assert reward(completions=["a", "b", "c"]) == [1.0, 0.0, None]
    found = result_metrics(reward.results)
    shares = {status: found[f"reward_status/{status}"] for status in Status}
    assert sum(shares.values()) == pytest.approx(1) and shares[Status.TIMEOUT] == 0
    assert shares[Status.CORRECT] == pytest.approx(1 / 3)
    assert (found["reward_term/result/mean"], found["reward_term/result/std"]) == (0.5, 0.5)


def test_a_reward_of_the_wrong_length_never_reaches_the_trainer() -> None:
    from tasks.jobs.group_trainer import TrackedReward

    with pytest.raises(ValueError, match="fixed_v1 returned 3 scores for 6 completions"):
        TrackedReward(Fixed())(completions=["a"] * 6)  # type: ignore[arg-type]


@pytest.mark.parametrize("cut_short", ["missing", "torn"])
def test_a_checkpoint_that_a_kill_cut_short_is_passed_over(tmp_path: Path, cut_short: str) -> None:
    from tasks.jobs.training_setup import last_checkpoint

    assert last_checkpoint(tmp_path) is None
    for step in (9, 10, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-9" / "trainer_state.json").write_text("{}")
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_text("{}")
    if cut_short == "torn":
        (tmp_path / "checkpoint-100" / "trainer_state.json").write_text('{"global_st')
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
