"""What every reward shares: statuses, results, identity, and the shape TRL expects.

A verifier decides a `Status` and which terms were earned; this module alone turns
that into a score. It does not cover how a completion is verified, and it does not
aggregate results over a group or a batch.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

_SOURCES = Path(__file__).resolve().parent


class Status(StrEnum):
    """How a completion fared. The value is what metrics and artifacts store."""

    CORRECT = "correct"
    """Right answer."""
    INCORRECT = "incorrect"
    """An answer was read, and it is wrong."""
    NO_ANSWER = "no_answer"
    """No answer could be read from the completion, or it was cut off."""
    TIMEOUT = "timeout"
    """The completion's own answer ran past its time limit."""
    EXECUTION_ERROR = "execution_error"
    """The completion's own answer raised an error when it was run."""
    EMPTY_RESULT = "empty_result"
    """It ran and returned nothing, where the gold answer returns something."""
    ROW_COUNT = "row_count"
    """It ran and returned abnormally many rows."""
    REJECTED = "rejected"
    """It was not run, or was stopped, because it is not allowed."""
    SUSPECT_GOLD = "suspect_gold"
    """The gold answer fails its own check: says nothing about the completion."""
    VERIFIER_ERROR = "verifier_error"
    """The verifier failed: says nothing about the completion."""


UNSCORED = frozenset({Status.SUSPECT_GOLD, Status.VERIFIER_ERROR})
"""Statuses with score None. TRL leaves such a completion out of its group's baseline."""


def score_of(status: Status, earned: float) -> float | None:
    """The one place where a status becomes a score.

    `earned` is what the weighted terms add up to; it is paid to CORRECT alone. A
    completion that fails scores 0.0, also on a time-out, so that no way of failing
    beats another. What the verifier cannot judge is None, never 0.0.
    """
    if status in UNSCORED:
        return None
    return earned if status is Status.CORRECT else 0.0


@dataclass(frozen=True)
class RewardResult:
    """One judged completion.

    `score` is in 0..1, or None if unscored. `terms` holds each raw term in 0..1
    before weighting, also where it was not paid ("it executes, but is wrong"); it is
    empty if unscored. `detail` is one line for a person.
    """

    score: float | None
    status: Status
    detail: str = ""
    terms: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        status: Status,
        detail: str = "",
        terms: Mapping[str, float] | None = None,
        earned: float = 1.0,
    ) -> RewardResult:
        """A result whose score follows from its status through `score_of`."""
        kept = {} if terms is None or status in UNSCORED else dict(terms)
        return cls(score_of(status, earned), status, detail, kept)


@dataclass(frozen=True)
class RewardIdentity:
    """What decides a score apart from the data: part of every key and every run.

    `digest` covers source code and the versions of the libraries that decide.
    """

    name: str
    version: int
    params: Mapping[str, Any]
    digest: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", MappingProxyType(dict(self.params)))

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON-ready values, in a fixed order."""
        return {
            "name": self.name,
            "version": self.version,
            "params": {key: self.params[key] for key in sorted(self.params)},
            "digest": self.digest,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapping proxy cannot be pickled; a plain dict can, and is wrapped again.
        return (type(self), (self.name, self.version, dict(self.params), self.digest))


class Reward(Protocol):
    """What the stages rely on; each version is a frozen, picklable class.

    required_columns: columns of the data, besides the completions, without which it raises.
    needs_databases: whether it takes `database_root`, the folder of the databases that the
    column `db_id` names; any other reward ignores that column.
    """

    required_columns: ClassVar[tuple[str, ...]]
    needs_databases: ClassVar[bool]

    @property
    def identity(self) -> RewardIdentity: ...

    def results(self, *args: Any, **kwargs: Any) -> list[RewardResult]: ...

    def check_golds(
        self, solution: Sequence[str | None], db_id: Sequence[str | None] | None = None, **columns: Any
    ) -> list[RewardResult]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> list[float | None]: ...


@lru_cache(maxsize=64)
def code_digest(modules: tuple[str, ...], versions: tuple[tuple[str, str], ...] = ()) -> str:
    """sha256 hex over the source of `rewards/<module>.py` and named versions.

    Line endings are normalised, so that a checkout's settings do not matter; any other
    byte, comments included, does.
    """
    digest = hashlib.sha256()
    for module in sorted(modules):
        source = (_SOURCES / f"{module}.py").read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{module} {len(source)}\n".encode())
        digest.update(source)
    for name, version in sorted(versions):
        digest.update(f"{name}=={version}\n".encode())
    return digest.hexdigest()


def package_version(package: str) -> str:
    """The installed version of `package`, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def completion_text(completion: Any) -> str:
    """The text to judge, from a string or from chat messages.

    TRL passes strings where the prompt column is text and a list of messages where it
    is a conversation. Of several messages the last one by the assistant counts; its
    content may be a string, None (a bare tool call) or a list of text parts. Raises
    TypeError on anything else.
    """
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Mapping):
        completion = [completion]
    if not isinstance(completion, Sequence) or isinstance(completion, (bytes, bytearray)):
        raise TypeError(
            f"A completion must be a string or a list of messages, not {type(completion).__name__}."
        )
    for message in reversed(completion):
        if not isinstance(message, Mapping):
            raise TypeError(f"A message must be a mapping, not {type(message).__name__}.")
        if message.get("role", "assistant") == "assistant":
            return _content_text(message.get("content"))
    return ""


def _content_text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        return "".join(part for part in parts if isinstance(part, str))
    raise TypeError(f"Message content must be text, not {type(content).__name__}.")


def after_reasoning(text: str) -> str | None:
    """What follows the last closed `</think>`; the whole text without one; None if it was cut off in it."""
    closed = text.rfind("</think>")
    if closed >= 0:
        text = text[closed + len("</think>") :]
    return None if "<think>" in text else text


def check_scores(name: str, scores: Any, expected: int) -> list[float | None]:
    """Refuse what TRL would broadcast, spread or choke on.

    Returns `scores` as a list of `expected` floats or None. Raises ValueError, naming
    the reward, on another length, a bool, a non-number, NaN or an infinity. Source:
    TRL issue 6533 (a list of one was broadcast to the whole batch).
    """
    if isinstance(scores, (str, bytes, Mapping)) or not hasattr(scores, "__len__"):
        raise ValueError(f"Reward {name} returned {type(scores).__name__}, expected a list.")
    if len(scores) != expected:
        raise ValueError(
            f"Reward {name} returned {len(scores)} scores for {expected} completions. "
            "It must return one float or None per completion."
        )
    return [_checked(name, index, score) for index, score in enumerate(scores)]


def _checked(name: str, index: int, score: Any) -> float | None:
    if score is None:
        return None
    if isinstance(score, bool) or not isinstance(score, numbers.Real):
        raise ValueError(
            f"Reward {name} returned {type(score).__name__} {score!r} for completion {index}, "
            "expected a float or None."
        )
    number = float(score)
    if not math.isfinite(number):
        raise ValueError(
            f"Reward {name} returned {number} for completion {index}. "
            "Scores must be finite; use None for what cannot be scored."
        )
    return number


@dataclass(frozen=True)
class CheckedReward:
    """Wraps any reward function, so that `check_scores` runs before TRL sees a score."""

    reward: Callable[..., Any]

    def __post_init__(self) -> None:
        if inspect.iscoroutinefunction(self.reward):
            raise ValueError(f"Reward {reward_name(self.reward)} is async; give a plain function.")

    @property
    def __name__(self) -> str:
        return reward_name(self.reward)

    def __call__(self, *, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
        scores = self.reward(completions=completions, **kwargs)
        return check_scores(reward_name(self.reward), scores, len(completions))


def reward_name(reward: Any) -> str:
    """The name TRL logs a reward under."""
    return str(getattr(reward, "__name__", type(reward).__name__))


def one_line(text: str, limit: int = 300) -> str:
    """`text` without line breaks or NUL, cut to `limit` characters, safe to store as UTF-8."""
    head = text[: 4 * limit].encode("utf-8", "replace").decode("utf-8")
    flat = re.sub(r"[\s\x00]+", " ", head).strip()
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"
