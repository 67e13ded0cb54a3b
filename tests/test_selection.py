"""Selection by pass rate: bands, labels, and what is said when nothing is left."""

from __future__ import annotations

import polars as pl
import pytest

from data.schemas import SelectionTable, check_table
from tasks.recipes import SelectRecipe
from tasks.selection import histogram, select


def tables() -> tuple[pl.DataFrame, pl.DataFrame]:
    statuses = {
        "solved": ["correct"] * 4,
        "unsolved": ["incorrect", "timeout", "no_answer", "incorrect"],
        "mixed": ["correct", "incorrect", "incorrect", "correct"],
        "unscored": ["verifier_error"] * 4,
        "partly": ["correct", "verifier_error", "incorrect", "incorrect"],
        "suspect": ["suspect_gold"] * 4,
    }
    prompts = pl.DataFrame(
        {
            "prompt_id": list(statuses),
            "source": ["t"] * 6,
            "gold_status": ["suspect_gold" if name == "suspect" else "ok" for name in statuses],
        }
    )
    unscored = ("verifier_error", "suspect_gold")
    rows = [
        {
            "prompt_id": name,
            "status": status,
            "score": None if status in unscored else float(status == "correct"),
        }
        for name, drawn in statuses.items()
        for status in drawn
    ]
    return prompts, pl.DataFrame(
        rows, schema={"prompt_id": pl.String, "status": pl.String, "score": pl.Float64}
    )


def kept(recipe: SelectRecipe) -> set[str]:
    table = check_table(select(*tables(), recipe), SelectionTable, "test")
    return set(table.filter("kept")["prompt_id"])


def test_every_prompt_gets_its_label_and_rate() -> None:
    table = select(*tables(), SelectRecipe())
    rows = {row["prompt_id"]: row for row in table.iter_rows(named=True)}
    assert {name: row["label"] for name, row in rows.items()} == {
        "solved": "solved",
        "unsolved": "unsolved",
        "mixed": "mixed",
        "unscored": "unscored",
        "partly": "mixed",
        "suspect": "suspect_gold",
    }
    assert rows["partly"]["pass_rate"] == pytest.approx(1 / 3), "an unscored sample is no failure"
    assert (rows["partly"]["trials"], rows["partly"]["unscored"]) == (4, 1)
    assert rows["unscored"]["pass_rate"] is None
    assert rows["unsolved"]["pass_rate_high"] == pytest.approx(0.4899, abs=1e-3), "0 of 4 does not mean 0"


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (SelectRecipe(), {"mixed", "partly"}),
        (SelectRecipe(high_closed=True), {"mixed", "partly", "solved"}),
        (SelectRecipe(low_closed=True, high_closed=True), {"mixed", "partly", "solved", "unsolved"}),
        (SelectRecipe(low=0.4, high=0.6), {"mixed"}),
        (SelectRecipe(low=0.5, high=0.9), set()),
        (SelectRecipe(low=0.5, high=0.9, low_closed=True), {"mixed"}),
    ],
)
def test_the_band_is_open_or_closed_by_name(recipe: SelectRecipe, expected: set[str]) -> None:
    assert kept(recipe) == expected


def test_the_histogram_counts_every_measured_prompt_once() -> None:
    counts = histogram(select(*tables(), SelectRecipe()))
    assert counts["rates"] == [0, 0.25, 0.5, 0.75, 1]
    assert counts["before"] == [1, 1, 1, 0, 1], "1 of 3 scored samples is nearest to 1 of 4"
    assert counts["after"] == [0, 1, 1, 0, 0]
