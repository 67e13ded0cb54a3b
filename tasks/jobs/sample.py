"""Job: draw completions for one split of prompts, shard by shard.

Each finished shard is a file in the work folder under a name made of everything that decides its content, so
a job that was killed generates only what is missing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import polars as pl
from transformers import AutoTokenizer

from data.artifacts import stable_hash
from data.schemas import SampleTable, write_table
from tasks.jobs.engines import Draw, GenerationEngine, open_engine
from tasks.jobs.prompt_rows import longest_prompt, read_prompts
from tasks.jobs.protocol import Reporter, Request, run
from tasks.recipes import SamplingRuntime


def main(request: Request) -> None:
    runtime = SamplingRuntime.model_validate(request.runtime)
    draws = [Draw(**draw) for draw in request.options["draws"]]
    rows = read_prompts(request.inputs["prompts"], request.options["split"])
    reporter = Reporter(request)
    total = sum(draw.n for draw in draws) * len(rows)
    reporter.progress(0, total, "loading the model")
    longest = max(draw.max_completion_length for draw in draws)
    context = _context(request.inputs["model"], rows["prompt"].to_list(), longest)
    engine = open_engine(request.options["engine"], request.inputs["model"], runtime, context)
    done = generated = new = 0
    started = time.monotonic()
    for draw in draws:
        shards = []
        for shard in rows.iter_slices(request.options["shard_size"]):
            table, was_there = _shard(engine, shard, draw, request)
            shards.append(table)
            tokens = int(table["completion_tokens"].sum())
            done, generated, new = done + len(table), generated + tokens, new + (0 if was_there else tokens)
            rate = new / max(time.monotonic() - started, 1e-9)
            reporter.progress(done, total, f"completions, {rate:.0f} tokens/s")
        table = pl.concat(shards).sort("prompt_id", "sample_index")
        write_table(table, Path(request.payload) / f"{draw.name}.parquet", SampleTable)
    seconds = time.monotonic() - started
    reporter.result({"generated_tokens": generated, "tokens_per_second": new / seconds, "completions": done})


def _context(model: str, prompts: Sequence[str], completion: int) -> int:
    """Tokens that the longest prompt and its completion may take together."""
    return longest_prompt(AutoTokenizer.from_pretrained(model), prompts) + completion


def _shard(
    engine: GenerationEngine, shard: pl.DataFrame, draw: Draw, request: Request
) -> tuple[pl.DataFrame, bool]:
    identity = stable_hash(
        {
            "prompts": shard["prompt_id"].to_list(),
            "draw": vars(draw),
            "seed": request.seed,
            "model": request.options["model_digest"],
        }
    )
    path = Path(request.work) / f"{draw.name}-{identity[:16]}.parquet"
    if path.is_file():
        return pl.read_parquet(path), True
    groups = engine.generate(shard["prompt"].to_list(), draw, seed=int(identity[:12], 16) % 2**31)
    table = pl.DataFrame(
        [
            {
                "prompt_id": prompt_id,
                "sample_index": index,
                "completion": completion.text,
                "completion_tokens": completion.tokens,
                "finish_reason": completion.finish_reason,
            }
            for prompt_id, group in zip(shard["prompt_id"], groups, strict=True)
            for index, completion in enumerate(group)
        ]
    )
    write_table(table, path, SampleTable)
    return table, False


if __name__ == "__main__":
    run(main, __doc__)
