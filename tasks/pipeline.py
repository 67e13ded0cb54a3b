"""One pass of a flow over its stages: keys, reuse, the MLflow parent run, and the plan of `--dry-run`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data.artifacts import PENDING, ArtifactRef, stable_hash
from data.store import ArtifactStore, furlong_home
from rewards.base import RewardIdentity
from tasks import console
from tasks.configs import Experiment, StageName, load_experiment
from tasks.jobs.protocol import Request
from tasks.launch import Listener, run_job
from tasks.provenance import git_commit
from tasks.rewarding import reward_identity
from tasks.stage import Outcome, Stage, StageConfig, StageUse, run_stage
from tasks.tracking import TrackedRun, reconcile


class Pipeline:
    """One pass over the stages of a flow.

    Args:
        fresh: parts to rebuild although they exist; what follows from them is rebuilt too.
        parent: the MLflow run of the pipeline; None plans: nothing is built or logged.
        buildable: only these parts may be built; the others must exist.
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
        if self.parent is None:
            return self._note(self._plan(stage, name, label, key, force))
        outcome = run_stage(
            StageUse(
                stage=stage,
                name=name or stage.kind,
                label=label,
                key=key,
                request=request,
                config=config,
                inputs=inputs,
                experiment=self.experiment,
                seed=self.seed,
                store=self.store,
                parent=self.parent,
                force=force,
                may_build=stage.step in self._buildable,
            )
        )
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


@contextmanager
def open_pipeline(
    flow: str,
    config: str,
    overrides: Sequence[str],
    seed: int,
    fresh: Sequence[StageName],
    buildable: frozenset[StageName] = frozenset(StageName),
) -> Iterator[Pipeline]:
    """Validate everything, open the parent run, and close it with the true status.

    Raises:
        ConfigError: before anything is started, when the config cannot be run as written.
    """
    experiment = load_experiment(config, list(overrides))
    identity = reward_identity(experiment.reward)
    ended = reconcile(experiment.name)
    if ended:
        console.run_logger().info(
            "marked %d MLflow run(s) KILLED that a dead process had left RUNNING", ended
        )
    parent = _open_parent(flow, config, overrides, experiment, seed, identity)
    console.publish_markdown(
        f"{flow}-mlflow", f"MLflow run: [{parent.run_id}]({parent.link})", "Where this flow run is tracked"
    )
    pipeline = Pipeline(
        experiment, seed=seed, fresh=frozenset(fresh), parent=parent, reward=identity, buildable=buildable
    )
    try:
        yield pipeline
    except Exception:
        parent.close("FAILED")
        raise
    except BaseException:
        parent.close("KILLED")
        raise
    _log_outcomes(pipeline, parent)
    parent.close("FINISHED")


def _open_parent(
    flow: str,
    config: str,
    overrides: Sequence[str],
    experiment: Experiment,
    seed: int,
    identity: RewardIdentity,
) -> TrackedRun:
    tags = {
        "furlong.flow": flow,
        "furlong.config": config,
        "furlong.seed": str(seed),
        "furlong.commit": git_commit() or "unknown",
        "reward.name": identity.name,
        f"reward.{identity.name}.version": str(identity.version),
        f"reward.{identity.name}.digest": identity.digest,
        **console.prefect_tags(),
    }
    parent = TrackedRun(experiment.name, f"{flow} seed {seed}", tags)
    parent.params({"seed": seed, "overrides": list(overrides), "reward": identity.as_dict()})
    parent.params(experiment.model_dump(mode="json", exclude={"description", "reward"}))
    parent.json(identity.as_dict(), "reward.json")
    parent.json(experiment.model_dump(mode="json"), "experiment.json")
    return parent


def _log_outcomes(pipeline: Pipeline, parent: TrackedRun) -> None:
    for outcome in pipeline.outcomes:
        parent.tags({f"furlong.artifact.{outcome.label}": outcome.ref.path})
        tokens = outcome.facts.get("generated_tokens", 0)
        parent.metrics(
            {
                f"stages/{outcome.label}/seconds": outcome.seconds,
                f"stages/{outcome.label}/generated_tokens": tokens,
                f"stages/{outcome.label}/reused": int(outcome.reused),
            }
        )


def plan(
    wiring: Callable[[Pipeline], Any],
    config: str,
    overrides: Sequence[str],
    seed: int,
    fresh: Sequence[StageName],
    buildable: frozenset[StageName] = frozenset(StageName),
) -> list[dict[str, Any]]:
    """What a run would do, without doing it: one row a stage, in order.

    TRL's own argument classes check the training recipes in a child process.

    Raises:
        ConfigError: the config is wrong.
        JobFailed: TRL does not take the arguments; the message holds its own error.
    """
    experiment = load_experiment(config, list(overrides))
    pipeline = Pipeline(
        experiment,
        seed=seed,
        fresh=frozenset(fresh),
        reward=reward_identity(experiment.reward),
        buildable=buildable,
    )
    wiring(pipeline)
    _check_training_arguments(experiment, seed)
    return [
        {
            "stage": outcome.label,
            "action": "reuse" if outcome.reused else "build",
            "key": outcome.ref.key[:12],
            "path": outcome.ref.path if outcome.reused else None,
        }
        for outcome in pipeline.outcomes
    ]


def _check_training_arguments(experiment: Experiment, seed: int) -> None:
    silent = Listener(lambda lines: None, lambda done, total, text: None, lambda line: None, lambda: False)
    furlong_home().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=furlong_home(), prefix="dry-run-") as folder:
        recipes = {
            "sft": experiment.sft.recipe.model_dump(mode="json"),
            "grpo": experiment.grpo.recipe.model_dump(mode="json"),
        }
        engines = [
            experiment.sample.recipe.engine,
            experiment.grpo.recipe.engine,
            experiment.benchmark.recipe.engine,
        ]
        options = {"recipes": recipes, "engines": sorted(set(engines))}
        run_job(
            "check_arguments", Request({}, {}, seed, {}, folder, folder, str(Path(folder)), options), silent
        )


def timed() -> Callable[[], float]:
    """A stopwatch: call it for the seconds since it was made."""
    started = time.monotonic()
    return lambda: round(time.monotonic() - started, 1)
