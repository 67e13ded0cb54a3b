"""What orchestration costs: imports, a call that reuses everything, and its share of a whole run.

    python benchmarks/orchestration.py [--repeats 5] [--config nano] [--json]

Imports are timed in fresh interpreters, alternating, medians; the peers are `import prefect` (which imports
little until used) and `from prefect import flow` (which every flow module must do). The reuse call needs a
finished run of the config in FURLONG_HOME and makes one if there is none. It uses the server of `make up` when
that runs, else Prefect's embedded one, and says which.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from tasks.service_state import running_services  # noqa: E402

IMPORTS = ("import prefect", "from prefect import flow", "import flows.sft_grpo")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--config", default="nano")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    given = parser.parse_args()
    imports = time_imports(given.repeats)
    first = run(given.config, given.seed)
    again = [run(given.config, given.seed) for _ in range(3)]
    assert all(stage["reused"] for call in again for stage in call["stages"].values()), (
        "a stage was not reused"
    )
    result = {
        "config": given.config,
        "seed": given.seed,
        "imports_s": imports,
        "import_ratio": imports["import flows.sft_grpo"] / imports["import prefect"],
        "import_ratio_to_flow": imports["import flows.sft_grpo"] / imports["from prefect import flow"],
        "server": "running" if running_services() else "embedded",
        "reuse_s": median(call["process_s"] for call in again),
        "orchestration": share(first),
    }
    show(result)
    if given.json:
        print(json.dumps(result))


def time_imports(repeats: int) -> dict[str, float]:
    """Median seconds of each import in a fresh interpreter, one warm-up each for byte code."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    seconds: dict[str, list[float]] = {statement: [] for statement in IMPORTS}
    for repeat in range(repeats + 1):
        for statement in IMPORTS:
            started = time.perf_counter()
            subprocess.run([sys.executable, "-c", statement], check=True, cwd=REPOSITORY, env=environment)
            if repeat:
                seconds[statement].append(time.perf_counter() - started)
    return {statement: round(median(values), 3) for statement, values in seconds.items()}


def run(config: str, seed: int) -> dict[str, Any]:
    """One call of the command line, with `process_s`, the seconds of the whole process."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "flows.sft_grpo", "--config", config, "--seed", str(seed)]
    answer = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    return {**json.loads(answer.stdout.strip().splitlines()[-1]), "process_s": time.perf_counter() - started}


def share(summary: dict[str, Any]) -> dict[str, float] | None:
    """Wall of a run that built everything, minus its jobs' wall; None when it reused anything."""
    if any(stage["reused"] for stage in summary["stages"].values()):
        return None
    jobs = sum(stage["job_seconds"] for stage in summary["stages"].values())
    wall = summary["wall_s"]
    return {"wall_s": wall, "jobs_s": round(jobs, 1), "share": round((wall - jobs) / wall, 4)}


def show(result: dict[str, Any]) -> None:
    for statement, seconds in result["imports_s"].items():
        print(f"  {statement:28} {seconds:6.3f} s")
    ratios = f"{result['import_ratio']:.2f} x import prefect, {result['import_ratio_to_flow']:.2f} x from prefect import flow"
    print(f"  import flows.sft_grpo costs {ratios}")
    print(
        f"  an identical second call     {result['reuse_s']:6.1f} s ({result['server']} server, no job started)"
    )
    if result["orchestration"]:
        cost = result["orchestration"]
        print(f"  orchestration {cost['share']:.1%} of {cost['wall_s']:.0f} s (jobs: {cost['jobs_s']:.0f} s)")
    else:
        print("  orchestration share: not measured, the first call reused stages (use an empty FURLONG_HOME)")


if __name__ == "__main__":
    main()
