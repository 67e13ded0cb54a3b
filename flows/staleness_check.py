"""Is the curation still true for another checkpoint? Samples a small part again, and curates anew if asked to."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.prompt_curation import curate, starting_policy
from tasks import cli
from tasks.configs import StageName, StalenessStage
from tasks.curation_report import publish_curation
from tasks.pipeline import Pipeline, open_pipeline, plan, timed
from tasks.preparation import MAKE_PROMPTS
from tasks.reporting import curation_summary, show_curation
from tasks.sampling import find_checkpoint
from tasks.staleness import CHECK_STALENESS, is_stale, staleness_summary


@flow(name="staleness-check", flow_run_name="{config} seed {seed}")
def staleness_check(
    checkpoint: str,
    config: str = "text2sql_racing",
    overrides: list[str] = [],  # noqa: B006  Prefect shows it as an empty list in the form
    seed: int = 0,
    fresh: list[StageName] = [],  # noqa: B006
    refresh: bool = False,
) -> dict[str, Any]:
    """Sample a stratified part of the curated prompts with another checkpoint and count the labels that flipped.

    Args:
        checkpoint: folder of a model artifact or of a checkpoint, such as `.../record/checkpoint-20` of train_grpo.
        config: name of a file in flows/configs, or a path: whose curation is checked.
        overrides: fields to change, such as `staleness.recipe.max_flipped_share=0.2`.
        seed: seed of data, initial weights and sampling.
        fresh: parts to rebuild although they exist; what follows from them is rebuilt too.
        refresh: curate for the checkpoint when more labels flipped than the limit allows.
    """
    stopwatch = timed()
    with open_pipeline("staleness_check", config, overrides, seed, fresh) as pipeline:
        stages(pipeline, checkpoint, refresh)
        publish_curation(pipeline)
        return {**curation_summary(pipeline, stopwatch()), "staleness": staleness_summary(pipeline)}


def stages(pipeline: Pipeline, checkpoint: str, refresh: bool = False) -> None:
    experiment = pipeline.experiment
    prompts = pipeline.stage(MAKE_PROMPTS, experiment.prompts)
    kept = curate(pipeline, model=starting_policy(pipeline, prompts), prompts=prompts)
    model = find_checkpoint(pipeline, checkpoint, prompts)
    check = pipeline.stage(
        CHECK_STALENESS, _sampled_alike(pipeline), model=model, prompts=prompts, selection=kept
    )
    if refresh and is_stale(check):
        curate(pipeline, model=model, prompts=prompts, name="refreshed")


def _sampled_alike(pipeline: Pipeline) -> StalenessStage:
    """The staleness part of the experiment, with the curation's sampling where it names none."""
    part, sample = pipeline.experiment.staleness, pipeline.experiment.sample.recipe
    return part.model_copy(
        update={"recipe": part.recipe.model_copy(update={"sampling": part.recipe.sampling or sample})}
    )


def main() -> int:
    arguments = cli.parser("flows.staleness_check", "Check whether curated prompts still fit a checkpoint.")
    arguments.add_argument("--checkpoint", required=True, help="folder of a model artifact or checkpoint")
    arguments.add_argument(
        "--refresh", action="store_true", help="curate anew for it when the curation is stale"
    )
    given = arguments.parse_args()
    call = (given.config, given.overrides, given.seed, [StageName(name) for name in given.fresh])
    if given.dry_run:
        return cli.main(
            lambda: {"plan": plan(lambda pipeline: stages(pipeline, given.checkpoint), *call)},
            lambda result: cli.show_plan(result["plan"]),
        )
    return cli.main(lambda: staleness_check(given.checkpoint, *call, given.refresh), show_curation)


if __name__ == "__main__":
    raise SystemExit(main())
