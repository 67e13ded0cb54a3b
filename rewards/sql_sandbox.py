"""Runs one untrusted query against one SQLite file, inside a worker process.

Layers, from outside in: the worker (hard kill, memory limit) of `rewards.deadline`;
no file may grow while a query runs; a fresh read-only, immutable connection; an
allow-list authorizer; SQLite's own limits and heap limit; a progress handler as soft
stop; a cap on rows and bytes fetched. Each layer alone stops most attacks, and none
is trusted to stop all.

Not covered: bugs in SQLite itself that give code execution, what a query can learn
from the database it is allowed to read, and answers guessed as constants.
"""

from __future__ import annotations

import resource
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from urllib.parse import quote

from rewards.sql_compare import Row

MAX_RESULT_BYTES = 32 << 20
_HEAP_BYTES = 384 << 20
_MAX_CELL_BYTES = 4 << 20
_STEPS_PER_CHECK = 5_000
_FETCH = 256

_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: _MAX_CELL_BYTES,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 200_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 256,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 500,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 100,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 500_000,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1_000,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 10,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
_ALLOWED = frozenset(
    {
        sqlite3.SQLITE_SELECT,
        sqlite3.SQLITE_READ,
        sqlite3.SQLITE_FUNCTION,
        sqlite3.SQLITE_RECURSIVE,
    }
)
# The first group reaches outside the database; the second makes a score depend on
# chance or on the connection.
_BLOCKED_FUNCTIONS = frozenset(
    [
        "load_extension",
        "readfile",
        "writefile",
        "edit",
        "fts3_tokenizer",
        "fts5",
        "sqlite_log",
        "sqlite_compileoption_get",
        "sqlite_compileoption_used",
        "sqlite_source_id",
        "sqlite_version",
        "sqlite_offset",
        "random",
        "randomblob",
        "changes",
        "total_changes",
        "last_insert_rowid",
    ]
)
# The schema is in the prompt; a query that reads it answers no question about the data.
_BLOCKED_TABLES = ("sqlite_", "pragma_", "dbstat", "bytecode", "tables_used", "fsdir")


@dataclass(frozen=True)
class QueryRun:
    """What one query did. `status` is "ok" or the value of a `rewards.base.Status`."""

    status: str
    detail: str = ""
    columns: int = 0
    rows: Sequence[Row] = ()


class _Stopped(Exception):
    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.run = QueryRun(status, detail)


def run_query(database: str, sql: str, timeout_s: float, max_rows: int, *, cut: bool = False) -> QueryRun:
    """Run one statement; with `cut`, keep the first `max_rows` rows instead of refusing more.

    Raises nothing that the SQL can cause; a database that cannot be opened raises
    sqlite3.OperationalError.
    """
    expires = time.monotonic() + timeout_s
    denied: list[str] = []
    late: list[bool] = []

    def check_time() -> int:
        if time.monotonic() < expires:
            return 0
        late.append(True)
        return 1

    with closing(_connect(database)) as connection, _no_growing_files():
        connection.set_progress_handler(check_time, _STEPS_PER_CHECK)
        connection.set_authorizer(_authorizer(denied))
        try:
            cursor = connection.execute(sql)
            if cursor.description is None:
                return QueryRun("rejected", "the statement returns no columns")
            rows = _fetch(cursor, max_rows, check_time, cut)
            return QueryRun("ok", "", len(cursor.description), rows)
        except _Stopped as stop:
            return stop.run
        except MemoryError:
            return QueryRun("execution_error", "the query ran out of its memory limit")
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
            if late:
                return QueryRun("timeout", f"stopped after {timeout_s:g} s")
            if denied:
                return QueryRun("rejected", denied[0])
            return QueryRun("execution_error", str(error))


def _connect(database: str) -> sqlite3.Connection:
    # immutable: the caller has refused databases with an open journal, and without it
    # a WAL database would get -shm and -wal files beside it, even in mode=ro.
    address = f"file:{quote(database)}?mode=ro&immutable=1"
    connection = sqlite3.connect(address, uri=True, isolation_level=None, cached_statements=0)
    connection.execute(f"PRAGMA hard_heap_limit={_HEAP_BYTES}").close()
    for pragma in ("temp_store=MEMORY", "query_only=1", "trusted_schema=0"):
        connection.execute(f"PRAGMA {pragma}").close()
    connection.text_factory = _text
    for limit, value in _LIMITS.items():
        connection.setlimit(limit, value)
    return connection


def _text(raw: bytes) -> str:
    # Real databases hold text that is not UTF-8; it must compare, not raise.
    return raw.decode("utf-8", "surrogateescape")


def _authorizer(denied: list[str]) -> Callable[..., int]:
    def authorize(
        action: int, first: str | None, second: str | None, schema: str | None, _inner: str | None
    ) -> int:
        if action not in _ALLOWED:
            denied.append(f"not a plain query (SQLite action {action} on {first or second})")
        elif action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _BLOCKED_FUNCTIONS:
            denied.append(f"function {second} is not allowed")
        elif action == sqlite3.SQLITE_READ and (first or "").lower().startswith(_BLOCKED_TABLES):
            denied.append(f"table {first} is not allowed")
        else:
            return sqlite3.SQLITE_OK
        return sqlite3.SQLITE_DENY

    return authorize


@contextmanager
def _no_growing_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _fetch(cursor: sqlite3.Cursor, max_rows: int, check_time: Callable[[], int], cut: bool) -> list[Row]:
    rows: list[Row] = []
    size = 0
    while chunk := cursor.fetchmany(min(_FETCH, max_rows + 1 - len(rows))):
        rows += chunk
        if len(rows) > max_rows:
            if cut:
                return rows[:max_rows]
            raise _Stopped("row_count", f"more than {max_rows} rows")
        for row in chunk:
            size += 16 * len(row)
            size += sum(len(cell) for cell in row if isinstance(cell, (str, bytes)))
        if size > MAX_RESULT_BYTES:
            raise _Stopped("row_count", f"more than {MAX_RESULT_BYTES >> 20} MiB of rows")
        if check_time():
            raise _Stopped("timeout", "stopped while rows were read")
    return rows
