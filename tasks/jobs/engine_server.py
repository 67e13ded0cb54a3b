"""The `server` engine: completions from vLLM servers over their OpenAI-compatible chat API.

The servers of `runtime.server_urls` are replicas of one policy. Not covered: servers other than vLLM, which do not
give token ids back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import openai

from tasks.jobs.completions import BATCH_SIZES, ChatFormat, Completion, SampleRequest, Sampling
from tasks.jobs.engine_identity import API_KEY, served_model, server_root, server_version
from tasks.jobs.prompt_rows import user_message
from tasks.recipes import SamplingRuntime

IN_FLIGHT = 256
"""Requests that a replica has at once: what vLLM runs at once by default."""
RETRIES = 6
"""Of a request, after connection errors, 429 and 5xx, with the client's exponential backoff: about half a minute."""
REQUEST_SECONDS = 3600.0


class ServerEngine:
    """One chat request a completion, spread over the replicas: each takes the next request when it has room."""

    def __init__(self, model: str, runtime: SamplingRuntime, max_length: int) -> None:
        server_version(runtime.server_urls)
        self.batch_size = runtime.batch_size or BATCH_SIZES["server"]
        self._names = {url: _checked(url, model, max_length) for url in runtime.server_urls}
        self._urls = runtime.server_urls
        self._format = ChatFormat(model)

    def generate(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Completion]:
        return asyncio.run(self._generate(requests, sampling))

    async def _generate(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Completion]:
        prompts = self._format.render([request.prompt for request in requests])
        pending = iter(list(enumerate(zip(requests, prompts, strict=True))))
        completions: dict[int, Completion] = {}
        clients = [(url, _client(url)) for url in self._urls]
        try:
            async with asyncio.TaskGroup() as group:
                # Slot by slot, not replica by replica: a batch smaller than IN_FLIGHT is spread as well.
                for _ in range(min(IN_FLIGHT, len(requests))):
                    for url, client in clients:
                        group.create_task(self._work(url, client, pending, sampling, completions))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            for _, client in clients:
                await client.close()
        return [completions[position] for position in range(len(requests))]

    async def _work(
        self,
        url: str,
        client: openai.AsyncOpenAI,
        pending: Iterator[tuple[int, tuple[SampleRequest, list[int]]]],
        sampling: Sampling,
        completions: dict[int, Completion],
    ) -> None:
        for position, (request, prompt_ids) in pending:
            completions[position] = await self._complete(url, client, request, prompt_ids, sampling)

    async def _complete(
        self,
        url: str,
        client: openai.AsyncOpenAI,
        request: SampleRequest,
        prompt_ids: list[int],
        sampling: Sampling,
    ) -> Completion:
        try:
            answer: Any = await client.chat.completions.create(
                model=self._names[url],
                messages=user_message(request.prompt),  # type: ignore[arg-type]
                seed=request.seed,
                n=1,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_completion_tokens=sampling.max_completion_length,
                # Stated, because a server fills what is left open from the model's shipped defaults.
                presence_penalty=0.0,
                frequency_penalty=0.0,
                extra_body={
                    "top_k": 0,
                    "min_p": 0.0,
                    "repetition_penalty": 1.0,
                    "stop_token_ids": sorted(self._format.stop_ids),
                    "return_token_ids": True,
                },
            )
        except openai.APIConnectionError as error:
            raise ConnectionError(
                f"{url} did not answer in {RETRIES + 1} attempts ({error.__cause__ or error}); is the server up?"
            ) from error
        except openai.APIStatusError as error:
            raise ValueError(
                f"{url} refused a completion with status {error.status_code}: {error.message}"
            ) from error
        return self._read(url, answer, prompt_ids)

    def _read(self, url: str, answer: Any, prompt_ids: list[int]) -> Completion:
        ids = getattr(answer.choices[0], "token_ids", None)
        rendered = getattr(answer, "prompt_token_ids", None)
        if ids is None or rendered is None:
            raise ValueError(f"{url} gives no token ids back; it must be a vLLM server of 0.22 or newer")
        if rendered != prompt_ids:
            raise ValueError(
                f"{url} renders a prompt to {len(rendered)} tokens that are not the policy's own {len(prompt_ids)}; "
                f"start it without --chat-template and --tokenizer of its own"
            )
        return self._format.completion(ids)


def _checked(url: str, model: str, max_length: int) -> str:
    served = served_model(url, model)
    if served.max_length < max_length:
        raise ValueError(
            f"{url} takes {served.max_length} tokens, and the longest prompt and its completion need {max_length}; "
            f"start it with --max-model-len {max_length} or more"
        )
    return served.name


def _client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=server_root(url) + "/v1",
        api_key=API_KEY,
        max_retries=RETRIES,
        timeout=openai.Timeout(REQUEST_SECONDS, connect=10.0),
    )
