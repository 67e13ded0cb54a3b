"""Stage `sample_completions`: draw completions of a policy for the curation prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.configs import StageName
from tasks.recipes import SampleRecipe
from tasks.stage import Build, Stage


def sample_completions(build: Build) -> Mapping[str, Any]:
    """Payload: `samples.parquet` (SampleTable)."""
    recipe: SampleRecipe = build.recipe
    draw = {
        "name": "samples",
        "n": recipe.samples_per_prompt,
        "temperature": recipe.temperature,
        "top_p": recipe.top_p,
        "max_completion_length": recipe.max_completion_length,
    }
    return build.job(
        "sample",
        engine=recipe.engine,
        split="curation",
        shard_size=recipe.shard_size,
        draws=[draw],
        model_digest=build.inputs["model"].digest,
    )


SAMPLE_COMPLETIONS = Stage("sample_completions", StageName.SAMPLE, "samples", 1, sample_completions)
