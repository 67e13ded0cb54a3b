"""Replaces personal data in text by placeholders: e-mail and web addresses, phone, card and account numbers.

Candidates are found by pattern and decided by kept libraries: python-stdnum checks the check digits of IBANs, cards
and social security numbers, phonenumbers (the port of Google's library) knows which numbers are phone numbers.
Both are small and need no model and no network.

Not covered: names, postal addresses, dates of birth and whatever else only the meaning gives away; phone numbers
without a country code outside the United States; text inside databases and images.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

REGION = "US"
"""Where a phone number without a country code is taken to be from."""

_PATTERNS = {
    "URL": re.compile(r"\b(?:https?|ftp)://[^\s<>\"'`]+[^\s<>\"'`.,;:!?)\]}]"),
    "EMAIL_ADDRESS": re.compile(
        r"(?<![\w.+-])[^\W_](?:[\w.+-]*\w)?@(?:[^\W_](?:[\w-]*[^\W_])?\.)+[^\W\d_]{2,}"
    ),
    "IBAN": re.compile(r"\b[A-Za-z]{2}\d{2}(?: ?[A-Za-z0-9]{4}){2,7}(?: ?[A-Za-z0-9]{1,3})?\b"),
    "CREDIT_CARD": re.compile(
        r"(?<![\w.+-])[3-6](?:\d{12,18}|\d{3}([ -])\d{4}\1\d{4}\1\d{1,7}|\d{3}([ -])\d{6}\2\d{5})(?![\w-])"
    ),
    "US_SSN": re.compile(r"(?<![\w.-])\d{3}-\d{2}-\d{4}(?![\w-])"),
    "IP_ADDRESS": re.compile(
        r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}|(?:[0-9A-Fa-f]{1,4}:|:){2,7}[0-9A-Fa-f]{0,4})(?![\w:]|\.\d)"
    ),
}


def anonymise(texts: Sequence[str]) -> tuple[list[str], Counter[str]]:
    """The texts of one row with `<KIND_n>` for each value, and how many different values of each kind there were.

    The same value gets the same placeholder in all the texts, however it is spaced or written in capitals. Kinds:
    URL, EMAIL_ADDRESS, IBAN, CREDIT_CARD, US_SSN, IP_ADDRESS, PHONE_NUMBER.

    Raises ModuleNotFoundError, saying what to install, when the libraries are missing.
    """
    detectors = _detectors()
    numbers: Counter[str] = Counter()
    placeholders: dict[tuple[str, str], str] = {}
    literals: dict[str, str] = {}
    for text in texts:
        rest = text
        for kind, find in detectors.items():
            for value in list(find(rest)):
                key = (kind, re.sub(r"[\s().-]", "", value).casefold() if kind != "URL" else value)
                if key not in placeholders:
                    numbers[kind] += 1
                    placeholders[key] = f"<{kind}_{numbers[kind]}>"
                literals[value] = placeholders[key]
                rest = rest.replace(value, " \n ")  # a value is of one kind: the first that claims it
    if not literals:
        return list(texts), numbers
    ordered = sorted(literals, key=len, reverse=True)
    anywhere = re.compile(r"(?<!\w)(?:" + "|".join(map(re.escape, ordered)) + r")(?!\w)")
    return [anywhere.sub(lambda match: literals[match[0]], text) for text in texts], numbers


def _detectors() -> dict[str, Callable[[str], Iterator[str]]]:
    """Kind -> finder of its values in a text, in the order in which they may claim a piece of text."""
    try:
        import phonenumbers
        from stdnum import iban, luhn
        from stdnum.us import ssn
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"anonymise needs the package of the module {error.name!r}: install phonenumbers and python-stdnum "
            "(pip install 'furlong[privacy]'), or set prompts.recipe.hygiene.anonymise to false",
            name=error.name,
        ) from None
    checks: dict[str, Callable[[str], Any]] = {
        "IBAN": iban.is_valid,
        "CREDIT_CARD": lambda value: luhn.is_valid(re.sub(r"[ -]", "", value)),
        "US_SSN": ssn.is_valid,
        "IP_ADDRESS": _is_address,
    }

    def finder(kind: str) -> Callable[[str], Iterator[str]]:
        check = checks.get(kind, bool)
        return lambda text: (match[0] for match in _PATTERNS[kind].finditer(text) if check(match[0]))

    def phones(text: str) -> Iterator[str]:
        # The plain leniency takes "28980 - 18480" for a phone number.
        strict = phonenumbers.Leniency.STRICT_GROUPING
        return (m.raw_string for m in phonenumbers.PhoneNumberMatcher(text, REGION, leniency=strict))

    return {kind: finder(kind) for kind in _PATTERNS} | {"PHONE_NUMBER": phones}


def _is_address(text: str) -> bool:
    if ":" in text and (len(text) < len("fe80::1") or not re.search(r"\d", text)):
        return False  # "::" and "a::b" stand in code
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
