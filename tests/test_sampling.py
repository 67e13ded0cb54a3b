"""Sampling end to end with real engines and real kills: nothing is ever drawn twice, and nothing is missing."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

from data.sample_ledger import SampleLedger, read_samples, sample_seed
from data.store import ArtifactStore
from tasks.jobs.protocol import Request
from tasks.launch import REPOSITORY

SPLIT = "curation"
# Imports the job once and forks a child a request: starting Python, torch and TRL anew takes ten seconds.
FORK_SERVER = """
import os, sys
from tasks.jobs import sample
from tasks.jobs.protocol import Request
print("ready", flush=True)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        sample.main(Request.read(line.strip()))
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def fork_server() -> Iterator[subprocess.Popen[str]]:
    server = subprocess.Popen(
        [sys.executable, "-c", FORK_SERVER],
        cwd=REPOSITORY,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None and server.stdout.readline() == "ready\n"
    yield server
    server.stdin.close()  # type: ignore[union-attr]
    server.wait(30)


@pytest.fixture
def request_for(nano: dict[str, Any], tmp_path: Path) -> Callable[..., Request]:
    """Requests of the sampling job for the nano model and prompts, with a ledger of the test's own."""
    inputs = {
        role: str(ArtifactStore().list(stage)[0].ref.payload)
        for role, stage in (("prompts", "make_prompts"), ("model", "make_model"))
    }

    def make(count: int, *, seed: int = 0, batch_size: int | None = 8, **sampling: Any) -> Request:
        settings = {"temperature": 1.0, "top_p": 1.0, "max_completion_length": 8, **sampling}
        ledger = SampleLedger(tmp_path / "ledger", {"seed": seed, **settings})
        ledger.create()
        for name in ("work", "channel", "payload"):
            (tmp_path / name).mkdir(exist_ok=True)
        draw = {
            "name": "samples",
            "plan": {"first": count, "more": count, "cap": count},
            "sampling": settings,
            "ledger": str(ledger.folder),
        }
        options = {
            "engine": "transformers",
            "split": SPLIT,
            "prompt_ids": None,
            "reward": None,
            "seed": seed,
            "draws": [draw],
            "shard": [0, 1],
        }
        folders = {name: str(tmp_path / name) for name in ("payload", "work", "channel")}
        return Request({}, {"batch_size": batch_size}, seed, inputs, **folders, options=options)

    return make


def start(server: subprocess.Popen[str], request: Request) -> int:
    """Fork a job and return its process id."""
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(f"{request.write()}\n")
    server.stdin.flush()
    return int(server.stdout.readline())


def end(server: subprocess.Popen[str]) -> int:
    assert server.stdout is not None
    return int(server.stdout.readline())


def run(server: subprocess.Popen[str], request: Request) -> dict[str, Any]:
    start(server, request)
    assert end(server) == 0
    return json.loads((Path(request.channel) / "result.json").read_text())["facts"]


def ledger_of(request: Request) -> Path:
    return Path(request.options["draws"][0]["ledger"])


def lines_of(request: Request) -> list[dict[str, Any]]:
    """Every whole line of every segment: what was ever drawn."""
    lines = []
    for segment in ledger_of(request).glob("*.jsonl"):
        content = segment.read_bytes()
        lines += [json.loads(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]
    return lines


def prompt_ids(request: Request) -> list[str]:
    table = pl.read_parquet(Path(request.inputs["prompts"]) / "prompts.parquet")
    return table.filter(pl.col("split") == SPLIT)["prompt_id"].sort().to_list()


def completions(request: Request) -> dict[tuple[str, int], str]:
    table = read_samples(ledger_of(request), prompt_ids(request))
    return {
        (p, i): text for p, i, text in table.select("prompt_id", "sample_index", "completion").iter_rows()
    }


def test_killed_at_ten_random_points_every_completion_is_drawn_once(
    fork_server: subprocess.Popen[str], request_for: Callable[..., Request]
) -> None:
    request = request_for(4)
    rng = random.Random(4)
    kills = 0
    for _ in range(10):
        before = len(lines_of(request))
        child = start(fork_server, request)
        deadline = time.monotonic() + 60
        # Some die before they draw anything, some after a few batches, at any moment within one.
        wanted = before + rng.choice([0, 8, 8, 16])
        while len(lines_of(request)) < wanted and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(rng.random() * 0.05)
        subprocess.run(["kill", "-KILL", str(child)], check=False)
        kills += end(fork_server) == -signal.SIGKILL
    assert kills >= 8, "the kills came too late to prove anything"
    facts = run(fork_server, request)
    drawn = Counter((line["prompt_id"], line["sample_index"]) for line in lines_of(request))
    expected = {(prompt_id, index) for prompt_id in prompt_ids(request) for index in range(4)}
    assert set(drawn) == expected
    assert set(drawn.values()) == {1}, "something was drawn twice"
    assert facts["completions"] == len(expected) > facts["new_completions"]

    after_kills = completions(request)
    ledger_of(request).rename(ledger_of(request).with_name("killed"))
    run(fork_server, request_for(4))
    assert completions(request) == after_kills, "what is drawn does not depend on where the job was killed"


def test_sixteen_after_eight_draws_eight(
    fork_server: subprocess.Popen[str], request_for: Callable[..., Request]
) -> None:
    first = run(fork_server, request_for(2, batch_size=64))
    eight = completions(request_for(2))
    again = run(fork_server, request_for(4, batch_size=64))
    assert again["new_completions"] == first["new_completions"] == first["completions"]
    assert again["completions"] == 2 * first["completions"]
    sixteen = completions(request_for(4))
    assert {key: sixteen[key] for key in eight} == eight, "the first ones are the same ones"
    third = run(fork_server, request_for(4, batch_size=64))
    assert third["new_completions"] == third["generated_tokens"] == 0


def test_rows_carry_their_seed_length_and_truncation(
    fork_server: subprocess.Popen[str], request_for: Callable[..., Request]
) -> None:
    run(fork_server, request := request_for(1, batch_size=64))
    for line in lines_of(request):
        assert line["seed"] == sample_seed(0, line["prompt_id"], line["sample_index"])
        assert line["truncated"] == (line["finish_reason"] == "length")
        assert line["completion_tokens"] == 8 or not line["truncated"]


def test_another_seed_draws_other_completions(
    fork_server: subprocess.Popen[str], request_for: Callable[..., Request]
) -> None:
    run(fork_server, request_for(1, batch_size=64))
    run(fork_server, request_for(1, batch_size=64, seed=1))
    one, other = completions(request_for(1)), completions(request_for(1, seed=1))
    assert one.keys() == other.keys()
    assert sum(one[key] != other[key] for key in one) > len(one) / 2


IDENTITY = {
    "policy": ("inputs", {"model": "other"}),
    "temperature": ("sampling", {"temperature": 0.5}),
    "top_p": ("sampling", {"top_p": 0.5}),
    "max_completion_length": ("sampling", {"max_completion_length": 9}),
    "seed": ("seed", 1),
    "engine": ("version", "vllm==0.0"),
    "chat_template": ("template", "{{ other }}"),
}


@pytest.mark.parametrize("name", list(IDENTITY))
def test_the_stage_keeps_apart_whatever_decides_a_completion(home: Path, name: str) -> None:
    """verl's rollout cache forgets some of these: a changed temperature then reads completions of the old one."""
    from tasks.sampling import _ledger

    def ledger(**changes: Any) -> Path:
        model = home / "model"
        model.mkdir(exist_ok=True)
        (model / "chat_template.jinja").write_text(changes.get("template", "{{ messages }}"))
        ref = SimpleNamespace(digest=changes.get("inputs", {"model": "digest"})["model"], payload=model)
        sampling = {
            "temperature": 1.0,
            "top_p": 1.0,
            "max_completion_length": 8,
            **changes.get("sampling", {}),
        }
        build: Any = SimpleNamespace(inputs={"model": ref})
        return _ledger(build, changes.get("version", "transformers==5"), changes.get("seed", 0), sampling)

    what, value = IDENTITY[name]
    assert ledger() == ledger()
    assert ledger(**{what: value}) != ledger()
    assert name in json.loads((ledger() / "identity.json").read_text())


def test_one_text_repeated_is_refused(tmp_path: Path) -> None:
    """PR02: a seed that every request shares gives one completion eight times, and each pass rate is 0 or 1."""
    from tasks.configs import ConfigError
    from tasks.sampling import _distinct

    def write(texts: Callable[[int, int], str]) -> Path:
        rows = [(f"p{number}", index, texts(number, index)) for number in range(10) for index in range(8)]
        path = tmp_path / "samples.parquet"
        pl.DataFrame(rows, schema=["prompt_id", "sample_index", "completion"], orient="row").write_parquet(
            path
        )
        return path

    with pytest.raises(ConfigError, match=r"100% of 10 prompts got the same text every time.*temperature"):
        _distinct(write(lambda number, index: f"answer {number}"))
    facts = _distinct(write(lambda number, index: f"answer {number} {index % 4 if number else 0}"))
    assert facts["distinct_share"] == pytest.approx((9 * 4 + 1) / 80)
    assert facts["repeated_prompts_share"] == pytest.approx(0.1)
