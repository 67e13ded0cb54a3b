"""vLLM's sampling on a CPU, with a stream of its own for every completion.

Why not vLLM's own `seed`: on a CPU it draws such requests one by one in a Python loop, which costs a tenth of the
speed of a small model, and it dies when a seeded prompt is split ("CPU Generator does not use offset", 0.31.0).
On CUDA its second model runner draws seeded requests in one kernel, and takes no processor like this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from tasks.jobs.seeded_draw import NOT_FINITE, keep_drawn, uniforms, warpers

DRAW = "furlong_draw"
"""Key of a request's [seed, temperature, top_p] in `SamplingParams.extra_args`; the request itself is greedy."""


@dataclass(frozen=True)
class _Row:
    numbers: list[float]
    sampling: tuple[float, float]
    drawn: list[int]
    """Tokens so far; vLLM appends to it."""


class BatchDraw(LogitsProcessor):
    """Leaves one token a row for vLLM's `argmax`. All requests of a batch draw, with one sampling, or none does."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}
        self._device = device

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, _row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits`: (rows, vocabulary), float32."""
        if not self._rows:
            return logits
        if not logits.amax(dim=-1).isfinite().all():
            raise ValueError(NOT_FINITE)
        rows = [self._rows[index] for index in range(len(logits))]
        ((temperature, top_p),) = {row.sampling for row in rows}
        numbers = torch.tensor([[row.numbers[len(row.drawn)]] for row in rows], dtype=torch.float64)
        for warp in warpers(temperature, top_p):
            logits = warp(None, logits)  # type: ignore[arg-type]
        return keep_drawn(logits, numbers.to(self._device))


def _row(params: SamplingParams, prompt: list[int] | None, drawn: list[int]) -> _Row | None:
    if not params.extra_args or DRAW not in params.extra_args:
        return None
    assert params.max_tokens is not None
    seed, temperature, top_p = params.extra_args[DRAW]
    return _Row(uniforms(seed, params.max_tokens).tolist(), (temperature, top_p), drawn)
