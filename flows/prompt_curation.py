"""Prompt curation alone: sample -> score -> select, the whole of it or one step on artifacts that exist."""

from __future__ import annotations

from typing import Any, Literal

from prefect import flow

from data.artifacts import ArtifactRef
from tasks import cli
from tasks.configs import StageName
from tasks.pipeline import Pipeline, open_pipeline, plan, timed
from tasks.preparation import MAKE_MODEL, MAKE_PROMPTS
from tasks.reporting import curation_summary, show_curation
from tasks.sampling import SAMPLE_COMPLETIONS
from tasks.scoring import SCORE_SAMPLES
from tasks.selection import SELECT_PROMPTS
from tasks.training import TRAIN_SFT

CurationStep = Literal["sample", "score", "select"]


@flow(name="prompt-curation", flow_run_name="{config} seed {seed}")
def prompt_curation(
    config: str = "text2sql_racing",
    overrides: list[str] = [],  # noqa: B006  Prefect shows it as an empty list in the form
    seed: int = 0,
    fresh: list[StageName] = [],  # noqa: B006
    only: CurationStep | None = None,
) -> dict[str, Any]:
    """Measure the warm start's pass rate on the curation prompts and keep those in the band.

    Args:
        config: name of a file in flows/configs, or a path.
        overrides: fields to change, such as `select.recipe.high=0.9`.
        seed: seed of data, initial weights and sampling.
        fresh: parts to rebuild although they exist; what follows from them is rebuilt too.
        only: build this step alone, from artifacts that exist; empty builds whatever is missing.
    """
    stopwatch = timed()
    with open_pipeline("prompt_curation", config, overrides, seed, fresh, _buildable(only)) as pipeline:
        stages(pipeline, only)
        return curation_summary(pipeline, stopwatch())


def stages(pipeline: Pipeline, only: CurationStep | None = None) -> None:
    experiment = pipeline.experiment
    prompts = pipeline.stage(MAKE_PROMPTS, experiment.prompts)
    base = pipeline.stage(MAKE_MODEL, experiment.model, prompts=prompts)
    warm = pipeline.stage(TRAIN_SFT, experiment.sft, model=base, prompts=prompts)
    curate(pipeline, model=warm, prompts=prompts, last=only or "select")


def curate(
    pipeline: Pipeline, *, model: ArtifactRef, prompts: ArtifactRef, last: CurationStep = "select"
) -> ArtifactRef:
    """Sample -> score -> select for any model; stops after `last`."""
    experiment = pipeline.experiment
    samples = pipeline.stage(SAMPLE_COMPLETIONS, experiment.sample, model=model, prompts=prompts)
    if last == "sample":
        return samples
    scores = pipeline.stage(SCORE_SAMPLES, experiment.score, samples=samples, prompts=prompts)
    if last == "score":
        return scores
    return pipeline.stage(SELECT_PROMPTS, experiment.select, scores=scores, prompts=prompts)


def _buildable(only: CurationStep | None) -> frozenset[StageName]:
    return frozenset(StageName) if only is None else frozenset({StageName(only)})


def main() -> int:
    arguments = cli.parser("flows.prompt_curation", "Sample, score and select prompts by pass rate.")
    arguments.add_argument("--only", choices=["sample", "score", "select"], help="build this step alone")
    given = arguments.parse_args()
    call = (given.config, given.overrides, given.seed, [StageName(name) for name in given.fresh])
    if given.dry_run:
        return cli.main(
            lambda: {
                "plan": plan(lambda pipeline: stages(pipeline, given.only), *call, _buildable(given.only))
            },
            lambda result: cli.show_plan(result["plan"]),
        )
    return cli.main(lambda: prompt_curation(*call, given.only), show_curation)


if __name__ == "__main__":
    raise SystemExit(main())
