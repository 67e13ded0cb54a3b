"""The GRPO stage for real on a CPU: DeepSpeed ZeRO, several ranks, and a colocated vLLM engine."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from data.artifacts import ArtifactRef
from flows.prompt_curation import curate
from tasks.pipeline import open_pipeline
from tasks.preparation import MAKE_MODEL, MAKE_PROMPTS
from tasks.training import TRAIN_GRPO, TRAIN_SFT

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (no build for this machine)"
)


def train(*overrides: str) -> ArtifactRef:
    """Only the GRPO stage of the nano pipeline; everything before it is reused."""
    with open_pipeline("sft_grpo", "nano", overrides, 0, []) as pipeline:
        experiment = pipeline.experiment
        prompts = pipeline.stage(MAKE_PROMPTS, experiment.prompts)
        base = pipeline.stage(MAKE_MODEL, experiment.model, prompts=prompts)
        sft = pipeline.stage(TRAIN_SFT, experiment.sft, model=base, prompts=prompts)
        kept = curate(pipeline, model=sft, prompts=prompts)
        assert all(outcome.reused for outcome in pipeline.outcomes), "the nano run is there already"
        return pipeline.stage(TRAIN_GRPO, experiment.grpo, model=sft, prompts=kept, databases=prompts)


def history(model: ArtifactRef) -> list[dict[str, Any]]:
    lines = (model.record / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "reward" in line["metrics"]]


def check(model: ArtifactRef, steps: int = 2) -> list[dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model.payload)
    assert sum(parameter.numel() for parameter in loaded.parameters()) > 50_000, (
        "whole weights, not one rank's shard"
    )
    lines = history(model)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    for line in lines:
        assert line["metrics"]["generated_tokens"] >= 16, "the whole batch's tokens, over all ranks"
        assert line["metrics"]["within_group_std"] >= 0
    return lines


# Every test trains with a learning rate of its own: ranks and ZeRO are runtime, no part of the key.


@needs_vllm
def test_zero_2_two_ranks_and_vllm_colocate_at_once(nano: dict[str, Any]) -> None:
    lines = check(
        train(
            "grpo.recipe.engine=vllm",
            "grpo.runtime.zero_stage=2",
            "grpo.runtime.ranks=2",
            "grpo.recipe.learning_rate=0.0011",
        )
    )
    for line in lines:
        # After a weight sync the engine must sample from the very weights that are trained.
        assert line["metrics"]["sampling/sampling_logp_difference/mean"] < 0.01


def test_zero_3_two_ranks(nano: dict[str, Any]) -> None:
    check(train("grpo.runtime.zero_stage=3", "grpo.runtime.ranks=2", "grpo.recipe.learning_rate=0.0012"))


def test_a_single_process_with_accumulation(nano: dict[str, Any]) -> None:
    check(
        train(
            "grpo.runtime.per_device_batch_size=4",
            "grpo.recipe.learning_rate=0.0013",
            "grpo.recipe.beta=0.04",
        )
    )


@needs_vllm
def test_the_vllm_engine_samples_for_curation(nano: dict[str, Any]) -> None:
    """Distinct streams per sample: one seed must not repeat one completion."""
    import polars as pl

    from flows.prompt_curation import prompt_curation

    overrides = ["sample.recipe.engine=vllm", "sample.recipe.first_samples=4", "sample.recipe.max_samples=4"]
    summary = prompt_curation(config="nano", overrides=overrides, only="sample")
    samples = pl.read_parquet(f"{summary['artifact']}/payload/samples.parquet")
    assert len(samples) == 48 * 4
    distinct = samples.group_by("prompt_id").agg(pl.col("completion").n_unique())["completion"].to_list()
    assert sum(distinct) / len(distinct) > 3
