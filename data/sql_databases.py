"""The SQLite files that Text2SQL questions are about: where they lie, their schema, and copies of them.

Not covered: whether a query runs (rewards), and personal data inside the databases, which are copied as they are.
"""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from data.schemas import TableError


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
