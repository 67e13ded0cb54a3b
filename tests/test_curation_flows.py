"""Curation as people run it: re-scoring, another policy, staleness, comparison, and other tasks than Text2SQL."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from uuid import UUID

import polars as pl
import pytest

from data.artifacts import Manifest
from data.store import ArtifactStore
from tasks import stage, tracking
from tasks.configs import ConfigError
from tasks.launch import REPOSITORY
from tasks.pipeline import plan
from tasks.recipes import RewardSpec

SHARED = Path(os.environ.get("FURLONG_SHARED_DATA") or REPOSITORY.parent / "shared" / "data")
OTHER_WEIGHTS = RewardSpec(params={"weights": [0.2, 0.6, 0.2]})


def built(summary: dict[str, Any]) -> set[str]:
    return {label for label, row in summary["stages"].items() if not row["reused"]}


def of_nano(stage_name: str) -> Manifest:
    """What the session's fixture built, before any test built more."""
    return ArtifactStore().list(stage_name)[0]


def newest(stage_name: str) -> Manifest:
    return ArtifactStore().list(stage_name)[-1]


def no_job(*args: Any, **kwargs: Any) -> None:
    pytest.fail("a job was started")


def test_another_reward_scores_stored_samples_and_says_what_changed(
    nano: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.prompt_curation import prompt_curation

    monkeypatch.setattr(stage, "run_job", no_job)
    summary = prompt_curation(config="nano", only="score", rescore_with=OTHER_WEIGHTS)
    assert built(summary) == {
        "score_samples.rescored",
        "select_prompts.rescored",
        "compare_selections",
        "report_curation.rescored",
    }
    scores = newest("score_samples")
    assert scores.request["reward_params"]["weights"] == {"executes": 0.2, "result": 0.6, "format": 0.2}
    compared = newest("compare_selections")
    assert compared.facts["in_both"] == 48 and compared.facts["label_changed"] == 0
    assert "before \\ after" in (compared.ref.payload / "comparison.md").read_text()
    client = tracking.client()
    run = client.get_run(str(scores.mlflow_run_id))
    assert (
        run.data.tags["reward.text2sql_v1.params"]
        != client.get_run(nano["mlflow_run_id"]).data.tags["reward.text2sql_v1.params"]
    )


def test_more_completions_are_added_to_those_that_exist(nano: dict[str, Any]) -> None:
    from flows.prompt_curation import prompt_curation

    before = of_nano("sample_completions").facts
    summary = prompt_curation(config="nano", overrides=["sample.recipe.max_samples=6"], only="sample")
    facts = newest("sample_completions").facts
    assert facts["completions"] == 48 * 6 and facts["new_completions"] == 48 * 6 - before["completions"]
    samples = pl.read_parquet(Path(summary["artifact"]) / "payload" / "samples.parquet")
    assert samples.group_by("prompt_id").len()["len"].unique().to_list() == [6]
    stops = pl.read_parquet(Path(summary["artifact"]) / "payload" / "stops.parquet")
    assert stops["stop_rule"].unique().to_list() == ["cap"]


def test_a_budget_stops_sampling_and_the_rest_says_so(nano: dict[str, Any]) -> None:
    from flows.prompt_curation import prompt_curation

    summary = prompt_curation(config="nano", overrides=["sample.recipe.max_total_samples=101"], only="sample")
    stops = pl.read_parquet(Path(summary["artifact"]) / "payload" / "stops.parquet")
    assert stops["trials"].sum() <= 101
    assert (stops["stop_rule"] == "budget").sum() > 40


def test_the_pass_rate_of_the_base_model_needs_no_warm_start(nano: dict[str, Any]) -> None:
    from flows.prompt_curation import prompt_curation

    summary = prompt_curation(config="nano", overrides=["sample.recipe.policy=base"])
    assert "train_sft" not in summary["stages"] and "sample_completions" in built(summary)
    base, warm = of_nano("make_model").ref.digest, of_nano("train_sft").ref.digest
    assert newest("sample_completions").request["inputs"]["model"] == base != warm


def test_a_policy_that_is_nowhere_is_refused(nano: dict[str, Any]) -> None:
    from flows.prompt_curation import prompt_curation

    with pytest.raises(ConfigError, match=r"no policy 'sftt': expected `base`, `sft`, the folder"):
        prompt_curation(config="nano", overrides=["sample.recipe.policy=sftt"])


def test_staleness_counts_flips_and_refreshes_when_asked(nano: dict[str, Any]) -> None:
    """The trained model against itself flips nothing; a limit of zero flips with another checkpoint refreshes."""
    from flows.staleness_check import staleness_check

    overrides = ["staleness.recipe.prompts=16"]
    trained = of_nano("train_grpo").ref.path
    summary = staleness_check(trained, "nano", overrides)
    found = summary["staleness"]
    assert found["sampled"] == 16 and found["of"] == 48
    assert 0 <= found["flipped_low"] <= found["flipped_share"] <= found["flipped_high"] <= 1
    assert 0 <= found["expected_by_chance"] <= 1
    assert not any(label.endswith(".refreshed") for label in summary["stages"])
    flips = pl.read_parquet(newest("check_staleness").ref.payload / "flips.parquet")
    assert flips["flipped"].mean() == pytest.approx(
        sum(part["flipped"] for part in found["by_label"].values()) / 16
    )
    parent = tracking.client().get_run(summary["mlflow_run_id"]).data.metrics
    assert parent["staleness/flipped_share"] == pytest.approx(found["flipped_share"])


def test_two_selections_are_compared_by_their_folders(nano: dict[str, Any], tmp_path: Path) -> None:
    from flows.prompt_curation import prompt_curation
    from flows.selection_comparison import selection_comparison

    whole = prompt_curation(config="nano")["selection"]
    half = prompt_curation(config="nano", overrides=["select.recipe.target_size=20"])["selection"]
    selection_comparison(whole, half, "nano")
    facts = newest("compare_selections").facts
    assert (facts["kept_both"], facts["kept_only_a"], facts["kept_only_b"]) == (20, 28, 0)
    with pytest.raises(ConfigError, match="no artifact at"):
        selection_comparison(whole, str(tmp_path), "nano")


def test_too_few_prompts_fail_before_any_training(
    nano: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.sft_grpo import sft_grpo

    monkeypatch.setattr(stage, "run_job", no_job)
    with pytest.raises(ConfigError, match=r"3 of 48 curation prompts were kept; one batch needs 4"):
        sft_grpo(config="nano", overrides=["select.recipe.target_size=3"])


def test_the_report_can_be_browsed_and_is_linked_from_prefect(nano: dict[str, Any]) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

    client = tracking.client()
    files = {file.path for file in client.list_artifacts(nano["mlflow_run_id"], "curation")}
    assert files == {
        f"curation/{name}"
        for name in ("browse.html", "curation.md", "classes.png", "pass_rates.png", "trials.png")
    }
    flow_run = client.get_run(nano["mlflow_run_id"]).data.tags["prefect.flow_run_id"]
    with get_client(sync_client=True) as server:
        wanted = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[UUID(flow_run)]))
        shown = {
            artifact.key: str(artifact.data) for artifact in server.read_artifacts(artifact_filter=wanted)
        }
    assert f"/runs/{nano['mlflow_run_id']}/artifacts/curation/browse.html" in shown["curation"]
    assert shown["curation"].count("data:image/png;base64,") == 3


def test_grpo_sees_prompts_in_proportion_to_their_weights() -> None:
    from tasks.jobs.prompt_rows import weighted_order

    order = weighted_order([0.0, 1.0, 1.0, 4.0, 1.0], per_batch=2, batches=4000, seed=0)
    batches = [order[start : start + 2] for start in range(0, len(order), 2)]
    assert all(len(set(batch)) == 2 for batch in batches), "a batch holds no prompt twice"
    counts = [order.count(row) for row in range(5)]
    assert counts[0] == 0 and counts[3] > 1.8 * max(counts[1], counts[2], counts[4])
    assert order == weighted_order([0.0, 1.0, 1.0, 4.0, 1.0], per_batch=2, batches=4000, seed=0)
    with pytest.raises(ValueError, match="1 prompts have a weight above 0"):
        weighted_order([0.0, 1.0], per_batch=2, batches=1, seed=0)


@pytest.mark.skipif(
    not (SHARED / "gsm8k" / "train.jsonl").is_file(),
    reason=f"no GSM8K at {SHARED / 'gsm8k'}; point FURLONG_SHARED_DATA at a folder that has it",
)
def test_gsm8k_goes_through_the_whole_chain(nano: dict[str, Any]) -> None:
    """Loaded, cleaned of its leaks, warm-started, sampled, scored by its numbers, selected."""
    from flows.prompt_curation import prompt_curation

    source = {
        "kind": "questions",
        "location": str(SHARED / "gsm8k" / "train.jsonl"),
        "heldout_location": str(SHARED / "gsm8k" / "test.jsonl"),
        "train": 0.8,
        "curation": 0.2,
        "limit": 120,
        "licence": "MIT",
    }
    overrides = [
        f"prompts.recipe={json.dumps({'source': source, 'hygiene': {'on_leak': 'remove'}})}",
        "reward={name: final_number_v1}",
        "model.recipe.source.max_position_embeddings=1024",
        "sample.recipe.max_completion_length=48",
    ]
    summary = prompt_curation(config="nano", overrides=overrides)
    prompts = newest("make_prompts")
    assert prompts.facts["licence"].startswith("MIT") and prompts.facts["suspect_gold"] == 0
    assert prompts.facts["prompts.heldout"] == 120
    assert summary["prompts"]["total"] == prompts.facts["prompts.curation"] > 15
    scores = pl.read_parquet(newest("score_samples").ref.payload / "scores.parquet")
    assert set(scores["status"]) <= {"correct", "incorrect", "no_answer"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sample.recipe.engine=server", "sample.runtime.server_urls is empty"),
        ("model.recipe.source={kind: pretrained, id: /nope}", "no folder at /nope"),
        (
            "prompts.recipe.source={kind: questions, location: owner/name, revision: abc}",
            "have no database, but the reward text2sql_v1 runs on one",
        ),
        ("sample.runtime.engine_arguments={kv_cache_dtype: fp8}", "may not set kv_cache_dtype"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_built(
    home: Path, override: str, message: str
) -> None:
    from flows.prompt_curation import stages

    with pytest.raises(ConfigError, match=message):
        plan(stages, "nano", [override], 0, [])


def test_an_unknown_reward_is_refused_before_anything_is_built(home: Path) -> None:
    from flows.prompt_curation import stages

    with pytest.raises(ConfigError, match="No reward is called 'text2sql_v9'"):
        plan(lambda made: stages(made, "score", RewardSpec(name="text2sql_v9")), "nano", [], 0, [])
