"""Wiring: which stage feeds which. Importing a flow imports no torch, TRL, vLLM, DeepSpeed or MLflow.

Prefect reads its settings when it is first imported, so what is ours by default is said here, before that:
a home of its own beside the artifacts, and no telemetry. A variable that is already set wins.
"""

import os

from data.store import furlong_home

if "PREFECT_HOME" not in os.environ:
    home = furlong_home() / "prefect"
    home.mkdir(parents=True, exist_ok=True)  # Prefect makes the last folder of its home only
    os.environ["PREFECT_HOME"] = str(home)
# The first start of the embedded server migrates its database: 20 s, the default, is too short on a busy laptop.
os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "1")
