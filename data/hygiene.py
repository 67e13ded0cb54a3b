"""Finds near-duplicate questions, and questions to train on that a held-out set has too.

Works on the questions alone, before any prompt template: a template repeats the same words (a database schema,
instructions) in every prompt. Questions about different databases are never compared, for the same words ask
something else there.

Not covered: paraphrases and translations, which share neither shingles nor runs of words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import polars as pl
from datasketch import MinHash, MinHashLSH
from scipy.cluster.hierarchy import DisjointSet

from data.content import normalise_prompt, word_ngrams, words_of

SHINGLE = 3  # words
PERMUTATIONS = 128
_SEED = 1
_ANY = "\n"  # stands for any database in the index of held-out questions
# A missed pair is lost, a false candidate only costs an exact comparison: so the index is tuned for recall.
_WEIGHTS = (0.02, 0.98)  # of false positives, of false negatives
_HIGHEST = 0.95  # above, 128 permutations are too few for bands; the exact comparison decides anyway


@dataclass(frozen=True)
class Question:
    """One question: the `prompt_id` of its row (or any name), its text, and the database it is about.

    `db_id` is None where there is no database, or where it is not known: as a leak, such a question is compared
    with all others.
    """

    id: str
    text: str
    db_id: str | None = None


@dataclass(frozen=True)
class Leak:
    """A question to train on and a held-out question that share `words`, the longest run around the first match."""

    train_id: str
    heldout_id: str
    words: str


def near_duplicate_clusters(questions: Sequence[Question], threshold: float) -> list[str]:
    """For each question, the smallest id of its near-duplicates, its own if it has none.

    Two questions are near-duplicates when the Jaccard similarity of their sets of word 3-grams is at least
    `threshold` (in 0..1); a cluster is what such pairs connect. MinHash finds the candidates, which are then
    compared exactly, so that there is no false pair; at the threshold itself about one pair in fifty is missed.
    The result depends on neither order nor process. Time grows with the number of questions, plus that of the pairs
    between clusters of one template.
    """
    keys = [(question.db_id, _shingles(question.text)) for question in questions]
    numbers: dict[tuple[str | None, frozenset[str]], int] = {}
    for key in keys:
        numbers.setdefault(key, len(numbers))
    clusters = DisjointSet(range(len(numbers)))
    index = MinHashLSH(threshold=min(threshold, _HIGHEST), num_perm=PERMUTATIONS, weights=_WEIGHTS)
    distinct = list(numbers)
    encoded = ([shingle.encode() for shingle in texts] for _, texts in distinct)
    for number, sketch in enumerate(MinHash.generator(encoded, num_perm=PERMUTATIONS, seed=_SEED)):
        database, texts = distinct[number]
        for other in cast("list[int]", index.query(sketch)):
            other_database, other_texts = distinct[other]
            if database != other_database or clusters.connected(number, other):
                continue
            if len(texts & other_texts) >= threshold * len(texts | other_texts):
                clusters.merge(number, other)
        index.insert(number, sketch, check_duplication=False)
    roots = [clusters[numbers[key]] for key in keys]
    smallest: dict[int, str] = {}
    for root, question in zip(roots, questions, strict=True):
        smallest[root] = min(smallest.get(root, question.id), question.id)
    return [smallest[root] for root in roots]


def cluster_sizes(clusters: Iterable[str]) -> dict[str, int]:
    """How many clusters have more than one row, how many rows those have, and how many the largest."""
    sizes = [size for size in Counter(clusters).values() if size > 1]
    return {"clusters": len(sizes), "rows": sum(sizes), "largest": max(sizes, default=1)}


def find_leaks(train: Sequence[Question], heldout: Sequence[Question], n: int) -> list[Leak]:
    """The questions of `train` that share `n` consecutive words with one of `heldout`, or its whole text.

    Words are compared in normal form (`data.content`). Each question of `train` is reported once, with the first
    held-out question found. Takes time and memory in proportion to the words.
    """
    index = _index(heldout, n)
    leaks = []
    for question in train:
        words = words_of(question.text)
        places = (_ANY,) if question.db_id is None else (question.db_id, None)
        for start, gram in enumerate((_whole(question.text), *word_ngrams(words, n)), -1):
            match = next((index[place, gram] for place in places if (place, gram) in index), None)
            if match is not None:
                other, other_start = match
                others = words_of(heldout[other].text)
                length = len(words) if start < 0 else _run(words[start:], others[other_start:])
                first = max(start, 0)
                leaks.append(Leak(question.id, heldout[other].id, " ".join(words[first : first + length])))
                break
    return leaks


def as_questions(table: pl.DataFrame, texts: Sequence[str]) -> list[Question]:
    """The rows of a PromptTable with their bare questions, `texts[i]` being that of row i."""
    rows = table.select("prompt_id", "db_id").iter_rows()
    return [Question(identity, text, db_id) for (identity, db_id), text in zip(rows, texts, strict=True)]


def leaks_of_table(
    table: pl.DataFrame, texts: Sequence[str], others: Sequence[Question], n: int
) -> list[dict[str, str]]:
    """What `find_leaks` finds between train or curation and the held-out split of a PromptTable, or `others`.

    A dictionary each, fit for JSON: train_id, heldout_id, words, split and source of the row to train on, and both
    texts as question and heldout_question.
    """
    asked = as_questions(table, texts)
    splits, sources = table["split"].to_list(), table["source"].to_list()
    origin = {q.id: (split, source) for q, split, source in zip(asked, splits, sources, strict=True)}
    train = [question for question in asked if origin[question.id][0] != "heldout"]
    heldout = [question for question in asked if origin[question.id][0] == "heldout"] + list(others)
    text_of = {question.id: question.text for question in [*train, *heldout]}
    return [
        {
            "train_id": leak.train_id,
            "heldout_id": leak.heldout_id,
            "words": leak.words,
            "split": origin[leak.train_id][0],
            "source": origin[leak.train_id][1],
            "question": text_of[leak.train_id],
            "heldout_question": text_of[leak.heldout_id],
        }
        for leak in find_leaks(train, heldout, n)
    ]


def _index(heldout: Sequence[Question], n: int) -> dict[tuple[str | None, str], tuple[int, int]]:
    """(database, whole text or n-gram) -> (number of the held-out question, first word); the first one stays."""
    index: dict[tuple[str | None, str], tuple[int, int]] = {}
    for number, question in enumerate(heldout):
        grams = (_whole(question.text), *word_ngrams(words_of(question.text), n))
        for start, gram in enumerate(grams, -1):
            for place in (question.db_id, _ANY):
                index.setdefault((place, gram), (number, start))
    return index


def _shingles(text: str) -> frozenset[str]:
    words = words_of(text)
    return frozenset(word_ngrams(words, SHINGLE)) or frozenset([normalise_prompt(text)])


def _whole(text: str) -> str:
    """A key for the whole text that no run of words can equal."""
    return "\n" + normalise_prompt(text)


def _run(words: Sequence[str], others: Sequence[str]) -> int:
    """How many of the first words are the same."""
    pairs = zip(words, others, strict=False)
    return next(
        (place for place, (one, other) in enumerate(pairs) if one != other), min(len(words), len(others))
    )
