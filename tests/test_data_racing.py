"""The racing task: the database, the templates, and the prompt table drawn from them."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from contextlib import closing
from itertools import islice
from pathlib import Path

import polars as pl
import pytest

from data.content import check_disjoint, normalise_prompt, normalise_sql, prompt_id
from data.racing import build_database, describe_mistakes, flipped_template_names, make_racing
from data.racing.combinations import QuestionSource, comparable, is_trivial
from data.racing.templates import all_templates, slots_of, template
from data.schemas import PromptTable, check_table, require_demonstrations

TEMPLATES = {item.name: item for item in all_templates()}
KINDS = {"filter", "join", "aggregate", "group", "order", "top-k", "date", "null"}


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_database(tmp_path_factory.mktemp("racing") / "racing.sqlite", seed=7)


@pytest.fixture(scope="module")
def table(database: Path) -> pl.DataFrame:
    return make_racing(database, seed=7)


def sql_of(completion: str) -> str:
    assert completion.startswith("```sql\n")
    assert completion.endswith("\n```")
    return completion[7:-4]


def test_one_seed_one_database(tmp_path: Path, database: Path) -> None:
    again = build_database(tmp_path / "deeper" / "other.sqlite", seed=7)
    other = build_database(tmp_path / "third.sqlite", seed=8)
    assert again.read_bytes() == database.read_bytes()
    assert other.read_bytes() != database.read_bytes()
    assert [path.name for path in again.parent.iterdir()] == ["other.sqlite"]


def test_the_database_is_a_plausible_form_book(database: Path) -> None:
    def one(sql: str) -> tuple[float, ...]:
        return connection.execute(sql).fetchone()

    with closing(sqlite3.connect(database)) as connection:
        assert one("SELECT COUNT(*) FROM races") == (480,)
        assert one("SELECT COUNT(DISTINCT date) FROM races") == (480,)
        assert one("SELECT MIN(n), MAX(n) FROM (SELECT COUNT(*) n FROM results GROUP BY race_id)") == (10, 10)
        assert one("SELECT COUNT(*) FROM results WHERE position = 1") == (480,)
        # Positions run from 1 without a gap; those who did not finish have none.
        assert one(
            "SELECT COUNT(*) FROM (SELECT 1 FROM results GROUP BY race_id"
            " HAVING MAX(position) <> COUNT(position) OR COUNT(DISTINCT position) <> COUNT(position))"
        ) == (0,)
        assert one("SELECT COUNT(*) FROM races WHERE CAST(substr(date, 1, 4) AS INTEGER) <> season") == (0,)
        assert one("PRAGMA integrity_check") == ("ok",)
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        for column, low, high in (("position", 0.06, 0.12), ("weight", 0.05, 0.11), ("odds", 0.04, 0.08)):
            (missing,) = one(f"SELECT AVG({column} IS NULL) FROM results")
            assert low < missing < high
        (ownerless,) = one("SELECT AVG(owner IS NULL) FROM horses")
        assert 0.05 < ownerless < 0.4


def test_templates_are_many_and_whole() -> None:
    assert 36 <= len(TEMPLATES) <= 40
    assert {item.kind for item in TEMPLATES.values()} == KINDS
    for item in TEMPLATES.values():
        assert len(item.slots) >= (1 if item.name in ("winning_jockey", "finish_order") else 2)
        assert 3 <= len(item.phrasings) == len({normalise_prompt(text) for text in item.phrasings})
        for text in (*item.phrasings, item.gold, *(mistake.sql for mistake in item.mistakes)):
            assert set(slots_of(text)) <= set(item.slots), (item.name, text)
        for text in item.phrasings:
            assert slots_of(text) == item.slots, f"{item.name} does not say all it asks: {text}"


def test_a_mistake_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"template x: .* occurs 2 times"):
        template("x", "filter", ("?",), "SELECT a FROM a", ("wrong", "a", "b"))
    with pytest.raises(ValueError, match="occurs 0 times"):
        template("x", "filter", ("?",), "SELECT a FROM a", ("wrong", "z", "b"))


def test_each_template_has_many_combinations(database: Path) -> None:
    with closing(QuestionSource(database)) as source:
        for item in TEMPLATES.values():
            found = sum(1 for _ in islice(source.combinations(item, seed=1), 160))
            assert found == 160, f"{item.name} has {found} combinations"


def test_split_sizes_and_templates(table: pl.DataFrame) -> None:
    sizes = dict(table.group_by("split").len().iter_rows())
    assert sizes == {"train": 5000, "curation": 600, "heldout": 300}
    for split, size in sizes.items():
        counts = Counter(table.filter(pl.col("split") == split)["source"])
        assert set(counts) == set(TEMPLATES)
        assert max(counts.values()) - min(counts.values()) <= 1
        assert sum(counts.values()) == size


def test_the_table_keeps_the_rules(table: pl.DataFrame) -> None:
    assert check_table(table, PromptTable, "racing").equals(table)
    require_demonstrations(table, "racing")
    check_disjoint(table)
    assert table.filter(pl.col("split") != "train")["completion"].null_count() == 900
    assert set(table["db_id"]) == {"racing"}
    assert table["prompt"].map_elements(normalise_prompt, return_dtype=pl.String).is_unique().all()
    for row in table.head(50).iter_rows(named=True):
        assert row["prompt_id"] == prompt_id(row["db_id"], row["prompt"], row["solution"])


def test_no_demonstration_shows_a_gold_of_another_split(table: pl.DataFrame) -> None:
    shown = {normalise_sql(sql_of(text)) for text in table["completion"].drop_nulls()}
    asked = table.filter(pl.col("split") != "train")["solution"]
    assert not shown & {normalise_sql(text) for text in asked}


def test_every_gold_answers_and_every_mistake_differs(database: Path, table: pl.DataFrame) -> None:
    """Checked on the finished table, against the file, without the code that chose the rows."""
    with closing(sqlite3.connect(database)) as connection:
        run = connection.execute
        for row in table.iter_rows(named=True):
            gold = row["solution"]
            rows = run(gold).fetchall()
            assert not is_trivial(rows), gold
            completion = row["completion"]
            if completion is not None and sql_of(completion) != gold:
                ordered = "ORDER BY" in gold
                wrong = run(sql_of(completion)).fetchall()
                assert comparable(wrong, ordered) != comparable(rows, ordered), completion


def test_ordered_golds_have_one_order(database: Path, table: pl.DataFrame) -> None:
    """The same rows in another physical order give the same answer: no tie decides."""
    with closing(sqlite3.connect(":memory:")) as turned, closing(sqlite3.connect(database)) as straight:
        straight.backup(turned)
        for name in ("races", "results"):
            turned.execute(f"CREATE TABLE old AS SELECT * FROM {name} ORDER BY rowid DESC")
            turned.execute(f"DROP TABLE {name}")
            turned.execute(f"ALTER TABLE old RENAME TO {name}")
        ordered = table.filter(pl.col("solution").str.contains("ORDER BY"))["solution"].unique()
        assert len(ordered) > 500
        for gold in ordered[:600]:
            assert turned.execute(gold).fetchall() == straight.execute(gold).fetchall(), gold


def test_values_stand_in_the_sql_as_in_the_question(table: pl.DataFrame) -> None:
    for row in table.iter_rows(named=True):
        literals = re.findall(r"'([^']+)'|(?<![\w.'-])(\d+(?:\.\d+)?)\b", row["solution"])
        for quoted, number in literals:
            value = quoted or number
            assert value in row["prompt"] or value == "1", (row["prompt"], row["solution"])


def test_golds_are_short(table: pl.DataFrame) -> None:
    lengths = table["solution"].str.len_chars()
    assert lengths.max() <= 175  # type: ignore[operator]
    assert lengths.mean() <= 130  # type: ignore[operator]


def test_mistakes_have_the_shares_asked_for(table: pl.DataFrame) -> None:
    drawn = describe_mistakes(table)
    flipped = set(flipped_template_names())
    assert set(drawn["source"]) == set(TEMPLATES)
    assert drawn["train"].sum() == 5000
    assert set(drawn.filter("flipped")["source"]) == flipped
    assert abs(len(flipped) - len(TEMPLATES) / 3) < 1
    assert len({TEMPLATES[name].kind for name in flipped}) >= 6
    for name, share in drawn.select("source", "share").iter_rows():
        if name in flipped:
            assert abs(share - 0.62) < 0.01
        else:
            assert 0.09 < share < 0.31
    plain = drawn.filter(~pl.col("flipped"))["share"]
    assert plain.max() - plain.min() > 0.1  # type: ignore[operator]
    assert abs(plain.mean() - 0.2) < 0.04  # type: ignore[operator]


def test_a_flipped_template_has_one_mistake_above_the_gold(table: pl.DataFrame) -> None:
    train = table.filter(pl.col("split") == "train")
    for name in flipped_template_names():
        rows = train.filter(pl.col("source") == name)
        wrong = [r for r in rows.iter_rows(named=True) if sql_of(r["completion"]) != r["solution"]]
        assert len(wrong) > rows.height / 2


def test_seeds_decide_the_table(database: Path) -> None:
    sizes = {"train": 200, "curation": 60, "heldout": 41}
    one, again, other = (make_racing(database, seed=seed, **sizes) for seed in (1, 1, 2))
    assert one.equals(again)
    assert len(set(one["prompt"]) & set(other["prompt"])) < one.height / 2
    counts = Counter(one["source"])
    assert one.height == 301
    assert max(counts.values()) - min(counts.values()) <= 3


def test_shares_can_be_switched_off(database: Path) -> None:
    sizes = {"train": 400, "curation": 0, "heldout": 40}
    clean = make_racing(database, seed=1, mistake_share=0, flipped_templates=0, **sizes)
    assert describe_mistakes(clean)["mistaken"].sum() == 0
    all_wrong = make_racing(database, seed=1, flipped_share=1, flipped_templates=1, **sizes)
    assert describe_mistakes(all_wrong)["share"].to_list() == [1.0] * len(TEMPLATES)
    assert clean["prompt"].to_list() == all_wrong["prompt"].to_list(), "same prompts, other demonstrations"


def test_bad_arguments_are_named(database: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mistake_share is 1\.5; expected a share"):
        make_racing(database, seed=1, mistake_share=1.5)
    with pytest.raises(ValueError, match=r"gives \d+ prompts from \d+ combinations, expected"):
        make_racing(database, seed=1, train=200_000)
    with pytest.raises(FileNotFoundError, match=r"nothing\.sqlite; expected one written by"):
        make_racing(tmp_path / "nothing.sqlite", seed=1)
    assert not (tmp_path / "nothing.sqlite").exists()
