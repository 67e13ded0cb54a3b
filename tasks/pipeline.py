"""One pass of a flow over its stages: keys, reuse, the MLflow parent run, and the plan of `--dry-run`."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data.artifacts import PENDING, ArtifactRef, Manifest, stable_hash
from data.store import ArtifactStore, furlong_home
from rewards.base import RewardIdentity
from tasks import console
from tasks.configs import ConfigError, Experiment, StageName, load_experiment
from tasks.jobs.protocol import Request
from tasks.launch import Listener, run_job
from tasks.provenance import git_commit, package_versions
from tasks.recipes import RewardSpec
from tasks.rewarding import needs_databases, reward_identity
from tasks.stage import Outcome, Stage, StageConfig, StageUse, run_stage
from tasks.tracking import TrackedRun, reconcile, reward_tags


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
        buildable: frozenset[StageName] = frozenset(StageName),
    ) -> None:
        self.experiment = experiment
        self.seed = seed
        self.store = ArtifactStore()
        self.parent = parent
        self.outcomes: list[Outcome] = []
        self._fresh = fresh
        self.buildable = buildable
        self._forced: set[str] = set()

    def stage(
        self,
        stage: Stage,
        config: StageConfig,
        *,
        name: str = "",
        reward: RewardSpec | None = None,
        **inputs: ArtifactRef,
    ) -> ArtifactRef:
        """Reuse or build one stage.

        Args:
            name: tells several uses of one stage apart; empty for a single use.
            reward: judges instead of the experiment's own reward.
            inputs: role -> artifact of an earlier stage.
        """
        label = f"{stage.name}.{name}" if name else stage.name
        name = name or stage.kind
        spec = reward or self.experiment.reward
        # Before anything upstream is built: a wrong path or reward must not be found an hour later.
        identity = reward_identity(spec) if stage.rewarded else None
        recipe = stage.request(config.recipe)
        if any(ref.is_pending for ref in inputs.values()):
            return self._note(self._pending(stage, name, label, PENDING))
        request = self._request(stage, recipe, inputs, identity)
        key = stable_hash(request)
        force = stage.step in self._fresh or any(ref.key in self._forced for ref in inputs.values())
        if self.parent is None:
            return self._note(self._plan(stage, name, label, key, force))
        if force and stage.step not in self.buildable:
            raise ConfigError(
                f"--fresh asks for {stage.step} to be rebuilt, but this call may build only "
                f"{', '.join(sorted(self.buildable))}; drop --only, or name another part"
            )
        outcome = run_stage(
            StageUse(
                stage=stage,
                name=name,
                label=label,
                key=key,
                request=request,
                config=config,
                inputs=inputs,
                experiment=self.experiment,
                reward=spec,
                seed=self.seed,
                store=self.store,
                parent=self.parent,
                force=force,
                may_build=stage.step in self.buildable,
                tags=reward_tags(identity.as_dict()) if identity else {},
            )
        )
        if force:
            self._forced.add(key)
        return self._note(outcome)

    def newest(self, stage: str) -> Outcome | None:
        """What became of the last use of a stage, by its name; None if it was not used."""
        return next((found for found in reversed(self.outcomes) if found.ref.stage == stage), None)

    def _note(self, outcome: Outcome) -> ArtifactRef:
        self.outcomes.append(outcome)
        return outcome.ref

    def _request(
        self,
        stage: Stage,
        recipe: Mapping[str, Any],
        inputs: Mapping[str, ArtifactRef],
        reward: RewardIdentity | None,
    ) -> dict[str, Any]:
        request: dict[str, Any] = {
            "stage": stage.name,
            "stage_version": stage.version,
            "recipe": recipe,
            "inputs": {role: ref.digest for role, ref in inputs.items()},
        }
        if stage.seeded:
            request["seed"] = self.seed
        if reward is not None:
            request["rewards"] = [f"{reward.name}@{reward.version}+{reward.digest}"]
            request["reward_params"] = dict(reward.params)
        return request

    def _plan(self, stage: Stage, name: str, label: str, key: str, force: bool) -> Outcome:
        found = None if force else self.store.find(stage.name, name, key)
        if found is None:
            return self._pending(stage, name, label, key)
        return Outcome(label, stage.step, found.ref, True, found.seconds, found.facts)

    def _pending(self, stage: Stage, name: str, label: str, key: str) -> Outcome:
        folder = self.store.folder(stage.name, name, key)
        return Outcome(
            label, stage.step, ArtifactRef(stage.kind, stage.name, name, key, PENDING, str(folder)), False
        )


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
    validate(experiment, seed)
    ended = reconcile(experiment.name)
    if ended:
        console.run_logger().info(
            "marked %d MLflow run(s) KILLED that a dead process had left RUNNING", ended
        )
    parent = _open_parent(flow, config, overrides, experiment, seed, identity)
    console.publish_markdown(
        f"{flow}-mlflow", f"MLflow run: [{parent.run_id}]({parent.link})", "Where this flow run is tracked"
    )
    pipeline = Pipeline(experiment, seed=seed, fresh=frozenset(fresh), parent=parent, buildable=buildable)
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
        **reward_tags(identity.as_dict()),
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

    Raises:
        ConfigError: the config is wrong.
        JobFailed: TRL does not take the arguments; see `validate`.
    """
    experiment = load_experiment(config, list(overrides))
    pipeline = Pipeline(
        experiment,
        seed=seed,
        fresh=frozenset(fresh),
        buildable=buildable,
    )
    wiring(pipeline)
    validate(experiment, seed)
    return [
        {
            "stage": outcome.label,
            "action": _action(outcome, pipeline),
            "key": outcome.ref.key[:12],
            "path": outcome.ref.path if outcome.reused else None,
        }
        for outcome in pipeline.outcomes
    ]


def _action(outcome: Outcome, pipeline: Pipeline) -> str:
    if outcome.reused:
        return "reuse"
    return "build" if outcome.step in pipeline.buildable else "refuse: missing, and not asked for"


def validate(experiment: Experiment, seed: int) -> None:
    """Refuse what would fail hours later: engines that are not installed, arguments that TRL does not take.

    TRL's own argument classes judge in a child process (about ten seconds); what passed once is remembered.

    Raises:
        ConfigError: an engine or a server is missing, or the reward does not fit the prompts.
        JobFailed: TRL refuses an argument; the message ends with its error.
    """
    stages = (experiment.sample, experiment.grpo, experiment.benchmark)
    engines = {stage.recipe.engine for stage in stages}
    if "vllm" in engines and importlib.util.find_spec("vllm") is None:
        raise ConfigError("an engine is 'vllm', but vLLM is not installed; install it or use 'transformers'")
    for part in ("sample", "benchmark"):
        stage = getattr(experiment, part)
        if stage.recipe.engine == "server" and not stage.runtime.server_urls:
            raise ConfigError(
                f"{part}.recipe.engine is 'server', but {part}.runtime.server_urls is empty; name the server, such as "
                f"[http://127.0.0.1:8000/v1]"
            )
    if experiment.prompts.recipe.source.kind == "questions" and needs_databases(experiment.reward):
        raise ConfigError(
            f"prompts.recipe.source is of kind 'questions', which have no database, but the reward {experiment.reward.name} "
            f"runs on one; choose another reward, such as final_number_v1"
        )
    recipes = {name: getattr(experiment, name).recipe.model_dump(mode="json") for name in ("sft", "grpo")}
    identity = stable_hash({"recipes": recipes, "packages": package_versions()})
    passed = furlong_home() / "checked" / identity
    if not passed.exists():
        _let_trl_judge(recipes, seed)
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()


def _let_trl_judge(recipes: dict[str, Any], seed: int) -> None:
    silent = Listener(lambda lines: None, lambda done, total, text: None, lambda line: None, lambda: False)
    furlong_home().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=furlong_home(), prefix="check-") as folder:
        request = Request({}, {}, seed, {}, folder, folder, folder, {"recipes": recipes})
        run_job("check_arguments", request, silent)


def load_artifact(path: str) -> Manifest:
    """The artifact in a folder that somebody named.

    Raises:
        ConfigError: there is none.
        ArtifactCorrupt: its bytes are not those of its manifest.
    """
    try:
        return ArtifactStore().open(Path(path))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def timed() -> Callable[[], float]:
    """A stopwatch: call it for the seconds since it was made."""
    started = time.monotonic()
    return lambda: round(time.monotonic() - started, 1)
