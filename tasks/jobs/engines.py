"""Generation engines behind one call: `generate(prompts, draw, seed) -> completions`, row for row.

Both engines render prompts through the tokenizer's chat template, exactly as TRL does in training.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import GenerationConfig

from tasks.jobs.prompt_rows import user_message
from tasks.recipes import SamplingRuntime


@dataclass(frozen=True)
class Draw:
    """How to sample: `n` completions a prompt; temperature 0 is greedy."""

    name: str
    n: int
    temperature: float
    top_p: float
    max_completion_length: int


@dataclass(frozen=True)
class Completion:
    text: str
    tokens: int
    finish_reason: str
    """`stop` (ended by EOS) or `length` (cut)."""


class GenerationEngine(Protocol):
    def generate(self, prompts: Sequence[str], draw: Draw, seed: int) -> list[list[Completion]]:
        """`draw.n` completions for each prompt, in order."""
        ...


def open_engine(engine: str, model: str, runtime: SamplingRuntime, max_length: int) -> GenerationEngine:
    """Load a model folder into the `transformers` or `vllm` engine."""
    if engine == "vllm":
        return VllmEngine(model, runtime, max_length)
    return TransformersEngine(model)


class TransformersEngine:
    """Batched `model.generate`; reproducible for a seed, a device and the same prompts in one call."""

    def __init__(self, model: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        loaded: Any = AutoModelForCausalLM.from_pretrained(model)
        self._model = loaded.to(self._device).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")

    def generate(self, prompts: Sequence[str], draw: Draw, seed: int) -> list[list[Completion]]:
        torch.manual_seed(seed)
        flat = self._batch([prompt for prompt in prompts for _ in range(draw.n)], draw)
        return [flat[start : start + draw.n] for start in range(0, len(flat), draw.n)]

    def _batch(self, prompts: Sequence[str], draw: Draw) -> list[Completion]:
        inputs = self._tokenizer.apply_chat_template(
            [user_message(prompt) for prompt in prompts],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        ).to(self._device)
        sampling: dict[str, Any] = {"do_sample": False}
        if draw.temperature > 0:
            sampling = {"do_sample": True, "temperature": draw.temperature, "top_p": draw.top_p, "top_k": 0}
        # A configuration of our own, as TRL makes one for rollouts: a model's shipped defaults (repetition
        # penalty, top_k) would make curation sample another policy than GRPO does.
        config = GenerationConfig(
            **sampling,
            max_new_tokens=draw.max_completion_length,
            pad_token_id=self._tokenizer.pad_token_id,
            eos_token_id=self._stop_ids(),
        )
        with torch.inference_mode():
            output = self._model.generate(**inputs, generation_config=config)
        return [self._completion(row) for row in output[:, inputs["input_ids"].shape[1] :].tolist()]

    def _stop_ids(self) -> list[int]:
        # A model may end turns with other ids than the tokenizer's EOS; both must count as an end.
        configured = self._model.generation_config.eos_token_id
        ids = configured if isinstance(configured, list) else [configured]
        return sorted({token for token in [*ids, self._tokenizer.eos_token_id] if token is not None})

    def _completion(self, ids: list[int]) -> Completion:
        stops = set(self._stop_ids())
        end = next((position for position, token in enumerate(ids) if token in stops), None)
        kept = ids if end is None else ids[:end]
        text = self._tokenizer.decode(kept, skip_special_tokens=True)
        return Completion(text, len(kept) + (end is not None), "length" if end is None else "stop")


class VllmEngine:
    """vLLM in process; every (prompt, index) is a request with a seed of its own.

    One request with `n` > 1 and a seed has returned the same text several times (vllm-project/vllm#1595).
    """

    def __init__(self, model: str, runtime: SamplingRuntime, max_length: int) -> None:
        if not torch.cuda.is_available():
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from vllm import LLM

        arguments = {"max_model_len": max_length, **runtime.engine_arguments}
        if not torch.cuda.is_available():
            arguments.setdefault("dtype", "float32")
        self._engine: Any = LLM(model=model, **arguments)

    def generate(self, prompts: Sequence[str], draw: Draw, seed: int) -> list[list[Completion]]:
        from vllm import SamplingParams

        conversations, parameters = [], []
        for position, prompt in enumerate(prompts):
            for index in range(draw.n):
                conversations.append(user_message(prompt))
                parameters.append(
                    SamplingParams(
                        temperature=draw.temperature,
                        top_p=draw.top_p,
                        max_tokens=draw.max_completion_length,
                        seed=(seed + position * draw.n + index) % 2**31,
                    )
                )
        outputs = self._engine.chat(conversations, parameters, use_tqdm=False)
        flat = [
            Completion(
                answer.text, len(answer.token_ids), "length" if answer.finish_reason == "length" else "stop"
            )
            for answer in (output.outputs[0] for output in outputs)
        ]
        return [flat[start : start + draw.n] for start in range(0, len(flat), draw.n)]
