"""Reads prompt tables for jobs and puts them into TRL's conversational shape."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from data.schemas import PromptTable, SelectionTable, read_table


def read_prompts(payload: str, split: str) -> pl.DataFrame:
    """Rows of one split whose gold is not suspect, ordered by prompt_id.

    Raises:
        ValueError: the split is empty.
    """
    table = read_table(Path(payload) / "prompts.parquet", PromptTable)
    rows = table.filter((pl.col("split") == split) & (pl.col("gold_status") == "ok")).sort("prompt_id")
    if rows.is_empty():
        counts = dict(table.group_by("split").len().iter_rows())
        raise ValueError(f"{payload} has no usable prompts in split '{split}' (rows a split: {counts})")
    return rows


def user_message(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def assistant_message(completion: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": completion}]


def longest_prompt(tokenizer: Any, prompts: Sequence[str]) -> int:
    """Tokens of the longest prompt, rendered as a user message with the generation prompt."""
    encoded = tokenizer.apply_chat_template(
        [user_message(prompt) for prompt in prompts], add_generation_prompt=True, return_dict=True
    )
    return max(len(ids) for ids in encoded["input_ids"])


def conversational(rows: pl.DataFrame, *, with_completion: bool) -> list[dict[str, Any]]:
    """TRL rows: `prompt` (messages), optionally `completion` (messages), and the reward's columns."""
    examples = []
    for row in rows.iter_rows(named=True):
        example: dict[str, Any] = {"prompt": user_message(row["prompt"])}
        if with_completion:
            example["completion"] = assistant_message(row["completion"])
        else:
            example |= {name: row[name] for name in ("prompt_id", "solution", "db_id")}
        examples.append(example)
    return examples


def read_weights(payload: str, prompts: pl.DataFrame) -> list[float] | None:
    """The selection's weight of each prompt, in the order of `prompts`; None where all count the same."""
    path = Path(payload) / "selection.parquet"
    if not path.is_file():
        return None
    selection = read_table(path, SelectionTable).select("prompt_id", "weight")
    weights = prompts.join(selection, on="prompt_id", how="left", maintain_order="left")["weight"]
    return None if weights.null_count() or weights.n_unique() == 1 else weights.to_list()


def weighted_order(weights: Sequence[float], per_batch: int, batches: int, seed: int) -> list[int]:
    """Rows in the order of training: each batch draws `per_batch` different rows, one after the other, in proportion to
    the weights of those left. So the shares come out more even than the weights where a batch takes much of the rows.

    Raises:
        ValueError: fewer rows with a weight above 0 than one batch needs.
    """
    usable = sum(weight > 0 for weight in weights)
    if usable < per_batch:
        raise ValueError(
            f"{usable} prompts have a weight above 0; one batch needs {per_batch} different ones"
        )
    draws = np.random.default_rng(seed)
    shares = np.asarray(weights) / np.sum(weights)
    return [
        int(place)
        for _ in range(batches)
        for place in draws.choice(len(shares), size=per_batch, replace=False, p=shares)
    ]
