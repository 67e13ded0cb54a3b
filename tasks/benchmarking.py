"""Stage `run_benchmark`: greedy accuracy, mean@k and pass@k of one model on the held-out prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from data.pass_rate import mean_interval, pass_at_k, wilson
from rewards.base import Status
from tasks.configs import StageName
from tasks.recipes import BenchmarkRecipe
from tasks.rewarding import open_reward
from tasks.sampling import draw_completions, engine_request
from tasks.scoring import score_table, status_shares
from tasks.stage import Build, Stage

if TYPE_CHECKING:
    import polars as pl


def run_benchmark(build: Build) -> Mapping[str, Any]:
    """Payload: `benchmark.json`, and the completions and scores behind it (`greedy*`, `samples*`)."""
    from data.schemas import PromptTable, SampleTable, ScoreTable, read_table, write_table

    recipe: BenchmarkRecipe = build.recipe
    facts = draw_completions(build, recipe.engine, "heldout", _draws(recipe))
    prompts = build.inputs["prompts"]
    table = read_table(prompts.payload / "prompts.parquet", PromptTable)
    reward = open_reward(build.reward, prompts)
    scores = {}
    for name in ("greedy", "samples"):
        drawn = read_table(build.payload / f"{name}.parquet", SampleTable)
        scores[name] = score_table(drawn, table, reward)
        write_table(scores[name], build.payload / f"{name}_scores.parquet", ScoreTable)
        build.run.table(_examples(drawn, scores[name], table), f"tables/{name}.json")
    results = summarise(scores["greedy"], scores["samples"], recipe)
    (build.payload / "benchmark.json").write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
    build.console.line(
        f"greedy {results['greedy']:.1%} [{results['greedy_low']:.1%}, {results['greedy_high']:.1%}], "
        f"mean@{recipe.k} {results['mean@k']:.1%}, pass@{recipe.k} {results['pass@k']:.1%}"
    )
    return {**facts, **results, **status_shares(scores["samples"])}


def _draws(recipe: BenchmarkRecipe) -> list[dict[str, Any]]:
    """One greedy completion a prompt, and k sampled ones."""

    def draw(name: str, count: int, temperature: float, top_p: float) -> dict[str, Any]:
        sampling = {
            "temperature": temperature,
            "top_p": top_p,
            "max_completion_length": recipe.max_completion_length,
        }
        return {"name": name, "plan": {"first": count, "more": count, "cap": count}, "sampling": sampling}

    return [draw("greedy", 1, 0.0, 1.0), draw("samples", recipe.k, recipe.temperature, recipe.top_p)]


def summarise(greedy: pl.DataFrame, samples: pl.DataFrame, recipe: BenchmarkRecipe) -> dict[str, float]:
    """Accuracy is the share of status `correct`; unscored rows are left out and counted.

    `greedy` has a Wilson interval over prompts, `mean@k` a Student-t interval over prompts' own rates. `pass@k` is over
    the `pass@k_prompts` prompts with k scored samples; it does not exist for the others.

    Raises:
        ValueError: no prompt has k scored samples.
    """
    import polars as pl

    correct = (pl.col("status") == str(Status.CORRECT)).alias("correct")
    scored = greedy.filter(pl.col("score").is_not_null()).select(correct)["correct"]
    low, high = wilson(int(scored.sum()), len(scored), recipe.confidence)
    groups = (
        samples.filter(pl.col("score").is_not_null())
        .group_by("prompt_id", maintain_order=True)
        .agg(pl.len().alias("n"), correct.sum().alias("c"))
    )
    whole = groups.filter(pl.col("n") >= recipe.k)
    rates = (groups["c"] / groups["n"]).to_list()
    mean_low, mean_high = mean_interval(rates, recipe.confidence)
    if whole.is_empty():
        raise ValueError(
            f"run_benchmark: none of {samples['prompt_id'].n_unique()} prompts has {recipe.k} scored samples, so pass@"
            f"{recipe.k} does not exist; look at `detail` in samples_scores.parquet for why they have no score"
        )
    return {
        "prompts": len(scored),
        "unscored": greedy["score"].null_count() + samples["score"].null_count(),
        "greedy": _mean(scored.to_list()),
        "greedy_low": low,
        "greedy_high": high,
        "k": recipe.k,
        "confidence": recipe.confidence,
        "mean@k": _mean(rates),
        "mean@k_low": max(0.0, mean_low),
        "mean@k_high": min(1.0, mean_high),
        "pass@k": pass_at_k(whole["n"].to_list(), whole["c"].to_list(), recipe.k),
        "pass@k_prompts": whole.height,
    }


def _mean(values: list[Any]) -> float:
    return sum(values) / len(values) if values else 0.0


def _examples(
    samples: pl.DataFrame, scores: pl.DataFrame, prompts: pl.DataFrame, rows: int = 100
) -> list[dict[str, Any]]:
    """First rows of a benchmark, for people: prompt, completion, gold, score and why."""
    joined = samples.join(scores, on=["prompt_id", "sample_index"]).join(
        prompts, on="prompt_id", suffix="_gold"
    )
    return (
        joined.head(rows)
        .select("prompt", "completion", "solution", "score", "status", "detail", "source")
        .to_dicts()
    )


RUN_BENCHMARK = Stage(
    "run_benchmark",
    StageName.BENCHMARK,
    "report",
    2,
    run_benchmark,
    rewarded=True,
    request=lambda recipe: {**recipe.model_dump(mode="json"), **engine_request(recipe.engine)},
)
