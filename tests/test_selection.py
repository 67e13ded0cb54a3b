"""Selection by pass rate: labels, bands, caps and quotas, what is counted, and what is said when too little is left."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from data.artifacts import ArtifactRef, Manifest, stable_hash
from data.pass_rate import JEFFREYS
from data.schemas import (
    LABELS,
    REASONS,
    PromptTable,
    ScoreTable,
    SelectionTable,
    StopTable,
    check_table,
    read_table,
    write_table,
)
from data.store import ArtifactStore
from tasks.comparison import compare_selections
from tasks.configs import ConfigError, Experiment
from tasks.console import Console
from tasks.recipes import GrpoRecipe, RewardSpec, SelectRecipe
from tasks.selection import (
    SELECT_PROMPTS,
    dropped,
    histogram,
    measure,
    render_dropped,
    select,
    select_prompts,
    selection_facts,
)
from tasks.selection_rules import quota, quota_base, stratum
from tasks.shortage import require_batch, shortage
from tasks.stage import Build
from tasks.tracking import TrackedRun

C, W, E, S = "correct", "incorrect", "verifier_error", "suspect_gold"
DRAWN = {
    "solved": [C] * 4,
    "unsolved": [W, "timeout", "no_answer", W],
    "mixed": [C, W, W, C],
    "unscored": [E] * 4,
    "partly": [C, E, W, W],
    "suspect": [W, W, C, W],
    "suspect_by_score": [S, S, E, S],
    "never_drawn": [],
    "cut": [W] * 4,
    "half_cut": [W] * 4,
    "cut_but_mixed": [C, W, W, W],
}
CUT = {"cut": 3, "half_cut": 2, "cut_but_mixed": 3}


def prompt_rows(names: Any, **columns: list[Any]) -> pl.DataFrame:
    names = list(names)
    rows = {
        "prompt_id": names,
        "source": ["t"] * len(names),
        "cluster": names,
        "gold_status": ["ok"] * len(names),
    }
    return pl.DataFrame(rows | columns, schema_overrides=dict.fromkeys(rows, pl.String))


def score_rows(drawn: dict[str, list[str]], cut: dict[str, int] | None = None) -> pl.DataFrame:
    rows = [
        {
            "prompt_id": name,
            "sample_index": index,
            "score": None if status in (E, S) else float(status == C),
            "status": status,
            "detail": "",
            "truncated": index < (cut or {}).get(name, 0),
        }
        for name, statuses in drawn.items()
        for index, status in enumerate(statuses)
    ]
    types = {"prompt_id": pl.String, "sample_index": pl.Int64, "score": pl.Float64, "status": pl.String}
    return pl.DataFrame(rows, schema={**types, "detail": pl.String, "truncated": pl.Boolean})


def example() -> tuple[pl.DataFrame, pl.DataFrame]:
    golds = ["suspect_gold" if name == "suspect" else "ok" for name in DRAWN]
    return prompt_rows(DRAWN, gold_status=golds), score_rows(DRAWN, CUT)


def chosen(recipe: SelectRecipe, prompts: pl.DataFrame, scores: pl.DataFrame) -> pl.DataFrame:
    return check_table(select(measure(prompts, scores), recipe), SelectionTable, "test")


def counted(
    counts: Mapping[str, tuple[int, int]], recipe: SelectRecipe, **columns: list[Any]
) -> pl.DataFrame:
    """The selection of prompts with (successes, trials)."""
    drawn = {name: [C] * wins + [W] * (trials - wins) for name, (wins, trials) in counts.items()}
    return chosen(recipe, prompt_rows(counts, **columns), score_rows(drawn))


def column(table: pl.DataFrame, name: str) -> dict[str, Any]:
    return dict(table.select("prompt_id", name).iter_rows())


# ------------------------------------------------------------------------------------ counts and labels


def test_every_prompt_gets_its_label_and_rate() -> None:
    table = chosen(SelectRecipe(), *example())
    rows = {row["prompt_id"]: row for row in table.iter_rows(named=True)}
    assert {name: row["label"] for name, row in rows.items()} == {
        "solved": "solved",
        "unsolved": "unsolved_so_far",
        "mixed": "mixed",
        "unscored": "unscored",
        "partly": "mixed",
        "suspect": "suspect_gold",
        "suspect_by_score": "suspect_gold",
        "never_drawn": "unscored",
        "cut": "truncated",
        "half_cut": "unsolved_so_far",
        "cut_but_mixed": "mixed",
    }
    assert rows["partly"]["pass_rate"] == pytest.approx(1 / 3), "an unscored sample is no failure"
    assert (rows["partly"]["trials"], rows["partly"]["unscored"]) == (4, 1)
    for name in ("unscored", "never_drawn", "suspect_by_score"):
        assert rows[name]["pass_rate"] is rows[name]["pass_rate_estimate"] is rows[name]["mean_score"] is None
    assert rows["unsolved"]["pass_rate_high"] > 0.4, "0 of 4 does not mean 0"
    assert 0 < rows["unsolved"]["pass_rate_estimate"] < rows["mixed"]["pass_rate_estimate"] < 1


def test_nothing_vanishes_uncounted() -> None:
    """Empty completions are failures, NaN and null scores are unscored, and every row is one or the other."""
    scores = score_rows({"a": [C, W, "no_answer", E, C, W], "b": [C, C]}).with_columns(
        pl.Series("score", [1.0, float("nan"), 0.0, None, float("inf"), 0.0, None, 1.0])
    )
    measured = measure(prompt_rows(["a", "b", "c"]), scores, first_samples=2)
    rows = measured.table.to_dicts()
    assert [row["trials"] for row in rows] == [6, 2, 0]
    assert [row["unscored"] for row in rows] == [3, 1, 0]
    assert [row["scored"] for row in rows] == [3, 1, 0]
    assert [row["successes"] for row in rows] == [1, 1, 0], "a success needs a score"
    assert [row["mean_score"] for row in rows] == [pytest.approx(1 / 3, abs=1e-9), 1.0, None]
    assert sum(row["trials"] for row in rows) == scores.height
    assert selection_facts(measured, select(measured, SelectRecipe()))[
        "mean_pass_rate_first_phase"
    ] == pytest.approx(1.0), "of the first two samples of each, the unscored ones left out"


def test_stop_rules_are_carried_over() -> None:
    prompts, scores = example()
    stops = pl.DataFrame(
        {
            "prompt_id": list(DRAWN),
            "trials": [len(drawn) for drawn in DRAWN.values()],
            "stop_rule": ["budget" if name == "never_drawn" else "fixed" for name in DRAWN],
        }
    )
    table = check_table(select(measure(prompts, scores, stops), SelectRecipe()), SelectionTable, "test")
    assert column(table, "stop_rule")["never_drawn"] == "budget"
    assert table["stop_rule"].null_count() == 0


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (lambda s: pl.concat([s, s.head(1)]), "samples scored twice: 1 prompts, such as a"),
        (lambda s: s.with_columns(pl.col("prompt_id").replace("b", "z")), "not in the curation split"),
        (lambda s: s.filter(pl.col("sample_index") < 3), "another number of scores than samples: 2 prompts"),
        (lambda s: s.filter(pl.col("prompt_id") == "a"), "another number of scores than samples: 1 prompts"),
    ],
)
def test_scores_that_do_not_fit_are_refused(broken: Any, problem: str) -> None:
    scores = score_rows({"a": [C, W, W, W], "b": [C] * 4})
    stops = pl.DataFrame({"prompt_id": ["a", "b"], "trials": [4, 4], "stop_rule": ["fixed"] * 2})
    with pytest.raises(ValueError, match=problem):
        measure(prompt_rows(["a", "b"]), broken(scores), stops)


def test_suspect_golds_do_not_shape_the_prior() -> None:
    drawn = {f"{number:02d}": [C, W] * 4 for number in range(30)}
    bad = {f"bad{number:02d}": [W] * 8 for number in range(200)}
    clean = measure(prompt_rows(drawn), score_rows(drawn)).prior
    golds = ["ok"] * 30 + ["suspect_gold"] * 200
    assert measure(prompt_rows(drawn | bad, gold_status=golds), score_rows(drawn | bad)).prior == clean
    assert measure(prompt_rows([]), score_rows({})).prior == JEFFREYS


# ------------------------------------------------------------------------------------------- the band


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (SelectRecipe(), {"mixed", "partly", "cut_but_mixed"}),
        (SelectRecipe(high_closed=True), {"mixed", "partly", "cut_but_mixed", "solved"}),
        (
            SelectRecipe(low_closed=True, high_closed=True),
            {"mixed", "partly", "cut_but_mixed", "solved", "unsolved", "half_cut"},
        ),
        (
            SelectRecipe(low_closed=True, drop_truncated=False),
            {"mixed", "partly", "cut_but_mixed", "unsolved", "half_cut", "cut"},
        ),
        (SelectRecipe(low=0.4, high=0.6), {"mixed"}),
        (SelectRecipe(low=0.5, high=0.9), set()),
        (SelectRecipe(low=0.5, high=0.9, low_closed=True), {"mixed"}),
        (SelectRecipe(low=0.2, high=0.5), {"partly", "cut_but_mixed"}),
    ],
)
def test_the_band_is_open_or_closed_by_name(recipe: SelectRecipe, expected: set[str]) -> None:
    table = chosen(recipe, *example())
    assert set(table.filter("kept")["prompt_id"]) == expected


def test_the_interval_decides_when_it_is_asked_to() -> None:
    """0 of 8 is what a true rate of 0.1 shows 43 % of the time, so it is not dropped; 0 of 64 is."""
    recipe = SelectRecipe(
        low=0.1, high=0.9, low_closed=True, high_closed=True, judge_by="interval", drop_truncated=False
    )
    counts = {"0/8": (0, 8), "0/64": (0, 64), "8/8": (8, 8), "64/64": (64, 64), "32/64": (32, 64)}
    assert column(counted(counts, recipe), "reason") == {
        "0/8": "kept",
        "0/64": "below_band",
        "8/8": "kept",
        "64/64": "above_band",
        "32/64": "kept",
    }
    by_rate = recipe.model_copy(update={"judge_by": "rate"})
    assert column(counted(counts, by_rate), "reason")["0/8"] == "below_band"


@pytest.mark.parametrize(("low", "high", "kept"), [(0.0, 0.8, {"0/8": False}), (0.1, 1.0, {"8/8": False})])
@pytest.mark.parametrize("closed", [False, True])
def test_an_open_end_at_0_or_1_drops_what_never_disagreed_also_by_interval(
    low: float, high: float, kept: dict[str, bool], closed: bool
) -> None:
    recipe = SelectRecipe(low=low, high=high, low_closed=closed, high_closed=closed, judge_by="interval")
    found = column(counted({"0/8": (0, 8), "8/8": (8, 8)}, recipe), "kept")
    assert {name: found[name] for name in kept} == dict.fromkeys(kept, closed)


# ------------------------------------------------------------------------------ caps, quotas and weights


def test_the_first_reason_that_applies_is_given() -> None:
    prompts, scores = example()
    prompts = prompts.with_columns(pl.lit("one").alias("cluster"))
    recipe = SelectRecipe(
        max_per_cluster=1, max_source_share=0.5, difficulty_shares=[0.0, 0.0], target_size=1
    )
    reasons = column(chosen(recipe, prompts, scores), "reason")
    assert reasons == {
        "suspect": "suspect_gold",
        "suspect_by_score": "suspect_gold",
        "unscored": "unscored",
        "never_drawn": "unscored",
        "cut": "truncated",
        "unsolved": "below_band",
        "half_cut": "below_band",
        "solved": "above_band",
        "cut_but_mixed": "difficulty_quota",
        "mixed": "difficulty_quota",
        "partly": "difficulty_quota",
    }


def test_of_a_cluster_only_so_many_are_kept() -> None:
    counts = dict.fromkeys("abcdef", (1, 4))
    table = counted(counts, SelectRecipe(max_per_cluster=2), cluster=list("aaaaef"))
    assert column(table, "reason") == {
        "a": "kept",
        "b": "kept",
        "c": "near_duplicate",
        "d": "near_duplicate",
        "e": "kept",
        "f": "kept",
    }


def test_a_prompt_that_was_dropped_takes_no_place_of_its_cluster() -> None:
    counts = {"a": (0, 4), "b": (1, 4), "c": (1, 4)}
    table = counted(counts, SelectRecipe(max_per_cluster=1), cluster=["a"] * 3)
    assert column(table, "reason") == {"a": "below_band", "b": "kept", "c": "near_duplicate"}


def test_shares_count_of_what_would_be_kept_without_them() -> None:
    counts = {f"{number:02d}": (1 if number < 20 else 0, 4) for number in range(30)}
    names = list(counts)
    clusters = ["one"] * 8 + names[8:]
    drawn = {name: [C] * wins + [W] * (trials - wins) for name, (wins, trials) in counts.items()}
    table = measure(prompt_rows(names, cluster=clusters), score_rows(drawn)).table
    assert quota_base(table, SelectRecipe()) == 20, "those in the band"
    assert quota_base(table, SelectRecipe(max_per_cluster=3)) == 3 + 12
    assert quota_base(table, SelectRecipe(max_per_cluster=3, target_size=10)) == 10
    assert quota_base(table, SelectRecipe(target_size=100)) == 20


def test_a_source_quota_counts_of_the_target() -> None:
    counts = {f"{number:03d}": (1, 4) for number in range(100)}
    sources = ["big"] * 80 + ["small"] * 20
    table = counted(counts, SelectRecipe(max_source_share=0.5, target_size=30), source=sources)
    kept = table.filter("kept")["source"].value_counts()
    assert dict(kept.iter_rows()) == {"big": 15, "small": 15}
    assert dict(table["reason"].value_counts().iter_rows()) == {
        "kept": 30,
        "source_quota": 70,
    }


def test_difficulty_shares_do_not_fill_up_from_others() -> None:
    counts = {f"{number:03d}": (1 if number < 60 else 7, 8) for number in range(70)}
    table = counted(counts, SelectRecipe(difficulty_shares=[0.5, 0.5], target_size=40))
    kept = table.filter("kept")
    assert kept.filter(pl.col("pass_rate_estimate") < 0.5).height == 20
    assert kept.filter(pl.col("pass_rate_estimate") >= 0.5).height == 10, "all there are"
    assert set(table.filter(~pl.col("kept"))["reason"]) == {"difficulty_quota"}


def test_strata_and_shares() -> None:
    assert [stratum(rate, 4) for rate in (0.0, 0.2499, 0.25, 0.5, 0.99, 1.0)] == [0, 0, 1, 2, 3, 3]
    assert [quota(share, 30) for share in (0.1, 0.11, 0.0, 1.0)] == [3, 4, 0, 30]


def test_weights_follow_the_variance() -> None:
    counts = {"a": (1, 16), "b": (8, 16), "c": (12, 16), "z": (0, 16)}
    table = counted(counts, SelectRecipe(weighting="variance"))
    weights, estimates = column(table, "weight"), column(table, "pass_rate_estimate")
    assert weights["z"] == 0
    assert sum(weights.values()) == pytest.approx(3), "mean 1 over the kept"
    assert weights["b"] > weights["c"] > weights["a"]
    variance = {name: rate * (1 - rate) for name, rate in estimates.items()}
    assert weights["b"] / weights["a"] == pytest.approx(variance["b"] / variance["a"])
    assert set(column(counted(counts, SelectRecipe()), "weight").values()) == {0.0, 1.0}


# ----------------------------------------------------------------------------------------- properties

statuses = st.lists(st.sampled_from([C, C, W, W, W, E, S]), max_size=8)
some_prompts = st.lists(
    st.tuples(
        statuses,
        st.sampled_from(["x", "y", "z"]),
        st.integers(0, 4),
        st.integers(0, 8),
        st.sampled_from(["ok", "ok", "ok", S]),
    ),
    min_size=1,
    max_size=30,
)
bands = st.tuples(st.floats(0, 1), st.floats(0, 1), st.booleans(), st.booleans()).filter(
    lambda band: band[0] < band[1]
)
recipes = st.builds(
    lambda band, judge_by, **rest: SelectRecipe(
        low=band[0],
        high=band[1],
        low_closed=band[2],
        high_closed=band[3],
        judge_by="rate" if band[:2] == (0, 1) else judge_by,  # an interval is never outside of 0..1
        **rest,
    ),
    bands | st.just((0.0, 1.0, False, False)),
    st.sampled_from(["rate", "interval"]),
    drop_truncated=st.booleans(),
    max_per_cluster=st.none() | st.integers(1, 3),
    max_source_share=st.none() | st.floats(0.05, 1),
    difficulty_shares=st.none() | st.lists(st.floats(0, 1), min_size=1, max_size=4),
    target_size=st.none() | st.integers(1, 20),
    weighting=st.sampled_from(["none", "variance"]),
)
slow_is_fine = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def built(rows: list[tuple[Any, ...]]) -> tuple[pl.DataFrame, pl.DataFrame]:
    ids = [stable_hash(number)[:12] for number in range(len(rows))]
    prompts = prompt_rows(
        ids,
        source=[row[1] for row in rows],
        cluster=[f"c{row[2]}" for row in rows],
        gold_status=[row[4] for row in rows],
    )
    drawn = {name: row[0] for name, row in zip(ids, rows, strict=True)}
    return prompts, score_rows(drawn, {name: row[3] for name, row in zip(ids, rows, strict=True)})


@slow_is_fine
@given(some_prompts, recipes)
def test_every_prompt_has_one_reason_and_no_quota_is_exceeded(rows: list[Any], recipe: SelectRecipe) -> None:
    prompts, scores = built(rows)
    measured = measure(prompts, scores)
    table = check_table(select(measured, recipe), SelectionTable, "test")
    assert table["prompt_id"].to_list() == sorted(prompts["prompt_id"])
    assert (table["kept"] == (table["reason"] == "kept")).all()
    assert ((table["weight"] > 0) == table["kept"]).all()
    kept, base = table.filter("kept"), quota_base(measured.table, recipe)
    if kept.height:
        assert kept["weight"].mean() == pytest.approx(1)
    if recipe.max_per_cluster:
        assert all(count <= recipe.max_per_cluster for _, count in kept["cluster"].value_counts().iter_rows())
    if recipe.max_source_share:
        most = recipe.max_source_share * base + 1
        assert all(count < most for _, count in kept["source"].value_counts().iter_rows())
    if recipe.difficulty_shares:
        strata = [stratum(rate, len(recipe.difficulty_shares)) for rate in kept["pass_rate_estimate"]]
        for at, share in enumerate(recipe.difficulty_shares):
            assert strata.count(at) < share * base + 1
    if recipe.target_size:
        assert kept.height <= recipe.target_size
    if not recipe.max_source_share and not recipe.difficulty_shares:
        assert kept.height == base, "caps alone leave what shares are counted of"


@slow_is_fine
@given(some_prompts, recipes, st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(rows: list[Any], recipe: SelectRecipe, rng: Any) -> None:
    prompts, scores = built(rows)
    orders = [rng.sample(range(frame.height), frame.height) for frame in (prompts, scores)]
    shuffled = measure(prompts[orders[0]], scores[orders[1]] if orders[1] else scores)
    assert_frame_equal(select(measure(prompts, scores), recipe), select(shuffled, recipe), check_exact=True)


@slow_is_fine
@given(some_prompts, recipes, bands)
def test_a_wider_band_drops_no_prompt_for_the_band(rows: list[Any], recipe: SelectRecipe, other: Any) -> None:
    wider = recipe.model_copy(
        update={
            "low": min(recipe.low, other[0]),
            "high": max(recipe.high, other[1]),
            "low_closed": recipe.low_closed or other[0] < recipe.low or other[2],
            "high_closed": recipe.high_closed or other[1] > recipe.high or other[3],
        }
    )
    measured = measure(*built(rows))
    outside = {"below_band", "above_band"}
    before, after = (column(select(measured, each), "reason") for each in (recipe, wider))
    assert {name for name, reason in after.items() if reason in outside} <= {
        name for name, reason in before.items() if reason in outside
    }


# --------------------------------------------------------------------------------------- what is told


def test_the_histogram_counts_every_measured_prompt_once() -> None:
    counts = {"0": (0, 4), "1/16": (1, 16), "3/10": (3, 10), "1/4": (1, 4), "15/16": (15, 16), "1": (4, 4)}
    found = histogram(counted(counts, SelectRecipe(low=0.2)))
    assert found["rates"] == [0, 0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95, 1]
    assert found["labels"][:3] + found["labels"][-2:] == ["0", "0-0.1", "0.1-0.2", "0.9-1", "1"]
    assert found["before"] == [1, 1, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1], "3/10 is in the bin from 0.3"
    assert found["after"] == [0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 0]
    assert sum(histogram(chosen(SelectRecipe(), *example()))["before"]) == 8, "8 of 11 have a scored sample"


def test_what_was_dropped_is_counted_by_reason_and_by_source() -> None:
    prompts, scores = example()
    sources = ["left"] * 4 + ["right"] * 7
    table = chosen(SelectRecipe(), prompts.with_columns(pl.Series("source", sources)), scores)
    found = dropped(table)
    assert found["reasons"] == dict.fromkeys(REASONS[1:], 0) | {
        "suspect_gold": 2,
        "unscored": 2,
        "truncated": 1,
        "below_band": 2,
        "above_band": 1,
    }
    assert list(found["sources"]) == ["left", "right"]
    assert found["sources"]["left"] == dict.fromkeys(LABELS, 0) | {
        "solved": 1,
        "unsolved_so_far": 1,
        "mixed": 1,
        "unscored": 1,
    }
    assert render_dropped(table).splitlines()[:2] == [
        "reason              prompts  of which",
        "kept                      3  3 mixed",
    ]
    assert "below_band                2  2 unsolved_so_far" in render_dropped(table)


def test_facts_add_up() -> None:
    measured = measure(*example(), first_samples=2)
    facts = selection_facts(measured, select(measured, SelectRecipe()))
    assert facts["total"] == 11 == sum(facts[label] for label in LABELS)
    assert facts["total"] - facts["kept"] == sum(
        value for name, value in facts.items() if name.startswith("dropped/")
    )
    assert (facts["prior_a"], facts["prior_b"]) == JEFFREYS, "11 prompts are too few to fit"
    assert facts["mean_pass_rate"] == pytest.approx((1 + 0 + 1 / 2 + 1 / 3 + 0 + 0 + 1 / 4) / 7)
    assert facts["mean_pass_rate_first_phase"] == pytest.approx((1 + 0 + 1 / 2 + 1 + 0 + 0 + 1 / 2) / 7)
    empty = measure(prompt_rows(["a"]), score_rows({"a": [E]}))
    assert "mean_pass_rate" not in selection_facts(empty, select(empty, SelectRecipe()))


def facts_of(**counts: int) -> dict[str, int]:
    named = {name.replace("dropped_", "dropped/"): value for name, value in counts.items()}
    return {"total": 600, "kept": 5} | named


@pytest.mark.parametrize(
    ("facts", "help_"),
    [
        (facts_of(unsolved_so_far=400, solved=195, dropped_below_band=400, dropped_above_band=195), "longer"),
        (facts_of(unsolved_so_far=195, solved=400, dropped_below_band=195, dropped_above_band=400), "harder"),
        (facts_of(mixed=590, dropped_below_band=585), "lower select.recipe.low"),
        (facts_of(mixed=590, dropped_above_band=585), "raise select.recipe.high"),
        (facts_of(truncated=590, dropped_truncated=590), "sample.recipe.max_completion_length"),
        (facts_of(suspect_gold=590, dropped_suspect_gold=590), "correct the prompts labelled suspect_gold"),
        (facts_of(unscored=590, dropped_unscored=590), "column `detail`"),
        (facts_of(mixed=590, dropped_near_duplicate=590), "max_per_cluster"),
        (facts_of(mixed=590, dropped_source_quota=590), "max_source_share"),
        (facts_of(mixed=590, dropped_difficulty_quota=590), "difficulty_shares"),
        (facts_of(mixed=590, dropped_target_size=590), "raise select.recipe.target_size"),
        (
            facts_of(
                unsolved_so_far=300, dropped_below_band=300, dropped_above_band=250, dropped_target_size=40
            ),
            "raise select.recipe.target_size",
        ),
        (
            facts_of(unsolved_so_far=500, dropped_below_band=500, dropped_target_size=5),
            "train the warm start longer",
        ),
        (facts_of() | {"total": 5}, "too few curation prompts"),
    ],
)
def test_the_help_follows_what_most_prompts_died_of(facts: dict[str, int], help_: str) -> None:
    assert help_ in shortage("train_grpo", facts, "one batch needs 16", 16)


# ------------------------------------------------------------------------------------------ the stage


def inputs_of(folder: Path, prompts: pl.DataFrame, scores: pl.DataFrame) -> dict[str, ArtifactRef]:
    table = prompts.with_columns(
        pl.lit("curation").alias("split"),
        pl.col("prompt_id").alias("prompt"),
        pl.lit(None, pl.String).alias("completion"),
        pl.lit("SELECT 1").alias("solution"),
        pl.lit("d").alias("db_id"),
    )
    heldout = table.head(1).with_columns(pl.lit("other").alias("prompt_id"), pl.lit("heldout").alias("split"))
    stops = prompts.select("prompt_id", pl.lit("fixed").alias("stop_rule")).join(
        scores.group_by("prompt_id").agg(pl.len().cast(pl.Int64).alias("trials")), on="prompt_id", how="left"
    )
    write_table(pl.concat([table, heldout]), folder / "prompts/payload/prompts.parquet", PromptTable)
    write_table(scores, folder / "scores/payload/scores.parquet", ScoreTable)
    stops = stops.with_columns(pl.col("trials").fill_null(0))
    write_table(stops, folder / "samples/payload/stops.parquet", StopTable)
    request = {"request": {"recipe": {"first_samples": 4}}}
    (folder / "samples" / "manifest.json").write_text(json.dumps(request))
    return {
        role: ArtifactRef(role, role, "x", "k", "d", str(folder / role))  # type: ignore[arg-type]
        for role in ("prompts", "samples", "scores")
    }


def build_in(folder: Path, prompts: pl.DataFrame, scores: pl.DataFrame, recipe: SelectRecipe) -> Build:
    return Build(
        recipe=recipe,
        runtime=None,
        seed=0,
        inputs=inputs_of(folder / "inputs", prompts, scores),
        experiment=Experiment(name="selection"),
        reward=RewardSpec(),
        partial=ArtifactStore(folder).open_partial("select_prompts", "x", "k" * 64),
        run=TrackedRun("selection", "select_prompts", {}),
        console=Console("select_prompts"),
    )


def commit(build: Build, facts: Any) -> ArtifactRef:
    ref = ArtifactRef("prompts", SELECT_PROMPTS.name, "x", "k" * 64, "", str(build.partial.path))
    rest: dict[str, Any] = dict.fromkeys(("git_commit", "mlflow_run_id", "prefect_flow_run_id"))
    empty: dict[str, Any] = {name: {} for name in ("request", "runtime", "input_refs", "files", "packages")}
    manifest = Manifest(ref=ref, facts=facts, started_at="", seconds=0.0, **rest, **empty)
    return ArtifactStore(Path(build.partial.path).parents[2]).commit(build.partial, manifest).ref


def test_the_stage_writes_what_it_says(tmp_path: Path) -> None:
    build = build_in(tmp_path, *example(), SelectRecipe())
    facts = select_prompts(build)
    kept = read_table(build.payload / "prompts.parquet", PromptTable)
    table = read_table(build.payload / "selection.parquet", SelectionTable)
    assert kept["prompt_id"].to_list() == ["cut_but_mixed", "mixed", "partly"]
    assert table.height == len(DRAWN) and set(table["stop_rule"]) == {"fixed"}
    assert json.loads((build.payload / "dropped.json").read_text()) == dropped(table)
    assert json.loads((build.payload / "histogram.json").read_text()) == histogram(table)
    assert facts["kept"] == 3
    first = {file.name: file.read_bytes() for file in build.payload.iterdir()}
    select_prompts(build)
    assert first == {file.name: file.read_bytes() for file in build.payload.iterdir()}, "same bytes each time"


def test_an_empty_selection_says_what_was_found_and_what_helps(tmp_path: Path) -> None:
    drawn = {f"{number}": [W] * 4 for number in range(6)} | {"s": [C] * 4}
    build = build_in(tmp_path, prompt_rows(drawn), score_rows(drawn), SelectRecipe())
    kept = commit(build, select_prompts(build))
    with pytest.raises(ConfigError) as error:
        require_batch(kept, GrpoRecipe(batch_size=8, num_generations=8))
    assert str(error.value) == (
        "train_grpo: 0 of 7 curation prompts were kept; one batch needs 1 (grpo.recipe.batch_size 8 / num_generations 8). "
        "They count as: 6 unsolved_so_far, 1 solved. Dropped: 6 below_band, 1 above_band. Most were never solved: train the "
        "warm start longer (sft.recipe.steps), add easier prompts, or raise sample.recipe.max_samples so that rare successes "
        "are seen. A smaller grpo.recipe.batch_size needs fewer."
    )


def test_a_batch_needs_so_many_prompts(tmp_path: Path) -> None:
    drawn = {f"{number}": [C, W, W, W] for number in range(4)} | {
        f"s{number}": [C] * 4 for number in range(9)
    }
    build = build_in(tmp_path, prompt_rows(drawn), score_rows(drawn), SelectRecipe())
    kept = commit(build, select_prompts(build))
    require_batch(kept, GrpoRecipe(batch_size=32, num_generations=8))
    with pytest.raises(ConfigError) as error:
        require_batch(kept, GrpoRecipe(batch_size=40, num_generations=8))
    text = str(error.value)
    assert "4 of 13 curation prompts were kept; one batch needs 5 (grpo.recipe.batch_size 40" in text
    assert "9 solved, 4 mixed" in text and "9 above_band" in text and "add harder prompts" in text


def test_a_source_that_stays_over_its_share_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drawn = {f"{number:02d}": [C, W] for number in range(20)}
    prompts = prompt_rows(drawn, source=["big"] * 18 + ["small"] * 2)
    with caplog.at_level("INFO", logger="furlong"):
        select_prompts(build_in(tmp_path, prompts, score_rows(drawn), SelectRecipe(max_source_share=0.5)))
    assert "source 'big' has 83% of the kept prompts although max_source_share is 50%" in caplog.text
    assert "source_quota              8  8 mixed" in caplog.text


# ---------------------------------------------------------------------------------------- comparison


def test_two_selections_side_by_side() -> None:
    first = counted({"a": (0, 4), "b": (1, 4), "c": (4, 4), "d": (2, 4)}, SelectRecipe())
    second = counted({"a": (1, 4), "b": (1, 4), "c": (4, 4), "e": (3, 4)}, SelectRecipe(high_closed=True))
    table, summary = compare_selections(first, second)
    assert table["prompt_id"].to_list() == list("abcde")
    assert column(table, "label_a") == {
        "a": "unsolved_so_far",
        "b": "mixed",
        "c": "solved",
        "d": "mixed",
        "e": None,
    }
    assert column(table, "label_b")["d"] is None and column(table, "source")["e"] == "t"
    assert {name: value for name, value in summary.items() if name != "labels"} == {
        "prompts": 5,
        "in_both": 3,
        "only_in_a": 1,
        "only_in_b": 1,
        "kept_both": 1,
        "kept_only_a": 1,
        "kept_only_b": 3,
        "label_changed": 1,
    }
    assert summary["labels"]["unsolved_so_far"]["mixed"] == 1
    assert sum(sum(row.values()) for row in summary["labels"].values()) == 3
    same = compare_selections(first, first)[1]
    assert same["label_changed"] == same["kept_only_a"] == same["kept_only_b"] == 0
