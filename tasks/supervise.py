"""Runs one command and lets none of its descendants outlive it: `python -m tasks.supervise -- command ...`.

torchrun gives every rank a session of its own and vLLM spawns processes of its own, so ending a process
group is not enough. The supervisor is a child subreaper (orphans of its tree become its children), asks the
kernel for SIGTERM when its own parent dies, and on SIGTERM, SIGINT or the command's end it ends the whole
tree: SIGTERM, grace, SIGKILL, until nobody is left. Exits with the command's exit code (128 + n for signal n).

When the supervisor itself is killed by SIGKILL, the command gets SIGTERM from the kernel; what it started is then its own
business (torchrun ends its ranks). Linux only; elsewhere orphans that left the tree are missed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from functools import lru_cache
from types import FrameType

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


class Ended(BaseException):
    """The supervisor was told to stop."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run a command; end its whole process tree with it.")
    parser.add_argument("--grace", type=float, default=10.0, help="seconds between SIGTERM and SIGKILL")
    parser.add_argument("--parent", type=int, default=os.getppid(), help="pid whose death ends everything")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- command and its arguments")
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, _stop)
    _bind_to_parent(options.parent)
    try:
        child = subprocess.Popen(command, preexec_fn=_die_with_parent)  # noqa: PLW1509  no threads here
        code = child.wait()
    except Ended:
        code = 128 + signal.SIGTERM
    finally:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        end_descendants(options.grace)
    return code if code >= 0 else 128 - code


def end_descendants(grace: float) -> None:
    """End every descendant of this process; those that appear meanwhile too."""
    deadline = time.monotonic() + grace
    signalled: set[psutil.Process] = set()
    while tree := _living_descendants():
        late = time.monotonic() > deadline
        for process in tree:
            if late or process not in signalled:
                _send(process, signal.SIGKILL if late else signal.SIGTERM)
                signalled.add(process)
        psutil.wait_procs(tree, timeout=0.1)


def _living_descendants() -> list[psutil.Process]:
    _reap()
    tree = psutil.Process().children(recursive=True)
    return [process for process in tree if _status(process) not in (None, psutil.STATUS_ZOMBIE)]


def _status(process: psutil.Process) -> str | None:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return None


def _send(process: psutil.Process, signum: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signum)


def _reap() -> None:
    """Collect orphans that became ours, so that no zombie counts as alive."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


@lru_cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    """Ask the kernel for SIGTERM when the parent dies; kept across exec."""
    if sys.platform == "linux":
        _libc().prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _bind_to_parent(parent: int) -> None:
    if sys.platform != "linux":
        return
    _libc().prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _die_with_parent()
    if os.getppid() != parent:  # it died before the request reached the kernel
        raise SystemExit(128 + signal.SIGTERM)


def _stop(signum: int, frame: FrameType | None) -> None:
    raise Ended


if __name__ == "__main__":
    sys.exit(main())
