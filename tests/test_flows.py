"""The flows end to end on the nano profile: what they leave, what they reuse, and what they refuse."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest

from data.artifacts import Manifest
from data.store import ArtifactStore
from tasks import tracking
from tasks.configs import ConfigError, StageName
from tasks.launch import REPOSITORY, JobFailed
from tasks.pipeline import plan

STAGES = [
    "make_prompts",
    "make_model",
    "train_sft",
    "sample_completions",
    "score_samples",
    "select_prompts",
    "report_curation",
    "train_grpo",
    "run_benchmark.base",
    "run_benchmark.sft",
    "run_benchmark.grpo",
    "write_report",
]
HEAVY = (
    "torch",
    "trl",
    "transformers",
    "vllm",
    "deepspeed",
    "mlflow",
    "ray",
    "polars",
    "scipy",
    "datasketch",
)


def manifest_of(stage: str) -> Manifest:
    return ArtifactStore().list(stage)[0]


@pytest.mark.parametrize(
    "module",
    ["flows.sft_grpo", "flows.prompt_curation", "flows.staleness_check", "flows.selection_comparison"],
)
def test_importing_a_flow_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY
    )
    assert answer.stdout.strip() == "[]"


def test_the_summary_has_every_number(nano: dict[str, Any]) -> None:
    assert list(nano["stages"]) == STAGES
    for model in ("base", "sft", "grpo"):
        low, high = nano[model]["greedy_ci"]
        assert 0 <= low <= nano[model]["greedy"] <= high <= 1
        assert 0 <= nano[model]["mean@4"] <= 1
    assert nano["prompts"] == {"total": 48, "kept": 48}
    assert 0 <= nano["zero_variance_share"] <= 1
    assert nano["stages"]["sample_completions"]["generated_tokens"] > 48 * 4
    assert nano["stages"]["train_grpo"]["generated_tokens"] >= 2 * 16
    assert not any(stage["reused"] for stage in nano["stages"].values())
    assert Path(nano["report"]).is_file()
    json.dumps(nano)


def test_every_artifact_says_how_it_was_made(nano: dict[str, Any]) -> None:
    for stage in {label.split(".")[0] for label in STAGES}:
        manifest = manifest_of(stage)
        assert manifest.ref.kind in ("prompts", "samples", "scores", "model", "report")
        assert manifest.packages["trl"] and manifest.git_commit != ""
        assert manifest.mlflow_run_id and manifest.prefect_flow_run_id
        assert (Path(manifest.ref.path) / "logs" / "attempt_1").is_dir()
        assert not (Path(manifest.ref.path) / "work").exists()
    request = manifest_of("train_grpo").request
    assert request["recipe"]["num_generations"] == 4 and request["seed"] == 0
    assert request["rewards"][0].startswith("text2sql_v1@1+")


def test_the_report_shows_results_plots_and_the_mixed_demonstrations(nano: dict[str, Any]) -> None:
    report = Path(nano["report"])
    text = report.read_text()
    assert (
        "| sft |" in text
        and "Kept 48 of 48 prompts" in text
        and "| template | demonstrations | mistaken |" in text
    )
    for plot in ("pass_rates.png", "training.png", "benchmark.png"):
        assert f"({plot})" in text
        assert (report.parent / plot).read_bytes().startswith(b"\x89PNG")


def test_mlflow_holds_the_pipeline_and_its_stages(nano: dict[str, Any]) -> None:
    client = tracking.client()
    parent = client.get_run(nano["mlflow_run_id"])
    assert parent.info.status == "FINISHED"
    assert parent.data.tags["reward.text2sql_v1.version"] == "1"
    assert len(parent.data.tags["reward.text2sql_v1.digest"]) == 64
    assert parent.data.metrics["sft/greedy"] == pytest.approx(nano["sft"]["greedy"], abs=1e-4)
    assert parent.data.metrics["grpo/mean_at_4"] == pytest.approx(nano["grpo"]["mean@4"], abs=1e-4)
    assert parent.data.params["grpo.recipe.num_generations"] == "4"
    assert "/runs/flow-run/" in parent.data.tags["prefect.flow_run_url"]
    files = {file.path for file in client.list_artifacts(parent.info.run_id, "report")}
    assert {"report/report.md", "report/training.png"} <= files

    children = client.search_runs(
        [parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'", max_results=50
    )
    assert {run.info.run_name for run in children} == set(STAGES)
    assert {run.info.status for run in children} == {"FINISHED"}
    grpo = next(run for run in children if run.info.run_name == "train_grpo")
    assert {
        "reward",
        "loss",
        "zero_variance_share",
        "within_group_std",
        "reward_term/result/mean",
        "reward_status/correct",
    } <= set(grpo.data.metrics)
    assert [point.step for point in client.get_metric_history(grpo.info.run_id, "zero_variance_share")] == [
        1,
        2,
    ]
    assert grpo.data.params["resolved.loss_type"] == "dapo" and grpo.data.params["resolved.epsilon"] == "0.2"
    assert grpo.data.params["resolved.advantage_std"] == "sample (n - 1), over each group"
    assert grpo.data.params["resolved.reference_model"] == "none"
    assert grpo.data.tags["reward.text2sql_v1.version"] == "1"
    inputs: Any = grpo.inputs
    assert {entry.dataset.name for entry in inputs.dataset_inputs} == {"model", "prompts", "databases"}
    tables = [file.path for file in client.list_artifacts(grpo.info.run_id, "tables")]
    assert tables == ["tables/completions_00001.json", "tables/completions_00002.json"]


def test_an_identical_call_starts_no_job(nano: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from flows.sft_grpo import sft_grpo
    from tasks import stage

    monkeypatch.setattr(stage, "run_job", lambda *args, **kwargs: pytest.fail("a job was started"))
    again = sft_grpo(config="nano")
    assert all(row["reused"] for row in again["stages"].values())
    assert again["report"] == nano["report"]
    assert {name: again[name] for name in ("base", "sft", "grpo", "prompts")} == {
        name: nano[name] for name in ("base", "sft", "grpo", "prompts")
    }


def test_a_changed_grpo_recipe_reuses_sft_and_curation(nano: dict[str, Any]) -> None:
    from flows.sft_grpo import stages

    rows = plan(stages, "nano", ["grpo.recipe.beta=0.04"], 0, [])
    actions = {row["stage"]: row["action"] for row in rows}
    built = {"train_grpo", "run_benchmark.grpo", "write_report"}
    assert {stage for stage, action in actions.items() if action == "build"} == built


def test_curation_alone_reruns_what_is_asked_for(nano: dict[str, Any]) -> None:
    from flows.prompt_curation import prompt_curation

    fresh = prompt_curation(config="nano", fresh=[StageName.SELECT])
    assert {label for label, row in fresh["stages"].items() if not row["reused"]} == {
        "select_prompts",
        "report_curation",
    }
    band = ["select.recipe={low: 0.0, high: 0.0, low_closed: true, high_closed: true, drop_truncated: false}"]
    other = prompt_curation(config="nano", overrides=band, only="select")
    assert {label for label, row in other["stages"].items() if not row["reused"]} == {
        "select_prompts"  # it keeps the same prompts here, so the report of them is reused
    }
    with pytest.raises(FileNotFoundError, match="sample_completions: no finished artifact"):
        prompt_curation(config="nano", overrides=["sample.recipe.max_samples=5"], only="score")


def test_an_empty_selection_says_what_would_help(nano: dict[str, Any]) -> None:
    from flows.prompt_curation import prompt_curation

    band = ["select.recipe={low: 0.99, high: 1.0, drop_truncated: false}"]
    with pytest.raises(
        ConfigError,
        match=r"0 of 48 curation prompts were kept; one batch needs 4 .*Most were never solved",
    ):
        prompt_curation(config="nano", overrides=band, only="select")


def test_a_dry_run_lets_trl_judge_its_own_arguments(nano: dict[str, Any]) -> None:
    from flows.sft_grpo import stages

    with pytest.raises(JobFailed, match="unexpected keyword argument 'no_such_argument'"):
        plan(stages, "nano", ["grpo.recipe.trl={no_such_argument: 1}"], 0, [])
    with pytest.raises(JobFailed, match="Furlong sets from named fields"):
        plan(stages, "nano", ["grpo.recipe.trl={beta: 0.1}"], 0, [])


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", *arguments]


def dry_run(override: str) -> subprocess.CompletedProcess[str]:
    arguments = command("flows.sft_grpo", "--config", "nano", "--set", override, "--dry-run")
    return subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=REPOSITORY)


def test_the_command_line_prints_a_plan_and_ends_in_json(nano: dict[str, Any]) -> None:
    answer = dry_run("grpo.recipe.beta=0.04")
    assert answer.returncode == 0, answer.stderr
    rows = json.loads(answer.stdout.strip().splitlines()[-1])["plan"]
    assert [row["stage"] for row in rows] == STAGES
    assert rows[2]["action"] == "reuse" and rows[7]["action"] == "build"


def test_a_wrong_field_ends_with_one_clear_line() -> None:
    answer = dry_run("grpo.recipe.betta=1")
    assert answer.returncode == 1
    assert "grpo.recipe.betta: Extra inputs are not permitted" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_a_stopped_training_is_killed_whole_and_resumes(nano: dict[str, Any]) -> None:
    """SIGTERM in the middle of SFT, as Prefect's cancel sends it: no orphan, a KILLED run, and the rest on rerun."""
    from prefect.settings import PREFECT_API_URL

    overrides = ["--set", "sft.recipe.steps=150", "--set", "sft.runtime.save_steps=10"]
    environment = {**os.environ, "PREFECT_API_URL": PREFECT_API_URL.value() or ""}
    flow = subprocess.Popen(
        command("flows.prompt_curation", "--config", "nano", *overrides), cwd=REPOSITORY, env=environment
    )
    home = ArtifactStore().root
    checkpoint = wait_for(
        lambda: next(home.glob("train_sft/*.partial/work/checkpoints/checkpoint-*/trainer_state.json"), None)
    )
    tree = psutil.Process(flow.pid).children(recursive=True)
    assert any("tasks.jobs.sft" in " ".join(process.cmdline()) for process in tree)
    flow.send_signal(signal.SIGTERM)
    flow.wait(60)
    psutil.wait_procs(tree, timeout=15)
    assert not [
        process for process in tree if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]
    partial = checkpoint.parents[3]
    assert not list(partial.parent.glob(f"{partial.name.removesuffix('.partial')}/manifest.json"))
    assert newest_run("train_sft").info.status == "KILLED"

    subprocess.run(
        command("flows.prompt_curation", "--config", "nano", *overrides),
        cwd=REPOSITORY,
        env=environment,
        check=True,
    )
    resumed = [m for m in ArtifactStore().list("train_sft") if m.request["recipe"]["steps"] == 150]
    assert resumed[0].attempt == 2
    second_attempt = (
        (Path(resumed[0].ref.path) / "logs" / "attempt_2" / "metrics.jsonl").read_text().splitlines()
    )
    assert json.loads(second_attempt[0])["step"] >= 10, (
        "the second attempt started at the checkpoint, not at step 1"
    )
    history = (resumed[0].ref.record / "metrics.jsonl").read_text().splitlines()
    assert json.loads(history[0])["step"] == 5, "the kept history covers both attempts"


def wait_for(find: Any, seconds: float = 120) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := find():
            return found
        time.sleep(0.1)
    raise AssertionError(f"nothing after {seconds} s")


def newest_run(stage: str) -> Any:
    client = tracking.client()
    experiment = client.get_experiment_by_name("nano")
    assert experiment is not None
    return client.search_runs([experiment.experiment_id], f"tags.`furlong.stage` = '{stage}'", max_results=1)[
        0
    ]


SHARED = Path(os.environ.get("FURLONG_SHARED_DATA") or REPOSITORY.parent / "shared" / "data")
needs_spider = pytest.mark.skipif(
    not (SHARED / "spider_dev" / "questions.jsonl").is_file(),
    reason=f"no Spider slice at {SHARED / 'spider_dev'}; point FURLONG_SHARED_DATA at a folder that has it",
)


def table_source(location: Path, database_root: Path) -> str:
    source = {
        "kind": "table",
        "location": str(location),
        "database_root": str(database_root),
        "prompt_template": "{question}",
        "licence": "CC-BY-SA-4.0",
    }
    return f"prompts.recipe.source={json.dumps(source)}"


@needs_spider
def test_the_same_flow_takes_an_outside_data_set_and_a_model_folder(
    nano: dict[str, Any], tmp_path: Path
) -> None:
    """A slice of Spider, with golds that return nothing among it, from a local model folder to the report."""
    from flows.sft_grpo import sft_grpo

    lines = (SHARED / "spider_dev" / "questions.jsonl").read_text().splitlines()
    questions = tmp_path / "questions.jsonl"
    questions.write_text("\n".join(lines[:240]) + "\n")
    model = {"kind": "pretrained", "id": str(manifest_of("make_model").ref.payload)}
    overrides = [
        table_source(questions, SHARED / "spider_dev" / "databases"),
        f"model.recipe.source={json.dumps(model)}",
        "grpo.recipe.batch_size=8",
    ]
    summary = sft_grpo(config="nano", overrides=overrides)
    assert list(summary["stages"]) == STAGES
    assert summary["prompts"]["kept"] <= summary["prompts"]["total"]
    prompts = next(m for m in ArtifactStore().list("make_prompts") if m.facts["licence"] == "CC-BY-SA-4.0")
    assert prompts.facts["suspect_gold"] > 0, "some golds of Spider return nothing: set aside, not trained on"
    assert "| CC-BY-SA-4.0 |" in Path(summary["report"]).read_text()


@needs_spider
def test_a_bad_file_is_named_with_its_rows_and_nothing_is_committed(
    nano: dict[str, Any], tmp_path: Path
) -> None:
    from flows.sft_grpo import sft_grpo

    bad = tmp_path / "bad.jsonl"
    rows = [{"question": f"How many {n}?", "gold_sql": f"SELECT {n}", "db_id": "singer"} for n in range(9)]
    rows[4]["gold_sql"] = "  "
    bad.write_text("\n".join(map(json.dumps, rows)))
    before = len(ArtifactStore().list())
    with pytest.raises(ValueError, match=r"bad\.jsonl.*(row 5|5)") as caught:
        sft_grpo(config="nano", overrides=[table_source(bad, SHARED / "spider_dev" / "databases")])
    assert "gold_sql" in str(caught.value)
    assert len(ArtifactStore().list()) == before


def test_prefect_shows_progress_report_and_the_way_to_mlflow(nano: dict[str, Any]) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

    flow_run = tracking.client().get_run(nano["mlflow_run_id"]).data.tags["prefect.flow_run_id"]
    with get_client(sync_client=True) as client:
        wanted = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[UUID(flow_run)]))
        artifacts = {artifact.key: artifact for artifact in client.read_artifacts(artifact_filter=wanted)}
    assert artifacts["train-grpo-progress"].data == 100
    assert nano["mlflow_run_id"] in str(artifacts["sft-grpo-mlflow"].data)
    assert "data:image/png;base64," in str(artifacts["report"].data)
