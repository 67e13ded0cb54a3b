"""Job: draw completions of a policy for prompts, by a plan, into the sample ledger.

Only what the ledger lacks is generated; the model is loaded when the first completion is missing, and never if none is.
With a reward, a prompt stops once it is decided (`data.sequential`); which completions an artifact holds is written to
`work/`, and the stage puts the artifact together from the ledger.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
from transformers import AutoTokenizer

from data.sample_ledger import SegmentWriter, read_samples, sample_seed
from data.sequential import Chunk, Outcome, SamplingPlan, run_plan
from rewards.base import Reward, Status
from rewards.registry import get_reward
from tasks.jobs.completions import BATCH_SIZES, Completion, GenerationEngine, SampleRequest, Sampling
from tasks.jobs.engines import open_engine
from tasks.jobs.prompt_rows import longest_prompt, read_prompts
from tasks.jobs.protocol import Reporter, Request, run
from tasks.recipes import SamplingRuntime

FACTS = ("completions", "new_completions", "completion_tokens", "generated_tokens")
"""`new_` and `generated_` count what this job drew, the others also what the ledger already had."""


def main(request: Request) -> None:
    options = request.options
    rows = read_prompts(request.inputs["prompts"], options["split"])
    if options.get("prompt_ids") is not None:
        rows = rows.filter(pl.col("prompt_id").is_in(options["prompt_ids"]))
    shard, shards = options["shard"]
    rows = rows[shard::shards]
    reward = get_reward(**options["reward"]) if options["reward"] else None
    engine = LazyEngine(request, rows["prompt"].to_list())
    reporter = Reporter(request)
    facts: dict[str, float] = dict.fromkeys(FACTS, 0)
    for draw in options["draws"]:
        sampler = Sampler(request, draw, rows, engine, reward, reporter)
        plan = SamplingPlan(**draw["plan"])
        longest = draw["sampling"]["max_completion_length"]
        stops = run_plan(rows["prompt_id"], plan, sampler.draw, engine.batch_size, longest)
        path = Path(request.work) / f"stops-{draw['name']}-{shard}.json"
        path.write_text(json.dumps(stops))
        for name, value in sampler.facts.items():
            facts[name] += value
    seconds = engine.seconds
    rate = facts["generated_tokens"] / seconds if seconds else 0.0
    reporter.result({**facts, "generation_seconds": seconds, "tokens_per_second": rate})


class LazyEngine:
    """Loads the model at the first call."""

    def __init__(self, request: Request, prompts: Sequence[str]) -> None:
        self._request, self._prompts = request, prompts
        self._runtime = SamplingRuntime.model_validate(request.runtime)
        self._engine: GenerationEngine | None = None
        self._loaded_at = 0.0

    @property
    def seconds(self) -> float:
        """Since the model was loaded; 0 if it never was."""
        return time.monotonic() - self._loaded_at if self._engine else 0.0

    @property
    def batch_size(self) -> int:
        return self._runtime.batch_size or BATCH_SIZES[self._request.options["engine"]]

    def generate(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Completion]:
        if self._engine is None:
            model, draws = self._request.inputs["model"], self._request.options["draws"]
            prompt_length = longest_prompt(AutoTokenizer.from_pretrained(model), self._prompts)
            completion_length = max(draw["sampling"]["max_completion_length"] for draw in draws)
            self._engine = open_engine(
                self._request.options["engine"], model, self._runtime, prompt_length + completion_length
            )
            self._loaded_at = time.monotonic()
        return self._engine.generate(requests, sampling)


class Sampler:
    """Draws the chunks of a plan: from the ledger what it has, from the engine what it lacks."""

    def __init__(
        self,
        request: Request,
        draw: dict[str, Any],
        rows: pl.DataFrame,
        engine: LazyEngine,
        reward: Reward | None,
        reporter: Reporter,
    ) -> None:
        self._seed, self._sampling = request.options["seed"], Sampling(**draw["sampling"])
        self._folder = Path(draw["ledger"])
        self._rows = {row["prompt_id"]: row for row in rows.iter_rows(named=True)}
        self._engine, self._reward, self._reporter = engine, reward, reporter
        self._known = {
            (row["prompt_id"], row["sample_index"]): row
            for row in read_samples(self._folder, rows["prompt_id"]).iter_rows(named=True)
        }
        self._writer = SegmentWriter(self._folder)
        self._cap = draw["plan"]["cap"] * len(self._rows)
        self.facts = dict.fromkeys(FACTS, 0)

    def draw(self, chunks: Sequence[Chunk]) -> list[list[Outcome]]:
        wanted = [(chunk.prompt_id, index) for chunk in chunks for index in range(chunk.start, chunk.stop)]
        self._generate([key for key in wanted if key not in self._known])
        drawn = [self._known[key] for key in wanted]
        self._count(drawn)
        outcomes = iter(self._judge(drawn))
        return [[next(outcomes) for _ in range(chunk.stop - chunk.start)] for chunk in chunks]

    def _generate(self, missing: Sequence[tuple[str, int]]) -> None:
        if not missing:
            return
        requests = [
            SampleRequest(self._rows[prompt_id]["prompt"], sample_seed(self._seed, prompt_id, index))
            for prompt_id, index in missing
        ]
        completions = self._engine.generate(requests, self._sampling)
        new = [
            _sample_row(key, request, completion)
            for key, request, completion in zip(missing, requests, completions, strict=True)
        ]
        self._writer.append(new)
        self._known |= {(row["prompt_id"], row["sample_index"]): row for row in new}
        self.facts["new_completions"] += len(new)
        self.facts["generated_tokens"] += sum(row["completion_tokens"] for row in new)

    def _count(self, drawn: Sequence[dict[str, Any]]) -> None:
        self.facts["completions"] += len(drawn)
        self.facts["completion_tokens"] += sum(row["completion_tokens"] for row in drawn)
        rate = self.facts["generated_tokens"] / max(self._engine.seconds, 1e-9)
        text = (
            f"completions, {rate:.0f} tokens/s"
            if self.facts["generated_tokens"]
            else "completions, from the ledger"
        )
        self._reporter.progress(self.facts["completions"], self._cap, text)

    def _judge(self, drawn: Sequence[dict[str, Any]]) -> list[Outcome]:
        """Without a reward nothing is decided, which a fixed plan does not need."""
        if self._reward is None:
            return [Outcome(None, row["completion_tokens"]) for row in drawn]
        prompts = [self._rows[row["prompt_id"]] for row in drawn]
        results = self._reward.results(
            prompts=[prompt["prompt"] for prompt in prompts],
            completions=[row["completion"] for row in drawn],
            solution=[prompt["solution"] for prompt in prompts],
            db_id=[prompt["db_id"] for prompt in prompts],
        )
        return [
            Outcome(
                None if result.score is None else result.status is Status.CORRECT, row["completion_tokens"]
            )
            for row, result in zip(drawn, results, strict=True)
        ]


def _sample_row(key: tuple[str, int], request: SampleRequest, completion: Completion) -> dict[str, Any]:
    prompt_id, index = key
    return {
        "prompt_id": prompt_id,
        "sample_index": index,
        "completion": completion.text,
        "completion_tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
        "truncated": completion.finish_reason == "length",
        "seed": request.seed,
    }


if __name__ == "__main__":
    run(main, __doc__)
