"""Prompt curation alone: prompts -> sample -> score -> select, the whole of it or one step on artifacts that exist."""

from __future__ import annotations

from typing import Any, Literal

from prefect import flow

from data.artifacts import ArtifactRef
from tasks import cli
from tasks.comparison import COMPARE_SELECTIONS, publish_comparison
from tasks.configs import ConfigError, StageName
from tasks.curation_report import REPORT_CURATION, publish_curation
from tasks.pipeline import Pipeline, open_pipeline, plan, timed
from tasks.preparation import MAKE_MODEL, MAKE_PROMPTS
from tasks.recipes import RewardSpec
from tasks.reporting import curation_summary, show_curation
from tasks.sampling import SAMPLE_COMPLETIONS, choose_policy
from tasks.scoring import SCORE_SAMPLES
from tasks.selection import SELECT_PROMPTS
from tasks.shortage import require_batch
from tasks.training import TRAIN_SFT

CurationStep = Literal["prompts", "sample", "score", "select"]
BUILDABLE = {
    "prompts": {StageName.PROMPTS},
    "sample": {StageName.MODEL, StageName.SAMPLE},  # a checkpoint's folder becomes a model artifact first
    "score": {StageName.SCORE, StageName.REPORT},
    "select": {StageName.SELECT, StageName.REPORT},
}


@flow(name="prompt-curation", flow_run_name="{config} seed {seed}")
def prompt_curation(
    config: str = "text2sql_racing",
    overrides: list[str] = [],  # noqa: B006  Prefect shows it as an empty list in the form
    seed: int = 0,
    fresh: list[StageName] = [],  # noqa: B006
    only: CurationStep | None = None,
    rescore_with: RewardSpec | None = None,
) -> dict[str, Any]:
    """Measure a policy's pass rate on the curation prompts and keep those that GRPO can learn from.

    Args:
        config: name of a file in flows/configs, or a path.
        overrides: fields to change, such as `select.recipe.high=0.9` or `sample.recipe.policy=base`.
        seed: seed of data, initial weights and sampling.
        fresh: parts to rebuild although they exist; what follows from them is rebuilt too.
        only: build this step alone, from artifacts that exist; empty builds whatever is missing.
        rescore_with: another reward for the stored samples; shows which prompts changed class, generates nothing.
    """
    stopwatch = timed()
    buildable = _buildable(only, rescore_with)
    with open_pipeline("prompt_curation", config, overrides, seed, fresh, buildable) as pipeline:
        stages(pipeline, only, rescore_with)
        publish_curation(pipeline)
        publish_comparison(pipeline)
        return curation_summary(pipeline, stopwatch())


def stages(
    pipeline: Pipeline, only: CurationStep | None = None, rescore_with: RewardSpec | None = None
) -> None:
    experiment = pipeline.experiment
    prompts = pipeline.stage(MAKE_PROMPTS, experiment.prompts)
    if only != "prompts":
        policy = starting_policy(pipeline, prompts)
        kept = curate(
            pipeline, model=policy, prompts=prompts, last=only or "select", rescore_with=rescore_with
        )
        if only in (None, "select") and rescore_with is None:
            require_batch(kept, experiment.grpo.recipe)


def starting_policy(pipeline: Pipeline, prompts: ArtifactRef) -> ArtifactRef:
    """The model whose pass rate the config asks for; trains the warm start only if that is it."""
    experiment = pipeline.experiment
    known = {}
    if experiment.sample.recipe.policy in ("base", "sft"):
        known["base"] = pipeline.stage(MAKE_MODEL, experiment.model, prompts=prompts)
    if experiment.sample.recipe.policy == "sft":
        known["sft"] = pipeline.stage(TRAIN_SFT, experiment.sft, model=known["base"], prompts=prompts)
    return choose_policy(pipeline, prompts, **known)


def curate(
    pipeline: Pipeline,
    *,
    model: ArtifactRef,
    prompts: ArtifactRef,
    last: CurationStep = "select",
    rescore_with: RewardSpec | None = None,
    name: str = "",
) -> ArtifactRef:
    """Sample -> score -> select for any model, and the report; stops after `last`."""
    experiment = pipeline.experiment
    samples = pipeline.stage(SAMPLE_COMPLETIONS, experiment.sample, name=name, model=model, prompts=prompts)
    if last == "sample":
        return samples
    scores = pipeline.stage(SCORE_SAMPLES, experiment.score, name=name, samples=samples, prompts=prompts)
    if last == "score" and rescore_with is None:
        return scores
    drawn = {"prompts": prompts, "samples": samples}
    kept = pipeline.stage(SELECT_PROMPTS, experiment.select, name=name, reward=None, scores=scores, **drawn)
    if rescore_with is not None:
        name, before = "rescored", kept
        scores = pipeline.stage(SCORE_SAMPLES, experiment.score, name=name, reward=rescore_with, **drawn)
        kept = pipeline.stage(
            SELECT_PROMPTS, experiment.select, name=name, reward=None, scores=scores, **drawn
        )
        pipeline.stage(COMPARE_SELECTIONS, experiment.report, before=before, after=kept, prompts=prompts)
    found = {"scores": scores, "selection": kept, **drawn}
    pipeline.stage(REPORT_CURATION, experiment.report, name=name, reward=None, **found)
    return kept


def _buildable(only: CurationStep | None, rescore_with: RewardSpec | None) -> frozenset[StageName]:
    if rescore_with is not None and only not in (None, "score"):
        raise ConfigError(
            f"rescore_with scores again, so only={only} leaves nothing to do; use only=score, or leave it empty"
        )
    if only is None:
        return frozenset(StageName)
    # Selecting is instant, and what a re-scoring is for is to see what it changes.
    return frozenset(BUILDABLE[only] | ({StageName.SELECT} if rescore_with else set()))


def main() -> int:
    arguments = cli.parser("flows.prompt_curation", "Sample, score and select prompts by pass rate.")
    arguments.add_argument("--only", choices=list(BUILDABLE), help="build this step alone")
    arguments.add_argument(
        "--rescore-with",
        metavar="REWARD",
        type=cli.reward_spec,
        help="score the stored samples by another reward and compare: a name, or name={param: value}",
    )
    given = arguments.parse_args()
    call = (given.config, given.overrides, given.seed, [StageName(name) for name in given.fresh])
    if given.dry_run:
        return cli.main(
            lambda: {
                "plan": plan(
                    lambda pipeline: stages(pipeline, given.only, given.rescore_with),
                    *call,
                    _buildable(given.only, given.rescore_with),
                )
            },
            lambda result: cli.show_plan(result["plan"]),
        )
    return cli.main(lambda: prompt_curation(*call, given.only, given.rescore_with), show_curation)


if __name__ == "__main__":
    raise SystemExit(main())
