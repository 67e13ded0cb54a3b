"""Reads questions from a JSONL, Parquet or CSV file or from a data set of the Hub, under our column names.

Not covered: nested columns, which have to be flattened before.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from data.schemas import SPLITS, TableError

FILE_KINDS = (".jsonl", ".ndjson", ".parquet", ".csv")
_EXAMPLES = 5

Row = dict[str, Any]


@dataclass(frozen=True)
class SourceRows:
    """The rows of one source: question, solution and what else was mapped, each a text or None.

    `revision` is a commit of the Hub or the SHA-256 of the file, `licence` what the Hub states.
    """

    label: str
    revision: str
    licence: str | None
    rows: list[Row]


def is_file_name(source: str | os.PathLike[str]) -> bool:
    """Whether `source` is meant as a file, by its ending."""
    return Path(source).suffix.lower() in FILE_KINDS


def read_source(
    source: str | os.PathLike[str],
    columns: Mapping[str, str],
    *,
    revision: str | None = None,
    hub_split: str = "train",
    limit: int | None = None,
) -> SourceRows:
    """Read the mapped columns of a file or of a Hub data set, the first `limit` rows of it.

    Raises TableError for unreadable data, absent columns and blank values, ValueError for what is neither a file
    nor a data set, and for a data set without a revision.
    """
    if is_file_name(source):
        path = Path(source)
        raw, label, licence = read_file(path), path.name, None
        revision = f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    else:
        label = str(source)
        raw, revision, licence = _read_hub(label, revision, hub_split)
    return SourceRows(label, revision, licence, _map(raw.head(limit or raw.height), columns, label))


def read_file(path: Path) -> pl.DataFrame:
    """All columns of a .jsonl, .parquet or .csv file; raises TableError when it cannot be read."""
    if not path.is_file():
        raise TableError(f"{path}: found no file; expected a data set: check the path")
    try:
        if path.suffix.lower() == ".parquet":
            return pl.read_parquet(path)
        if path.suffix.lower() == ".csv":
            return pl.read_csv(path, infer_schema=False)  # everything is text here
        return pl.read_ndjson(path, infer_schema_length=None)
    except (pl.exceptions.PolarsError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TableError(f"{path}: could not be read ({reason}); check that the file is whole") from error


def read_question_texts(path: Path) -> list[str]:
    """The column `question`, or else `prompt`, of a held-out file; raises TableError when it has neither."""
    frame = read_file(path)
    for name in ("question", "prompt"):
        if name in frame.columns:
            return [str(text) for text in frame[name].drop_nulls()]
    raise TableError(
        f"{path}: found the columns {frame.columns}; expected `question` or `prompt`: rename the one with the questions"
    )


def _read_hub(name: str, revision: str | None, hub_split: str) -> tuple[pl.DataFrame, str, str | None]:
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise ValueError(
            f"read_source: {name!r} is neither a .jsonl, .parquet or .csv file nor the id of a "
            "data set such as owner/name"
        )
    if not revision:
        raise ValueError(
            f"read_source: the data set {name!r} has no revision; expected a commit, for a branch "
            "moves: look it up on the data set's page"
        )
    import datasets  # seconds to import, and only this branch needs it

    dataset = datasets.load_dataset(name, revision=revision, split=hub_split)
    return pl.DataFrame(dataset.to_polars()), revision, dataset.info.license or None


def _map(raw: pl.DataFrame, columns: Mapping[str, str], label: str) -> list[Row]:
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
    for key in (key for key in columns if key != "completion"):
        ours = names.get(key, key)
        bad = [n for n, row in enumerate(rows, 1) if row[ours] is None or not str(row[ours]).strip()]
        if bad:
            raise TableError(
                f"{label}: column {columns[key]!r} is blank in {len(bad)} of {len(rows)} rows "
                f"(rows {bad[:_EXAMPLES]}); expected text in each"
            )
    wrong = [n for n, row in enumerate(rows, 1) if row.get("split", "train") not in SPLITS]
    if wrong or not rows:
        found = rows[wrong[0] - 1]["split"] if wrong else "no rows"
        raise TableError(
            f"{label}: found {found!r} (rows {wrong[:_EXAMPLES]}); expected rows of the splits "
            f"{', '.join(SPLITS)}"
        )
    return [{key: value if value is None else str(value) for key, value in row.items()} for row in rows]
