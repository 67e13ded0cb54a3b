"""Outside data sets: reading, folding duplicates, splits without leaks, databases."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import types
from contextlib import closing
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from data.content import check_disjoint, fenced, normalise_prompt, normalise_sql, prompt_id, words_of
from data.hygiene import leaks_of_table
from data.schemas import TableError
from data.sources import load_prompts
from data.sql_databases import copy_databases, find_database, read_schema_text

COLUMNS = {"prompt": "question", "solution": "gold_sql", "db_id": "db_id"}
SHARED = Path(os.environ.get("FURLONG_SHARED_DATA") or Path(__file__).parents[1] / ".." / "shared" / "data")


@pytest.fixture
def databases(tmp_path: Path) -> Path:
    root = tmp_path / "databases"
    (root / "deep").mkdir(parents=True)
    for path, name in ((root / "flat.sqlite", "horse"), (root / "deep" / "deep.sqlite", "race")):
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(f"CREATE TABLE {name} (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT)")
            connection.execute(f"INSERT INTO {name} (name) VALUES ('x')")
            connection.commit()
    return root


def rows(count: int, db_id: str = "flat") -> list[dict[str, Any]]:
    return [
        {"question": f"Who is {n}?", "gold_sql": f"SELECT {n} FROM horse", "db_id": db_id}
        for n in range(count)
    ]


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    "texts",
    [
        ("What is 2+2 ?", "what is  2 + 2?", "What is 2 + 2?"),  # the case of duplicate votes
        ("Name  the\thorse.", "name the horse", "NAME THE HORSE !"),
        ("the horse\u2019s owner", "The horse's owner?"),
        ("3 \u2212 1", "3 - 1"),
        ("stra\u00dfe", "STRASSE"),
        ("cafe\u0301", "caf\u00e9"),
        ("who won\u00a0it?\u200b", "Who won it"),
    ],
)
def test_texts_that_ask_the_same(texts: tuple[str, ...]) -> None:
    assert len({normalise_prompt(text) for text in texts}) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is 2 - 2?", "What is 2 + 2?"),
        ("Is a > b?", "Is a >= b?"),
        ("Horses older than 3", "Horses older than 4"),
        ("What is 3!", "What is 3"),
        ("What is n!", "What is n"),
        ("at 1.5 or more", "at 15 or more"),
        ("a_b", "a b"),
        ("x\u00b2", "x2"),
        ("1 000", "1000"),
    ],
)
def test_texts_that_differ(one: str, other: str) -> None:
    assert normalise_prompt(one) != normalise_prompt(other)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("What is 2 - 2?", ["what", "is", "2", "-", "2"]),
        ("He won $1,000.50, or 20%.", ["he", "won", "$1,000.50", "or", "20%"]),
        ("On 2024-06-13, whose horse's well-known?", ["on", "2024-06-13", "whose", "horse's", "well-known"]),
        ("3! (x)", ["3", "!", "(", "x", ")"]),
        ("?", []),
    ],
)
def test_words_are_numbers_operators_and_words_without_sentence_marks(text: str, words: list[str]) -> None:
    assert words_of(text) == words


@pytest.mark.parametrize("text", ["What is 2+2 ?", "3 - - 1 !", "a ,  b", "( x ) ? !"])
def test_normalising_twice_changes_nothing(text: str) -> None:
    assert normalise_prompt(normalise_prompt(text)) == normalise_prompt(text)


def test_sql_is_folded_outside_quotes_only() -> None:
    same = ("SELECT a , b FROM t WHERE x = 'A b' ;", "select a,b\nfrom T where X='A b'")
    assert len({normalise_sql(text) for text in same}) == 1
    for one, other in (
        ("SELECT 'A'", "SELECT 'a'"),
        ("SELECT 'a b'", "SELECT 'a  b'"),
        ("SELECT 'it''s ;'", "SELECT 'it''s'"),
        ("SELECT a - b", "SELECT a + b"),
        ("SELECT a >= 1", "SELECT a > 1"),
    ):
        assert normalise_sql(one) != normalise_sql(other)


def test_prompt_ids_follow_the_content() -> None:
    assert prompt_id("d", "p", "s") == "53f74835f52e7f51"  # printf '["d","p","s"]' | sha256sum
    assert len({prompt_id("d", "p", "s"), prompt_id("dp", "", "s"), prompt_id("d", "p", "S")}) == 3
    assert prompt_id(None, "p", "s") == "46d1fb4fb858038a"  # printf '["","p","s"]' | sha256sum


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_all_kinds_of_file_give_the_same_table(tmp_path: Path, databases: Path, ending: str) -> None:
    path = tmp_path / f"set.{ending}"
    if ending == "jsonl":
        write(path, rows(40))
    else:
        getattr(pl.DataFrame(rows(40)), f"write_{ending}")(path)
    loaded = load_prompts(path, databases=databases, columns=COLUMNS, seed=3, licence="MIT", name="made up")
    frame, (report,) = loaded.table, loaded.reports
    assert loaded.questions == frame["prompt"].to_list(), "without a template the prompt is the question"
    assert frame["cluster"].equals(frame["prompt_id"], check_names=False)
    assert report.rows_per_split == {"train": 32, "curation": 4, "heldout": 4}
    assert report.licence == "MIT"
    assert report.revision.startswith("sha256:")
    assert report.source == path.name, "the report names no folder of this machine"
    assert json.loads(json.dumps(report.as_dict()))["rows_read"] == 40
    again = load_prompts(
        write(tmp_path / "b.jsonl", rows(40)), databases=databases, columns=COLUMNS, seed=3, name="made up"
    )
    assert frame.equals(again.table)
    train = frame.filter(pl.col("split") == "train")
    assert train["completion"].to_list() == [fenced(text) for text in train["solution"]]
    assert frame.filter(pl.col("split") != "train")["completion"].null_count() == 8


def test_duplicates_collapse_and_paraphrases_stay_together(tmp_path: Path, databases: Path) -> None:
    records = []
    for n in range(30):
        gold = {"gold_sql": f"SELECT {n}", "db_id": "flat"}
        records += [
            {"question": f"Give {n} + 1 ?"} | gold,
            {"question": f"give {n}+1"} | gold,
            {"question": f"Show number {n}"} | gold | {"gold_sql": f"select  {n};"},
        ]
    records.append({"question": "Show number 0.", "gold_sql": "SELECT 99", "db_id": "flat"})
    path = write(tmp_path / "set.jsonl", records)
    for seed in range(5):
        shares = {"train": 0.5, "curation": 0.25, "heldout": 0.25}
        loaded = load_prompts(path, databases=databases, columns=COLUMNS, seed=seed, shares=shares)
        frame, (report,) = loaded.table, loaded.reports
        assert (report.rows_read, report.duplicates_dropped, report.conflicting_golds) == (91, 31, 1)
        assert frame.height == 60
        sizes = report.rows_per_split
        assert abs(sizes["train"] - 30) <= 2
        assert abs(sizes["heldout"] - 15) <= 2
        splits = frame.with_columns(pl.col("solution").map_elements(normalise_sql, return_dtype=pl.String))
        assert splits.group_by("solution").agg(pl.col("split").n_unique())["split"].max() == 1
        check_disjoint(frame)


def test_given_splits_are_kept_and_leaks_leave_the_training_side(tmp_path: Path, databases: Path) -> None:
    gold = {"db_id": "flat", "demo": "because"}
    records = [
        {"question": "What is 2+2 ?", "gold_sql": "SELECT 4", "part": "train"} | gold,
        {"question": "what is  2 + 2?", "gold_sql": "SELECT 4", "part": "train"} | gold,
        {"question": "Two and two?", "gold_sql": "select 4", "part": "curation"} | gold,
        {"question": "What is 2 - 2?", "gold_sql": "SELECT 0", "part": "train"} | gold,
        {"question": "What is 2 + 2?", "gold_sql": "SELECT 4", "part": "heldout"} | gold,
    ]
    columns = COLUMNS | {"split": "part", "completion": "demo"}
    loaded = load_prompts(write(tmp_path / "s.jsonl", records), databases=databases, columns=columns, seed=0)
    frame, (report,) = loaded.table, loaded.reports
    kept = frame.select("split", "prompt", "completion").rows()
    assert kept == [("train", "What is 2 - 2?", "because"), ("heldout", "What is 2 + 2?", None)]
    assert report.overlaps_removed == 3
    assert "What is 2+2 ?" in report.examples


def test_check_disjoint_shows_what_leaks() -> None:
    base = {"db_id": "d", "source": "s"}
    same_prompt = [
        {"split": "train", "prompt": "What is 2+2 ?", "solution": "SELECT 1"} | base,
        {"split": "heldout", "prompt": "what is  2 + 2?", "solution": "SELECT 2"} | base,
    ]
    with pytest.raises(TableError, match=r"1 prompts of train and heldout are equal, such as 'what is"):
        check_disjoint(pl.DataFrame(same_prompt))
    same_gold = [same_prompt[0], same_prompt[1] | {"prompt": "Other", "solution": "select 1;"}]
    with pytest.raises(TableError, match="1 solutions of train and heldout"):
        check_disjoint(pl.DataFrame(same_gold))
    check_disjoint(pl.DataFrame([same_prompt[0], same_prompt[1] | {"db_id": "e", "solution": "SELECT 1"}]))
    check_disjoint(pl.DataFrame([row | {"split": "train"} for row in same_prompt]))
    operators = [same_prompt[0], same_prompt[1] | {"prompt": "What is 2 - 2?"}]
    check_disjoint(pl.DataFrame(operators))
    answers = [row | {"db_id": None, "solution": "42"} for row in operators]
    check_disjoint(pl.DataFrame(answers))  # without a database, equal golds say nothing
    with pytest.raises(TableError, match="1 prompts of train and heldout"):
        check_disjoint(pl.DataFrame([row | {"db_id": None} for row in same_prompt]))


def test_the_prompt_template_gets_question_and_schema(tmp_path: Path, databases: Path) -> None:
    records = [{"question": "Who {schema} is it?", "gold_sql": "SELECT 1", "db_id": "deep"}]
    loaded = load_prompts(
        write(tmp_path / "s.jsonl", records),
        databases=databases,
        columns=COLUMNS,
        seed=0,
        prompt_template="{schema}\n-- {question} as { JSON }",
    )
    assert loaded.questions == ["Who {schema} is it?"]
    prompt = loaded.table["prompt"][0]
    assert prompt.startswith("CREATE TABLE race (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT);")
    assert prompt.endswith("-- Who {schema} is it? as { JSON }")
    assert "sqlite_sequence" not in prompt
    for bad in ("no question", "{question} {schemas}"):
        with pytest.raises(ValueError, match="template uses"):
            load_prompts("x.jsonl", databases=databases, columns=COLUMNS, seed=0, prompt_template=bad)


def test_bad_data_is_named(tmp_path: Path, databases: Path) -> None:
    def load(records: list[dict[str, Any]], **kwargs: Any) -> None:
        options = {"databases": databases, "columns": COLUMNS, "seed": 0} | kwargs
        load_prompts(write(tmp_path / "bad.jsonl", records), **options)

    with pytest.raises(
        TableError, match=r"bad\.jsonl: column 'gold_sql' is blank in 1 of 3 rows \(rows \[3\]"
    ):
        load([*rows(2), rows(1)[0] | {"gold_sql": " "}])
    with pytest.raises(TableError, match=r"columns \['sql'\] are missing; found"):
        load(rows(2), columns=COLUMNS | {"solution": "sql"})
    with pytest.raises(TableError, match=r"found neither .*absent\.sqlite"):
        load(rows(2, db_id="absent"))
    with pytest.raises(TableError, match="expected a plain name"):
        load(rows(2, db_id="../flat"))
    with pytest.raises(TableError, match=r"found 'dev' \(rows \[1, 2\]\)"):
        load([row | {"part": "dev"} for row in rows(2)], columns=COLUMNS | {"split": "part"})
    with pytest.raises(ValueError, match="add up to 1"):
        load(rows(2), shares={"train": 0.5})
    with pytest.raises(ValueError, match=r"lacks \['db_id'\]"):
        load(rows(2), columns={"prompt": "question", "solution": "gold_sql"})
    with pytest.raises(TableError, match="found no file"):
        load_prompts(tmp_path / "gone.csv", databases=databases, columns=COLUMNS, seed=0)
    (databases / "torn.sqlite").write_bytes(b"not a database at all, but long enough to be read")
    with pytest.raises(TableError, match="could not be read as SQLite"):
        load(rows(1, db_id="torn"))


def test_a_hub_data_set_needs_a_revision_and_is_asked_for_it(
    databases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load_dataset(name: str, **kwargs: Any) -> Any:
        asked.append((name, kwargs))
        info = types.SimpleNamespace(license="cc-by-4.0")
        return types.SimpleNamespace(to_polars=lambda: pl.DataFrame(rows(10)), info=info)

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    options: dict[str, Any] = {"databases": databases, "columns": COLUMNS, "seed": 0}
    loaded = load_prompts("someone/races", revision="abc123", hub_split="dev", **options)
    frame, (report,) = loaded.table, loaded.reports
    assert asked == [("someone/races", {"revision": "abc123", "split": "dev"})]
    assert (report.source, report.revision, report.licence) == ("someone/races", "abc123", "cc-by-4.0")
    assert set(frame["source"]) == {"someone/races"}
    with pytest.raises(ValueError, match="has no revision"):
        load_prompts("someone/races", **options)
    with pytest.raises(ValueError, match="neither"):
        load_prompts("some/where/else.txt", revision="x", **options)
    assert len(asked) == 1


def test_only_the_databases_asked_for_are_copied(tmp_path: Path, databases: Path) -> None:
    target = tmp_path / "copies"
    copies = copy_databases(databases, ["deep", "deep"], target)
    assert copies == [target / "deep.sqlite"]
    assert os.listdir(target) == ["deep.sqlite"]
    assert copies[0].read_bytes() == find_database(databases, "deep").read_bytes()
    with pytest.raises(TableError, match="plain name"):
        copy_databases(databases, ["../databases/flat"], target)


def test_reading_a_schema_leaves_no_trace(databases: Path) -> None:
    odd = databases / "odd #1?.sqlite"
    odd.write_bytes((databases / "flat.sqlite").read_bytes())
    before = sorted(os.listdir(databases))
    assert "CREATE TABLE horse" in read_schema_text(odd)
    assert sorted(os.listdir(databases)) == before


def test_spider_goes_through(tmp_path: Path) -> None:
    folder = SHARED / "spider_dev"
    if not (folder / "questions.jsonl").is_file():
        pytest.skip("Spider dev is not here; set FURLONG_SHARED_DATA to the folder that holds spider_dev")
    loaded = load_prompts(
        folder / "questions.jsonl",
        databases=folder / "databases",
        columns=COLUMNS,
        seed=11,
        prompt_template="{schema}\n\n{question}",
        licence="CC BY-SA 4.0",
        name="spider_dev",
        leak_ngram=13,
    )
    frame, (report,) = loaded.table, loaded.reports
    assert report.rows_read == 634
    assert report.rows_read == frame.height + report.duplicates_dropped
    db_ids = frame["db_id"].unique().sort().to_list()
    assert len(db_ids) == 14
    assert abs(report.rows_per_split["train"] / frame.height - 0.8) < 0.01
    assert frame["prompt"].str.contains("CREATE TABLE").all()
    assert not leaks_of_table(frame, loaded.questions, [], 13), "rows that share words were dealt together"
    copies = copy_databases(folder / "databases", db_ids[:2], tmp_path / "copies")
    assert all(copy.is_file() for copy in copies)
