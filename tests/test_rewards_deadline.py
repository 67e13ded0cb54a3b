"""The worker pool: deadlines that hold, workers that are replaced and never outlive us."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from rewards import deadline_child
from rewards.deadline import Outcome, WorkerPool, shared_pool

REPO = Path(__file__).resolve().parents[1]
HANDLERS = """
import os, signal, sqlite3, sys, time

def echo(payload, mark):
    return payload

def sleep(payload, mark):
    time.sleep(payload)
    return "slept"

def phases(payload, mark):
    for phase, seconds in payload:
        mark(phase)
        time.sleep(seconds)
    return "done"

def hold_lock(payload, mark):
    mark("holding")
    return len(str(7 ** (10 ** payload)))  # C code that keeps the interpreter lock

def fail(payload, mark):
    raise KeyError("no such thing")

def die(payload, mark):
    os.kill(os.getpid(), signal.SIGKILL)

def die_once(payload, mark):
    if not os.path.exists(payload):
        open(payload, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"

def work(payload, mark):
    # [number, what to do, folder]: leaves one file for each time it began.
    number, what, folder = payload
    open(f"{folder}/{number}.{os.getpid()}.{time.monotonic_ns()}", "w").close()
    mark("working")
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "fail":
        raise ValueError(f"failed {number}")
    time.sleep({"sleep": 60, "slow": 0.2}.get(what, 0))
    return number

def memory(payload, mark):
    return len(bytearray(payload))

def chatter(payload, mark):
    print("noise on stdout", flush=True)
    return {"argv": sys.argv[0], "main": sys.modules["__main__"].__spec__.name}

def endless_query(payload, mark):
    connection = sqlite3.connect(":memory:")
    bomb = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT count(*) FROM r"
    connection.execute(bomb).fetchall()
"""


@pytest.fixture
def pool(tmp_path, monkeypatch):
    (tmp_path / "pool_handlers.py").write_text(HANDLERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = WorkerPool(2)
    yield made
    made.close()


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ended(pids: list[int], within_s: float) -> bool:
    stop = time.monotonic() + within_s
    while any(alive(pid) for pid in pids) and time.monotonic() < stop:
        time.sleep(0.05)
    return not any(alive(pid) for pid in pids)


def warm(pool: WorkerPool) -> None:
    """Until all workers are up: one fast worker can do a small batch alone."""
    while not (pool.pids() and all(worker.ready for worker in pool._workers)):
        pool.run("pool_handlers:sleep", [0.05, 0.05], 5)


def test_order_is_kept_and_values_survive(pool):
    payloads = [0, "é\ud800", None, {"a": [1.5, True]}, "x" * 300_000, *range(50)]
    outcomes = pool.run("pool_handlers:echo", payloads, 5)
    assert outcomes == [Outcome("value", payload) for payload in payloads]
    assert pool.run("pool_handlers:echo", [], 5) == []


def test_deadline_kills_and_the_rest_goes_on(pool):
    started = time.monotonic()
    outcomes = pool.run("pool_handlers:sleep", [0, 60, 0, 60, 0], 0.4)
    assert [outcome.kind for outcome in outcomes] == [
        "value", "deadline", "value", "deadline", "value",
    ]  # fmt: skip
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("handler, payload", [("hold_lock", 8), ("endless_query", None)])
def test_code_that_never_yields_is_killed(pool, handler, payload):
    warm(pool)
    before = pool.pids()
    (outcome,) = pool.run(f"pool_handlers:{handler}", [payload], 0.4)
    assert outcome.kind == "deadline"
    dead = set(before) - set(pool.pids())
    assert len(dead) == 1 and ended(list(dead), 1)


def test_each_phase_has_its_own_clock(pool):
    fine, late = pool.run(
        "pool_handlers:phases",
        [[["a", 0.4], ["b", 0.4], ["c", 0.4]], [["a", 0.1], ["b", 5]]],
        0.8,
    )
    assert fine == Outcome("value", "done")
    assert (late.kind, late.phase) == ("deadline", "b")


def test_errors_and_crashes_are_told_apart(pool):
    (error,) = pool.run("pool_handlers:fail", [1], 5)
    assert (error.kind, error.detail) == ("error", "KeyError: 'no such thing'")
    (missing,) = pool.run("pool_handlers:nothing", [1], 5)
    assert missing.kind == "error" and "nothing" in missing.detail
    crashed, fine = pool.run("pool_handlers:die", [1], 5) + pool.run("pool_handlers:echo", [1], 5)
    assert (crashed.kind, fine.kind) == ("crashed", "value")


def test_an_item_survives_one_lost_worker(pool, tmp_path):
    outcomes = pool.run("pool_handlers:die_once", [str(tmp_path / "died")], 5)
    assert outcomes == [Outcome("value", "alive")]


@pytest.mark.parametrize("seed", range(4))
def test_what_waits_behind_a_bad_item_is_not_lost_or_blamed(pool, tmp_path, seed):
    """Workers hold items ahead of time; whatever ends one of them, the others get their own value."""
    folder = tmp_path / "begun"
    folder.mkdir()
    bad = {"sleep": "deadline", "stop": "deadline", "die": "crashed", "fail": "error"}
    deeds = [*bad, *bad, "slow", "slow", *["fine"] * 190]
    random.Random(seed).shuffle(deeds)
    warm(pool)
    payloads = [[number, what, str(folder)] for number, what in enumerate(deeds)]
    outcomes = pool.run("pool_handlers:work", payloads, 0.5)
    expected = [(bad.get(what, "value"), number) for number, what in enumerate(deeds)]
    found = [
        (outcome.kind, outcome.value if outcome.kind == "value" else number)
        for number, outcome in enumerate(outcomes)
    ]
    assert found == expected
    late = [outcome.phase for outcome in outcomes if outcome.kind == "deadline"]
    assert late == ["working"] * 4
    assert all(
        outcome.detail == f"ValueError: failed {number}" and outcome.phase == "working"
        for number, outcome in enumerate(outcomes)
        if outcome.kind == "error"
    )
    begun = Counter(int(path.name.split(".")[0]) for path in folder.iterdir())
    assert set(begun) == set(range(len(deeds)))
    assert max(begun[number] for number, what in enumerate(deeds) if what in {"sleep", "stop"}) == 1


def test_slow_items_are_shared_out(pool, tmp_path):
    """A worker that meets a slow item gives back what it holds, which may be as slow."""
    warm(pool)
    deeds = ["fine"] * 60 + ["slow"] * 8 + ["fine"] * 60
    payloads = [[number, what, str(tmp_path)] for number, what in enumerate(deeds)]
    outcomes = pool.run("pool_handlers:work", payloads, 5)
    assert [outcome.value for outcome in outcomes] == list(range(128))
    begun = [path.name.split(".")[:2] for path in tmp_path.glob("*.*.*")]
    shares = Counter(pid for number, pid in begun if deeds[int(number)] == "slow")
    assert len(begun) == 128 and len(shares) == 2 and min(shares.values()) >= 2


def test_large_items_do_not_block_the_pool(pool):
    """A busy worker is handed no more than its socket holds: deadlines are watched meanwhile."""
    warm(pool)
    large = "x" * 500_000
    outcomes = pool.run("pool_handlers:phases", [[[large, 0.02]]] * 40 + [[["b", 60]]] * 2, 0.5)
    assert [outcome.kind for outcome in outcomes] == ["value"] * 40 + ["deadline"] * 2
    assert outcomes[-1].phase == "b"


def test_workers_killed_while_idle_and_while_busy(pool):
    warm(pool)
    for pid in pool.pids():
        os.kill(pid, signal.SIGKILL)
    assert [o.kind for o in pool.run("pool_handlers:echo", [1, 2, 3], 5)] == ["value"] * 3
    victim = pool.pids()[0]
    threading.Timer(0.2, os.kill, (victim, signal.SIGKILL)).start()
    outcomes = pool.run("pool_handlers:sleep", [0.5, 0.5], 5)
    assert outcomes == [Outcome("value", "slept")] * 2
    assert victim not in pool.pids()


def test_a_stopped_worker_meets_the_deadline(pool):
    warm(pool)
    os.kill(pool.pids()[0], signal.SIGSTOP)
    kinds = [o.kind for o in pool.run("pool_handlers:echo", ["x" * 50_000] * 4, 0.5)]
    assert sorted(kinds) == ["deadline", "value", "value", "value"]


def test_memory_is_limited(pool):
    small, large = pool.run("pool_handlers:memory", [1 << 20, 4 << 30], 5)
    assert small == Outcome("value", 1 << 20)
    assert large.kind == "error" and "memory" in large.detail


def test_workers_do_not_import_our_main_and_may_print(pool):
    (outcome,) = pool.run("pool_handlers:chatter", [1], 5)
    assert outcome.value["main"] == "rewards.deadline_worker"


def test_several_threads_share_one_pool(pool):
    found: dict[int, list[Outcome]] = {}

    def work(number: int) -> None:
        found[number] = pool.run("pool_handlers:echo", [number] * 20, 5)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [Outcome("value", number)] * 20 for number in range(4)}
    # The threads that started the workers are gone; the workers must not be.
    time.sleep(0.2)
    assert all(alive(pid) for pid in pool.pids())


def test_an_interrupted_batch_leaves_no_stale_reply(pool, monkeypatch):
    warm(pool)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(WorkerPool, "_hear", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.run("pool_handlers:echo", ["old"] * 2, 5)
    assert pool.run("pool_handlers:echo", ["new"], 5) == [Outcome("value", "new")]


def test_close_ends_the_workers_and_allows_more(pool):
    warm(pool)
    pids = pool.pids()
    pool.close()
    assert ended(pids, 2) and pool.pids() == []
    assert pool.run("pool_handlers:echo", [3], 5) == [Outcome("value", 3)]


def test_workers_that_cannot_start_are_an_error(monkeypatch):
    monkeypatch.setattr(deadline_child, "ROOT", Path("/nonexistent"))
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="do not start"):
        WorkerPool(1).run("pool_handlers:echo", [1], 5)


@pytest.mark.parametrize("end", ["exit", "exit while busy", "kill"])
def test_workers_die_with_their_parent(tmp_path, end):
    (tmp_path / "pool_handlers.py").write_text(HANDLERS)
    program = (
        "import os, signal, sys, threading, time\n"
        "from rewards.deadline import shared_pool\n"
        "pool = shared_pool()\n"
        "pool.run('pool_handlers:echo', [1, 2], 5)\n"
        "busy = threading.Thread(target=pool.run, daemon=True,\n"
        "    args=('pool_handlers:endless_query', [1, 2], 60))\n"
        f"if {end != 'exit'}:\n"
        "    busy.start(); time.sleep(0.3)\n"
        "print(*pool.pids(), flush=True)\n"
        f"if {end == 'kill'}:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO), str(tmp_path)])}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment, stdout=subprocess.PIPE, text=True, timeout=30,
    )  # fmt: skip
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2 and ended(pids, 3)


def test_a_forked_child_gets_its_own_pool():
    ours = shared_pool()
    child = os.fork()
    if child == 0:
        os._exit(0 if shared_pool() is not ours else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert shared_pool() is ours
