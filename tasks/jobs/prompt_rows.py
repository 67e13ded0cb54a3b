"""Reads prompt tables for jobs and puts them into TRL's conversational shape."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from data.schemas import PromptTable, read_table


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
