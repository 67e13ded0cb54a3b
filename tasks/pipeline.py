"""Opens and closes one pipeline: config, seed, MLflow parent run, and the plan of `--dry-run`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data.store import furlong_home
from rewards.base import RewardIdentity
from tasks import console
from tasks.configs import Experiment, StageName, load_experiment
from tasks.jobs.protocol import Request
from tasks.launch import Listener, run_job
from tasks.rewarding import reward_identity
from tasks.stage import Pipeline, git_commit
from tasks.tracking import TrackedRun, reconcile


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
