"""Shards on a real local Ray, with the real sampling job: the same samples as without, and nothing left behind."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pytest

from data.sample_ledger import SampleLedger, read_samples
from data.schemas import PromptTable, write_table
from tasks.jobs import protocol
from tasks.jobs.protocol import Request
from tasks.launch import REPOSITORY, JobCancelled, JobFailed, run_job
from tasks.recipes import SamplingRuntime
from tests.test_launch import Heard, gone
from tests.tiny_policy import make_policy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("ray", "prefect_ray")),
        reason="Ray is not installed (the extra `ray`)",
    ),
]
PROMPTS = [f"Which horses won race {number}?" for number in range(6)]
RUNTIME = SamplingRuntime(shards=2, ray_address="local", batch_size=8)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("fanout")
    make_policy(folder / "model", PROMPTS)
    rows = [
        {
            "prompt_id": f"p{number}",
            "split": "curation",
            "prompt": prompt,
            "completion": None,
            "solution": "1",
        }
        | {"db_id": None, "source": "races", "gold_status": "ok", "cluster": f"p{number}"}
        for number, prompt in enumerate(PROMPTS)
    ]
    (folder / "prompts").mkdir()
    types = {"completion": pl.String, "db_id": pl.String}
    table = pl.DataFrame(rows, schema_overrides=types)
    write_table(table, folder / "prompts" / "prompts.parquet", PromptTable)
    return {"prompts": str(folder / "prompts"), "model": str(folder / "model")}


def shard_requests(inputs: dict[str, str], folder: Path, samples: int = 4, shards: int = 2) -> list[Request]:
    """Requests of the sampling job, as the stage `sample_completions` makes them."""
    sampling = {"temperature": 1.0, "top_p": 1.0, "max_completion_length": 8}
    ledger = SampleLedger(folder / "ledger", sampling)
    ledger.create()
    for name in ("work", "payload"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    draw = {
        "name": "samples",
        "plan": {"first": 4, "more": 4, "cap": samples},
        "sampling": sampling,
        "ledger": str(ledger.folder),
    }
    options = {"engine": "transformers", "split": "curation", "reward": None, "seed": 0, "draws": [draw]}
    payload, work = str(folder / "payload"), str(folder / "work")
    runtime = RUNTIME.model_dump(mode="json")
    requests = []
    for shard in range(shards):
        channel = folder / f"shard-{shard}"
        channel.mkdir()
        one = Request({}, runtime, 0, inputs, payload, work, str(channel))
        requests.append(replace(one, options={**options, "shard": [shard, shards]}))
    return requests


def drawn(requests: list[Request]) -> pl.DataFrame:
    ids = [f"p{number}" for number in range(len(PROMPTS))]
    return read_samples(Path(requests[0].options["draws"][0]["ledger"]), ids).sort(
        "prompt_id", "sample_index"
    )


def descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def job_processes(folder: Path) -> list[int]:
    """Of jobs whose request lies below `folder`, on the whole machine; a job is found by its command line."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(folder) in part and protocol.REQUEST in part for part in process.info["cmdline"] or []):
            found.append(process.pid)
    return found


def test_two_shards_draw_what_one_job_draws(
    prefect_server: None, inputs: dict[str, str], tmp_path: Path
) -> None:
    from prefect import flow

    from tasks.fanout import run_shards

    before = descendants()
    requests = shard_requests(inputs, tmp_path / "shards")

    @flow
    def sample() -> list[dict[str, Any]]:
        return run_shards("sample", requests, RUNTIME)

    handler = signal.getsignal(signal.SIGTERM)
    facts = sample()
    assert [fact["new_completions"] for fact in facts] == [12, 12], "in order, a half each"
    alone = shard_requests(inputs, tmp_path / "alone", shards=1)
    run_job("sample", alone[0], Heard().listener)
    assert len(drawn(alone)) == 24
    assert drawn(requests).equals(drawn(alone))

    assert signal.getsignal(signal.SIGTERM) == handler
    assert gone([process.pid for process in descendants() - before]), "Ray ends with the run"
    assert not os.environ.get("RAY_ADDRESS")


def test_a_failing_shard_ends_the_others(
    prefect_server: None, inputs: dict[str, str], tmp_path: Path
) -> None:
    from tasks.fanout import run_shards

    endless, broken = shard_requests(inputs, tmp_path, samples=100_000)
    broken = replace(broken, inputs={**inputs, "prompts": str(tmp_path / "nowhere")})
    with pytest.raises(JobFailed, match=r"shard 1 of 2: sample: the job exited with 1(?s:.)*nowhere"):
        run_shards("sample", [endless, broken], RUNTIME)
    assert gone(job_processes(tmp_path), seconds=2)


def test_a_cancelled_flow_ends_all_shards(
    prefect_server: None, inputs: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks import fanout

    requests = shard_requests(inputs, tmp_path, samples=100_000)
    started = [Path(request.channel) / protocol.PROGRESS for request in requests]
    monkeypatch.setattr(fanout, "flow_run_is_cancelled", lambda: all(path.is_file() for path in started))
    with pytest.raises(JobCancelled):
        fanout.run_shards("sample", requests, RUNTIME)
    assert gone(job_processes(tmp_path), seconds=2)
    assert not any((Path(request.channel) / protocol.RESULT).is_file() for request in requests)


DRIVER = """
import json, sys
from prefect import flow
from tasks.fanout import run_shards
from tasks.jobs.protocol import Request
from tasks.recipes import SamplingRuntime

@flow
def sample():
    requests = [Request(**request) for request in json.load(sys.stdin)]
    run_shards("sample", requests, SamplingRuntime(shards=2, ray_address="local"))

sample()
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_killed_flow(
    prefect_server: None, inputs: dict[str, str], tmp_path: Path, signum: signal.Signals
) -> None:
    from prefect.settings import PREFECT_API_URL

    requests = shard_requests(inputs, tmp_path, samples=100_000)
    temporary = tempfile.mkdtemp(prefix="f")  # Ray's folder, which a killed flow leaves; tmp_path is too long
    environment = {**os.environ, "PREFECT_API_URL": PREFECT_API_URL.value() or "", "TMPDIR": temporary}
    flow = subprocess.Popen(
        [sys.executable, "-c", DRIVER], cwd=REPOSITORY, stdin=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert flow.stdin is not None
        flow.stdin.write(json.dumps([asdict(request) for request in requests]))
        flow.stdin.close()
        wait_for([Path(request.channel) / protocol.PROGRESS for request in requests], flow)
        tree = {process.pid: process.name() for process in psutil.Process(flow.pid).children(recursive=True)}
        assert len(set(tree) & set(job_processes(tmp_path))) == 4, "two jobs and their supervisors"
        flow.send_signal(signum)
        flow.wait(60)
    finally:
        flow.kill()
        shutil.rmtree(temporary, ignore_errors=True)
    assert gone(job_processes(tmp_path), seconds=120)
    # Ray's two agents look only every few minutes whether their node still lives.
    assert gone([pid for pid, name in tree.items() if "Agent" not in name], seconds=120)


def wait_for(files: list[Path], flow: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not all(path.is_file() for path in files):
        assert time.monotonic() < deadline
        assert flow.poll() is None, "the flow ended before its shards had drawn anything"
        time.sleep(0.2)
