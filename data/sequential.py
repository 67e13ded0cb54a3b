"""The sequential plan: a few completions for every prompt, more only for prompts that are still undecided.

A prompt is decided once it has both a correct and an incorrect completion: GRPO can learn from it, whatever its
exact rate. Which completion is drawn follows from its prompt and index alone, so a plan's completions are the first
ones of what a fixed number would have drawn, and no mixed prompt is missed below the same cap.

Not covered: how completions are drawn and judged (`tasks.jobs.sample`), and rates that an early stop does not bias
(`data.pass_rate`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class SamplingPlan:
    """`first` completions of every prompt, then `more` at a time of undecided ones, up to `cap` a prompt.

    The totals bound all prompts together. Prompts are served in the order of their ids, phase by phase; the prompt
    that reaches `max_total_tokens` is finished, and nothing after it is counted. Since a completion's length is known
    only afterwards, at most one chunk (`first` or `more` completions) is drawn beyond that total.
    """

    first: int
    more: int
    cap: int
    max_total_samples: int | None = None
    max_total_tokens: int | None = None

    @property
    def is_fixed(self) -> bool:
        return self.first >= self.cap

    def targets(self) -> list[int]:
        """Completions that an undecided prompt has after each phase: 4, 8, 12, 16."""
        return [*range(self.first, self.cap, self.more), self.cap]


class Chunk(NamedTuple):
    """Completions `start` to `stop` (exclusive) of one prompt, all of one phase."""

    prompt_id: str
    start: int
    stop: int


class Outcome(NamedTuple):
    """One judged completion; `success` is None when it could not be scored."""

    success: bool | None
    tokens: int


class Stop(NamedTuple):
    """How many completions a prompt got, and why no more: see `data.schemas.STOP_RULES`."""

    trials: int
    rule: str


Draw = Callable[[Sequence[Chunk]], Iterable[Sequence[Outcome]]]
"""Draws and judges chunks of one batch: one sequence of outcomes a chunk, in order."""


@dataclass
class _Tally:
    trials: int = 0
    successes: int = 0
    failures: int = 0
    over_budget: bool = False

    @property
    def is_decided(self) -> bool:
        return self.successes > 0 and self.failures > 0

    def add(self, outcomes: Sequence[Outcome]) -> None:
        self.trials += len(outcomes)
        self.successes += sum(outcome.success is True for outcome in outcomes)
        self.failures += sum(outcome.success is False for outcome in outcomes)


def run_plan(
    prompt_ids: Iterable[str], plan: SamplingPlan, draw: Draw, batch_size: int, longest: int
) -> dict[str, Stop]:
    """Follow `plan` to its end and say how each prompt ended; what `batch_size` is changes nothing in it.

    Args:
        batch_size: completions handed to `draw` at once, at least one chunk; fewer where the budget of tokens could
            not pay for so many.
        longest: most tokens of one completion.
    """
    tallies = {prompt_id: _Tally() for prompt_id in sorted(prompt_ids)}
    budget = _Budget(plan)
    for target in plan.targets():
        chunks = [
            Chunk(prompt_id, tally.trials, target)
            for prompt_id, tally in tallies.items()
            if not tally.is_decided and not tally.over_budget
        ]
        affordable = budget.affordable(chunks)
        for chunk in chunks[affordable:]:
            tallies[chunk.prompt_id].over_budget = True
        start = 0
        while start < affordable:
            end = _end_of_batch(chunks, start, affordable, budget.most_at_once(batch_size, longest))
            batch = chunks[start:end]
            outcomes = draw(batch) if budget.has_tokens else [()] * len(batch)
            for chunk, found in zip(batch, outcomes, strict=True):
                if budget.has_tokens:
                    tallies[chunk.prompt_id].add(found)
                    budget.spend(found)
                else:
                    tallies[chunk.prompt_id].over_budget = True
            start = end
    return {prompt_id: Stop(tally.trials, _rule(tally, plan)) for prompt_id, tally in tallies.items()}


class _Budget:
    def __init__(self, plan: SamplingPlan) -> None:
        self._samples = plan.max_total_samples
        self._tokens = plan.max_total_tokens

    @property
    def has_tokens(self) -> bool:
        return self._tokens is None or self._tokens > 0

    def most_at_once(self, batch_size: int, longest: int) -> int:
        """Completions of the next batch: no more than the tokens left pay for, whatever their lengths."""
        if self._tokens is None or not self.has_tokens:
            return batch_size
        return min(batch_size, self._tokens // longest)

    def affordable(self, chunks: Sequence[Chunk]) -> int:
        """How many of the chunks, from the first on, the budget of completions covers whole."""
        if self._samples is None:
            return len(chunks)
        left = self._samples
        for position, chunk in enumerate(chunks):
            left -= chunk.stop - chunk.start
            if left < 0:
                return position
        return len(chunks)

    def spend(self, outcomes: Sequence[Outcome]) -> None:
        if self._samples is not None:
            self._samples -= len(outcomes)
        if self._tokens is not None:
            self._tokens -= sum(outcome.tokens for outcome in outcomes)


def _end_of_batch(chunks: Sequence[Chunk], start: int, stop: int, most: int) -> int:
    """Where the batch that begins at `start` ends: at least one chunk, then as many as fit into `most` completions."""
    size = chunks[start].stop - chunks[start].start
    end = start + 1
    while end < stop and size + chunks[end].stop - chunks[end].start <= most:
        size += chunks[end].stop - chunks[end].start
        end += 1
    return end


def _rule(tally: _Tally, plan: SamplingPlan) -> str:
    if tally.over_budget:
        return "budget"
    if plan.is_fixed:
        return "fixed"
    return "mixed" if tally.is_decided else "cap"
