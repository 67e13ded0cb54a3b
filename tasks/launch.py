"""Runs a job: writes its request, spawns it, follows its files, and ends its whole process tree.

The job writes to files and the parent tails them: a pipe would block the child when the parent is slow, and
its content would be gone with the parent. Not covered: jobs on other machines.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.jobs import protocol
from tasks.jobs.protocol import Request

REPOSITORY = Path(__file__).resolve().parents[1]
POLL_SECONDS = 0.2
CANCEL_POLL_SECONDS = 5.0
GRACE_SECONDS = 10.0
LOG_LINES_PER_SECOND = 5.0
LOG_BURST = 40
ERROR_LINES = 25


class JobFailed(RuntimeError):
    """A job exited without a valid result; the message ends with the last lines of its log."""


class JobCancelled(BaseException):
    """The flow run was cancelled while its job ran (a BaseException: no retry, no `except Exception`)."""


@dataclass(frozen=True)
class Listener:
    """Where what a job says goes; each is called from the thread that called `run_job`."""

    metrics: Callable[[list[dict[str, Any]]], None]
    """A batch of lines {"step", "time", "metrics"}."""
    progress: Callable[[int, int, str], None]
    log: Callable[[str], None]
    cancelled: Callable[[], bool]
    """Asked every few seconds."""


def run_job(
    program: str,
    request: Request,
    listener: Listener,
    *,
    ranks: int = 1,
    torchrun: bool = False,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """Run `python -m tasks.jobs.<program>` to its end and return the facts of its result.

    Args:
        ranks: processes; more than one, or `torchrun`, starts them through torchrun.
        timeout_s: seconds after which the job is ended and counts as failed.

    Raises:
        JobFailed: non-zero exit, no valid result, or time-out.
        JobCancelled: the listener said so; the tree is ended by then.
    """
    channel = Path(request.channel)
    (channel / protocol.RESULT).unlink(missing_ok=True)
    command = _command(program, request.write(), ranks, torchrun)
    supervise = ["-m", "tasks.supervise", "--grace", str(GRACE_SECONDS), "--parent", str(os.getpid())]
    with (channel / protocol.LOG).open("ab") as log:
        supervisor = subprocess.Popen(
            [sys.executable, *supervise, "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=REPOSITORY,
            env=_environment(ranks, environment or {}),
            start_new_session=True,  # Ctrl-C reaches us, and we end the job in order
        )
    follower = _Follower(channel, listener)
    try:
        _follow(supervisor, follower, listener, program, timeout_s)
    finally:
        _end(supervisor)
        follower.poll(final=True)
    return _result(program, channel, supervisor.returncode)


def _command(program: str, request: Path, ranks: int, torchrun: bool) -> list[str]:
    module = ["-m", f"tasks.jobs.{program}", str(request)]
    if ranks > 1 or torchrun:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        return [sys.executable, *launcher, *module]
    return [sys.executable, *module]


def _environment(ranks: int, extra: Mapping[str, str]) -> dict[str, str]:
    environment = {**os.environ, **extra}
    # Byte code halves the 15 s that importing TRL and vLLM takes.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Progress is reported through the channel; bars and deprecation notes of libraries would drown the log.
    environment.setdefault("TQDM_DISABLE", "1")
    environment.setdefault("PYTHONWARNINGS", "ignore::FutureWarning,ignore::DeprecationWarning")
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


def _follow(
    supervisor: subprocess.Popen[bytes],
    follower: _Follower,
    listener: Listener,
    program: str,
    timeout_s: float | None,
) -> None:
    started = asked = time.monotonic()
    while supervisor.poll() is None:
        time.sleep(POLL_SECONDS)
        follower.poll()
        now = time.monotonic()
        if timeout_s is not None and now - started > timeout_s:
            raise JobFailed(f"{program}: still running after timeout_s = {timeout_s:g} s, so it was ended")
        if now - asked > CANCEL_POLL_SECONDS:
            asked = now
            if listener.cancelled():
                raise JobCancelled(f"{program}: the flow run was cancelled")


def _end(supervisor: subprocess.Popen[bytes]) -> None:
    if supervisor.poll() is None:
        supervisor.send_signal(signal.SIGTERM)
        try:
            supervisor.wait(GRACE_SECONDS + 10)
        except subprocess.TimeoutExpired:
            supervisor.kill()
            supervisor.wait()


def _result(program: str, channel: Path, code: int) -> dict[str, Any]:
    path = channel / protocol.RESULT
    if code == 0:
        try:
            return dict(json.loads(path.read_text())["facts"])
        except (OSError, ValueError, KeyError) as error:
            reason = f"exited with 0 but left no valid {protocol.RESULT} ({error})"
    else:
        reason = f"was ended by signal {code - 128}" if code > 128 else f"exited with {code}"
    log = channel / protocol.LOG
    tail = log.read_text(errors="replace").splitlines()[-ERROR_LINES:]
    raise JobFailed(f"{program}: the job {reason}. Log: {log}\n" + "\n".join(f"  | {line}" for line in tail))


class _Follower:
    """Tails a job's files; remembers how far it has read."""

    def __init__(self, channel: Path, listener: Listener) -> None:
        self._metrics = _Tail(channel / protocol.METRICS)
        self._log = _Tail(channel / protocol.LOG)
        self._progress = channel / protocol.PROGRESS
        self._progress_text = ""
        self._listener = listener
        self._allowance = float(LOG_BURST)
        self._hidden = 0
        self._refilled = time.monotonic()

    def poll(self, final: bool = False) -> None:
        lines = [json.loads(line) for line in self._metrics.lines()]
        if lines:
            self._listener.metrics(lines)
        self._poll_progress()
        self._poll_log(final)

    def _poll_progress(self) -> None:
        try:
            text = self._progress.read_text()
        except FileNotFoundError:
            return
        if text != self._progress_text:
            self._progress_text = text
            progress = json.loads(text)
            self._listener.progress(progress["done"], progress["total"], progress["text"])

    def _poll_log(self, final: bool) -> None:
        now = time.monotonic()
        self._allowance = min(LOG_BURST, self._allowance + LOG_LINES_PER_SECOND * (now - self._refilled))
        self._refilled = now
        for line in filter(str.strip, self._log.lines()):
            if self._allowance >= 1:
                self._allowance -= 1
                self._tell_hidden()
                self._listener.log(line)
            else:
                self._hidden += 1
        if final:
            self._tell_hidden()

    def _tell_hidden(self) -> None:
        if self._hidden:
            self._listener.log(f"... {self._hidden} more lines in {self._log.path}")
            self._hidden = 0


class _Tail:
    """Complete new lines of a growing file; a torn last line waits for its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def lines(self) -> list[str]:
        try:
            with self.path.open("rb") as stream:
                stream.seek(self._offset)
                block = stream.read()
        except FileNotFoundError:
            return []
        complete = block.rfind(b"\n") + 1
        self._offset += complete
        return block[:complete].decode(errors="replace").splitlines()
