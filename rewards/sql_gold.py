"""Reads a gold query for what it leaves open: ties in its order, and how it rounds.

Only text to text: sqlglot rewrites the gold into queries that list all rows the gold
could have chosen from, each with its rank under the gold's own ORDER BY, as a last
column. `rewards.sql_sandbox` runs them and keeps one only if it reproduces the gold's
result; a rewriting that is wrong or unsupported costs leniency, never correctness.

Not covered, so that rows are compared in the gold's exact order: ORDER BY on something
a DISTINCT hides, LIMIT or OFFSET that are not literal numbers, and SQL that sqlglot
cannot read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rewards.sql_text import outer_words

RANK = "furlong_rank"
_SOURCE = "furlong_gold"
_MAX_DECIMALS = 12


@dataclass(frozen=True)
class GoldPlan:
    """What the text of a gold query says about comparing with it.

    ordered: it has a top-level ORDER BY. limited: a top-level LIMIT. offset: rows it
    skips. decimals: output column -> d, where the column is ROUND(x, d) with d >= 1.
    ranked: queries to try in turn.
    """

    ordered: bool = False
    limited: bool = False
    offset: int = 0
    decimals: dict[int, int] = field(default_factory=dict)
    ranked: tuple[str, ...] = ()

    @property
    def needs_ranks(self) -> bool:
        return self.ordered or self.limited


def plan_gold(gold: str, columns: int) -> GoldPlan:
    """Plan for a gold query whose result has `columns` columns. Never raises on odd SQL."""
    words = set(outer_words(gold))
    ordered, limited = "order" in words, "limit" in words
    if not (ordered or limited or "round" in words):
        return GoldPlan()  # spares the import of sqlglot, and most golds the parse
    from sqlglot import parse_one
    from sqlglot.errors import SqlglotError

    try:
        tree: Any = parse_one(gold, read="sqlite")
        return _plan(tree, columns)
    except (SqlglotError, RecursionError):
        return GoldPlan(ordered=ordered, limited=limited)


def _plan(tree: Any, columns: int) -> GoldPlan:
    ordered, limited = bool(tree.args.get("order")), bool(tree.args.get("limit"))
    decimals = _decimals(tree, columns)
    offset = _literal(tree.args.get("offset"))
    limit = _literal(tree.args.get("limit"))
    if not (ordered or limited) or offset is None or limit is None:
        return GoldPlan(ordered, limited, 0, decimals)
    ranked: list[str] = []
    for rewrite in (_beside, _beside_aliased, _around):
        query = _attempt(rewrite, tree, columns)
        if query and query not in ranked:
            ranked.append(query)
    return GoldPlan(ordered, limited, offset, decimals, tuple(ranked))


def _attempt(rewrite: Callable[[Any, int], str | None], tree: Any, columns: int) -> str | None:
    from sqlglot.errors import SqlglotError

    try:
        return rewrite(tree, columns)
    except SqlglotError:
        return None


def _literal(clause: Any) -> int | None:
    """The number of a LIMIT or OFFSET clause; 0 without the clause, None if not a number."""
    from sqlglot import exp

    if clause is None:
        return 0
    value = clause.expression
    sign = 1
    if isinstance(value, exp.Neg):
        sign, value = -1, value.this
    if isinstance(value, exp.Literal) and not value.is_string and value.name.isdigit():
        return sign * int(value.name)
    return None


def _decimals(tree: Any, columns: int) -> dict[int, int]:
    from sqlglot import exp

    if not isinstance(tree, exp.Select) or len(tree.expressions) != columns:
        return {}
    found = {}
    for index, output in enumerate(tree.expressions):
        inner = output.unalias()
        if isinstance(inner, exp.Round):
            places = inner.args.get("decimals")
            digits = places.name if isinstance(places, exp.Literal) else ""
            if digits.isdigit() and 1 <= int(digits) <= _MAX_DECIMALS:
                found[index] = int(digits)
    return found


def _bare(tree: Any) -> Any:
    """The query without order and limit: every row the gold could have chosen from."""
    copy = tree.copy()
    for clause in ("order", "limit", "offset"):
        copy.set(clause, None)
    return copy


def _rank(terms: list[Any]) -> str:
    """DENSE_RANK over order terms, so SQLite itself applies collation, direction and NULLs."""
    if not terms:
        return f"1 AS {RANK}"  # LIMIT without order: all rows are tied
    listed = ", ".join(term.sql(dialect="sqlite") for term in terms)
    return f"DENSE_RANK() OVER (ORDER BY {listed}) AS {RANK}"


def _beside(tree: Any, columns: int, *, nested_aliases: bool = False) -> str | None:
    """The rank as one more output of the query itself. A DISTINCT would see it, so not there."""
    from sqlglot import exp, parse_one

    if not isinstance(tree, exp.Select) or tree.args.get("distinct"):
        return None
    terms = []
    for term in _terms(tree):
        key = _key(term)
        ordinal = _ordinal(key, tree, columns)
        aliases = {output.alias.lower(): output.unalias() for output in _aliased(tree)}
        if ordinal is not None:
            key.replace(exp.paren(ordinal.copy()))
        elif isinstance(key, exp.Column) and not key.table and key.name.lower() in aliases:
            key.replace(exp.paren(aliases[key.name.lower()].copy()))
        elif nested_aliases:
            for column in list(key.find_all(exp.Column)):
                if not column.table and column.name.lower() in aliases:
                    column.replace(exp.paren(aliases[column.name.lower()].copy()))
        terms.append(term)
    query = _bare(tree)
    query.append("expressions", parse_one(_rank(terms), read="sqlite"))
    return f"{query.sql(dialect='sqlite')} ORDER BY {columns + 1}"


def _beside_aliased(tree: Any, columns: int) -> str | None:
    """As `_beside`, with output aliases inside expressions spelled out."""
    return _beside(tree, columns, nested_aliases=True)


def _around(tree: Any, columns: int) -> str | None:
    """The query as a common table whose columns are ranked: for UNION and DISTINCT, and
    only if every order term is an output column."""
    from sqlglot import exp

    left = tree
    while isinstance(left, exp.SetOperation):
        left = left.left
    names = [f"c{index}" for index in range(columns)]
    terms = []
    for term in _terms(tree):
        key = _key(term)
        index = _output_index(key, left, columns)
        if index is None:
            return None
        key.replace(exp.column(names[index]))
        terms.append(term)
    inner = _bare(tree).sql(dialect="sqlite")
    return (
        f"WITH {_SOURCE}({', '.join(names)}) AS ({inner}) "
        f"SELECT *, {_rank(terms)} FROM {_SOURCE} ORDER BY {columns + 1}"
    )


def _terms(tree: Any) -> list[Any]:
    order = tree.args.get("order")
    return [term.copy() for term in order.expressions] if order else []


def _key(term: Any) -> Any:
    """The expression of an order term, inside DESC and COLLATE."""
    from sqlglot import exp

    key = term.this
    while isinstance(key, (exp.Collate, exp.Paren)):
        key = key.this
    return key


def _aliased(tree: Any) -> list[Any]:
    from sqlglot import exp

    return [output for output in tree.expressions if isinstance(output, exp.Alias)]


def _ordinal(key: Any, tree: Any, columns: int) -> Any:
    """The output expression an ORDER BY number stands for."""
    from sqlglot import exp

    outputs = tree.expressions
    if isinstance(key, exp.Literal) and not key.is_string and len(outputs) == columns:
        position = int(key.name) - 1 if key.name.isdigit() else -1
        if 0 <= position < columns:
            return outputs[position].unalias()
    return None


def _output_index(key: Any, select: Any, columns: int) -> int | None:
    """Which output column an order term names, by number, alias, name or same expression."""
    from sqlglot import exp

    if isinstance(key, exp.Literal) and not key.is_string:
        position = int(key.name) - 1 if key.name.isdigit() else -1
        return position if 0 <= position < columns else None
    outputs = select.expressions
    if len(outputs) != columns:
        return None
    if isinstance(key, exp.Column) and not key.table:
        for index, output in enumerate(outputs):
            if output.alias_or_name.lower() == key.name.lower():
                return index
    wanted = key.sql(dialect="sqlite").lower()
    for index, output in enumerate(outputs):
        if output.unalias().sql(dialect="sqlite").lower() == wanted:
            return index
    return None
