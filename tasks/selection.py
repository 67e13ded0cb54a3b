"""Stage `select_prompts`: keep the prompts whose pass rate lies in the band, and say what became of the rest.

GRPO learns only from prompts whose completions disagree; a prompt that is always or never solved costs
sampling and gives no gradient.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from data.pass_rate import wilson
from rewards.base import Status
from tasks.configs import ConfigError, StageName
from tasks.recipes import SelectRecipe
from tasks.stage import Build, Stage

if TYPE_CHECKING:
    import polars as pl

LABELS = ("mixed", "solved", "unsolved", "unscored", "suspect_gold")


def select_prompts(build: Build) -> Mapping[str, Any]:
    """Payload: `prompts.parquet` (the kept PromptTable rows), `selection.parquet`, `histogram.json`."""
    import polars as pl

    from data.schemas import PromptTable, ScoreTable, SelectionTable, read_table, write_table

    prompts = read_table(build.inputs["prompts"].payload / "prompts.parquet", PromptTable)
    scores = read_table(build.inputs["scores"].payload / "scores.parquet", ScoreTable)
    curation = prompts.filter(pl.col("split") == "curation")
    selection = select(curation, scores, build.recipe)
    kept = curation.join(selection.filter("kept").select("prompt_id"), on="prompt_id", how="semi").sort(
        "prompt_id"
    )
    counts = {label: selection.filter(pl.col("label") == label).height for label in LABELS}
    if kept.is_empty():
        raise ConfigError(_nothing_kept(build.recipe, len(curation), counts))
    write_table(kept, build.payload / "prompts.parquet", PromptTable)
    write_table(selection, build.payload / "selection.parquet", SelectionTable)
    (build.payload / "histogram.json").write_text(json.dumps(histogram(selection), indent=2) + "\n")
    build.console.line(f"kept {len(kept)} of {len(curation)} prompts ({_spell(counts)})")
    return {
        "total": len(curation),
        "kept": len(kept),
        **counts,
        "mean_pass_rate": selection["pass_rate"].mean(),
    }


def select(curation: pl.DataFrame, scores: pl.DataFrame, recipe: SelectRecipe) -> pl.DataFrame:
    """SelectionTable of all curation prompts, sorted by prompt_id.

    A prompt's pass rate counts samples with status `correct` among its scored samples. A prompt without a
    scored sample is `unscored`; its gold is `suspect_gold` when the table says so.
    """
    import polars as pl

    counted = scores.group_by("prompt_id").agg(
        pl.len().cast(pl.Int64).alias("trials"),
        pl.col("score").null_count().cast(pl.Int64).alias("unscored"),
        (pl.col("status") == str(Status.CORRECT)).sum().cast(pl.Int64).alias("successes"),
        pl.col("score").mean().alias("mean_score"),
    )
    table = (
        curation.select("prompt_id", "source", "gold_status")
        .join(counted, on="prompt_id", how="left")
        .with_columns(pl.col("trials", "unscored", "successes").fill_null(0))
        .with_columns((pl.col("trials") - pl.col("unscored")).alias("scored"))
        .with_columns(
            pl.when(pl.col("scored") > 0).then(pl.col("successes") / pl.col("scored")).alias("pass_rate"),
        )
    )
    bounds = [wilson(c, n) if n else (None, None) for c, n in table.select("successes", "scored").iter_rows()]
    labelled = table.with_columns(
        pl.Series("pass_rate_low", [low for low, _ in bounds], dtype=pl.Float64),
        pl.Series("pass_rate_high", [high for _, high in bounds], dtype=pl.Float64),
        pl.when(pl.col("gold_status") == "suspect_gold")
        .then(pl.lit("suspect_gold"))
        .when(pl.col("scored") == 0)
        .then(pl.lit("unscored"))
        .when(pl.col("pass_rate") == 0)
        .then(pl.lit("unsolved"))
        .when(pl.col("pass_rate") == 1)
        .then(pl.lit("solved"))
        .otherwise(pl.lit("mixed"))
        .alias("label"),
    )
    scorable = ~pl.col("label").is_in(["suspect_gold", "unscored"])
    kept = (scorable & _in_band(recipe)).fill_null(False).alias("kept")
    return labelled.with_columns(kept).drop("gold_status", "scored").sort("prompt_id")


def _in_band(recipe: SelectRecipe) -> pl.Expr:
    import polars as pl

    rate = pl.col("pass_rate")
    above = rate >= recipe.low if recipe.low_closed else rate > recipe.low
    below = rate <= recipe.high if recipe.high_closed else rate < recipe.high
    return above & below


def histogram(selection: pl.DataFrame) -> dict[str, Any]:
    """Counts of pass rates before and after selection, by the rates that n samples can have: 0, 1/n, ... 1.

    n is the largest number of trials; a rate in between (unscored samples left out) goes to the nearest.
    """
    levels = max([1, *selection["trials"]])
    rates = {"before": selection["pass_rate"].drop_nulls(), "after": selection.filter("kept")["pass_rate"]}
    places = {name: Counter(round(rate * levels) for rate in values) for name, values in rates.items()}
    counts = {name: [found[place] for place in range(levels + 1)] for name, found in places.items()}
    return {"rates": [place / levels for place in range(levels + 1)], **counts}


def _spell(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {label}" for label, count in counts.items() if count)


def _nothing_kept(recipe: SelectRecipe, total: int, counts: Mapping[str, int]) -> str:
    left = "<=" if recipe.low_closed else "<"
    right = "<=" if recipe.high_closed else "<"
    return (
        f"select_prompts: 0 of {total} prompts are inside {recipe.low:g} {left} pass_rate {right} {recipe.high:g} "
        f"({_spell(counts)}). Raise sample.recipe.samples_per_prompt, widen the band, or train the warm start longer."
    )


SELECT_PROMPTS = Stage("select_prompts", StageName.SELECT, "prompts", 1, select_prompts, seeded=False)
