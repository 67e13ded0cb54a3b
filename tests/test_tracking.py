"""MLflow: legal names, whole batches, true statuses, and no training lost to a tracking fault."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks import tracking
from tasks.tracking import TrackedRun, flat_params, metric_name, reconcile, safe_metrics


def test_illegal_metric_names_are_mapped_and_collisions_kept_apart() -> None:
    assert metric_name("pass@8") == "pass_at_8"
    assert metric_name("timing(s)/gen") == "timing_s_/gen"
    assert metric_name("/lead//x") == "lead/x"
    assert safe_metrics({"a,b": 1.0, "a;b": 2.0}) == {"a_b": 1.0, "a_b.2": 2.0}


def test_one_bad_name_does_not_cost_the_batch() -> None:
    run = TrackedRun("names", "run", {})
    run.metrics({"good": 1.0, "pass@8": 0.5, "timing(s)/gen": 2.0, "../up": 3.0, "dup%": 4.0})
    run.close("FINISHED")
    assert run.run_id is not None
    stored = tracking.client().get_run(run.run_id)
    assert stored.data.metrics["good"] == 1.0 and stored.data.metrics["pass_at_8"] == 0.5
    assert len(stored.data.metrics) == 5
    assert stored.info.status == "FINISHED"


def test_long_params_are_kept_whole_as_a_file(tmp_path: Path) -> None:
    run = TrackedRun("params", "run", {})
    run.params({"recipe": {"system_prompt": "z " * 10_000, "lr": 1e-5, "list": [1, 2]}})
    assert run.run_id is not None
    stored = tracking.client().get_run(run.run_id)
    assert stored.data.params["recipe.lr"] == "1e-05"
    assert stored.data.params["recipe.list"] == "[1, 2]"
    assert len(stored.data.params["recipe.system_prompt"]) == 6000
    file = tracking.client().download_artifacts(run.run_id, "long_params.json", str(tmp_path))
    assert "z " * 10_000 in Path(file).read_text()


def test_params_flatten_without_losing_empty_mappings() -> None:
    assert flat_params({"a": {"b": {"c": 1}}, "d": {}, "e": None}) == {"a.b.c": "1", "d": "{}", "e": "null"}


def test_steps_keep_their_axis() -> None:
    run = TrackedRun("steps", "run", {})
    run.metric_lines(
        [{"step": step, "time": time.time(), "metrics": {"loss": 1 / step}} for step in range(1, 2501)]
    )
    assert run.run_id is not None
    history = tracking.client().get_metric_history(run.run_id, "loss")
    assert [point.step for point in history] == list(range(1, 2501))


def test_a_tracking_fault_costs_a_warning_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = TrackedRun("faults", "run", {})
    real = tracking.client()
    with monkeypatch.context() as away:
        away.setattr(type(real), "log_batch", lambda *args, **kwargs: 1 / 0)
        run.metrics({"loss": 1.0}, step=1)
    run.metrics({"loss": 0.5}, step=2)
    assert caplog.text.count("could not log metrics") == 1, "it waits before it tries again"
    run.close("FINISHED")
    assert run.run_id is not None
    assert [point.value for point in real.get_metric_history(run.run_id, "loss")] == [1.0, 0.5]
    assert real.get_run(run.run_id).info.status == "FINISHED"


def test_a_run_that_could_not_be_opened_is_opened_later(monkeypatch: pytest.MonkeyPatch) -> None:
    real = tracking.client()
    monkeypatch.setattr(tracking, "RETRY_SECONDS", 0.0)
    with monkeypatch.context() as away:
        away.setattr(type(real), "create_run", lambda *args, **kwargs: 1 / 0)
        run = TrackedRun("late", "run", {})
        run.metrics({"loss": 1.0}, step=1)
        assert run.run_id is None
    run.metrics({"loss": 0.5}, step=2)
    assert run.run_id is not None
    assert [point.value for point in real.get_metric_history(run.run_id, "loss")] == [1.0, 0.5]


def test_what_the_server_refuses_does_not_block_what_follows(caplog: pytest.LogCaptureFixture) -> None:
    run = TrackedRun("refused", "run", {})
    run.params({"lr": 1e-5})
    run.params({"lr": 2e-5})  # MLflow's parameters are write-once
    run.metrics({"loss": 1.0})
    assert "could not log parameters" in caplog.text
    assert run.run_id is not None
    assert tracking.client().get_run(run.run_id).data.metrics["loss"] == 1.0


def test_no_server_at_all_still_gives_a_run_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run = TrackedRun("away", "run", {})
    run.metrics({"loss": 1.0})
    run.close("FINISHED")
    assert run.run_id is None


def test_runs_of_a_dead_process_are_marked_killed_and_living_ones_are_left() -> None:
    code = "from tasks.tracking import TrackedRun; import os; print(TrackedRun('dead', 'run', {}).run_id, flush=True); os._exit(1)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    abandoned = answer.stdout.strip().splitlines()[-1]
    ours = TrackedRun("dead", "ours", {})
    assert reconcile("dead") == 1
    assert ours.run_id is not None
    assert tracking.client().get_run(abandoned).info.status == "KILLED"
    assert tracking.client().get_run(ours.run_id).info.status == "RUNNING"
