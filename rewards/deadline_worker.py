"""The child side of `rewards.deadline`: one item at a time, in a clean interpreter.

Run by the pool as `python -P -m rewards.deadline_worker PARENT_PID MEMORY_BYTES`; the
socket to the pool is file descriptor 0. It limits its own address space, and ends
when the parent's process is gone. It does not limit files, the network or processes:
a handler that runs foreign code brings its own sandbox.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

Mark = Callable[[str], None]
"""Tells the pool which phase begins, and restarts the item's clock."""
Handler = Callable[[Any, Mark], Any]
"""(JSON payload, mark) -> JSON value."""

_HEADER = struct.Struct(">I")
_PARENT_POLL_S = 0.5


def encode(message: Any) -> bytes:
    """One frame: a length of four bytes, then JSON in ASCII (lone surrogates survive)."""
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
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


def _serve(channel: socket.socket) -> None:
    known: dict[str, Handler] = {}
    buffer = bytearray()

    def send(*message: Any) -> None:
        channel.sendall(encode(message))

    def mark(phase: str) -> None:
        send("phase", phase)

    send("ready")
    while True:
        for name, payload in decode(buffer):
            try:
                handler = _resolve(name, known)
                # Says that the item has arrived, and starts its clock: importing the
                # handler is not the item's time.
                mark("")
                reply = encode(("value", handler(payload, mark)))
            except MemoryError:
                reply = encode(("error", "MemoryError: the worker's memory limit was reached"))
            except Exception as error:  # the edge of the verifier process
                reply = encode(("error", f"{type(error).__name__}: {error}"[:2000]))
            channel.sendall(reply)
        chunk = channel.recv(1 << 16)
        if not chunk:
            return
        buffer += chunk


def main() -> None:
    parent, memory = int(sys.argv[1]), int(sys.argv[2])
    # Ctrl-C reaches the whole process group; the parent decides when workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _limit_memory(memory)
    threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent is gone
        _serve(channel)
    os._exit(0)


if __name__ == "__main__":
    main()
