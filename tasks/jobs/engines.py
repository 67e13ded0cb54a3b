"""Generation engines behind one call: `generate(requests, sampling) -> completions`, one a request.

Every request brings its own seed, so what is drawn for it does not depend on batches, order or shards. The
engines do not draw the same completions as each other: the engine is part of a sample's identity
(`engine_identity`). Not covered: stop strings, tools, images.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessorList

from tasks.jobs.completions import (
    BATCH_SIZES,
    ChatFormat,
    Completion,
    GenerationEngine,
    SampleRequest,
    Sampling,
)
from tasks.jobs.seeded_draw import SeededDraw, warpers
from tasks.recipes import SamplingRuntime


def open_engine(engine: str, model: str, runtime: SamplingRuntime, max_length: int) -> GenerationEngine:
    """Load a model folder into the `transformers` or `vllm` engine, or connect to the `server` that serves it.

    Args:
        model: the folder.
        max_length: tokens that the longest prompt and its completion may take together.

    Raises:
        ValueError: unknown engine; a server that does not serve this folder or cannot take `max_length`.
    """
    if engine == "transformers":
        return TransformersEngine(model, runtime)
    if engine == "vllm":
        return VllmEngine(model, runtime, max_length)
    if engine == "server":
        from tasks.jobs.engine_server import ServerEngine

        return ServerEngine(model, runtime, max_length)
    raise ValueError(f"engine is '{engine}'; it must be transformers, vllm or server")


class TransformersEngine:
    """Batched `model.generate`; rows of similar length share a batch, and each draws from its own stream."""

    def __init__(self, model: str, runtime: SamplingRuntime) -> None:
        self.batch_size = runtime.batch_size or BATCH_SIZES["transformers"]
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._format = ChatFormat(model)
        loaded: Any = AutoModelForCausalLM.from_pretrained(model)
        # `generate` fills every field that its caller left open from the model's own configuration: a shipped
        # repetition penalty would make curation sample another policy than GRPO does.
        loaded.generation_config = GenerationConfig(
            pad_token_id=self._format.tokenizer.pad_token_id, eos_token_id=sorted(self._format.stop_ids)
        )
        self._model = loaded.to(self._device).eval()

    def generate(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Completion]:
        prompts = self._format.render([request.prompt for request in requests])
        # Longest first: little padding, and a batch that does not fit into memory fails at once.
        order = sorted(range(len(requests)), key=lambda position: -len(prompts[position]))
        completions: dict[int, Completion] = {}
        for start in range(0, len(order), self.batch_size):
            chosen = order[start : start + self.batch_size]
            seeds = [requests[position].seed for position in chosen]
            rows = self._batch([prompts[position] for position in chosen], seeds, sampling)
            completions |= zip(chosen, map(self._format.completion, rows), strict=True)
        return [completions[position] for position in range(len(requests))]

    def _batch(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], sampling: Sampling
    ) -> list[list[int]]:
        """Generated ids of each row, padded to the longest."""
        inputs = self._format.tokenizer.pad({"input_ids": list(prompts)}, return_tensors="pt").to(
            self._device
        )
        width = inputs["input_ids"].shape[1]
        processors, draw = LogitsProcessorList(), None
        if sampling.temperature > 0:
            draw = SeededDraw(seeds, width, sampling.max_completion_length, self._device)
            processors = warpers(sampling.temperature, sampling.top_p)
            processors.append(draw)
        config = GenerationConfig(do_sample=False, max_new_tokens=sampling.max_completion_length)
        with torch.inference_mode():
            output = self._model.generate(**inputs, generation_config=config, logits_processor=processors)
        if draw is not None:
            draw.check()
        return output[:, width:].tolist()


class VllmEngine:
    """vLLM in process; every completion is a request with a seed of its own.

    One request with `n` > 1 and a seed has returned the same text several times (vllm-project/vllm#1595).
    """

    def __init__(self, model: str, runtime: SamplingRuntime, max_length: int) -> None:
        self.batch_size = runtime.batch_size or BATCH_SIZES["vllm"]
        self._on_cpu = not torch.cuda.is_available()
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        arguments = {"max_model_len": max_length, **runtime.engine_arguments}
        if self._on_cpu:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            arguments.setdefault("dtype", "float32")
            arguments["logits_processors"] = ["tasks.jobs.vllm_draw:BatchDraw"]
        from vllm import LLM

        self._engine: Any = LLM(model=model, **arguments)
        self._format = ChatFormat(model)

    def generate(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Completion]:
        prompts = self._format.render([request.prompt for request in requests])
        # Token ids in and out: chat rendering and text would be made again for every sample of a prompt.
        outputs = self._engine.generate(
            [{"prompt_token_ids": ids} for ids in prompts],
            [self._parameters(request.seed, sampling) for request in requests],
            use_tqdm=False,
        )
        return [self._format.completion(output.outputs[0].token_ids) for output in outputs]

    def _parameters(self, seed: int, sampling: Sampling) -> Any:
        from vllm import SamplingParams

        # vLLM's own draw needs a seed; ours asks vLLM for the one token that it leaves.
        drawing: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": seed}
        if self._on_cpu and sampling.temperature > 0:
            from tasks.jobs.vllm_draw import DRAW

            drawing = {"temperature": 0.0, "extra_args": {DRAW: [seed, sampling.temperature, sampling.top_p]}}
        # With parameters of our own, vLLM takes none of a model's shipped ones (top_k, penalties).
        return SamplingParams(
            **drawing,
            max_tokens=sampling.max_completion_length,
            stop_token_ids=sorted(self._format.stop_ids),
            detokenize=False,
        )
