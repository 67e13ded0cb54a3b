"""Scores stored samples, and selects by the scores if asked to, in a process of its own that may start no job.

    python -m benchmarks.curation_score_child <request.json>

A fresh process each time, so that no worker remembers golds of an earlier run. The request holds `config`, `overrides`,
`seed`, `prompts` and `samples` (folders of artifacts), `reward` (a RewardSpec, or null for the config's), `select`, and
`answer`: where JSON goes with seconds of the stages themselves, counts, and the process's peak memory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import tasks.stage
from benchmarks.curation_runs import reference
from data.artifacts import ArtifactRef
from tasks.configs import StageName
from tasks.pipeline import Pipeline, open_pipeline
from tasks.recipes import RewardSpec
from tasks.scoring import SCORE_SAMPLES
from tasks.selection import SELECT_PROMPTS

ALLOWED = [StageName.SCORE, StageName.SELECT]


def main(path: str) -> None:
    request = json.loads(Path(path).read_text())
    tasks.stage.run_job = refuse  # type: ignore[assignment]
    prompts = reference(Path(request["prompts"]))
    samples = reference(Path(request["samples"]))
    call = (request["config"], request["overrides"], request["seed"], ALLOWED, frozenset(ALLOWED))
    with open_pipeline("benchmark_curation", *call) as pipeline:
        answer = score_and_select(pipeline, request, prompts, samples)
    Path(request["answer"]).write_text(json.dumps({**answer, "peak_bytes": peak_bytes()}))


def refuse(program: str, *_arguments: Any, **_options: Any) -> NoReturn:
    raise AssertionError(f"scoring and selecting stored samples started the job '{program}'")


def score_and_select(
    pipeline: Pipeline, request: dict[str, Any], prompts: ArtifactRef, samples: ArtifactRef
) -> dict[str, Any]:
    """Seconds and counts; selecting needs samples with a stop table."""
    experiment = pipeline.experiment
    spec = RewardSpec(**request["reward"]) if request["reward"] else None
    scores = pipeline.stage(
        SCORE_SAMPLES, experiment.score, name="benchmark", reward=spec, samples=samples, prompts=prompts
    )
    scoring = pipeline.outcomes[-1]
    answer = {
        "scores": scores.path,
        "scored": scoring.facts["scored"],
        "score_seconds": scoring.seconds,
        "status": {name: value for name, value in scoring.facts.items() if name.startswith("reward_status/")},
    }
    if not request["select"]:
        return answer
    chosen = pipeline.stage(
        SELECT_PROMPTS,
        experiment.select,
        name="benchmark",
        prompts=prompts,
        samples=samples,
        scores=scores,
    )
    selecting = pipeline.outcomes[-1]
    found = {"selection": chosen.path, "select_seconds": selecting.seconds, "kept": selecting.facts["kept"]}
    return {**answer, **found}


def peak_bytes() -> int:
    """Largest resident memory of this process. Not `ru_maxrss`, which starts at what the parent had at the fork."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main(sys.argv[1])
