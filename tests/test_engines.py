"""Generation engines: what is drawn for a request depends on that request alone, and follows the policy."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from tasks.jobs.base_model import END, PAD
from tasks.jobs.completions import ChatFormat
from tasks.jobs.engine_identity import START, engine_version, served_model, server_version
from tasks.jobs.engines import GenerationEngine, SampleRequest, Sampling, TransformersEngine, open_engine
from tasks.jobs.seeded_draw import keep_drawn
from tasks.recipes import SamplingRuntime
from tests.tiny_policy import make_policy

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (no build for this machine)"
)
SAMPLING = Sampling(temperature=1.0, top_p=0.95, max_completion_length=12)
GREEDY = Sampling(temperature=0.0, top_p=1.0, max_completion_length=12)
PROMPTS = ["Which horses won?", "How many races were run at Ascot in 1987?", "Name a jockey."]
RUNTIME = SamplingRuntime()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a Qwen3 of random weights, wide enough apart that tokens differ in probability."""
    folder = tmp_path_factory.mktemp("engines") / "policy"
    make_policy(folder, PROMPTS)
    return str(folder)


@pytest.fixture(scope="session")
def engine(model: str) -> GenerationEngine:
    return open_engine("transformers", model, RUNTIME, 128)


@pytest.fixture(scope="session")
def vllm_engine(model: str) -> Iterator[GenerationEngine]:
    engine: Any = open_engine("vllm", model, SamplingRuntime(engine_arguments={"enforce_eager": True}), 128)
    yield engine
    engine._engine.llm_engine.engine_core.shutdown()


def requests_of(count: int, start: int = 0) -> list[SampleRequest]:
    return [SampleRequest(PROMPTS[seed % len(PROMPTS)], seed) for seed in range(start, start + count)]


def in_batches(engine: GenerationEngine, requests: list[SampleRequest], size: int) -> list[Any]:
    """One call a batch, as a run that was cut differently would make them."""
    return [
        completion
        for start in range(0, len(requests), size)
        for completion in engine.generate(requests[start : start + size], SAMPLING)
    ]


def check_independence(engine: GenerationEngine, count: int) -> None:
    requests = requests_of(count)
    whole = engine.generate(requests, SAMPLING)
    assert len({completion.text for completion in whole}) > count / 2
    assert in_batches(engine, requests, 7) == whole
    order = list(range(count))
    random.Random(0).shuffle(order)
    shuffled = engine.generate([requests[position] for position in order], SAMPLING)
    assert shuffled == [whole[position] for position in order]
    few = requests[:8]
    assert in_batches(engine, few, 1) == whole[:8]


def check_distinct_streams(engine: GenerationEngine) -> None:
    """PR02: eight samples of one prompt are eight streams."""
    completions = engine.generate([SampleRequest(PROMPTS[0], 1000 + index) for index in range(8)], SAMPLING)
    assert len({completion.text for completion in completions}) == 8


def check_first_tokens(engine: GenerationEngine, model: str, count: int) -> None:
    """First tokens over many seeds follow softmax(logits / T) cut at top_p: chi-square."""
    temperature, top_p = 0.7, 0.9
    draws = engine.generate(
        [SampleRequest(PROMPTS[1], seed) for seed in range(count)], Sampling(temperature, top_p, 1)
    )
    format_ = ChatFormat(model)
    expected = expected_first_tokens(model, format_, temperature, top_p)
    texts = {token: format_.completion([token]).text for token in expected}
    by_text: Counter[str] = Counter()
    for token, probability in expected.items():
        by_text[texts[token]] += probability  # type: ignore[assignment]
    observed = Counter(draw.text for draw in draws)
    assert observed.keys() <= by_text.keys(), "nothing outside top_p is drawn"
    common = [text for text, probability in by_text.items() if probability * count >= 5]
    assert len(common) >= 5, "the distribution has something to compare"
    rest = count - sum(observed[text] for text in common), count * (1 - sum(by_text[t] for t in common))
    seen = [observed[text] for text in common] + ([rest[0]] if rest[1] >= 5 else [])
    wanted = [by_text[text] * count for text in common] + ([rest[1]] if rest[1] >= 5 else [])
    scale = sum(seen) / sum(wanted)
    assert chisquare(seen, [value * scale for value in wanted]).pvalue > 0.001


def expected_first_tokens(
    model: str, format_: ChatFormat, temperature: float, top_p: float
) -> dict[int, float]:
    """Token -> probability, worked out without any of the engines' code."""
    from transformers import AutoModelForCausalLM

    network: Any = AutoModelForCausalLM.from_pretrained(model)
    with torch.inference_mode():
        logits = network(torch.tensor(format_.render([PROMPTS[1]]))).logits[0, -1].double()
    shares = sorted(enumerate((logits / temperature).softmax(-1).tolist()), key=lambda pair: -pair[1])
    kept, mass = {}, 0.0
    for token, share in shares:
        kept[token] = share
        mass += share
        if mass >= top_p:
            break
    return {token: share / mass for token, share in kept.items()}


def test_the_transformers_engine_draws_by_request_alone(engine: GenerationEngine) -> None:
    check_independence(engine, 64)


def test_a_smaller_engine_batch_changes_nothing(engine: GenerationEngine, model: str) -> None:
    small = open_engine("transformers", model, SamplingRuntime(batch_size=5), 128)
    assert (engine.batch_size, small.batch_size) == (256, 5)
    assert small.generate(requests_of(23), SAMPLING) == engine.generate(requests_of(23), SAMPLING)


def test_eight_samples_are_eight_streams(engine: GenerationEngine) -> None:
    check_distinct_streams(engine)


def test_first_tokens_follow_the_policy(engine: GenerationEngine, model: str) -> None:
    check_first_tokens(engine, model, 4000)


def test_temperature_zero_is_the_most_likely_token_whatever_the_seed(
    engine: GenerationEngine, model: str
) -> None:
    first, second = engine.generate([SampleRequest(PROMPTS[1], 1), SampleRequest(PROMPTS[1], 2)], GREEDY)
    assert first == second
    format_ = ChatFormat(model)
    likeliest = next(iter(expected_first_tokens(model, format_, 1.0, 1.0)))
    one = engine.generate([SampleRequest(PROMPTS[1], 3)], Sampling(0.0, 1.0, 1))[0]
    assert one.text == format_.completion([likeliest]).text


def test_ends_lengths_and_order(engine: GenerationEngine) -> None:
    """EOS counts as a token, a cut completion has all its tokens, and rows that end early do not go on."""
    completions = engine.generate(requests_of(200), Sampling(1.5, 1.0, 40))
    stopped = [completion for completion in completions if completion.finish_reason == "stop"]
    cut = [completion for completion in completions if completion.finish_reason == "length"]
    assert stopped, "with random weights some of 200 end"
    assert cut, "and some do not"
    assert all(completion.tokens == 40 for completion in cut)
    assert all(1 <= completion.tokens <= 40 for completion in stopped)
    assert min(completion.tokens for completion in stopped) < 40
    assert all(PAD not in completion.text and END not in completion.text for completion in completions)


def test_shipped_sampling_defaults_do_not_apply(engine: GenerationEngine, model: str, tmp_path: Path) -> None:
    """Qwen2.5 ships repetition_penalty 1.05 and top_k 20; GRPO rolls out without them, so must curation."""
    opinionated = with_defaults(model, tmp_path)
    other = open_engine("transformers", opinionated, RUNTIME, 128)
    assert other.generate(requests_of(20), SAMPLING) == engine.generate(requests_of(20), SAMPLING)
    assert other.generate(requests_of(3), GREEDY) == engine.generate(requests_of(3), GREEDY)


def with_defaults(model: str, tmp_path: Path) -> str:
    """A copy of the model whose generation_config.json has opinions on sampling."""
    folder = tmp_path / "opinionated"
    shutil.copytree(model, folder)
    path = folder / "generation_config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    config |= {"do_sample": True, "top_k": 2, "temperature": 0.3, "repetition_penalty": 3.0}
    path.write_text(json.dumps(config))
    return str(folder)


def test_an_end_of_turn_beside_eos_ends_too(model: str, tmp_path: Path) -> None:
    folder = tmp_path / "two_ends"
    shutil.copytree(model, folder)
    path = folder / "generation_config.json"
    config = json.loads(path.read_text())
    user = ChatFormat(model).tokenizer.get_vocab()["<|user|>"]
    path.write_text(json.dumps(config | {"eos_token_id": [config["eos_token_id"], user]}))
    format_ = ChatFormat(str(folder))
    assert user in format_.stop_ids
    assert format_.tokenizer.eos_token_id in format_.stop_ids
    completion = format_.completion([*format_.tokenizer("Ascot")["input_ids"], user, 0, 0])
    assert (completion.text, completion.finish_reason) == ("Ascot", "stop")


def test_logits_that_are_not_finite_are_an_error(model: str) -> None:
    broken: Any = TransformersEngine(model, RUNTIME)
    with torch.no_grad():
        broken._model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="logits are NaN or infinite"):
        broken.generate(requests_of(2), SAMPLING)


def test_the_draw_is_exact_at_its_edges() -> None:
    """u picks the first token whose running sum exceeds it; a token of probability 0 is never drawn."""
    shares = torch.tensor([[0, 0.25, 0.25, 0, 0.5, 0]]).log().repeat(4, 1)
    numbers = torch.tensor([[0.0], [0.25], [0.5], [1 - 2**-53]], dtype=torch.float64)
    assert keep_drawn(shares, numbers).argmax(-1).tolist() == [1, 2, 4, 4]


@needs_vllm
@pytest.mark.slow
def test_the_vllm_engine_keeps_the_same_promises(vllm_engine: GenerationEngine, model: str) -> None:
    assert vllm_engine.batch_size == 2048
    check_independence(vllm_engine, 64)
    check_distinct_streams(vllm_engine)
    check_first_tokens(vllm_engine, model, 4000)


@needs_vllm
@pytest.mark.slow
def test_vllm_and_transformers_agree_where_nothing_is_drawn(
    vllm_engine: GenerationEngine, engine: GenerationEngine
) -> None:
    """Rendering, text, token counts and ends are the same, so greedy completions are."""
    long = Sampling(0.0, 1.0, 60)
    assert vllm_engine.generate(requests_of(3), long) == engine.generate(requests_of(3), long)


@needs_vllm
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA vLLM draws by itself")
def test_vllm_on_a_cpu_draws_what_transformers_draws(
    vllm_engine: GenerationEngine, engine: GenerationEngine
) -> None:
    ours, theirs = (one.generate(requests_of(64), SAMPLING) for one in (vllm_engine, engine))
    assert sum(left == right for left, right in zip(ours, theirs, strict=True)) >= 62, "two may be rounding"


def test_versions() -> None:
    version = engine_version("transformers", RUNTIME)
    assert version.startswith("transformers==")
    assert f"+torch=={torch.__version__}" in version
    with pytest.raises(ValueError, match=r"needs runtime\.server_urls"):
        engine_version("server", RUNTIME)
    with pytest.raises(ValueError, match="must be transformers, vllm or server"):
        open_engine("sglang", "nowhere", RUNTIME, 128)


def test_the_identity_of_an_engine_is_found_without_torch() -> None:
    code = "import sys, tasks.jobs.engine_identity; print(sorted({'torch', 'vllm', 'openai'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_a_server_that_is_not_there() -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    with pytest.raises(ValueError, match=rf"no model server answers at {url.removesuffix('/v1')}/version"):
        server_version([url])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real vLLM server of the tiny model."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1"
    log = tmp_path_factory.mktemp("server") / "log.txt"
    arguments = ["--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "128"]
    # A seeded prompt that is split ends vLLM 0.31 on a CPU.
    arguments += ["--enforce-eager", "--no-enable-chunked-prefill"]
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, *START.split()[1:], model, *arguments],
            env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"},
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    try:
        wait_for(url, process, log)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(url.removesuffix("/v1") + "/health", timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise AssertionError(log.read_text()[-3000:])


@needs_vllm
@pytest.mark.slow
def test_a_real_server(server: str, model: str, engine: GenerationEngine) -> None:
    from importlib import metadata

    # The same server twice stands for two replicas.
    runtime = SamplingRuntime(server_urls=[server, server.removesuffix("/v1")])
    assert engine_version("server", runtime).startswith("server:vllm==" + metadata.version("vllm-cpu")[:4])
    remote = open_engine("server", model, runtime, 128)
    check_independence(remote, 64)
    check_distinct_streams(remote)
    check_first_tokens(remote, model, 2000)
    long = Sampling(0.0, 1.0, 60)
    assert remote.generate(requests_of(3), long) == engine.generate(requests_of(3), long)


@needs_vllm
@pytest.mark.slow
def test_what_a_server_must_not_be(server: str, model: str, tmp_path: Path) -> None:
    runtime = SamplingRuntime(server_urls=[server])
    with pytest.raises(ValueError, match=r"takes 128 tokens.*need 200.*--max-model-len 200"):
        open_engine("server", model, runtime, 200)
    other = str(tmp_path / "another_policy")
    with pytest.raises(
        ValueError, match=rf"serves {model}.*not the policy; start one with: .* --model {other}"
    ):
        served_model(server, other)
    remote = open_engine("server", model, runtime, 128)
    with pytest.raises(ValueError, match=r"refused a completion with status 400: .*128"):
        remote.generate(requests_of(2), Sampling(1.0, 1.0, 500))


@needs_vllm
@pytest.mark.slow
def test_a_replica_that_dies_while_sampling(server: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.jobs import engine_server

    monkeypatch.setattr(engine_server, "RETRIES", 1)
    remote: Any = open_engine("server", model, SamplingRuntime(server_urls=[server, server]), 128)
    dead = f"http://127.0.0.1:{free_port()}/v1"
    remote._urls = [server, dead]
    remote._names[dead] = remote._names[server]
    with pytest.raises(ConnectionError, match=rf"{dead} did not answer in 2 attempts"):
        remote.generate(requests_of(40), SAMPLING)
