"""Part `grpo`: GRPO on curated prompts against GRPO on all prompts, from one warm start with one recipe.

Curated: the config's selection. Uncurated: every prompt whose gold is good. Both are benchmarked on the held-out prompts
at step 0 and at each kept checkpoint. `tokens_ratio`: tokens that the curated run had generated when it first reached
the uncurated run's final mean@k (a straight line between checkpoints), over all tokens of the uncurated run. What
curation itself sampled is not in it, and is reported beside it, and so is `tokens_ratio_of_itself`: when the uncurated run
first reached its own final score. Curves that saturate are noisy, and that is below 1 without any effect of curation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.curation_runs import Options, curate, facts_of, results_folder, say
from benchmarks.demo_seeds import spread
from data.artifacts import ArtifactRef
from tasks.benchmarking import RUN_BENCHMARK
from tasks.configs import SelectStage
from tasks.pipeline import Pipeline
from tasks.recipes import SelectRecipe
from tasks.sampling import find_checkpoint
from tasks.selection import SELECT_PROMPTS
from tasks.training import TRAIN_GRPO

EVERYTHING = SelectStage(recipe=SelectRecipe(low_closed=True, high_closed=True, drop_truncated=False))
RATIOS = ("tokens_ratio", "tokens_ratio_of_itself", "tokens_ratio_with_curation", "steps_ratio")
ARMS = ("curated", "uncurated")


def run(options: Options) -> dict[str, Any]:
    seeds = [run_seed(options, seed) for seed in options.seeds]
    result = {
        "k": options.experiment.benchmark.recipe.k,
        "keep_every": options.keep_every(),
        "batch_size": options.experiment.grpo.recipe.batch_size,
        "seeds": seeds,
        "reached": sum(seed["tokens_ratio"] is not None for seed in seeds),
    }
    for name in RATIOS:
        values = [seed[name] for seed in seeds]
        result[name] = spread(values) if None not in values else None
    result["plot"] = str(plot(result, results_folder() / "curation-grpo.png"))
    return result


def run_seed(options: Options, seed: int) -> dict[str, Any]:
    every = options.keep_every()
    with options.pipeline(seed, [f"grpo.recipe.keep_every={every}"]) as pipeline:
        curated = curate(pipeline)
        prompts = curated.prompts
        everything = pipeline.stage(
            SELECT_PROMPTS,
            EVERYTHING,
            name="uncurated",
            prompts=prompts,
            samples=curated.samples,
            scores=curated.scores,
        )
        chosen = {"curated": curated.selection, "uncurated": everything}
        start = benchmark(pipeline, "warm_start", curated.policy, prompts)
        arms = {}
        for name in ARMS:
            say(f"grpo, seed {seed}: {name}")
            model = pipeline.stage(
                TRAIN_GRPO,
                pipeline.experiment.grpo,
                name=name,
                model=curated.policy,
                prompts=chosen[name],
                databases=prompts,
            )
            arms[name] = {
                "prompts": facts_of(chosen[name])["kept"],
                **trained(pipeline, name, model, prompts),
            }
            arms[name]["points"].insert(0, {"step": 0, "tokens": 0, **start})
    sampled = facts_of(curated.samples)
    curation = {"tokens": sampled["completion_tokens"], "completions": sampled["completions"]}
    return {"seed": seed, "curation": curation, "arms": arms, **ratios(arms, curation["tokens"])}


def trained(pipeline: Pipeline, name: str, model: ArtifactRef, prompts: ArtifactRef) -> dict[str, Any]:
    """Held-out scores of each kept checkpoint and of the last model, by step and generated tokens."""
    tokens = tokens_by_step(model.record / "metrics.jsonl")
    last = max(tokens)
    checkpoints = {
        int(folder.name.removeprefix("checkpoint-")): folder for folder in model.record.glob("checkpoint-*")
    }
    points = []
    for step in sorted({*checkpoints, last}):
        policy = model if step == last else find_checkpoint(pipeline, str(checkpoints[step]), prompts)
        scores = benchmark(pipeline, f"{name}_{step}", policy, prompts)
        points.append({"step": step, "tokens": tokens[step], **scores})
    facts = facts_of(model)
    return {
        "tokens": tokens[last],
        "steps": last,
        "zero_variance_share": facts["zero_variance_share"],
        "points": points,
    }


def benchmark(pipeline: Pipeline, name: str, model: ArtifactRef, prompts: ArtifactRef) -> dict[str, float]:
    stage = pipeline.experiment.benchmark
    facts = facts_of(pipeline.stage(RUN_BENCHMARK, stage, name=name, model=model, prompts=prompts))
    return {"greedy": facts["greedy"], "mean_at_k": facts["mean@k"]}


def tokens_by_step(metrics: Path) -> dict[int, int]:
    """Tokens generated up to and with each optimizer step."""
    total, found = 0, {}
    for line in map(json.loads, metrics.read_text().splitlines()):
        total += int(line["metrics"].get("generated_tokens", 0))
        found[line["step"]] = total
    return found


def ratios(arms: dict[str, Any], curation_tokens: int) -> dict[str, float | None]:
    """None where there is nothing to reach (the uncurated run did not improve), or the curated run never reaches it."""
    uncurated, points = arms["uncurated"], arms["curated"]["points"]
    target = uncurated["points"][-1]["mean_at_k"]
    found: dict[str, float | None] = {"target": target}
    improved = target > points[0]["mean_at_k"]
    tokens, steps = (reached_at(points, axis, target) if improved else None for axis in ("tokens", "step"))
    own = reached_at(uncurated["points"], "tokens", target) if improved else None
    total = uncurated["tokens"]
    shares = (
        tokens and tokens / total,
        own and own / total,
        tokens and (tokens + curation_tokens) / total,
        steps and steps / uncurated["steps"],
    )
    return found | dict(zip(RATIOS, shares, strict=True))


def reached_at(points: Sequence[dict[str, Any]], axis: str, target: float) -> float | None:
    """Where `mean_at_k` first reaches `target`, which it is below at first, on straight lines between the points."""
    for before, after in pairwise(points):
        if after["mean_at_k"] >= target:
            part = (target - before["mean_at_k"]) / (after["mean_at_k"] - before["mean_at_k"])
            return before[axis] + part * (after[axis] - before[axis])
    return None


def plot(result: dict[str, Any], path: Path) -> Path:
    """Held-out mean@k by generated tokens: a line for each seed and arm."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    for arm, color in (("uncurated", "#c05621"), ("curated", "#2b6cb0")):
        for place, seed in enumerate(result["seeds"]):
            points = seed["arms"][arm]["points"]
            axes.plot(
                [point["tokens"] / 1000 for point in points],
                [point["mean_at_k"] for point in points],
                marker="o",
                markersize=3,
                color=color,
                label=None if place else arm,
            )
    axes.set_xlabel("thousand tokens generated by GRPO")
    axes.set_ylabel(f"held-out mean@{result['k']}")
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return path


def headlines(result: dict[str, Any]) -> dict[str, float | None]:
    return {"tokens_ratio": result["tokens_ratio"] and result["tokens_ratio"]["mean"]}


def lines(result: dict[str, Any]) -> list[str]:
    k = result["k"]
    rows = [
        f"  {'seed':>4} {'arm':<10}{'prompts':>8}{'steps':>6}{'tokens':>10}{'zero var':>9}  mean@{k} (greedy) by step"
    ]
    for seed in result["seeds"]:
        for arm in ARMS:
            found = seed["arms"][arm]
            curve = ", ".join(
                f"{point['step']}: {point['mean_at_k']:.1%} ({point['greedy']:.1%})"
                for point in found["points"]
            )
            rows.append(
                f"  {seed['seed']:>4} {arm:<10}{found['prompts']:>8}{found['steps']:>6}{found['tokens']:>10,}"
                f"{found['zero_variance_share']:>9.1%}  {curve}"
            )
        rows.append(f"  {'':4} {reached(seed)}")
    for name in RATIOS:
        rows.append(f"  {name:<27} {interval(result[name])}")
    return [*rows, f"  plot: {result['plot']}"]


def reached(seed: dict[str, Any]) -> str:
    curation = seed["curation"]
    drew = f"curation drew {curation['completions']:,} completions, {curation['tokens']:,} tokens"
    if seed["tokens_ratio"] is None:
        start = seed["arms"]["uncurated"]["points"][0]["mean_at_k"]
        why = "not reached" if seed["target"] > start else "nothing to reach"
        return f"{why}: {seed['target']:.1%} from {start:.1%}; {drew}"
    return (
        f"reached {seed['target']:.1%} at {seed['tokens_ratio']:.1%} of the tokens, {seed['steps_ratio']:.1%} of the "
        f"steps; {drew}, with them {seed['tokens_ratio_with_curation']:.1%}"
    )


def interval(values: dict[str, Any] | None) -> str:
    if values is None:
        return "no mean: not reached on every seed"
    known = f"[{values['low']:.1%}, {values['high']:.1%}]" if values["low"] is not None else "(one seed)"
    return f"mean {values['mean']:.1%} {known}, " + ", ".join(f"{value:.1%}" for value in values["values"])
