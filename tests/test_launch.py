"""Jobs: what they say arrives, what they leave is checked, and nothing of them outlives their flow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks import launch
from tasks.jobs import protocol
from tasks.jobs.protocol import Reporter, Request
from tasks.launch import JobCancelled, JobFailed, Listener, run_job

STUBBORN_TREE = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.setsid(); time.sleep(300)"
grandchild = subprocess.Popen([sys.executable, "-c", child])
open(sys.argv[1] + "/pids", "w").write(f"{os.getpid()} {grandchild.pid}")
time.sleep(300)
"""


class Heard:
    """A listener that remembers."""

    def __init__(self, cancelled: bool = False) -> None:
        self.metrics: list[dict[str, Any]] = []
        self.progress: list[tuple[int, int, str]] = []
        self.lines: list[str] = []
        self.cancelled = cancelled

    @property
    def listener(self) -> Listener:
        return Listener(
            metrics=self.metrics.extend,
            progress=lambda done, total, text: self.progress.append((done, total, text)),
            log=self.lines.append,
            cancelled=lambda: self.cancelled,
        )


@pytest.fixture
def request_(tmp_path: Path) -> Request:
    for name in ("payload", "work", "channel"):
        (tmp_path / name).mkdir()
    payload, work, channel = (str(tmp_path / name) for name in ("payload", "work", "channel"))
    return Request({}, {}, 0, {}, payload, work, channel)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, request_: Request) -> Any:
    """Run a Python program in the place of a job; its argument is the channel folder."""

    def call(program: str, heard: Heard, **kwargs: Any) -> dict[str, Any]:
        command = [sys.executable, "-c", textwrap.dedent(program), request_.channel]
        monkeypatch.setattr(launch, "_command", lambda *args: command)
        return run_job("program", request_, heard.listener, **kwargs)

    return call


def gone(pids: list[int], seconds: float = 15) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(
            psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids
        ):
            return True
        time.sleep(0.1)
    return False


def read_pids(channel: Path) -> list[int]:
    while not (channel / "pids").exists() or not (channel / "pids").read_text():
        time.sleep(0.05)
    return [int(pid) for pid in (channel / "pids").read_text().split()]


def test_facts_metrics_progress_and_log_arrive(run: Any) -> None:
    heard = Heard()
    facts = run(
        """
        import sys
        from tasks.jobs.protocol import Reporter, Request
        reporter = Reporter(Request.read(sys.argv[1] + "/request.json"))
        print("hello")
        reporter.metrics({"loss": 1.5, "bad": float("nan"), "text": "x"}, step=1)
        reporter.metrics({"loss": 1.0}, step=2)
        reporter.progress(2, 2, "done")
        reporter.result({"answer": 42})
        """,
        heard,
    )
    assert facts == {"answer": 42}
    assert [(line["step"], line["metrics"]) for line in heard.metrics] == [
        (1, {"loss": 1.5}),
        (2, {"loss": 1.0}),
    ]
    assert heard.progress == [(2, 2, "done")]
    assert "hello" in heard.lines


def test_a_failing_job_shows_its_last_lines(run: Any, request_: Request) -> None:
    with pytest.raises(JobFailed, match=r"exited with 1\. Log: .*job\.log") as caught:
        run("raise ValueError('the GPU is on fire')", Heard())
    assert "ValueError: the GPU is on fire" in str(caught.value)


def test_exit_code_zero_without_a_result_is_a_failure(run: Any) -> None:
    with pytest.raises(JobFailed, match=r"exited with 0 but left no valid result\.json"):
        run("print('all good, honestly')", Heard())


def test_a_result_of_an_earlier_attempt_does_not_count(run: Any, request_: Request) -> None:
    Reporter(request_).result({"stale": True})
    with pytest.raises(JobFailed, match="left no valid"):
        run("pass", Heard())


def test_a_killed_job_names_its_signal(run: Any) -> None:
    with pytest.raises(JobFailed, match="ended by signal 9"):
        run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", Heard())


def test_a_flood_of_log_lines_is_cut_and_counted(run: Any, request_: Request) -> None:
    heard = Heard()
    with pytest.raises(JobFailed):
        run("for n in range(20_000): print('line', n)", heard)
    assert len(heard.lines) < 100
    assert "more lines in" in heard.lines[-1]
    assert (Path(request_.channel) / protocol.LOG).read_text().count("\n") == 20_000


@pytest.mark.parametrize("why", ["cancelled", "timeout"])
def test_a_tree_that_ignores_sigterm_dies_whole(
    run: Any, request_: Request, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(launch, "CANCEL_POLL_SECONDS", 2.0)
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.5)
    expected, heard = (JobCancelled, Heard(cancelled=True)) if why == "cancelled" else (JobFailed, Heard())
    with pytest.raises(expected, match=why.replace("timeout", "timeout_s")):
        run(STUBBORN_TREE, heard, timeout_s=2.0 if why == "timeout" else None)
    assert gone(read_pids(Path(request_.channel)), seconds=2)


def test_a_tree_dies_when_its_flow_is_killed(tmp_path: Path) -> None:
    """kill -9 of the process that runs the flow: nobody is left to clean up but the supervisor."""
    driver = textwrap.dedent(f"""
        import sys
        from tasks import launch
        from tests.test_launch import STUBBORN_TREE, Heard
        from tasks.jobs.protocol import Request
        launch.GRACE_SECONDS = 0.5
        launch._command = lambda *args: [sys.executable, "-c", STUBBORN_TREE, {str(tmp_path)!r}]
        launch.run_job("program", Request({{}}, {{}}, 0, {{}}, *[{str(tmp_path)!r}] * 3), Heard().listener)
    """)
    flow = subprocess.Popen([sys.executable, "-c", driver], cwd=launch.REPOSITORY)
    pids = read_pids(tmp_path)
    os.kill(flow.pid, signal.SIGKILL)
    flow.wait()
    assert gone(pids)


def test_a_command_does_not_outlive_a_killed_supervisor(tmp_path: Path) -> None:
    """As when something kills the supervisor by SIGKILL, which it cannot answer."""
    code = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(300)"
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "tasks.supervise", "--", sys.executable, "-c", code],
        cwd=launch.REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert supervisor.stdout is not None
    command = psutil.Process(int(supervisor.stdout.readline()))
    supervisor.kill()
    supervisor.wait()
    command.wait(30)
    assert not command.is_running()


def test_leftovers_of_a_finished_job_are_ended(
    run: Any, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.5)
    run(
        """
        import json, subprocess, sys
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
        open(sys.argv[1] + "/pids", "w").write(str(left.pid))
        open(sys.argv[1] + "/result.json", "w").write(json.dumps({"facts": {}}))
        """,
        Heard(),
    )
    assert gone(read_pids(Path(request_.channel)), seconds=2)


def test_only_rank_zero_speaks(request_: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    Reporter(request_).result({"rank": 1})
    assert not (Path(request_.channel) / protocol.RESULT).exists()
    monkeypatch.setenv("RANK", "0")
    Reporter(request_).result({"rank": 0})
    assert json.loads((Path(request_.channel) / protocol.RESULT).read_text()) == {"facts": {"rank": 0}}
