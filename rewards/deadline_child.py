"""The pool's side of one worker process: start it, hand items over, hear replies, kill it.

A worker has several items in its hands, so that it finds the next one waiting when it
ends one, and sends several replies at once. What it is doing stands in memory shared with
it (`deadline_worker.Progress`), read only when a deadline may have passed or it died.
After a slow item it gives the others back.

It does not cover which item goes to which worker, nor whether a lost item is tried again:
`rewards.deadline` decides that.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

from rewards.deadline_worker import GO, State, clock, decode, encode, progress_on

START_LIMIT_S = 60.0
"""A fresh interpreter answers in about 0.1 s; a loaded machine may need far longer."""
AHEAD = 16
"""Most items in one worker's hands, the current one included."""
ROOT = Path(__file__).resolve().parent.parent
_AHEAD_BYTES = 64 << 10
"""Far below a socket's buffer (200 KiB): handing over to a busy worker must not block."""
_SEND_LIMIT_S = 10.0
_MAX_REPLY_BYTES = 16 << 20
_GO_FRAME = encode((GO, None))
_SURE_S = 0.001
"""A mark is written in far less: what reads the same after this was no half-written one."""


class Worker:
    """One child process and the items in its hands, in the order in which it takes them."""

    def __init__(self, memory_bytes: int) -> None:
        ours, theirs = socket.socketpair()
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        with theirs, _shared_memory() as shared:
            self.progress = progress_on(shared.fileno())
            # -P keeps the caller's working folder off the import path.
            command = [sys.executable, "-P", "-m", "rewards.deadline_worker"]
            command += [str(os.getpid()), str(memory_bytes), str(shared.fileno())]
            self.process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=environment,
                pass_fds=[shared.fileno()],
            )
        self.channel = ours
        self.buffer = bytearray()
        self.ready = False
        self.items: deque[int] = deque()
        self.limit_s = START_LIMIT_S
        self.expires = clock() + START_LIMIT_S
        self._sizes: deque[int] = deque()
        self._done = 0
        self._skipping = False

    @property
    def busy(self) -> bool:
        return not self.ready or bool(self.items)

    def has_room(self, size: int) -> bool:
        """Whether a frame of `size` bytes may be sent: always to an idle worker."""
        fits = len(self.items) < AHEAD and sum(self._sizes) + size <= _AHEAD_BYTES
        return self.ready and (fits or not self.items)

    def send(self, item: int, frame: bytes, limit_s: float) -> bool:
        """Hand over one item; False if the worker is gone."""
        self.channel.settimeout(_SEND_LIMIT_S)
        if self.process.poll() is not None:
            return False
        try:
            self.channel.sendall(_GO_FRAME + frame if self._skipping else frame)
        except OSError:
            return False
        self._skipping = False
        if not self.items:
            self.limit_s, self.expires = limit_s, clock() + limit_s
        self.items.append(item)
        self._sizes.append(len(frame))
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

    def take_done(self) -> int:
        """The item that a reply is about; the clock of the next one starts."""
        self._done += 1
        self._sizes.popleft()
        self.expires = clock() + self.limit_s
        return self.items.popleft()

    def take_back(self) -> list[int]:
        """The items it gives back: it skips what it has until the next `send`."""
        items, self._skipping = list(self.items), True
        self.items.clear()
        self._sizes.clear()
        return items

    def split(self) -> tuple[list[int], int | None, list[int], State | None]:
        """(finished, but their replies were lost; the item it is at; not begun; its state).

        The item is the first one, without a state, if it had begun none of them.
        """
        items, state = list(self.items), self.progress.read()
        at = state.begun - self._done - 1
        if not items or at >= len(items):
            return items, None, [], None
        if at < 0:
            return [], items[0], items[1:], None
        return items[:at], items[at], items[at + 1 :], state

    def overdue(self) -> bool:
        """Whether its time is up. Each phase that it marked has a clock of its own."""
        if clock() < self.expires:
            return False
        if not self.ready:
            return True
        state = self.progress.read()
        self.expires = max(self.expires, state.since + self.limit_s)
        if clock() < self.expires:
            return False
        time.sleep(_SURE_S)
        return self.progress.read() == state

    def kill(self) -> None:
        """End the process. What it had sent can still be received, until `close`."""
        self.process.kill()
        # One that is stuck in the kernel has the signal pending, and ends later.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)

    def close(self) -> None:
        self.kill()
        self.channel.close()
        self.progress.close()


def encode_item(handler: str, payload: Any) -> bytes:
    return encode((handler, payload))


def _shared_memory() -> Any:
    """A nameless file in memory, where the system has such, for `progress_on`."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("furlong_progress"), "r+b")
    return tempfile.TemporaryFile()
