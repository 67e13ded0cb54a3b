"""The arithmetic of benchmarks/curation.py: what its numbers are computed from, on cases worked out by hand."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from benchmarks.curation_grpo import ratios, tokens_by_step
from benchmarks.curation_resume import drawn, marks
from benchmarks.curation_sampling import compare
from benchmarks.curation_scale import spelt_anew
from benchmarks.curation_score_child import refuse


def arm(scores: list[float], tokens: int = 1000) -> dict[str, Any]:
    """Checkpoints every 10 steps, each after as many tokens."""
    points = [
        {"step": 10 * place, "tokens": tokens * place, "mean_at_k": score}
        for place, score in enumerate(scores)
    ]
    return {"points": points, "tokens": points[-1]["tokens"], "steps": points[-1]["step"]}


def test_tokens_ratio_is_read_off_the_line_between_checkpoints() -> None:
    arms = {"curated": arm([0.5, 0.6, 0.8, 0.9]), "uncurated": arm([0.5, 0.5, 0.6, 0.7], tokens=2000)}
    found = ratios(arms, curation_tokens=600)
    assert found["target"] == 0.7
    assert found["tokens_ratio"] == pytest.approx(1500 / 6000)  # half way from 0.6 to 0.8
    assert found["tokens_ratio_with_curation"] == pytest.approx(2100 / 6000)
    assert found["steps_ratio"] == pytest.approx(15 / 30)


def test_a_score_that_is_passed_and_lost_again_counts_from_the_first_time() -> None:
    arms = {"curated": arm([0.5, 0.8, 0.6, 0.8]), "uncurated": arm([0.5, 0.6, 0.6, 0.7])}
    assert ratios(arms, 0)["tokens_ratio"] == pytest.approx((2 / 3) * 1000 / 3000)


@pytest.mark.parametrize("uncurated", [[0.5, 0.7, 0.9], [0.5, 0.6, 0.5]])
def test_no_ratio_when_the_score_is_never_reached_or_was_there_before_training(
    uncurated: list[float],
) -> None:
    assert ratios({"curated": arm([0.5, 0.6, 0.7]), "uncurated": arm(uncurated)}, 0)["tokens_ratio"] is None


def test_the_uncurated_run_is_its_own_control_also_where_the_curated_one_never_gets_there() -> None:
    found = ratios({"curated": arm([0.5, 0.6, 0.7]), "uncurated": arm([0.5, 0.9, 0.7, 0.8])}, 0)
    assert found["tokens_ratio"] is None
    assert found["tokens_ratio_of_itself"] == pytest.approx(0.75 * 1000 / 3000)


def test_tokens_add_up_by_step_also_where_a_step_generated_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [(1, {"generated_tokens": 10.0}), (2, {"generated_tokens": 5.0}), (3, {"train_loss": 0.1})]
    path.write_text("".join(json.dumps({"step": step, "metrics": found}) + "\n" for step, found in lines))
    assert tokens_by_step(path) == {1: 10, 2: 15, 3: 15}


def test_drawn_counts_a_pair_as_often_as_it_was_generated_and_no_torn_line(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger" / "identity"
    ledger.mkdir(parents=True)
    row = json.dumps({"prompt_id": "a", "sample_index": 0})
    (ledger / "1.jsonl").write_text(f'{row}\n{{"prompt_id": "b", "sample_in')
    (ledger / "2.jsonl").write_text(f"{row}\n")
    assert drawn(tmp_path) == [("a", 0), ("a", 0)]


def test_kills_lie_inside_the_run() -> None:
    assert marks(100, 3) == [25, 50, 75]


def test_mixed_recall_counts_what_both_plans_keep() -> None:
    def plan(completions: int, *mixed: str) -> dict[str, Any]:
        return {"completions": completions, "tokens": 10 * completions, "mixed": set(mixed)}

    row = compare(0, plan(40, "a", "b", "x"), plan(80, "a", "b", "c", "d"))
    assert (row["samples_ratio"], row["mixed_recall"]) == (0.5, 0.5)
    assert compare(0, plan(40), plan(80))["mixed_recall"] is None


@pytest.mark.parametrize(
    "gold", ["SELECT n FROM t ORDER BY n", "SELECT n FROM t ORDER BY n LIMIT 2", "SELECT COUNT(*) FROM t;"]
)
def test_a_gold_spelt_anew_is_another_text_with_the_same_rows(gold: str) -> None:
    connection = sqlite3.connect(":memory:")
    connection.executescript("CREATE TABLE t (n); INSERT INTO t VALUES (3), (1), (2);")
    texts = {spelt_anew(gold, copy) for copy in range(3)}
    assert len(texts) == 3
    rows = [connection.execute(text).fetchall() for text in texts]
    assert rows == [connection.execute(gold).fetchall()] * 3


def test_a_job_that_starts_while_rescoring_fails_the_benchmark() -> None:
    with pytest.raises(AssertionError, match="sample"):
        refuse("sample")
