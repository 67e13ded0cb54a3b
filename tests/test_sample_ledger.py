"""The sample ledger: nothing twice, nothing torn, nothing shared between different policies or settings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data.sample_ledger import SampleLedger, SegmentWriter, read_samples, sample_seed, wait_for_writers

REPOSITORY = Path(__file__).resolve().parents[1]
IDENTITY = {
    "policy": "a" * 64,
    "chat_template": "b" * 64,
    "engine": "transformers==5",
    "seed": 0,
    "temperature": 1.0,
    "top_p": 1.0,
    "max_completion_length": 64,
}


def row(prompt_id: str, index: int, completion: str = "text") -> dict[str, Any]:
    return {
        "prompt_id": prompt_id,
        "sample_index": index,
        "completion": completion,
        "completion_tokens": 3,
        "finish_reason": "stop",
        "truncated": False,
        "seed": sample_seed(0, prompt_id, index),
    }


def write(folder: Path, *rows: dict[str, Any]) -> None:
    with SegmentWriter(folder) as writer:
        writer.append(rows)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ledger = SampleLedger(tmp_path, IDENTITY)
    ledger.create()
    return ledger.folder


def keys(folder: Path, *prompt_ids: str) -> list[tuple[str, int]]:
    return read_samples(folder, prompt_ids).select("prompt_id", "sample_index").rows()


@pytest.mark.parametrize("name", list(IDENTITY))
def test_whatever_decides_a_completion_has_a_ledger_of_its_own(tmp_path: Path, name: str) -> None:
    other = {**IDENTITY, name: 0.5 if isinstance(IDENTITY[name], float) else "other"}
    assert SampleLedger(tmp_path, other).folder != SampleLedger(tmp_path, IDENTITY).folder


def test_the_folder_says_what_it_holds(folder: Path) -> None:
    assert json.loads((folder / "identity.json").read_text()) == IDENTITY


def test_a_seed_follows_from_run_prompt_and_index() -> None:
    seeds = {sample_seed(run, prompt, index) for run in (0, 1) for prompt in "ab" for index in range(8)}
    assert len(seeds) == 32 and all(0 <= seed < 2**31 for seed in seeds)
    assert sample_seed(0, "a", 3) == sample_seed(0, "a", 3)


def test_rows_of_all_segments_are_read_once_and_sorted(folder: Path) -> None:
    write(folder, row("b", 1), row("a", 0))
    write(folder, row("b", 0), row("a", 0), row("c", 0))
    assert keys(folder, "a", "b") == [("a", 0), ("b", 0), ("b", 1)]
    assert keys(folder) == []


def test_a_line_that_a_kill_cut_short_is_passed_over(folder: Path) -> None:
    """PR04: 37 whole records and half of the next; the rest is drawn again, without gaps or repeats."""
    write(folder, *(row(f"p{number}", 0) for number in (5, 3, 9)))
    segment = next(folder.glob("*.jsonl"))
    segment.write_bytes(segment.read_bytes()[:-20])
    assert keys(folder, "p3", "p5", "p9") == [("p3", 0), ("p5", 0)]
    write(folder, row("p9", 0))
    assert keys(folder, "p3", "p5", "p9") == [("p3", 0), ("p5", 0), ("p9", 0)]


def test_a_damaged_line_in_the_middle_costs_that_line_alone(folder: Path) -> None:
    write(folder, row("a", 0), row("a", 1), row("a", 2))
    segment = next(folder.glob("*.jsonl"))
    lines = segment.read_bytes().splitlines(keepends=True)
    segment.write_bytes(lines[0] + b'{"prompt_id": \x00\x00\n' + lines[2])
    assert keys(folder, "a") == [("a", 0), ("a", 2)]


def test_a_line_of_a_wrong_type_costs_that_line_alone(folder: Path) -> None:
    write(folder, row("a", 0), {**row("a", 1), "completion_tokens": "many"}, row("a", 2))
    assert keys(folder, "a") == [("a", 0), ("a", 2)]


def test_the_next_writer_waits_until_the_last_one_is_gone(folder: Path) -> None:
    """A job may outlive its flow: what it still appends must be there before anybody asks what is missing."""
    code = (
        "import sys, time; from pathlib import Path; from data.sample_ledger import SegmentWriter\n"
        "writer = SegmentWriter(Path(sys.argv[1])); print('open', flush=True); time.sleep(1.5)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "open\n"
        waited: list[str] = []
        wait_for_writers(folder, waited.append)
        assert (waited and writer.poll() is not None) or writer.wait(5) == 0


@pytest.mark.parametrize("text", ["", "line\nbreak\r\u2028", '"quoted" \\', "\x00", "\ud800 alone", "😀" * 3])
def test_any_text_survives(folder: Path, text: str) -> None:
    write(folder, row("a", 0, text), row("a", 1))
    read = read_samples(folder, ["a"])["completion"].to_list()
    assert read == [text.replace("\ud800", "?"), "text"]
