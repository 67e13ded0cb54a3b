"""Every completion that was ever drawn, so that none is drawn twice.

One folder an identity: everything that decides what a (prompt, index) gives (policy, chat template, sampling
parameters, engine and its version, seed). Its completions lie in append-only JSONL segments, one a writer; an
append is on disk (fsync) when it returns, and a line that a kill cut short is passed over. So a stage that was
killed, or asks for 16 completions after 8, draws only what is missing.

A writer holds a shared lock on the folder's `writers` file until it is dead; who wants to write next waits for that
(`wait_for_writers`): a job may outlive the flow that started it by some seconds.

Not covered: who may write (the stage holds a lock), and drawing anew on purpose (remove the folder).
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import polars as pl

from data.artifacts import stable_hash
from data.schemas import SampleTable, column_types
from data.store import exclusive

KEY = ["prompt_id", "sample_index"]
WRITERS = "writers.lock"
_KINDS = {
    name: {pl.String: str, pl.Boolean: bool}.get(type(kind) if isinstance(kind, pl.DataType) else kind, int)
    for name, kind in column_types(SampleTable).items()
}


def sample_seed(seed: int, prompt_id: str, index: int) -> int:
    """Seed of one completion, 0 <= seed < 2**31: of the run's seed, the prompt and the index, and of nothing else."""
    digest = hashlib.sha256(f"{seed}:{prompt_id}:{index}".encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF


class SampleLedger:
    """The completions of one identity.

    Args:
        root: folder of all ledgers.
        identity: JSON values; two completions may share a ledger only if nothing in it differs.
    """

    def __init__(self, root: Path, identity: Mapping[str, Any]) -> None:
        self.identity = dict(identity)
        self.folder = root / stable_hash(self.identity)[:16]

    def create(self) -> None:
        """Make the folder, and say in it for people what its completions were drawn from."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "identity.json"
        if not path.is_file():
            partial = path.with_suffix(f".{os.getpid()}.partial")
            partial.write_text(json.dumps(self.identity, indent=2, sort_keys=True) + "\n")
            os.replace(partial, path)


def read_samples(folder: Path, prompt_ids: Iterable[str]) -> pl.DataFrame:
    """SampleTable of what a ledger's folder holds for these prompts, sorted, every (prompt, index) once."""
    wanted = pl.Series("prompt_id", list(prompt_ids), dtype=pl.String)
    segments = [_read_segment(path, wanted) for path in sorted(folder.glob("*.jsonl"))]
    empty = pl.DataFrame(schema=column_types(SampleTable))
    return pl.concat([empty, *segments]).unique(KEY, keep="first", maintain_order=True).sort(KEY)


def _read_segment(path: Path, wanted: pl.Series) -> pl.DataFrame:
    types = column_types(SampleTable)
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if not whole:
        return pl.DataFrame(schema=types)
    try:
        table = pl.read_ndjson(io.BytesIO(whole), schema=types)
    except pl.exceptions.PolarsError:  # a machine that went down may leave a damaged line in the middle
        table = pl.DataFrame(_readable(whole), schema=types)
    return table.drop_nulls().filter(pl.col("prompt_id").is_in(wanted.implode()))


def _readable(content: bytes) -> list[dict[str, Any]]:
    rows = []
    for line in content.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and all(isinstance(row.get(name), kind) for name, kind in _KINDS.items()):
            rows.append({name: row[name] for name in _KINDS})
    return rows


def wait_for_writers(folder: Path, on_wait: Callable[[str], None]) -> None:
    """Return once no process writes into the ledger; `on_wait` as for `exclusive`. The caller keeps new ones away."""
    with exclusive(folder / WRITERS, on_wait):
        pass


class SegmentWriter:
    """Appends to a segment of its own; use as a context manager. No file appears before the first append."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{time.time_ns()}-{os.getpid()}.jsonl"
        self._stream: io.BufferedWriter | None = None
        self._writers = (folder / WRITERS).open("a")
        fcntl.flock(self._writers, fcntl.LOCK_SH)

    def __enter__(self) -> SegmentWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._stream.close()
        self._writers.close()

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows of a SampleTable; they are on disk when this returns."""
        if self._stream is None:
            self._stream = self._path.open("ab")
        self._stream.write(b"".join(_line(row) for row in rows))
        self._stream.flush()
        os.fsync(self._stream.fileno())


def _line(row: Mapping[str, Any]) -> bytes:
    # A lone surrogate has no UTF-8 form, and would make the line unreadable.
    completion = row["completion"].encode("utf-8", "replace").decode()
    return json.dumps({**row, "completion": completion}, ensure_ascii=False).encode() + b"\n"
