"""The Text2SQL reward: does the predicted query return what the gold query returns?

Three weighted terms: executes, result, format. Only a completion whose result equals
the gold's is paid, so a query that merely runs, or merely looks right, earns 0. SQL
runs in worker processes (`rewards.sql_sandbox`, `rewards.deadline`), never here.

Not covered: a wrong query that happens to return the gold's rows on this database
(false positives shrink with more, and more varied, databases), answers guessed as
constants, and whether the gold itself answers the question.
"""

from __future__ import annotations

import math
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from rewards.base import (
    RewardIdentity,
    RewardResult,
    Status,
    check_scores,
    code_digest,
    completion_text,
    one_line,
    package_version,
)
from rewards.deadline import Outcome, shared_pool
from rewards.sql_database import Source, find_database
from rewards.sql_text import Answer, extract_answer, single_query

TERMS = ("executes", "result", "format")
_MODULES = (
    "base",
    "deadline",
    "deadline_child",
    "deadline_worker",
    "sql_compare",
    "sql_database",
    "sql_gold",
    "sql_judge",
    "sql_sandbox",
    "sql_text",
    "text2sql",
)
_GRACE_S = 0.5
"""From the soft stop inside SQLite to the kill: covers one slow step and its clean-up."""
_GOLDS_PER_ROUND = 512
"""Half of what a worker remembers, so golds checked in a round are not run again in it."""
_KNOWN_GOLDS = 20_000

_Gold = tuple[Source, str]
_Row = tuple[Source, str, Answer]

_checked: OrderedDict[tuple[Any, ...], str] = OrderedDict()
_checked_lock = threading.Lock()


@dataclass(frozen=True)
class Text2SqlV1:
    """Execution accuracy on SQLite, as TRL calls it.

    Columns: `solution` holds the gold SQL, `db_id` names the database, a file
    `<database_root>/<db_id>.sqlite` or `<database_root>/<db_id>/<db_id>.sqlite`.

    timeout_s: seconds for one query, gold and prediction alike, soft; the worker is
    killed half a second later. max_rows: a gold with more is suspect; a prediction may
    have at most min(max_rows, 10 x gold rows + 100). column_order: "strict", or
    "relaxed" to let columns match in any order. weights: of (executes, result, format),
    at least 0, adding up to 1. relative_tolerance, absolute_tolerance: of floats; where
    the gold rounds an output column to d >= 1 decimals, half a unit of the last one is
    allowed too.

    Raises ValueError on bad parameters or databases, FileNotFoundError if a database
    is missing. Parameters but for `database_root`, a path of one machine, are part of
    `identity`.
    """

    database_root: str | Path
    timeout_s: float = 5.0
    max_rows: int = 10_000
    column_order: Literal["strict", "relaxed"] = "strict"
    weights: Sequence[float] | Mapping[str, float] = (0.1, 0.8, 0.1)
    relative_tolerance: float = 1e-6
    absolute_tolerance: float = 0.0

    __name__: ClassVar[str] = "text2sql_v1"
    version: ClassVar[int] = 1
    required_columns: ClassVar[tuple[str, ...]] = ("solution", "db_id")
    needs_databases: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "database_root", str(self.database_root))
        object.__setattr__(self, "weights", _weights(self.weights))
        _need(0 < self.timeout_s < math.inf, "timeout_s", self.timeout_s, "seconds above 0")
        whole = isinstance(self.max_rows, int) and not isinstance(self.max_rows, bool)
        _need(whole and self.max_rows > 0, "max_rows", self.max_rows, "a whole number above 0")
        orders = ("strict", "relaxed")
        _need(self.column_order in orders, "column_order", self.column_order, "strict or relaxed")
        relative, absolute = self.relative_tolerance, self.absolute_tolerance
        _need(0 <= relative <= 0.1, "relative_tolerance", relative, "a number from 0 to 0.1")
        _need(0 <= absolute < math.inf, "absolute_tolerance", absolute, "a number of at least 0")

    @property
    def identity(self) -> RewardIdentity:
        params = {
            "timeout_s": float(self.timeout_s),
            "max_rows": self.max_rows,
            "column_order": self.column_order,
            "weights": dict(zip(TERMS, self._weights, strict=True)),
            "relative_tolerance": float(self.relative_tolerance),
            "absolute_tolerance": float(self.absolute_tolerance),
        }
        versions = (
            ("sqlglot", package_version("sqlglot")),
            ("sqlite", sqlite3.sqlite_version),
        )
        return RewardIdentity(self.__name__, self.version, params, code_digest(_MODULES, versions))

    def __call__(
        self,
        prompts: Sequence[Any] | None = None,
        completions: Sequence[Any] | None = None,
        solution: Sequence[str | None] | None = None,
        db_id: Sequence[str | None] | None = None,
        **_columns: Any,
    ) -> list[float | None]:
        """One score per completion: 0..1, or None where it cannot be scored."""
        results = self.results(completions, solution, db_id)
        scores = [result.score for result in results]
        return check_scores(self.__name__, scores, len(results))

    def results(
        self,
        completions: Sequence[Any] | None = None,
        solution: Sequence[str | None] | None = None,
        db_id: Sequence[str | None] | None = None,
        **_columns: Any,
    ) -> list[RewardResult]:
        """One `RewardResult` per completion, in order. Equal rows are run once."""
        texts, golds, names = _columns_of(self.__name__, completions, solution, db_id)
        root = Path(self.database_root)
        sources = {name: find_database(root, name) for name in dict.fromkeys(names)}
        rows: list[_Row] = [
            (sources[name], gold or "", extract_answer(completion_text(text)))
            for name, gold, text in zip(names, golds, texts, strict=True)
        ]
        by_gold: dict[_Gold, dict[_Row, None]] = {}
        for row in rows:
            by_gold.setdefault(row[:2], {})[row] = None
        judged: dict[_Row, RewardResult] = {}
        for start in range(0, len(by_gold), _GOLDS_PER_ROUND):
            chosen = list(by_gold)[start : start + _GOLDS_PER_ROUND]
            wanted = [row for gold in chosen for row in by_gold[gold]]
            judged |= self._judge(wanted, self._gold_problems(chosen))
        return [judged[row] for row in rows]

    def check_golds(
        self, solution: Sequence[str | None], db_id: Sequence[str | None] | None = None, **_columns: Any
    ) -> list[RewardResult]:
        """The self-check at load: CORRECT with score 1.0, or what is wrong with the gold.

        A gold that does not equal itself on a second run is SUSPECT_GOLD too. Raises
        ValueError where `db_id` is missing, for the whole column or for a row.
        """
        fenced = [f"```sql\n{gold or ''}\n```" for gold in solution]
        return [
            result
            if result.status is Status.CORRECT or result.score is None
            else RewardResult.of(Status.SUSPECT_GOLD, f"the gold fails against itself: {result.detail}")
            for result in self.results(fenced, solution, db_id)
        ]

    @property
    def _weights(self) -> tuple[float, ...]:
        return _weights(self.weights)

    def _task(self, source: Source, gold: str, sql: str = "") -> dict[str, Any]:
        return {
            "database": source.path,
            "stamp": source.stamp,
            "gold": gold,
            "sql": sql,
            "timeout_s": self.timeout_s,
            "max_rows": self.max_rows,
            "any_column_order": self.column_order == "relaxed",
            "relative": self.relative_tolerance,
            "absolute": self.absolute_tolerance,
        }

    def _run(self, handler: str, tasks: list[dict[str, Any]]) -> list[Outcome]:
        limit = self.timeout_s + _GRACE_S
        return shared_pool().run(f"rewards.sql_judge:{handler}", tasks, limit)

    def _gold_problems(self, golds: list[_Gold]) -> dict[_Gold, RewardResult | None]:
        """None for a gold that can judge; else the result of every completion for it."""
        found: dict[_Gold, RewardResult | None] = {}
        open_golds: list[tuple[Source, str, str]] = []
        for source, gold in golds:
            query, problem = single_query(gold)
            known = None if problem else self._recall(source, gold)
            if known is not None:
                problem = known
            if problem:
                found[source, gold] = _suspect(f"gold: {problem}" if known is None else problem)
            elif known == "":
                found[source, gold] = None
            else:
                open_golds.append((source, gold, query))
        outcomes = self._run("check_gold", [self._task(s, q) for s, _, q in open_golds])
        for (source, gold, _), outcome in zip(open_golds, outcomes, strict=True):
            if outcome.kind == "value":
                problem = outcome.value["problem"]
                if outcome.value["lasting"]:
                    self._remember(source, gold, problem)
                found[source, gold] = _suspect(problem) if problem else None
            elif outcome.kind == "deadline":
                found[source, gold] = _suspect(f"the gold query was {outcome.detail}")
            else:
                found[source, gold] = _failed(outcome)
        return found

    def _recall(self, source: Source, gold: str) -> str | None:
        with _checked_lock:
            return _checked.get((source, gold, self.timeout_s, self.max_rows))

    def _remember(self, source: Source, gold: str, problem: str) -> None:
        with _checked_lock:
            _checked[source, gold, self.timeout_s, self.max_rows] = problem
            while len(_checked) > _KNOWN_GOLDS:
                _checked.popitem(last=False)

    def _judge(
        self,
        rows: list[_Row],
        gold_problems: Mapping[_Gold, RewardResult | None],
    ) -> dict[_Row, RewardResult]:
        judged: dict[_Row, RewardResult] = {}
        golds: dict[str, str] = {}
        tasks: dict[tuple[Source, str, str], list[_Row]] = {}
        for row in rows:
            source, gold, answer = row
            query, problem = single_query(answer.sql) if answer.sql is not None else ("", "")
            if gold not in golds:
                golds[gold] = single_query(gold)[0]
            suspect = gold_problems[source, gold]
            if suspect is not None:
                judged[row] = suspect
            elif answer.sql is None:
                judged[row] = self._result(Status.NO_ANSWER, answer.problem, False, False)
            elif problem:
                judged[row] = self._result(Status.REJECTED, problem, False, answer.well_formed)
            else:
                tasks.setdefault((source, golds[gold], query), []).append(row)
        outcomes = self._run("judge", [self._task(*task) for task in tasks])
        for same, outcome in zip(tasks.values(), outcomes, strict=True):
            for row in same:
                judged[row] = self._read(outcome, row[2].well_formed)
        return judged

    def _read(self, outcome: Outcome, well_formed: bool) -> RewardResult:
        if outcome.kind == "deadline" and outcome.phase == "prediction":
            return self._result(Status.TIMEOUT, outcome.detail, False, well_formed)
        if outcome.kind == "deadline" and outcome.phase == "gold":
            return _suspect(f"the gold query was {outcome.detail}")
        if outcome.kind != "value":
            return _failed(outcome)
        value = outcome.value
        status = Status(value["status"])
        return self._result(status, value["detail"], value["executes"], well_formed)

    def _result(self, status: Status, detail: str, executes: bool, well_formed: bool) -> RewardResult:
        terms = {
            "executes": float(executes),
            "result": float(status is Status.CORRECT),
            "format": float(well_formed),
        }
        earned = math.fsum(weight * terms[term] for weight, term in zip(self._weights, TERMS, strict=True))
        return RewardResult.of(status, one_line(detail), terms, earned)


def _weights(weights: Any) -> tuple[float, ...]:
    if isinstance(weights, Mapping):
        if set(weights) != set(TERMS):
            raise ValueError(f"weights has {sorted(weights)}, expected {', '.join(TERMS)}.")
        weights = [weights[term] for term in TERMS]
    values = tuple(float(weight) for weight in weights)
    good = len(values) == len(TERMS) and all(0 <= value <= 1 for value in values)
    if not good or abs(math.fsum(values) - 1) > 1e-9 or values[1] == 0:
        raise ValueError(
            f"weights is {values}, expected three numbers of at least 0 for {', '.join(TERMS)} "
            "that add up to 1, with result above 0."
        )
    return values


def _need(good: bool, name: str, value: Any, expected: str) -> None:
    if not good:
        raise ValueError(f"Text2SqlV1: {name} is {value!r}, expected {expected}.")


def _columns_of(name: str, *columns: Any) -> tuple[Any, ...]:
    labels = ("completions", "solution", "db_id")
    missing = [label for label, column in zip(labels, columns, strict=True) if column is None]
    if missing:
        raise ValueError(f"Reward {name} needs {', '.join(missing)}: no such column in the data.")
    lengths = {label: len(column) for label, column in zip(labels, columns, strict=True)}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"Reward {name} got columns of different lengths: {lengths}.")
    unnamed = sum(name is None for name in columns[2])
    if unnamed:
        raise ValueError(
            f"Reward {name} runs SQL on the database that db_id names, but db_id is empty in {unnamed} of "
            f"{lengths['db_id']} rows. Map a db_id column, or choose a reward that needs no database."
        )
    return columns


def _suspect(detail: str) -> RewardResult:
    return RewardResult.of(Status.SUSPECT_GOLD, one_line(detail))


def _failed(outcome: Outcome) -> RewardResult:
    return RewardResult.of(
        Status.VERIFIER_ERROR, one_line(f"{outcome.kind} in {outcome.phase}: {outcome.detail}")
    )
