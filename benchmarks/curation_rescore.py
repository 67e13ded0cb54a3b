"""Part `rescore`: stored samples scored by the reward with other weights, against the public test-suite evaluator.

Ours is the whole stage in a fresh process: read, judge, write, commit. The peer (taoyds/test-suite-sql-eval) judges a
random part of the same pairs, from the SQL that our reward extracts; a pair without SQL costs it nothing. It is one
process, as its own script is; ours uses a worker for each core. Two rates each: over all samples as they were drawn,
and over pairs of gold and completion that occur once.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from pathlib import Path
from statistics import median
from typing import Any

import polars as pl

from benchmarks.curation_runs import (
    Options,
    call_module,
    facts_of,
    fast_engine,
    fixed,
    per_prompt,
    say,
    scratch,
    seal,
    warm_start,
)
from data.artifacts import ArtifactRef
from data.schemas import SampleTable, write_table
from rewards.sql_text import extract_answer
from tasks.sampling import SAMPLE_COMPLETIONS

REWARD = {"name": "text2sql_v1", "params": {"weights": [0.05, 0.9, 0.05]}}
PEER_LIMIT_SECONDS = 600.0


def run(options: Options) -> dict[str, Any]:
    prompts, samples = stored_samples(options)
    pairs = read_pairs(prompts, samples)
    with scratch("rescore") as folder:
        once = folder / "once"
        write_table(distinct_samples(samples), once / "payload" / "samples.parquet", SampleTable)
        seal(once, "samples", {})
        ours = {
            "all": rescore(options, prompts, Path(samples.path), folder),
            "unique": rescore(options, prompts, once, folder),
        }
        peer = None
        if options.peer is not None:
            verdicts = folder / f"{Path(samples.path).name}.parquet"
            peer = judge_by_peer(options, prompts, pairs, verdicts, folder)
    result = {
        "seed": options.seed,
        "cores": os.cpu_count(),
        "samples": len(pairs),
        "newly_drawn": facts_of(samples).get("new_completions"),
        "engine": fast_engine(options),
        "unique": int(pairs.select(pl.struct("prompt_id", "completion").n_unique()).item()),
        "without_sql_share": pairs["sql"].null_count() / len(pairs),
        "reward": REWARD,
        "ours": ours,
        "peer": peer,
        "rescore_ratio": None,
    }
    if peer is not None:
        ratios = {name: ours[name]["rate"] / peer[name]["rate"] for name in ("all", "unique")}
        result |= {"rescore_ratio": ratios["all"], "ratios": ratios}
    return result


def stored_samples(options: Options) -> tuple[ArtifactRef, ArtifactRef]:
    """Prompts, and at least `sizes.rescored` real completions of them."""
    with options.pipeline(options.seed) as pipeline:
        prompts, _ = warm_start(pipeline)
    count = per_prompt(options.sizes.rescored, curation_prompts(prompts))
    say(f"rescore: {count} completions of every prompt by {fast_engine(options)}, unless they exist")
    with options.pipeline(options.seed, fixed(count, fast_engine(options))) as pipeline:
        prompts, policy = warm_start(pipeline)
        sample = pipeline.experiment.sample
        return prompts, pipeline.stage(SAMPLE_COMPLETIONS, sample, model=policy, prompts=prompts)


def curation_prompts(prompts: ArtifactRef) -> int:
    usable = (pl.col("split") == "curation") & (pl.col("gold_status") == "ok")
    return pl.scan_parquet(prompts.payload / "prompts.parquet").filter(usable).collect().height


def read_pairs(prompts: ArtifactRef, samples: ArtifactRef) -> pl.DataFrame:
    """`prompt_id`, `sample_index`, `completion`, `gold`, `db_id`, and `sql`, null where a completion answers with none."""
    golds = pl.read_parquet(prompts.payload / "prompts.parquet").select(
        "prompt_id", "db_id", pl.col("solution").alias("gold")
    )
    table = pl.read_parquet(samples.payload / "samples.parquet").join(
        golds, on="prompt_id", maintain_order="left"
    )
    sql = [extract_answer(text).sql for text in table["completion"]]
    return table.select(
        "prompt_id", "sample_index", "completion", "gold", "db_id", pl.Series("sql", sql, dtype=pl.String)
    )


def distinct_samples(samples: ArtifactRef) -> pl.DataFrame:
    """The samples with each text of a prompt once."""
    table = pl.read_parquet(samples.payload / "samples.parquet")
    return table.unique(["prompt_id", "completion"], keep="first", maintain_order=True)


def rescore(options: Options, prompts: ArtifactRef, samples: Path, folder: Path) -> dict[str, Any]:
    """Median over fresh processes of the stage's pairs a second; a job that starts fails the benchmark."""
    request = {
        "config": options.config,
        "overrides": options.overrides,
        "seed": options.seed,
        "prompts": prompts.path,
        "samples": str(samples),
        "reward": REWARD,
        "select": False,
    }
    rates = []
    for repeat in range(options.sizes.repeats):
        say(f"rescore, run {repeat + 1} of {options.sizes.repeats}: {samples}")
        answer = call_module("benchmarks.curation_score_child", request, folder)
        rates.append(answer["scored"] / answer["score_seconds"])
    shutil.copy(Path(answer["scores"]) / "payload" / "scores.parquet", folder / f"{samples.name}.parquet")
    shutil.rmtree(answer["scores"])  # what only a benchmark asks for does not stay in the home
    return {"pairs": answer["scored"], "rate": median(rates), "rates": rates, "status": answer["status"]}


def judge_by_peer(
    options: Options, prompts: ArtifactRef, pairs: pl.DataFrame, verdicts: Path, folder: Path
) -> dict[str, Any]:
    """Rates of the peer on a random part: with duplicates, without, and with its option --keep_distinct.

    `verdicts`: our scores of the same samples, for the share of pairs on which both agree.
    """
    status = pl.read_parquet(verdicts, columns=["prompt_id", "sample_index", "status"])
    pairs = pairs.join(status, on=["prompt_id", "sample_index"], maintain_order="left")
    once = pairs.unique(["prompt_id", "completion"], keep="first", maintain_order=True)
    draws = random.Random(options.seed)

    def drawn(table: pl.DataFrame) -> pl.DataFrame:
        return table[sorted(draws.sample(range(len(table)), min(options.sizes.peer_pairs, len(table))))]

    mixed = with_databases(drawn(pairs), prompts, folder / "databases")
    unique = with_databases(drawn(once), prompts, folder / "databases")
    return {
        "all": run_peer(options, mixed, folder, keep_distinct=False),
        "unique": run_peer(options, unique, folder, keep_distinct=False),
        "all_keep_distinct": run_peer(options, mixed, folder, keep_distinct=True),
    }


def with_databases(pairs: pl.DataFrame, prompts: ArtifactRef, copies: Path) -> pl.DataFrame:
    """`pairs` with `database`: the path of a copy that is alone in its folder."""
    paths = {}
    for name in pairs["db_id"].unique():
        source = next((prompts.payload / "databases").rglob(f"{name}.sqlite"))
        paths[name] = copies / name / source.name
        paths[name].parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, paths[name])
    return pairs.with_columns(
        pl.Series("database", [str(paths[name]) for name in pairs["db_id"]], dtype=pl.String)
    )


def run_peer(options: Options, pairs: pl.DataFrame, folder: Path, *, keep_distinct: bool) -> dict[str, Any]:
    """Pairs a second of the peer, without its start."""
    say(f"rescore: the peer judges {len(pairs)} pairs")
    asked = pairs.filter(pl.col("sql").is_not_null())
    asked.write_ndjson(folder / "pairs.jsonl")
    request = {
        "checkout": str(options.peer),
        "pairs": str(folder / "pairs.jsonl"),
        "keep_distinct": keep_distinct,
        "verdicts": str(folder / "verdicts.txt"),
    }
    (folder / "peer.json").write_text(json.dumps(request))
    program = Path(__file__).with_name("curation_peer.py")
    try:
        command = [options.peer_python, str(program), str(folder / "peer.json")]
        subprocess.run(
            command, check=True, timeout=PEER_LIMIT_SECONDS, cwd=options.peer, stdout=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        say(f"rescore: the peer was ended after {PEER_LIMIT_SECONDS:.0f} s")
    judged = [line.split() for line in (folder / "verdicts.txt").read_text().splitlines()]
    seconds = sum(float(spent) for _, spent in judged)
    finished = len(judged) == len(asked)
    done = len(pairs) if finished else len(judged)  # pairs without SQL cost it nothing
    ours = [status == "correct" for status in asked["status"][: len(judged)]]
    agreed = sum((verdict == "1") is right for (verdict, _), right in zip(judged, ours, strict=True))
    return {
        "pairs": done,
        "seconds": round(seconds, 3),
        "rate": done / max(seconds, 1e-9),
        "finished": finished,
        "errors": sum(verdict == "error" for verdict, _ in judged),
        "agreement": agreed / max(len(judged), 1),
    }


def headlines(result: dict[str, Any]) -> dict[str, float | None]:
    return {"rescore_ratio": result["rescore_ratio"]}


def lines(result: dict[str, Any]) -> list[str]:
    rows = [
        f"  {result['samples']:,} stored samples of engine {result['engine']}, {result['unique']:,} unique, "
        f"{result['without_sql_share']:.1%} without SQL; no job started; {result['cores']} cores"
    ]
    for name in ("all", "unique"):
        ours = result["ours"][name]
        rows.append(f"  ours, {name:<7}{ours['pairs']:>9,} pairs {ours['rate']:>10,.0f} pairs/s")
        if result["peer"]:
            peer = result["peer"][name]
            rows.append(
                f"  peer, {name:<7}{peer['pairs']:>9,} pairs {peer['rate']:>10,.0f} pairs/s   "
                f"ratio {result['ratios'][name]:.1f}, verdicts agree on {peer['agreement']:.1%}{'' if peer['finished'] else ' (ended early)'}"
            )
    if result["peer"]:
        other = result["peer"]["all_keep_distinct"]
        rows.append(f"  peer with --keep_distinct: {other['rate']:,.0f} pairs/s")
    else:
        rows.append("  no peer: give --peer the path of a checkout of taoyds/test-suite-sql-eval")
    return rows
