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
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rewards.deadline_child import AHEAD, ROOT, START_LIMIT_S, Worker, encode_item
from rewards.deadline_worker import clock

MEMORY_BYTES = 1 << 30
"""Address space of a worker. Python, sqlglot and SQLite together start at about 0.2 GiB."""
_MAX_FAILED_STARTS = 3


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


class WorkerPool:
    """Runs batches of items on `workers` processes; safe to call from several threads.

    Workers start at the first batch. Concurrent batches run one after the other.
    """

    def __init__(self, workers: int, memory_bytes: int = MEMORY_BYTES) -> None:
        if workers < 1:
            raise ValueError(f"WorkerPool: workers is {workers}, expected at least 1.")
        self.size = workers
        self.memory_bytes = memory_bytes
        self._workers: list[Worker] = []
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
                for worker in [worker for worker in self._workers if worker.items]:
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
            self._workers.append(Worker(self.memory_bytes))
        self._hand_out(batch)
        busy = {worker.channel.fileno(): worker for worker in self._workers if worker.busy}
        if not busy:
            return
        poll = select.poll()
        for descriptor in busy:
            poll.register(descriptor, select.POLLIN)
        rest = min(worker.expires for worker in busy.values()) - clock()
        for descriptor, _ in poll.poll(max(0.0, rest) * 1000 + 1):
            self._hear(busy[descriptor], batch)
        for worker in [worker for worker in self._workers if worker.busy]:
            if worker.overdue():
                self._expire(worker, batch)

    def _hand_out(self, batch: _Batch) -> None:
        """First one item to each idle worker, then more ahead of time while many wait: at
        the end of a batch none should wait behind a slow one while a worker is idle."""
        for count in range(AHEAD):
            for worker in [worker for worker in self._workers if len(worker.items) == count]:
                if len(batch.queue) <= count * self.size:
                    return
                item = batch.queue[0]
                frame = encode_item(batch.handler, batch.payloads[item])
                if not worker.has_room(len(frame)):
                    continue
                batch.queue.popleft()
                if not worker.send(item, frame, batch.limit_s):
                    self._lose(worker, batch, item)

    def _hear(self, worker: Worker, batch: _Batch) -> None:
        messages = worker.receive()
        if messages is None:
            if not worker.ready:
                self._start_failed(worker)
            self._lose(worker, batch)
            return
        self._take(worker, batch, messages)

    def _take(self, worker: Worker, batch: _Batch, messages: list[Any]) -> None:
        for kind, *rest in messages:
            if kind == "ready":
                worker.ready, self._failed_starts = True, 0
            elif kind == "back":
                batch.put_back(worker.take_back())
            elif worker.items and kind == "value":
                batch.finish(worker.take_done(), Outcome("value", rest[0]))
            elif worker.items:
                detail, phase = rest
                batch.finish(worker.take_done(), Outcome("error", None, phase, detail))

    def _hear_out(self, worker: Worker, batch: _Batch) -> bool:
        """Take what a dead worker had still sent; whether that ended an item."""
        waiting = len(worker.items)
        while (messages := worker.receive()) is not None:
            self._take(worker, batch, messages)
            if not messages and worker.process.poll() is None:
                break  # stuck in the kernel: no end of what it sent will be seen
        return len(worker.items) < waiting

    def _lose(self, worker: Worker, batch: _Batch, unsent: int | None = None) -> None:
        """A worker died. Only the item it was at can be to blame; the others wait again."""
        self._hear_out(worker, batch)
        if unsent is not None:
            worker.items.append(unsent)
        finished, item, rest, state = worker.split()
        batch.put_back([*finished, *rest])
        if item is not None:
            batch.lost(item, began=state is not None)
        self._drop(worker)

    def _expire(self, worker: Worker, batch: _Batch) -> None:
        if not worker.ready:
            self._start_failed(worker)
        worker.kill()
        # It may have gone on to another item just before the kill: that one is not late.
        if not self._hear_out(worker, batch):
            finished, item, rest, state = worker.split()
            if item is not None:
                detail = f"killed after {worker.limit_s:g} s"
                batch.finish(item, Outcome("deadline", None, state.phase if state else "", detail))
            batch.put_back([*finished, *rest])
        else:
            batch.put_back(worker.items)
        self._drop(worker)

    def _start_failed(self, worker: Worker) -> None:
        self._failed_starts += 1
        if self._failed_starts >= _MAX_FAILED_STARTS:
            self._failed_starts = 0
            self._drop(worker)
            raise RuntimeError(
                f"Reward workers do not start: {_MAX_FAILED_STARTS} in a row ended or were silent "
                f"for {START_LIMIT_S:g} s before they were ready (exit code "
                f"{worker.process.returncode}). Try `{sys.executable} -P -c 'import rewards'` "
                f"with PYTHONPATH={ROOT}; its error is on stderr."
            )

    def _drop(self, worker: Worker) -> None:
        if worker in self._workers:
            self._workers.remove(worker)
            worker.close()


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

    def put_back(self, items: Iterable[int]) -> None:
        """Items that were handed over and not begun: they wait again, first in the queue."""
        self.queue.extendleft(reversed(list(items)))

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
