"""Trainer callbacks that carry what happens in a job to its parent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from tasks.jobs.protocol import Reporter


class ReportToParent(TrainerCallback):
    """Sends every number that the trainer logs, and the progress, through the job's channel."""

    def __init__(self, reporter: Reporter, headline: tuple[str, ...]) -> None:
        self._reporter = reporter
        self._headline = headline
        self._text = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._reporter.progress(state.global_step, state.max_steps, "first step")

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        self._reporter.metrics(logs, state.global_step)
        shown = [f"{name} {logs[name]:.3f}" for name in self._headline if isinstance(logs.get(name), float)]
        self._text = ", ".join(shown) or self._text
        self._reporter.progress(state.global_step, state.max_steps, self._text)


class GenerationLedger(TrainerCallback, ExportableState):
    """Sums the generated tokens and averages the zero-variance share over a whole run, resumes included."""

    def __init__(self, generated_tokens: float = 0, zero_variance_sum: float = 0, steps: int = 0) -> None:
        self.generated_tokens = generated_tokens
        self.zero_variance_sum = zero_variance_sum
        self.steps = steps

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if logs and "zero_variance_share" in logs:
            self.generated_tokens += logs["generated_tokens"]
            self.zero_variance_sum += logs["zero_variance_share"]
            self.steps += 1

    def state(self) -> dict[str, Any]:
        return {
            "args": {
                "generated_tokens": self.generated_tokens,
                "zero_variance_sum": self.zero_variance_sum,
                "steps": self.steps,
            },
            "attributes": {},
        }

    def facts(self) -> dict[str, Any]:
        return {
            "generated_tokens": int(self.generated_tokens),
            "zero_variance_share": self.zero_variance_sum / max(self.steps, 1),
        }


class KeepCheckpoints(TrainerCallback):
    """Saves a whole model folder every so many steps; on all ranks, for sharded weights are gathered to save them."""

    def __init__(self, every: int, folder: Path) -> None:
        self._every, self._folder = every, folder
        self.trainer: Any = None
        """Set after the trainer is made."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self._every == 0:
            self.trainer.save_model(str(self._folder / f"checkpoint-{state.global_step}"))
