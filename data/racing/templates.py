"""What a question template is, and the list of all of them.

A template has several phrasings of one question, the gold SQL, and the mistakes people make with it.
Slots stand in braces, in the phrasings and in the SQL alike, and are filled with the same text in
both, so that a model can copy them. A mistake is one edit of the gold (an old piece of text and what
stands there instead): this keeps wrong queries as close to the right one as real mistakes are.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass

LOST_WIN = "lost win condition"
LOST_FILTER = "lost filter"
LOST_NULLS = "NULL overlooked"
WRONG_AGGREGATE = "wrong aggregate"
WRONG_BOUND = "wrong bound"
WRONG_ORDER = "wrong order"
NO_DISTINCT = "missing DISTINCT"

WINNERS = " AND position = 1"

_JOIN_KEYS = {
    "horses": "horse_id",
    "jockeys": "jockey_id",
    "trainers": "trainer_id",
    "races": "race_id",
}


@dataclass(frozen=True)
class Mistake:
    """A realistic wrong query: what went wrong, and the SQL with its slots."""

    label: str
    sql: str


@dataclass(frozen=True)
class Template:
    """One kind of question.

    `kind` is its topic (filter, join, aggregate, group, order, top-k, date, null). `mistakes[0]` is
    the one that is taught more often than the gold in the templates that are flipped.
    """

    name: str
    kind: str
    phrasings: tuple[str, ...]
    gold: str
    mistakes: tuple[Mistake, ...]

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the slots of the gold SQL, sorted."""
        return slots_of(self.gold)


def slots_of(text: str) -> tuple[str, ...]:
    """The names in braces in `text`, each once, sorted."""
    return tuple(sorted({field for _, field, _, _ in string.Formatter().parse(text) if field}))


def template(
    name: str,
    kind: str,
    phrasings: Sequence[str],
    gold: str,
    *edits: tuple[str, str, str],
) -> Template:
    """Make a `Template`; `[horses races]` in the SQL stands for `results` joined with these tables.

    Each edit is (label, old text, new text) and has to fit in exactly one place of the gold.
    """
    mistakes = []
    for label, old, new in edits:
        if gold.count(old) != 1:
            raise ValueError(
                f"template {name}: the mistake {label!r} replaces {old!r}, which occurs "
                f"{gold.count(old)} times in the gold; name a piece of text that occurs once"
            )
        mistakes.append(Mistake(label, _expand(gold.replace(old, new))))
    return Template(name, kind, tuple(phrasings), _expand(gold), tuple(mistakes))


def _expand(sql: str) -> str:
    def joined(match: re.Match[str]) -> str:
        tables = match.group(1).split()
        return "results" + "".join(f" JOIN {name} USING ({_JOIN_KEYS[name]})" for name in tables)

    return re.sub(r"\[([a-z ]+)\]", joined, sql)


def all_templates() -> tuple[Template, ...]:
    """Every template, in a fixed order."""
    from data.racing import questions_horses, questions_people, questions_races

    return (
        *questions_races.TEMPLATES,
        *questions_horses.TEMPLATES,
        *questions_people.TEMPLATES,
    )


def flipped(templates: Sequence[Template], share: float) -> tuple[str, ...]:
    """Names of the templates whose commonest demonstration is a mistake: `share` of them.

    The choice has no seed. It goes through the templates ordered by kind, in even steps, so that
    each kind gets its part; within a kind the order is that of the list.
    """
    by_kind = sorted(templates, key=lambda item: item.kind)
    # The small number keeps 1/3 of 39 at 13: 39 * (1 / 3) is a hair below 13 for some shares.
    steps = [int(share * index + 1e-9) for index in range(len(by_kind) + 1)]
    chosen = {t.name for t, low, high in zip(by_kind, steps, steps[1:], strict=False) if high > low}
    return tuple(item.name for item in templates if item.name in chosen)
