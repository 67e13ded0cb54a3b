"""Hygiene of prompts: near-duplicates, leaks from held-out sets, personal data. PR05 is locked in a golden file."""

from __future__ import annotations

import builtins
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.content import words_of
from data.hygiene import (
    Leak,
    Question,
    _shingles,
    cluster_sizes,
    find_leaks,
    leaks_of_table,
    near_duplicate_clusters,
)
from data.privacy import anonymise
from data.racing import build_database, make_racing
from data.source_rows import read_source

SHARED = Path(os.environ.get("FURLONG_SHARED_DATA") or Path(__file__).parents[1] / ".." / "shared" / "data")
GOLDEN = [json.loads(line) for line in (Path(__file__).parent / "golden/prompt_hygiene.jsonl").open()]


def ask(texts: list[str], prefix: str = "q", db_id: str | None = None) -> list[Question]:
    return [Question(f"{prefix}{number:05}", text, db_id) for number, text in enumerate(texts)]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["case"])
def test_golden(case: dict[str, Any]) -> None:
    train, heldout = ask(case["train"], "t"), ask(case["heldout"], "h")
    assert len(set(near_duplicate_clusters(train, 0.8))) == case["distinct"]
    for n in (4, 13):
        leaks = find_leaks(train, heldout, n)
        assert len(leaks) == case["leaks"], n
        assert all(leak.words == "what is 2 + 2" and leak.heldout_id == "h00000" for leak in leaks)


# ------------------------------------------------------------------------------------------ near-duplicates


def test_a_cluster_is_named_by_its_smallest_id_whatever_the_order() -> None:
    long = "Tom has five red apples and gives two of them to his best friend Ann on her birthday. How many are left"
    texts = [f"{long}?", "Who won?", f"{long} now?", "", "WHO  WON ?", "Who lost?", "no", "yes"]
    questions = ask(texts)
    assert near_duplicate_clusters(questions, 0.8) == [
        *("q00000", "q00001", "q00000", "q00003", "q00001", "q00005", "q00006", "q00007")
    ]
    backwards = near_duplicate_clusters(questions[::-1], 0.8)[::-1]
    assert backwards == near_duplicate_clusters(questions, 0.8)
    assert near_duplicate_clusters([], 0.8) == []
    assert cluster_sizes(backwards) == {"clusters": 2, "rows": 4, "largest": 2}
    assert cluster_sizes([]) == {"clusters": 0, "rows": 0, "largest": 1}


def test_the_same_words_about_another_database_are_another_question() -> None:
    questions = [
        Question("a", "How many singers are there?", "x"),
        Question("b", "How many singers are there?", "y"),
    ]
    assert near_duplicate_clusters(questions, 0.8) == ["a", "b"]
    assert find_leaks(questions[:1], questions[1:], 3) == []
    unknown = [Question("c", "How many singers are there?")]
    assert [leak.train_id for leak in find_leaks(questions, unknown, 13)] == ["a", "b"]
    assert [leak.heldout_id for leak in find_leaks(unknown, questions, 13)] == ["a"]


@pytest.fixture(scope="module")
def variants() -> list[Question]:
    """1,200 questions in families that differ in one to four words, so that many pairs lie near the threshold."""
    rng = random.Random(5)
    vocabulary = [f"w{number}" for number in range(400)]
    texts = []
    for _ in range(200):
        base = rng.choices(vocabulary, k=rng.randint(12, 40))
        for changes in range(5):
            words = list(base)
            for place in rng.sample(range(len(words)), changes):
                words[place] = rng.choice(vocabulary)
            texts.append(" ".join(words))
        texts.append(" ".join(base).upper())
    return ask(texts)


@pytest.mark.parametrize("threshold", [0.5, 0.8, 1.0])
def test_clusters_are_those_of_an_exhaustive_comparison(variants: list[Question], threshold: float) -> None:
    """No false pair; of the true ones MinHash may miss some that lie at the threshold itself."""
    sets = [_shingles(question.text) for question in variants]
    found = near_duplicate_clusters(variants, threshold)
    parent = list(range(len(sets)))

    def root(item: int) -> int:
        while parent[item] != item:
            item = parent[item]
        return item

    pairs = missed = 0
    for one in range(len(sets)):
        for other in range(one):
            if len(sets[one] & sets[other]) >= threshold * len(sets[one] | sets[other]):
                parent[root(one)] = root(other)
                pairs += 1
                missed += found[one] != found[other]
    exact = [root(item) for item in range(len(sets))]
    assert pairs >= 200
    assert missed <= 0.03 * pairs
    together: dict[str, set[int]] = {}
    for cluster, component in zip(found, exact, strict=True):
        together.setdefault(cluster, set()).add(component)
    assert all(len(components) == 1 for components in together.values()), (
        "a pair below the threshold was joined"
    )


def test_time_grows_with_the_number_of_questions() -> None:
    """Ten thousand questions take one to two seconds; a comparison of all pairs would take sixteen times for four."""
    rng = random.Random(0)
    vocabulary = [f"w{number}" for number in range(5000)]
    questions = ask([" ".join(rng.choices(vocabulary, k=20)) for _ in range(10_000)])

    def seconds(part: list[Question]) -> float:
        started = time.process_time()
        near_duplicate_clusters(part, 0.8)
        find_leaks(part, part[:500], 13)
        return time.process_time() - started

    seconds(questions[:200])
    assert seconds(questions) < 10 * seconds(questions[:2500])


# ----------------------------------------------------------------------------------------------- leaks


def test_a_leak_names_both_rows_and_all_the_words_they_share() -> None:
    run = "the first movie is 1 hour and 30 minutes long while the second movie is"
    train = ask(
        [
            "Joe saw two. The first movie is 1 hour, and 30 minutes long, while the second movie is short.",
            "x",
        ]
    )
    heldout = ask(["Other", f"Max waits: {run} long?"], "h")
    assert find_leaks(train, heldout, 13) == [Leak("q00000", "h00001", run)]
    length = len(words_of(run))
    assert find_leaks(train, heldout, length) == [Leak("q00000", "h00001", run)]
    assert find_leaks(train, heldout, length + 1) == []


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=9), min_size=1, max_size=6),
    st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=9), min_size=1, max_size=6),
    st.integers(3, 5),
)
def test_leaks_are_those_of_a_plain_search(train: list[list[str]], heldout: list[list[str]], n: int) -> None:
    def shares(words: list[str], others: list[str]) -> bool:
        runs = [others[start : start + n] for start in range(len(others) - n + 1)]
        return words == others or any(words[k : k + n] in runs for k in range(len(words) - n + 1))

    left = ask([" ".join(words) for words in train], "t")
    right = ask([" ".join(words) for words in heldout], "h")
    expected = [left[k].id for k, words in enumerate(train) if any(shares(words, other) for other in heldout)]
    leaks = find_leaks(left, right, n)
    assert [leak.train_id for leak in leaks] == expected
    text_of = {question.id: question.text for question in [*left, *right]}
    for leak in leaks:
        assert leak.words in text_of[leak.train_id] and leak.words in text_of[leak.heldout_id]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_built_in_task_passes_the_default_check(tmp_path: Path, seed: int) -> None:
    table = make_racing(build_database(tmp_path / "racing.sqlite", seed=seed), seed=seed)
    assert table.height == 5900
    assert leaks_of_table(table, table["prompt"].to_list(), [], 13) == []


def test_gsm8k_train_and_test_share_four_questions_in_other_clothes() -> None:
    folder = SHARED / "gsm8k"
    if not (folder / "train.jsonl").is_file():
        pytest.skip("GSM8K is not here; set FURLONG_SHARED_DATA to the folder that holds gsm8k")
    columns = {"prompt": "question", "solution": "answer"}
    train, test = (
        ask([row["question"] for row in read_source(folder / f"{part}.jsonl", columns).rows], part)
        for part in ("train", "test")
    )
    leaks = find_leaks(train, test, 13)
    assert sorted(leak.train_id for leak in leaks) == ["train00020", "train00406", "train01314", "train05162"]
    assert "stamps had a snowflake design some had a truck design" in leaks[0].words
    clusters = near_duplicate_clusters([*train, *test], 0.8)
    assert cluster_sizes(clusters) == {"clusters": 1, "rows": 2, "largest": 2}  # Josie's and Amanda's $50


# ------------------------------------------------------------------------------------------ personal data

PERSONAL = [
    ("Mail jane.doe@example.com now.", "Mail <EMAIL_ADDRESS_1> now."),
    ("a+b@x.co.uk, A+B@X.CO.UK", "<EMAIL_ADDRESS_1>, <EMAIL_ADDRESS_1>"),
    ("Call (202) 456-1111 or 202-456-1111.", "Call <PHONE_NUMBER_1> or <PHONE_NUMBER_1>."),
    ("+44 20 7946 0958 and +33 1 42 68 53 00", "<PHONE_NUMBER_1> and <PHONE_NUMBER_2>"),
    ("Card 4111 1111 1111 1111 / 378282246310005", "Card <CREDIT_CARD_1> / <CREDIT_CARD_2>"),
    ("IBAN DE89 3704 0044 0532 0130 00.", "IBAN <IBAN_1>."),
    ("SSN 536-90-4399", "SSN <US_SSN_1>"),
    ("From 192.168.0.1 or 2001:db8::1", "From <IP_ADDRESS_1> or <IP_ADDRESS_2>"),
    ("See https://x.org/~jane?a=1.", "See <URL_1>."),
]
HARMLESS = [
    "28980 - 18480 = <<28980-18480=10500>>10500",
    "SELECT * FROM t WHERE mail LIKE '%@gmail.com%' AND day = '2024-01-02' AND at = '12:30:45'",
    "Card 4111 1111 1111 1112 and DE89 3704 0044 0532 0130 01",
    "Add 1234567890123456 and 20 20 20 20 20 20 20 20.",
    "a :: b, a::b, Map::entry, 300.1.2.3, version 1.2.3, user@host",
]


@pytest.mark.parametrize(("text", "expected"), PERSONAL)
def test_personal_data_is_replaced(text: str, expected: str) -> None:
    assert anonymise([text])[0] == [expected]


@pytest.mark.parametrize("text", HARMLESS)
def test_what_only_looks_like_it_stays(text: str) -> None:
    assert anonymise([text]) == ([text], {})


def test_one_value_has_one_placeholder_in_all_texts_of_a_row() -> None:
    texts = [
        "Who is jane@x.org? Not joe@x.org, phone 202-456-1111.",
        "It is joe@x.org.",
        "SELECT id FROM p WHERE mail = 'JANE@x.org' AND phone = '2024561111'",
    ]
    anonymous, counts = anonymise(texts)
    assert anonymous == [
        "Who is <EMAIL_ADDRESS_1>? Not <EMAIL_ADDRESS_2>, phone <PHONE_NUMBER_1>.",
        "It is <EMAIL_ADDRESS_2>.",
        "SELECT id FROM p WHERE mail = '<EMAIL_ADDRESS_1>' AND phone = '<PHONE_NUMBER_1>'",
    ]
    assert counts == {"EMAIL_ADDRESS": 2, "PHONE_NUMBER": 1}
    assert anonymise(anonymous) == (anonymous, {})


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "phonenumbers":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        ModuleNotFoundError, match=r"install phonenumbers and python-stdnum .*furlong\[privacy\]"
    ):
        anonymise(["x"])


def test_leaks_of_a_table_name_split_and_source() -> None:
    table = pl.DataFrame(
        {
            "prompt_id": ["a", "b", "c"],
            "split": ["train", "curation", "heldout"],
            "db_id": [None, None, None],
            "source": ["one.jsonl", "one.jsonl", "two.jsonl"],
        },
        schema_overrides={"db_id": pl.String},
    )
    leaks = leaks_of_table(table, ["Who won?", "Who lost?", "who won"], [Question("f row 1", "Who LOST")], 13)
    assert [(leak["split"], leak["source"], leak["heldout_id"]) for leak in leaks] == [
        ("train", "one.jsonl", "c"),
        ("curation", "one.jsonl", "f row 1"),
    ]
    assert leaks[0]["question"] == "Who won?" and leaks[0]["heldout_question"] == "who won"
