"""Which services of ours run, and how one is ended: state.json, process identity, process trees.

Cheap to import (no Prefect, no MLflow), so that a command line can look for the running server first.
`tasks.services` starts them. Not covered: descendants of a service that was itself killed with SIGKILL.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from data.store import furlong_home

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Service:
    """A process of ours, known by its pid and, since pids are used again, its start time."""

    name: str
    pid: int
    started: float

    def process(self) -> psutil.Process | None:
        """The living process, or None."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < 2  # it moves when the clock is set
            return process if same and _lives(process) else None
        except psutil.NoSuchProcess:
            return None


@dataclass(frozen=True)
class State:
    """Content of `$FURLONG_HOME/services/state.json`; the ports are those of the two servers."""

    prefect_port: int
    mlflow_port: int
    services: tuple[Service, ...] = ()

    @property
    def urls(self) -> dict[str, str]:
        prefect, mlflow = (f"http://{HOST}:{port}" for port in (self.prefect_port, self.mlflow_port))
        return {"prefect_api_url": f"{prefect}/api", "prefect_ui_url": prefect, "mlflow_ui_url": mlflow}

    def alive(self) -> dict[str, Service]:
        return {service.name: service for service in self.services if service.process()}

    def with_service(self, name: str, pid: int) -> State:
        """This state and a process that was just started, in place of a dead one of that name."""
        service = Service(name, pid, psutil.Process(pid).create_time())
        others = tuple(other for other in self.services if other.name != name)
        return State(self.prefect_port, self.mlflow_port, (*others, service))

    def write(self) -> None:
        path = _state_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=2) + "\n")
        os.replace(partial, path)


def read_state() -> State | None:
    """What the last `up` wrote, dead services included; None after `down`."""
    try:
        content = json.loads(_state_file().read_text())
    except FileNotFoundError:
        return None
    return State(**{**content, "services": tuple(Service(**service) for service in content["services"])})


def forget_state() -> None:
    _state_file().unlink(missing_ok=True)


def running_services() -> dict[str, str] | None:
    """Addresses of the servers that `up` started: prefect_api_url, prefect_ui_url and mlflow_ui_url.

    None unless both servers live. It reads one file and asks the kernel about the pids; nothing is called.
    """
    state = read_state()
    return state.urls if state and {"prefect", "mlflow"} <= state.alive().keys() else None


def end_tree(service: Service) -> None:
    """End a service and all its descendants; whoever does not end by itself is killed.

    What it had started goes first: a worker that stops kills its flow runs at once, but a flow run that gets
    SIGTERM ends its job, closes its MLflow run and reports to Prefect.
    """
    root = service.process()
    if root is None:
        return
    direct = set(_children(root, recursive=False))
    tree = {root, *_children(root)}
    for chosen, signum, seconds in (
        (direct, signal.SIGTERM, 30),
        ({root}, signal.SIGTERM, 5),
        (tree, signal.SIGTERM, 15),
        (tree, signal.SIGKILL, 5),
    ):
        for process in chosen:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signum)
        deadline = time.monotonic() + seconds
        while any(_lives(process) for process in chosen) and time.monotonic() < deadline:
            time.sleep(0.1)
            tree.update(child for process in tree.copy() for child in _children(process))


def _children(process: psutil.Process, recursive: bool = True) -> Iterable[psutil.Process]:
    try:
        return process.children(recursive=recursive)
    except psutil.NoSuchProcess:
        return ()


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _state_file() -> Path:
    return furlong_home() / "services" / "state.json"
