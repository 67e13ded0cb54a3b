"""Does GRPO do what the README says? Runs the demo on several seeds and reports means with intervals.

    python benchmarks/demo_seeds.py [--seeds 0 1 2] [--config text2sql_racing] [--set KEY=VALUE ...] [--json]

The peer of GRPO is the warm start of the same run, on the same held-out prompts. A seed changes the data, the
initial weights and all sampling. Intervals over seeds are Student-t, 95 %. Finished seeds are reused.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from data.pass_rate import mean_interval  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--config", default="text2sql_racing")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    given = parser.parse_args()
    runs = [run_demo(given.config, seed, given.overrides) for seed in given.seeds]
    result = {"seeds": given.seeds, "config": given.config, "commit": commit(), **summarise(runs)}
    show(result)
    if given.json:
        print(json.dumps(result))


def run_demo(config: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """One pipeline through its command line; returns the JSON of its last line."""
    print(f"seed {seed} ...", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "flows.sft_grpo", "--config", config, "--seed", str(seed)]
    command += [part for override in overrides for part in ("--set", override)]
    answer = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(answer.stdout.strip().splitlines()[-1])


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    for model in ("base", "sft", "grpo"):
        for name in (name for name in runs[0][model] if name != "greedy_ci"):
            metrics[f"{model}.{name}"] = spread([run[model][name] for run in runs])
    for name in (name for name in runs[0]["sft"] if name != "greedy_ci"):
        metrics[f"gain.{name}"] = spread([run["grpo"][name] - run["sft"][name] for run in runs])
    metrics["zero_variance_share"] = spread([run["zero_variance_share"] for run in runs])
    built = [sum(stage["seconds"] for stage in run["stages"].values()) for run in runs]
    whole = [run["wall_s"] for run in runs if not any(stage["reused"] for stage in run["stages"].values())]
    stages = {
        name: {
            "seconds": median(run["stages"][name]["seconds"] for run in runs),
            "generated_tokens": median(run["stages"][name]["generated_tokens"] for run in runs),
        }
        for name in runs[0]["stages"]
    }
    kept = [run["prompts"]["kept"] / run["prompts"]["total"] for run in runs]
    return {
        "metrics": metrics,
        "kept_share": spread(kept),
        "stage_seconds": {"median": median(built), "values": built},
        "wall_s": {"median": median(whole) if whole else None, "values": whole},
        "stages": stages,
    }


def spread(values: list[float]) -> dict[str, Any]:
    low, high = mean_interval(values)
    known = len(values) > 1
    return {
        "mean": fmean(values),
        "median": median(values),
        "low": low if known else None,
        "high": high if known else None,
        "values": values,
    }


def show(result: dict[str, Any]) -> None:
    print(f"\n{result['config']}, seeds {result['seeds']}, commit {result['commit']}")
    for name, entry in result["metrics"].items():
        values = ", ".join(f"{value:.1%}" for value in entry["values"])
        interval = f"[{entry['low']:.1%}, {entry['high']:.1%}]" if entry["low"] is not None else "(one seed)"
        print(f"  {name:22} {entry['mean']:7.1%} {interval:>20}   {values}")
    print(f"  prompts kept           {result['kept_share']['mean']:7.1%}")
    print(f"  seconds of all stages  {result['stage_seconds']['values']}")
    print(f"  wall, nothing reused   {result['wall_s']['values']}")


def commit() -> str:
    answer = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True
    )
    return answer.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
