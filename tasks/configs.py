"""The schema of an experiment: one YAML file, parsed once into frozen models.

Each stage has a `recipe` (what is built; part of the artifact's key) and a `runtime` (where and how; never
part of the key). Order of precedence: defaults here < YAML < `--set` overrides. Nothing is read from
environment variables.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from tasks.recipes import (
    BenchmarkRecipe,
    Frozen,
    GrpoRecipe,
    GrpoRuntime,
    ModelRecipe,
    PromptsRecipe,
    ReportRecipe,
    RewardSpec,
    Runtime,
    SampleRecipe,
    SamplingRuntime,
    ScoreRecipe,
    SelectRecipe,
    SftRecipe,
    StalenessRecipe,
    TrainingRuntime,
    gradient_accumulation,
)

CONFIG_FOLDER = Path(__file__).resolve().parents[1] / "flows" / "configs"


class ConfigError(ValueError):
    """The experiment cannot be run as written; the message says what was found and what to change."""


class StageName(StrEnum):
    """The parts of an experiment, by the names that its YAML, `--set` and `--fresh` use."""

    PROMPTS = "prompts"
    MODEL = "model"
    SFT = "sft"
    SAMPLE = "sample"
    SCORE = "score"
    SELECT = "select"
    GRPO = "grpo"
    STALENESS = "staleness"
    BENCHMARK = "benchmark"
    REPORT = "report"


class PromptsStage(Frozen):
    recipe: PromptsRecipe = PromptsRecipe()
    runtime: Runtime = Runtime()


class ModelStage(Frozen):
    recipe: ModelRecipe = ModelRecipe()
    runtime: Runtime = Runtime()


class SftStage(Frozen):
    recipe: SftRecipe = SftRecipe()
    runtime: TrainingRuntime = TrainingRuntime()


class SampleStage(Frozen):
    recipe: SampleRecipe = SampleRecipe()
    runtime: SamplingRuntime = SamplingRuntime()


class ScoreStage(Frozen):
    recipe: ScoreRecipe = ScoreRecipe()
    runtime: Runtime = Runtime()


class SelectStage(Frozen):
    recipe: SelectRecipe = SelectRecipe()
    runtime: Runtime = Runtime()


class GrpoStage(Frozen):
    recipe: GrpoRecipe = GrpoRecipe()
    runtime: GrpoRuntime = GrpoRuntime()


class BenchmarkStage(Frozen):
    recipe: BenchmarkRecipe = BenchmarkRecipe()
    runtime: SamplingRuntime = SamplingRuntime()


class StalenessStage(Frozen):
    recipe: StalenessRecipe = StalenessRecipe()
    runtime: SamplingRuntime = SamplingRuntime()


class ReportStage(Frozen):
    recipe: ReportRecipe = ReportRecipe()
    runtime: Runtime = Runtime()


class Experiment(Frozen):
    """One experiment: what `flows/configs/*.yaml` holds."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]
    """Also the MLflow experiment's name."""
    description: str = ""
    flow: Literal["sft_grpo"] = "sft_grpo"
    """The flow that the config is written for."""
    reward: RewardSpec = RewardSpec()
    prompts: PromptsStage = PromptsStage()
    model: ModelStage = ModelStage()
    sft: SftStage = SftStage()
    sample: SampleStage = SampleStage()
    score: ScoreStage = ScoreStage()
    select: SelectStage = SelectStage()
    grpo: GrpoStage = GrpoStage()
    staleness: StalenessStage = StalenessStage()
    benchmark: BenchmarkStage = BenchmarkStage()
    report: ReportStage = ReportStage()

    @model_validator(mode="after")
    def _batches_divide(self) -> Experiment:
        gradient_accumulation(self.sft.recipe.batch_size, self.sft.runtime, "sft")
        gradient_accumulation(self.grpo.recipe.batch_size, self.grpo.runtime, "grpo")
        return self

    @model_validator(mode="after")
    def _totals_are_seen_by_one_job(self) -> Experiment:
        again = self.staleness.recipe.sampling or self.sample.recipe
        parts = (("sample", self.sample.recipe, self.sample), ("staleness", again, self.staleness))
        for name, recipe, stage in parts:
            totals = [
                total
                for total in ("max_total_samples", "max_total_tokens")
                if getattr(recipe, total) is not None
            ]
            if totals and stage.runtime.shards > 1:
                raise ValueError(
                    f"{name}: {' and '.join(totals)} bounds all prompts together, which {stage.runtime.shards} shards "
                    "cannot see; set runtime.shards to 1, or bound each prompt by max_samples"
                )
        return self


def config_path(config: str) -> Path:
    """The file behind a shipped name (`nano`) or a path.

    Raises:
        ConfigError: there is no such file; the message lists the shipped names.
    """
    shipped = CONFIG_FOLDER / f"{config}.yaml"
    path = shipped if shipped.is_file() else Path(config)
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in CONFIG_FOLDER.glob("*.yaml")))
        raise ConfigError(f"no config '{config}': it is neither a file nor a shipped name ({names})")
    return path


def load_experiment(config: str, overrides: list[str] | None = None) -> Experiment:
    """Parse a config, with `dotted.key=value` overrides (values are YAML), into a checked experiment.

    Raises:
        ConfigError: the file is missing, is not YAML, or breaks the schema; every fault is listed.
    """
    path = config_path(config)
    try:
        document = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds a {type(document).__name__}; expected a mapping with a `name`")
    for override in overrides or []:
        _apply_override(document, override)
    try:
        return Experiment.model_validate(document)
    except ValidationError as error:
        faults = "\n".join(f"  {_location(fault)}: {fault['msg']}" for fault in error.errors())
        raise ConfigError(f"{path}: {error.error_count()} fault(s)\n{faults}") from None


def _location(fault: Any) -> str:
    # A discriminated union puts its tag into the location; the YAML has no such level.
    return ".".join(str(part) for part in fault["loc"]) or "experiment"


def _apply_override(document: dict[str, Any], override: str) -> None:
    dotted, separator, text = override.partition("=")
    keys = [key.strip() for key in dotted.split(".")]
    if not separator or not all(keys):
        raise ConfigError(
            f"override '{override}' is not of the form dotted.key=value, e.g. grpo.recipe.beta=0.04"
        )
    node = document
    for key in keys[:-1]:
        child = node.get(key)
        if child is not None and not isinstance(child, dict):
            raise ConfigError(f"override '{override}': {key} is {child!r}, which has no keys below it")
        if child is None:
            node[key] = {}
        node = node[key]
    try:
        node[keys[-1]] = _number_or_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override '{override}': the value is not valid YAML ({error})") from error


def _number_or_yaml(text: str) -> Any:
    # YAML 1.1 reads 2e-4 as a string; people mean the number.
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return yaml.safe_load(text)
