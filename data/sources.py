"""Turns an outside Text2SQL data set into a prompt table, with splits that share no content.

Reads a JSONL, Parquet or CSV file or a data set of the Hub, and the SQLite databases its questions
are about. Two questions are the same when they differ in case, spacing or closing punctuation only;
two questions with the same gold on the same database are paraphrases and stay in one split.

Not covered: paraphrases whose golds are written differently, and golds that do not run (whoever scores
finds those and marks them).
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from data.content import check_disjoint, fenced, normalise_prompt, normalise_sql, prompt_id
from data.schemas import SPLITS, PromptTable, TableError, check_table, column_types

DEFAULT_SHARES = {"train": 0.8, "curation": 0.1, "heldout": 0.1}
_FILE_KINDS = (".jsonl", ".ndjson", ".parquet", ".csv")
_NEEDED = ("prompt", "solution", "db_id")
_EXAMPLES = 5


@dataclass(frozen=True)
class SourceReport:
    """What was read and what became of it; `as_dict` is fit for JSON.

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
    db_ids: list[str]
    examples: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain dictionaries, lists, texts and numbers."""
        return asdict(self)


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
) -> tuple[pl.DataFrame, SourceReport]:
    """Read a data set and return its prompt table and a report.

    `source` is a file (.jsonl, .parquet, .csv) or the id of a Hub data set, which needs a `revision`.
    `databases` is a folder with `<db_id>.sqlite` or `<db_id>/<db_id>.sqlite`. `columns` maps prompt,
    solution and db_id, and if there are any completion and split, to the names used in the source.
    `prompt_template` may use {question} and {schema} (the CREATE TABLE statements of the database).

    Without a split column rows are dealt to the splits by `shares` and `seed`. With one, its values
    have to be train, curation or heldout, and rows that a later split also has are removed. Train
    prompts without a mapped completion get the gold in a fence as their demonstration.

    Raises TableError for unreadable or incomplete data, ValueError for arguments that cannot be.
    """
    _check_arguments(columns, prompt_template)
    raw, label, found_revision, found_licence = _read_source(source, revision, hub_split)
    rows = _rows(raw, columns, label)
    schemas = {
        db_id: read_schema_text(find_database(databases, db_id))
        for db_id in sorted({row["db_id"] for row in rows})
    }
    tally: Counter[str] = Counter()
    examples: list[str] = []
    kept = _collapse(rows, tally, examples)
    if "split" not in columns:
        _deal(kept, dict(shares or DEFAULT_SHARES), seed)
    for row in kept:
        row["prompt"] = _render(prompt_template, row.pop("question"), schemas[row["db_id"]])
        row["completion"] = _completion(row, "completion" in columns)
        row["prompt_id"] = prompt_id(row["db_id"], row["prompt"], row["solution"])
        row |= {"source": name or label, "gold_status": "ok"}
    kept.sort(key=lambda row: SPLITS.index(row["split"]))
    frame = pl.DataFrame(kept, schema=column_types(PromptTable))
    frame = check_table(frame, PromptTable, label)
    check_disjoint(frame)
    report = SourceReport(
        source=label,
        revision=found_revision,
        licence=licence or found_licence or "unknown",
        rows_read=len(rows),
        duplicates_dropped=tally["duplicates"],
        conflicting_golds=tally["conflicts"],
        overlaps_removed=tally["overlaps"],
        rows_per_split={split: int((frame["split"] == split).sum()) for split in SPLITS},
        db_ids=sorted(frame["db_id"].unique()),
        examples=examples,
    )
    return frame, report


def find_database(root: str | os.PathLike[str], db_id: str) -> Path:
    """Path of the SQLite file of `db_id`: `<root>/<db_id>.sqlite` or one folder deeper."""
    if not db_id or db_id.startswith(".") or re.search(r"[/\\\0]", db_id):
        raise TableError(f"db_id is {db_id!r}; expected a plain name without path separators")
    places = (Path(root) / f"{db_id}.sqlite", Path(root) / db_id / f"{db_id}.sqlite")
    for place in places:
        if place.is_file():
            return place
    raise TableError(
        f"database {db_id!r}: found neither {places[0]} nor {places[1]}; "
        "give the folder that holds the databases of this data set"
    )


def read_schema_text(database: str | os.PathLike[str]) -> str:
    """The CREATE TABLE statements of a SQLite file, read without any chance to write to it."""
    uri = f"{Path(database).resolve().as_uri()}?mode=ro"
    query = (
        "SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL "
        "AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' ORDER BY rowid"
    )
    try:
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            statements = [row[0].strip() for row in connection.execute(query)]
    except sqlite3.DatabaseError as error:
        raise TableError(
            f"{database}: could not be read as SQLite ({error}); expected a database file"
        ) from error
    return "\n".join(f"{statement};" for statement in statements)


def copy_databases(
    root: str | os.PathLike[str], db_ids: Iterable[str], target: str | os.PathLike[str]
) -> list[Path]:
    """Copy the databases of `db_ids`, and no others, to `<target>/<db_id>.sqlite`; return the paths."""
    folder = Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    copies = []
    for db_id in sorted(set(db_ids)):
        copy = folder / f"{db_id}.sqlite"
        partial = folder / f".{db_id}.{os.getpid()}.partial"
        shutil.copyfile(find_database(root, db_id), partial)
        os.replace(partial, copy)
        copies.append(copy)
    return copies


def _check_arguments(columns: Mapping[str, str], prompt_template: str) -> None:
    missing = [key for key in _NEEDED if key not in columns]
    unknown = sorted(set(columns) - {*_NEEDED, "completion", "split"})
    if missing or unknown:
        raise ValueError(
            f"load_prompts: columns lacks {missing} and has the unknown {unknown}; expected prompt, "
            "solution, db_id, and perhaps completion and split"
        )
    used = set(re.findall(r"\{(\w+)\}", prompt_template))
    if "question" not in used or used - {"question", "schema"}:
        raise ValueError(
            f"load_prompts: the prompt template uses {sorted(used)}; expected {{question}}, "
            "and perhaps {schema}"
        )


def _read_source(
    source: str | os.PathLike[str], revision: str | None, hub_split: str
) -> tuple[pl.DataFrame, str, str, str | None]:
    """Return (rows, label, revision, licence) of a file or of a Hub data set."""
    path = Path(source)
    if path.suffix.lower() not in _FILE_KINDS:
        return _read_hub(str(source), revision, hub_split)
    if not path.is_file():
        raise TableError(f"{path}: found no file; expected a data set: check the path")
    try:
        if path.suffix.lower() == ".parquet":
            frame = pl.read_parquet(path)
        elif path.suffix.lower() == ".csv":
            frame = pl.read_csv(path, infer_schema=False)  # everything is text here
        else:
            frame = pl.read_ndjson(path, infer_schema_length=None)
    except (pl.exceptions.PolarsError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TableError(f"{path}: could not be read ({reason}); check that the file is whole") from error
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return frame, path.name, f"sha256:{digest}", None


def _read_hub(name: str, revision: str | None, hub_split: str) -> tuple[pl.DataFrame, str, str, str | None]:
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise ValueError(
            f"load_prompts: {name!r} is neither a .jsonl, .parquet or .csv file nor the id of a "
            "data set such as owner/name"
        )
    if not revision:
        raise ValueError(
            f"load_prompts: the data set {name!r} has no revision; expected a commit, for a branch "
            "moves: look it up on the data set's page"
        )
    import datasets  # seconds to import, and only this branch needs it

    dataset = datasets.load_dataset(name, revision=revision, split=hub_split)
    rows = pl.DataFrame(dataset.to_polars())
    return rows, name, revision, dataset.info.license or None


def _rows(raw: pl.DataFrame, columns: Mapping[str, str], label: str) -> list[dict[str, Any]]:
    """The mapped columns as dictionaries, under our names; a blank value is an error."""
    absent = [column for column in columns.values() if column not in raw.columns]
    if absent:
        raise TableError(
            f"{label}: the columns {absent} are missing; found {raw.columns}: correct the mapping"
        )
    names = {"prompt": "question"}
    rows = [
        {names.get(key, key): record[column] for key, column in columns.items()}
        for record in raw.iter_rows(named=True)
    ]
    for key in ("question", "solution", "db_id", *(["split"] if "split" in columns else [])):
        bad = [n for n, row in enumerate(rows, 1) if row[key] is None or not str(row[key]).strip()]
        if bad:
            raise TableError(
                f"{label}: column {columns.get('prompt' if key == 'question' else key)!r} is blank "
                f"in {len(bad)} of {len(rows)} rows (rows {bad[:_EXAMPLES]}); expected text in each"
            )
    wrong = [n for n, row in enumerate(rows, 1) if row.get("split", "train") not in SPLITS]
    if wrong or not rows:
        found = rows[wrong[0] - 1]["split"] if wrong else "no rows"
        raise TableError(
            f"{label}: found {found!r} (rows {wrong[:_EXAMPLES]}); expected rows of the splits "
            f"{', '.join(SPLITS)}"
        )
    return [{key: value if value is None else str(value) for key, value in r.items()} for r in rows]


def _collapse(rows: list[dict[str, Any]], tally: Counter[str], examples: list[str]) -> list[dict[str, Any]]:
    """Drop duplicates, and rows whose question or gold a later split has; the first of its kind stays.

    Goes through heldout first, then curation, then train, so that what evaluates stays whole.
    """
    rank = {"heldout": 0, "curation": 1, "train": 2, None: 0}
    prompts: dict[tuple[str, str], dict[str, Any]] = {}
    golds: dict[tuple[str, str], str | None] = {}
    kept = []
    for row in sorted(rows, key=lambda row: rank[row.get("split")]):
        split = row.get("split")
        asked = (row["db_id"], normalise_prompt(row["question"]))
        gold = (row["db_id"], normalise_sql(row["solution"]))
        twin = prompts.get(asked)
        if (twin is not None and twin.get("split") != split) or golds.get(gold, split) != split:
            tally["overlaps"] += 1
            if len(examples) < _EXAMPLES:
                examples.append(row["question"])
        elif twin is not None:
            tally["duplicates"] += 1
            tally["conflicts"] += normalise_sql(twin["solution"]) != gold[1]
        else:
            prompts[asked] = row
            golds[gold] = split
            kept.append(row)
    order = {id(row): index for index, row in enumerate(rows)}
    return sorted(kept, key=lambda row: order[id(row)])


def _deal(rows: list[dict[str, Any]], shares: dict[str, float], seed: int) -> None:
    """Give each row a split; rows with one gold on one database go together."""
    total = sum(shares.values())
    if set(shares) - set(SPLITS) or min(shares.values(), default=0) < 0 or abs(total - 1) > 1e-6:
        raise ValueError(
            f"load_prompts: shares are {shares}; expected shares of {', '.join(SPLITS)} that add up to 1"
        )
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["db_id"], normalise_sql(row["solution"])), []).append(row)
    keys = sorted(groups)
    random.Random(f"splits {seed}").shuffle(keys)
    open_places = {split: shares.get(split, 0.0) * len(rows) for split in SPLITS}
    for key in keys:
        # The split that lacks most gets the next group: sizes end within a group of their share.
        split = max(SPLITS, key=lambda name: open_places[name])
        open_places[split] -= len(groups[key])
        for row in groups[key]:
            row["split"] = split


def _render(template: str, question: str, schema: str) -> str:
    values = {"question": question.strip(), "schema": schema}
    return re.sub(r"\{(question|schema)\}", lambda match: values[match[1]], template)


def _completion(row: Mapping[str, Any], mapped: bool) -> str | None:
    if row["split"] != "train":
        return None
    return row["completion"] if mapped else fenced(row["solution"])
