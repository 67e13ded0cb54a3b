"""Turns outside data sets into a prompt table, with splits that share no content.

`load_prompts` reads Text2SQL questions and the databases they are about, `load_questions` questions with a gold
answer alone, such as GSM8K. Two questions are the same when they differ in case, spacing or closing punctuation only;
two questions with the same gold on the same database are paraphrases and stay in one split.

Not covered: paraphrases whose golds are written differently, and golds that are wrong or do not run (whoever scores
finds those and marks them).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import polars as pl

from data.content import check_disjoint, fenced, normalise_sql, prompt_id
from data.schemas import SPLITS, PromptTable, check_table, column_types
from data.source_rows import Row, SourceRows, is_file_name, read_source
from data.splits import GoldKey, Tally, collapse, deal
from data.sql_databases import find_database, read_schema_text

DEFAULT_SHARES = {"train": 0.8, "curation": 0.1, "heldout": 0.1}


@dataclass(frozen=True)
class SourceReport:
    """What was read of one source and what became of it; `as_dict` is fit for JSON.

    `revision` is a commit of the Hub or the SHA-256 of the file. `conflicting_golds` are dropped
    duplicates whose gold differed from the one kept. `overlaps_removed` counts rows that a later
    split (heldout, then curation) already had, `examples` shows some of their questions.
    """

    source: str
    revision: str
    licence: str
    rows_read: int
    duplicates_dropped: int
    conflicting_golds: int
    overlaps_removed: int
    rows_per_split: dict[str, int]
    examples: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain dictionaries, lists, texts and numbers."""
        return asdict(self)


@dataclass(frozen=True)
class Loaded:
    """A prompt table, the bare question of each of its rows, and a report for each source.

    `anonymised` counts the replaced values by kind; it is empty when nothing was asked for or found.
    """

    table: pl.DataFrame
    questions: list[str]
    reports: list[SourceReport]
    anonymised: dict[str, int]


@dataclass(frozen=True)
class _Task:
    """What tells Text2SQL from plain questions: what golds share, what a prompt shows, what a demonstration is."""

    gold_key: GoldKey
    values: Callable[[Row], Mapping[str, str]]
    demonstration: Callable[[str], str]


def load_prompts(
    source: str | os.PathLike[str],
    *,
    databases: str | os.PathLike[str],
    columns: Mapping[str, str],
    seed: int,
    prompt_template: str = "{question}",
    shares: Mapping[str, float] | None = None,
    revision: str | None = None,
    hub_split: str = "train",
    licence: str | None = None,
    name: str | None = None,
    leak_ngram: int | None = None,
    anonymise: bool = False,
) -> Loaded:
    """Read a Text2SQL data set: its prompt table, its questions and a report.

    `source` is a file (.jsonl, .parquet, .csv) or the id of a Hub data set, which needs a `revision`.
    `databases` is a folder with `<db_id>.sqlite` or `<db_id>/<db_id>.sqlite`. `columns` maps prompt,
    solution and db_id, and if there are any completion and split, to the names used in the source.
    `prompt_template` may use {question} and {schema} (the CREATE TABLE statements of the database).

    Without a split column rows are dealt to the splits by `shares` and `seed`; rows that share
    `leak_ngram` consecutive words stay together. With one, its values have to be train, curation or
    heldout, and rows that a later split also has are removed. Train prompts without a mapped completion
    get the gold in a fence as their demonstration. `anonymise` replaces personal data in questions, golds
    and completions before anything else; the databases stay as they are.

    Raises TableError for unreadable or incomplete data, ValueError for arguments that cannot be.
    """
    _check_arguments("load_prompts", columns, ("prompt", "solution", "db_id"), prompt_template, ("schema",))
    part = read_source(source, columns, revision=revision, hub_split=hub_split)
    schemas = {
        db_id: read_schema_text(find_database(databases, db_id))
        for db_id in sorted({row["db_id"] for row in part.rows})
    }
    task = _Task(
        gold_key=lambda row: (row["db_id"], normalise_sql(row["solution"])),
        values=lambda row: {"schema": schemas[row["db_id"]]},
        demonstration=fenced,
    )
    dealt = None if "split" in columns else shares or DEFAULT_SHARES
    return _assemble([part], task, seed, prompt_template, dealt, licence, name, leak_ngram, anonymise)


def load_questions(
    source: str | os.PathLike[str],
    *,
    columns: Mapping[str, str],
    seed: int,
    heldout_source: str | os.PathLike[str] | None = None,
    prompt_template: str = "{question}",
    shares: Mapping[str, float] | None = None,
    revision: str | None = None,
    hub_split: str = "train",
    limit: int | None = None,
    licence: str | None = None,
    name: str | None = None,
    leak_ngram: int | None = None,
    anonymise: bool = False,
) -> Loaded:
    """Read questions that have a gold answer and no database: their prompt table, the questions and reports.

    As `load_prompts`, apart from this: `columns` has no db_id, which is null; `prompt_template` knows {question}
    alone; equal golds say nothing about two questions; a demonstration is the solution as it is, a worked answer
    for GSM8K. `heldout_source` is a second file, or the name of another split of the same Hub data set, and is the
    held-out split as a whole: the shares of train and curation are then scaled up to 1. `limit` takes the first rows
    of each.
    """
    _check_arguments("load_questions", columns, ("prompt", "solution"), prompt_template, ())
    dealt = None if "split" in columns else dict(shares or DEFAULT_SHARES)
    if heldout_source is not None:
        dealt = _shares_without_heldout(dealt)
    parts = [read_source(source, columns, revision=revision, hub_split=hub_split, limit=limit)]
    if heldout_source is not None:
        if is_file_name(source):
            other = read_source(heldout_source, columns, limit=limit)
        else:
            other = read_source(
                source, columns, revision=revision, hub_split=str(heldout_source), limit=limit
            )
        parts.append(other)
        for row in other.rows:
            row["split"] = "heldout"
    task = _Task(gold_key=lambda row: None, values=lambda row: {}, demonstration=str)
    return _assemble(parts, task, seed, prompt_template, dealt, licence, name, leak_ngram, anonymise)


def _assemble(
    parts: Sequence[SourceRows],
    task: _Task,
    seed: int,
    template: str,
    shares: Mapping[str, float] | None,
    licence: str | None,
    name: str | None,
    leak_ngram: int | None,
    anonymise: bool,
) -> Loaded:
    """Rows to table: anonymise, fold duplicates, deal what has no split, write the prompts, check."""
    rows = [row | {"origin": origin} for origin, part in enumerate(parts) for row in part.rows]
    anonymised = _anonymise(rows) if anonymise else {}
    tallies = {origin: Tally() for origin in range(len(parts))}
    kept = collapse(rows, task.gold_key, tallies)
    if shares is not None:
        deal([row for row in kept if "split" not in row], shares, seed, task.gold_key, leak_ngram)
    kept.sort(key=lambda row: SPLITS.index(row["split"]))
    reports = [
        _report(part, tallies[origin], licence, [row for row in kept if row["origin"] == origin])
        for origin, part in enumerate(parts)
    ]
    records = []
    for row in kept:
        prompt = _render(template, {"question": row["question"].strip(), **task.values(row)})
        identity = prompt_id(row.get("db_id"), prompt, row["solution"])
        mapped = "completion" in row
        demonstration = row["completion"] if mapped else task.demonstration(row["solution"])
        records.append(
            {
                "prompt_id": identity,
                "split": row["split"],
                "prompt": prompt,
                "completion": demonstration if row["split"] == "train" else None,
                "solution": row["solution"],
                "db_id": row.get("db_id"),
                "source": name or parts[row["origin"]].label,
                "gold_status": "ok",
                "cluster": identity,
            }
        )
    where = parts[0].label
    table = check_table(pl.DataFrame(records, schema=column_types(PromptTable)), PromptTable, where)
    check_disjoint(table)
    return Loaded(table, [row["question"] for row in kept], reports, anonymised)


def _anonymise(rows: list[Row]) -> dict[str, int]:
    from data.privacy import anonymise

    counts: Counter[str] = Counter()
    for row in rows:
        names = [name for name in ("question", "completion", "solution") if row.get(name) is not None]
        texts, found = anonymise([row[name] for name in names])
        row.update(zip(names, texts, strict=True))
        counts += found
    return dict(sorted(counts.items()))


def _report(part: SourceRows, tally: Tally, licence: str | None, kept: list[Row]) -> SourceReport:
    splits = Counter(row["split"] for row in kept)
    return SourceReport(
        source=part.label,
        revision=part.revision,
        licence=licence or part.licence or "unknown",
        rows_read=len(part.rows),
        duplicates_dropped=tally["duplicates"],
        conflicting_golds=tally["conflicts"],
        overlaps_removed=tally["overlaps"],
        rows_per_split={split: splits[split] for split in SPLITS},
        examples=tally.examples,
    )


def _check_arguments(
    where: str, columns: Mapping[str, str], needed: tuple[str, ...], template: str, fields: tuple[str, ...]
) -> None:
    missing = [key for key in needed if key not in columns]
    unknown = sorted(set(columns) - {*needed, "completion", "split"})
    if missing or unknown:
        raise ValueError(
            f"{where}: columns lacks {missing} and has the unknown {unknown}; expected "
            f"{', '.join(needed)}, and perhaps completion and split"
        )
    used = set(re.findall(r"\{(\w+)\}", template))
    if "question" not in used or used - {"question", *fields}:
        perhaps = "".join(f", and perhaps {{{name}}}" for name in fields)
        raise ValueError(f"{where}: the prompt template uses {sorted(used)}; expected {{question}}{perhaps}")


def _shares_without_heldout(shares: Mapping[str, float] | None) -> dict[str, float]:
    """Train and curation scaled up to 1, for the held-out split has a source of its own."""
    if shares is None:
        raise ValueError(
            "load_questions: both a split column and a held-out source are given; expected one of them: "
            "leave `split` out of columns, or heldout_location out of the source"
        )
    rest = {split: shares.get(split, 0.0) for split in ("train", "curation")}
    total = sum(rest.values())
    if min(rest.values()) < 0 or total <= 0:
        raise ValueError(
            f"load_questions: with a held-out source, train and curation share the rest, and their shares are {rest}; "
            "expected at least one above 0"
        )
    return {split: share / total for split, share in rest.items()}


def _render(template: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\{(question|schema)\}", lambda match: values[match[1]], template)
