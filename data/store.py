"""The artifact store: decides what is reused, and makes an artifact appear whole or not at all.

Layout: `<home>/artifacts/<stage>/<name>-<key12>/` holds `manifest.json`, `payload/`, `record/` and `logs/`. An
artifact is built in a `.partial` sibling; the manifest is written last and one rename publishes the folder. A folder
with a manifest is complete, one without does not exist. What a build wants to find again after a crash
(checkpoints, finished shards) lies in the partial folder's `work/`, which is dropped on commit.

One builder a key: an exclusive `flock` that the kernel releases when its owner dies, however it dies.

Not covered: network file systems without working `flock`, and readers of an artifact that somebody rebuilds
with `--fresh` at the same moment (they keep open files, but may see the folder swap).
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from data.artifacts import ArtifactCorrupt, Manifest, digest_of, hash_files


def furlong_home() -> Path:
    """Folder of artifacts, services and tracking data: `$FURLONG_HOME`, else `.furlong` in the checkout."""
    configured = os.environ.get("FURLONG_HOME")
    return Path(configured).resolve() if configured else Path(__file__).resolve().parents[1] / ".furlong"


@dataclass(frozen=True)
class Partial:
    """A build in progress, private to the process that holds the key's lock."""

    path: Path
    attempt: int

    @property
    def payload(self) -> Path:
        return self.path / "payload"

    @property
    def work(self) -> Path:
        """Survives a failed attempt and is gone after commit."""
        return self.path / "work"

    @property
    def logs(self) -> Path:
        return self.path / "logs" / f"attempt_{self.attempt}"

    @property
    def record(self) -> Path:
        """Kept with the artifact but no part of its digest: training curves, resolved arguments, times."""
        return self.path / "record"


class ArtifactStore:
    """Artifacts below one folder; every method is safe to call from several processes."""

    def __init__(self, home: Path | None = None) -> None:
        self.root = (home or furlong_home()) / "artifacts"

    def folder(self, stage: str, name: str, key: str) -> Path:
        return self.root / stage / f"{name}-{key[:12]}"

    def find(self, stage: str, name: str, key: str) -> Manifest | None:
        """The complete artifact of this key, its bytes checked, or None.

        Raises:
            ArtifactCorrupt: a payload file is missing, added or changed.
        """
        manifest = self._read_manifest(self.folder(stage, name, key))
        if manifest is None or manifest.ref.key != key:
            return None
        self._check(manifest)
        return manifest

    @staticmethod
    def _check(manifest: Manifest) -> None:
        found = hash_files(manifest.ref.payload)
        if found != manifest.files:
            raise ArtifactCorrupt(_corruption(manifest, found))

    def open(self, folder: Path) -> Manifest:
        """The complete artifact in a folder, wherever it lies, its bytes checked.

        Raises:
            ValueError: there is none.
            ArtifactCorrupt: as `find`.
        """
        try:
            manifest = self._read_manifest(folder.resolve())
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder}/manifest.json is no manifest of an artifact ({error!r})") from error
        if manifest is None:
            raise ValueError(f"no artifact at {folder}: expected a folder with a manifest.json")
        self._check(manifest)
        return manifest

    def list(self, stage: str | None = None) -> list[Manifest]:
        """Manifests of all complete artifacts (of one stage), oldest first; payloads are not checked."""
        folders = sorted(self.root.glob(f"{stage or '*'}/*/manifest.json"))
        manifests = [self._read_manifest(folder.parent) for folder in folders]
        return sorted((m for m in manifests if m is not None), key=lambda manifest: manifest.started_at)

    @contextmanager
    def lock(self, stage: str, name: str, key: str, on_wait: Callable[[str], None]) -> Iterator[None]:
        """Hold the key exclusively; `on_wait(owner)` is called once when somebody else holds it."""
        with exclusive(self.root / stage / f".{name}-{key[:12]}.lock", on_wait):
            yield

    def open_partial(self, stage: str, name: str, key: str, *, discard: bool = False) -> Partial:
        """The partial folder of a key (the caller holds its lock), with the payload of a dead attempt removed.

        Args:
            discard: also drop what earlier attempts left to resume from.
        """
        path = self.folder(stage, name, key).with_name(f"{name}-{key[:12]}.partial")
        if discard:
            shutil.rmtree(path, ignore_errors=True)
        attempt = 1 + len(list((path / "logs").glob("attempt_*")))
        partial = Partial(path, attempt)
        shutil.rmtree(partial.payload, ignore_errors=True)
        for folder in (partial.payload, partial.work, partial.logs, partial.record):
            folder.mkdir(parents=True, exist_ok=True)
        return partial

    def commit(self, partial: Partial, manifest: Manifest) -> Manifest:
        """Publish a finished build; replaces an older artifact of the same key.

        The manifest's `ref.digest` and `files` are computed here from the payload.
        """
        files = hash_files(partial.payload)
        if not files:
            raise ArtifactCorrupt(f"{manifest.ref.stage}: the build left no file in {partial.payload}")
        final = self.folder(manifest.ref.stage, manifest.ref.name, manifest.ref.key)
        ref = replace(manifest.ref, digest=digest_of(files), path=str(final))
        complete = replace(manifest, ref=ref, files=files)
        _write_synced(partial.path / "manifest.json", complete.to_json())
        if final.exists():
            replaced = final.with_name(f"{final.name}.replaced-{os.getpid()}")
            os.replace(final, replaced)
            os.replace(partial.path, final)
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            os.replace(partial.path, final)
        shutil.rmtree(final / "work", ignore_errors=True)  # only now: a kill before this loses no checkpoint
        return complete

    @staticmethod
    def _read_manifest(folder: Path) -> Manifest | None:
        if folder.name.endswith(".partial") or ".replaced-" in folder.name:
            return None
        try:
            text = (folder / "manifest.json").read_text()
        except FileNotFoundError:
            return None
        try:
            manifest = Manifest.from_json(text)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ArtifactCorrupt(
                f"{folder}/manifest.json cannot be read ({error}). Delete the folder."
            ) from error
        # Where it lies is a fact of the file system: a moved home stays a home.
        return replace(manifest, ref=replace(manifest.ref, path=str(folder)))


def _corruption(manifest: Manifest, found: dict[str, str]) -> str:
    changed = sorted(
        name for name in manifest.files.keys() | found.keys() if manifest.files.get(name) != found.get(name)
    )
    return (
        f"{manifest.ref.stage}: {len(changed)} of {len(manifest.files)} files of {manifest.ref.path} differ from "
        f"its manifest (first: {changed[0]}). Nothing may write below a finished artifact. "
        f"Rebuild it with --fresh, or delete the folder."
    )


@contextmanager
def exclusive(path: Path, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock file; `on_wait(owner)` is called once when another process holds it.

    A forked child inherits the lock, so jobs must be started with close_fds (subprocess's default).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as handle:
        if not _try_lock(handle.fileno()):
            handle.seek(0)
            on_wait(handle.read().strip() or "another process")
            while not _try_lock(handle.fileno()):
                time.sleep(0.2)
        handle.truncate(0)
        handle.write(f"process {os.getpid()}")
        handle.flush()
        try:
            yield
        finally:
            handle.truncate(0)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_synced(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
