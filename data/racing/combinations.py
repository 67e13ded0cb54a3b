"""Fills templates with values from the database and keeps the combinations that test something.

A combination is kept when the gold query has one clear, non-trivial answer and every mistake of the
template gives a different one. Whoever scores a completion by its result can then trust that a wrong
query is wrong, and that two right ones agree.

Not covered: queries that differ from the mistakes listed and still happen to give the gold result.
"""

from __future__ import annotations

import random
import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from data.racing.templates import Template

Row = tuple[object, ...]
Slots = Mapping[str, object]

_RUNNERS = """
SELECT horse, sex, foaled, trainer, jockey, date, season, course, class, going, distance, prize,
       weight, odds
FROM results JOIN horses USING (horse_id) JOIN trainers USING (trainer_id)
     JOIN jockeys USING (jockey_id) JOIN races USING (race_id)
ORDER BY race_id, horse_id
"""
_RANKED = re.compile(r"SELECT .+? FROM (?P<rest>.+) ORDER BY (?P<key>.+?)(?P<desc> DESC)?"
                     r"(?: LIMIT (?P<limit>\d+))?$")  # fmt: skip


@dataclass(frozen=True)
class Combination:
    """A template with its slots filled: `mistakes` are pairs (label, wrong SQL)."""

    template: Template
    slots: Slots
    gold: str
    mistakes: tuple[tuple[str, str], ...]

    def prompt(self, phrasing: int) -> str:
        """The question in one of the phrasings; counted round, so any integer will do."""
        phrasings = self.template.phrasings
        return phrasings[phrasing % len(phrasings)].format_map(self.slots)


class QuestionSource:
    """Draws combinations from one racing database, which it copies to memory and never writes."""

    def __init__(self, database_path: str | Path) -> None:
        path = Path(database_path)
        if not path.is_file():
            raise FileNotFoundError(
                f"racing database: found no file at {path}; "
                "expected one written by data.racing.build_database: build it first"
            )
        self._connection = sqlite3.connect(":memory:")
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as source:
            source.backup(self._connection)
        cursor = self._connection.execute(_RUNNERS)
        names = [column[0] for column in cursor.description]
        self.runners: list[dict[str, object]] = [dict(zip(names, row, strict=True)) for row in cursor]
        self._results: dict[str, list[Row]] = {}

    def close(self) -> None:
        """Free the copy of the database."""
        self._connection.close()

    def run(self, sql: str) -> list[Row]:
        """The rows of a query, remembered, for the same query comes back under other templates."""
        if sql not in self._results:
            self._results[sql] = self._connection.execute(sql).fetchall()
        return self._results[sql]

    def combinations(self, template: Template, seed: int, passes: int = 3) -> Iterator[Combination]:
        """Valid, distinct combinations of a template in an order that `seed` decides.

        Each pass looks at every runner of the database once and takes the slot values from it, so
        that a bound is a value that occurs and a name is one that ran there.
        """
        rng = random.Random(f"{template.name} {seed}")
        slots_used = template.slots
        seen: set[tuple[object, ...]] = set()
        for _ in range(passes):
            for runner in rng.sample(self.runners, len(self.runners)):
                slots = self._fill(rng, runner)
                values = tuple(slots[name] for name in slots_used)
                if None in values or values in seen:
                    continue
                seen.add(values)
                combination = _combine(template, slots)
                if self.is_sound(combination):
                    yield combination

    def _fill(self, rng: random.Random, runner: Mapping[str, object]) -> dict[str, object]:
        """All slot values: those of a runner, and those that are drawn (k, n, ranges)."""
        low, high = sorted(rng.sample(range(1, 10), 2))
        other = rng.choice(self.runners)
        first_date, last_date = sorted((str(runner["date"]), str(other["date"])))
        odds = [value for value in (runner["odds"], other["odds"]) if isinstance(value, float)]
        return {
            **runner,
            "k": rng.randint(2, 6),
            "n": rng.randint(2, 9),
            "low": low,
            "high": high,
            "first_date": first_date,
            "last_date": last_date,
            "low_odds": min(odds, default=None),
            "high_odds": max(odds, default=None),
        }

    def is_sound(self, combination: Combination) -> bool:
        """Whether the gold has a clear, non-trivial result that no mistake shares."""
        gold = combination.gold
        rows = self.run(gold)
        if is_trivial(rows) or self._has_ties(gold):
            return False
        ordered = " ORDER BY " in gold
        right = comparable(rows, ordered)
        return all(comparable(self.run(sql), ordered) != right for _, sql in combination.mistakes)

    def _has_ties(self, gold: str) -> bool:
        """Whether rows of an ordered query share the sort key, so that their order is open."""
        match = _RANKED.match(gold)
        if match is None:
            return False
        direction = match["desc"] or ""
        probe = f"SELECT {match['key']} FROM {match['rest']} ORDER BY {match['key']}{direction}"
        keys = [row[0] for row in self.run(probe)]
        if match["limit"] is not None:
            limit = int(match["limit"])
            if len(keys) < limit:  # "the 3 best" of two
                return True
            keys = keys[: limit + 1]  # the one that was just left out counts
        return len(keys) < 2 or len(set(keys)) < len(keys)


def _combine(template: Template, slots: Slots) -> Combination:
    mistakes = tuple((item.label, item.sql.format_map(slots)) for item in template.mistakes)
    return Combination(template, slots, template.gold.format_map(slots), mistakes)


def is_trivial(rows: list[Row]) -> bool:
    """No rows, nothing but NULLs, or a single zero: a careless query gets these as well."""
    values = {value for row in rows for value in row}
    return not rows or values == {None} or (len(rows) == 1 and values == {0})


def comparable(rows: list[Row], ordered: bool) -> list[Row]:
    """Rows in a form that `==` compares: as a list where order counts, else sorted as a bag."""
    rounded = [tuple(round(value, 6) if isinstance(value, float) else value for value in row) for row in rows]
    return rounded if ordered else sorted(rounded, key=repr)
