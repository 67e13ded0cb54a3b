"""The sequential plan: what it draws, when it stops, and that it misses nothing a fixed number would find."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.sequential import Chunk, Outcome, SamplingPlan, run_plan

TOKENS = 10


def bernoulli(prompt_id: str, index: int, rate: float) -> bool:
    """Whether a completion is correct: a function of prompt and index alone, as the ledger's seeds make it."""
    return random.Random(f"{prompt_id}:{index}").random() < rate


class Simulated:
    """Draws for prompts of known rates, and remembers what was asked."""

    def __init__(self, rates: dict[str, float | None], tokens: int = TOKENS) -> None:
        self.rates, self.tokens = rates, tokens
        self.drawn: list[tuple[str, int]] = []

    def __call__(self, chunks: Sequence[Chunk]) -> list[list[Outcome]]:
        return [
            [self.outcome(chunk.prompt_id, index) for index in range(chunk.start, chunk.stop)]
            for chunk in chunks
        ]

    def outcome(self, prompt_id: str, index: int) -> Outcome:
        self.drawn.append((prompt_id, index))
        rate = self.rates[prompt_id]
        return Outcome(None if rate is None else bernoulli(prompt_id, index, rate), self.tokens)


def prompts(count: int, seed: int = 0) -> dict[str, float | None]:
    rng = random.Random(seed)
    return {f"p{number:04}": rng.betavariate(0.6, 0.9) for number in range(count)}


def test_each_phase_goes_on_with_undecided_prompts_alone() -> None:
    draw = Simulated({"always": 1.0, "half": 0.5, "never": 0.0, "broken": None})
    stops = run_plan(draw.rates, SamplingPlan(4, 4, 12), draw, 100, TOKENS)
    assert {name: stop.trials for name, stop in stops.items()} == {
        "always": 12,
        "never": 12,
        "broken": 12,
        "half": 4,
    }
    assert {name: stop.rule for name, stop in stops.items()} == {
        "always": "cap",
        "never": "cap",
        "broken": "cap",
        "half": "mixed",
    }
    assert len(draw.drawn) == len(set(draw.drawn)) == 40


def test_a_cap_that_is_no_multiple_is_reached_exactly() -> None:
    assert SamplingPlan(4, 5, 16).targets() == [4, 9, 14, 16]
    assert SamplingPlan(8, 4, 8).targets() == [8]
    stops = run_plan(["p"], SamplingPlan(4, 5, 16), Simulated({"p": 0.0}), 1, TOKENS)
    assert stops["p"] == (16, "cap")


def test_a_fixed_plan_gives_all_the_same() -> None:
    stops = run_plan(rates := prompts(20), SamplingPlan(8, 8, 8), Simulated(rates), 32, TOKENS)
    assert set(stops.values()) == {(8, "fixed")}


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    first=st.integers(1, 6),
    more=st.integers(1, 6),
    cap=st.integers(7, 20),
    batch=st.integers(1, 64),
)
def test_no_mixed_prompt_is_missed_and_batches_change_nothing(
    seed: int, first: int, more: int, cap: int, batch: int
) -> None:
    rates = prompts(40, seed)
    plan = SamplingPlan(first, more, cap)
    draw = Simulated(rates)
    stops = run_plan(rates, plan, draw, batch, TOKENS)
    assert stops == run_plan(rates, plan, Simulated(rates), 10**6, TOKENS)
    for prompt_id, rate in rates.items():
        outcomes = [bernoulli(prompt_id, index, rate or 0.0) for index in range(cap)]
        assert (stops[prompt_id].rule == "mixed") == (0 < sum(outcomes) < cap)
        assert [index for drawn, index in draw.drawn if drawn == prompt_id] == list(
            range(stops[prompt_id].trials)
        )


@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_a_budget_of_completions_is_never_exceeded(batch: int) -> None:
    draw = Simulated(rates := prompts(30))
    stops = run_plan(rates, SamplingPlan(4, 4, 16, max_total_samples=150), draw, batch, TOKENS)
    assert sum(stop.trials for stop in stops.values()) <= 150
    assert len(draw.drawn) <= 150, "nothing is drawn that the budget does not cover"
    assert {stop.trials for stop in stops.values() if stop.rule == "budget"} <= {4, 8, 12}
    assert {stop.rule for stop in stops.values()} == {"budget", "mixed"}


@pytest.mark.parametrize("longest", [TOKENS, 10 * TOKENS])
@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_a_budget_of_tokens_ends_with_the_prompt_that_reaches_it(batch: int, longest: int) -> None:
    draw = Simulated(rates := prompts(30))
    stops = run_plan(rates, SamplingPlan(4, 4, 16, max_total_tokens=995), draw, batch, longest)
    counted = sum(stop.trials for stop in stops.values()) * TOKENS
    assert 995 <= counted < 995 + 4 * TOKENS
    assert len(draw.drawn) * TOKENS == counted, "no large batch is drawn that the budget cannot pay for"
    assert [stop for stop in stops.values() if stop.trials == 0], "some prompts got nothing, and say so"
    assert all(stop.rule == "budget" for stop in stops.values() if stop.trials == 0)
