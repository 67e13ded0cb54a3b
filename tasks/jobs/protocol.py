"""The channel between a stage and its job: files in one folder, nothing else.

`request.json` goes in. The job appends to `metrics.jsonl`, replaces `progress.json`, may write tables below
`tables/`, and writes `result.json` last: a job without a valid result has failed, whatever its exit code.
Only global rank 0 writes. Imports nothing heavy, so that both sides can use it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REQUEST = "request.json"
RESULT = "result.json"
METRICS = "metrics.jsonl"
PROGRESS = "progress.json"
RESOLVED = "resolved_arguments.json"
TABLES = "tables"
LOG = "job.log"


@dataclass(frozen=True)
class Request:
    """What a job is asked to do.

    Attributes:
        recipe: the stage's recipe as JSON; the job parses it with the model of `tasks.configs`.
        runtime: the stage's runtime as JSON.
        inputs: role -> payload folder of the input artifact.
        payload: folder that becomes the artifact's payload.
        work: folder that survives a failed attempt (checkpoints, finished shards).
        channel: folder of this attempt's channel files.
        options: what is neither recipe nor runtime, such as the reward and the split to read.
    """

    recipe: dict[str, Any]
    runtime: dict[str, Any]
    seed: int
    inputs: dict[str, str]
    payload: str
    work: str
    channel: str
    options: dict[str, Any] = field(default_factory=dict)

    def write(self) -> Path:
        path = Path(self.channel) / REQUEST
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")
        return path

    @staticmethod
    def read(path: str | Path) -> Request:
        return Request(**json.loads(Path(path).read_text()))


def run(main: Callable[[Request], None], description: str | None) -> None:
    """Parse a job's command line, `<request.json>`, and call its main."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("request", help="path of the request.json that a stage wrote")
    main(Request.read(parser.parse_args().request))


def is_main_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


class Reporter:
    """The job's side of the channel; silent on every rank but 0."""

    def __init__(self, request: Request) -> None:
        self._folder = Path(request.channel)
        self._active = is_main_rank()
        self._last_progress = 0.0

    def metrics(self, values: Mapping[str, Any], step: int) -> None:
        """Append one line; values that are no finite numbers are left out."""
        numbers = {name: float(value) for name, value in values.items() if _is_number(value)}
        if self._active and numbers:
            line = json.dumps({"step": step, "time": time.time(), "metrics": numbers})
            with (self._folder / METRICS).open("a") as stream:
                stream.write(line + "\n")

    def progress(self, done: int, total: int, text: str = "") -> None:
        """Tell how far the job is; at most four updates a second reach the disk, the last one always does."""
        now = time.monotonic()
        if self._active and (done >= total or now - self._last_progress > 0.25):
            self._last_progress = now
            _replace(self._folder / PROGRESS, {"done": done, "total": total, "text": text})

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows as `tables/<name>.json`; the parent logs it as a table of the MLflow run."""
        if self._active:
            folder = self._folder / TABLES
            folder.mkdir(exist_ok=True)
            _replace(folder / f"{name}.json", list(rows))

    def result(self, facts: Mapping[str, Any]) -> None:
        """Declare success; call it once, as the last thing."""
        if self._active:
            _replace(self._folder / RESULT, {"facts": dict(facts)})


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _replace(path: Path, document: Any) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(document))
    os.replace(temporary, path)
