"""Part `sampling`: the sequential plan against a fixed number of samples, on the warm start's own prompts.

Both plans read one ledger, so a prompt's first completions are the same in both and only what the plans draw differs.
`mixed_recall` below 1 would be a fault of the plan: it stops at no prompt that is not mixed. It is no independent sample.
What is compared: completions, tokens, and the mixed prompts that the selection keeps.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from benchmarks.curation_runs import Curated, Options, curate, facts_of, fixed, say
from benchmarks.demo_seeds import spread


def run(options: Options) -> dict[str, Any]:
    cap = options.experiment.sample.recipe.max_samples
    seeds = []
    for seed in options.seeds:
        say(f"sampling, seed {seed}: sequential, then fixed {cap}")
        with options.pipeline(seed) as pipeline:
            sequential = measure(curate(pipeline))
        with options.pipeline(seed, fixed(cap)) as pipeline:
            whole = measure(curate(pipeline))
        seeds.append(compare(seed, sequential, whole))
    recalls = [seed["mixed_recall"] for seed in seeds if seed["mixed_recall"] is not None]
    return {
        "cap": cap,
        "samples_ratio": spread([seed["samples_ratio"] for seed in seeds]),
        "tokens_ratio": spread([seed["tokens_ratio"] for seed in seeds]),
        "mixed_recall": spread(recalls) if recalls else None,
        "seeds": seeds,
    }


def measure(curated: Curated) -> dict[str, Any]:
    """Completions, tokens and the ids of the mixed prompts that were kept."""
    samples = pl.read_parquet(curated.samples.payload / "samples.parquet")
    selection = pl.read_parquet(curated.selection.payload / "selection.parquet")
    kept = selection.filter((pl.col("label") == "mixed") & pl.col("kept"))
    return {
        "completions": len(samples),
        "tokens": int(samples["completion_tokens"].sum()),
        "newly_drawn": facts_of(curated.samples).get("new_completions"),
        "labels": dict(sorted(selection["label"].value_counts().iter_rows())),
        "prompts": len(selection),
        "mixed": set(kept["prompt_id"]),
    }


def compare(seed: int, sequential: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """One seed's row; `mixed_recall` is None when the fixed plan finds no mixed prompt."""
    both = sequential["mixed"] & whole["mixed"]
    numbers = {
        name: {**plan, "mixed": len(plan["mixed"])}
        for name, plan in (("sequential", sequential), ("fixed", whole))
    }
    return {
        "seed": seed,
        "samples_ratio": sequential["completions"] / whole["completions"],
        "tokens_ratio": sequential["tokens"] / max(whole["tokens"], 1),
        "mixed_recall": len(both) / len(whole["mixed"]) if whole["mixed"] else None,
        **numbers,
    }


def headlines(result: dict[str, Any]) -> dict[str, float | None]:
    recall = result["mixed_recall"]
    return {"samples_ratio": result["samples_ratio"]["mean"], "mixed_recall": recall and recall["mean"]}


def lines(result: dict[str, Any]) -> list[str]:
    rows = [f"  {'seed':>4} {'plan':<11}{'completions':>12}{'tokens':>10}{'mixed kept':>11}  labels"]
    for seed in result["seeds"]:
        for plan in ("sequential", "fixed"):
            found = seed[plan]
            labels = ", ".join(f"{count} {label}" for label, count in found["labels"].items())
            rows.append(
                f"  {seed['seed']:>4} {plan:<11}{found['completions']:>12,}{found['tokens']:>10,}{found['mixed']:>11}  {labels}"
            )
        recall = "-" if seed["mixed_recall"] is None else f"{seed['mixed_recall']:.3f}"
        ratios = f"{seed['samples_ratio']:>12.3f}{seed['tokens_ratio']:>10.3f}{recall:>11}"
        rows.append(f"  {'':4} {'ratio':<11}{ratios}")
    return rows
