"""Stage `report_curation`: plots, counts, and a page to browse the prompts that GRPO could not use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tasks import console
from tasks.browsing import write_browse_page
from tasks.configs import StageName
from tasks.pipeline import Pipeline
from tasks.reporting import inline_images
from tasks.stage import Build, Stage
from tasks.tracking import mlflow_link

if TYPE_CHECKING:
    import polars as pl

FOLDER = "curation"
"""Folder of the report in the MLflow run."""
PAGE = "browse.html"


def report_curation(build: Build) -> Mapping[str, Any]:
    """Payload: `curation.md` with its plots, and `browse.html`."""
    from data.schemas import PromptTable, SelectionTable, read_table
    from tasks import plots

    inputs = build.inputs
    prompts = read_table(inputs["prompts"].payload / "prompts.parquet", PromptTable)
    selection = read_table(inputs["selection"].payload / "selection.parquet", SelectionTable)
    plots.pass_rates(
        _read(build, "selection", "histogram.json"),
        build.payload / "pass_rates.png",
        title="Observed pass rate of the curation prompts",
    )
    plots.classes_by_source(_counts(selection, "source", "label"), build.payload / "classes.png")
    sampled = selection.drop_nulls("stop_rule")
    plots.samples_per_prompt(_counts(sampled, "trials", "stop_rule"), build.payload / "trials.png")
    page = write_browse_page(
        prompts,
        inputs["samples"].payload / "samples.parquet",
        inputs["scores"].payload / "scores.parquet",
        selection,
        build.payload / PAGE,
        notes=_read(build, "prompts", "sources.json")["suspect_golds"],
    )
    (build.payload / "curation.md").write_text(render(selection, _read(build, "selection", "dropped.json")))
    for file in sorted(build.payload.iterdir()):
        build.run.file(file, FOLDER)
    return {"prompts_to_look_at": sum(page.total.values()), "prompts_shown": sum(page.shown.values())}


def render(selection: pl.DataFrame, dropped: Mapping[str, Any]) -> str:
    """The Markdown of the report: what was kept, what was dropped and why, and the plots."""
    kept, drawn = int(selection["kept"].sum()), int(selection["trials"].sum())
    reasons = [
        f"| {reason.replace('_', ' ')} | {count} |" for reason, count in dropped["reasons"].items() if count
    ]
    lines = [
        f"Kept {kept} of {len(selection)} prompts, from {drawn:,} completions "
        f"({drawn / max(len(selection), 1):.1f} a prompt).",
        "",
        *(["| dropped because | prompts |", "|---|---|", *reasons, ""] if reasons else []),
        "![pass rates before and after selection](pass_rates.png)",
        "",
        "![classes by source](classes.png)",
        "",
        "![completions drawn per prompt](trials.png)",
    ]
    return "\n".join(lines) + "\n"


def publish_curation(pipeline: Pipeline) -> None:
    """Show the newest curation report in Prefect and in the parent MLflow run; nothing without one."""
    outcome = pipeline.newest(REPORT_CURATION.name)
    parent = pipeline.parent
    if outcome is None or parent is None:
        return
    payload = outcome.ref.payload
    for file in sorted(payload.iterdir()):
        parent.file(file, FOLDER)
    selected = next(o for o in reversed(pipeline.outcomes) if o.ref.kind == "prompts" and "kept" in o.facts)
    parent.metrics({f"prompts/{name}": value for name, value in selected.facts.items()})
    link = mlflow_link(parent.experiment_id, parent.run_id or "", f"{FOLDER}/{PAGE}")
    markdown = (
        f"[Browse the prompts that were not usable, with their completions]({link}) "
        f"(in MLflow; the file: `{payload / PAGE}`)\n\n" + (payload / "curation.md").read_text()
    )
    console.publish_markdown("curation", inline_images(markdown, payload), "What curation kept and dropped")


def _read(build: Build, role: str, file: str) -> Any:
    return json.loads((build.inputs[role].payload / file).read_text())


def _counts(selection: pl.DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    return selection.group_by(*columns).len().sort(*columns).rows()


REPORT_CURATION = Stage("report_curation", StageName.REPORT, "report", 1, report_curation, seeded=False)
