"""The real services, on free ports and in a folder of their own: `python -m tasks.services up|down|status`."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from tasks.service_state import Service, State, read_state
from tasks.services import running_services

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Rig:
    """A home for services and the ports that they get."""

    home: Path
    prefect_port: int
    mlflow_port: int

    def run(self, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "FURLONG_HOME": str(self.home),
            "FURLONG_PREFECT_PORT": str(self.prefect_port),
            "FURLONG_MLFLOW_PORT": str(self.mlflow_port),
            **variables,
        }
        arguments = [sys.executable, "-m", "tasks.services", command]
        return subprocess.run(
            arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
        )

    def api(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> Any:
        answer = httpx.request(
            method, f"http://127.0.0.1:{self.prefect_port}/api{path}", json=body, timeout=30
        )
        answer.raise_for_status()
        return answer.json() if answer.content else None


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Running services; the worker's pool is paused, so that no scheduled run really starts."""
    rig = Rig(tmp_path_factory.mktemp("home"), free_port(), free_port())
    answer = rig.run("up", PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS="2")  # 60 by default
    try:
        assert answer.returncode == 0, answer.stderr + answer.stdout
        assert f"http://127.0.0.1:{rig.prefect_port}\n" in answer.stdout
        assert f"http://127.0.0.1:{rig.mlflow_port}\n" in answer.stdout
        rig.api("/work_pools/local", {"is_paused": True}, "PATCH")
        yield rig
    finally:
        rig.run("down")


@pytest.fixture
def bystander() -> Iterator[psutil.Popen]:
    """A process that has nothing to do with the services."""
    process = psutil.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.slow
def test_both_pages_answer_and_are_found(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FURLONG_HOME", str(rig.home))
    found = running_services()
    assert found is not None
    assert found["prefect_api_url"] == f"http://127.0.0.1:{rig.prefect_port}/api"
    for page in (found["prefect_ui_url"], found["mlflow_ui_url"]):
        answer = httpx.get(page, follow_redirects=True)
        assert answer.status_code == 200 and "<html" in answer.text
    assert rig.run("status").returncode == 0


CHROMIUM = shutil.which("chromium")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: apt install chromium)")
def test_both_pages_render_and_the_run_form_shows_the_parameters(rig: Rig) -> None:
    """What a person sees: every deployment, the form of one with its fields explained, and MLflow's start page."""
    from playwright.sync_api import expect, sync_playwright

    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        page = browser.new_page(viewport={"width": 1400, "height": 1200})
        page.set_default_timeout(60_000)
        expect.set_options(timeout=60_000)
        page.goto(f"http://127.0.0.1:{rig.prefect_port}/deployments")
        for name in (
            "text2sql-racing",
            "nano",
            "whole",
            "prompts",
            "sample",
            "score",
            "select",
            "staleness",
            "compare",
        ):
            expect(page.get_by_text(name, exact=True).first).to_be_visible()
        page.get_by_text("nano", exact=True).first.click()
        page.get_by_role("button", name="Run", exact=True).first.click()
        page.get_by_text("Custom run").first.click()
        for field in ("config", "overrides", "seed", "fresh"):
            expect(page.get_by_text(field, exact=False).first).to_be_visible()
        page.goto(f"http://127.0.0.1:{rig.mlflow_port}")
        expect(page.get_by_text("Experiments").first).to_be_visible()
        browser.close()


@pytest.mark.slow
def test_deployments_are_registered_as_written(rig: Rig) -> None:
    written = {
        (deployment["entrypoint"], deployment["name"]): deployment
        for deployment in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    }
    found = {(d["entrypoint"], d["name"]): d for d in rig.api("/deployments/filter", {})}
    assert found.keys() == written.keys()
    for key, deployment in found.items():
        assert deployment["parameters"] == written[key]["parameters"]
        assert not any(schedule["active"] for schedule in deployment["schedules"])
        assert deployment["pull_steps"] == [
            {"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}
        ]
    assert rig.api("/work_pools/local", method="GET")["concurrency_limit"] == 1


@pytest.mark.slow
def test_an_active_cron_schedule_makes_scheduled_runs(rig: Rig) -> None:
    """Prefect 3.7 with SQLAlchemy 2.1 starts, deploys and runs, but schedules nothing and says so in a log only."""
    deployment = rig.api("/deployments/name/sft-grpo/nano", method="GET")
    schedule = f"/deployments/{deployment['id']}/schedules/{deployment['schedules'][0]['id']}"
    runs = {"deployments": {"id": {"any_": [deployment["id"]]}}}
    rig.api(schedule, {"active": True}, "PATCH")
    wait_for(lambda: rig.api("/flow_runs/count", runs) >= 3, 60)
    first = rig.api("/flow_runs/filter", runs)[0]
    assert (first["state"]["type"], first["auto_scheduled"]) == ("SCHEDULED", True)
    rig.api(schedule, {"active": False}, "PATCH")


@pytest.mark.slow
def test_up_again_changes_nothing(rig: Rig) -> None:
    before = (rig.home / "services/state.json").read_text()
    answer = rig.run("up")
    assert (answer.returncode, answer.stdout.splitlines()[0]) == (0, "Already up.")
    assert (rig.home / "services/state.json").read_text() == before


@pytest.mark.slow
def test_up_replaces_a_killed_worker_and_gives_up_its_run(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FURLONG_HOME", str(rig.home))
    state = read_state()
    assert state is not None
    before = state.alive()
    deployment = rig.api("/deployments/name/sft-grpo/nano", method="GET")["id"]
    run = f"/flow_runs/{rig.api(f'/deployments/{deployment}/create_flow_run', {})['id']}"
    rig.api(f"{run}/set_state", {"state": {"type": "RUNNING"}, "force": True})
    os.kill(before["worker"].pid, signal.SIGKILL)
    wait_for(lambda: before["worker"].process() is None, 10)
    assert rig.run("status").returncode == 1

    answer = rig.run("up")
    assert answer.returncode == 0, answer.stderr
    state = read_state()
    assert state is not None
    after = state.alive()
    assert (after["prefect"], after["mlflow"]) == (before["prefect"], before["mlflow"])
    assert after["worker"].pid != before["worker"].pid
    assert rig.api(run, method="GET")["state"]["type"] == "CRASHED"


@pytest.mark.slow
def test_down_ends_all_of_them_and_nobody_else(rig: Rig, bystander: psutil.Popen) -> None:
    state = (rig.home / "services/state.json").read_text()
    pids = [service["pid"] for service in yaml.safe_load(state)["services"]]
    tree = [p for pid in pids for p in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))]
    assert len(tree) > 3
    answer = rig.run("down")
    assert answer.returncode == 0, answer.stderr
    assert not [process for process in tree if lives(process)]
    assert lives(bystander)
    again = rig.run("down")
    assert (again.returncode, "Nothing that `up` started is running." in again.stdout) == (0, True)
    assert rig.run("status").returncode == 1


@pytest.mark.parametrize("name", ["prefect", "mlflow"])
def test_a_taken_port_is_named_and_nothing_starts(home: Path, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = {"prefect": free_port(), "mlflow": free_port(), name: port}
        answer = Rig(home, ports["prefect"], ports["mlflow"]).run("up")
    assert answer.returncode == 1
    assert f"port {port} for {name} is taken" in answer.stderr
    assert f"FURLONG_{name.upper()}_PORT=" in answer.stderr and f"--{name}-port" in answer.stderr
    assert read_state() is None and running_services() is None


def test_a_pid_used_again_is_not_ours(home: Path, bystander: psutil.Popen) -> None:
    other = Service("prefect", bystander.pid, bystander.create_time() - 3600)
    State(free_port(), free_port(), (other,)).write()
    assert running_services() is None
    answer = Rig(home, free_port(), free_port()).run("down")
    assert answer.returncode == 0, answer.stderr
    assert lives(bystander)


def lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def wait_for(true: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not so after {seconds} s"
        time.sleep(0.5)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]
