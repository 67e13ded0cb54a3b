"""How far a gold query fixes the order of its rows, as (rows taken, rows to choose from)."""

from __future__ import annotations

import sqlite3

import pytest

from rewards.sql_gold import plan_gold
from rewards.sql_judge import gold_answer

SHEEP = [(1, "Ada", "x", 5), (2, "Bea", "y", 5), (3, "cat", "x", 4), (4, "Cat", "y", None)]

ALL_FIXED = [(1, 1)] * 4
GOLDS = [
    ("SELECT name FROM sheep", [(4, 4)]),
    ("SELECT name FROM sheep ORDER BY id", ALL_FIXED),
    ("SELECT name FROM sheep ORDER BY age", [(1, 1), (1, 1), (2, 2)]),
    ("SELECT name FROM sheep ORDER BY age DESC NULLS FIRST", [(1, 1), (2, 2), (1, 1)]),
    ("SELECT name FROM sheep ORDER BY name COLLATE NOCASE", [(1, 1), (1, 1), (2, 2)]),
    ("SELECT name, age FROM sheep ORDER BY 2 DESC, 1;", ALL_FIXED),
    ("SELECT name, age * 2 AS twice FROM sheep ORDER BY twice + 1", [(1, 1), (1, 1), (2, 2)]),
    ("SELECT name AS n FROM sheep ORDER BY lower(n)", [(1, 1), (1, 1), (2, 2)]),
    ("SELECT upper(name) AS name FROM sheep ORDER BY name", [(1, 1), (1, 1), (2, 2)]),
    ("SELECT pen, count(*) FROM sheep GROUP BY pen ORDER BY count(*)", [(2, 2)]),
    ("SELECT pen FROM sheep GROUP BY pen ORDER BY count(*) DESC LIMIT 1", [(1, 2)]),
    ("SELECT DISTINCT pen FROM sheep ORDER BY pen", [(1, 1)] * 2),
    ("SELECT name FROM sheep ORDER BY age DESC LIMIT 1", [(1, 2)]),
    ("SELECT name FROM sheep ORDER BY age LIMIT 1, 2", [(1, 1), (1, 2)]),
    ("SELECT name FROM sheep LIMIT 3", [(3, 4)]),
    ("SELECT name FROM sheep LIMIT -1", [(4, 4)]),
    ("SELECT id, pen FROM sheep UNION SELECT 9, 'x' ORDER BY pen LIMIT 1", [(1, 3)]),
    ("WITH a AS (SELECT * FROM sheep) SELECT name FROM a ORDER BY pen", [(2, 2)] * 2),
    ("SELECT * FROM (SELECT name FROM sheep ORDER BY age LIMIT 3)", [(3, 3)]),
    ("SELECT name, row_number() OVER (ORDER BY id) AS r FROM sheep ORDER BY r", ALL_FIXED),
    ("SELECT name FROM sheep ORDER BY CASE pen WHEN 'x' THEN 0 ELSE 1 END", [(2, 2)] * 2),
    ("SELECT name /* ORDER BY age LIMIT 1 */ FROM sheep -- ORDER BY 1", [(4, 4)]),
]
UNDECIDED = [
    "SELECT DISTINCT pen FROM sheep ORDER BY age",
    "SELECT name FROM sheep ORDER BY age LIMIT 1 + 1",
]


@pytest.fixture(scope="module")
def database(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("gold") / "sheep.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE sheep(id INTEGER PRIMARY KEY, name TEXT, pen TEXT, age INT)")
    connection.executemany("INSERT INTO sheep VALUES (?, ?, ?, ?)", SHEEP)
    connection.commit()
    connection.close()
    return str(path)


def read(database: str, gold: str, max_rows: int = 100):
    limits = {"timeout_s": 5.0, "max_rows": max_rows}
    return gold_answer({"database": database, "stamp": [0, 0], "gold": gold.rstrip(";"), **limits})


@pytest.mark.parametrize("gold, expected", GOLDS, ids=[gold for gold, _ in GOLDS])
def test_ties_are_found(database, gold, expected):
    answer = read(database, gold)
    assert not answer.problem and not answer.note
    assert [(part.take, len(part.pool)) for part in answer.segments] == expected


@pytest.mark.parametrize("gold", UNDECIDED)
def test_without_ranks_the_exact_order_counts(database, gold):
    answer = read(database, gold)
    assert answer.note == "exact order, ties unknown"
    assert [(part.take, len(part.pool)) for part in answer.segments] == [(1, 1)] * 2


def test_candidates_are_bounded_by_max_rows(database):
    answer = read(database, "SELECT name FROM sheep LIMIT 2", max_rows=3)
    assert [(part.take, len(part.pool)) for part in answer.segments] == [(2, 3)]


def test_decimals_come_from_the_gold_alone():
    gold = "SELECT round(a, 2) AS x, round(b), round(c, n), d, round(e, 30) FROM t"
    assert plan_gold(gold, 5).decimals == {0: 2}
    assert plan_gold("SELECT *, round(a, 2) FROM t", 5).decimals == {}


@pytest.mark.parametrize("odd", ["SELECT 'a ORDER BY", "ORDER BY", "SELECT (((( ORDER BY 1 LIMIT"])
def test_unreadable_golds_do_not_raise(odd):
    assert plan_gold(odd, 1).ranked == ()
