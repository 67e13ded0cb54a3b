"""Questions without a database: golds that say nothing about two questions, held-out files, anonymised rows."""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from data.hygiene import leaks_of_table
from data.schemas import SPLITS, TableError
from data.source_rows import read_question_texts
from data.sources import load_questions

COLUMNS = {"prompt": "question", "solution": "answer"}
SHARED = Path(os.environ.get("FURLONG_SHARED_DATA") or Path(__file__).parents[1] / ".." / "shared" / "data")


def rows(count: int, start: int = 0) -> list[dict[str, str]]:
    return [
        {"question": f"What is {n} + 1?", "answer": "It is.\n#### 42"} for n in range(start, start + count)
    ]


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_equal_golds_do_not_glue_questions_together(tmp_path: Path) -> None:
    path = write(tmp_path / "sums.jsonl", [*rows(40), {"question": "what is 3+1", "answer": "42"}])
    loaded = load_questions(path, columns=COLUMNS, seed=3, licence="MIT", prompt_template="Q: {question}\nA:")
    frame, (report,) = loaded.table, loaded.reports
    assert report.rows_per_split == {"train": 32, "curation": 4, "heldout": 4}
    assert (report.duplicates_dropped, report.conflicting_golds) == (1, 1)
    assert (report.source, report.licence) == ("sums.jsonl", "MIT")
    assert frame["db_id"].null_count() == 40 and set(frame["source"]) == {"sums.jsonl"}
    assert frame["prompt"].to_list() == [f"Q: {question}\nA:" for question in loaded.questions]
    train = frame.filter(pl.col("split") == "train")
    assert train["completion"].to_list() == train["solution"].to_list(), (
        "the worked answer is the demonstration"
    )
    assert frame.filter(pl.col("split") != "train")["completion"].null_count() == 8
    again = load_questions(path, columns=COLUMNS, seed=3, licence="MIT", prompt_template="Q: {question}\nA:")
    assert again.table.equals(frame)


def test_a_held_out_file_is_the_held_out_split_as_a_whole(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", rows(30))
    test = write(tmp_path / "test.jsonl", [*rows(10, start=25), rows(1)[0] | {"question": "Is it 26 + 1?"}])
    loaded = load_questions(
        train,
        heldout_source=test,
        columns=COLUMNS,
        seed=0,
        shares={"train": 0.4, "curation": 0.2, "heldout": 0.4},
    )
    first, second = loaded.reports
    assert first.rows_per_split == {"train": 17, "curation": 8, "heldout": 0}, (
        "0.4 and 0.2 scaled up to 2/3 and 1/3"
    )
    assert (first.overlaps_removed, first.examples[0]) == (5, "What is 25 + 1?")
    assert second.rows_per_split == {"train": 0, "curation": 0, "heldout": 11}
    assert (second.source, second.overlaps_removed) == ("test.jsonl", 0)
    assert first.revision != second.revision and second.revision.startswith("sha256:")
    sources = dict(loaded.table.group_by("split").agg(pl.col("source").unique().first()).iter_rows())
    assert sources == {"train": "train.jsonl", "curation": "train.jsonl", "heldout": "test.jsonl"}


def test_a_limit_takes_the_first_rows_of_each(tmp_path: Path) -> None:
    train, test = write(tmp_path / "a.jsonl", rows(30)), write(tmp_path / "b.jsonl", rows(30, start=50))
    loaded = load_questions(train, heldout_source=test, columns=COLUMNS, seed=0, limit=6)
    assert [report.rows_read for report in loaded.reports] == [6, 6]
    heldout = loaded.table.filter(pl.col("split") == "heldout")
    assert heldout["prompt"].to_list() == [f"What is {n} + 1?" for n in range(50, 56)]


def test_given_splits_and_completions_are_kept(tmp_path: Path) -> None:
    records = [row | {"part": part, "demo": "because"} for row, part in zip(rows(3), SPLITS, strict=True)]
    columns = COLUMNS | {"split": "part", "completion": "demo"}
    table = load_questions(write(tmp_path / "s.jsonl", records), columns=columns, seed=0).table
    assert table.select("split", "completion").rows() == [
        ("train", "because"),
        ("curation", None),
        ("heldout", None),
    ]


def test_questions_that_share_many_words_are_dealt_together(tmp_path: Path) -> None:
    tail = "saw two films of which the first was one hour longer than the second one was. How long was {n}?"
    records = [
        {"question": f"{name} {tail.format(n=n)}", "answer": "1"}
        for n in range(20)
        for name in ("Ann", "Bob")
    ]
    shared = tail.split(". ", maxsplit=1)[0].split()
    for number, record in enumerate(records):  # pairs share their words, no two pairs do
        record["question"] = record["question"].replace(" ", f" x{number // 2} ")
    path = write(tmp_path / "films.jsonl", records)
    shares = {"train": 0.5, "curation": 0.25, "heldout": 0.25}
    apart = load_questions(path, columns=COLUMNS, seed=1, shares=shares)
    assert leaks_of_table(apart.table, apart.questions, [], len(shared))
    together = load_questions(path, columns=COLUMNS, seed=1, shares=shares, leak_ngram=len(shared))
    assert not leaks_of_table(together.table, together.questions, [], len(shared))
    assert together.reports[0].rows_per_split == {"train": 20, "curation": 10, "heldout": 10}


def test_what_cannot_be_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "sums.jsonl", rows(9))

    def load(**changes: Any) -> None:
        load_questions(changes.pop("source", path), **{"columns": COLUMNS, "seed": 0} | changes)

    with pytest.raises(
        ValueError, match=r"has the unknown \['db_id'\]; expected prompt, solution, and perhaps"
    ):
        load(columns=COLUMNS | {"db_id": "db"})
    with pytest.raises(ValueError, match=r"template uses \['question', 'schema'\]; expected \{question\}$"):
        load(prompt_template="{schema} {question}")
    with pytest.raises(ValueError, match="both a split column and a held-out source"):
        load(columns=COLUMNS | {"split": "question"}, heldout_source=path)
    with pytest.raises(
        ValueError, match=r"shares are \{'train': 0\.0, 'curation': 0\.0\}; expected at least one"
    ):
        load(heldout_source=path, shares={"heldout": 1.0})
    with pytest.raises(ValueError, match="add up to 1"):
        load(shares={"train": 0.4, "curation": 0.3})
    with pytest.raises(TableError, match=r"gone\.jsonl: found no file"):
        load(heldout_source=tmp_path / "gone.jsonl")
    same = "All of these questions begin with the very same thirteen words and only then part: "
    boilerplate = write(
        tmp_path / "same.jsonl", [row | {"question": same + row["question"]} for row in rows(9)]
    )
    with pytest.raises(TableError, match=r"the 9 rows form 1 groups .* expected at least 3"):
        load(source=boilerplate, leak_ngram=13)


def test_a_hub_split_can_be_the_held_out_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, *, revision: str, split: str) -> Any:
        assert (name, revision) == ("openai/gsm8k", "abc")
        table = pl.DataFrame(rows(10, start=0 if split == "train" else 100))
        return types.SimpleNamespace(to_polars=lambda: table, info=types.SimpleNamespace(license="mit"))

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    loaded = load_questions("openai/gsm8k", heldout_source="test", columns=COLUMNS, seed=0, revision="abc")
    assert [(report.revision, report.licence) for report in loaded.reports] == [("abc", "mit")] * 2
    heldout = loaded.table.filter(pl.col("split") == "heldout")["prompt"]
    assert heldout.to_list() == [f"What is {n} + 1?" for n in range(100, 110)]


def test_rows_are_anonymised_before_duplicates_are_folded(tmp_path: Path) -> None:
    records = [
        {"question": "Who is jane@x.org?", "answer": "jane@x.org is Jane"},
        {"question": "Who is joe@x.org?", "answer": "joe@x.org is Joe"},
        {"question": "Who is it?", "answer": "Nobody"},
    ]
    path = write(tmp_path / "who.jsonl", records)
    shares = {"train": 1.0}
    loaded = load_questions(path, columns=COLUMNS, seed=0, shares=shares, anonymise=True)
    assert loaded.anonymised == {"EMAIL_ADDRESS": 2}
    assert loaded.reports[0].duplicates_dropped == 1, "the two ask the same once the address is gone"
    assert loaded.table["solution"].to_list() == ["<EMAIL_ADDRESS_1> is Jane", "Nobody"]
    assert loaded.table["completion"][0] == "<EMAIL_ADDRESS_1> is Jane"
    assert "@" not in str(loaded.table.rows()) + str(loaded.questions)
    assert load_questions(path, columns=COLUMNS, seed=0, shares=shares).anonymised == {}


def test_held_out_files_give_their_questions(tmp_path: Path) -> None:
    assert read_question_texts(write(tmp_path / "q.jsonl", rows(2))) == ["What is 0 + 1?", "What is 1 + 1?"]
    pl.DataFrame({"prompt": ["a", None, "b"]}).write_csv(tmp_path / "p.csv")
    assert read_question_texts(tmp_path / "p.csv") == ["a", "b"]
    with pytest.raises(TableError, match=r"found the columns \['text'\]; expected `question` or `prompt`"):
        read_question_texts(write(tmp_path / "t.jsonl", [{"text": "a"}]))


def test_gsm8k_goes_through() -> None:
    folder = SHARED / "gsm8k"
    if not (folder / "train.jsonl").is_file():
        pytest.skip("GSM8K is not here; set FURLONG_SHARED_DATA to the folder that holds gsm8k")
    loaded = load_questions(
        folder / "train.jsonl",
        heldout_source=folder / "test.jsonl",
        columns=COLUMNS,
        seed=11,
        licence="MIT",
        leak_ngram=13,
    )
    train, test = loaded.reports
    assert (train.rows_read, train.duplicates_dropped, train.overlaps_removed) == (7473, 0, 0)
    assert (test.rows_read, test.rows_per_split["heldout"]) == (1319, 1319)
    assert loaded.table["solution"].str.contains("####").all()
