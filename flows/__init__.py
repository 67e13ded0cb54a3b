"""Wiring: which stage feeds which. Importing a flow imports no torch, TRL, vLLM, DeepSpeed or MLflow.

Prefect reads its settings when it is first imported, so what is ours by default is said here, before that:
a home of its own beside the artifacts, and no telemetry. A variable that is already set wins.
"""

import os

from data.store import furlong_home

os.environ.setdefault("PREFECT_HOME", str(furlong_home() / "prefect"))
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "1")
