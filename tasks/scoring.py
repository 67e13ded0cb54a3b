"""Stage `score_samples`: score stored completions; a new reward version re-scores without any generation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewards.base import Reward
from tasks.configs import StageName
from tasks.rewarding import open_reward
from tasks.stage import Build, Stage

if TYPE_CHECKING:
    import polars as pl

CHUNK = 4096
"""Completions scored together: they are in memory at once, and a crash loses the scores of at most these."""


def score_samples(build: Build) -> Mapping[str, Any]:
    """Payload: `scores.parquet` (ScoreTable), in the order of the samples.

    Works through the samples chunk by chunk, so that a million of them take no more memory than ten thousand; a
    finished chunk is a file in the work folder and survives a crash.
    """
    import polars as pl

    from data.schemas import PromptTable, read_table

    prompts = build.inputs["prompts"]
    table = read_table(prompts.payload / "prompts.parquet", PromptTable)
    samples = build.inputs["samples"].payload / "samples.parquet"
    parts = _score_chunks(build, samples, table, open_reward(build.reward, prompts))
    path = build.payload / "scores.parquet"
    join_parts(parts, path)
    scores = pl.scan_parquet(path).select(pl.exclude("prompt_id", "sample_index", "detail")).collect()
    unscored = scores["score"].null_count() / max(len(scores), 1)
    if unscored > build.recipe.max_unscored_share:
        for part in parts:  # or the next attempt would find the same failures
            part.unlink()
        broken = pl.scan_parquet(path).filter(pl.col("score").is_null()).select("detail").collect()
        reasons = broken["detail"].value_counts(sort=True).head(3).rows()
        raise RuntimeError(
            f"score_samples: {unscored:.0%} of {len(scores)} samples have no score; score.recipe.max_unscored_share "
            f"allows {build.recipe.max_unscored_share:.0%}. Most frequent reasons: {reasons}"
        )
    return {"scored": len(scores), "unscored_share": unscored, **status_shares(scores), **term_means(scores)}


def _score_chunks(build: Build, samples: Path, prompts: pl.DataFrame, reward: Reward) -> list[Path]:
    import polars as pl
    import pyarrow.parquet as pq

    from data.schemas import SampleTable, ScoreTable, check_table, write_table

    parts: list[Path] = []
    done = 0
    file = pq.ParquetFile(samples)
    total = file.metadata.num_rows
    for number, batch in enumerate(file.iter_batches(CHUNK)):
        part = build.partial.work / f"scores-{number:06}.parquet"
        if not part.is_file():
            chunk = check_table(pl.DataFrame(pl.from_arrow(batch)), SampleTable, str(samples))
            write_table(score_table(chunk, prompts, reward), part, ScoreTable)
        parts.append(part)
        done += batch.num_rows
        build.console.progress(done, total, "completions scored")
    return parts


def join_parts(parts: Sequence[Path], path: Path) -> None:
    """Write score tables one after the other as one; a term that a part lacks is null there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.unify_schemas([pq.read_schema(part) for part in parts])
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for part in parts:
            table = pq.read_table(part)
            columns = [
                table[field.name] if field.name in table.column_names else pa.nulls(len(table), field.type)
                for field in schema
            ]
            writer.write_table(pa.table(columns, schema=schema))


def score_table(samples: pl.DataFrame, prompts: pl.DataFrame, reward: Reward) -> pl.DataFrame:
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
    results = reward.results(
        prompts=rows["prompt"].to_list(),
        completions=rows["completion"].to_list(),
        solution=rows["solution"].to_list(),
        db_id=rows["db_id"].to_list(),
    )
    terms = sorted({name for result in results for name in result.terms})
    return rows.select("prompt_id", "sample_index").with_columns(
        pl.Series("score", [result.score for result in results], dtype=pl.Float64),
        pl.Series("status", [str(result.status) for result in results]),
        pl.Series("detail", [result.detail for result in results], dtype=pl.String),
        rows["truncated"],
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
    "score_samples", StageName.SCORE, "scores", 2, score_samples, rewarded=True, seeded=False
)
