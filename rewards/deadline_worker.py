"""The child side of `rewards.deadline`: one item at a time, in a clean interpreter.

Run by the pool as `python -P -m rewards.deadline_worker PARENT_PID MEMORY_BYTES PROGRESS`;
the socket to the pool is file descriptor 0, and PROGRESS is the descriptor of the memory
that says what is being done. It limits its own address space, and ends when the parent's
process is gone. It does not limit files, the network or processes: a handler that runs
foreign code brings its own sandbox.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

Mark = Callable[[str], None]
"""Tells the pool which phase begins, and restarts the item's clock."""
Handler = Callable[[Any, Mark], Any]
"""(JSON payload, mark) -> JSON value."""

_HEADER = struct.Struct(">I")
_STATE = struct.Struct("<Qd32s")
_PARENT_POLL_S = 0.5
GO = "go"
"""In place of a handler: what follows was sent after the pool had heard "back"."""
_SLOW_S = 0.05
_HOLD_S = 0.005
_HOLD_BYTES = 32 << 10
_as_json = json.JSONEncoder(separators=(",", ":")).encode


def encode(message: Any) -> bytes:
    """One frame: a length of four bytes, then JSON in ASCII (lone surrogates survive)."""
    body = _as_json(message).encode("ascii")
    return _HEADER.pack(len(body)) + body


def decode(buffer: bytearray) -> list[Any]:
    """Take all complete frames off the front of `buffer`."""
    messages = []
    start = 0
    while len(buffer) - start >= _HEADER.size:
        (size,) = _HEADER.unpack_from(buffer, start)
        end = start + _HEADER.size + size
        if len(buffer) < end:
            break
        messages.append(json.loads(bytes(buffer[start + _HEADER.size : end])))
        start = end
    del buffer[:start]
    return messages


def clock() -> float:
    """Seconds on a clock that all processes of this machine share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class State(NamedTuple):
    """begun: items begun since the start. since: `clock()` at the last mark. phase: the last mark."""

    begun: int
    since: float
    phase: str


class Progress:
    """Where a worker says what it does: memory shared with the pool, because a message
    for each phase of each item would wake the pool, which takes longer than most queries.

    A read may meet a half-written mark; the pool reads twice before it acts on one.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    def write(self, begun: int, phase: str) -> None:
        _STATE.pack_into(self._memory, 0, begun, clock(), phase.encode("ascii", "replace"))

    def read(self) -> State:
        begun, since, phase = _STATE.unpack_from(self._memory)
        return State(begun, since, phase.rstrip(b"\0").decode("ascii", "replace"))

    def close(self) -> None:
        self._memory.close()


def progress_on(descriptor: int) -> Progress:
    """The progress that lies in the open file `descriptor`, which may be closed then."""
    if os.fstat(descriptor).st_size < _STATE.size:
        os.ftruncate(descriptor, _STATE.size)
    return Progress(mmap.mmap(descriptor, _STATE.size))


def _watch_parent(parent: int) -> None:
    # Polling, because PR_SET_PDEATHSIG fires when the *thread* that started us ends,
    # and flows start pools from short-lived threads.
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(3)


def _limit_memory(limit: int) -> None:
    # macOS refuses RLIMIT_AS; SQLite's own heap limit still holds there.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _resolve(name: str, known: dict[str, Handler]) -> Handler:
    if name not in known:
        module, _, function = name.partition(":")
        known[name] = getattr(importlib.import_module(module), function)
    return known[name]


class _Replies:
    """Replies on their way to the pool; held a little, because each one sent wakes it."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._held = bytearray()
        self._since = 0.0

    def add(self, *message: Any) -> None:
        self._since = self._since if self._held else clock()
        self._held += encode(message)

    def send(self, *, now: bool) -> None:
        if self._held and (now or len(self._held) > _HOLD_BYTES or clock() - self._since > _HOLD_S):
            self._channel.sendall(self._held)
            self._held.clear()


def _serve(channel: socket.socket, progress: Progress) -> None:
    known: dict[str, Handler] = {}
    buffer = bytearray()
    replies = _Replies(channel)
    begun, phase, skipping = 0, "", False

    def mark(name: str) -> None:
        nonlocal phase
        phase = name or phase
        progress.write(begun, phase)

    replies.add("ready")
    while True:
        for name, payload in decode(buffer):
            if skipping and name != GO:
                continue
            skipping = False
            if name == GO:
                continue
            phase, started = "", clock()
            try:
                handler = _resolve(name, known)
                # Says that the item has begun, and starts its clock: importing the
                # handler is not the item's time.
                begun += 1
                mark("")
                replies.add("value", handler(payload, mark))
            except MemoryError:
                replies.add("error", "MemoryError: the worker's memory limit was reached", phase)
            except Exception as error:  # the edge of the verifier process
                replies.add("error", f"{type(error).__name__}: {error}"[:2000], phase)
            if clock() - started > _SLOW_S:
                # What waits behind may be as slow: the pool deals it out again, and
                # everything is skipped here until it says that it knows.
                replies.add("back")
                skipping = True
            replies.send(now=skipping)
        replies.send(now=True)
        chunk = channel.recv(1 << 16)
        if not chunk:
            return
        buffer += chunk


def main() -> None:
    parent, memory, shared = (int(argument) for argument in sys.argv[1:4])
    # Ctrl-C reaches the whole process group; the parent decides when workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    progress = progress_on(shared)
    os.close(shared)
    _limit_memory(memory)
    threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent is gone
        _serve(channel, progress)
    os._exit(0)


if __name__ == "__main__":
    main()
