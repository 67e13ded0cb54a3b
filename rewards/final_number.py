r"""The final-number reward: is the last number a completion answers with the gold's number?

For tasks like GSM8K, whose answers are plain numbers. Both sides are read into exact
fractions, so 1,000.50 equals 1000.5 and 3/4 equals 0.75, and 0.333 is not 1/3. Nothing
is evaluated, nothing is a float, and everything is bounded, so it runs in this process.

Not covered: symbolic answers (roots, variables, intervals: that takes a computer algebra
system and another reward), arithmetic ("6 * 3" reads as 3), number words and magnitudes
("two", "3 million"), decimal commas, groups of other than three digits, dates and times.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from rewards.base import (
    RewardIdentity,
    RewardResult,
    Status,
    after_reasoning,
    check_scores,
    code_digest,
    completion_text,
    one_line,
)

_MODULES = ("base", "final_number")
MAX_TEXT_LENGTH = 100_000
"""Characters after the reasoning; a longer text is refused unread."""
MAX_NUMBER_LENGTH = 100
"""Characters of one number; a longer one cannot be read."""
_MOST_EXPONENT = 99

_SIGN = r"[-+\u2212]"
_CURRENCY = r"\\?[$€£¥₹][ ]?"
_RUN = r"\.?[0-9][0-9.,]*+"
# Possessive throughout: no input makes the scanner go back. Words come first, so that
# the digits of "x2" or "H2O" are no numbers. A sign after a digit or a bracket is a minus.
_TOKEN = re.compile(
    rf"""
      (?P<word>[^\W\d_]\w*+(?:(?<=\d)[.,]\d++)*+)
    | (?: (?P<outer>(?<![\w)\]}}]){_SIGN})?+ {_CURRENCY} (?P<inner>{_SIGN})?+
        | (?P<sign>(?<![\w)\]}}]){_SIGN}) )?+
      (?P<number>{_RUN} (?:[eE][-+]?+[0-9]++)?+ (?:/{_RUN})*+)
    """,
    re.VERBOSE,
)
_PLAIN = re.compile(r"[0-9]++(?:\.[0-9]++)?+|\.[0-9]++")
_GROUPED = re.compile(r"[0-9]{1,3}+(?:,[0-9]{3})++(?:\.[0-9]++)?+")
_EXPONENT = re.compile(r"[eE]([-+]?[0-9]++)")
_HASHES = re.compile(rf"####[ \t*]*+(?=(?:{_SIGN})?+(?:{_CURRENCY})?+(?:{_SIGN})?+\.?[0-9])([^\n]*+)")
_LATEX_FRACTION = re.compile(r"([0-9]?)\\[dt]?frac\{([0-9]{1,50})\}\{([0-9]{1,50})\}")
_LATEX_SPACES = (("{,}", ","), ("\\!", ""), ("\\,", ""))


@dataclass(frozen=True)
class Number:
    """One number as it stands in a text: `value` is None where it cannot be read exactly."""

    text: str
    value: Fraction | None


@dataclass(frozen=True)
class Region:
    """Where a text answers: `marked` says whether by a mark; `problem` if nowhere."""

    text: str = ""
    marked: bool = False
    problem: str = ""


@dataclass(frozen=True)
class FinalNumberV1:
    r"""Exact equality of the final number, as TRL calls it. Score 1.0 or 0.0.

    Column: `solution` holds the gold, either a number or a whole GSM8K answer that ends
    with `#### 18`. No database, no `db_id`.

    Where the answer stands, the first of these that the text has (after a closed
    `</think>`, if any; an open `<think>` is a text that was cut off):

    1. the rest of the line after the last `####` that a number follows directly ("#### 18";
       a heading such as "#### Step 3" is no mark),
    2. the last `\boxed{...}`, braces balanced,
    3. the last `<answer>...</answer>`,
    4. with `anywhere`, the whole text.

    A box or tag that is not closed, or holds no number, is no answer; nothing else is
    looked at then. Of several numbers in that place the last one counts, so hedging
    with more numbers gains nothing.

    How a number reads: ASCII digits, thousands separated by commas in groups of three,
    decimals, a/b and mixed "1 3/4", `\frac{a}{b}`, exponents up to 99, a sign (also the
    minus sign U+2212), a currency sign before. Units, a percent sign and a full stop
    after it are ignored: 5% equals 5, not 0.05. What looks like a number and cannot be
    read exactly (too long, "1/0", "1.2.3", "10^2", "\sqrt{2}", other digits such as "1½")
    is no answer, never a guess.

    A gold that cannot be read, or in which two different numbers stand where it
    answers, is suspect: its completions are unscored. `anywhere=False` pays marked
    answers only; it does not concern golds.

    Terms: result, and format (the answer was marked), which is recorded and not paid.
    """

    anywhere: bool = True

    __name__: ClassVar[str] = "final_number_v1"
    version: ClassVar[int] = 1
    required_columns: ClassVar[tuple[str, ...]] = ("solution",)
    needs_databases: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.anywhere, bool):
            raise ValueError(f"FinalNumberV1: anywhere is {self.anywhere!r}, expected true or false.")

    @property
    def identity(self) -> RewardIdentity:
        return RewardIdentity(self.__name__, self.version, {"anywhere": self.anywhere}, code_digest(_MODULES))

    def __call__(
        self,
        prompts: Sequence[Any] | None = None,
        completions: Sequence[Any] | None = None,
        solution: Sequence[str | None] | None = None,
        **_columns: Any,
    ) -> list[float | None]:
        """One score per completion: 1.0, 0.0, or None where it cannot be scored."""
        results = self.results(completions, solution)
        return check_scores(self.__name__, [result.score for result in results], len(results))

    def results(
        self,
        completions: Sequence[Any] | None = None,
        solution: Sequence[str | None] | None = None,
        **_columns: Any,
    ) -> list[RewardResult]:
        """One `RewardResult` per completion, in order."""
        if completions is None or solution is None:
            missing = "completions" if completions is None else "solution"
            raise ValueError(f"Reward {self.__name__} needs {missing}: no such column in the data.")
        if len(completions) != len(solution):
            lengths = {"completions": len(completions), "solution": len(solution)}
            raise ValueError(f"Reward {self.__name__} got columns of different lengths: {lengths}.")
        golds = {gold: read_gold(gold) for gold in dict.fromkeys(solution)}
        return [
            self._judge(completion_text(text), golds[gold])
            for text, gold in zip(completions, solution, strict=True)
        ]

    def check_golds(
        self, solution: Sequence[str | None], db_id: Sequence[str | None] | None = None, **_columns: Any
    ) -> list[RewardResult]:
        """The self-check at load: CORRECT with score 1.0, or what is wrong with the gold."""
        marked = [
            gold if gold and find_region(gold).marked else f"<answer>{gold or ''}</answer>"
            for gold in solution
        ]
        return [
            result
            if result.status is Status.CORRECT or result.score is None
            else RewardResult.of(Status.SUSPECT_GOLD, f"the gold fails against itself: {result.detail}")
            for result in self.results(marked, solution)
        ]

    def _judge(self, text: str, gold: Number | str) -> RewardResult:
        if isinstance(gold, str):
            return RewardResult.of(Status.SUSPECT_GOLD, one_line(f"gold: {gold}"))
        region = find_region(text)
        terms = {"result": 0.0, "format": float(region.marked)}
        if region.problem or not (region.marked or self.anywhere):
            detail = region.problem or "no ####, \\boxed or <answer> marks the answer"
            return RewardResult.of(Status.NO_ANSWER, detail, terms)
        found = next(iter(deque(numbers(region.text), maxlen=1)), None)
        if found is None or found.value is None:
            detail = f"cannot read {found.text!r} as an exact number" if found else "no number"
            return RewardResult.of(Status.NO_ANSWER, one_line(detail), terms)
        if found.value != gold.value:
            detail = f"{found.text}, expected {gold.text}"
            return RewardResult.of(Status.INCORRECT, one_line(detail), terms)
        return RewardResult.of(Status.CORRECT, "", {**terms, "result": 1.0})


def read_gold(gold: str | None) -> Number | str:
    """The gold's number, or what is wrong with it."""
    region = find_region(gold or "")
    if region.problem:
        return region.problem
    found = list(numbers(region.text))
    unread = [number.text for number in found if number.value is None]
    if unread:
        return f"cannot read {unread[-1]!r} as an exact number"
    if not found:
        return "no number"
    if len({number.value for number in found}) > 1:
        return f"{len(found)} numbers ({found[0].text}, ... {found[-1].text}), expected one"
    return found[-1]


def find_region(text: str) -> Region:
    """Where `text` answers, see `FinalNumberV1`; the whole text if nothing is marked."""
    rest = after_reasoning(text)
    if rest is None:
        return Region(problem="the reasoning was cut off")
    if len(rest) > MAX_TEXT_LENGTH:
        return Region(problem=f"{len(rest)} characters, at most {MAX_TEXT_LENGTH} are read")
    lines = _HASHES.findall(rest)
    if lines:
        return Region(lines[-1], marked=True)
    box = rest.rfind("\\boxed{")
    if box >= 0:
        inside = _braced(rest, box + len("\\boxed{"))
        return Region(inside, True) if inside is not None else Region(problem="the last box was not closed")
    opened = rest.rfind("<answer>")
    if opened >= 0:
        closed = rest.find("</answer>", opened)
        inside = rest[opened + len("<answer>") : closed]
        return Region(inside, True) if closed >= 0 else Region(problem="the last <answer> was not closed")
    return Region(rest)


def _braced(text: str, start: int) -> str | None:
    depth = 1
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : start + brace.start()]
    return None


def numbers(text: str) -> Iterator[Number]:
    """All that looks like a number in `text`, from left to right."""
    for sign, replacement in _LATEX_SPACES:
        text = text.replace(sign, replacement)
    text = _LATEX_FRACTION.sub(_plain_fraction, text)
    whole: tuple[int, int, bool] | None = None  # end, value and sign of an integer just before
    for token in _TOKEN.finditer(text):
        written = token["number"]
        if written is None:
            continue
        negative = any(token[name] in ("-", "\u2212") for name in ("outer", "inner", "sign"))
        value = None if _touches_more(text, token) else _value(written)
        if value is not None and "/" in written and whole and not (token["sign"] or token["outer"]):
            end, size, negative_whole = whole
            if text[end : token.start("number")] == " " and 0 < value < 1:
                value, negative = size + value, negative_whole
        end = token.end()
        plain = written.isdigit() and value is not None
        whole = (end, int(written), negative) if plain else None
        if value is not None and negative:
            value = -value
        yield Number(token[0][: MAX_NUMBER_LENGTH + 10], value)


def _plain_fraction(match: re.Match[str]) -> str:
    before, above, below = match.groups()
    return f"{before} {above}/{below}" if before else f"{above}/{below}"


def _touches_more(text: str, token: re.Match[str]) -> bool:
    """Part of a power, a root or an open fraction, or beside a digit that is not ASCII: it
    is not the number it seems."""
    before, after = text[max(0, token.start() - 5) : token.start()], text[token.end() : token.end() + 1]
    return (
        before.endswith(("^", "^{", "sqrt{", "}{"))
        or after == "^"
        or after.isnumeric()
        or before[-1:].isnumeric()
    )


def _value(written: str) -> Fraction | None:
    if len(written) > MAX_NUMBER_LENGTH:
        return None
    parts = [_decimal(part) for part in written.split("/")]
    if len(parts) == 1:
        return parts[0]
    above, below = parts[0], parts[-1]
    return above / below if len(parts) == 2 and above is not None and below else None


def _decimal(written: str) -> Fraction | None:
    exponent = _EXPONENT.search(written)
    if exponent:
        power = int(exponent[1])
        base = _decimal(written[: exponent.start()])
        if base is None or abs(power) > _MOST_EXPONENT:
            return None
        return base * Fraction(10) ** power
    written = written.rstrip(".,")
    if _GROUPED.fullmatch(written):
        return Fraction(written.replace(",", ""))
    # "1,00,000" or "1,5" may mean several things: it is not guessed which.
    return Fraction(written) if _PLAIN.fullmatch(written) else None
