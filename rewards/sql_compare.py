"""Whether a predicted result answers like the gold result.

Results are bags of rows: duplicates count, and order counts only as far as the gold
fixes it, which the caller says by cutting the gold into `Segment`s. Values compare by
SQLite storage class: NULL, '', 0 and no row are four different things; 1 equals 1.0 but
not '1'; integers compare exactly; floats within a tolerance.

Not covered: text that differs in case or spaces (a difference), and tolerance on
numbers stored as text (none).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

Cell = None | int | float | str | bytes
Row = tuple[Cell, ...]

_MAX_PAIRS = 500_000
_MAX_SEARCH_CELLS = 20_000_000
_NUMBER = ("number",)
"""Stands for any number in the exactly compared part of a row; equals no cell."""


class Undecided(Exception):
    """The comparison would cost more than its budget."""


@dataclass(frozen=True)
class Segment:
    """`take` consecutive result rows, each to be a different row of `pool`.

    With take == len(pool) this is bag equality; a smaller take means that the gold cut
    off rows tied with each other, any of which will do.
    """

    take: int
    pool: Sequence[Row]


@dataclass(frozen=True)
class Tolerance:
    """Two floats are equal within max(absolute of the gold's column, relative x larger)."""

    relative: float
    absolute: tuple[float, ...]
    """One per gold column; 0.0 for none."""


def numbers_equal(gold: float, pred: float, relative: float, absolute: float = 0.0) -> bool:
    """Equality of two numbers; integers, and integers against whole floats, exactly.

    Python compares int and float without rounding, so 9007199254740993 differs from
    the float 9007199254740992.0.
    """
    if gold == pred:
        return True
    if isinstance(gold, int) or isinstance(pred, int):
        other = pred if isinstance(gold, int) else gold
        if isinstance(other, int) or other.is_integer():
            return False
    gap = abs(gold - pred)
    if gap == float("inf"):
        return False
    return gap <= max(absolute, relative * max(abs(gold), abs(pred)))


def results_match(
    pred: Sequence[Row],
    gold: Sequence[Segment],
    tolerance: Tolerance,
    any_column_order: bool = False,
) -> bool:
    """Whether `pred` is one of the results the gold allows.

    Both sides must be non-empty and have equal column counts (the caller checks).
    Raises Undecided where matching tolerances or columns exceeds its budget, which
    takes thousands of nearly equal rows or columns.
    """
    if len(pred) != sum(segment.take for segment in gold):
        return False
    if _accepts(pred, gold, tolerance):
        return True
    if not any_column_order or len(pred[0]) < 2:
        return False
    return _ColumnSearch(pred, gold, tolerance).found()


def _accepts(pred: Sequence[Row], gold: Sequence[Segment], tolerance: Tolerance) -> bool:
    start = 0
    for segment in gold:
        rows = pred[start : start + segment.take]
        if not rows_fit(rows, segment.pool, tolerance):
            return False
        start += segment.take
    return True


def rows_fit(pred: Sequence[Row], pool: Sequence[Row], tolerance: Tolerance) -> bool:
    """Whether every predicted row pairs with its own row of `pool`."""
    if len(pred) > len(pool):
        return False
    if not Counter(pred) - Counter(pool):
        return True
    fuzzy = [
        column
        for column in range(len(pred[0]))
        if any(isinstance(row[column], float) for row in pred)
        or any(isinstance(row[column], float) for row in pool)
    ]
    if not fuzzy:
        return False
    pred_groups, pool_groups = _by_exact_part(pred, fuzzy), _by_exact_part(pool, fuzzy)
    absolute = [tolerance.absolute[column] for column in fuzzy]
    return all(
        key in pool_groups
        and len(rows) <= len(pool_groups[key])
        and _pair_up(rows, pool_groups[key], tolerance.relative, absolute)
        for key, rows in pred_groups.items()
    )


def _by_exact_part(
    rows: Sequence[Row], fuzzy: list[int]
) -> dict[tuple[object, ...], list[tuple[float, ...]]]:
    """Rows grouped by all they must share exactly -> their numbers in fuzzy columns."""
    groups: dict[tuple[object, ...], list[tuple[float, ...]]] = defaultdict(list)
    for row in rows:
        key: list[object] = list(row)
        numbers = []
        for column in fuzzy:
            cell = row[column]
            if isinstance(cell, (int, float)):
                numbers.append(cell)
                key[column] = _NUMBER
            else:
                numbers.append(0.0)
        groups[tuple(key)].append(tuple(numbers))
    return groups


def _close(gold: tuple[float, ...], pred: tuple[float, ...], relative: float, absolute: list[float]) -> bool:
    return all(
        numbers_equal(one, other, relative, slack)
        for one, other, slack in zip(gold, pred, absolute, strict=True)
    )


def _pair_up(
    pred: list[tuple[float, ...]],
    pool: list[tuple[float, ...]],
    relative: float,
    absolute: list[float],
) -> bool:
    """Find a pairing within tolerance. Closeness is not transitive, so rounding or
    hashing first would lose pairs; sorted by value, position decides nearly always."""
    pred, pool = sorted(pred), sorted(pool)
    if len(pred) == len(pool) and all(
        _close(gold, row, relative, absolute) for gold, row in zip(pool, pred, strict=True)
    ):
        return True
    return _assign(_partners(pred, pool, relative, absolute), len(pool))


def _partners(
    pred: list[tuple[float, ...]],
    pool: list[tuple[float, ...]],
    relative: float,
    absolute: list[float],
) -> list[list[int]]:
    """For each predicted row the pool rows it may pair with, found along the column
    with the most values."""
    width = len(absolute)
    axis = max(range(width), key=lambda column: len({row[column] for row in pool}))
    order = sorted(range(len(pool)), key=lambda index: pool[index][axis])
    values = [pool[index][axis] for index in order]
    partners, pairs = [], 0
    for row in pred:
        value = row[axis]
        # Twice the tolerance is a safe window; _close decides.
        reach = 2 * max(absolute[axis], relative * abs(value)) if abs(value) != float("inf") else 0
        found = []
        for position in range(bisect_left(values, value - reach), len(values)):
            if values[position] > value + reach:
                break
            pairs += 1
            if pairs > _MAX_PAIRS:
                raise Undecided(f"more than {_MAX_PAIRS} nearly equal row pairs")
            if _close(pool[order[position]], row, relative, absolute):
                found.append(order[position])
        partners.append(found)
    return partners


def _assign(partners: list[list[int]], pool_size: int) -> bool:
    """Whether each row can have a partner of its own (augmenting paths, breadth first)."""
    owner = [-1] * pool_size
    held = [-1] * len(partners)
    work = 0
    for start in range(len(partners)):
        came_from: dict[int, int] = {}
        queue, free = [start], -1
        for row in queue:
            for partner in partners[row]:
                work += 1
                if partner in came_from:
                    continue
                came_from[partner] = row
                if owner[partner] < 0:
                    free = partner
                    break
                queue.append(owner[partner])
            if free >= 0:
                break
        if free < 0:
            return False
        if work > 10 * _MAX_PAIRS:
            raise Undecided("pairing nearly equal rows took too long")
        while free >= 0:
            row = came_from[free]
            owner[free], held[row], free = row, free, held[row]
    return True


class _ColumnSearch:
    """Finds an order of the predicted columns under which the results match.

    Each gold column first gets the predicted columns it could be, then columns are
    fixed one by one, those with the fewest choices first, each time comparing the rows
    over the columns fixed so far. Equal columns are tried once. So 26 columns of one
    row need hundreds of comparisons, not 26!.
    """

    def __init__(self, pred: Sequence[Row], gold: Sequence[Segment], tolerance: Tolerance) -> None:
        self.pred, self.gold, self.tolerance = pred, gold, tolerance
        self.width = len(pred[0])
        self.columns = [tuple(row[column] for row in pred) for column in range(self.width)]
        self.kinds = [tuple(map(type, values)) for values in self.columns]
        self.cells = 0

    def found(self) -> bool:
        choices = []
        for gold_column in range(self.width):
            fitting = [column for column in range(self.width) if self._fits([gold_column], [column])]
            if not fitting:
                return False
            choices.append(fitting)
        order = sorted(range(self.width), key=lambda column: len(choices[column]))
        return self._extend(order, choices, [])

    def _extend(self, order: list[int], choices: list[list[int]], chosen: list[int]) -> bool:
        depth = len(chosen)
        if depth == self.width:
            return True
        tried = set()
        for column in choices[order[depth]]:
            content = (self.columns[column], self.kinds[column])
            if column in chosen or content in tried:
                continue
            tried.add(content)
            attempt = [*chosen, column]
            if self._fits(order[: depth + 1], attempt) and self._extend(order, choices, attempt):
                return True
        return False

    def _fits(self, gold_columns: list[int], pred_columns: list[int]) -> bool:
        rows = len(self.pred) + sum(len(segment.pool) for segment in self.gold)
        self.cells += rows * len(gold_columns)
        if self.cells > _MAX_SEARCH_CELLS:
            raise Undecided("matching columns in any order took too long")
        pred = [tuple(row[column] for column in pred_columns) for row in self.pred]
        gold = [
            Segment(
                segment.take,
                [tuple(row[column] for column in gold_columns) for row in segment.pool],
            )
            for segment in self.gold
        ]
        absolute = tuple(self.tolerance.absolute[column] for column in gold_columns)
        return _accepts(pred, gold, Tolerance(self.tolerance.relative, absolute))
