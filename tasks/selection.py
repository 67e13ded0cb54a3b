"""Stage `select_prompts`: what each curation prompt showed, which are kept for GRPO, and what became of the rest.

GRPO learns only from prompts whose completions disagree; a prompt that is always or never solved costs sampling and
gives no gradient. Counting streams over the scores, so a million samples need little memory; the rules are pure and
instant (`tasks.selection_rules`), and another band needs no engine.

Not covered: what a success is (the reward's status), how rates are estimated (`data.pass_rate`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from data.artifacts import ArtifactRef
from data.pass_rate import JEFFREYS, Beta, first_phase_rate, fit_beta, posterior
from rewards.base import Status
from tasks.configs import ConfigError, StageName
from tasks.pipeline import load_artifact
from tasks.recipes import SelectRecipe
from tasks.selection_rules import apply_rules
from tasks.stage import Build, Stage

if TYPE_CHECKING:
    import polars as pl

BINS = 10
"""Equal bins of the histogram between the rates 0 and 1, which have bars of their own."""
_COUNTS = ("trials", "unscored", "truncated", "successes", "first_scored", "first_successes")


class Measured(NamedTuple):
    """What the samples showed: one row a curation prompt, before any rule; `prior` is fitted to all of them."""

    table: pl.DataFrame
    prior: Beta


def select_prompts(build: Build) -> Mapping[str, Any]:
    """Payload: `prompts.parquet` (kept PromptTable rows), `selection.parquet` (SelectionTable), `histogram.json`,
    and `dropped.json` with {"reasons": {reason: count}, "sources": {source: {label: count}}}."""
    import polars as pl

    from data.schemas import PromptTable, SelectionTable, StopTable, read_table, write_table

    prompts = read_table(build.inputs["prompts"].payload / "prompts.parquet", PromptTable)
    curation = prompts.filter(pl.col("split") == "curation")
    measured = measure(
        curation,
        pl.scan_parquet(build.inputs["scores"].payload / "scores.parquet"),
        read_table(build.inputs["samples"].payload / "stops.parquet", StopTable),
        _first_samples(build.inputs["samples"]),
    )
    selection = select(measured, build.recipe)
    facts = selection_facts(measured, selection)
    build.console.line(f"kept {facts['kept']} of {facts['total']} prompts\n{render_dropped(selection)}")
    for warning in [*_warnings(selection, build.recipe), *_band_warnings(selection, build.recipe)]:
        build.console.line(warning)
    kept = curation.join(selection.filter("kept").select("prompt_id"), on="prompt_id", how="semi")
    write_table(kept.sort("prompt_id"), build.payload / "prompts.parquet", PromptTable)
    write_table(selection, build.payload / "selection.parquet", SelectionTable)
    for name, content in (("histogram", histogram(selection)), ("dropped", dropped(selection))):
        (build.payload / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    build.run.table(_crosstab(selection).to_dicts(), "tables/dropped.json")
    return facts


def _band_warnings(selection: pl.DataFrame, recipe: SelectRecipe) -> list[str]:
    """A narrow band asks for rates that prompts do not have whose sampling stopped at the first difference."""
    early = selection.filter(selection["stop_rule"] == "mixed").height
    if recipe.judge_by == "interval" or (recipe.low, recipe.high) == (0, 1) or not early:
        return []
    return [
        f"the band {recipe.low:g} to {recipe.high:g} is judged by rates of few completions: sampling of {early} prompts "
        f"stopped as soon as they were mixed. Draw a fixed number (sample.recipe.first_samples = max_samples), or judge_by: "
        f"interval"
    ]


def _first_samples(samples: ArtifactRef) -> int:
    """Completions of every prompt in the first phase, as the samples were drawn."""
    manifest = json.loads((Path(samples.path) / "manifest.json").read_text())
    return manifest["request"]["recipe"]["first_samples"]


def measure(
    curation: pl.DataFrame,
    scores: pl.LazyFrame | pl.DataFrame,
    stops: pl.DataFrame | None = None,
    first_samples: int = 1,
) -> Measured:
    """Counts, rates, estimates and label of every curation prompt, sorted by prompt_id.

    A success is a sample with status `correct` and a score. A score that is null or not finite is unscored and counted:
    trials = scored + unscored. The prior is fitted to the prompts whose gold is not suspect.

    Args:
        curation: `prompt_id`, `source`, `cluster`, `gold_status` of the prompts that were sampled.
        scores: rows of a ScoreTable, streamed.
        stops: the StopTable of the samples, if there is one.
        first_samples: how many samples of each prompt belong to the first phase.

    Raises:
        ValueError: scores of unknown prompts, a sample scored twice, or another number of scores than was sampled.
    """
    import polars as pl

    counts = _count(scores.lazy(), first_samples)
    table = curation.select("prompt_id", "source", "cluster", "gold_status").join(
        counts, on="prompt_id", how="left"
    )
    table = table.with_columns(pl.col(*_COUNTS).fill_null(0)).sort("prompt_id")
    if stops is None:
        table = table.with_columns(pl.lit(None, pl.String).alias("stop_rule"))
    else:
        sampled = stops.select("prompt_id", "stop_rule", pl.col("trials").alias("sampled"))
        table = table.join(sampled, on="prompt_id", how="left", maintain_order="left")
    _check_counts(counts, table)
    scored = pl.col("trials") - pl.col("unscored")
    table = table.with_columns(
        scored.alias("scored"), pl.when(scored > 0).then(pl.col("successes") / scored).alias("pass_rate")
    ).with_columns(_label().alias("label"))
    trusted = table.filter(pl.col("label") != "suspect_gold")
    prior = fit_beta(trusted["successes"], trusted["scored"]) if trusted.height else JEFFREYS
    found = posterior(prior, table["successes"], table["scored"])
    names = ("pass_rate_estimate", "pass_rate_low", "pass_rate_high")
    estimates = [pl.Series(name, values) for name, values in zip(names, found, strict=True)]
    known = pl.col("scored") > 0
    table = table.with_columns(estimates).with_columns(pl.when(known).then(pl.col(names)).name.keep())
    return Measured(table, prior)


def _count(scores: pl.LazyFrame, first_samples: int) -> pl.DataFrame:
    import polars as pl

    scored = pl.col("score").is_not_null() & pl.col("score").is_finite()
    success = scored & (pl.col("status") == str(Status.CORRECT))
    first = pl.col("sample_index") < first_samples
    return (
        scores.group_by("prompt_id")
        .agg(
            pl.len().alias("trials"),
            (~scored).sum().alias("unscored"),
            pl.col("truncated").sum(),
            success.sum().alias("successes"),
            (first & scored).sum().alias("first_scored"),
            (first & success).sum().alias("first_successes"),
            pl.col("sample_index").n_unique().alias("distinct"),
            (pl.col("status") == str(Status.SUSPECT_GOLD)).any().alias("gold_failed"),
            # Rounded, because the order of summation differs from run to run and the artifact's bytes must not.
            pl.col("score").filter(scored).mean().round(9).alias("mean_score"),
        )
        .with_columns(pl.col(*_COUNTS, "distinct").cast(pl.Int64))
        .collect(engine="streaming")
    )


def _check_counts(counts: pl.DataFrame, table: pl.DataFrame) -> None:
    """Scores that would be counted twice, for nobody, or not at all."""
    import polars as pl

    problems = {
        "samples scored twice": counts.filter(pl.col("distinct") != pl.col("trials")),
        "scores of prompts that are not in the curation split": counts.join(
            table, on="prompt_id", how="anti"
        ),
    }
    if "sampled" in table.columns:
        lost = pl.col("sampled").fill_null(0) != pl.col("trials")
        problems["another number of scores than samples"] = table.filter(lost)
    for problem, rows in problems.items():
        if not rows.is_empty():
            raise ValueError(
                f"select_prompts: {problem}: {rows.height} prompts, such as {rows['prompt_id'].min()}; expected one "
                f"score for each sample of each curation prompt. Prompts, samples and scores must be of one chain: "
                f"score these samples again"
            )


def _label() -> pl.Expr:
    import polars as pl

    suspect = (pl.col("gold_status") == "suspect_gold") | (
        (pl.col("scored") == 0) & pl.col("gold_failed").fill_null(False)
    )
    return (
        pl.when(suspect)
        .then(pl.lit("suspect_gold"))
        .when(pl.col("scored") == 0)
        .then(pl.lit("unscored"))
        .when(pl.col("successes") == pl.col("scored"))
        .then(pl.lit("solved"))
        .when(pl.col("successes") > 0)
        .then(pl.lit("mixed"))
        .when(2 * pl.col("truncated") > pl.col("trials"))
        .then(pl.lit("truncated"))
        .otherwise(pl.lit("unsolved_so_far"))
    )


def select(measured: Measured, recipe: SelectRecipe) -> pl.DataFrame:
    """SelectionTable of all curation prompts, sorted by prompt_id."""
    from data.schemas import SelectionTable, column_types

    return apply_rules(measured.table, recipe).select(list(column_types(SelectionTable)))


def selection_facts(measured: Measured, selection: pl.DataFrame) -> dict[str, Any]:
    """Counts by label and by reason, and rates over the prompts whose gold is not suspect.

    `mean_pass_rate` is the mean of the observed rates, biased by early stops; `mean_pass_rate_first_phase` has no bias.
    Rates that do not exist, because nothing was scored, are left out.
    """
    import polars as pl

    from data.schemas import LABELS, REASONS

    labels, reasons = selection["label"].value_counts(), selection["reason"].value_counts()
    labels, reasons = dict(labels.iter_rows()), dict(reasons.iter_rows())
    trusted = measured.table.filter(pl.col("label") != "suspect_gold")
    rates = {
        "mean_pass_rate": trusted["pass_rate"].mean(),
        "mean_pass_rate_first_phase": first_phase_rate(trusted["first_successes"], trusted["first_scored"]),
        "mean_pass_rate_estimate": trusted["pass_rate_estimate"].mean(),
    }
    return {
        "total": selection.height,
        "kept": reasons.get("kept", 0),
        **{label: labels.get(label, 0) for label in LABELS},
        **{f"dropped/{reason}": reasons.get(reason, 0) for reason in REASONS if reason != "kept"},
        **{name: rate for name, rate in rates.items() if isinstance(rate, float) and not math.isnan(rate)},
        "prior_a": measured.prior.a,
        "prior_b": measured.prior.b,
    }


def histogram(selection: pl.DataFrame) -> dict[str, Any]:
    """Prompts by observed pass rate, before and after selection.

    `rates` are the middles of the bars, `labels` their names: 0 alone, ten equal bins that hold their lower end (0 < rate < 0.1, 0.1 <= rate
    < 0.2, ...), and 1 alone. Prompts have different numbers of trials, so single rates would not compare.
    """
    import polars as pl

    scored = pl.col("trials") - pl.col("unscored")
    wins = pl.col("successes")
    # Whole numbers, because 0.3 * 10 in floating point may fall into the bin below.
    bar = pl.when(wins == 0).then(0).when(wins == scored).then(BINS + 1).otherwise(1 + wins * BINS // scored)
    bars = selection.filter(scored > 0).select(bar.alias("bar"), "kept")
    rates = [0.0, *((2 * place + 1) / (2 * BINS) for place in range(BINS)), 1.0]
    counts = {}
    for name, rows in (("before", bars), ("after", bars.filter("kept"))):
        found = dict(rows["bar"].value_counts().iter_rows())
        counts[name] = [found.get(place, 0) for place in range(BINS + 2)]
    labels = ["0", *(f"{place / BINS:g}-{(place + 1) / BINS:g}" for place in range(BINS)), "1"]
    return {"rates": rates, "labels": labels, **counts}


def dropped(selection: pl.DataFrame) -> dict[str, Any]:
    """Why prompts were dropped, and what the prompts of each source count as."""
    import polars as pl

    from data.schemas import LABELS, REASONS

    reasons = dict(selection["reason"].value_counts().iter_rows())
    sources: dict[str, dict[str, int]] = {}
    for source, label, count in (
        selection.group_by("source", "label").agg(pl.len()).sort("source").iter_rows()
    ):
        sources.setdefault(source, dict.fromkeys(LABELS, 0))[label] = count
    return {
        "reasons": {name: reasons.get(name, 0) for name in REASONS if name != "kept"},
        "sources": sources,
    }


def _crosstab(selection: pl.DataFrame) -> pl.DataFrame:
    """`reason`, `label`, `prompts`: most frequent first."""
    import polars as pl

    counted = selection.group_by("reason", "label").agg(pl.len().alias("prompts"))
    return counted.sort("prompts", "reason", "label", descending=[True, False, False])


def render_dropped(selection: pl.DataFrame) -> str:
    """A small table for people: each reason, how many prompts, and what they counted as."""
    from data.schemas import REASONS

    cells = _crosstab(selection).rows()
    lines = [f"{'reason':<18}{'prompts':>9}  of which"]
    for reason in REASONS:
        labels = [(label, count) for name, label, count in cells if name == reason]
        if labels:
            spelt = ", ".join(f"{count} {label}" for label, count in labels)
            lines.append(f"{reason:<18}{sum(count for _, count in labels):>9}  {spelt}")
    return "\n".join(lines)


def _warnings(selection: pl.DataFrame, recipe: SelectRecipe) -> list[str]:
    kept = selection.filter("kept")
    if recipe.max_source_share is None or kept.is_empty():
        return []
    source, count = kept["source"].value_counts(sort=True).row(0)
    if count <= recipe.max_source_share * kept.height + 1:
        return []
    return [
        f"source {source!r} has {count / kept.height:.0%} of the kept prompts although max_source_share is "
        f"{recipe.max_source_share:.0%}: the other sources have too few prompts left; a smaller target_size would hold it"
    ]


def find_selection(path: str) -> ArtifactRef:
    """The artifact of `select_prompts` in a folder.

    Raises:
        ConfigError: the folder holds no finished selection.
    """
    manifest = load_artifact(path)
    if manifest.ref.stage != SELECT_PROMPTS.name:
        raise ConfigError(
            f"'{path}' holds {manifest.ref.stage}; expected a select_prompts artifact, as a curation's summary names it"
        )
    return manifest.ref


SELECT_PROMPTS = Stage("select_prompts", StageName.SELECT, "prompts", 3, select_prompts, seeded=False)
