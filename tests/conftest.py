"""Every test session gets a home of its own: artifacts, MLflow and Prefect never touch the user's."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_HOME = Path(tempfile.mkdtemp(prefix="furlong-tests-"))
# Before Prefect or MLflow are imported anywhere: both read the environment when they are.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.pop("MLFLOW_TRACKING_URI", None)
os.environ.pop("PREFECT_API_URL", None)
os.environ["FURLONG_HOME"] = str(_HOME)
os.environ["PREFECT_HOME"] = str(_HOME / "prefect")
os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
os.environ["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = "120"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["DO_NOT_TRACK"] = "1"
os.environ["PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW"] = "ignore"  # tasks run alone in some tests


@pytest.fixture(scope="session", autouse=True)
def _clean_up() -> Iterator[None]:
    yield
    shutil.rmtree(_HOME, ignore_errors=True)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty FURLONG_HOME for one test."""
    monkeypatch.setenv("FURLONG_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """One temporary Prefect server for all tests that run flows or tasks (15 s to start)."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture(scope="session")
def nano(prefect_server: None) -> dict[str, Any]:
    """The summary of one whole `sft_grpo` run of the nano profile, in the session's FURLONG_HOME."""
    from flows.sft_grpo import sft_grpo

    return sft_grpo(config="nano")
