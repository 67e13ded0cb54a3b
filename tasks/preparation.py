"""Stages `make_prompts` (questions, demonstrations, databases, splits) and `make_model` (before any training)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.artifacts import digest_of, digest_path
from rewards.base import Status
from tasks.configs import ConfigError, StageName
from tasks.launch import REPOSITORY
from tasks.recipes import ModelRecipe, PromptsRecipe, RacingSource, TableSource, TinyModel
from tasks.stage import Build, Stage

if TYPE_CHECKING:
    import polars as pl


def make_prompts(build: Build) -> Mapping[str, Any]:
    """Payload: `prompts.parquet`, `databases/<db_id>.sqlite`, `sources.json`."""
    from data.content import check_disjoint
    from data.schemas import PromptTable, write_table

    recipe: PromptsRecipe = build.recipe
    seed = build.seed if recipe.data_seed is None else recipe.data_seed
    databases = build.payload / "databases"
    databases.mkdir()
    if isinstance(recipe.source, RacingSource):
        table, report = _racing(recipe.source, databases, seed)
    else:
        table, report = _external(recipe.source, databases, seed)
    check_disjoint(table)
    table = _mark_suspect_golds(build, table)
    write_table(table, build.payload / "prompts.parquet", PromptTable)
    suspects = table.filter(table["gold_status"] == "suspect_gold").height
    (build.payload / "sources.json").write_text(json.dumps(report, indent=2, sort_keys=True) + "\n")
    counts = {f"prompts.{split}": count for split, count in sorted(table.group_by("split").len().iter_rows())}
    return {**counts, "suspect_gold": suspects, "licence": report["licence"], "revision": report["revision"]}


def _racing(source: RacingSource, databases: Path, seed: int) -> tuple[pl.DataFrame, dict[str, Any]]:
    from data.racing import build_database, describe_mistakes, make_racing

    database = databases / "racing.sqlite"
    build_database(database, seed)
    table = make_racing(database, seed=seed, **source.model_dump(exclude={"kind"}))
    report = {
        "source": "racing",
        "licence": "Apache-2.0",
        "revision": "built-in",
        "mistakes": describe_mistakes(table).to_dicts(),
    }
    return table, report


def _external(source: TableSource, databases: Path, seed: int) -> tuple[pl.DataFrame, dict[str, Any]]:
    from data.sources import copy_databases, load_prompts

    shares = {"train": source.train, "curation": source.curation, "heldout": source.heldout}
    table, report = load_prompts(
        source.location,
        databases=source.database_root,
        columns=source.columns,
        seed=seed,
        prompt_template=source.prompt_template,
        shares=shares,
        revision=source.revision,
        hub_split=source.hub_split,
        licence=source.licence,
    )
    copy_databases(source.database_root, table["db_id"].unique().sort().to_list(), databases)
    return table, report.as_dict()


def _mark_suspect_golds(build: Build, table: pl.DataFrame) -> pl.DataFrame:
    """Set rows aside whose gold does not score 1.0 against itself; refuse when too many do.

    Raises:
        RuntimeError: the verifier failed on a gold: says nothing about it, so nothing is decided.
    """
    import polars as pl

    from rewards.registry import get_reward

    spec = build.reward
    reward = get_reward(spec.name, database_root=str(build.payload / "databases"), **spec.params)
    results = reward.check_golds(table["solution"].to_list(), table["db_id"].to_list())
    broken = [result for result in results if result.status is Status.VERIFIER_ERROR]
    if broken:
        raise RuntimeError(
            f"make_prompts: the verifier failed on {len(broken)} of {len(results)} golds (the first: "
            f"{broken[0].detail}); run it again, on a less loaded machine if it was short of memory"
        )
    status = ["ok" if result.status is Status.CORRECT else "suspect_gold" for result in results]
    share = status.count("suspect_gold") / len(status)
    if share > build.recipe.max_suspect_gold_share:
        example = next(result for result in results if result.status is not Status.CORRECT)
        raise ConfigError(
            f"make_prompts: {share:.0%} of the golds do not score 1.0 against themselves (the first: {example.status}, "
            f"{example.detail}); prompts.recipe.max_suspect_gold_share allows "
            f"{build.recipe.max_suspect_gold_share:.0%}. Check the database folder and the column mapping."
        )
    if share:
        build.console.line(f"{status.count('suspect_gold')} of {len(status)} golds are suspect and set aside")
    return table.with_columns(pl.Series("gold_status", status))


def _prompts_request(recipe: PromptsRecipe) -> dict[str, Any]:
    """Files count by content, not by where they lie; the generator counts by its code."""
    request = recipe.model_dump(mode="json")
    if isinstance(recipe.source, RacingSource):
        request["generator"] = _digest_code("data/racing")
    if isinstance(recipe.source, TableSource):
        root = recipe.source.database_root
        if not root.is_dir():
            raise ConfigError(f"prompts.recipe.source.database_root: no folder at {root}")
        request["source"]["database_root"] = digest_path(root)
        location = Path(recipe.source.location)
        if location.exists():
            request["source"]["location"] = digest_path(location)
    return request


def make_model(build: Build) -> Mapping[str, Any]:
    """Payload: a model folder in the transformers format, tokenizer included."""
    return build.job("base_model")


def _model_request(recipe: ModelRecipe) -> dict[str, Any]:
    request = recipe.model_dump(mode="json")
    if isinstance(recipe.source, TinyModel):
        request["builder"] = _digest_code("tasks/jobs/base_model.py")
    elif Path(recipe.source.id).is_dir():
        request["source"]["id"] = digest_path(Path(recipe.source.id))
    elif recipe.source.revision is None:
        raise ConfigError(
            f"model.recipe.source: no folder at {recipe.source.id}, and as a Hub id it needs a `revision` "
            f"(a commit): a branch that moves would change the model behind an unchanged key"
        )
    return request


def _digest_code(place: str) -> str:
    """Digest of our own source below `place`: changed code must not hit artifacts of the old one."""
    path = REPOSITORY / place
    if path.is_file():
        return digest_path(path)
    return digest_of({file.name: digest_path(file) for file in sorted(path.glob("*.py"))})


MAKE_PROMPTS = Stage(
    "make_prompts", StageName.PROMPTS, "prompts", 1, make_prompts, rewarded=True, request=_prompts_request
)
MAKE_MODEL = Stage("make_model", StageName.MODEL, "model", 1, make_model, request=_model_request)
