"""What an artifact is: its reference, its manifest, and the two hashes that name it.

`key` answers "was this already asked for?": a hash of the stage, its version, the recipe, the seed, the
digests of its inputs and the reward's identity. `digest` answers "what is it?": a hash of the payload's
bytes. Downstream keys are built from digests, never from keys, so a rebuilt input with equal bytes still
hits.

Not covered here: where artifacts lie and who may build them (`data.store`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

ArtifactKind = Literal["prompts", "samples", "scores", "pairs", "model", "report"]

PENDING = "pending"
"""Key and digest of an artifact that a plan only promises: something upstream of it is not built yet."""


class ArtifactCorrupt(RuntimeError):
    """An artifact's bytes are not the bytes that its manifest lists."""


@dataclass(frozen=True)
class ArtifactRef:
    """The only thing that crosses a stage boundary.

    Attributes:
        kind: what the payload holds.
        stage: the stage that built it, for example `train_grpo`.
        name: tells uses of one stage apart (`base`, `sft`, `grpo` benchmarks), part of the folder's name.
        key: 64 hex digits over the request.
        digest: 64 hex digits over the payload's bytes.
        path: absolute folder; the payload lies under `payload/`.
    """

    kind: ArtifactKind
    stage: str
    name: str
    key: str
    digest: str
    path: str

    @property
    def payload(self) -> Path:
        return Path(self.path) / "payload"

    @property
    def record(self) -> Path:
        """What is kept beside the payload, outside the digest: curves and times of the build."""
        return Path(self.path) / "record"

    def manifest(self) -> Manifest:
        return Manifest.from_json((Path(self.path) / "manifest.json").read_text())

    @property
    def is_pending(self) -> bool:
        return self.digest == PENDING


@dataclass(frozen=True)
class Manifest:
    """Everything a person needs to trust or repeat an artifact; written last, as `manifest.json`.

    Attributes:
        request: the exact document whose hash is `ref.key`.
        runtime: where and how it was built; never part of the key.
        input_refs: role -> path of the input artifact, for people (keys use digests).
        files: payload path -> SHA-256.
        facts: small numbers and strings that the stage reports about itself.
        packages: versions of the libraries that decide results.
        seconds: wall time of all attempts, in seconds.
    """

    ref: ArtifactRef
    request: Mapping[str, Any]
    runtime: Mapping[str, Any]
    input_refs: Mapping[str, str]
    files: Mapping[str, str]
    facts: Mapping[str, Any]
    packages: Mapping[str, str]
    git_commit: str | None
    mlflow_run_id: str | None
    prefect_flow_run_id: str | None
    started_at: str
    seconds: float
    attempt: int = 1
    schema: int = field(default=1)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"

    @staticmethod
    def from_json(text: str) -> Manifest:
        fields = json.loads(text)
        return Manifest(**{**fields, "ref": ArtifactRef(**fields["ref"])})


def canonical_json(value: Any) -> str:
    """One text for one value: sorted keys, no white space, only JSON's own types.

    Raises:
        TypeError: for anything without a stable form (sets, paths, dates, non-string keys, NaN): an
            accidental `str()` would make keys that differ between machines.
    """
    _require_stable(value, "$")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _require_stable(value: Any, where: str) -> None:
    if value is None or isinstance(value, (str, bool, int)):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise TypeError(f"{where} is {value}: only finite numbers have a canonical form")
        return
    if isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            _require_stable(item, f"{where}[{position}]")
        return
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise TypeError(f"{where} has the key {name!r}: keys must be strings")
            _require_stable(item, f"{where}.{name}")
        return
    raise TypeError(f"{where} is a {type(value).__name__}, which has no canonical JSON form")


def stable_hash(value: Any) -> str:
    """SHA-256 (64 hex digits) of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def hash_file(path: Path) -> str:
    """SHA-256 (64 hex digits) of a file's bytes, read in blocks."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def hash_files(folder: Path) -> dict[str, str]:
    """Relative POSIX path -> SHA-256 of every regular file below `folder`, sorted by path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hash_file(path) for path in paths}


def digest_of(files: Mapping[str, str]) -> str:
    """The digest of a payload, from its file hashes."""
    return stable_hash(dict(files))


def digest_path(path: Path) -> str:
    """The digest of an external file or folder that a recipe points at.

    Raises:
        FileNotFoundError: when there is nothing at `path`.
    """
    if path.is_file():
        return hash_file(path)
    if path.is_dir():
        return digest_of(hash_files(path))
    raise FileNotFoundError(f"nothing at {path}: expected a file or a folder")
