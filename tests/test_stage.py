"""The stage contract: equal requests reuse, killed builds resume, failures leave no artifact and a true status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from data.artifacts import ArtifactRef
from tasks import tracking
from tasks.configs import ConfigError, Experiment, SampleStage, SelectStage, StageName
from tasks.launch import JobFailed
from tasks.pipeline import Pipeline
from tasks.stage import Build, Stage
from tasks.tracking import TrackedRun

pytestmark = pytest.mark.usefixtures("prefect_server")

BUILT: list[str] = []


def write_once(build: Build) -> Mapping[str, Any]:
    BUILT.append("sample")
    (build.payload / "file.txt").write_text(f"{build.recipe.max_samples}")
    return {"generated_tokens": 7}


def follow(build: Build) -> Mapping[str, Any]:
    BUILT.append("select")
    (build.payload / "copy.txt").write_text((build.inputs["samples"].payload / "file.txt").read_text())
    return {}


def fail(build: Build) -> Mapping[str, Any]:
    (build.payload / "half.txt").write_text("half")
    raise JobFailed("the job exited with 1")


SAMPLE = Stage("contract_sample", StageName.SAMPLE, "samples", 1, write_once)
SELECT = Stage("contract_select", StageName.SELECT, "prompts", 1, follow, seeded=False)
BROKEN = Stage("contract_broken", StageName.SAMPLE, "samples", 1, fail)


@pytest.fixture(autouse=True)
def _forget() -> None:
    BUILT.clear()


def pipeline(home: Path, planning: bool = False, seed: int = 0, **options: Any) -> Pipeline:
    experiment = Experiment(name="contract")
    parent = None if planning else TrackedRun("contract", "parent", {})
    made = Pipeline(experiment, seed=seed, parent=parent, **options)
    assert made.store.root == home / "artifacts"
    return made


def sample_stage(samples: int = 8, **runtime: Any) -> SampleStage:
    return SampleStage.model_validate({"recipe": {"max_samples": samples}, "runtime": runtime})


def both(one: Pipeline, samples: int = 8) -> ArtifactRef:
    drawn = one.stage(SAMPLE, sample_stage(samples))
    return one.stage(SELECT, SelectStage(), samples=drawn)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Artifacts of their own, one MLflow database for all: creating that costs seconds.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking.tracking_uri())
    monkeypatch.setenv("FURLONG_HOME", str(tmp_path))
    return tmp_path


def test_an_equal_request_is_reused_and_a_changed_recipe_is_not(home: Path) -> None:
    first = both(pipeline(home))
    again = pipeline(home)
    assert both(again) == first
    assert [outcome.reused for outcome in again.outcomes] == [True, True]
    assert BUILT == ["sample", "select"]
    assert both(pipeline(home), samples=16) != first
    assert BUILT == ["sample", "select"] * 2


def test_runtime_is_no_part_of_the_key_and_the_seed_is(home: Path) -> None:
    plain = pipeline(home).stage(SAMPLE, sample_stage())
    assert pipeline(home).stage(SAMPLE, sample_stage(timeout_s=99, retries=2)) == plain
    assert pipeline(home, seed=1).stage(SAMPLE, sample_stage()).key != plain.key
    assert BUILT == ["sample", "sample"]


def test_equal_bytes_upstream_keep_what_follows(home: Path) -> None:
    first = both(pipeline(home))
    seeded = pipeline(home, seed=5)
    assert both(seeded).key == first.key
    assert [outcome.reused for outcome in seeded.outcomes] == [False, True]


def test_fresh_rebuilds_a_stage_and_what_follows(home: Path) -> None:
    both(pipeline(home))
    both(pipeline(home, fresh=frozenset({StageName.SELECT})))
    assert BUILT == ["sample", "select", "select"]
    both(pipeline(home, fresh=frozenset({StageName.SAMPLE})))
    assert BUILT == ["sample", "select", "select", "sample", "select"]


def test_a_plan_tells_and_touches_nothing(home: Path) -> None:
    plan = pipeline(home, planning=True)
    assert both(plan).is_pending
    assert [outcome.reused for outcome in plan.outcomes] == [False, False]
    assert BUILT == [] and not list(home.rglob("manifest.json"))
    both(pipeline(home))
    known = pipeline(home, planning=True)
    assert not both(known).is_pending
    assert [outcome.reused for outcome in known.outcomes] == [True, True]


def test_only_the_steps_asked_for_may_be_built(home: Path) -> None:
    only = frozenset({StageName.SELECT})
    with pytest.raises(FileNotFoundError, match="contract_sample: no finished artifact matches"):
        both(pipeline(home, buildable=only))
    drawn = pipeline(home).stage(SAMPLE, sample_stage())
    assert pipeline(home, buildable=only).stage(SELECT, SelectStage(), samples=drawn).payload.is_dir()
    assert BUILT == ["sample", "select"]


def test_a_failed_job_leaves_no_artifact_and_a_failed_run(home: Path) -> None:
    one = pipeline(home)
    with pytest.raises(JobFailed):
        one.stage(BROKEN, sample_stage())
    assert not list(home.rglob("manifest.json"))
    run = newest_run("contract_broken")
    assert run.info.status == "FAILED"
    assert run.data.tags["mlflow.parentRunId"] == (one.parent and one.parent.run_id)


def test_a_retry_is_an_attempt_of_its_own(home: Path) -> None:
    with pytest.raises(JobFailed):
        pipeline(home).stage(BROKEN, sample_stage(retries=1))
    assert newest_run("contract_broken").data.tags["furlong.attempt"] == "2"


def test_a_finished_attempt_tells_mlflow_what_it_was(home: Path) -> None:
    ref = both(pipeline(home))
    run = newest_run("contract_select")
    assert run.info.status == "FINISHED"
    assert run.data.tags["furlong.key"] == ref.key and run.data.tags["furlong.digest"] == ref.digest
    assert run.data.params["recipe.low"] == "0.0"
    assert [entry.dataset.name for entry in run.inputs.dataset_inputs] == ["samples"]
    assert newest_run("contract_sample").data.metrics["facts/generated_tokens"] == 7


def newest_run(stage: str) -> Any:
    client = tracking.client()
    experiment = client.get_experiment_by_name("contract")
    assert experiment is not None
    return client.search_runs([experiment.experiment_id], f"tags.`furlong.stage` = '{stage}'", max_results=1)[
        0
    ]


SLOW_DRIVER = textwrap.dedent("""
    import sys, time
    from tests.test_stage import *

    def slow(build):
        done = build.partial.work / "shards"
        while not done.exists() or len(done.read_text()) < 20:
            with done.open("a") as stream:
                stream.write("x")
            time.sleep(0.1)
        with open(sys.argv[1], "a") as stream:
            stream.write(f"built after attempt {build.partial.attempt}\\n")
        (build.payload / "file.txt").write_text(done.read_text())
        return {}

    from data.store import furlong_home
    stage = Stage("contract_slow", StageName.SAMPLE, "samples", 1, slow)
    ref = pipeline(furlong_home()).stage(stage, sample_stage())
    print(ref.digest, flush=True)
""")


def start_slow_build(log: Path) -> subprocess.Popen[str]:
    from prefect.settings import PREFECT_API_URL

    environment = {**os.environ, "PREFECT_API_URL": PREFECT_API_URL.value() or ""}
    command = [sys.executable, "-c", SLOW_DRIVER, str(log)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def wait_for_work(home: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if any(len(file.read_text()) > 3 for file in home.rglob("*.partial/work/shards")):
            return
        time.sleep(0.05)
    raise AssertionError("the build did not start within 60 s")


def test_two_processes_that_ask_for_one_key_build_it_once(home: Path, tmp_path: Path) -> None:
    log = tmp_path / "builds.log"
    racers = [start_slow_build(log), start_slow_build(log)]
    digests = {racer.communicate(timeout=120)[0].strip().splitlines()[-1] for racer in racers}
    assert len(digests) == 1
    assert log.read_text() == "built after attempt 1\n"


def test_a_build_killed_in_the_middle_resumes_when_asked_again(home: Path, tmp_path: Path) -> None:
    log = tmp_path / "builds.log"
    victim = start_slow_build(log)
    wait_for_work(home)
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    assert not list(home.rglob("manifest.json"))
    (left,) = home.rglob("*.partial/work/shards")
    before = len(left.read_text())
    assert 3 < before < 20
    second = start_slow_build(log)
    assert second.communicate(timeout=120)[0].strip()
    assert log.read_text() == "built after attempt 2\n"
    (payload,) = home.rglob("contract_slow/*/payload/file.txt")
    assert payload.read_text() == "x" * 20, (
        "a resumed build continues; a restarted one would have more shards"
    )
    client = tracking.client()
    experiment = client.get_experiment_by_name("contract")
    assert experiment is not None
    assert tracking.reconcile("contract") >= 1, (
        "the killed attempt's run is still RUNNING until somebody looks"
    )


def test_fresh_and_only_that_contradict_each_other_are_refused(home: Path) -> None:
    both(pipeline(home))
    fresh, only = frozenset({StageName.SAMPLE}), frozenset({StageName.SELECT})
    with pytest.raises(ConfigError, match=r"--fresh asks for sample .* may build only select"):
        both(pipeline(home, fresh=fresh, buildable=only))


def test_a_moved_home_stays_a_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both(pipeline(home))
    moved = home.with_name("moved")
    home.rename(moved)
    monkeypatch.setenv("FURLONG_HOME", str(moved))
    again = pipeline(moved)
    assert str(moved) in both(again).path
    assert all(outcome.reused for outcome in again.outcomes)


def test_failed_attempts_are_in_the_bill(home: Path) -> None:
    tries: list[int] = []

    def second_time_lucky(build: Build) -> Mapping[str, Any]:
        tries.append(1)
        time.sleep(0.3)
        if len(tries) == 1:
            raise JobFailed("bad luck")
        (build.payload / "file.txt").write_text("x")
        return {}

    lucky = Stage("contract_lucky", StageName.SAMPLE, "samples", 1, second_time_lucky)
    one = pipeline(home)
    one.stage(lucky, sample_stage(retries=1))
    assert one.outcomes[0].seconds > 0.55
