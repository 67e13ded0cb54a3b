"""Stage `write_report` (Markdown and plots), and the summaries that the flows print and return."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.artifacts import ArtifactRef
from tasks import console
from tasks.configs import StageName
from tasks.jobs.protocol import METRICS
from tasks.pipeline import Pipeline
from tasks.stage import Build, Outcome, Stage
from tasks.tracking import mlflow_link

MODELS = ("base", "sft", "grpo")


def write_report(build: Build) -> Mapping[str, Any]:
    """Payload: `report.md` and the PNG plots that it shows."""
    from tasks import plots

    inputs = build.inputs
    results = {name: _read(inputs[name], "benchmark.json") for name in MODELS}
    history = read_history(inputs["policy"])
    plots.pass_rates(_read(inputs["selection"], "histogram.json"), build.payload / "pass_rates.png")
    plots.training(history, build.payload / "training.png")
    plots.benchmarks(results, build.payload / "benchmark.png")
    selection, policy = _facts(inputs["selection"]), _facts(inputs["policy"])
    text = render(
        build.seed,
        results,
        selection,
        policy,
        _read(inputs["prompts"], "sources.json"),
    )
    (build.payload / "report.md").write_text(text)
    return {}


def render(
    seed: int,
    results: Mapping[str, Mapping[str, float]],
    selection: Mapping[str, Any],
    policy: Mapping[str, Any],
    sources: Mapping[str, Any],
) -> str:
    """The report's Markdown."""
    k = int(results["base"]["k"])
    confidence = f"{results['base']['confidence']:.0%}"
    lines = [f"# SFT -> GRPO, seed {seed}", "", f"Held-out prompts: {results['base']['prompts']}.", ""]
    lines += [
        f"| model | greedy accuracy ({confidence} interval) | mean@{k} | pass@{k} |",
        "|---|---|---|---|",
    ]
    for model in MODELS:
        row = results[model]
        interval = f"{row['greedy']:.1%} ({row['greedy_low']:.1%} to {row['greedy_high']:.1%})"
        lines.append(f"| {model} | {interval} | {row['mean@k']:.1%} | {row['pass@k']:.1%} |")
    lines += [
        "",
        "![held-out results](benchmark.png)",
        "",
        "## Curation",
        "",
        f"Kept {selection['kept']} of {selection['total']} prompts: {selection['mixed']} mixed, "
        f"{selection['solved']} solved, {selection['unsolved_so_far']} unsolved so far, {selection['truncated']} "
        f"mostly truncated, {selection['unscored']} unscored, {selection['suspect_gold']} with a suspect gold.",
        "",
        "![pass rates before and after selection](pass_rates.png)",
        "",
        "## GRPO",
        "",
        f"Mean share of zero-variance groups: {policy['zero_variance_share']:.1%}. "
        f"Generated tokens: {policy['generated_tokens']:,}.",
        "",
        "![reward and zero-variance share](training.png)",
        "",
        "## Data",
        "",
        "| source | rows | licence | revision |",
        "|---|---|---|---|",
        *(
            f"| `{row['source']}` | {row['rows_read']} | {row['licence']} | {row['revision']} |"
            for row in sources["sources"]
        ),
    ]
    if sources.get("mistakes"):
        lines += [
            "",
            "The demonstrations are of mixed quality on purpose; share of mistaken ones by template:",
            "",
        ]
        lines += ["| template | demonstrations | mistaken |", "|---|---|---|"]
        lines += [f"| {row['source']} | {row['train']} | {row['share']:.0%} |" for row in sources["mistakes"]]
    return "\n".join(lines) + "\n"


def read_history(policy: ArtifactRef) -> list[dict[str, Any]]:
    """Metric lines {"step", "metrics"} of a training stage."""
    text = (policy.record / METRICS).read_text()
    return [json.loads(line) for line in text.splitlines()]


def publish_report(pipeline: Pipeline) -> None:
    """Show the report in Prefect and in the parent MLflow run, with the headline metrics."""
    parent = pipeline.parent
    assert parent is not None, "a plan has nothing to publish"
    report = _outcome(pipeline, "write_report").ref.payload
    for file in sorted(report.iterdir()):
        parent.file(file, "report")
    parent.metrics(_headline(pipeline))
    links = f"MLflow run: [{parent.run_id}]({mlflow_link(parent.experiment_id, parent.run_id or '')})\n\n"
    markdown = links + inline_images((report / "report.md").read_text(), report)
    console.publish_markdown("report", markdown, "Held-out results, curation and training")


def _headline(pipeline: Pipeline) -> dict[str, float]:
    """The numbers that runs are compared by, under the same names in every pipeline."""
    values: dict[str, float] = {}
    for model in MODELS:
        facts = _outcome(pipeline, f"run_benchmark.{model}").facts
        k = int(facts["k"])
        values |= {f"{model}/greedy": facts["greedy"], f"{model}/mean@{k}": facts["mean@k"]}
        values[f"{model}/pass@{k}"] = facts["pass@k"]
    values["zero_variance_share"] = _outcome(pipeline, "train_grpo").facts["zero_variance_share"]
    return values


def pipeline_summary(pipeline: Pipeline, wall_s: float) -> dict[str, Any]:
    """What `flows.sft_grpo` returns and prints as its last line."""
    summary: dict[str, Any] = {"seed": pipeline.seed, "wall_s": wall_s}
    for model in MODELS:
        facts = _outcome(pipeline, f"run_benchmark.{model}").facts
        summary[model] = {
            f"mean@{int(facts['k'])}": round(facts["mean@k"], 4),
            "greedy": round(facts["greedy"], 4),
            "greedy_ci": [round(facts["greedy_low"], 4), round(facts["greedy_high"], 4)],
        }
    policy = _outcome(pipeline, "train_grpo").facts
    return summary | {
        "prompts": _prompt_counts(pipeline),
        "zero_variance_share": round(policy["zero_variance_share"], 4),
        "stages": _stages(pipeline),
        "mlflow_run_id": pipeline.parent and pipeline.parent.run_id,
        "report": str(_outcome(pipeline, "write_report").ref.payload / "report.md"),
    }


def curation_summary(pipeline: Pipeline, wall_s: float) -> dict[str, Any]:
    """What `flows.prompt_curation` returns and prints as its last line."""
    from data.schemas import LABELS

    summary: dict[str, Any] = {"seed": pipeline.seed, "wall_s": wall_s}
    for name, stage in (("selection", "select_prompts"), ("report", "report_curation")):
        found = pipeline.newest(stage)
        if found is not None:
            summary[name] = found.ref.path
        if found is not None and name == "selection":
            facts = found.facts
            summary["prompts"] = {part: facts[part] for part in ("total", "kept", *LABELS)}
    return summary | {
        "stages": _stages(pipeline),
        "mlflow_run_id": pipeline.parent and pipeline.parent.run_id,
        "artifact": pipeline.outcomes[-1].ref.path,
    }


def show_pipeline(summary: Mapping[str, Any]) -> None:
    """Print the short tables at the end of a pipeline."""
    out, table = (
        _terminal(),
        _table("model", *(name for name in summary["base"] if name != "greedy_ci"), "interval of greedy"),
    )
    for model in MODELS:
        row = summary[model]
        low, high = row["greedy_ci"]
        scores = [f"{value:.1%}" for name, value in row.items() if name != "greedy_ci"]
        table.add_row(model, *scores, f"{low:.1%} to {high:.1%}")
    out.print()
    out.print("Held-out prompts", style="bold")
    out.print(table)
    _show_common(out, summary)
    out.print(f"zero-variance groups: {summary['zero_variance_share']:.1%} of the groups of all GRPO steps")
    _show_places(out, summary, "report", summary["report"])


def show_curation(summary: Mapping[str, Any]) -> None:
    """Print the short tables at the end of a curation."""
    out = _terminal()
    out.print()
    _show_common(out, summary)
    if "report" in summary:
        out.print(
            f"browse the prompts that were not usable: {summary['report']}/payload/browse.html",
            soft_wrap=True,
        )
    _show_places(out, summary, "artifact", summary.get("selection", summary["artifact"]))


def _show_common(out: Any, summary: Mapping[str, Any]) -> None:
    table = _table("stage", "seconds", "generated tokens", "")
    for label, row in summary["stages"].items():
        table.add_row(
            label, f"{row['seconds']:.1f}", f"{row['generated_tokens']:,}", "reused" if row["reused"] else ""
        )
    out.print("Stages (seconds and tokens of the run that built them)", style="bold")
    out.print(table)
    if "prompts" in summary:
        from data.schemas import LABELS

        counts = summary["prompts"]
        classes = ", ".join(f"{counts[label]} {label}" for label in LABELS if counts.get(label))
        out.print(
            f"prompts kept: {counts['kept']} of {counts['total']}" + (f" ({classes})" if classes else "")
        )


def _show_places(out: Any, summary: Mapping[str, Any], what: str, path: str) -> None:
    out.print(f"{what}: {path}", soft_wrap=True)
    out.print(
        f"MLflow run: {summary['mlflow_run_id']}   (browse it: make up)   wall: {summary['wall_s']:.0f} s"
    )


def _terminal() -> Any:
    from rich.console import Console

    return Console(highlight=False)


def _table(*columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position == 0 else "right")
    return table


def _stages(pipeline: Pipeline) -> dict[str, dict[str, Any]]:
    return {
        outcome.label: {
            "seconds": round(outcome.seconds, 1),
            "job_seconds": round(outcome.facts.get("job_seconds", 0.0), 1),
            "generated_tokens": int(outcome.facts.get("generated_tokens", 0)),
            "reused": outcome.reused,
        }
        for outcome in pipeline.outcomes
    }


def _prompt_counts(pipeline: Pipeline) -> dict[str, int]:
    facts = _outcome(pipeline, "select_prompts").facts
    return {"total": facts["total"], "kept": facts["kept"]}


def _outcome(pipeline: Pipeline, label: str) -> Outcome:
    return next(outcome for outcome in pipeline.outcomes if outcome.label == label)


def _facts(ref: ArtifactRef) -> Mapping[str, Any]:
    return ref.manifest().facts


def _read(ref: ArtifactRef, file: str) -> Any:
    return json.loads((ref.payload / file).read_text())


def inline_images(markdown: str, folder: Path) -> str:
    """Prefect shows `data:` images, not files."""

    def inline(match: re.Match[str]) -> str:
        encoded = base64.b64encode((folder / match[2]).read_bytes()).decode()
        return f"![{match[1]}](data:image/png;base64,{encoded})"

    return re.sub(r"!\[([^\]]*)\]\(([\w.]+\.png)\)", inline, markdown)


WRITE_REPORT = Stage("write_report", StageName.REPORT, "report", 1, write_report)
