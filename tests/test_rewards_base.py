"""The shape of scores, the one mapping from status to score, and the registry."""

from __future__ import annotations

import functools
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rewards import final_number, text2sql
from rewards.base import (
    UNSCORED,
    CheckedReward,
    RewardResult,
    Status,
    check_scores,
    code_digest,
    completion_text,
    one_line,
)
from rewards.registry import REWARDS, get_reward, needs_databases, required_columns
from tasks.configs import ConfigError
from tasks.recipes import RewardSpec
from tasks.rewarding import reward_identity, reward_on

REPO = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("status", list(Status))
def test_only_correct_is_paid(status):
    """GR02: a time-out of the completion scores lowest, a failed verifier is left out."""
    result = RewardResult.of(status, terms={"format": 1.0}, earned=0.9)
    expected = {Status.CORRECT: 0.9}.get(status, None if status in UNSCORED else 0.0)
    assert result.score == expected
    assert result.terms == ({} if status in UNSCORED else {"format": 1.0})


def test_one_score_for_six_completions_is_refused():
    """GR01: it used to be broadcast over the batch."""

    def short(completions, **_):
        return [1.0]

    with pytest.raises(ValueError, match=r"short returned 1 scores for 6 completions"):
        CheckedReward(short)(completions=["x"] * 6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), True, "1", [1.0], {}])
def test_scores_must_be_finite_numbers(bad):
    with pytest.raises(ValueError, match=r"Reward r returned .* for completion 1"):
        check_scores("r", [1.0, bad], 2)


@pytest.mark.parametrize("bad", [1.0, "11", None, {0: 1.0, 1: 1.0}])
def test_scores_must_be_a_list(bad):
    with pytest.raises(ValueError, match="expected a list"):
        check_scores("r", bad, 2)


def test_good_scores_pass_as_floats():
    scores = check_scores("r", (1, 0.5, None), 3)
    assert scores == [1.0, 0.5, None]
    assert [type(score) for score in scores] == [float, float, type(None)]


def test_checked_reward_keeps_its_name_and_refuses_async():
    async def later(completions, **_):
        return [1.0]

    with pytest.raises(ValueError, match="later is async"):
        CheckedReward(later)
    assert CheckedReward(check_scores).__name__ == "check_scores"
    assert CheckedReward(functools.partial(max)).__name__ == "partial"


def test_completion_text_reads_every_shape():
    say = [{"role": "assistant", "content": "a"}]
    tool = [{"role": "assistant", "content": None}, {"role": "tool", "content": "t"}]
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "b"}, {"type": "image"}]}]
    assert [completion_text(c) for c in ("a", say, [*tool, *say], tool, parts, [])] == [
        "a", "a", "a", "", "b", "",
    ]  # fmt: skip
    for bad in (None, 3, b"a", [3], [{"role": "assistant", "content": 3}]):
        with pytest.raises(TypeError):
            completion_text(bad)


def test_one_line_is_short_and_encodable():
    text = one_line("a\n\x00b\ud800" + "x" * 1000)
    assert text.startswith("a b?") and len(text) == 300
    text.encode("utf-8")


def test_digest_follows_code_and_versions():
    one = code_digest(("base",), (("sqlite", "3"),))
    assert one == code_digest(("base",), (("sqlite", "3"),))
    assert len({one, code_digest(("base",)), code_digest(("base", "deadline"))}) == 3


def test_registry_names_what_it_knows():
    with pytest.raises(ValueError, match=r"'text2sql_v9'.*text2sql_v1"):
        get_reward("text2sql_v9")
    with pytest.raises(ValueError, match=r"does not know databse\. It takes database_root"):
        get_reward("text2sql_v1", databse=".")
    with pytest.raises(ValueError, match="needs database_root"):
        get_reward("text2sql_v1")


def test_importing_rewards_is_cheap():
    heavy = "torch trl transformers polars prefect mlflow numpy sqlglot"
    check = (
        "import sys, rewards.registry\n"
        f"found = [name for name in {heavy.split()!r} if name in sys.modules]\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", check], cwd=REPO, check=True, timeout=30)


@pytest.mark.parametrize("modules", [text2sql._MODULES, final_number._MODULES])
def test_digest_covers_what_decides(modules):
    """A module of ours that a digested module imports must be digested too."""
    for name in modules:
        source = (REPO / "rewards" / f"{name}.py").read_text()
        imported = re.findall(r"^\s*(?:from|import) rewards\.(\w+)", source, re.MULTILINE)
        assert set(imported) <= set(modules), name


def test_only_rewards_on_databases_get_a_folder():
    assert {name: needs_databases(name) for name in REWARDS} == {
        "text2sql_v1": True,
        "final_number_v1": False,
    }
    assert required_columns("text2sql_v1") == ("solution", "db_id")
    assert required_columns("final_number_v1") == ("solution",)
    with pytest.raises(ValueError, match="No reward is called 'x'"):
        needs_databases("x")
    folder = Path("somewhere")
    on_sql = reward_on(RewardSpec(params={"timeout_s": 2}), folder)
    assert on_sql == {"name": "text2sql_v1", "database_root": "somewhere", "timeout_s": 2}
    spec = RewardSpec(name="final_number_v1", params={"anywhere": False})
    assert reward_on(spec, folder) == {"name": "final_number_v1", "anywhere": False}
    assert reward_identity(spec).as_dict()["params"] == {"anywhere": False}
    with pytest.raises(ConfigError, match="No reward is called 'x'"):
        reward_identity(RewardSpec(name="x"))
    with pytest.raises(ConfigError, match="does not know database_root"):
        reward_identity(RewardSpec(name="final_number_v1", params={"database_root": "."}))


@pytest.mark.parametrize("kind", REWARDS.values(), ids=list(REWARDS))
def test_rewards_have_the_shape_that_stages_rely_on(kind):
    assert REWARDS[vars(kind)["__name__"]] is kind
    for method in (kind.results, kind.__call__):
        accepted = inspect.signature(method).parameters
        assert {"completions", *kind.required_columns} <= set(accepted)
        assert any(about.kind is about.VAR_KEYWORD for about in accepted.values())
    golds = inspect.signature(kind.check_golds).parameters
    assert list(golds)[:3] == ["self", "solution", "db_id"] and golds["db_id"].default is None
    assert ("database_root" in inspect.signature(kind).parameters) == kind.needs_databases
