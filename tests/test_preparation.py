"""Stage `make_prompts`: what it refuses, removes, counts and writes down, and what enters its key."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from data.schemas import PromptTable, read_table
from data.store import ArtifactStore
from tasks.configs import ConfigError, Experiment
from tasks.console import Console
from tasks.preparation import MAKE_PROMPTS, make_prompts
from tasks.recipes import HygieneRecipe, PromptsRecipe, RacingSource, RewardSpec
from tasks.stage import Build
from tasks.tracking import TrackedRun

SHARED = Path(os.environ.get("FURLONG_SHARED_DATA") or Path(__file__).parents[1] / ".." / "shared" / "data")
LONG = "Of all the horses that are kept in the yard by the river, how many are called"


def build(folder: Path, source: Any, seed: int = 0, **hygiene: Any) -> Build:
    recipe = PromptsRecipe(source=source, hygiene=HygieneRecipe(**hygiene), max_suspect_gold_share=1.0)
    return Build(
        recipe=recipe,
        runtime=None,
        seed=seed,
        inputs={},
        experiment=Experiment(name="preparation"),
        reward=RewardSpec(),
        partial=ArtifactStore(folder).open_partial("make_prompts", "x", "k" * 64),
        run=TrackedRun("preparation", "make_prompts", {}),
        console=Console("make_prompts"),
    )


def record_of(made: Build) -> dict[str, Any]:
    return json.loads((made.payload / "sources.json").read_text())


@pytest.fixture
def table(tmp_path: Path) -> dict[str, Any]:
    """A data set with given splits in which one train and one curation question leak, beside a near-duplicate."""
    (tmp_path / "databases").mkdir()
    with closing(sqlite3.connect(tmp_path / "databases" / "yard.sqlite")) as connection:
        connection.execute("CREATE TABLE horse (id INTEGER, name TEXT)")
        connection.executemany("INSERT INTO horse VALUES (?, ?)", [(n, f"h{n}") for n in range(20)])
        connection.commit()
    rows = [
        ("train", f"{LONG} h1?"),
        ("train", "Which horses have a name that sorts before the name h3 in plain order of letters"),
        ("train", "Which horses have a name that sorts before the name h4 in plain order of letters"),
        ("train", "Which horses have a name that sorts before the name h3 in plain order of letters, please"),
        ("curation", f"Say: {LONG} h5"),
        ("curation", "Who owns jane@example.com?"),
        ("heldout", f"{LONG} h6"),
        ("heldout", "What is h7?"),
        ("curation", "Is h8 a horse?"),
    ]
    records = [
        {
            "question": text,
            "gold_sql": f"SELECT name FROM horse WHERE id = {n}",
            "db_id": "yard",
            "split": split,
        }
        for n, (split, text) in enumerate(rows)
    ]
    path = tmp_path / "yard.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    columns = {"prompt": "question", "solution": "gold_sql", "db_id": "db_id", "split": "split"}
    source = {"kind": "table", "location": str(path), "database_root": str(tmp_path / "databases")}
    return source | {"columns": columns, "licence": "CC0-1.0"}


def test_a_leak_is_refused_with_examples_and_a_way_out(tmp_path: Path, table: dict[str, Any]) -> None:
    made = build(tmp_path, table)
    with pytest.raises(ConfigError) as caught:
        make_prompts(made)
    message = str(caught.value)
    assert "2 of 9 questions leak from a held-out set: they share 13 or more consecutive words" in message
    assert f"train '{LONG} h1?' / held-out" in message and f"'Say: {LONG} h5'" in message
    assert "prompts.recipe.hygiene.on_leak to remove" in message and "leak_ngram higher" in message
    assert not list(made.payload.glob("*.parquet")) and not list(made.payload.glob("*.json"))


def test_leaks_are_removed_and_counted_on_request(tmp_path: Path, table: dict[str, Any]) -> None:
    made = build(tmp_path, table, on_leak="remove")
    facts = make_prompts(made)
    prompts = read_table(made.payload / "prompts.parquet", PromptTable)
    assert (facts["prompts.train"], facts["prompts.curation"], facts["prompts.heldout"]) == (3, 2, 2)
    assert facts["leaks_removed"] == 2
    assert (facts["near_duplicate_clusters"], facts["near_duplicate_rows"]) == (1, 2)
    assert facts["licence"] == "CC0-1.0" and facts["revision"].startswith("sha256:")
    assert all(prompt.startswith("CREATE TABLE horse") for prompt in prompts["prompt"]), (
        "the schema is in every prompt, and yet only questions were compared"
    )
    h3 = prompts.filter(pl.col("prompt").str.contains("name h3"))
    assert h3.height == 2 and h3["cluster"].n_unique() == 1 and h3["cluster"][0] == h3["prompt_id"].min()
    alone = prompts.filter(~pl.col("prompt").str.contains("name h3"))
    assert alone["cluster"].equals(alone["prompt_id"], check_names=False)
    record = record_of(made)
    assert record["leaks"]["by_source"] == {"yard.jsonl": 2}
    assert record["leaks"]["examples"][0]["words"].startswith("of all the horses that are kept in the yard")
    assert record["near_duplicates"] == {"threshold": 0.8, "clusters": 1, "rows": 2, "largest": 2}
    (source,) = record["sources"]
    assert (source["source"], source["licence"], source["rows_read"]) == ("yard.jsonl", "CC0-1.0", 9)


def test_a_longer_run_of_words_can_be_asked_for(tmp_path: Path, table: dict[str, Any]) -> None:
    facts = make_prompts(build(tmp_path, table, leak_ngram=18))
    assert facts["leaks_removed"] == 0 and facts["prompts.train"] == 4


def test_further_held_out_files_are_looked_at_too(tmp_path: Path, table: dict[str, Any]) -> None:
    other = tmp_path / "exam.csv"
    pl.DataFrame({"prompt": ["Who owns JANE@example.com ?", "Else?"]}).write_csv(other)
    made = build(tmp_path, table, on_leak="remove", heldout_files=[other])
    facts = make_prompts(made)
    assert facts["leaks_removed"] == 3 and facts["prompts.curation"] == 1
    leak = next(
        leak for leak in record_of(made)["leaks"]["examples"] if leak["heldout_id"] == "exam.csv row 1"
    )
    assert leak["split"] == "curation"


def test_a_split_that_is_all_leaks_is_refused(tmp_path: Path, table: dict[str, Any]) -> None:
    other = tmp_path / "exam.csv"
    pl.DataFrame({"prompt": ["Who owns jane@example.com?", "Is h8 a horse"]}).write_csv(other)
    with pytest.raises(ConfigError, match="all rows of curation leak into a held-out set"):
        make_prompts(build(tmp_path, table, on_leak="remove", heldout_files=[other]))


def test_nothing_personal_is_stored(tmp_path: Path, table: dict[str, Any]) -> None:
    other = tmp_path / "exam.csv"
    pl.DataFrame({"question": ["Who owns joe@example.com?"]}).write_csv(other)
    made = build(tmp_path, table, on_leak="remove", heldout_files=[other], anonymise=True)
    facts = make_prompts(made)
    assert facts["anonymised"] == 1 and record_of(made)["anonymised"] == {"EMAIL_ADDRESS": 1}
    assert facts["leaks_removed"] == 3, "the two differed in the address alone"
    for name in ("prompts.parquet", "sources.json"):
        assert b"@example" not in (made.payload / name).read_bytes()


def test_the_request_counts_files_by_content(tmp_path: Path, table: dict[str, Any]) -> None:
    exam = tmp_path / "exam.jsonl"
    exam.write_text('{"question": "a"}\n')

    def request(source: dict[str, Any] = table, **hygiene: Any) -> dict[str, Any]:
        return MAKE_PROMPTS.request(PromptsRecipe(source=source, hygiene=HygieneRecipe(**hygiene)))  # type: ignore[arg-type]

    moved = tmp_path / "elsewhere.jsonl"
    moved.write_bytes(Path(table["location"]).read_bytes())
    assert request() == request(table | {"location": str(moved)})
    before = request(heldout_files=[exam])
    exam.write_text('{"question": "b"}\n')
    assert request(heldout_files=[exam]) != before != request()
    questions = {"kind": "questions", "location": str(moved), "heldout_location": str(exam)}
    first = request(questions)
    assert str(tmp_path) not in json.dumps(first)
    exam.write_text('{"question": "c"}\n')
    assert request(questions) != first
    with pytest.raises(ConfigError, match=r"heldout_files: found no file at .*gone"):
        request(heldout_files=[tmp_path / "gone.csv"])
    with pytest.raises(ConfigError, match=r"source\.location: found no file at .*gone"):
        request(questions | {"location": str(tmp_path / "gone.jsonl")})
    with pytest.raises(ConfigError, match=r"openai/gsm8k is no \.jsonl.*needs a `revision`"):
        request(questions | {"location": "openai/gsm8k"})
    hub = request(questions | {"location": "openai/gsm8k", "heldout_location": "test", "revision": "abc"})
    assert hub["source"]["heldout_location"] == "test"


def test_the_built_in_task_is_clean(tmp_path: Path) -> None:
    made = build(tmp_path, RacingSource(train=200, curation=60, heldout=60), seed=1)
    facts = make_prompts(made)
    assert (facts["prompts.train"], facts["suspect_gold"], facts["leaks_removed"]) == (200, 0, 0)
    assert (facts["licence"], facts["revision"]) == ("Apache-2.0", "built-in")
    record = record_of(made)
    assert record["sources"][0]["rows_per_split"] == {"curation": 60, "heldout": 60, "train": 200}
    assert len(record["mistakes"]) > 30
    assert (made.payload / "databases" / "racing.sqlite").is_file()
    again = build(tmp_path / "again", RacingSource(train=200, curation=60, heldout=60), seed=1)
    make_prompts(again)
    for name in ("prompts.parquet", "sources.json"):
        assert (again.payload / name).read_bytes() == (made.payload / name).read_bytes()


def test_spider_passes_the_default_check(tmp_path: Path) -> None:
    folder = SHARED / "spider_dev"
    if not (folder / "questions.jsonl").is_file():
        pytest.skip("Spider dev is not here; set FURLONG_SHARED_DATA to the folder that holds spider_dev")
    source = {"kind": "table", "location": str(folder / "questions.jsonl"), "licence": "CC-BY-SA-4.0"}
    made = build(tmp_path, source | {"database_root": str(folder / "databases")})
    facts = make_prompts(made)
    assert facts["leaks_removed"] == 0 and facts["near_duplicate_clusters"] == 1
    assert facts["suspect_gold"] > 0, "some golds of Spider return nothing"
    assert (
        facts["prompts.train"] + facts["prompts.curation"] + facts["prompts.heldout"]
        == 634 - facts["duplicates_dropped"]
    )
