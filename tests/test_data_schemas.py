"""Tables: what is accepted, what is refused and how the refusal reads, and what is on disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from data import schemas
from data.schemas import (
    PromptTable,
    SampleTable,
    ScoreTable,
    SelectionTable,
    StopTable,
    TableError,
    check_table,
    read_table,
    require_demonstrations,
    write_table,
)


def prompts(**changes: list[Any]) -> pl.DataFrame:
    columns: dict[str, list[Any]] = {
        "prompt_id": ["a", "b", "c"],
        "split": ["train", "curation", "heldout"],
        "prompt": ["one?", "two, or 'three'?\nsay so", 'a "quoted" one'],
        "completion": ["```sql\nSELECT 1\n```", None, None],
        "solution": ["SELECT 1", "SELECT 2", "SELECT 3"],
        "db_id": ["racing"] * 3,
        "source": ["t"] * 3,
        "gold_status": ["ok", "ok", "suspect_gold"],
        "cluster": ["a", "a", "c"],
    }
    return pl.DataFrame(columns | changes)


def samples(**changes: list[Any]) -> pl.DataFrame:
    columns: dict[str, list[Any]] = {
        "prompt_id": ["a", "a"],
        "sample_index": [0, 1],
        "completion": ["", "text"],
        "completion_tokens": [0, 3],
        "finish_reason": ["stop", "length"],
        "truncated": [False, True],
        "seed": [0, 2**31 - 1],
    }
    return pl.DataFrame(columns | changes)


def scores(**changes: list[Any]) -> pl.DataFrame:
    columns: dict[str, list[Any]] = {
        "prompt_id": ["a", "a"],
        "sample_index": [0, 1],
        "score": [None, 0.5],
        "status": ["timeout", "correct"],
        "detail": ["", "equal"],
        "truncated": [True, False],
    }
    return pl.DataFrame(columns | changes)


def stops(**changes: list[Any]) -> pl.DataFrame:
    columns: dict[str, list[Any]] = {
        "prompt_id": ["a", "b"],
        "trials": [4, 16],
        "stop_rule": ["mixed", "cap"],
    }
    return pl.DataFrame(columns | changes)


def selection(**changes: list[Any]) -> pl.DataFrame:
    columns: dict[str, list[Any]] = {
        "prompt_id": ["a", "b"],
        "source": ["t", "t"],
        "cluster": ["a", "b"],
        "trials": [8, 8],
        "unscored": [0, 8],
        "truncated": [0, 0],
        "successes": [8, 0],
        "stop_rule": ["cap", None],
        "pass_rate": [1.0, None],
        "pass_rate_estimate": [1.0, None],
        "pass_rate_low": [0.675, None],
        "pass_rate_high": [1.0 - 1e-16, None],
        "mean_score": [1.0, None],
        "label": ["solved", "unscored"],
        "kept": [False, False],
        "reason": ["above_band", "unscored"],
        "weight": [0.0, 0.0],
    }
    return pl.DataFrame(columns | changes)


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv"])
@pytest.mark.parametrize(
    ("frame", "schema"),
    [
        (prompts(), PromptTable),
        (samples(), SampleTable),
        (scores(term_format=[1.0, None], term_empty=[None, None]), ScoreTable),
        (stops(), StopTable),
        (selection(), SelectionTable),
        (prompts(db_id=[None] * 3), PromptTable),
        (scores(score=[None, None]), ScoreTable),
        (prompts().clear(), PromptTable),
    ],
)
def test_a_table_comes_back_as_it_was_written(tmp_path: Path, ending: str, frame: Any, schema: Any) -> None:
    path = write_table(frame, tmp_path / f"table.{ending}", schema)
    assert read_table(path, schema).equals(check_table(frame, schema, "here"))
    assert os.listdir(tmp_path) == [path.name], "a partial file was left behind"


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv"])
def test_equal_content_gives_equal_bytes(tmp_path: Path, ending: str) -> None:
    whole = scores(term_b=[1, 0], term_a=[0.0, 1.0])
    pieces = pl.concat([whole[:1], whole[1:]], rechunk=False).select(reversed(whole.columns))
    first = write_table(whole, tmp_path / f"one.{ending}", ScoreTable).read_bytes()
    assert write_table(pieces, tmp_path / f"two.{ending}", ScoreTable).read_bytes() == first


@pytest.mark.parametrize(
    ("frame", "schema", "expected"),
    [
        (prompts(split=["train", "test", "dev"]), PromptTable, ["'split'", "2 of 3", "row 2: 'test'"]),
        (prompts(prompt_id=["a", "b", "a"]), PromptTable, ["'prompt_id'", "once", "row 3: 'a'"]),
        (prompts(prompt=["x", " \n", "y"]), PromptTable, ["'prompt'", "not blank", "row 2"]),
        (prompts(solution=["x", None, "y"]), PromptTable, ["'solution'", "a value", "row 2: None"]),
        (prompts(gold_status=["ok", "ok", "?"]), PromptTable, ["'gold_status'", "row 3"]),
        (prompts(answer=[1, 2, 3]), PromptTable, ["'answer' is not one of the table's"]),
        (prompts().drop("db_id"), PromptTable, ["'db_id' is missing"]),
        (prompts(db_id=[1, 2, 3]), PromptTable, ["'db_id' is Int64", "String"]),
        (prompts(cluster=["a", None, "c"]), PromptTable, ["'cluster'", "a value", "row 2: None"]),
        (prompts(db_id=["racing", " ", None]), PromptTable, ["'db_id'", "not blank", "row 2"]),
        (stops(stop_rule=["mixed", "tired"]), StopTable, ["'stop_rule'", "'tired'"]),
        (stops(prompt_id=["a", "a"]), StopTable, ["'prompt_id'", "once"]),
        (samples(sample_index=[1, 1]), SampleTable, ["prompt_id, sample_index", "row 1: 'a', 1"]),
        (samples(completion_tokens=[0, -1]), SampleTable, ["'completion_tokens'", "row 2: -1"]),
        (samples(finish_reason=["stop", "eos"]), SampleTable, ["'finish_reason'", "'eos'"]),
        (scores(score=[0.0, float("nan")]), ScoreTable, ["'score'", "finite", "row 2: nan"]),
        (scores(term_x=["a", "b"]), ScoreTable, ["'term_x' is String", "Float64"]),
        (scores(bonus=[1.0, 2.0]), ScoreTable, ["'bonus' is not one of"]),
        (selection(pass_rate=[1.2, None]), SelectionTable, ["'pass_rate'", "row 1: 1.2"]),
        (selection(successes=[9, 0]), SelectionTable, ["successes <= trials - unscored", "row 1"]),
        (
            selection(pass_rate_estimate=[0.5, None]),
            SelectionTable,
            ["pass_rate_low <= pass_rate_estimate", "row 1"],
        ),
        (selection(reason=["above_band", "dull"]), SelectionTable, ["'reason'", "'dull'"]),
        (selection(weight=[-1.0, 0.0]), SelectionTable, ["'weight'", "row 1: -1.0"]),
        (selection(label=["easy", "mixed"]), SelectionTable, ["'label'", "row 1: 'easy'"]),
    ],
)
def test_a_broken_rule_names_file_rule_and_rows(
    tmp_path: Path, frame: pl.DataFrame, schema: Any, expected: list[str]
) -> None:
    path = tmp_path / "bad.parquet"
    frame.write_parquet(path)
    with pytest.raises(TableError) as caught:
        read_table(path, schema)
    message = str(caught.value)
    assert str(path) in message
    for part in (*expected, schema.name):
        assert part in message


def test_a_refused_table_leaves_the_old_file(tmp_path: Path) -> None:
    path = write_table(prompts(), tmp_path / "p.parquet", PromptTable)
    before = path.read_bytes()
    with pytest.raises(TableError):
        write_table(prompts(split=["x"] * 3), path, PromptTable)
    assert path.read_bytes() == before


def test_many_bad_rows_are_counted_and_some_are_shown() -> None:
    frame = pl.concat([samples(prompt_id=[f"{n}", f"{n}"], finish_reason=["?", "?"]) for n in range(50)])
    with pytest.raises(TableError, match=r"100 of 100 rows differ .*and 95 more") as caught:
        check_table(frame, SampleTable, "here")
    assert len(str(caught.value)) < 700


def test_ids_that_look_like_numbers_stay_text(tmp_path: Path) -> None:
    path = write_table(samples(prompt_id=["007", "7e3"]), tmp_path / "s.csv", SampleTable)
    assert read_table(path, SampleTable)["prompt_id"].to_list() == ["007", "7e3"]


@pytest.mark.parametrize("name", ["gone.parquet", "torn.parquet", "torn.jsonl", "kind.xlsx"])
def test_unreadable_files_say_so(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if not name.startswith("gone"):
        path.write_text('{"prompt_id": "a", ')
    with pytest.raises(TableError, match=name):
        read_table(path, PromptTable)


def test_demonstrations_are_required_of_train_alone() -> None:
    require_demonstrations(prompts(), "here")
    with pytest.raises(TableError, match=r"here: 1 of 1 prompts of split 'train' have no completion \(a\)"):
        require_demonstrations(prompts(completion=[None] * 3), "here")
    with pytest.raises(TableError, match="the split is empty"):
        require_demonstrations(prompts().filter(pl.col("split") != "train"), "here")


def test_column_types_are_polars_types() -> None:
    assert schemas.column_types(ScoreTable)["score"] == pl.Float64
    assert all(not name.startswith("^") for name in schemas.column_types(ScoreTable))
