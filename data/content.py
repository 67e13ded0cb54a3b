"""When two prompts, or two golds, are the same: normal forms, words, ids, and the check that splits share nothing.

Not covered: paraphrases whose golds are written differently.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterator

import polars as pl

from data.schemas import TableError

_ODD_CHARACTERS = str.maketrans(
    {"\u2212": "-", "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"'}
    | dict.fromkeys("\u200b\ufeff\u00ad")  # zero-width space, byte order mark, soft hyphen
)
_QUOTED = re.compile(r"('(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`)")
_WORD = re.compile(
    r"\d{4}-\d{2}-\d{2}"  # a date is one word
    r"|[$\u20ac\u00a3]?\d+(?:[.,]\d+)*%?"  # and so are 1,000.5 and $5 and 20%
    r"|\w+(?:['-][^\W\d]\w*)*"  # and horse's and well-known
    r"|[^\w\s.,:;?'\"\u2026\u3002\uff1f]"  # operators and brackets count, the marks of a sentence do not
)


def prompt_id(db_id: str | None, prompt: str, solution: str) -> str:
    """First 16 hex digits of the SHA-256 of (db_id or "", prompt, solution) in canonical JSON."""
    text = json.dumps([db_id or "", prompt, solution], ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fenced(sql: str) -> str:
    """The SQL as a completion: alone in a fenced block."""
    return f"```sql\n{sql}\n```"


def normalise_prompt(text: str) -> str:
    """A form in which two texts are equal when they ask the same in the same words.

    Folds case, white space (also around operators), typographic variants and closing punctuation.
    Keeps digits, operators and all punctuation inside: "2 - 2" is not "2 + 2". A closing "!" goes
    only after a word, for "3!" is a number.
    """
    folded = unicodedata.normalize("NFC", text).translate(_ODD_CHARACTERS).casefold()
    folded = re.sub(r"\s+", " ", folded).strip()
    folded = re.sub(r" ?([^\w\s]) ?", r"\1", folded)
    return re.sub(r"(?:[?.,:;\u2026\u3002\uff1f]|(?<=[^\W\d_]{2})!)+$", "", folded)


def words_of(text: str) -> list[str]:
    """The words of a text in normal form: numbers and operators are words, sentence marks are not."""
    return _WORD.findall(normalise_prompt(text))


def word_ngrams(words: list[str], n: int) -> Iterator[str]:
    """Each run of `n` consecutive words, as one text; none where there are fewer."""
    return (" ".join(words[start : start + n]) for start in range(len(words) - n + 1))


def normalise_sql(sql: str) -> str:
    """SQL with case and white space folded outside quotes, and without closing semicolons."""
    parts = _QUOTED.split(sql.strip().rstrip("; \n\t"))
    for index in range(0, len(parts), 2):  # odd parts are quoted
        part = re.sub(r"\s+", " ", parts[index]).casefold()
        parts[index] = re.sub(r" ?([^\w\s]) ?", r"\1", part)
    return "".join(parts).strip()


def check_disjoint(prompts: pl.DataFrame) -> None:
    """Raise TableError when two splits share a question, or a gold on the same database.

    Golds without a database are not compared: many questions have the answer 42.
    """
    seen: dict[tuple[str, str | None, str], str] = {}
    clashes: dict[str, list[str]] = {}
    for row in prompts.select("split", "db_id", "prompt", "solution").iter_rows(named=True):
        texts = {"prompt": normalise_prompt(row["prompt"])}
        if row["db_id"] is not None:
            texts["solution"] = normalise_sql(row["solution"])
        for what, text in texts.items():
            first = seen.setdefault((what, row["db_id"], text), row["split"])
            if first != row["split"]:
                pair = f"{what}s of {first} and {row['split']}"
                clashes.setdefault(pair, []).append(row[what])
    if clashes:
        lines = [
            f"{len(texts)} {pair} are equal, such as {texts[0][-200:]!r}" for pair, texts in clashes.items()
        ]
        raise TableError(
            "check_disjoint: " + "; ".join(lines) + ". Expected splits that share neither questions "
            "nor golds: remove these rows from the split that is trained on"
        )
