"""Part `scale`: seconds and memory of scoring and selecting 10^4, 10^5 and 10^6 stored samples.

The samples are made up of real ones: the config's curation prompts are copied until there are enough, each copy draws 8 of
its prompt's real completions, so texts repeat within a prompt as they really do. Each copy's gold is spelt differently
(another LIMIT that cuts nothing), because a million samples of 125,000 prompts have as many golds, and a gold that was
met before costs nothing. The tables are written chunk by chunk. Memory is the resident memory of the child that runs
the stages, of its reward workers, and of Prefect's embedded server, which it starts too; pages that they share are
counted in each.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pyarrow.parquet as pq

from benchmarks.curation_runs import REPOSITORY, Options, curate, fixed, say, scratch, seal
from data.schemas import PromptTable, SampleTable, StopTable, check_table, column_types, write_table

SAMPLES = 8
PROMPTS_AT_ONCE = 10_000
POLL_SECONDS = 0.1
GIB = 1 << 30
MILLION = 1_000_000
_LIMIT = re.compile(r"\bLIMIT (\d+)\s*$")


def run(options: Options) -> dict[str, Any]:
    cap = options.experiment.sample.recipe.max_samples
    with options.pipeline(options.seed, fixed(cap)) as pipeline:
        curated = curate(pipeline)
    prompts = pl.read_parquet(curated.prompts.payload / "prompts.parquet")
    pool = Pool(prompts, pl.read_parquet(curated.samples.payload / "samples.parquet"), options.seed)
    sizes = []
    for total in options.sizes.scales:
        with scratch(f"scale-{total}") as folder:
            say(f"scale: {total:,} samples")
            made = write_artifacts(pool, total // SAMPLES, curated.prompts.payload / "databases", folder)
            sizes.append({"samples": total, **made, **measure(options, folder)})
    for before, after in pairwise(sizes):
        after["growth"] = {
            name: after[name] / before[name] for name in ("score_seconds", "select_seconds", "peak_gib")
        }
    million = next((size["peak_gib"] for size in sizes if size["samples"] == MILLION), None)
    return {"seed": options.seed, "cores": os.cpu_count(), "peak_gib_at_1e6": million, "sizes": sizes}


class Pool:
    """Real prompts and their real completions, to copy from."""

    def __init__(self, prompts: pl.DataFrame, samples: pl.DataFrame, seed: int) -> None:
        usable = prompts.filter(pl.col("prompt_id").is_in(samples["prompt_id"].unique().implode()))
        self.prompts = usable.sort("prompt_id").to_dicts()
        self.completions: dict[str, list[dict[str, Any]]] = {}
        for row in samples.iter_rows(named=True):
            self.completions.setdefault(row["prompt_id"], []).append(row)
        self._draws = random.Random(f"scale {seed}")

    def copies(self, count: int) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """`count` prompts with their samples, in the order of their ids: each prompt once before any comes again."""
        for number in range(count):
            copy, place = divmod(number, len(self.prompts))
            prompt = self.prompts[place]
            identity = f"{copy:06}-{prompt['prompt_id']}"
            gold = spelt_anew(prompt["solution"], copy)
            yield (
                {**prompt, "prompt_id": identity, "cluster": identity, "solution": gold},
                self._samples(identity, prompt["prompt_id"]),
            )

    def _samples(self, identity: str, prompt_id: str) -> list[dict[str, Any]]:
        real = self.completions[prompt_id]
        drawn = (
            self._draws.sample(real, SAMPLES)
            if len(real) >= SAMPLES
            else self._draws.choices(real, k=SAMPLES)
        )
        return [{**row, "prompt_id": identity, "sample_index": index} for index, row in enumerate(drawn)]


def spelt_anew(gold: str, copy: int) -> str:
    """The same query with another text: `LIMIT 3` becomes `LIMIT 3 + 0 * 7`, and no limit a huge one."""
    text = gold.rstrip().rstrip(";")
    limited = _LIMIT.sub(rf"LIMIT \1 + 0 * {copy}", text)
    return limited if limited != text else f"{text} LIMIT {10**6 + copy}"


def write_artifacts(pool: Pool, count: int, databases: Path, folder: Path) -> dict[str, int]:
    """`prompts/payload` and `samples/payload` below `folder`, as the stages would leave them."""
    prompts, samples = folder / "prompts" / "payload", folder / "samples" / "payload"
    samples.mkdir(parents=True)
    shutil.copytree(databases, prompts / "databases")
    copied, written, distinct = [], 0, 0
    writer: pq.ParquetWriter | None = None
    chunk: list[dict[str, Any]] = []
    for number, (prompt, rows) in enumerate(pool.copies(count), start=1):
        copied.append(prompt)
        chunk += rows
        distinct += len({row["completion"] for row in rows})
        if number % PROMPTS_AT_ONCE == 0 or number == count:
            frame = pl.DataFrame(chunk, schema=column_types(SampleTable))
            table = check_table(frame, SampleTable, "synthetic samples").to_arrow()
            if writer is None:
                writer = pq.ParquetWriter(samples / "samples.parquet", table.schema, compression="zstd")
            writer.write_table(table)
            written += len(chunk)
            chunk = []
    if writer is not None:
        writer.close()
    frame = pl.DataFrame(copied, schema=column_types(PromptTable))
    write_table(frame, prompts / "prompts.parquet", PromptTable)
    ids = {"prompt_id": frame["prompt_id"]}
    stops = pl.DataFrame(ids).with_columns(trials=pl.lit(SAMPLES), stop_rule=pl.lit("fixed"))
    write_table(stops, samples / "stops.parquet", StopTable)
    seal(prompts.parent, "prompts", {})
    seal(samples.parent, "samples", {"first_samples": SAMPLES})
    return {
        "prompts": count,
        "written": written,
        "distinct_texts": distinct,
        "golds": frame["solution"].n_unique(),
    }


def measure(options: Options, folder: Path) -> dict[str, Any]:
    """Score and select in a child; its seconds, its memory and that of the processes below it."""
    request = {
        "config": options.config,
        "overrides": options.overrides,
        "seed": options.seed,
        "prompts": str(folder / "prompts"),
        "samples": str(folder / "samples"),
        "reward": None,
        "select": True,
    }
    output = folder / "answer.json"
    (folder / "request.json").write_text(json.dumps({**request, "answer": str(output)}))
    command = [sys.executable, "-m", "benchmarks.curation_score_child", str(folder / "request.json")]
    started = time.monotonic()
    child = subprocess.Popen(command, cwd=REPOSITORY, stdout=sys.stderr)
    peaks = watch(child)
    if child.returncode:
        raise RuntimeError(
            f"the child that scores {folder} exited with {child.returncode}; its error is above"
        )
    seconds = time.monotonic() - started
    answer = json.loads(output.read_text())
    shutil.rmtree(answer["scores"])
    shutil.rmtree(answer["selection"])
    parts = {"stages": answer["peak_bytes"], **peaks}
    return {
        "score_seconds": answer["score_seconds"],
        "select_seconds": answer["select_seconds"],
        "wall_seconds": round(seconds, 1),
        "pairs_per_second": answer["scored"] / answer["score_seconds"],
        "kept": answer["kept"],
        "status": answer["status"],
        "peak_gib": sum(parts.values()) / GIB,
        "peak_gib_parts": {name: value / GIB for name, value in parts.items()},
    }


def watch(child: subprocess.Popen[Any]) -> dict[str, int]:
    """Largest resident memory, in bytes, of the reward workers together and of all other processes below the child."""
    peaks = {"reward_workers": 0, "prefect_server": 0}
    root = psutil.Process(child.pid)
    while child.poll() is None:
        now = dict.fromkeys(peaks, 0)
        try:
            below = root.children(recursive=True)
        except psutil.NoSuchProcess:
            break
        for process in below:
            try:
                worker = any("deadline_worker" in part for part in process.cmdline())
                now["reward_workers" if worker else "prefect_server"] += process.memory_info().rss
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        peaks = {name: max(peaks[name], now[name]) for name in peaks}
        time.sleep(POLL_SECONDS)
    child.wait()
    return peaks


def headlines(result: dict[str, Any]) -> dict[str, float | None]:
    return {"peak_gib_at_1e6": result["peak_gib_at_1e6"]}


def lines(result: dict[str, Any]) -> list[str]:
    rows = [
        f"  {'samples':>10}{'score s':>9}{'pairs/s':>9}{'select s':>9}{'peak GiB':>9}   stages, workers, Prefect   growth: score, select, memory"
    ]
    for size in result["sizes"]:
        parts = ", ".join(f"{value:.2f}" for value in size["peak_gib_parts"].values())
        growth = ", ".join(f"{value:.1f}" for value in size.get("growth", {}).values())
        rows.append(
            f"  {size['samples']:>10,}{size['score_seconds']:>9.1f}{size['pairs_per_second']:>9,.0f}"
            f"{size['select_seconds']:>9.1f}{size['peak_gib']:>9.2f}   {parts:<26} {growth}"
        )
    texts = ", ".join(f"{size['distinct_texts'] / size['written']:.0%}" for size in result["sizes"])
    return [
        *rows,
        f"  8 samples a prompt, each with a gold of its own; texts that are new to their prompt: {texts}",
    ]
