"""Staleness: which prompts are sampled again, and what flips and chance are said to be."""

from __future__ import annotations

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.pass_rate import Beta
from tasks.recipes import SampleRecipe, StalenessRecipe
from tasks.staleness import choose, deal, flipped, only_measured, spell, summarise

LABELS = {"mixed": 60, "solved": 30, "unsolved_so_far": 9, "suspect_gold": 50}


def selection() -> pl.DataFrame:
    labels = [label for label, size in LABELS.items() for _ in range(size)]
    successes = {"mixed": 4, "solved": 8, "unsolved_so_far": 0, "suspect_gold": 0}
    return pl.DataFrame(
        {
            "prompt_id": [f"p{number:03}" for number in range(len(labels))],
            "label": labels,
            "trials": [8] * len(labels),
            "unscored": [0] * len(labels),
            "successes": [successes[label] for label in labels],
        }
    )


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 500), min_size=1), st.integers(1, 2000))
def test_places_are_dealt_in_proportion(sizes: dict[str, int], count: int) -> None:
    dealt = deal(sizes, count)
    total = sum(sizes.values())
    assert sum(dealt.values()) == max(min(count, total), len(sizes))
    assert all(1 <= dealt[name] <= sizes[name] for name in sizes)
    if count >= 4 * len(sizes):
        assert all(abs(dealt[name] - min(count, total) * sizes[name] / total) <= len(sizes) for name in sizes)


def test_every_label_that_can_change_is_sampled_and_the_seed_decides() -> None:
    chosen = choose(selection(), 20, seed=0)
    counts = dict(chosen["label"].value_counts().iter_rows())
    assert counts == {"mixed": 12, "solved": 6, "unsolved_so_far": 2}
    shuffled = choose(selection().sample(fraction=1, shuffle=True, seed=5), 20, seed=0)
    assert shuffled.equals(chosen)
    assert not choose(selection(), 20, seed=1).equals(chosen)


def test_without_a_measured_prompt_nothing_can_be_compared() -> None:
    with pytest.raises(ValueError, match="no prompt with a pass rate"):
        choose(selection().filter(pl.col("label") == "suspect_gold"), 20, seed=0)


def test_prompts_without_a_label_do_not_count_as_flipped() -> None:
    flips = choose(selection(), 20, seed=0).with_columns(pl.col("label").alias("label_now"))
    lost = flips.with_columns(
        pl.when(pl.int_range(pl.len()) < 4).then(pl.lit("unscored")).otherwise("label_now").alias("label_now")
    )
    assert len(only_measured(lost, most=0.2)) == 16
    with pytest.raises(RuntimeError, match="20% of 20 prompts could not be measured again"):
        only_measured(lost, most=0.1)


def test_more_flips_than_the_limit_are_no_staleness_where_chance_alone_brings_as_many() -> None:
    # With 4 completions a prompt, 4 of 4 becomes 3 of 4 or fewer in a third of all cases, whatever the policy.
    solved = selection().filter(pl.col("label") == "solved").with_columns(successes=4, trials=4, unscored=0)
    rows = solved.with_columns((pl.int_range(pl.len()) % 3 == 0).alias("flipped"))
    recipe = StalenessRecipe(max_flipped_share=0.1, sampling=SampleRecipe(first_samples=4, max_samples=4))
    by_chance = summarise(rows, solved, recipe, Beta(1, 1))
    assert by_chance["flipped_low"] < by_chance["expected_by_chance"] and not by_chance["stale"]
    assert "still good" in spell(by_chance)
    changed = summarise(rows.with_columns(flipped=pl.lit(True)), solved, recipe, Beta(1, 1))
    assert changed["stale"] and "is stale" in spell(changed)


def test_the_two_labels_without_a_correct_completion_are_one_when_flips_are_counted() -> None:
    pairs = [("truncated", "unsolved_so_far"), ("unsolved_so_far", "truncated"), ("truncated", "mixed")]
    table = pl.DataFrame(pairs, schema=["label", "label_now"], orient="row")
    assert flipped(table)["flipped"].to_list() == [False, False, True]


@pytest.mark.parametrize(("limit", "stale"), [(0.1, True), (0.5, False)])
def test_flips_are_weighted_by_the_size_of_their_label(limit: float, stale: bool) -> None:
    chosen = choose(selection(), 20, seed=0)
    # Half of the mixed prompts became solved, nothing else changed: 0.5 * 60 / 99 of all.
    flips = chosen.with_columns(
        ((pl.col("label") == "mixed") & (pl.int_range(pl.len()) < 6)).alias("flipped")
    )
    assert flips["flipped"].sum() == 6
    recipe = StalenessRecipe(max_flipped_share=limit, sampling=SampleRecipe(max_samples=8))
    result = summarise(flips, selection(), recipe, Beta(0.5, 0.5))
    assert result["flipped_share"] == pytest.approx(0.5 * 60 / 99)
    assert result["flipped_low"] < result["flipped_share"] < result["flipped_high"]
    assert result["stale"] is stale and result["of"] == 99
    chances = {label: part["expected_by_chance"] for label, part in result["by_label"].items()}
    assert chances["mixed"] < 0.05, "a prompt with 4 of 8 stays mixed"
    assert 0.1 < chances["solved"] < 0.5, "8 of 8 may well fail once in the next 8"
