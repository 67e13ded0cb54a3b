"""Sampling whose outcome depends on a completion's own seed, not on the batch that it is in.

`generate(do_sample=True)` draws all rows from one stream, so a row's tokens change with its neighbours and with
the order. Here every row has a stream of its own, and the drawn token is the only one left for `argmax`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

NOT_FINITE = (
    "the model's logits are NaN or infinite, so nothing can be sampled from it; a diverged training or a dtype that "
    "overflows does this"
)


def uniforms(seed: int, count: int) -> torch.Tensor:
    """The numbers in [0, 1) that a completion draws its tokens with: (count,), float64, on the CPU.

    Made on the CPU on every machine, so that a device's own generator does not decide what is sampled.
    """
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def warpers(temperature: float, top_p: float) -> LogitsProcessorList:
    """Temperature, then top_p, as TRL and vLLM order them; what would change nothing is left out."""
    processors = LogitsProcessorList()
    if temperature != 1.0:
        processors.append(TemperatureLogitsWarper(temperature))
    if top_p < 1.0:
        processors.append(TopPLogitsWarper(top_p))
    return processors


def keep_drawn(scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Draw a token a row by inverse transform sampling, and put all others at minus infinity, in place.

    Args:
        scores: (rows, vocabulary), logits after `warpers`. A row without a finite largest logit draws token 0.
        numbers: (rows, 1), float64 in [0, 1).
    """
    # float64: a running sum of 150,000 float32 shares would be off by more than a rare token's share.
    cumulative = scores.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    # The first token whose running sum exceeds the number: one of probability 0 adds nothing and is never it.
    drawn = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)
    return scores.fill_(-torch.inf).scatter_(1, drawn.clamp_(max=scores.shape[1] - 1), 0.0)


class SeededDraw(LogitsProcessor):
    """Draws with `generate`: use it last, with `do_sample=False`. Step `t` takes the `t`-th number of a row's seed.

    Args:
        seeds: one a row of the batch.
        prompt_length: tokens of the padded prompts.
        max_new_tokens: tokens that each row may draw.
    """

    def __init__(
        self, seeds: Sequence[int], prompt_length: int, max_new_tokens: int, device: str | torch.device
    ) -> None:
        self._numbers = torch.stack([uniforms(seed, max_new_tokens) for seed in seeds]).to(device)
        self._prompt_length = prompt_length
        self._finite = torch.ones((), dtype=torch.bool, device=device)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """`input_ids`: (rows, tokens so far); `scores`: (rows, vocabulary)."""
        step = input_ids.shape[1] - self._prompt_length
        self._finite &= scores.amax(dim=-1).isfinite().all()
        return keep_drawn(scores, self._numbers[:, step : step + 1])  # type: ignore[return-value]

    def check(self) -> None:
        """Call it after generating.

        Raises:
            ValueError: the model gave logits that are not finite; what was drawn means nothing.
        """
        if not bool(self._finite):
            raise ValueError(NOT_FINITE)
