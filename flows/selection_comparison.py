"""Compares two selections: which prompts changed class, and which are kept in one alone."""

from __future__ import annotations

from typing import Any

from prefect import flow

from tasks import cli
from tasks.comparison import COMPARE_SELECTIONS, publish_comparison
from tasks.configs import StageName
from tasks.pipeline import Pipeline, open_pipeline, plan, timed
from tasks.preparation import MAKE_PROMPTS
from tasks.reporting import curation_summary, show_curation
from tasks.selection import find_selection


@flow(name="selection-comparison", flow_run_name="{config} seed {seed}")
def selection_comparison(
    before: str,
    after: str,
    config: str = "text2sql_racing",
    overrides: list[str] = [],  # noqa: B006  Prefect shows it as an empty list in the form
    seed: int = 0,
    fresh: list[StageName] = [],  # noqa: B006
) -> dict[str, Any]:
    """Compare two selections of one experiment's prompts.

    Args:
        before: folder of a select_prompts artifact (the summary of a curation names it).
        after: folder of the other one.
        config: name of a file in flows/configs, or a path: whose prompts they select from.
        overrides: fields to change.
        seed: seed of data, initial weights and sampling.
        fresh: parts to rebuild although they exist.
    """
    stopwatch = timed()
    with open_pipeline("selection_comparison", config, overrides, seed, fresh) as pipeline:
        stages(pipeline, before, after)
        publish_comparison(pipeline)
        return curation_summary(pipeline, stopwatch())


def stages(pipeline: Pipeline, before: str, after: str) -> None:
    experiment = pipeline.experiment
    prompts = pipeline.stage(MAKE_PROMPTS, experiment.prompts)
    pipeline.stage(
        COMPARE_SELECTIONS,
        experiment.report,
        before=find_selection(before),
        after=find_selection(after),
        prompts=prompts,
    )


def main() -> int:
    arguments = cli.parser("flows.selection_comparison", "Compare two selections of prompts.")
    arguments.add_argument("--before", required=True, help="folder of a select_prompts artifact")
    arguments.add_argument("--after", required=True, help="folder of the other one")
    given = arguments.parse_args()
    call = (given.config, given.overrides, given.seed, [StageName(name) for name in given.fresh])
    if given.dry_run:
        return cli.main(
            lambda: {"plan": plan(lambda pipeline: stages(pipeline, given.before, given.after), *call)},
            lambda result: cli.show_plan(result["plan"]),
        )
    return cli.main(lambda: selection_comparison(given.before, given.after, *call), show_curation)


if __name__ == "__main__":
    raise SystemExit(main())
