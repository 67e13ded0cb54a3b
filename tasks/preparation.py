"""Stages `make_prompts` (questions, demonstrations, databases, splits) and `make_model` (before any training)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.artifacts import digest_of, digest_path
from rewards.base import Status
from tasks.configs import ConfigError, StageName
from tasks.launch import REPOSITORY
from tasks.recipes import (
    HygieneRecipe,
    ModelRecipe,
    PromptsRecipe,
    QuestionSource,
    RacingSource,
    TableSource,
    TinyModel,
)
from tasks.rewarding import reward_on
from tasks.stage import Build, Stage

if TYPE_CHECKING:
    import polars as pl

    from data.hygiene import Question

_EXAMPLES = 3  # leaks shown in an error and in sources.json
_SHOWN = 100  # characters of a question in an error


@dataclass
class _Prepared:
    """A prompt table on its way: the bare question of each row, and what `sources.json` will say."""

    table: pl.DataFrame
    questions: list[str]
    record: dict[str, Any]

    @property
    def licences(self) -> str:
        return _listed(self.record, "licence")

    @property
    def revisions(self) -> str:
        return _listed(self.record, "revision")


def make_prompts(build: Build) -> Mapping[str, Any]:
    """Payload: `prompts.parquet`, `databases/<db_id>.sqlite` (none for questions without one), `sources.json`."""
    from data.content import check_disjoint
    from data.schemas import PromptTable, write_table

    recipe: PromptsRecipe = build.recipe
    seed = build.seed if recipe.data_seed is None else recipe.data_seed
    databases = build.payload / "databases"
    databases.mkdir()
    prepared = _load(recipe, databases, seed)
    check_disjoint(prepared.table)
    hygiene = _clean(prepared, recipe.hygiene)
    table = _mark_suspect_golds(build, prepared)
    write_table(table, build.payload / "prompts.parquet", PromptTable)
    text = json.dumps(prepared.record, indent=2, sort_keys=True)
    (build.payload / "sources.json").write_text(text + "\n")
    if "unknown" in prepared.licences:
        build.console.line("a source states no licence; name it in prompts.recipe.source.licence")
    if recipe.hygiene.anonymise and any(databases.iterdir()):
        build.console.line("anonymised the texts alone: databases are copied as they are")
    splits = table.group_by("split").len().iter_rows()
    return {
        **{f"prompts.{split}": count for split, count in sorted(splits)},
        "suspect_gold": table.filter(table["gold_status"] == "suspect_gold").height,
        **hygiene,
        "licence": prepared.licences,
        "revision": prepared.revisions,
    }


def _load(recipe: PromptsRecipe, databases: Path, seed: int) -> _Prepared:
    source = recipe.source
    if isinstance(source, RacingSource):
        return _racing(source, databases, seed)
    from data.sources import load_prompts, load_questions
    from data.sql_databases import copy_databases

    arguments: dict[str, Any] = {
        "columns": source.columns,
        "seed": seed,
        "prompt_template": source.prompt_template,
        "shares": {"train": source.train, "curation": source.curation, "heldout": source.heldout},
        "revision": source.revision,
        "hub_split": source.hub_split,
        "licence": source.licence,
        "leak_ngram": recipe.hygiene.leak_ngram,
        "anonymise": recipe.hygiene.anonymise,
    }
    if isinstance(source, TableSource):
        loaded = load_prompts(source.location, databases=source.database_root, **arguments)
        copy_databases(source.database_root, loaded.table["db_id"].unique().to_list(), databases)
    else:
        heldout, limit = source.heldout_location, source.limit
        loaded = load_questions(source.location, heldout_source=heldout, limit=limit, **arguments)
    record = {
        "sources": [report.as_dict() for report in loaded.reports],
        "anonymised": loaded.anonymised,
    }
    return _Prepared(loaded.table, loaded.questions, record)


def _racing(source: RacingSource, databases: Path, seed: int) -> _Prepared:
    """The built-in task: its prompts are bare questions, and it invents its people, so nothing is anonymised."""
    from data.racing import build_database, describe_mistakes, make_racing

    database = databases / "racing.sqlite"
    build_database(database, seed)
    table = make_racing(database, seed=seed, **source.model_dump(exclude={"kind"}))
    sizes = dict(table.group_by("split").len().sort("split").iter_rows())
    record = {
        "sources": [
            {
                "source": "racing",
                "revision": "built-in",
                "licence": "Apache-2.0",
                "rows_read": table.height,
                "duplicates_dropped": 0,
                "conflicting_golds": 0,
                "overlaps_removed": 0,
                "rows_per_split": sizes,
            }
        ],
        "anonymised": {},
        "mistakes": describe_mistakes(table).to_dicts(),
    }
    return _Prepared(table, table["prompt"].to_list(), record)


def _clean(prepared: _Prepared, hygiene: HygieneRecipe) -> dict[str, int]:
    """Deal with leaks, fill `cluster`, and write both into the record; return the counts for the facts.

    Raises:
        ConfigError: there are leaks and the recipe does not say to remove them, or they are all there is.
    """
    import polars as pl

    from data.hygiene import as_questions, cluster_sizes, leaks_of_table, near_duplicate_clusters

    others = _heldout_files(hygiene)
    leaks = leaks_of_table(prepared.table, prepared.questions, others, hygiene.leak_ngram)
    gone = {leak["train_id"] for leak in leaks}
    if gone and hygiene.on_leak == "refuse":
        raise ConfigError(_refusal(leaks, prepared.table.height, hygiene.leak_ngram))
    before = set(prepared.table["split"])
    kept = [identity not in gone for identity in prepared.table["prompt_id"]]
    prepared.table = prepared.table.filter(pl.Series(kept, dtype=pl.Boolean))
    if emptied := before - set(prepared.table["split"]):
        raise ConfigError(
            f"make_prompts: all rows of {', '.join(sorted(emptied))} leak into a held-out set and were removed, none is left; "
            f"use other prompts, or a larger prompts.recipe.hygiene.leak_ngram than {hygiene.leak_ngram}"
        )
    prepared.questions = [text for text, keep in zip(prepared.questions, kept, strict=True) if keep]
    asked = as_questions(prepared.table, prepared.questions)
    clusters = near_duplicate_clusters(asked, hygiene.near_duplicate)
    prepared.table = prepared.table.with_columns(pl.Series("cluster", clusters, dtype=pl.String))
    sizes = cluster_sizes(clusters)
    prepared.record["leaks"] = {
        "ngram": hygiene.leak_ngram,
        "removed": len(gone),
        "by_source": dict(sorted(Counter(leak["source"] for leak in leaks).items())),
        "examples": leaks[:_EXAMPLES],
    }
    prepared.record["near_duplicates"] = {"threshold": hygiene.near_duplicate, **sizes}
    sources = prepared.record["sources"]
    names = ("duplicates_dropped", "conflicting_golds", "overlaps_removed")
    return {
        **{name: sum(source[name] for source in sources) for name in names},
        "leaks_removed": len(gone),
        "near_duplicate_clusters": sizes["clusters"],
        "near_duplicate_rows": sizes["rows"],
        "anonymised": sum(prepared.record["anonymised"].values()),
    }


def _heldout_files(hygiene: HygieneRecipe) -> list[Question]:
    """The questions of further held-out sets; anonymised like ours, so that equal ones stay equal."""
    from data.hygiene import Question
    from data.privacy import anonymise
    from data.source_rows import read_question_texts

    questions = []
    for file in hygiene.heldout_files:
        for row, text in enumerate(read_question_texts(file), 1):
            bare = anonymise([text])[0][0] if hygiene.anonymise else text
            questions.append(Question(f"{file.name} row {row}", bare))
    return questions


def _refusal(leaks: list[dict[str, str]], total: int, ngram: int) -> str:
    lines = [
        f"{leak['split']} {leak['question'][:_SHOWN]!r} / held-out ({leak['heldout_id']}) "
        f"{leak['heldout_question'][:_SHOWN]!r}, both: {leak['words'][:_SHOWN]!r}"
        for leak in leaks[:_EXAMPLES]
    ]
    return (
        f"make_prompts: {len(leaks)} of {total} questions leak from a held-out set: they share {ngram} or more "
        "consecutive words, or the whole text, with a held-out question:\n  "
        + "\n  ".join(lines)
        + "\nExpected none. Set prompts.recipe.hygiene.on_leak to remove, which drops them from train and curation; or, "
        "if these words say nothing about the answer, set prompts.recipe.hygiene.leak_ngram higher."
    )


def _listed(record: Mapping[str, Any], name: str) -> str:
    """The different values of a field of the sources, in order."""
    return ", ".join(dict.fromkeys(source[name] for source in record["sources"]))


def _mark_suspect_golds(build: Build, prepared: _Prepared) -> pl.DataFrame:
    """Set rows aside whose gold does not score 1.0 against itself, and record why; refuse when too many do.

    Raises:
        RuntimeError: the verifier failed on a gold: says nothing about it, so nothing is decided.
    """
    import polars as pl

    from rewards.registry import get_reward

    table = prepared.table
    reward = get_reward(**reward_on(build.reward, build.payload / "databases"))
    results = reward.check_golds(table["solution"].to_list(), db_id=table["db_id"].to_list())
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
    prepared.record["suspect_golds"] = {
        prompt_id: result.detail
        for prompt_id, result in zip(table["prompt_id"], results, strict=True)
        if result.status is not Status.CORRECT
    }
    return table.with_columns(pl.Series("gold_status", status))


def _prompts_request(recipe: PromptsRecipe) -> dict[str, Any]:
    """Files count by content, not by where they lie; the generator counts by its code."""
    from data.source_rows import is_file_name

    request = recipe.model_dump(mode="json")
    request["hygiene"]["heldout_files"] = [
        _file_digest(file, "prompts.recipe.hygiene.heldout_files") for file in recipe.hygiene.heldout_files
    ]
    source = recipe.source
    if isinstance(source, RacingSource):
        request["generator"] = _digest_code("data/racing")
        return request
    if isinstance(source, TableSource):
        root = source.database_root
        if not root.is_dir():
            raise ConfigError(f"prompts.recipe.source.database_root: no folder at {root}")
        request["source"]["database_root"] = digest_path(root)
    heldout = source.heldout_location if isinstance(source, QuestionSource) else None
    if is_file_name(source.location):
        request["source"]["location"] = _file_digest(source.location, "prompts.recipe.source.location")
        if heldout is not None:
            place = "prompts.recipe.source.heldout_location"
            request["source"]["heldout_location"] = _file_digest(heldout, place)
    elif source.revision is None:
        raise ConfigError(
            f"prompts.recipe.source: {source.location} is no .jsonl, .parquet or .csv file, and as a Hub data set it "
            f"needs a `revision` (a commit): a branch that moves would change the prompts behind an unchanged key"
        )
    return request


def _file_digest(file: str | Path, field: str) -> str:
    if not Path(file).is_file():
        raise ConfigError(f"{field}: found no file at {file}; check the path")
    return digest_path(Path(file))


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
    "make_prompts", StageName.PROMPTS, "prompts", 2, make_prompts, rewarded=True, request=_prompts_request
)
MAKE_MODEL = Stage("make_model", StageName.MODEL, "model", 1, make_model, request=_model_request)
