"""The peer of part `vllm`: what a person would write, `LLM(...)` and one `generate` over everything.

    python -m benchmarks.curation_vllm_bare <request.json>

The request holds `job`, the request.json of the sampling job that it is compared with, `seeded`, whether each request
brings its seed, and `answer`, where the result goes. Prompts and settings are those of the job. Text comes out as it does
by default; ours too ends in text.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(path: str) -> None:
    request = json.loads(Path(path).read_text())
    job = json.loads(Path(request["job"]).read_text())
    # As the job's launcher and engine set them.
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ |= job["runtime"]["environment"]
    Path(request["answer"]).write_text(json.dumps(generate(job, request["seeded"])))


def generate(job: dict[str, Any], seeded: bool) -> dict[str, Any]:
    """{"tokens", "seconds"} of one `LLM.generate`; seconds begin when the engine has loaded."""
    import torch
    from transformers import AutoTokenizer

    from data.sample_ledger import sample_seed
    from tasks.jobs.completions import ChatFormat
    from tasks.jobs.prompt_rows import longest_prompt, read_prompts

    model, draw = job["inputs"]["model"], job["options"]["draws"][0]
    rows = read_prompts(job["inputs"]["prompts"], job["options"]["split"])
    count, sampling = draw["plan"]["first"], draw["sampling"]
    longest = longest_prompt(AutoTokenizer.from_pretrained(model), rows["prompt"].to_list())
    arguments: dict[str, Any] = {"max_model_len": longest + sampling["max_completion_length"]}
    if not torch.cuda.is_available():
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        arguments["dtype"] = "float32"
        if seeded:  # vLLM 0.31 dies on a CPU when the prompt of a request with a seed is split
            arguments["enable_chunked_prefill"] = False
    from vllm import LLM, SamplingParams

    engine = LLM(model=model, **arguments | job["runtime"]["engine_arguments"])
    started = time.perf_counter()
    chat = ChatFormat(model)
    requests: list[tuple[Any, int]] = [
        ({"prompt_token_ids": ids}, sample_seed(job["seed"], prompt_id, index))
        for prompt_id, ids in zip(rows["prompt_id"], chat.render(rows["prompt"].to_list()), strict=True)
        for index in range(count)
    ]
    parameters = [
        SamplingParams(
            temperature=sampling["temperature"],
            top_p=sampling["top_p"],
            max_tokens=sampling["max_completion_length"],
            seed=seed if seeded else None,
            stop_token_ids=sorted(chat.stop_ids),
        )
        for _, seed in requests
    ]
    outputs = engine.generate([prompt for prompt, _ in requests], parameters, use_tqdm=False)
    seconds = time.perf_counter() - started
    return {"tokens": sum(len(output.outputs[0].token_ids) for output in outputs), "seconds": seconds}


if __name__ == "__main__":
    main(sys.argv[1])
