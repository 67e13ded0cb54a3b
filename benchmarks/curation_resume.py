"""Part `resume`: the sampling stage is killed (SIGKILL to its whole process tree) several times and run to its end.

Counted over all segments of the ledger: (prompt_id, sample_index) pairs that were generated more than once. The result
is compared with that of a run that nobody disturbed. Draws do not depend on the batch, up to float rounding: completions
that differ are counted too.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import psutil

from benchmarks.curation_runs import (
    REPOSITORY,
    Options,
    home_environment,
    run_in_home,
    sample_command,
    samples_in,
    say,
    scratch,
    scratch_home,
    warm_start,
)
from data.artifacts import Manifest

BATCH = ("sample.runtime.batch_size=32",)
"""Completions between two appends: small, so that there are many moments to die in."""
PAUSE_SECONDS = 0.4
"""A kill comes up to so long after the ledger reached its mark, so that it hits all parts of a batch."""


def run(options: Options) -> dict[str, Any]:
    with options.pipeline(options.seed) as pipeline:
        warm_start(pipeline)
    command = sample_command(options, options.seed, BATCH)
    with scratch("resume") as folder:
        whole_home, killed_home = scratch_home(folder / "whole"), scratch_home(folder / "killed")
        say("resume: a run that nobody disturbs")
        run_in_home(command, whole_home)
        whole = samples_in(whole_home)
        expected = len(drawn(whole_home))
        kills = [
            kill_once(command, killed_home, mark, random.Random(f"{options.seed} {mark}"))
            for mark in marks(expected, options.sizes.kills)
        ]
        say("resume: the run that ends")
        run_in_home(command, killed_home)
        resumed = samples_in(killed_home)
        pairs = drawn(killed_home)
        return {
            "seed": options.seed,
            "engine": options.experiment.sample.recipe.engine,
            "kills": kills,
            "segments": len(segments(killed_home)),
            "generated": len(pairs),
            "expected": expected,
            "resume_duplicates": sum(count - 1 for count in Counter(pairs).values()),
            **differences(whole, resumed),
        }


def marks(expected: int, kills: int) -> list[int]:
    """Rows in the ledger at which each kill falls, evenly over the run."""
    return [max(1, expected * (place + 1) // (kills + 1)) for place in range(kills)]


def segments(home: Path) -> list[Path]:
    return sorted(home.glob("ledger/*/*.jsonl"))


def drawn(home: Path) -> list[tuple[str, int]]:
    """(prompt_id, sample_index) of every whole line of all segments, as often as it stands there."""
    pairs = []
    for segment in segments(home):
        for line in segment.read_bytes().split(b"\n"):
            try:
                row = json.loads(line)
            except ValueError:  # the end of a segment, or a line that a kill cut short
                continue
            pairs.append((row["prompt_id"], row["sample_index"]))
    return pairs


def rows_in(home: Path) -> int:
    """The same counted by line ends alone, which is quick."""
    return sum(segment.read_bytes().count(b"\n") for segment in segments(home))


def kill_once(command: list[str], home: Path, mark: int, draws: random.Random) -> dict[str, Any]:
    """Start the stage and kill its tree once the ledger has `mark` rows; says how far it was."""
    started = subprocess.Popen(
        command, cwd=REPOSITORY, env=home_environment(home), stdout=sys.stderr, start_new_session=True
    )
    while started.poll() is None and rows_in(home) < mark:
        time.sleep(0.02)
    time.sleep(draws.uniform(0, PAUSE_SECONDS))
    ended_itself = started.poll() is not None
    tree = [*psutil.Process(started.pid).children(recursive=True)] if not ended_itself else []
    for process in [*tree, *([started] if not ended_itself else [])]:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    started.wait()
    psutil.wait_procs(tree, timeout=30)
    rows = rows_in(home)
    say(
        f"resume: killed {len(tree) + 1} processes at {rows} rows"
        if tree
        else "resume: ended before the kill"
    )
    return {"mark": mark, "rows": rows, "processes": len(tree) + 1, "killed": not ended_itself}


def differences(whole: Manifest, resumed: Manifest) -> dict[str, Any]:
    """Whether both artifacts hold the same bytes, and else how many rows differ."""
    if whole.ref.digest == resumed.ref.digest:
        return {"equal": True, "changed_completions": 0, "changed_stops": 0}
    rows = {}
    for name, key in (("samples", ["prompt_id", "sample_index"]), ("stops", ["prompt_id"])):
        one, other = (pl.read_parquet(run.ref.payload / f"{name}.parquet") for run in (whole, resumed))
        same = one.join(other, on=one.columns, how="semi")
        rows[name] = max(len(one), len(other)) - len(same.unique(key))
    return {"equal": False, "changed_completions": rows["samples"], "changed_stops": rows["stops"]}


def headlines(result: dict[str, Any]) -> dict[str, float | None]:
    return {"resume_duplicates": result["resume_duplicates"]}


def lines(result: dict[str, Any]) -> list[str]:
    killed = ", ".join(str(kill["rows"]) for kill in result["kills"] if kill["killed"])
    same = "the same bytes as an undisturbed run"
    if not result["equal"]:
        same = f"{result['changed_completions']} completions and {result['changed_stops']} stops differ from an undisturbed run"
    return [
        f"  engine {result['engine']}, seed {result['seed']}; killed at {killed or 'no moment'} of {result['expected']:,} rows",
        f"  {result['generated']:,} completions in {result['segments']} segments, {result['resume_duplicates']} generated twice; {same}",
    ]
