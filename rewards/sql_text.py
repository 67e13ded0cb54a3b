"""From the text of a completion to one SQL statement, without running anything.

Pure functions, linear in the text, safe on hostile input: a completion may be 10 MB of
backticks. They do not parse SQL; whether a statement is valid or harmless is decided by
SQLite and its authorizer in `rewards.sql_sandbox`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rewards.base import after_reasoning

MAX_SQL_LENGTH = 100_000
"""Characters of one statement; longer ones are refused unread."""

# Possessive throughout, and every quote may end at the end of the text: no input makes
# the scanner go back.
_TOKEN = re.compile(
    r"""
      (?P<quoted>'(?:[^']++|'')*+(?:'|\Z) | "(?:[^"]++|"")*+(?:"|\Z)
               | `(?:[^`]++|``)*+(?:`|\Z) | \[[^\]]*+(?:\]|\Z))
    | (?P<blank>--[^\n]*+ | /\*(?:[^*]++|\*(?!/))*+(?:\*/|\Z) | [\s\ufeff]++)
    | (?P<word>[^\W\d][\w$]*+)
    | (?P<sign>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_FENCE = re.compile(r"`{3,}")
_LABEL_LINE = re.compile(r"[ \t]*([A-Za-z0-9_+.#-]*)[ \t]*\r?\n")
_INLINE_LABEL = re.compile(r"[ \t]*(sql|sqlite)\s", re.IGNORECASE)
_SQL_LABELS = frozenset({"sql", "sqlite"})
_READING_WORDS = frozenset({"select", "with"})
_OTHER_WORDS = frozenset(
    [
        "alter",
        "analyze",
        "attach",
        "begin",
        "commit",
        "create",
        "delete",
        "detach",
        "drop",
        "end",
        "explain",
        "insert",
        "pragma",
        "reindex",
        "release",
        "replace",
        "rollback",
        "savepoint",
        "update",
        "vacuum",
        "values",
    ]
)


@dataclass(frozen=True)
class Answer:
    """The SQL of a completion: `sql` is None if there is none, and `problem` says why."""

    sql: str | None
    well_formed: bool = False
    problem: str = ""


def extract_answer(text: str) -> Answer:
    """Find the SQL a completion answers with.

    Of text with a closed `</think>` only what follows counts. The last complete fence
    is the answer, whatever its label. A fence left open that has a label or content
    means the completion was cut off: no answer, even if an earlier fence is complete. Without
    any fence the whole text is the answer if it starts like a SQL statement.

    `well_formed` (the format term): the text ends with the closing mark of a fence
    labelled sql or sqlite (any case), or is in whole a bare statement.
    """
    region = after_reasoning(text)
    if region is None:
        return Answer(None, problem="the reasoning was cut off")
    fences = [(match.start(), match.end()) for match in _FENCE.finditer(region)]
    if not fences:
        return _bare(region)
    if len(fences) % 2:
        label, content = _label_and_content(region[fences[-1][1] :])
        if label or content.strip() or len(fences) == 1:
            return Answer(None, problem="the last code fence was not closed")
        fences.pop()
    (_, start), (stop, end) = fences[-2:]
    label, content = _label_and_content(region[start:stop])
    if not content.strip():
        return Answer(None, problem="the last code fence is empty")
    return Answer(content.strip(), label in _SQL_LABELS and not region[end:].strip())


def _label_and_content(inside: str) -> tuple[str, str]:
    inline = _INLINE_LABEL.match(inside)
    if inline:
        return inline[1].lower(), inside[inline.end() :]
    line = _LABEL_LINE.match(inside)
    if line and line[1].lower() not in _READING_WORDS:
        return line[1].lower(), inside[line.end() :]
    return "", inside


def _bare(region: str) -> Answer:
    sql = region.strip()
    if not sql:
        return Answer(None, problem="the completion is empty")
    if first_word(sql) not in _READING_WORDS | _OTHER_WORDS:
        return Answer(None, problem="no code fence, and the text is not a SQL statement")
    return Answer(sql, well_formed=True)


def first_word(sql: str) -> str:
    """The first word in lower case; empty if something else comes before any word."""
    for token in _TOKEN.finditer(sql):
        if token.lastgroup != "blank":
            return token[0].lower() if token.lastgroup == "word" else ""
    return ""


def single_query(sql: str) -> tuple[str, str]:
    """(the one statement, "") or ("", why it is refused).

    Comments and empty statements around it are fine; a semicolon inside a string, a
    quoted name or a comment divides nothing.
    """
    if len(sql) > MAX_SQL_LENGTH:
        return "", f"{len(sql)} characters of SQL, at most {MAX_SQL_LENGTH} are run"
    if "\x00" in sql:
        return "", "the SQL contains a NUL character"
    statements = list(_statements(sql))
    if len(statements) != 1:
        return "", f"{len(statements)} statements, expected one"
    word = first_word(statements[0])
    if word not in _READING_WORDS:
        return "", f"starts with {word.upper() or 'no word'}, expected SELECT or WITH"
    return statements[0], ""


def _statements(sql: str) -> Iterator[str]:
    if ";" not in sql:  # nearly always, and then only emptiness is open
        if any(token.lastgroup != "blank" for token in _TOKEN.finditer(sql)):
            yield sql
        return
    start, content = 0, False
    for token in _TOKEN.finditer(sql):
        if token.lastgroup == "sign" and token[0] == ";":
            if content:
                yield sql[start : token.start()]
            start, content = token.end(), False
        elif token.lastgroup != "blank":
            content = True
    if content:
        yield sql[start:]


def outer_words(sql: str) -> list[str]:
    """The words outside parentheses, strings, quoted names and comments, in lower case."""
    words, depth = [], 0
    for token in _TOKEN.finditer(sql):
        if token.lastgroup == "sign":
            depth += {"(": 1, ")": -1}.get(token[0], 0)
        elif token.lastgroup == "word" and depth == 0:
            words.append(token[0].lower())
    return words
