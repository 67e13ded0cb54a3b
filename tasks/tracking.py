"""What goes to MLflow, and the only orchestration module that talks to it.

One parent run a pipeline, one child run a stage attempt. Jobs never see MLflow: their metrics arrive as lines
of a file, which is also the spool. A tracking server that is away costs warnings, never a stage: lines wait
in memory and on disk, and are sent again with the next batch.

mlflow is imported inside functions: it costs half a second that `import flows` must not pay.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

from data.artifacts import Manifest, canonical_json
from data.store import furlong_home

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

Status = Literal["FINISHED", "FAILED", "KILLED"]
PARAM_LIMIT = 6000
METRICS_PER_CALL = 1000
PARAMS_PER_CALL = 100
MLFLOW_PARENT_TAG = "mlflow.parentRunId"
OWNER_TAG = "furlong.owner"
RETRY_SECONDS = 30.0
REFUSALS = ("INVALID_PARAMETER_VALUE", "RESOURCE_ALREADY_EXISTS", "RESOURCE_DOES_NOT_EXIST")
"""MLflow error codes that say the content is wrong, not that the server is away."""


def tracking_uri() -> str:
    """`$MLFLOW_TRACKING_URI`, else the SQLite file that `make up` serves."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{furlong_home() / 'mlflow.db'}"


def mlflow_link(experiment_id: str, run_id: str, artifact: str = "") -> str:
    """Address of a run in the MLflow UI, or of one of its files."""
    base = os.environ.get("FURLONG_MLFLOW_UI_URL") or "http://127.0.0.1:5000"
    place = f"/artifacts/{artifact}" if artifact else ""
    return (
        f"{base.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}{place}?workflowType=machine_learning"
    )


@lru_cache(maxsize=1)
def _client(uri: str) -> MlflowClient:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault(
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2"
    )  # 5 s instead of 4 min when the server is away
    furlong_home().mkdir(parents=True, exist_ok=True)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    from mlflow import MlflowClient

    return MlflowClient(uri)


def client() -> MlflowClient:
    return _client(tracking_uri())


def _experiment_id(name: str) -> str:
    found = client().get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    local = tracking_uri().startswith("sqlite:")
    # A file location is readable by a direct SQLite client and by the server of `make up` alike.
    location = (furlong_home() / "mlartifacts" / name).as_uri() if local else None
    return str(client().create_experiment(name, artifact_location=location))


def metric_name(name: str) -> str:
    """A name that MLflow takes: `pass@8` -> `pass_at_8`, other illegal characters -> `_`."""
    safe = re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))
    return re.sub(r"/{2,}", "/", safe).replace("../", "_/").strip("/") or "_"


def safe_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """All metrics under legal names; two names that collide are kept apart by a suffix."""
    safe: dict[str, float] = {}
    for name in sorted(metrics):
        candidate, count = metric_name(name), 1
        while candidate in safe:
            count += 1
            candidate = f"{metric_name(name)}.{count}"
        safe[candidate] = float(metrics[name])
    return safe


def flat_params(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested values as dotted parameters; lists and leaves as JSON."""
    params: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            params.update(flat_params(value, f"{prefix}{name}."))
        else:
            params[metric_name(f"{prefix}{name}")] = value if isinstance(value, str) else json.dumps(value)
    return params


class TrackedRun:
    """One MLflow run; no method raises because tracking failed.

    What could not be sent waits in order and goes with a later call, at the earliest `RETRY_SECONDS` after a
    failure; `close` tries once more at once. A run that could not be opened is opened later.
    """

    def __init__(
        self, experiment: str, name: str, tags: Mapping[str, str], parent: TrackedRun | None = None
    ) -> None:
        self.run_id: str | None = None
        self.experiment_id = ""
        self._experiment, self._name = experiment, name
        self._tags = {**tags, OWNER_TAG: _owner()}
        if parent is not None and parent.run_id is not None:
            self._tags[MLFLOW_PARENT_TAG] = parent.run_id
        self._waiting: deque[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = deque()
        self._resting_until = 0.0
        self._send()

    @property
    def link(self) -> str:
        return mlflow_link(self.experiment_id, self.run_id or "")

    def params(self, values: Mapping[str, Any]) -> None:
        """Log nested parameters; those over MLflow's limit are also kept whole as a file."""
        from mlflow.entities import Param

        flat = flat_params(values)
        long = {name: text for name, text in flat.items() if len(text) > PARAM_LIMIT}
        entries = [Param(name, text[:PARAM_LIMIT]) for name, text in flat.items()]
        for start in range(0, len(entries), PARAMS_PER_CALL):
            self._call("log parameters", "log_batch", params=entries[start : start + PARAMS_PER_CALL])
        if long:
            self.json(long, "long_params.json")

    def metric_lines(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Log lines {"step", "time", "metrics"}, many to a call."""
        from mlflow.entities import Metric

        points = [
            Metric(name, value, int(line["time"] * 1000), line["step"])
            for line in lines
            for name, value in safe_metrics(line["metrics"]).items()
        ]
        for start in range(0, len(points), METRICS_PER_CALL):
            self._call("log metrics", "log_batch", metrics=points[start : start + METRICS_PER_CALL])

    def metrics(self, values: Mapping[str, Any], step: int = 0) -> None:
        numbers = {
            k: float(v) for k, v in values.items() if isinstance(v, (int, float)) and not isinstance(v, bool)
        }
        self.metric_lines([{"step": step, "time": time.time(), "metrics": numbers}])

    def tags(self, values: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        self._call("set tags", "log_batch", tags=[RunTag(k, str(v)[:8000]) for k, v in values.items()])

    def json(self, document: Any, file: str) -> None:
        self._call("log a file", "log_dict", document, file)

    def text(self, text: str, file: str) -> None:
        self._call("log a file", "log_text", text, file)

    def file(self, path: Path, folder: str | None = None) -> None:
        self._call("log a file", "log_artifact", str(path), folder)

    def table(self, rows: Sequence[Mapping[str, Any]], file: str) -> None:
        """A table that the MLflow UI can browse and compare."""
        columns = {name: [row.get(name) for row in rows] for name in (rows[0] if rows else {})}
        self._call("log a table", "log_table", columns, file)

    def dataset(self, role: str, path: str, digest: str, context: str) -> None:
        """Name an input artifact as a data set of this run."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        source = canonical_json({"uri": path})
        entity = Dataset(name=role, digest=digest[:36], source_type="local", source=source)
        inputs = [DatasetInput(entity, tags=[InputTag("mlflow.data.context", context)])]
        self._call("log an input", "log_inputs", datasets=inputs)

    def checkpoint(self, name: str, path: Path) -> None:
        """Register a model folder by reference; nothing is copied."""
        if self.run_id is None:
            return
        with _Tolerated("log a checkpoint"):
            import mlflow

            mlflow.set_tracking_uri(tracking_uri())
            mlflow.create_external_model(
                name=name,
                source_run_id=self.run_id,
                tags={"path": str(path)},
                experiment_id=self.experiment_id,
            )

    def close(self, status: Status) -> None:
        self._resting_until = 0.0
        self._call("close the run", "set_terminated", status=status)
        if self._waiting:
            logger.warning("MLflow: %d calls of run %s were never accepted", len(self._waiting), self._name)

    def _call(self, what: str, method: str, *args: Any, **kwargs: Any) -> None:
        self._waiting.append((what, method, args, kwargs))
        self._send()

    def _send(self) -> None:
        if time.monotonic() < self._resting_until:
            return
        if self.run_id is None and not self._open():
            return
        while self._waiting:
            what, method, args, kwargs = self._waiting[0]
            with _Tolerated(what) as attempt:
                getattr(client(), method)(self.run_id, *args, **kwargs)
            if attempt.failed and not attempt.hopeless:
                self._resting_until = time.monotonic() + RETRY_SECONDS
                return
            self._waiting.popleft()

    def _open(self) -> bool:
        with _Tolerated("open the run") as attempt:
            self.experiment_id = _experiment_id(self._experiment)
            made = client().create_run(self.experiment_id, run_name=self._name, tags=self._tags)
            self.run_id = made.info.run_id
        if attempt.failed:
            self._resting_until = time.monotonic() + RETRY_SECONDS
        return self.run_id is not None


class _Tolerated:
    """Tracking is not worth a training run: any error inside becomes a warning.

    `hopeless` is set when the server refused the content itself, which no later call will change.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self.failed = self.hopeless = False

    def __enter__(self) -> _Tolerated:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        self.failed = True
        self.hopeless = getattr(error, "error_code", "") in REFUSALS
        logger.warning("MLflow: could not %s (%s: %s)", self._what, type(error).__name__, str(error)[:300])
        return True


def log_manifest(run: TrackedRun, manifest: Manifest) -> None:
    """What every finished stage attempt leaves in MLflow: its facts, and the whole manifest as a file."""
    # Totals must not land in the curves of the same name that a training logs step by step.
    run.metrics({f"facts/{name}": value for name, value in manifest.facts.items()})
    run.metrics({"facts/seconds": manifest.seconds})
    run.tags({"furlong.key": manifest.ref.key, "furlong.digest": manifest.ref.digest})
    run.text(manifest.to_json(), "manifest.json")


def reward_tags(identity: Mapping[str, Any]) -> dict[str, str]:
    """Tags to search and group runs by: name, version, parameters and code digest of the reward."""
    name = identity["name"]
    return {
        "reward.name": name,
        f"reward.{name}.version": str(identity["version"]),
        f"reward.{name}.digest": identity["digest"],
        f"reward.{name}.params": canonical_json(identity["params"]),
    }


def log_tables(run: TrackedRun, channel: Path) -> None:
    """Log the tables that a job left in its channel folder."""
    for file in sorted((channel / "tables").glob("*.json")):
        run.table(json.loads(file.read_text()), f"tables/{file.name}")


def reconcile(experiment: str) -> int:
    """Mark runs KILLED that a dead process of this machine left RUNNING; returns how many."""
    ended = 0
    with _Tolerated("look for abandoned runs"):
        found = client().get_experiment_by_name(experiment)
        if found is None:
            return 0
        for run in client().search_runs([found.experiment_id], "attributes.status = 'RUNNING'"):
            owner = run.data.tags.get(OWNER_TAG, "")
            if owner.startswith(socket.gethostname() + "/") and not _alive(owner):
                client().set_terminated(run.info.run_id, status="KILLED")
                ended += 1
    return ended


def _owner() -> str:
    process = psutil.Process()
    return f"{socket.gethostname()}/{process.pid}/{process.create_time():.0f}"


def _alive(owner: str) -> bool:
    _, pid, started = owner.rsplit("/", 2)
    try:
        return f"{psutil.Process(int(pid)).create_time():.0f}" == started
    except psutil.NoSuchProcess:
        return False
