"""What every generation engine takes and gives, and the chat format that they share.

Prompts are rendered here, through the tokenizer's chat template as TRL does in training, and completions are
decoded here, so that the same token ids are the same text and the same count whichever engine drew them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from tasks.jobs.prompt_rows import user_message

BATCH_SIZES = {"transformers": 256, "vllm": 2048, "server": 2048}
"""Completions that each engine likes to get at once: enough to keep it busy, few enough to lose little in a crash.

vLLM schedules by itself; a larger batch only makes its last, half-empty steps rarer."""


@dataclass(frozen=True)
class SampleRequest:
    """One completion to draw.

    Attributes:
        prompt: the user message, not yet rendered.
        seed: 0 to 2**31 - 1; decides this completion alone.
    """

    prompt: str
    seed: int


@dataclass(frozen=True)
class Sampling:
    """How to draw, for all requests of one call.

    Attributes:
        temperature: 0 is greedy.
        top_p: share of probability that is drawn from; 1 is all of it.
        max_completion_length: tokens, EOS included.
    """

    temperature: float
    top_p: float
    max_completion_length: int


@dataclass(frozen=True)
class Completion:
    """A drawn completion.

    Attributes:
        text: without special tokens.
        tokens: generated tokens, EOS included.
        finish_reason: `stop` (ended by itself) or `length` (cut).
    """

    text: str
    tokens: int
    finish_reason: str


class GenerationEngine(Protocol):
    batch_size: int
    """Requests that it likes to get at once."""

    def generate(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Completion]:
        """One completion a request, in order; each depends on its request and `sampling` alone.

        Up to float rounding: another batch may turn a draw that falls on the edge between two tokens.
        """
        ...


class ChatFormat:
    """A model folder's tokenizer, chat template and ends of a turn."""

    def __init__(self, model: str) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model, padding_side="left")
        self.stop_ids = _stop_ids(model, self.tokenizer)

    def render(self, prompts: Sequence[str]) -> list[list[int]]:
        """Token ids of each prompt as a user message with the generation prompt; equal prompts share one list."""
        distinct = list(dict.fromkeys(prompts))
        encoded = self.tokenizer.apply_chat_template(
            [user_message(prompt) for prompt in distinct], add_generation_prompt=True, return_dict=True
        )
        ids = dict(zip(distinct, encoded["input_ids"], strict=True))
        return [ids[prompt] for prompt in prompts]

    def completion(self, ids: Sequence[int]) -> Completion:
        """Read generated ids up to the first end of the turn; what follows (padding) does not count."""
        end = next((position for position, token in enumerate(ids) if token in self.stop_ids), None)
        kept = ids if end is None else ids[:end]
        text = self.tokenizer.decode(kept, skip_special_tokens=True)
        return Completion(text, len(kept) + (end is not None), "length" if end is None else "stop")


def _stop_ids(model: str, tokenizer: Any) -> frozenset[int]:
    # A model may end turns with other ids than the tokenizer's EOS; both must count as an end.
    try:
        config = GenerationConfig.from_pretrained(model)
    except OSError:  # a folder without generation_config.json
        config = GenerationConfig.from_model_config(AutoConfig.from_pretrained(model))
    configured = config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(token for token in [*ids, tokenizer.eos_token_id] if token is not None)
