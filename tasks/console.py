"""What a person watching sees: log lines, step progress, and links between Prefect and MLflow.

Lines go through Prefect's run logger, so the terminal and the Prefect UI show the same. Outside a flow run
(a test, a notebook) they go to the module's logger.
"""

from __future__ import annotations

import logging
import os
import re
import time
from typing import Any
from uuid import UUID

from prefect.context import FlowRunContext

MIN_SECONDS_BETWEEN_LINES = 5.0
MIN_SECONDS_BETWEEN_ARTIFACT_UPDATES = 1.0


class Console:
    """Log lines and progress of one stage."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._logger = run_logger()
        self._artifact: UUID | None = None
        self._line_at = self._artifact_at = 0.0
        self._started = time.monotonic()

    def line(self, text: str) -> None:
        self._logger.info("%s: %s", self.label, text)

    def job_line(self, text: str) -> None:
        """A line of a job's log."""
        self._logger.info("%s | %s", self.label, text)

    def waiting(self, owner: str) -> None:
        self.line(f"{owner} is building the same artifact; waiting to adopt it")

    def progress(self, done: int, total: int, text: str = "") -> None:
        """Show `done` of `total`; the first and the last always show, between them at most one in five seconds."""
        now = time.monotonic()
        last = done >= total
        if last or now - self._line_at > MIN_SECONDS_BETWEEN_LINES:
            self._line_at = now
            self.line(f"{done}/{total} {text} {self._remaining(done, total, now)}".rstrip())
        if FlowRunContext.get() is not None and (
            last or now - self._artifact_at > MIN_SECONDS_BETWEEN_ARTIFACT_UPDATES
        ):
            self._artifact_at = now
            self._show(100.0 * done / max(total, 1), text)

    def _remaining(self, done: int, total: int, now: float) -> str:
        elapsed = now - self._started
        if not 0 < done < total:
            return f"({elapsed:.0f} s)"
        return f"({elapsed:.0f} s, about {elapsed / done * (total - done):.0f} s left)"

    def _show(self, percent: float, text: str) -> None:
        from prefect.artifacts import create_progress_artifact, update_progress_artifact

        try:
            if self._artifact is None:
                key = artifact_key(self.label) + "-progress"
                self._artifact = create_progress_artifact(
                    percent, key=key, description=f"{self.label} {text}"
                )  # type: ignore[assignment]
            else:
                update_progress_artifact(self._artifact, percent, description=f"{self.label} {text}")
        except Exception as error:  # a progress bar must never end a training run
            self._logger.debug("progress artifact not updated: %s", error)


def run_logger() -> Any:
    from prefect.exceptions import MissingContextError
    from prefect.logging import get_run_logger

    try:
        return get_run_logger()
    except MissingContextError:
        return logging.getLogger("furlong")


def artifact_key(text: str) -> str:
    """Prefect allows lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def flow_run_id() -> str | None:
    context = FlowRunContext.get()
    return str(context.flow_run.id) if context and context.flow_run else None


def prefect_tags() -> dict[str, str]:
    """Tags by which an MLflow run leads back to its Prefect flow run."""
    run_id = flow_run_id()
    if run_id is None:
        return {}
    from prefect.settings import PREFECT_UI_URL

    base = os.environ.get("FURLONG_PREFECT_UI_URL") or PREFECT_UI_URL.value() or "http://127.0.0.1:4200"
    return {
        "prefect.flow_run_id": run_id,
        "prefect.flow_run_url": f"{base.rstrip('/')}/runs/flow-run/{run_id}",
    }


def flow_run_is_cancelled() -> bool:
    """Whether somebody cancelled this flow run; False when the server cannot be asked just now."""
    run_id = flow_run_id()
    if run_id is None:
        return False
    from prefect.client.orchestration import get_client

    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(run_id)).state
    except Exception:  # the server may be away for a while; training goes on
        return False
    return state is not None and (state.is_cancelling() or state.is_cancelled())


def publish_markdown(key: str, markdown: str, description: str) -> None:
    """A Markdown artifact of the current flow run; nothing outside of one."""
    if FlowRunContext.get() is None:
        return
    from prefect.artifacts import create_markdown_artifact

    try:
        create_markdown_artifact(markdown, key=artifact_key(key), description=description)
    except Exception as error:
        run_logger().warning("Prefect did not take the artifact %s: %s", key, error)
