"""Stage `sample_completions`: draw completions of a policy for the curation prompts.

Completions go through the sample ledger, where nothing is ever drawn twice; the artifact is a view of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.artifacts import ArtifactRef
from data.store import exclusive, furlong_home
from tasks.configs import ConfigError, ModelStage, StageName
from tasks.jobs.engine_identity import engine_version
from tasks.jobs.protocol import Request
from tasks.pipeline import Pipeline, load_artifact
from tasks.preparation import MAKE_MODEL
from tasks.recipes import ModelRecipe, PretrainedModel, SampleRecipe, SamplingRuntime
from tasks.rewarding import reward_arguments
from tasks.stage import Build, Stage

if TYPE_CHECKING:
    import polars as pl

MIN_PROMPTS_TO_JUDGE = 8
DEGENERATE_SHARE = 0.98
"""Share of prompts whose completions are all the same text from which on nothing was sampled, only repeated."""


def sample_completions(build: Build) -> Mapping[str, Any]:
    """Payload: `samples.parquet` (SampleTable) and `stops.parquet` (StopTable)."""
    recipe: SampleRecipe = build.recipe
    reward = reward_arguments(build.reward, build.inputs["prompts"])
    facts = draw_completions(build, recipe.engine, "curation", [samples_draw(recipe)], reward=reward)
    return {**facts, **_distinct(build.payload / "samples.parquet")}


def samples_draw(recipe: SampleRecipe) -> dict[str, Any]:
    """The recipe's draw for `draw_completions`."""
    return {
        "name": "samples",
        "plan": {
            "first": recipe.first_samples,
            "more": recipe.more_samples,
            "cap": recipe.max_samples,
            "max_total_samples": recipe.max_total_samples,
            "max_total_tokens": recipe.max_total_tokens,
        },
        "sampling": {
            "temperature": recipe.temperature,
            "top_p": recipe.top_p,
            "max_completion_length": recipe.max_completion_length,
        },
    }


def draw_completions(
    build: Build,
    engine: str,
    split: str,
    draws: Sequence[Mapping[str, Any]],
    *,
    reward: Mapping[str, Any] | None = None,
    prompt_ids: Sequence[str] | None = None,
    seed: int | None = None,
) -> dict[str, Any]:
    """Run the sampling job, and write `<draw>.parquet` of each draw into the payload, and `stops.parquet` of the draw
    `samples`.

    Args:
        draws: `name`, `plan` (of SamplingPlan) and `sampling` (temperature, top_p, max_completion_length).
        reward: decides when a prompt needs no more completions; None for plans of a fixed number.
        prompt_ids: these prompts of the split alone.
        seed: of the completions; None is the run's.

    Returns:
        The job's facts; `completions` and `completion_tokens` are those of the artifact.
    """
    seed = build.seed if seed is None else seed
    version = engine_version(engine, build.runtime)
    ledgers = [_ledger(build, version, seed, draw["sampling"]) for draw in draws]
    from data.sample_ledger import wait_for_writers

    options = {
        "engine": engine,
        "split": split,
        "prompt_ids": prompt_ids,
        "reward": reward,
        "seed": seed,
        "draws": [{**draw, "ledger": str(ledger)} for draw, ledger in zip(draws, ledgers, strict=True)],
    }
    with ExitStack() as locks:
        for ledger in sorted(ledgers):  # in one order everywhere, or two stages could wait for each other
            locks.enter_context(exclusive(ledger.with_suffix(".lock"), build.console.waiting))
            wait_for_writers(ledger, build.console.waiting)
        for stale in build.partial.work.glob("stops-*.json"):  # of an attempt with other shards
            stale.unlink()
        facts = _run_shards(build, options)
    tables = [_assemble(build, draw["name"], ledger) for draw, ledger in zip(draws, ledgers, strict=True)]
    return {
        **facts,
        "engine_version": version,
        "completions": sum(len(table) for table in tables),
        "completion_tokens": sum(int(table["completion_tokens"].sum()) for table in tables),
    }


def _ledger(build: Build, version: str, seed: int, sampling: Mapping[str, Any]) -> Path:
    from data.sample_ledger import SampleLedger

    model = build.inputs["model"]
    ledger = SampleLedger(
        furlong_home() / "ledger",
        {
            "policy": model.digest,
            "chat_template": chat_template_digest(model.payload),
            "engine": version,
            "seed": seed,
            **sampling,
        },
    )
    ledger.create()
    return ledger.folder


def chat_template_digest(model: Path) -> str:
    """SHA-256 of the chat template of a model folder; it lies in a file of its own or in the tokenizer's settings."""
    template = model / "chat_template.jinja"
    if template.is_file():
        return hashlib.sha256(template.read_bytes()).hexdigest()
    settings = model / "tokenizer_config.json"
    found = json.loads(settings.read_text()).get("chat_template") if settings.is_file() else None
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def _run_shards(build: Build, options: Mapping[str, Any]) -> dict[str, Any]:
    if build.runtime.ray_address is None:
        return build.job("sample", **options, shard=[0, 1])
    from tasks.fanout import run_shards

    base = build.request(**options)
    shards = build.runtime.shards
    requests = [_shard_request(base, shard, shards) for shard in range(shards)]
    found = run_shards("sample", requests, build.runtime)
    total = {name: sum(facts[name] for facts in found) for name in found[0]}
    # The shards ran side by side: their rates add up, their seconds do not.
    return total | {"generation_seconds": max(facts["generation_seconds"] for facts in found)}


def _shard_request(base: Request, shard: int, shards: int) -> Request:
    channel = Path(base.channel) / f"shard-{shard}"
    channel.mkdir(parents=True, exist_ok=True)
    return replace(base, channel=str(channel), options={**base.options, "shard": [shard, shards]})


def _assemble(build: Build, name: str, ledger: Path) -> pl.DataFrame:
    """Put the artifact's tables together: of each prompt as many completions as its stop says."""
    import polars as pl

    from data.sample_ledger import read_samples
    from data.schemas import SampleTable, StopTable, write_table

    stops = pl.concat(_read_stops(path) for path in sorted(build.partial.work.glob(f"stops-{name}-*.json")))
    stops = stops.sort("prompt_id")
    rows = read_samples(ledger, stops["prompt_id"])
    counted = rows.join(stops, on="prompt_id").filter(pl.col("sample_index") < pl.col("trials"))
    if len(counted) != stops["trials"].sum():
        raise RuntimeError(
            f"{build.payload}: the ledger {ledger} holds {len(counted)} of the {stops['trials'].sum()} completions "
            f"that the job counted; was it changed meanwhile? Run the stage again"
        )
    samples = counted.drop("trials", "stop_rule").sort("prompt_id", "sample_index")
    write_table(samples, build.payload / f"{name}.parquet", SampleTable)
    if name == "samples":
        write_table(stops, build.payload / "stops.parquet", StopTable)
    return samples


def _read_stops(path: Path) -> pl.DataFrame:
    import polars as pl

    stops = [(prompt_id, *stop) for prompt_id, stop in json.loads(path.read_text()).items()]
    types = {"prompt_id": pl.String, "trials": pl.Int64, "stop_rule": pl.String}
    return pl.DataFrame(stops, schema=types, orient="row")


def _distinct(samples: Path) -> dict[str, float]:
    """How different the completions of a prompt are.

    Raises:
        ConfigError: practically every prompt got one text again and again: a broken seed or a frozen temperature,
            which would make every prompt look solved or unsolved.
    """
    import polars as pl

    groups = pl.scan_parquet(samples).group_by("prompt_id")
    table = groups.agg(pl.len().alias("trials"), pl.col("completion").n_unique().alias("distinct")).collect()
    several = table.filter(pl.col("trials") > 1)
    same = several.filter(pl.col("distinct") == 1).height / max(len(several), 1)
    if len(several) >= MIN_PROMPTS_TO_JUDGE and same >= DEGENERATE_SHARE:
        raise ConfigError(
            f"sample_completions: {same:.0%} of {len(several)} prompts got the same text every time, so their pass rates "
            f"say nothing; expected different completions of one prompt. Raise sample.recipe.temperature or top_p, and "
            f"check that the engine heeds each request's seed"
        )
    return {
        "distinct_share": int(table["distinct"].sum()) / max(int(table["trials"].sum()), 1),
        "repeated_prompts_share": same,
        "prompts": len(table),
    }


def choose_policy(pipeline: Pipeline, prompts: ArtifactRef, **known: ArtifactRef) -> ArtifactRef:
    """The model whose pass rate is wanted: one of `known` by its name, a model artifact's folder, or a model folder.

    Raises:
        ConfigError: `sample.recipe.policy` is none of these.
    """
    wanted = pipeline.experiment.sample.recipe.policy
    if wanted in known:
        return known[wanted]
    return find_checkpoint(pipeline, wanted, prompts)


def find_checkpoint(pipeline: Pipeline, path: str, prompts: ArtifactRef) -> ArtifactRef:
    """A model artifact, or a folder in the transformers format, by its path."""
    folder = Path(path).resolve()
    if (folder / "manifest.json").is_file():
        ref = load_artifact(path).ref
        if ref.kind == "model":
            return ref
        raise ConfigError(f"{path} is an artifact of kind {ref.kind}; expected a model")
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"no policy '{path}': expected `base`, `sft`, the folder of a model artifact, or a model folder with "
            f"a config.json (a checkpoint that GRPO kept: .../record/checkpoint-<step>)"
        )
    recipe = ModelRecipe(source=PretrainedModel(kind="pretrained", id=str(folder)))
    return pipeline.stage(MAKE_MODEL, ModelStage(recipe=recipe), name="policy", prompts=prompts)


def engine_request(engine: str) -> dict[str, str]:
    """What of the engine belongs to a stage's key: its version, unless a server has it."""
    return {} if engine == "server" else {"engine_version": engine_version(engine, SamplingRuntime())}


def _sample_request(recipe: SampleRecipe) -> dict[str, Any]:
    """Whose completions they are is said by the model's digest, not by how it was named."""
    return {**recipe.model_dump(mode="json", exclude={"policy"}), **engine_request(recipe.engine)}


SAMPLE_COMPLETIONS = Stage(
    "sample_completions",
    StageName.SAMPLE,
    "samples",
    2,
    sample_completions,
    rewarded=True,
    request=_sample_request,
)
