"""Starts and ends what runs beside the flows: `python -m tasks.services up|down|status`.

Three detached processes: the Prefect server with its UI, the MLflow server with its UI, and one Prefect worker
that takes runs from the pool `local`, one at a time since they share one accelerator. `up` also registers the
deployments of prefect.yaml. Everything lies in `$FURLONG_HOME`: databases, logs (`services/*.log`) and
`services/state.json`, by which `down` ends exactly these processes. Both servers listen on 127.0.0.1 only.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from data.store import furlong_home
from tasks.service_state import HOST, State, end_tree, forget_state, read_state, running_services

__all__ = ["down", "main", "running_services", "status", "up"]

ROOT = Path(__file__).resolve().parents[1]
PORTS = {"prefect": 4200, "mlflow": 5000}
SERVICES = (*PORTS, "worker")
POOL = "local"
START_SECONDS = 180  # a first start migrates both databases: 26 s on two free cores, more on busy ones


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 0 when it did (for `status`: when everything runs), 1 with the reason otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m tasks.services", description="Prefect, MLflow and a worker"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("up", help="start what does not run yet, and register the deployments")
    for name, port in PORTS.items():
        variable = f"FURLONG_{name.upper()}_PORT"
        text = f"default: {variable}, else {port}"
        start.add_argument(f"--{name}-port", type=int, default=os.environ.get(variable) or port, help=text)
    commands.add_parser("down", help="end what `up` started")
    commands.add_parser("status", help="say what runs")
    options = parser.parse_args(arguments)
    # Whatever a script starts with `&` ignores SIGINT, and so would its children; a worker stops on nothing else.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.command == "status":
            return status()
        with _alone():
            if options.command == "up":
                up(options.prefect_port, options.mlflow_port)
            else:
                down()
    except KeyboardInterrupt:
        print("services: interrupted", file=sys.stderr)
        return 130
    except RuntimeError as error:
        print(f"services: {error}", file=sys.stderr)
        return 1
    return 0


def up(prefect_port: int, mlflow_port: int) -> None:
    """Start every service that does not run, wait until all answer, and register the deployments.

    Raises:
        RuntimeError: a port is taken, a service did not start, or a deployment was refused. Then everything that
            this call started has been ended.
    """
    state = read_state()
    alive = state.alive() if state else {}
    if state and len(alive) == len(SERVICES):
        print(f"Already up.\n{_summary(state)}")
        return
    if state and alive:
        print(f"Still running: {', '.join(alive)}. Starting the rest.")
        before = State(state.prefect_port, state.mlflow_port, tuple(alive.values()))
    else:
        before = State(prefect_port, mlflow_port)
    for name, port in (("prefect", before.prefect_port), ("mlflow", before.mlflow_port)):
        if name not in alive:
            _check_port(name, port)
    try:
        state = _start_missing(before)
    except BaseException:
        print("ending what was started ...", file=sys.stderr, flush=True)
        for service in reversed((read_state() or before).services):
            if service.name not in alive:
                end_tree(service)
        before.write() if alive else forget_state()
        raise
    print(_summary(state))


def down() -> None:
    """End what `up` started, with all descendants: the worker first, while the server can still record it."""
    state = read_state()
    alive = state.alive() if state else {}
    if not alive:
        print("Nothing that `up` started is running.")
    for name in reversed(SERVICES):
        if name in alive:
            print(f"ending {name} (pid {alive[name].pid}) ...", flush=True)
            end_tree(alive[name])
    forget_state()


def status() -> int:
    """Print one line for each service; 0 when all run."""
    state = read_state()
    alive = state.alive() if state else {}
    for name in SERVICES:
        print(f"{name:8} {f'pid {alive[name].pid}' if name in alive else 'not running':12} {_log(name)}")
    if state and len(alive) == len(SERVICES):
        print(_summary(state))
        return 0
    print("Start with: make up")
    return 1


def _start_missing(state: State) -> State:
    """Start what `state` lacks. The MLflow server migrates its database while Prefect is prepared."""
    environment, urls = _environment(state), state.urls
    for name in PORTS:
        state = _start(state, name, environment)
    _wait(state, "prefect", lambda: _get(f"{urls['prefect_api_url']}/health") is not None)
    pool = f"{urls['prefect_api_url']}/work_pools/{POOL}"
    if _get(pool) is None:  # a limit that somebody set on an existing pool stays
        print(f"making the work pool {POOL}, one run at a time ...", flush=True)
        _prefect(environment, "work-pool", "create", POOL, "--type", "process")
        _prefect(environment, "work-pool", "set-concurrency-limit", POOL, "1")
    if "worker" not in state.alive():
        _give_up_lost_runs(urls["prefect_api_url"])
    state = _start(state, "worker", environment)
    print("registering the deployments of prefect.yaml ...", flush=True)
    _prefect(environment, "deploy", "--all", "--no-prompt")
    _wait(state, "worker", lambda: _has_worker(pool))
    _wait(state, "mlflow", lambda: _get(f"{urls['mlflow_ui_url']}/health") is not None)
    return state


def _start(state: State, name: str, environment: dict[str, str]) -> State:
    if name in state.alive():
        return state
    print(f"starting {name} ...", flush=True)
    home = furlong_home()
    server = ["server", "--host", HOST, "--port", str(state.mlflow_port), "--workers", "1"]
    storage = ["--backend-store-uri", f"sqlite:///{home / 'mlflow.db'}", "--no-serve-artifacts"]
    storage += ["--default-artifact-root", (home / "mlartifacts").as_uri()]
    command = {
        "prefect": ["prefect", "server", "start", "--host", HOST, "--port", str(state.prefect_port)],
        "mlflow": ["mlflow", *server, *storage],
        "worker": ["prefect", "worker", "start", "--pool", POOL, "--type", "process", "--name", "furlong"],
    }[name]
    with _log(name).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    state = state.with_service(name, process.pid)
    state.write()
    return state


def _environment(state: State) -> dict[str, str]:
    """Environment of the services, and so of every flow that the worker runs."""
    dropped = {"PYTHONDONTWRITEBYTECODE", "PREFECT_PROFILE"}
    kept = {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith("PREFECT_API_")}
    prefect_home = furlong_home() / "prefect"
    return {
        "PREFECT_WORKER_QUERY_SECONDS": "3",
        **kept,
        "PWD": str(ROOT),  # prefect.yaml's pull step asks for it
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "FURLONG_HOME": str(furlong_home()),
        "FURLONG_PREFECT_UI_URL": state.urls["prefect_ui_url"],
        "FURLONG_MLFLOW_UI_URL": state.urls["mlflow_ui_url"],
        "PREFECT_API_URL": state.urls["prefect_api_url"],
        "PREFECT_HOME": str(prefect_home),
        "PREFECT_LOCAL_STORAGE_PATH": str(prefect_home / "storage"),  # does not follow PREFECT_HOME
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # eight processes of 130 MB that nothing here uses
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _prefect(environment: dict[str, str], *arguments: str) -> None:
    command = [sys.executable, "-m", "prefect", *arguments]
    answer = subprocess.run(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if answer.returncode:
        lines = (answer.stdout + answer.stderr).strip().splitlines()
        raise RuntimeError(f"prefect {' '.join(arguments)} failed:\n" + "\n".join(lines[-15:]))


def _wait(state: State, name: str, ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        dead = [service.name for service in state.services if not service.process()]
        if dead or time.monotonic() > deadline:
            name = dead[0] if dead else name
            fate = "ended while starting" if dead else f"did not answer within {START_SECONDS} s"
            tail = "\n".join(_log(name).read_text(errors="replace").splitlines()[-15:])
            raise RuntimeError(f"{name} {fate}. The end of {_log(name)}:\n{tail}")
        time.sleep(0.3)


def _get(url: str, body: dict[str, Any] | None = None) -> str | None:
    """The text at an address (POST with a body), or None when nobody answers or it is not there."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read().decode()
    except OSError:
        return None


def _give_up_lost_runs(api: str) -> None:
    """Mark runs as crashed whose process is gone: a machine that went down left them Running.

    Prefect would leave them so for ever, and each would hold the one place in the pool.
    """
    states = {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}}
    chosen = {"work_pools": {"name": {"any_": [POOL]}}, "flow_runs": {"state": states}}
    for run in json.loads(_get(f"{api}/flow_runs/filter", chosen) or "[]"):
        pid = (run["infrastructure_pid"] or "").rpartition(":")[2]
        if not pid.isdigit() or not _is_flow_run(int(pid)):
            print(f"run {run['name']} lost its process; marking it as crashed", flush=True)
            crashed = {"type": "CRASHED", "message": "Its process was gone when the services started."}
            _get(f"{api}/flow_runs/{run['id']}/set_state", {"state": crashed, "force": True})


def _is_flow_run(pid: int) -> bool:
    try:
        return any("prefect" in part for part in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def _has_worker(pool: str) -> bool:
    workers = json.loads(_get(f"{pool}/workers/filter", {}) or "[]")
    return any(worker["status"] == "ONLINE" for worker in workers)


def _check_port(name: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise RuntimeError(f"{name} cannot listen on {HOST}:{port}: {error.strerror}") from error
            raise RuntimeError(
                f"port {port} for {name} is taken by a process that `up` did not start{_owner(port)}. End it, or "
                f"choose another port: FURLONG_{name.upper()}_PORT={port + 1} make up (or --{name}-port {port + 1})"
            ) from error


def _owner(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            local = tuple(connection.laddr)
            if connection.status == psutil.CONN_LISTEN and port in local[1:] and connection.pid:
                return f" (pid {connection.pid}, {psutil.Process(connection.pid).name()})"
    except psutil.Error:
        return ""  # its owner is not ours to see
    return ""


def _summary(state: State) -> str:
    urls = state.urls
    return (
        f"\nPrefect  {urls['prefect_ui_url']}\nMLflow   {urls['mlflow_ui_url']}\n\n"
        "Next: start a run from Prefect's page, or from a shell:\n"
        f"  export PREFECT_API_URL={urls['prefect_api_url']}\n"
        "  .venv/bin/prefect deployment run sft-grpo/nano --watch\n"
        "End everything with: make down"
    )


def _log(name: str) -> Path:
    return furlong_home() / "services" / f"{name}.log"


@contextmanager
def _alone() -> Iterator[None]:
    """Of two calls at once the second waits. The lock goes when its owner dies."""
    folder = furlong_home() / "services"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another `up` or `down` is at work; waiting for it ...", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main())
