"""Runs one use of a stage: reuses or builds the artifact, commits it and logs it.

The only module that knows the store, Prefect, MLflow and the launcher at once. Which stages there are and what
their keys are is the pipeline's business (`tasks.pipeline`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from data.artifacts import ArtifactKind, ArtifactRef, Manifest
from data.store import ArtifactStore, Partial
from tasks.configs import Experiment, StageName
from tasks.console import Console, flow_run_id, flow_run_is_cancelled, prefect_tags
from tasks.jobs.protocol import Request
from tasks.launch import Listener, run_job
from tasks.provenance import git_commit, package_versions
from tasks.recipes import Frozen, RewardSpec, Runtime
from tasks.tracking import TrackedRun, log_manifest, log_tables

SECONDS = "seconds"


class StageConfig(Protocol):
    @property
    def recipe(self) -> Frozen: ...
    @property
    def runtime(self) -> Runtime: ...


@dataclass(frozen=True)
class Stage:
    """What a stage is, apart from any run of it.

    Attributes:
        name: `train_grpo`; also the artifact's folder and the name in Prefect and MLflow.
        step: the part of the experiment that configures it.
        version: raised when the same recipe now builds something else.
        build: fills the payload and returns facts (small numbers and strings).
        rewarded: whether the reward's identity belongs to the key.
        seeded: whether the seed does.
        request: what of the recipe enters the key; by default all of it.
    """

    name: str
    step: StageName
    kind: ArtifactKind
    version: int
    build: Callable[[Build], Mapping[str, Any]]
    rewarded: bool = False
    seeded: bool = True
    request: Callable[[Any], dict[str, Any]] = lambda recipe: recipe.model_dump(mode="json")


@dataclass(frozen=True)
class Build:
    """What a stage's `build` gets to work with."""

    recipe: Any
    runtime: Any
    seed: int
    inputs: Mapping[str, ArtifactRef]
    experiment: Experiment
    reward: RewardSpec
    partial: Partial
    run: TrackedRun
    console: Console

    @property
    def payload(self) -> Path:
        return self.partial.payload

    def request(self, **options: Any) -> Request:
        """What a job of this stage is asked to do."""
        return Request(
            recipe=self.recipe.model_dump(mode="json"),
            runtime=self.runtime.model_dump(mode="json"),
            seed=self.seed,
            inputs={role: str(ref.payload) for role, ref in self.inputs.items()},
            payload=str(self.payload),
            work=str(self.partial.work),
            channel=str(self.partial.logs),
            options=options,
        )

    def job(self, program: str, *, torchrun: bool = False, **options: Any) -> dict[str, Any]:
        """Run a child program on this stage's recipe; its metrics, progress, tables and log are followed.

        Returns:
            The facts of its result, with `job_seconds`: wall time of the process tree, start-up included.
        """
        listener = Listener(
            metrics=self.run.metric_lines,
            progress=self.console.progress,
            log=self.console.job_line,
            cancelled=flow_run_is_cancelled,
        )
        started = time.monotonic()
        try:
            facts = run_job(
                program,
                self.request(**options),
                listener,
                ranks=getattr(self.runtime, "ranks", 1),
                torchrun=torchrun,
                environment=self.runtime.environment,
                timeout_s=self.runtime.timeout_s,
            )
        finally:
            log_tables(self.run, self.partial.logs)
        return {**facts, "job_seconds": round(time.monotonic() - started, 3)}


@dataclass(frozen=True)
class Outcome:
    """What became of one stage in this pipeline; `seconds` are those of the attempt that built it."""

    label: str
    step: StageName
    ref: ArtifactRef
    reused: bool
    seconds: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StageUse:
    """One use of a stage in a pipeline: everything that `run_stage` needs.

    Attributes:
        name: tells uses of one stage apart; the artifact's folder begins with it.
        label: what people see, `run_benchmark.sft`.
        request: the document whose hash is `key`.
        force: build although the artifact exists, without what earlier attempts left.
        may_build: False refuses to build what does not exist.
        parent: MLflow run of the pipeline.
        tags: further tags of the attempt's MLflow run.
    """

    stage: Stage
    name: str
    label: str
    key: str
    request: Mapping[str, Any]
    config: StageConfig
    inputs: Mapping[str, ArtifactRef]
    experiment: Experiment
    reward: RewardSpec
    seed: int
    store: ArtifactStore
    parent: TrackedRun
    force: bool
    may_build: bool
    tags: Mapping[str, str]


def run_stage(use: StageUse) -> Outcome:
    """Reuse or build, as a Prefect task run named after the stage; a reused one ends in the state `Reused`.

    Raises:
        FileNotFoundError: there is nothing to reuse, and `may_build` is False.
        ArtifactCorrupt: the artifact exists and its bytes are not those of its manifest.
        Exception: whatever the stage's `build` raised, after `retries` attempts.
    """
    attempts = 0

    # Prefect sees the key and the input paths only: plain values that its UI can show and never copies.
    def reuse_or_build(key: str, inputs: dict[str, str]) -> Any:
        nonlocal attempts
        attempts += 1
        return _reuse_or_build(use, discard=use.force and attempts == 1)

    prefect_task = task(
        name=use.stage.name,
        task_run_name=use.label,
        retries=use.config.runtime.retries,
        retry_condition_fn=_worth_a_retry,
        cache_policy=NO_CACHE,
        persist_result=False,
    )(reuse_or_build)
    paths = {role: ref.path for role, ref in use.inputs.items()}
    return prefect_task(use.key, paths, return_state=True).result()


def _worth_a_retry(task: Any, run: Any, state: State) -> bool:
    """Wrong input stays wrong; only what may pass by itself is tried again."""
    error = state.result(raise_on_failure=False)
    return not isinstance(error, (ValueError, FileNotFoundError))


def _reuse_or_build(use: StageUse, discard: bool) -> Any:
    store, stage = use.store, use.stage
    console = Console(use.label)
    with store.lock(stage.name, use.name, use.key, console.waiting):
        found = None if use.force else store.find(stage.name, use.name, use.key)
        if found is not None:
            console.line(f"reused {found.ref.path}")
            outcome = Outcome(use.label, stage.step, found.ref, True, found.seconds, found.facts)
            return Completed(name="Reused", message=found.ref.path, data=outcome)
        if not use.may_build:
            raise FileNotFoundError(
                f"{stage.name}: no finished artifact matches this config and seed, and this call may not build it. "
                f"Build it first (run the flow without --only), or use the config and seed that it was built with."
            )
        manifest = _build(use, store.open_partial(stage.name, use.name, use.key, discard=discard), console)
    console.line(f"built {manifest.ref.path} in {manifest.seconds:.1f} s")
    return Outcome(use.label, stage.step, manifest.ref, False, manifest.seconds, manifest.facts)


def _build(use: StageUse, partial: Partial, console: Console) -> Manifest:
    run = _open_run(use, partial.attempt)
    started, clock = datetime.now(UTC), time.monotonic()
    build = Build(
        recipe=use.config.recipe,
        runtime=use.config.runtime,
        seed=use.seed,
        inputs=use.inputs,
        experiment=use.experiment,
        reward=use.reward,
        partial=partial,
        run=run,
        console=console,
    )
    try:
        facts = use.stage.build(build)
        seconds = time.monotonic() - clock + _earlier_seconds(partial)
        manifest = use.store.commit(partial, _manifest(use, partial, run, facts, started, round(seconds, 3)))
    except Exception:
        _note_seconds(partial, time.monotonic() - clock)
        run.close("FAILED")
        raise
    except BaseException as error:  # Ctrl-C, a cancelled flow, SIGTERM
        _note_seconds(partial, time.monotonic() - clock)
        console.line(f"stopped by {type(error).__name__}; what the job saved stays in {partial.path}")
        run.close("KILLED")
        raise
    log_manifest(run, manifest)
    if use.stage.kind == "model":
        run.checkpoint(f"{use.stage.name}-{use.key[:12]}", manifest.ref.payload)
    run.close("FINISHED")
    return manifest


def _note_seconds(partial: Partial, seconds: float) -> None:
    """What a failed attempt cost; the artifact's ledger adds it (an attempt ended by SIGKILL notes nothing)."""
    (partial.logs / SECONDS).write_text(f"{seconds:.3f}\n")


def _earlier_seconds(partial: Partial) -> float:
    return sum(float(file.read_text()) for file in partial.path.glob(f"logs/attempt_*/{SECONDS}"))


def _open_run(use: StageUse, attempt: int) -> TrackedRun:
    tags = {
        "furlong.stage": use.stage.name,
        "furlong.label": use.label,
        "furlong.key": use.key,
        "furlong.attempt": str(attempt),
        **use.tags,
        **prefect_tags(),
    }
    run = TrackedRun(use.experiment.name, use.label, tags, use.parent)
    run.params(use.request)
    run.params({"runtime": use.config.runtime.model_dump(mode="json")})
    for role, ref in use.inputs.items():
        run.dataset(role, ref.path, ref.digest, context=use.stage.name)
    return run


def _manifest(
    use: StageUse,
    partial: Partial,
    run: TrackedRun,
    facts: Mapping[str, Any],
    started: datetime,
    seconds: float,
) -> Manifest:
    return Manifest(
        ref=ArtifactRef(use.stage.kind, use.stage.name, use.name, use.key, "", str(partial.path)),
        request=use.request,
        runtime=use.config.runtime.model_dump(mode="json"),
        input_refs={role: ref.path for role, ref in use.inputs.items()},
        files={},
        facts=dict(facts),
        packages=package_versions(),
        git_commit=git_commit(),
        mlflow_run_id=run.run_id,
        prefect_flow_run_id=flow_run_id(),
        started_at=started.isoformat(),
        seconds=seconds,
        attempt=partial.attempt,
    )
