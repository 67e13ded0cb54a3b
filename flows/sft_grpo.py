"""SFT -> GRPO: warm start, curation by pass rate, group-relative policy optimisation, held-out benchmark."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.prompt_curation import curate
from tasks import cli
from tasks.benchmarking import RUN_BENCHMARK
from tasks.configs import StageName
from tasks.curation_report import publish_curation
from tasks.pipeline import Pipeline, open_pipeline, plan, timed
from tasks.preparation import MAKE_MODEL, MAKE_PROMPTS
from tasks.reporting import WRITE_REPORT, pipeline_summary, publish_report, show_pipeline
from tasks.sampling import choose_policy
from tasks.shortage import require_batch
from tasks.training import TRAIN_GRPO, TRAIN_SFT


@flow(name="sft-grpo", flow_run_name="{config} seed {seed}")
def sft_grpo(
    config: str = "text2sql_racing",
    overrides: list[str] = [],  # noqa: B006  Prefect shows it as an empty list in the form
    seed: int = 0,
    fresh: list[StageName] = [],  # noqa: B006
) -> dict[str, Any]:
    """Train with SFT, curate prompts by pass rate, train with GRPO, and benchmark all three models.

    Args:
        config: name of a file in flows/configs, or a path.
        overrides: fields to change, such as `grpo.recipe.beta=0.04`.
        seed: seed of data, initial weights and sampling.
        fresh: parts to rebuild although they exist; what follows from them is rebuilt too.
    """
    stopwatch = timed()
    with open_pipeline("sft_grpo", config, overrides, seed, fresh) as pipeline:
        stages(pipeline)
        publish_curation(pipeline)
        publish_report(pipeline)
        return pipeline_summary(pipeline, stopwatch())


def stages(pipeline: Pipeline) -> None:
    experiment = pipeline.experiment
    prompts = pipeline.stage(MAKE_PROMPTS, experiment.prompts)
    base = pipeline.stage(MAKE_MODEL, experiment.model, prompts=prompts)
    sft = pipeline.stage(TRAIN_SFT, experiment.sft, model=base, prompts=prompts)
    policy = choose_policy(pipeline, prompts, base=base, sft=sft)
    kept = curate(pipeline, model=policy, prompts=prompts)
    require_batch(kept, experiment.grpo.recipe)
    grpo = pipeline.stage(TRAIN_GRPO, experiment.grpo, model=sft, prompts=kept, databases=prompts)
    benchmarks = {
        name: pipeline.stage(RUN_BENCHMARK, experiment.benchmark, name=name, model=model, prompts=prompts)
        for name, model in {"base": base, "sft": sft, "grpo": grpo}.items()
    }
    pipeline.stage(
        WRITE_REPORT,
        experiment.report,
        prompts=prompts,
        selection=kept,
        policy=grpo,
        base=benchmarks["base"],
        sft=benchmarks["sft"],
        grpo=benchmarks["grpo"],
    )


def main() -> int:
    given = cli.parser(
        "flows.sft_grpo", "Warm start by SFT, curate by pass rate, train with GRPO."
    ).parse_args()
    call = (given.config, given.overrides, given.seed, [StageName(name) for name in given.fresh])
    if given.dry_run:
        return cli.main(lambda: {"plan": plan(stages, *call)}, lambda result: cli.show_plan(result["plan"]))
    return cli.main(lambda: sft_grpo(*call), show_pipeline)


if __name__ == "__main__":
    raise SystemExit(main())
