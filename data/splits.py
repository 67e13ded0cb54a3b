"""Folds duplicates and deals questions to train, curation and held-out, so that the splits share no content.

Not covered: paraphrases that share neither a gold nor a run of words.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from data.content import normalise_prompt, word_ngrams, words_of
from data.schemas import SPLITS, TableError

Row = dict[str, Any]
GoldKey = Callable[[Row], tuple[str, str] | None]
"""What makes two golds the same: rows with an equal key stay in one split; None says nothing about others."""

_EXAMPLES = 5


class Tally(Counter[str]):
    """Counts of `duplicates`, `conflicts` (among them, those with another gold) and `overlaps`, with examples."""

    def __init__(self) -> None:
        super().__init__()
        self.examples: list[str] = []


def collapse(rows: list[Row], gold_key: GoldKey, tallies: Mapping[int, Tally]) -> list[Row]:
    """Drop duplicates, and rows whose question or gold a later split has; the first of its kind stays.

    Goes through heldout first, then curation, then train and what has no split yet, so that what evaluates stays
    whole. `tallies` counts what was dropped, by the row's `origin`.
    """
    rank = {"heldout": 0, "curation": 1, "train": 2, None: 2}
    prompts: dict[tuple[str | None, str], Row] = {}
    golds: dict[tuple[str, str], str | None] = {}
    kept = []
    for row in sorted(rows, key=lambda row: rank[row.get("split")]):
        split, tally = row.get("split"), tallies[row["origin"]]
        asked = (row.get("db_id"), normalise_prompt(row["question"]))
        gold = gold_key(row)
        twin = prompts.get(asked)
        taken = gold is not None and golds.get(gold, split) != split
        if taken or (twin is not None and twin.get("split") != split):
            tally["overlaps"] += 1
            if len(tally.examples) < _EXAMPLES:
                tally.examples.append(row["question"])
        elif twin is not None:
            tally["duplicates"] += 1
            tally["conflicts"] += _differ(gold_key, row, twin)
        else:
            prompts[asked] = row
            if gold is not None:
                golds[gold] = split
            kept.append(row)
    order = {id(row): index for index, row in enumerate(rows)}
    return sorted(kept, key=lambda row: order[id(row)])


def deal(
    rows: list[Row], shares: Mapping[str, float], seed: int, gold_key: GoldKey, leak_ngram: int | None = None
) -> None:
    """Give each row a split; rows with the same gold go together, and so do rows that share `leak_ngram` words.

    Sizes end within a group of their share. Raises ValueError for shares that are none, TableError when the rows
    hang together so much that a split stays empty.
    """
    if (
        set(shares) - set(SPLITS)
        or min(shares.values(), default=0) < 0
        or abs(sum(shares.values()) - 1) > 1e-6
    ):
        raise ValueError(
            f"deal: shares are {dict(shares)}; expected shares of {', '.join(SPLITS)} that add up to 1"
        )
    # Train and curation are both trained on: only a held-out part makes shared words a leak.
    groups = _groups(rows, gold_key, leak_ngram if shares.get("heldout") else None)
    wanted = [split for split in SPLITS if shares.get(split, 0) > 0]
    if len(groups) < len(wanted) <= len(rows):
        raise TableError(
            f"deal: the {len(rows)} rows form {len(groups)} groups that have to stay together, expected at least "
            f"{len(wanted)}, one a split. Rows with the same gold on one database, or with {leak_ngram} consecutive "
            "words in common, stay together: raise leak_ngram if all questions open with the same words, or give a "
            "split column"
        )
    keys = sorted(groups)
    random.Random(f"splits {seed}").shuffle(keys)
    open_places = {split: shares.get(split, 0.0) * len(rows) for split in wanted}
    for key in keys:
        # The split that lacks most gets the next group.
        split = max(wanted, key=lambda name: open_places[name])
        open_places[split] -= len(groups[key])
        for row in groups[key]:
            row["split"] = split


def _groups(rows: list[Row], gold_key: GoldKey, leak_ngram: int | None) -> dict[tuple[str, str], list[Row]]:
    """Rows that have to stay together, under the smallest of their keys."""
    from scipy.cluster.hierarchy import DisjointSet

    keys = [gold_key(row) or ("", normalise_prompt(row["question"])) for row in rows]
    linked = DisjointSet(keys)
    if leak_ngram is not None:
        first: dict[tuple[str | None, str], tuple[str, str]] = {}
        for row, key in zip(rows, keys, strict=True):
            for gram in word_ngrams(words_of(row["question"]), leak_ngram):
                linked.merge(key, first.setdefault((row.get("db_id"), gram), key))
    smallest: dict[tuple[str, str], tuple[str, str]] = {}
    for key in keys:
        root = linked[key]
        smallest[root] = min(smallest.get(root, key), key)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row, key in zip(rows, keys, strict=True):
        groups.setdefault(smallest[linked[key]], []).append(row)
    return groups


def _differ(gold_key: GoldKey, row: Row, twin: Row) -> bool:
    """Whether two rows with one question have different golds."""
    if gold_key(row) is not None:
        return gold_key(row) != gold_key(twin)
    return row["solution"].split() != twin["solution"].split()
