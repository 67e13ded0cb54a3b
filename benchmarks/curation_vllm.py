"""Part `vllm`: tokens per second of sampling through the stage against a bare `LLM.generate`.

Both draw the same completions (same prompts, seeds, sampling parameters and engine arguments) in a fresh process, turn
about. Loading the model is in neither time, and neither is warmed up further: vLLM warms up while it loads. Ours
includes what the stage adds: the ledger's writes, and the scoring that decides when a prompt is finished.
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
SECONDS = "generation_seconds"
"""Fact of the sampling job: from the moment that the engine has loaded to the last completion's verdict."""


def run(options: Options) -> dict[str, Any]:
    if importlib.util.find_spec("vllm") is None:
        return {"skipped": "vLLM is not installed", "vllm_ratio": None}
    with options.pipeline(options.seed) as pipeline:
        warm_start(pipeline)
    ours, bare = [], []
    with scratch("vllm") as folder:
        for repeat in range(options.sizes.repeats):
            say(f"vllm, run {repeat + 1} of {options.sizes.repeats}: ours, then bare")
            home = scratch_home(folder / f"home-{repeat}")
            run_in_home(sample_command(options, options.seed, fixed(SAMPLES, "vllm")), home)
            manifest = samples_in(home)
            ours.append(rate(manifest.facts["generated_tokens"], manifest.facts[SECONDS]))
            request = next(Path(manifest.ref.path).glob("logs/*/request.json"))
            found = call_module("benchmarks.curation_vllm_bare", {"job": str(request)}, folder)
            bare.append(rate(found["tokens"], found["seconds"]))
            shutil.rmtree(home)
    medians = {name: median(run["rate"] for run in runs) for name, runs in (("ours", ours), ("bare", bare))}
    return {
        "seed": options.seed,
        "samples_per_prompt": SAMPLES,
        "cores": os.cpu_count(),
        "vllm_ratio": medians["ours"] / medians["bare"],
        "medians": medians,
        "ours": ours,
        "bare": bare,
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
    for name, label in (("ours", "stage"), ("bare", "LLM.generate")):
        rates = ", ".join(
            f"{run['rate']:,.0f} ({run['tokens']:,} tokens in {run['seconds']:.1f} s)" for run in result[name]
        )
        rows.append(f"  {label:<13} median {result['medians'][name]:>8,.0f} tokens/s   runs: {rates}")
    return rows
