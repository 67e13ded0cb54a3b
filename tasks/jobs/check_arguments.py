"""Job: build TRL's own argument objects from the training recipes, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tasks.jobs.grpo import grpo_arguments
from tasks.jobs.protocol import Reporter, Request, run
from tasks.jobs.sft import sft_arguments
from tasks.recipes import GrpoRuntime, TrainingRuntime


def main(request: Request) -> None:
    # One rank without ZeRO: the batch arithmetic over ranks was checked when the config was parsed.
    sft_arguments(_alone(request, "sft", TrainingRuntime()))
    grpo_arguments(_alone(request, "grpo", GrpoRuntime()))
    Reporter(request).result({})


def _alone(request: Request, stage: str, runtime: TrainingRuntime) -> Request:
    recipe: dict[str, Any] = request.options["recipes"][stage]
    return replace(request, recipe=recipe, runtime=runtime.model_dump(mode="json"))


if __name__ == "__main__":
    run(main, __doc__)
