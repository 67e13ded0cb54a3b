"""Locks `text2sql_v1`: golden cases, hostile input, and agreement on a public set.

A golden line is {case, source, note, gold, completion, status, score, params?}. A
released version keeps all of them; a change of mind is a new version with its own file.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import sqlite3
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from rewards.base import Status
from rewards.deadline import shared_pool
from rewards.registry import get_reward
from rewards.sql_compare import Segment, Tolerance, results_match
from rewards.text2sql import Text2SqlV1

GOLDEN = Path(__file__).parent / "golden" / "text2sql_v1.jsonl"
CASES = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
GOLDEN_LOCK = (105, "ef8e5f860a6ff9bc")
RUNNERS = [
    (1, "Amber", "north", 20.0, 3, None),
    (2, "Bolt", "north", 120.5, 1, ""),
    (3, "Comet", "south", 1.1, 40, "grey"),
    (4, "Dusk", "south", 2.2, 40, None),
    (5, "Echo", "north", 3.3, 8, "Grey"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("databases")
    connection = sqlite3.connect(folder / "stable.sqlite")
    connection.execute(
        "CREATE TABLE runner(id INTEGER PRIMARY KEY, name TEXT, yard TEXT, weight REAL, age INT, note TEXT)"
    )
    connection.executemany("INSERT INTO runner VALUES (?, ?, ?, ?, ?, ?)", RUNNERS)
    connection.execute("CREATE TABLE big(x INT)")
    connection.executemany("INSERT INTO big VALUES (?)", [(x,) for x in range(2000)])
    connection.commit()
    connection.close()
    return folder


def judge(root: Path, gold: str, completion: str, **params):
    reward = Text2SqlV1(root, **params)
    return reward.results([completion], [gold], ["stable"])[0]


def fenced(sql: str) -> str:
    return f"```sql\n{sql}\n```"


@pytest.mark.parametrize("case", CASES, ids=[case["case"] for case in CASES])
def test_golden(case, root):
    before = sorted(os.listdir(root))
    content = (root / "stable.sqlite").read_bytes()
    result = judge(root, case["gold"], case["completion"], **case.get("params", {}))
    assert (result.status, result.score) == (case["status"], case["score"]), result.detail
    assert sorted(os.listdir(root)) == before
    assert (root / "stable.sqlite").read_bytes() == content


def test_golden_covers_every_source_case():
    named = {case["case"][:4] for case in CASES}
    assert {f"SQ{number:02}" for number in range(1, 13)} <= named


def test_golden_file_is_locked():
    """Adding a case is fine with a new digest here; changing one is a new reward version."""
    digest = hashlib.sha256(GOLDEN.read_bytes()).hexdigest()
    assert (len(CASES), digest[:16]) == GOLDEN_LOCK


def test_executing_is_recorded_but_not_paid(root):
    result = judge(root, "SELECT 1", fenced("SELECT 2"))
    assert dict(result.terms) == {"executes": 1.0, "result": 0.0, "format": 1.0}
    assert result.score == 0.0


def test_weights_pay_what_they_say(root):
    weights = {"executes": 0.2, "result": 0.5, "format": 0.3}
    assert judge(root, "SELECT 1", "```\nSELECT 1\n```", weights=weights).score == 0.7
    assert judge(root, "SELECT 1", "SELECT 1", weights=weights).score == 1.0


def test_strings_and_messages_score_the_same(root):
    """GR06: the shape of completions follows the prompt column."""
    reward = Text2SqlV1(root)
    texts = [fenced("SELECT 1"), fenced("SELECT 2"), "none"]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    columns = {"solution": ["SELECT 1"] * 3, "db_id": ["stable"] * 3}
    extra = {"completion_ids": [[1]] * 3, "trainer_state": None, "log_metric": print}
    plain = reward(prompts=["p"] * 3, completions=texts, **columns, **extra)
    chat = reward(prompts=[[{}]] * 3, completions=chats, **columns, **extra)
    assert plain == chat == [1.0, 0.0, 0.0]


def test_missing_column_and_uneven_columns_are_named(root):
    reward = Text2SqlV1(root)
    with pytest.raises(ValueError, match="text2sql_v1 needs db_id"):
        reward(completions=["SELECT 1"], solution=["SELECT 1"])
    with pytest.raises(ValueError, match="different lengths"):
        reward(completions=["SELECT 1"], solution=[], db_id=["stable"])


def test_rows_without_a_database_are_named(root):
    columns = {"solution": ["SELECT 1"] * 3, "db_id": ["stable", None, None]}
    with pytest.raises(ValueError, match=r"text2sql_v1 .*db_id is empty in 2 of 3 rows"):
        Text2SqlV1(root)(completions=["SELECT 1"] * 3, **columns)
    with pytest.raises(ValueError, match="db_id is empty in 2 of 3 rows"):
        Text2SqlV1(root).check_golds(**columns)
    with pytest.raises(ValueError, match="text2sql_v1 needs db_id"):
        Text2SqlV1(root).check_golds(["SELECT 1"])


def test_missing_database_is_an_error_and_creates_nothing(root):
    """SQ09: a mistyped path is a mistake in the set-up."""
    before = sorted(os.listdir(root))
    with pytest.raises(FileNotFoundError, match=r"typo\.sqlite"):
        Text2SqlV1(root)(completions=["SELECT 2"], solution=["SELECT 1"], db_id=["typo"])
    assert sorted(os.listdir(root)) == before


@pytest.mark.parametrize("db_id", ["../stable", "/etc/passwd", "..", "", "a/b", None, "a\x00b"])
def test_db_id_stays_inside_root(root, db_id):
    with pytest.raises(ValueError, match="db_id"):
        Text2SqlV1(root)(completions=["SELECT 1"], solution=["SELECT 1"], db_id=[db_id])


def test_unfit_databases_are_refused(tmp_path):
    (tmp_path / "text.sqlite").write_text("not a database at all")
    (tmp_path / "live.sqlite").write_bytes(b"SQLite format 3\x00")
    (tmp_path / "live.sqlite-wal").write_bytes(b"pending")
    for db_id, message in (("text", "not a SQLite database"), ("live", "unfinished writes")):
        with pytest.raises(ValueError, match=message):
            Text2SqlV1(tmp_path)(completions=["x"], solution=["SELECT 1"], db_id=[db_id])


def test_nested_layout_and_wal_mode(tmp_path):
    (tmp_path / "w").mkdir()
    path = tmp_path / "w" / "w.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("CREATE TABLE t AS SELECT 7 AS x")
    connection.commit()
    connection.close()
    assert Text2SqlV1(tmp_path)(completions=["SELECT x FROM t"], solution=["SELECT 7"], db_id=["w"]) == [1.0]
    assert os.listdir(path.parent) == ["w.sqlite"]


def test_a_changed_database_is_read_again(tmp_path):
    path = tmp_path / "d.sqlite"
    reward = Text2SqlV1(tmp_path)
    for value in ("one", "another"):
        path.unlink(missing_ok=True)
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE t AS SELECT ? AS x", (value,))
        connection.commit()
        connection.close()
        scores = reward(completions=[f"SELECT '{value}'"], solution=["SELECT x FROM t"], db_id=["d"])
        assert scores == [1.0]


def test_text_that_is_not_utf8(tmp_path):
    connection = sqlite3.connect(tmp_path / "d.sqlite")
    connection.execute("CREATE TABLE t AS SELECT CAST(x'ff41' AS TEXT) AS x")
    connection.commit()
    connection.close()
    pairs = ["SELECT x FROM t", "SELECT 'A'"]
    scores = Text2SqlV1(tmp_path)(completions=pairs, solution=pairs[:1] * 2, db_id=["d"] * 2)
    assert scores == [1.0, 0.0]


HOSTILE = {
    "10 MB of text": "x" * 10_000_000,
    "10 MB in a fence": fenced("SELECT '" + "y" * 10_000_000 + "'"),
    "10 MB of fences": "```" * 3_400_000,
    "10 MB of quotes": "SELECT " + "'" * 10_000_000,
    "quotes within the limit": "SELECT " + "'\"" * 45_000,
    "open comments": "SELECT " + "/*" * 45_000,
    "deep nesting": "SELECT " + "(" * 20_000 + "1" + ")" * 20_000,
    "deep subqueries": "SELECT * FROM " + "(SELECT * FROM " * 3000 + "runner" + ")" * 3000,
    "long chain": "SELECT " + " + ".join(["1"] * 20_000),
    "many columns": "SELECT " + ", ".join(["1"] * 5000),
    "wide join": "SELECT * FROM " + ", ".join(f"runner r{k}" for k in range(100)),
    "memory by group_concat": "SELECT group_concat(hex(zeroblob(1000))) FROM big a, big b",
    "memory by rows": "SELECT hex(zeroblob(1000000)) FROM big",
    "glob backtracking": "SELECT hex(zeroblob(20000)) GLOB '" + "*0" * 20 + "1'",
    "huge format": "SELECT printf('%*c', 900000000, 'x'), printf('%.*c', 900000000, 'x')",
    "huge number format": "SELECT printf('%900000000d', 1), printf('%.900000000f', 1.0)",
    "like backtracking": "SELECT hex(zeroblob(20000)) LIKE '" + "%0_" * 20 + "1'",
    "sort on disk": "SELECT a.x FROM big a, big b ORDER BY hex(zeroblob(2000)) || b.x",
    "write through a CTE": "WITH a AS (SELECT 1) INSERT INTO runner(id) SELECT 77",
    "write a file": "SELECT writefile('leak.txt', 'x')",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_completions_score_zero(name, root, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    content = (root / "stable.sqlite").read_bytes()
    started = time.monotonic()
    result = judge(root, "SELECT 1", HOSTILE[name], timeout_s=0.5)
    assert time.monotonic() - started < 5
    assert result.score == 0.0, result
    assert len(result.detail) <= 300
    assert (root / "stable.sqlite").read_bytes() == content
    assert os.listdir(tmp_path) == [] and len(os.listdir(root)) == 1
    assert judge(root, "SELECT 1", "SELECT 1").score == 1.0


@pytest.mark.parametrize("case", ["SQ11a", "SQ11b", "SQ11g"])
def test_after_a_timeout_no_core_is_busy(root, case):
    """SQ11: the time-out must end the work, not only the waiting."""
    (found,) = [known for known in CASES if known["case"] == case]
    result = judge(root, found["gold"], found["completion"], timeout_s=0.2)
    assert result.status is Status.TIMEOUT
    time.sleep(0.1)
    workers = [psutil.Process(pid) for pid in shared_pool().pids()]
    before = sum(sum(worker.cpu_times()[:2]) for worker in workers)
    time.sleep(0.3)
    assert sum(sum(worker.cpu_times()[:2]) for worker in workers) - before <= 0.05


def test_relaxed_columns_are_fast():
    """SQ04: trying 26! orders is out of the question."""
    rows = {
        "equal cells": ((1,) * 26, (1,) * 26),
        "distinct": (tuple(range(26)), tuple(reversed(range(26)))),
        "no match": ((1,) * 13 + (2,) * 13, (1,) * 12 + (2,) * 14),
        "close floats": (
            tuple(1 + k * 1e-9 for k in range(26)),
            tuple(1 - k * 1e-9 for k in range(26)),
        ),
    }
    for name, (gold, pred) in rows.items():
        started = time.monotonic()
        same = results_match([pred], [Segment(1, [gold])], Tolerance(1e-6, (0.0,) * 26), True)
        assert time.monotonic() - started < 0.1, name
        assert same == (name != "no match"), name


def test_identity_follows_parameters_and_not_the_path(root, tmp_path):
    one, other = Text2SqlV1(root), Text2SqlV1(tmp_path)
    assert one.identity == other.identity
    assert str(root) not in json.dumps(one.identity.as_dict())
    assert one.identity.name == one.__name__ == "text2sql_v1"
    changed = [
        Text2SqlV1(root, timeout_s=2),
        Text2SqlV1(root, max_rows=5),
        Text2SqlV1(root, column_order="relaxed"),
        Text2SqlV1(root, weights=(0, 1, 0)),
        Text2SqlV1(root, relative_tolerance=1e-3),
        Text2SqlV1(root, absolute_tolerance=1e-3),
    ]
    seen = {json.dumps(reward.identity.as_dict()) for reward in [one, *changed]}
    assert len(seen) == 7
    assert Text2SqlV1(root, weights=[0.1, 0.8, 0.1]) == one


def test_pickles(root):
    reward = Text2SqlV1(root, timeout_s=2)
    again = pickle.loads(pickle.dumps(reward))
    assert again == reward and hash(again) == hash(reward)
    assert pickle.loads(pickle.dumps(reward.identity)) == reward.identity
    result = judge(root, "SELECT 1", "SELECT 1")
    assert pickle.loads(pickle.dumps(result)) == result


@pytest.mark.parametrize(
    "params",
    [
        {"timeout_s": 0},
        {"max_rows": 0},
        {"max_rows": 1.5},
        {"column_order": "any"},
        {"weights": (0.5, 0.5)},
        {"weights": (0.5, 0.0, 0.5)},
        {"weights": (0.5, 0.8, 0.1)},
        {"weights": {"executes": 1}},
        {"relative_tolerance": -1},
    ],
)
def test_bad_parameters(params):
    with pytest.raises(ValueError, match="expected"):
        get_reward("text2sql_v1", database_root=".", **params)


def test_checked_golds(root):
    golds = ["SELECT 1", "SELECT 1 WHERE 0", "SELECT random()", None, "SELECT 1;"]
    statuses = [r.status for r in Text2SqlV1(root).check_golds(golds, ["stable"] * 5)]
    assert statuses == [Status.CORRECT] + [Status.SUSPECT_GOLD] * 3 + [Status.CORRECT]


def test_enough_throughput_for_a_training_step(root):
    """A step of 128 completions; the floor is far below what is measured, CI is slow."""
    reward = Text2SqlV1(root)
    golds = [f"SELECT name FROM runner WHERE id > {k // 8 - 20}" for k in range(128)]
    completions = [f"SELECT name FROM runner WHERE id > {k // 8 - 20} AND {k}" for k in range(128)]
    reward.results(completions[:2], golds[:2], ["stable"] * 2)
    started = time.monotonic()
    results = reward.results(completions, golds, ["stable"] * 128)
    rate = 128 / (time.monotonic() - started)
    print(f"\ntext2sql_v1: {rate:.0f} completions a second")
    assert all(result.score is not None for result in results)
    assert rate > 100


def _spider() -> Path:
    default = Path(__file__).resolve().parents[1] / ".." / "shared" / "data"
    folder = Path(os.environ.get("FURLONG_SHARED_DATA", default)) / "spider_dev"
    if not (folder / "questions.jsonl").exists():
        pytest.skip(f"no {folder}: set FURLONG_SHARED_DATA to the folder that holds spider_dev")
    return folder


def test_spider_golds_and_agreement():
    """Official verdicts drop DISTINCT and know no ties, so some disagreement is right:
    measured 532 of 544 scored predictions agree, all 12 others read by hand."""
    folder = _spider()
    read = [
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("questions.jsonl", "predictions_dail_sql_gpt4.jsonl")
    ]
    golds = [row["gold_sql"] for row in read[0]]
    names = [row["db_id"] for row in read[0]]
    reward = Text2SqlV1(folder / "databases", column_order="relaxed")
    checked = reward.check_golds(golds, names)
    counted = Counter(result.status for result in checked)
    assert set(counted) <= {Status.CORRECT, Status.SUSPECT_GOLD}
    assert all("returns no rows" in result.detail for result in checked if result.score is None)
    results = reward.results([fenced(row["sql"]) for row in read[1]], golds, names)
    pairs = [
        ((result.score or 0.0) > 0, bool(row["official_match"]))
        for result, row in zip(results, read[1], strict=True)
        if result.score is not None
    ]
    agree = sum(ours == theirs for ours, theirs in pairs)
    print(f"\nspider: {counted[Status.SUSPECT_GOLD]} suspect golds, {agree} of {len(pairs)} agree")
    assert len(pairs) == counted[Status.CORRECT] >= 500
    assert agree / len(pairs) >= 0.97
