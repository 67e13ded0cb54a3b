"""Part `vllm`: tokens per second of sampling through the stage against a bare `LLM.generate`.

All draw as many completions of the same prompts with the same sampling parameters and engine arguments, in fresh
processes, turn about. Loading the model is in no time, and none is warmed up further: vLLM warms up while it loads. Ours
includes what the stage adds: the ledger's writes, and the scoring that decides when a prompt is finished. The peer comes
twice: with a seed for each request, as ours has, and without seeds, which is faster on a CPU but cannot be repeated. The
ratio is to the faster one. A quick run has the one without seeds alone.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.curation_runs import (
    Options,
    call_module,
    fixed,
    run_in_home,
    sample_command,
    samples_in,
    say,
    scratch,
    scratch_home,
    warm_start,
)

SAMPLES = 8
OURS, UNSEEDED, SEEDED = "stage", "LLM.generate", "LLM.generate, seeds"
PEERS = (UNSEEDED, SEEDED)
SECONDS = "generation_seconds"
"""Fact of the sampling job: from the moment that the engine has loaded to the last completion's verdict."""


def run(options: Options) -> dict[str, Any]:
    if importlib.util.find_spec("vllm") is None:
        return {"skipped": "vLLM is not installed", "vllm_ratio": None}
    with options.pipeline(options.seed) as pipeline:
        warm_start(pipeline)
    peers = PEERS[:1] if options.quick else PEERS
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in (OURS, *peers)}
    with scratch("vllm") as folder:
        for repeat in range(options.sizes.repeats):
            say(f"vllm, run {repeat + 1} of {options.sizes.repeats}")
            home = scratch_home(folder / f"home-{repeat}")
            run_in_home(sample_command(options, options.seed, fixed(SAMPLES, "vllm")), home)
            manifest = samples_in(home)
            runs[OURS].append(rate(manifest.facts["generated_tokens"], manifest.facts[SECONDS]))
            job = next(Path(manifest.ref.path).glob("logs/*/request.json"))
            for name in peers:
                request = {"job": str(job), "seeded": name == SEEDED}
                found = call_module("benchmarks.curation_vllm_bare", request, folder)
                runs[name].append(rate(found["tokens"], found["seconds"]))
            shutil.rmtree(home)
    medians = {name: median(run["rate"] for run in found) for name, found in runs.items()}
    return {
        "seed": options.seed,
        "samples_per_prompt": SAMPLES,
        "cores": os.cpu_count(),
        "vllm_ratio": medians[OURS] / max(medians[name] for name in peers),
        "ratios": {name: medians[OURS] / medians[name] for name in peers},
        "medians": medians,
        "runs": runs,
    }


def rate(tokens: int, seconds: float) -> dict[str, float]:
    return {"tokens": tokens, "seconds": round(seconds, 3), "rate": tokens / seconds}


def headlines(result: dict[str, Any]) -> dict[str, float | None]:
    return {"vllm_ratio": result["vllm_ratio"]}


def lines(result: dict[str, Any]) -> list[str]:
    if "skipped" in result:
        return [f"  skipped: {result['skipped']}"]
    rows = [
        f"  fixed {result['samples_per_prompt']} completions a prompt, seed {result['seed']}, {result['cores']} cores"
    ]
    for name, runs in result["runs"].items():
        rates = ", ".join(
            f"{run['rate']:,.0f} ({run['tokens']:,} tokens in {run['seconds']:.1f} s)" for run in runs
        )
        ratio = f"ratio {result['ratios'][name]:.3f}" if name in result["ratios"] else ""
        rows.append(
            f"  {name:<20} median {result['medians'][name]:>8,.0f} tokens/s  {ratio:<12} runs: {rates}"
        )
    return rows
