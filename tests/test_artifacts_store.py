"""The store: an artifact exists whole or not at all, and one process builds it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from data.artifacts import ArtifactCorrupt, ArtifactRef, Manifest, canonical_json, stable_hash
from data.store import ArtifactStore, Partial

KEY = stable_hash({"asked": "for this"})


def build(store: ArtifactStore, text: str = "payload", key: str = KEY) -> Manifest:
    partial = store.open_partial("stage", "name", key)
    (partial.payload / "file.txt").write_text(text)
    return store.commit(partial, manifest(partial, key))


def manifest(partial: Partial, key: str = KEY) -> Manifest:
    ref = ArtifactRef("report", "stage", "name", key, "", str(partial.path))
    return Manifest(ref, {}, {}, {}, {}, {}, {}, None, None, None, "2026-01-01T00:00:00", 1.0)


def test_canonical_json_ignores_order_and_refuses_what_has_no_stable_form() -> None:
    assert canonical_json({"b": 1, "a": [True, None, 0.5]}) == '{"a":[true,null,0.5],"b":1}'
    assert stable_hash({"a": 1, "b": 2}) == stable_hash({"b": 2, "a": 1})
    assert stable_hash({"a": 1}) != stable_hash({"a": "1"})
    for unstable in ({1, 2}, Path("x"), float("nan"), {1: "a"}, b"bytes", object()):
        with pytest.raises(TypeError, match=r"\$\.value"):
            canonical_json({"value": unstable})


def test_a_committed_artifact_is_found_with_its_digest(home: Path) -> None:
    store = ArtifactStore()
    assert store.find("stage", "name", KEY) is None
    built = build(store)
    found = store.find("stage", "name", KEY)
    assert found == built
    assert found is not None and (found.ref.payload / "file.txt").read_text() == "payload"
    assert not list(home.rglob("*.partial"))


def test_the_digest_follows_bytes_not_keys(home: Path) -> None:
    store = ArtifactStore()
    first, second = build(store), build(store, key=stable_hash("another request"))
    assert first.ref.digest == second.ref.digest
    assert build(store, "other bytes", stable_hash("third")).ref.digest != first.ref.digest


def test_a_partial_folder_does_not_exist_for_readers(home: Path) -> None:
    store = ArtifactStore()
    partial = store.open_partial("stage", "name", KEY)
    (partial.payload / "half.txt").write_text("half")
    assert store.find("stage", "name", KEY) is None
    assert store.list() == []


def test_a_later_attempt_keeps_work_and_logs_but_not_the_half_payload(home: Path) -> None:
    store = ArtifactStore()
    first = store.open_partial("stage", "name", KEY)
    (first.payload / "half.txt").write_text("half")
    (first.work / "checkpoint").write_text("step 3")
    second = store.open_partial("stage", "name", KEY)
    assert (first.attempt, second.attempt) == (1, 2)
    assert not (second.payload / "half.txt").exists()
    assert (second.work / "checkpoint").read_text() == "step 3"
    assert first.logs.is_dir()
    assert not (store.open_partial("stage", "name", KEY, discard=True).work / "checkpoint").exists()


@pytest.mark.parametrize("damage", ["change", "remove", "add"])
def test_changed_bytes_are_reported_not_reused(home: Path, damage: str) -> None:
    store = ArtifactStore()
    payload = build(store).ref.payload
    if damage == "change":
        (payload / "file.txt").write_text("tampered")
    elif damage == "remove":
        (payload / "file.txt").unlink()
    else:
        (payload / "extra.txt").write_text("surprise")
    with pytest.raises(ArtifactCorrupt, match="Rebuild it with --fresh"):
        store.find("stage", "name", KEY)


def test_an_unreadable_manifest_is_corrupt(home: Path) -> None:
    store = ArtifactStore()
    (Path(build(store).ref.path) / "manifest.json").write_text("{")
    with pytest.raises(ArtifactCorrupt, match="cannot be read"):
        store.find("stage", "name", KEY)


def test_an_empty_payload_is_not_an_artifact(home: Path) -> None:
    store = ArtifactStore()
    partial = store.open_partial("stage", "name", KEY)
    with pytest.raises(ArtifactCorrupt, match="left no file"):
        store.commit(partial, manifest(partial))


def test_a_forced_rebuild_replaces_the_artifact(home: Path) -> None:
    store = ArtifactStore()
    build(store, "old")
    build(store, "new")
    found = store.find("stage", "name", KEY)
    assert found is not None and (found.ref.payload / "file.txt").read_text() == "new"
    assert len(store.list("stage")) == 1


def test_a_dead_owner_cannot_hold_the_lock(home: Path) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(f"""
            import time
            from data.store import ArtifactStore
            with ArtifactStore().lock("stage", "name", "{KEY}", print):
                print("held", flush=True)
                time.sleep(60)
        """),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    waited: list[str] = []

    def kill_the_holder(owner: str) -> None:
        waited.append(owner)
        os.kill(holder.pid, signal.SIGKILL)

    with ArtifactStore().lock("stage", "name", KEY, kill_the_holder):
        assert waited == [f"process {holder.pid}"]
    holder.wait()
    time.sleep(0)
