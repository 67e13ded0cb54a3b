"""A pool of killable worker processes: each item has a hard wall-clock deadline.

A worker that misses a deadline gets SIGKILL and is replaced, so that neither C code
holding the interpreter lock nor a query without rows can keep a core busy. Workers are
started by `python -m` in a clean interpreter: nothing is forked from a process that
may hold CUDA, threads or locks, and the caller's `__main__` is not imported again.
Works from any thread, under pytest, and inside a torchrun rank.

It does not cover: limits on CPU time that an item may use before its deadline, files,
the network, or processes that a handler starts itself. POSIX only.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rewards.deadline_worker import decode, encode

MEMORY_BYTES = 1 << 30
"""Address space of a worker. Python, sqlglot and SQLite together start at about 0.2 GiB."""
START_LIMIT_S = 60.0
"""A fresh interpreter answers in about 0.1 s; a loaded machine may need far longer."""
_SEND_LIMIT_S = 10.0
_MAX_REPLY_BYTES = 16 << 20
_MAX_FAILED_STARTS = 3
_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Outcome:
    """What became of one item.

    value: the handler returned `value`. deadline: killed, during `phase`. crashed: the
    worker died twice on it. error: the handler raised; `detail` says what.
    """

    kind: Literal["value", "deadline", "crashed", "error"]
    value: Any = None
    phase: str = ""
    detail: str = ""


class _Worker:
    """One child process and the item it works on, if any."""

    def __init__(self, memory_bytes: int) -> None:
        ours, theirs = socket.socketpair()
        paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        # -P keeps the caller's working folder off the import path.
        command = [sys.executable, "-P", "-m", "rewards.deadline_worker"]
        command += [str(os.getpid()), str(memory_bytes)]
        with theirs:
            self.process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment
            )
        self.channel = ours
        self.buffer = bytearray()
        self.ready = False
        self.item: int | None = None
        self.began = False
        self.phase = ""
        self.limit_s = START_LIMIT_S
        self.expires = time.monotonic() + START_LIMIT_S

    @property
    def busy(self) -> bool:
        return not self.ready or self.item is not None

    def send(self, item: int, handler: str, payload: Any, limit_s: float) -> bool:
        """Hand over one item; False if the worker is gone."""
        self.channel.settimeout(_SEND_LIMIT_S)
        if self.process.poll() is not None:
            return False
        try:
            self.channel.sendall(encode((handler, payload)))
        except OSError:
            return False
        self.item, self.began, self.phase, self.limit_s = item, False, "", limit_s
        self.expires = time.monotonic() + limit_s
        return True

    def receive(self) -> list[Any] | None:
        """Messages that have arrived; None if the worker is gone or talks nonsense."""
        try:
            chunk = self.channel.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not chunk or len(self.buffer) > _MAX_REPLY_BYTES:
            return None
        self.buffer += chunk
        try:
            return decode(self.buffer)
        except ValueError:
            return None

    def kill(self) -> None:
        self.process.kill()
        self.channel.close()
        # One that is stuck in the kernel has the signal pending, and ends later.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)


class WorkerPool:
    """Runs batches of items on `workers` processes; safe to call from several threads.

    Workers start at the first batch. Concurrent batches run one after the other.
    """

    def __init__(self, workers: int, memory_bytes: int = MEMORY_BYTES) -> None:
        if workers < 1:
            raise ValueError(f"WorkerPool: workers is {workers}, expected at least 1.")
        self.size = workers
        self.memory_bytes = memory_bytes
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._failed_starts = 0
        self._exiting = False

    def run(self, handler: str, payloads: Sequence[Any], limit_s: float) -> list[Outcome]:
        """Outcomes of `handler` on each payload, in order.

        `handler` is "module:function", see `deadline_worker.Handler`; payloads and
        values are JSON. `limit_s` seconds are allowed per phase of an item, counted
        from when a ready worker gets it. An item whose worker dies is tried once more,
        because something else may have killed it. Raises RuntimeError if workers
        cannot be started at all.
        """
        with self._lock:
            batch = _Batch(handler, payloads, limit_s)
            try:
                while batch.open:
                    self._turn(batch)
            finally:
                # After an exception (Ctrl-C) a late reply must not meet the next batch.
                for worker in [worker for worker in self._workers if worker.item is not None]:
                    self._drop(worker)
            return batch.outcomes()

    def pids(self) -> list[int]:
        """Process ids of the current workers."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """Kill the workers. A later batch starts new ones."""
        with self._lock:
            for worker in list(self._workers):
                self._drop(worker)

    def _exit(self) -> None:
        # Without the lock: a daemon thread may hold it in the middle of a long batch.
        self._exiting = True
        for worker in list(self._workers):
            worker.process.kill()

    def _turn(self, batch: _Batch) -> None:
        if self._exiting:
            raise RuntimeError("The process is exiting: its reward workers are gone.")
        while len(self._workers) < min(self.size, batch.open):
            self._workers.append(_Worker(self.memory_bytes))
        for worker in list(self._workers):
            if not worker.busy and batch.queue:
                item = batch.queue.popleft()
                if not worker.send(item, batch.handler, batch.payloads[item], batch.limit_s):
                    batch.lost(item, began=False)
                    self._drop(worker)
        busy = {worker.channel.fileno(): worker for worker in self._workers if worker.busy}
        if not busy:
            return
        poll = select.poll()
        for descriptor in busy:
            poll.register(descriptor, select.POLLIN)
        rest = min(worker.expires for worker in busy.values()) - time.monotonic()
        for descriptor, _ in poll.poll(max(0.0, rest) * 1000 + 1):
            self._hear(busy[descriptor], batch)
        now = time.monotonic()
        for worker in [worker for worker in self._workers if worker.busy]:
            if worker.expires <= now:
                self._expire(worker, batch)

    def _hear(self, worker: _Worker, batch: _Batch) -> None:
        messages = worker.receive()
        if messages is None:
            if not worker.ready:
                self._start_failed(worker)
            if worker.item is not None:
                batch.lost(worker.item, worker.began)
            self._drop(worker)
            return
        for kind, *rest in messages:
            if kind == "ready":
                worker.ready, self._failed_starts = True, 0
            elif worker.item is None:
                continue
            elif kind == "phase":
                worker.began, worker.phase = True, rest[0] or worker.phase
                worker.expires = time.monotonic() + worker.limit_s
            elif kind == "value":
                batch.finish(worker.item, Outcome("value", rest[0]))
                worker.item = None
            else:
                batch.finish(worker.item, Outcome("error", None, worker.phase, rest[0]))
                worker.item = None

    def _expire(self, worker: _Worker, batch: _Batch) -> None:
        if not worker.ready:
            self._start_failed(worker)
        if worker.item is not None:
            detail = f"killed after {worker.limit_s:g} s"
            batch.finish(worker.item, Outcome("deadline", None, worker.phase, detail))
        self._drop(worker)

    def _start_failed(self, worker: _Worker) -> None:
        self._failed_starts += 1
        if self._failed_starts >= _MAX_FAILED_STARTS:
            self._failed_starts = 0
            self._drop(worker)
            raise RuntimeError(
                f"Reward workers do not start: {_MAX_FAILED_STARTS} in a row ended or were silent "
                f"for {START_LIMIT_S:g} s before they were ready (exit code "
                f"{worker.process.returncode}). Try `{sys.executable} -P -c 'import rewards'` "
                f"with PYTHONPATH={_ROOT}; its error is on stderr."
            )

    def _drop(self, worker: _Worker) -> None:
        if worker in self._workers:
            self._workers.remove(worker)
            worker.kill()


class _Batch:
    """Which items of one call wait, were tried, and are done."""

    def __init__(self, handler: str, payloads: Sequence[Any], limit_s: float) -> None:
        self.handler = handler
        self.payloads = payloads
        self.limit_s = limit_s
        self.queue = deque(range(len(payloads)))
        self._losses: dict[int, int] = {}
        self._done: dict[int, Outcome] = {}

    @property
    def open(self) -> int:
        return len(self.payloads) - len(self._done)

    def lost(self, item: int, began: bool) -> None:
        """A worker died on `item`. If it had not begun, the item is hardly to blame, so
        that counts half."""
        self._losses[item] = self._losses.get(item, 0) + (2 if began else 1)
        if self._losses[item] >= 4:
            self.finish(item, Outcome("crashed", detail="its worker died twice"))
        else:
            self.queue.appendleft(item)

    def finish(self, item: int, outcome: Outcome) -> None:
        self._done[item] = outcome

    def outcomes(self) -> list[Outcome]:
        return [self._done[item] for item in range(len(self.payloads))]


_shared: WorkerPool | None = None
_shared_lock = threading.Lock()
MOST_WORKERS = 16
_forgotten: list[WorkerPool] = []


def shared_pool() -> WorkerPool:
    """This process's pool, closed at exit: a worker for each core, shared among the ranks of this machine."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = WorkerPool(max(1, min(MOST_WORKERS, _cores() // _local_ranks())))
            atexit.register(_shared._exit)
        return _shared


def _local_ranks() -> int:
    """torchrun's count of processes on this machine; each of them opens a pool."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _after_fork_in_child() -> None:
    # The workers belong to the parent: forget them without touching them. The object is
    # kept alive, because its destruction would complain about running children.
    global _shared, _shared_lock
    _shared_lock = threading.Lock()
    if _shared is not None:
        atexit.unregister(_shared._exit)
        _forgotten.append(_shared)
        _shared = None


os.register_at_fork(after_in_child=_after_fork_in_child)
