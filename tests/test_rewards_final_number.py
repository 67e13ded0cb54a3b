"""Locks `final_number_v1`: golden cases, hostile input, and every gold of GSM8K.

A golden line is {case, source, note, gold, completion, status, score, params?}. A
released version keeps all of them; a change of mind is a new version with its own file.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.base import Status
from rewards.final_number import MAX_TEXT_LENGTH, FinalNumberV1, find_region, numbers, read_gold
from rewards.registry import get_reward

GOLDEN = Path(__file__).parent / "golden" / "final_number_v1.jsonl"
CASES = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
GOLDEN_LOCK = (89, "27b6dd0259fe8aa3")


def judge(gold: str | None, completion: str, **params):
    return FinalNumberV1(**params).results([completion], [gold])[0]


def values(text: str) -> list[Fraction | None]:
    return [number.value for number in numbers(text)]


@pytest.mark.parametrize("case", CASES, ids=[case["case"] for case in CASES])
def test_golden(case):
    result = judge(case["gold"], case["completion"], **case.get("params", {}))
    assert (result.status, result.score) == (case["status"], case["score"]), result.detail


def test_golden_file_is_locked():
    """Adding a case is fine with a new digest here; changing one is a new reward version."""
    digest = hashlib.sha256(GOLDEN.read_bytes()).hexdigest()
    assert (len(CASES), digest[:16]) == GOLDEN_LOCK
    assert len({case["case"] for case in CASES}) == len(CASES)


def test_format_is_recorded_and_not_paid():
    assert dict(judge("18", "\\boxed{17}").terms) == {"result": 0.0, "format": 1.0}
    unmarked = judge("18", "It is 18.")
    assert dict(unmarked.terms) == {"result": 1.0, "format": 0.0} and unmarked.score == 1.0
    assert judge("no gold", "18").terms == {}


MILLION = 1_000_000
HOSTILE = {
    "digits": "7" * MILLION,
    "digits after a mark": "#### " + "7" * MILLION,
    "digits within the limit": "#### " + "7" * 90_000,
    "commas": "1," * 45_000,
    "groups": "#### 1" + ",000" * 20_000,
    "points": "1." * 45_000,
    "slashes": "1/" * 45_000 + "1",
    "signs": "-" * 90_000,
    "signs and currency": "-$" * 45_000 + "1e",
    "exponents": "#### " + "1e9" * 30_000,
    "exponent of an exponent": "#### 1e" + "9" * 90_000,
    "open boxes": "\\boxed{" * 12_000,
    "deep braces": "\\boxed{" + "{" * 40_000 + "}" * 40_000,
    "open tags": "<answer>" * 12_000,
    "marks": "#### " * 18_000,
    "marks and stars": "####" + " *" * 45_000,
    "fractions": "\\frac{1}" * 11_000,
    "thoughts": "<think>" * MILLION,
    "closed thoughts": "<think></think>" * MILLION + "#### x",
    "word": "a1." * 30_000,
    "NUL and surrogates": "#### 1\x00\ud800" * 1000 + "#### x1",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_completions_are_bounded(name):
    result = judge("18", HOSTILE[name])
    assert result.score == 0.0 and result.status in {Status.NO_ANSWER, Status.INCORRECT}
    assert len(result.detail) <= 300
    result.detail.encode("utf-8")


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_golds_are_suspect(name):
    result = judge(HOSTILE[name], "#### 18")
    # "1,1,1,...": one number, many times.
    assert result.status in {Status.SUSPECT_GOLD, Status.INCORRECT}


def test_long_texts_are_refused_unread():
    assert judge("1", "x" * (MAX_TEXT_LENGTH - 6) + "#### 1").status is Status.CORRECT
    assert judge("1", "x" * (MAX_TEXT_LENGTH - 5) + "#### 1").status is Status.NO_ANSWER
    assert judge("1", "x" * MILLION + "</think>#### 1").status is Status.CORRECT


@given(st.text(alphabet="0123456789.,-+$%/^{}eE#x \n\\½٣<>", max_size=60), st.booleans())
def test_any_text_gets_a_status(text, anywhere):
    result = judge("18", text, anywhere=anywhere)
    assert (result.score == 1.0) == (result.status is Status.CORRECT)
    assert result.score in (0.0, 1.0)
    assert judge(text, "#### 18").status in {Status.CORRECT, Status.INCORRECT, Status.SUSPECT_GOLD}


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**12), max_value=10**12))
def test_every_way_of_writing_a_decimal_reads_alike(number):
    exact = Fraction(number)
    ways = [f"{number:f}", f"{number:,f}", f"{number:f} eggs.", f"{number:,f}%", f"{number:f}000"]
    ways += [f"{exact.numerator}/{exact.denominator}", f"{number:f}".replace("-", "\u2212")]
    ways += [f"{number:,f}".replace(",", "{,}"), f"-${-number:f}" if number < 0 else f"${number:f}"]
    for way in ways:
        assert values(f"({way})")[-1] == exact, way
        assert judge(f"#### {way}", f"\\boxed{{{way}}}").score == 1.0, way


@given(st.integers(-(10**30), 10**30), st.integers(1, 10**20))
def test_another_number_is_never_correct(number, gap):
    assert judge(str(number), f"#### {number + gap}").status is Status.INCORRECT
    assert judge(f"{number:,}", f"= {number}/1").status is Status.CORRECT


def test_where_a_text_answers():
    assert find_region("#### Step 1\n9 + 9 = 18").marked is False
    assert find_region("#### 1\n#### Step 2").text == "1"
    assert find_region("a \\boxed{b{c}d} e").text == "b{c}d"
    assert find_region("<answer> 1 </answer> 2").text == " 1 "
    assert values("2 eggs, 3/4 cup, x5, -6") == [2, Fraction(3, 4), -6]
    assert isinstance(read_gold("1, 2"), str)


def test_strings_and_messages_score_the_same():
    reward = FinalNumberV1()
    texts = ["#### 18", "17", "none"]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    columns = {"solution": ["18"] * 3, "db_id": [None] * 3, "trainer_state": None}
    assert reward(prompts=["p"] * 3, completions=texts, **columns) == [1.0, 0.0, 0.0]
    assert reward(prompts=["p"] * 3, completions=chats, **columns) == [1.0, 0.0, 0.0]
    assert reward(completions=["1", "1"], solution=["1", "x"]) == [1.0, None]


def test_missing_column_and_uneven_columns_are_named():
    with pytest.raises(ValueError, match="final_number_v1 needs solution"):
        FinalNumberV1()(completions=["1"])
    with pytest.raises(ValueError, match="different lengths"):
        FinalNumberV1()(completions=["1"], solution=[])
    with pytest.raises(ValueError, match="anywhere is 'no', expected true or false"):
        FinalNumberV1(anywhere="no")  # type: ignore[arg-type]


def test_checked_golds():
    golds = ["18", "#### 1,000", "$5", "two", None, "1 or 2", "\\boxed{3/4}"]
    good = [Status.CORRECT] * 3 + [Status.SUSPECT_GOLD] * 3 + [Status.CORRECT]
    for reward in (FinalNumberV1(), FinalNumberV1(anywhere=False)):
        results = reward.check_golds(golds, db_id=[None] * 7, source=["s"] * 7)
        assert [result.status for result in results] == good
        assert [result.score for result in results] == [1.0] * 3 + [None] * 3 + [1.0]


def test_identity_and_pickle():
    reward = get_reward("final_number_v1", anywhere=False)
    assert pickle.loads(pickle.dumps(reward)) == reward == FinalNumberV1(anywhere=False)
    assert reward.identity.name == "final_number_v1" and dict(reward.identity.params) == {"anywhere": False}
    assert reward.identity != FinalNumberV1().identity
    assert reward.identity.digest == FinalNumberV1().identity.digest
    with pytest.raises(ValueError, match="does not know database_root"):
        get_reward("final_number_v1", database_root=".")


def _gsm8k() -> list[str]:
    default = Path(__file__).resolve().parents[1] / ".." / "shared" / "data"
    folder = Path(os.environ.get("FURLONG_SHARED_DATA", default)) / "gsm8k"
    files = [folder / f"{split}.jsonl" for split in ("train", "test")]
    if not all(file.exists() for file in files):
        pytest.skip(f"no {folder}: set FURLONG_SHARED_DATA to the folder that holds gsm8k")
    return [json.loads(line)["answer"] for file in files for line in file.read_text().splitlines()]


def test_every_gsm8k_gold_pays_itself_and_nothing_else():
    answers = _gsm8k()
    bare = [answer.rsplit("####", 1)[1].strip() for answer in answers]
    assert len(answers) == 8792
    reward = FinalNumberV1()
    ones, zeros = [1.0] * len(answers), [0.0] * len(answers)
    assert [result.score for result in reward.check_golds(answers)] == ones
    assert [result.score for result in reward.check_golds(bare)] == ones
    right = [int(number.replace(",", "")) for number in bare]
    assert reward(completions=[f"The answer is ${number:,}." for number in right], solution=answers) == ones
    assert reward(completions=[f"\\boxed{{{number}.0}}" for number in right], solution=bare) == ones
    for wrong in (lambda n: n + 1, lambda n: -n or 1, lambda n: 10 * n or 1, lambda n: f"{n}.01"):
        working = [answer.rsplit("####", 1)[0] for answer in answers]
        completions = [f"{text}#### {wrong(number)}" for text, number in zip(working, right, strict=True)]
        assert reward(completions=completions, solution=answers) == zeros
