"""Finds the SQLite file of a `db_id`, and refuses what cannot be read safely.

A database that is missing or unfit is a mistake in the set-up, so it raises before
anything is scored; it never becomes a wrong answer. Contents are not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Source:
    """One database file and the state it is in."""

    path: str
    stamp: tuple[int, int]
    """Modification time in ns and size: golds are remembered for this state only."""


def find_database(root: Path, db_id: Any) -> Source:
    if not isinstance(db_id, str) or not db_id or db_id in {".", ".."}:
        raise ValueError(f"db_id is {db_id!r}, expected the name of a database under {root}.")
    if any(sign in db_id for sign in "/\\\x00"):
        raise ValueError(f"db_id {db_id!r} must be a plain name, it leads out of {root}.")
    places = (root / f"{db_id}.sqlite", root / db_id / f"{db_id}.sqlite")
    for path in places:
        if path.is_file():
            return _checked_database(path.resolve())
    raise FileNotFoundError(
        f"No database for db_id {db_id!r}: neither {places[0]} nor {places[1]} exists. "
        "Check database_root and the db_id column."
    )


def _checked_database(path: Path) -> Source:
    with path.open("rb") as file:
        if file.read(16) != b"SQLite format 3\x00":
            raise ValueError(f"{path} is not a SQLite database (its header is wrong or missing).")
    for suffix in ("-wal", "-journal"):
        journal = path.with_name(path.name + suffix)
        if journal.exists() and journal.stat().st_size:
            raise ValueError(
                f"{path} has unfinished writes in {journal.name}. Rewards read databases as "
                "immutable files: close its writer and checkpoint it first."
            )
    state = path.stat()
    return Source(str(path), (state.st_mtime_ns, state.st_size))
