"""The worker-side handlers of the Text2SQL reward: check a gold, judge a prediction.

A gold is run once per worker and remembered with what its order leaves open. The
policies on rows and order:

- Without ORDER BY and LIMIT: equal bags of rows.
- ORDER BY: rows tied on the gold's own sort keys may stand in any order among each
  other. Where the keys cannot be evaluated beside the rows: the gold's exact order.
- LIMIT: where it cuts through tied rows, any of the tied rows will do; without ORDER BY
  all rows are tied. At most `max_rows` candidates are looked at. The number of rows
  must be the gold's.

Not covered: golds that depend on the date (remembered as of their first run).
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rewards.sql_compare import Row, Segment, Tolerance, Undecided, results_match, rows_fit
from rewards.sql_gold import plan_gold
from rewards.sql_sandbox import QueryRun, run_query

_CACHED_GOLDS = 1024
_CACHED_BYTES = 128 << 20
"""An eighth of a worker's memory."""


@dataclass(frozen=True)
class GoldAnswer:
    """A gold result, cut into what its order fixes; `problem` if it cannot judge anything."""

    problem: str = ""
    columns: int = 0
    row_count: int = 0
    segments: Sequence[Segment] = ()
    decimals: tuple[tuple[int, int], ...] = ()
    note: str = ""
    size: int = 0
    """Bytes of memory it holds, about."""
    lasting: bool = True
    """False where another run may end otherwise: a time-out on a busy machine."""


class _Memory:
    """The golds used last, bounded by number and by size."""

    def __init__(self) -> None:
        self._golds: OrderedDict[tuple[Any, ...], GoldAnswer] = OrderedDict()
        self._size = 0

    def get(self, key: tuple[Any, ...]) -> GoldAnswer | None:
        known = self._golds.get(key)
        if known is not None:
            self._golds.move_to_end(key)
        return known

    def keep(self, key: tuple[Any, ...], gold: GoldAnswer) -> None:
        self._golds[key] = gold
        self._size += gold.size
        while len(self._golds) > 1 and (len(self._golds) > _CACHED_GOLDS or self._size > _CACHED_BYTES):
            self._size -= self._golds.popitem(last=False)[1].size


_golds = _Memory()


def gold_answer(task: dict[str, Any]) -> GoldAnswer:
    """The gold's answer, run once per database state, query and limits in this worker."""
    key = (*task["stamp"], *(task[name] for name in ("database", "gold", "timeout_s", "max_rows")))
    known = _golds.get(key)
    if known is not None:
        return known
    run = run_query(task["database"], task["gold"], task["timeout_s"], task["max_rows"])
    if run.status != "ok":
        problem = f"the gold query fails ({run.status}): {run.detail}"
        return GoldAnswer(problem, lasting=run.status != "timeout")
    if not run.rows:
        return GoldAnswer(problem="the gold query returns no rows")
    answer = _read_gold(task, run)
    _golds.keep(key, answer)
    return answer


def _read_gold(task: dict[str, Any], run: QueryRun) -> GoldAnswer:
    plan = plan_gold(task["gold"], run.columns)
    segments: list[Segment] | None = [Segment(len(run.rows), run.rows)]
    note = ""
    if plan.needs_ranks:
        segments = None
        for query in plan.ranked:
            ranked = _ranked_rows(task, query)
            segments = _segments(run.rows, ranked, plan.offset) if ranked else None
            if segments:
                break
        if not segments:
            segments = [Segment(1, [row]) for row in run.rows]
            note = "exact order, ties unknown"
    decimals = tuple(sorted(plan.decimals.items()))
    return GoldAnswer("", run.columns, len(run.rows), segments, decimals, note, _size_of(segments))


def _size_of(segments: Sequence[Segment]) -> int:
    rows = (row for segment in segments for row in segment.pool)
    return sum(sys.getsizeof(row) + sum(map(sys.getsizeof, row)) for row in rows)


def _ranked_rows(task: dict[str, Any], query: str) -> Sequence[Row] | None:
    # Sorted by rank, so cutting loses at most rows tied with the last ones of the gold.
    run = run_query(task["database"], query, task["timeout_s"], task["max_rows"], cut=True)
    return run.rows if run.status == "ok" else None


def _segments(gold: Sequence[Row], ranked: Sequence[Row], offset: int) -> list[Segment] | None:
    """Cut the gold's rows by rank. None if the ranked rows do not reproduce the gold."""
    start = max(0, offset)
    ranks = [row[-1] for row in ranked]
    if len(ranks) < start + len(gold):
        return None
    pools: dict[Any, list[Row]] = {}
    for row in ranked:
        pools.setdefault(row[-1], []).append(row[:-1])
    segments: list[Segment] = []
    position = 0
    exact = Tolerance(0.0, (0.0,) * len(gold[0]))
    while position < len(gold):
        rank = ranks[start + position]
        take = 1
        while position + take < len(gold) and ranks[start + position + take] == rank:
            take += 1
        if not rows_fit(gold[position : position + take], pools[rank], exact):
            return None
        segments.append(Segment(take, pools[rank]))
        position += take
    return segments


def check_gold(task: dict[str, Any], mark: Callable[[str], None]) -> dict[str, Any]:
    """Handler: can this gold judge anything? -> {"problem": "" or why not, "lasting"}."""
    mark("gold")
    answer = gold_answer(task)
    return {"problem": answer.problem, "lasting": answer.lasting}


def judge(task: dict[str, Any], mark: Callable[[str], None]) -> dict[str, Any]:
    """Handler: run one prediction and compare -> {"status", "detail", "executes"}.

    task: database, stamp, gold, sql, timeout_s, max_rows, any_column_order, relative,
    absolute. Phases "gold", "prediction" and "compare" tell the pool whose time it is.
    """
    mark("gold")
    gold = gold_answer(task)
    if gold.problem:
        return {"status": "suspect_gold", "detail": gold.problem, "executes": False}
    mark("prediction")
    # Ten times the gold's rows and some more: enough to show what went wrong, and a
    # query that never ends is stopped early.
    cap = min(task["max_rows"], 10 * gold.row_count + 100)
    run = run_query(task["database"], task["sql"], task["timeout_s"], cap)
    if run.status != "ok":
        ran = run.status == "row_count"
        return {"status": run.status, "detail": run.detail, "executes": ran}
    mark("compare")
    status, detail = _compare(run, gold, task)
    return {"status": status, "detail": detail, "executes": True}


def _compare(run: QueryRun, gold: GoldAnswer, task: dict[str, Any]) -> tuple[str, str]:
    if not run.rows:
        return "empty_result", f"no rows, expected {gold.row_count}"
    if run.columns != gold.columns:
        return "incorrect", f"{run.columns} columns, expected {gold.columns}"
    if len(run.rows) != gold.row_count:
        return "incorrect", f"{len(run.rows)} rows, expected {gold.row_count}"
    absolute = [float(task["absolute"])] * gold.columns
    for column, decimals in gold.decimals:
        # Half a unit of the last place the gold kept; the factor covers binary rounding.
        absolute[column] = max(absolute[column], 0.5 * 10.0**-decimals * (1 + 1e-9))
    tolerance = Tolerance(task["relative"], tuple(absolute))
    try:
        same = results_match(run.rows, gold.segments, tolerance, task["any_column_order"])
    except Undecided as undecided:
        return "verifier_error", str(undecided)
    return ("correct", gold.note) if same else ("incorrect", "the rows differ")
