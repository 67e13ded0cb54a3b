"""What the parts of the curation benchmark share: what to measure, the warm start, homes and children of their own.

Stages run through a `Pipeline`, so whatever exists in FURLONG_HOME is reused. What must not be reused (a ledger that
is drawn anew, a stage that is killed) runs through the command line in a scratch home, which sees the finished prompts
and models of the real one.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

os.environ.setdefault("PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW", "ignore")  # stages run here without a flow

from data.artifacts import ArtifactKind, ArtifactRef, Manifest, digest_of, hash_files
from data.store import ArtifactStore, furlong_home
from flows.prompt_curation import starting_policy
from tasks.configs import Experiment, StageName, load_experiment
from tasks.pipeline import Pipeline, open_pipeline
from tasks.preparation import MAKE_PROMPTS
from tasks.sampling import SAMPLE_COMPLETIONS
from tasks.scoring import SCORE_SAMPLES
from tasks.selection import SELECT_PROMPTS

REPOSITORY = Path(__file__).resolve().parents[1]
FINISHED = ("make_prompts", "make_model", "train_sft")
"""Stages whose artifacts a scratch home sees."""

QUICK = (
    "prompts.recipe.source.train=2500",
    "prompts.recipe.source.curation=160",
    "prompts.recipe.source.heldout=60",
    "sft.recipe.steps=250",
    "grpo.recipe.steps=10",
    "grpo.recipe.batch_size=64",
    "benchmark.recipe.k=4",
)


@dataclass(frozen=True)
class Sizes:
    """How much of each part is measured.

    Attributes:
        keep_every: optimizer steps between the checkpoints that are benchmarked.
        repeats: runs behind each median rate.
        rescored: stored samples that are scored again.
        peer_pairs: pairs that the peer judges.
        kills: how often the sampling is killed.
        scales: numbers of synthetic samples.
    """

    keep_every: int
    repeats: int
    rescored: int
    peer_pairs: int
    kills: int
    scales: tuple[int, ...]


FULL = Sizes(10, 3, 100_000, 2_000, 6, (10_000, 100_000, 1_000_000))
SMALL = Sizes(5, 1, 5_000, 500, 1, (1_000, 10_000))


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line.

    Attributes:
        peer: checkout of taoyds/test-suite-sql-eval, if there is one.
        peer_python: interpreter with the peer's own dependencies (sqlparse, tqdm).
    """

    config: str
    given: tuple[str, ...]
    seeds: tuple[int, ...]
    quick: bool
    peer: Path | None
    peer_python: str

    @property
    def overrides(self) -> list[str]:
        """Those of `--quick` first; nano is small enough without them."""
        return [*(QUICK if self.quick and self.config != "nano" else ()), *self.given]

    @property
    def seed(self) -> int:
        """Of the parts that measure a rate once."""
        return self.seeds[0]

    @cached_property
    def experiment(self) -> Experiment:
        return load_experiment(self.config, self.overrides)

    @cached_property
    def sizes(self) -> Sizes:
        return SMALL if self.quick else FULL

    def keep_every(self) -> int:
        """At least two checkpoints, also of a short run."""
        return max(1, min(self.sizes.keep_every, self.experiment.grpo.recipe.steps // 2))

    def pipeline(
        self,
        seed: int,
        extra: Sequence[str] = (),
        fresh: Sequence[StageName] = (),
        buildable: frozenset[StageName] = frozenset(StageName),
    ) -> AbstractContextManager[Pipeline]:
        return open_pipeline(
            "benchmark_curation", self.config, [*self.overrides, *extra], seed, fresh, buildable
        )


def fixed(count: int, engine: str | None = None) -> list[str]:
    """Overrides that draw `count` completions of every prompt."""
    plan = [f"sample.recipe.max_samples={count}", f"sample.recipe.first_samples={count}"]
    return plan if engine is None else [*plan, f"sample.recipe.engine={engine}"]


def warm_start(pipeline: Pipeline) -> tuple[ArtifactRef, ArtifactRef]:
    """Prompts, and the policy that the config curates for."""
    prompts = pipeline.stage(MAKE_PROMPTS, pipeline.experiment.prompts)
    return prompts, starting_policy(pipeline, prompts)


@dataclass(frozen=True)
class Curated:
    prompts: ArtifactRef
    policy: ArtifactRef
    samples: ArtifactRef
    scores: ArtifactRef
    selection: ArtifactRef


def curate(pipeline: Pipeline) -> Curated:
    """The chain from prompts to selection, as the flow wires it, without its report."""
    experiment = pipeline.experiment
    prompts, policy = warm_start(pipeline)
    samples = pipeline.stage(SAMPLE_COMPLETIONS, experiment.sample, model=policy, prompts=prompts)
    scores = pipeline.stage(SCORE_SAMPLES, experiment.score, samples=samples, prompts=prompts)
    chosen = pipeline.stage(
        SELECT_PROMPTS, experiment.select, prompts=prompts, samples=samples, scores=scores
    )
    return Curated(prompts, policy, samples, scores, chosen)


def facts_of(ref: ArtifactRef) -> dict[str, Any]:
    """What a finished stage reported about itself."""
    return dict(Manifest.from_json((Path(ref.path) / "manifest.json").read_text()).facts)


def reference(folder: Path) -> ArtifactRef:
    """The artifact in a folder, wherever it lies now."""
    return replace(Manifest.from_json((folder / "manifest.json").read_text()).ref, path=str(folder))


def seal(folder: Path, kind: ArtifactKind, recipe: dict[str, Any]) -> ArtifactRef:
    """Make an artifact of a folder whose `payload/` a benchmark wrote; `recipe` is what later stages look up."""
    files = hash_files(folder / "payload")
    digest = digest_of(files)
    ref = ArtifactRef(kind, "benchmark", folder.name, digest, digest, str(folder))
    manifest = Manifest(
        ref=ref,
        request={"recipe": recipe},
        runtime={},
        input_refs={},
        files=files,
        facts={},
        packages={},
        git_commit=None,
        mlflow_run_id=None,
        prefect_flow_run_id=None,
        started_at="",
        seconds=0.0,
    )
    (folder / "manifest.json").write_text(manifest.to_json())
    return ref


def fast_engine(options: Options) -> str:
    """For many samples: vLLM where it is installed; in a quick run, which draws few, the engine of the config."""
    if options.quick or importlib.util.find_spec("vllm") is None:
        return options.experiment.sample.recipe.engine
    return "vllm"


def results_folder() -> Path:
    folder = furlong_home() / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def scratch(name: str) -> Iterator[Path]:
    """A folder beside the results that is removed at the end."""
    folder = results_folder() / f"scratch-{name}-{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def scratch_home(folder: Path) -> Path:
    """An empty FURLONG_HOME that sees the finished prompts and models of the real one."""
    real = furlong_home()
    (folder / "artifacts").mkdir(parents=True)
    for stage in FINISHED:
        (folder / "artifacts" / stage).symlink_to(real / "artifacts" / stage)
    (folder / "checked").symlink_to(real / "checked")
    return folder


def home_environment(home: Path) -> dict[str, str]:
    """Environment of a command in a scratch home; homes side by side share Prefect's and MLflow's databases."""
    return {
        **os.environ,
        "FURLONG_HOME": str(home),
        "PREFECT_HOME": str(home.parent / "prefect"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{home.parent / 'mlflow.db'}",
    }


def sample_command(options: Options, seed: int, extra: Sequence[str] = ()) -> list[str]:
    """The sampling stage alone, as a person would run it."""
    sets = [part for override in (*options.overrides, *extra) for part in ("--set", override)]
    flow = [sys.executable, "-m", "flows.prompt_curation", "--config", options.config, "--seed", str(seed)]
    return [*flow, *sets, "--only", "sample"]


def run_in_home(command: Sequence[str], home: Path) -> None:
    """Run a command to its end; its output goes to our stderr."""
    subprocess.run(command, cwd=REPOSITORY, env=home_environment(home), stdout=sys.stderr, check=True)


def samples_in(home: Path) -> Manifest:
    """The newest sample artifact of a home."""
    return ArtifactStore(home).list("sample_completions")[-1]


def call_module(module: str, request: dict[str, Any], folder: Path) -> Any:
    """Run `python -m <module> <request.json>` and return what it writes to the path `answer` of its request."""
    name = module.rpartition(".")[2]
    path, answer = folder / f"{name}.json", folder / f"{name}-answer.json"
    answer.unlink(missing_ok=True)
    path.write_text(json.dumps({**request, "answer": str(answer)}))
    # Not stdout: vLLM prints there too.
    subprocess.run([sys.executable, "-m", module, str(path)], cwd=REPOSITORY, stdout=sys.stderr, check=True)
    return json.loads(answer.read_text())


def per_prompt(total: int, prompts: int) -> int:
    """Completions of each prompt for at least `total` in all."""
    return math.ceil(total / prompts)


def say(text: str) -> None:
    print(f"-- {text}", file=sys.stderr, flush=True)
