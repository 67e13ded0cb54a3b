"""What curation costs and what it is worth, against its peers in the same run.

    python benchmarks/curation.py [--parts sampling vllm ...] [--seeds 0 1 2] [--peer PATH] [--quick] [--json]
    python benchmarks/curation.py --collect [--json]

Parts: `sampling` (sequential plan against fixed 16), `vllm` (the stage against a bare `LLM.generate`), `rescore` (stored
samples against the public test-suite evaluator), `resume` (kills), `grpo` (curated against uncurated) and `scale`
(10^4 to 10^6 samples). Each has a module `curation_<part>.py` that says what it compares. What exists in FURLONG_HOME is
reused; rates are measured anew. `--quick` takes one seed and smaller sizes. Each part leaves its result below
`$FURLONG_HOME/benchmarks/`, and `--collect` puts together what is there. `--peer` is a checkout of
taoyds/test-suite-sql-eval, which is no part of this repository.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import (
    curation_grpo,
    curation_rescore,
    curation_resume,
    curation_sampling,
    curation_scale,
    curation_vllm,
)
from benchmarks.curation_runs import REPOSITORY, Options, results_folder, say
from benchmarks.demo_seeds import commit

PARTS: dict[str, ModuleType] = {
    "sampling": curation_sampling,
    "vllm": curation_vllm,
    "rescore": curation_rescore,
    "resume": curation_resume,
    "grpo": curation_grpo,
    "scale": curation_scale,
}
GOALS: dict[str, tuple[str, float]] = {
    "samples_ratio": ("at most", 0.70),
    "mixed_recall": ("at least", 0.98),
    "vllm_ratio": ("at least", 0.95),
    "rescore_ratio": ("at least", 10),
    "resume_duplicates": ("at most", 0),
    "tokens_ratio": ("at most", 0.60),
    "peak_gib_at_1e6": ("at most", 2),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument("--config", default="text2sql_racing")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--quick", action="store_true", help="the first seed alone, and smaller sizes")
    parser.add_argument("--peer", type=Path, help="checkout of taoyds/test-suite-sql-eval")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter with sqlparse and tqdm")
    parser.add_argument("--collect", action="store_true", help="run nothing, show the stored results")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    given = parser.parse_args()
    options = Options(
        config=given.config,
        given=tuple(given.overrides),
        seeds=tuple(given.seeds[:1] if given.quick else given.seeds),
        quick=given.quick,
        peer=given.peer and given.peer.resolve(),
        peer_python=given.peer_python,
    )
    # The stages' own lines (progress, what was reused) go to stderr.
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("furlong").setLevel(logging.INFO)
    records = collect(options) if given.collect else {part: measure(part, options) for part in given.parts}
    show(records)
    if given.json:
        print(json.dumps({**headlines(records), "parts": records}))


def measure(part: str, options: Options) -> dict[str, Any]:
    """Run one part and store its record."""
    say(part)
    started = time.monotonic()
    result = PARTS[part].run(options)
    record = {
        "part": part,
        "config": options.config,
        "overrides": options.overrides,
        "quick": options.quick,
        "seeds": list(options.seeds),
        "commit": commit() + changes(),
        "machine": f"{os.cpu_count()} x {processor()}",
        "seconds": round(time.monotonic() - started, 1),
        "result": result,
    }
    record_path(part, options).write_text(json.dumps(record, indent=2) + "\n")
    return record


def record_path(part: str, options: Options) -> Path:
    quick = "-quick" if options.quick else ""
    return results_folder() / f"curation-{options.config.replace('/', '_')}{quick}-{part}.json"


def collect(options: Options) -> dict[str, Any]:
    """The stored record of each part that there is one of."""
    paths = {part: record_path(part, options) for part in PARTS}
    return {part: json.loads(path.read_text()) for part, path in paths.items() if path.is_file()}


def headlines(records: dict[str, Any]) -> dict[str, float | None]:
    """The seven numbers; None for parts that were not run."""
    found: dict[str, float | None] = dict.fromkeys(GOALS)
    for part, record in records.items():
        found |= PARTS[part].headlines(record["result"])
    return found


def show(records: dict[str, Any]) -> None:
    for part, record in records.items():
        small = ", quick" if record["quick"] else ""
        print(
            f"\n{part}: {record['config']}{small}, seeds {record['seeds']}, commit {record['commit']}, "
            f"{record['machine']}, {record['seconds']:.0f} s"
        )
        if record["overrides"]:
            print(f"  sizes: {' '.join(record['overrides'])}")
        print("\n".join(PARTS[part].lines(record["result"])))
    print()
    for name, value in headlines(records).items():
        bound, goal = GOALS[name]
        if value is None:
            print(f"  {name:<18} {'-':>10}   goal: {bound} {goal:g}")
            continue
        reached = value <= goal if bound == "at most" else value >= goal
        print(f"  {name:<18} {value:>10.3f}   goal: {bound} {goal:g}, {'reached' if reached else 'missed'}")


def changes() -> str:
    """`+` when the working tree differs from the commit."""
    answer = subprocess.run(["git", "status", "--porcelain"], cwd=REPOSITORY, capture_output=True, text=True)
    return "+" if answer.stdout.strip() else ""


def processor() -> str:
    """Name of the CPU."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.is_file() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
