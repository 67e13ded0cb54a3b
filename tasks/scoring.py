"""Stage `score_samples`: score stored completions; a new reward version re-scores without any generation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rewards.base import Reward, RewardResult
from tasks.configs import StageName
from tasks.rewarding import open_reward
from tasks.stage import Build, Stage

if TYPE_CHECKING:
    import polars as pl

CHUNK = 512
"""Completions scored between two progress updates."""


def score_samples(build: Build) -> Mapping[str, Any]:
    """Payload: `scores.parquet` (ScoreTable)."""
    import polars as pl

    from data.schemas import PromptTable, SampleTable, ScoreTable, read_table, write_table

    prompts = build.inputs["prompts"]
    samples = read_table(build.inputs["samples"].payload / "samples.parquet", SampleTable)
    table = read_table(prompts.payload / "prompts.parquet", PromptTable)
    scores = score_table(samples, table, open_reward(build.reward, prompts), build.console.progress)
    unscored = scores["score"].null_count() / max(len(scores), 1)
    if unscored > build.recipe.max_unscored_share:
        reasons = scores.filter(pl.col("score").is_null())["detail"].value_counts(sort=True).head(3).rows()
        raise RuntimeError(
            f"score_samples: {unscored:.0%} of {len(scores)} samples have no score; score.recipe.max_unscored_share "
            f"allows {build.recipe.max_unscored_share:.0%}. Most frequent reasons: {reasons}"
        )
    write_table(scores, build.payload / "scores.parquet", ScoreTable)
    return {"scored": len(scores), "unscored_share": unscored, **status_shares(scores), **term_means(scores)}


def score_table(
    samples: pl.DataFrame, prompts: pl.DataFrame, reward: Reward, progress: Callable[[int, int, str], None]
) -> pl.DataFrame:
    """ScoreTable for a SampleTable; `prompts` gives each sample its gold.

    Raises:
        ValueError: a sample's prompt_id is not among the prompts.
    """
    import polars as pl

    columns = ["prompt_id", "prompt", "solution", "db_id"]
    rows = samples.join(prompts.select(columns), on="prompt_id", how="left", maintain_order="left")
    orphans = rows.filter(pl.col("prompt").is_null())
    if not orphans.is_empty():
        raise ValueError(
            f"{len(orphans)} samples belong to no prompt of the prompts artifact (first: {orphans['prompt_id'][0]}); "
            f"samples and prompts must come from the same make_prompts"
        )
    results: list[RewardResult] = []
    for chunk in rows.iter_slices(CHUNK):
        results += reward.results(
            prompts=chunk["prompt"].to_list(),
            completions=chunk["completion"].to_list(),
            solution=chunk["solution"].to_list(),
            db_id=chunk["db_id"].to_list(),
        )
        progress(len(results), len(rows), "completions scored")
    terms = sorted({name for result in results for name in result.terms})
    return rows.select("prompt_id", "sample_index").with_columns(
        pl.Series("score", [result.score for result in results], dtype=pl.Float64),
        pl.Series("status", [str(result.status) for result in results]),
        pl.Series("detail", [result.detail for result in results], dtype=pl.String),
        *(
            pl.Series(f"term_{name}", [r.terms.get(name) for r in results], dtype=pl.Float64)
            for name in terms
        ),
    )


def status_shares(scores: pl.DataFrame) -> dict[str, float]:
    """Share of each status, under the metric names that GRPO uses too."""
    counts = Counter(scores["status"])
    return {f"reward_status/{status}": count / len(scores) for status, count in sorted(counts.items())}


def term_means(scores: pl.DataFrame) -> dict[str, float]:
    """Mean and population std of each reward term over the scored rows."""
    means: dict[str, float] = {}
    for column in (name for name in scores.columns if name.startswith("term_")):
        values = scores[column].drop_nulls()
        if len(values):
            name = f"reward_term/{column.removeprefix('term_')}"
            means |= {f"{name}/mean": float(values.mean()), f"{name}/std": float(values.std(ddof=0))}  # type: ignore[arg-type]
    return means


SCORE_SAMPLES = Stage(
    "score_samples", StageName.SCORE, "scores", 1, score_samples, rewarded=True, seeded=False
)
