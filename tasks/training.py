"""Stages `train_sft` and `train_grpo`: start the training job and keep what it resolved and measured."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.configs import ConfigError, GrpoRecipe, StageName, TrainingRuntime
from tasks.jobs.protocol import METRICS
from tasks.rewarding import reward_arguments
from tasks.stage import Build, Stage


def train_sft(build: Build) -> Mapping[str, Any]:
    """Payload: a model folder, with `training/` (metrics and resolved arguments) beside the weights."""
    from data.schemas import PromptTable, read_table, require_demonstrations

    table = build.inputs["prompts"].payload / "prompts.parquet"
    require_demonstrations(read_table(table, PromptTable), str(table))
    return _train(build, "sft")


def train_grpo(build: Build) -> Mapping[str, Any]:
    """Payload: as `train_sft`; the prompts are those that the selection kept."""
    _require_one_batch(build)
    return _train(build, "grpo", reward=reward_arguments(build.experiment.reward, build.inputs["databases"]))


def _train(build: Build, program: str, **options: Any) -> Mapping[str, Any]:
    runtime: TrainingRuntime = build.runtime
    facts = build.job(program, torchrun=runtime.ranks > 1 or runtime.zero_stage is not None, **options)
    kept = build.payload / "training"
    kept.mkdir()
    shutil.copy(build.partial.logs / "resolved_arguments.json", kept)
    (kept / METRICS).write_text(_whole_history(build.partial.path))
    resolved = json.loads((kept / "resolved_arguments.json").read_text())
    build.run.params({"resolved": {name: value for name, value in resolved.items() if value is not None}})
    build.run.file(kept / "resolved_arguments.json")
    return facts


def _whole_history(partial: Path) -> str:
    """Metric lines of all attempts in step order; a step that a resumed attempt repeated counts once."""
    history: dict[tuple[int, tuple[str, ...]], str] = {}
    for file in sorted(partial.glob(f"logs/attempt_*/{METRICS}"), key=lambda file: file.stat().st_mtime):
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            history[entry["step"], tuple(sorted(entry["metrics"]))] = line
    return "".join(history[key] + "\n" for key in sorted(history))


def _require_one_batch(build: Build) -> None:
    from data.schemas import PromptTable, read_table

    recipe: GrpoRecipe = build.recipe
    needed = recipe.batch_size // recipe.num_generations
    kept = len(read_table(build.inputs["prompts"].payload / "prompts.parquet", PromptTable))
    if kept < needed:
        raise ConfigError(
            f"train_grpo: the selection kept {kept} prompts, one batch needs {needed} (batch_size {recipe.batch_size} / "
            f"num_generations {recipe.num_generations}). Widen the select band, add curation prompts, or lower batch_size."
        )


TRAIN_SFT = Stage("train_sft", StageName.SFT, "model", 1, train_sft)
TRAIN_GRPO = Stage("train_grpo", StageName.GRPO, "model", 1, train_grpo, rewarded=True)
