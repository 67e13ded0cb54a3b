"""Stages `train_sft` and `train_grpo`: start the training job and keep what it resolved and measured."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.configs import StageName
from tasks.jobs.protocol import METRICS, RESOLVED
from tasks.recipes import TrainingRuntime
from tasks.rewarding import reward_arguments
from tasks.stage import Build, Stage


def train_sft(build: Build) -> Mapping[str, Any]:
    """Payload: a model folder; record: `metrics.jsonl` and `resolved_arguments.json`."""
    from data.schemas import PromptTable, read_table, require_demonstrations

    table = build.inputs["prompts"].payload / "prompts.parquet"
    require_demonstrations(read_table(table, PromptTable), str(table))
    return _train(build, "sft")


def train_grpo(build: Build) -> Mapping[str, Any]:
    """Payload: as `train_sft`, of the prompts that the selection kept; record: also `checkpoint-<step>` if asked for."""
    facts = _train(build, "grpo", reward=reward_arguments(build.reward, build.inputs["databases"]))
    for checkpoint in sorted((build.partial.work / "kept").glob("checkpoint-*")):
        (checkpoint / "training_args.bin").unlink(missing_ok=True)
        shutil.move(checkpoint, build.partial.record / checkpoint.name)
    return facts


def _train(build: Build, program: str, **options: Any) -> Mapping[str, Any]:
    runtime: TrainingRuntime = build.runtime
    facts = build.job(program, torchrun=runtime.ranks > 1 or runtime.zero_stage is not None, **options)
    record = build.partial.record
    shutil.copy(build.partial.logs / RESOLVED, record)
    (record / METRICS).write_text(whole_history(build.partial.path))
    resolved = json.loads((record / RESOLVED).read_text())
    build.run.params({"resolved": {name: value for name, value in resolved.items() if value is not None}})
    build.run.file(record / RESOLVED)
    return facts


def whole_history(partial: Path) -> str:
    """Metric lines of all attempts as one run: each attempt replaces earlier lines from its first step on."""
    history: list[dict[str, Any]] = []
    attempts = sorted((partial / "logs").glob("attempt_*"), key=lambda folder: int(folder.name.split("_")[1]))
    for folder in attempts:
        lines = _read_lines(folder / METRICS)
        if lines:
            history = [line for line in history if line["step"] < lines[0]["step"]] + lines
    return "".join(json.dumps(line) + "\n" for line in history)


def _read_lines(file: Path) -> list[dict[str, Any]]:
    lines = []
    for text in file.read_text().splitlines() if file.is_file() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:  # torn by a kill in the middle of a write
            continue
    return lines


TRAIN_SFT = Stage("train_sft", StageName.SFT, "model", 1, train_sft)
TRAIN_GRPO = Stage("train_grpo", StageName.GRPO, "model", 1, train_grpo, rewarded=True)
