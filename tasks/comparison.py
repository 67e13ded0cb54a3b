"""Stage `compare_selections`: two selections of the same prompts side by side.

Of other recipes, other rewards on the same samples, or other checkpoints. Not covered: why a label changed; the samples and scores behind both are in their artifacts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tasks import console
from tasks.configs import ConfigError, StageName
from tasks.pipeline import Pipeline
from tasks.stage import Build, Stage

if TYPE_CHECKING:
    import polars as pl

SHOWN = 200
"""Changed prompts in the table of the MLflow run; the file has all of them."""


def compare(build: Build) -> Mapping[str, Any]:
    """Payload: `comparison.parquet` (a row a prompt), `comparison.json` (counts) and `comparison.md`."""
    import polars as pl

    from data.schemas import PromptTable, SelectionTable, read_table

    a, b = (
        read_table(build.inputs[role].payload / "selection.parquet", SelectionTable)
        for role in ("before", "after")
    )
    table, summary = compare_selections(a, b)
    if not summary["in_both"]:
        raise ConfigError(
            "compare_selections: the two selections have no prompt in common; nothing can be compared"
        )
    table.write_parquet(build.payload / "comparison.parquet")
    (build.payload / "comparison.json").write_text(json.dumps(summary, indent=2) + "\n")
    changed = table.filter(
        pl.col("label_a").ne_missing(pl.col("label_b")) | pl.col("kept_a").ne_missing(pl.col("kept_b"))
    )
    prompts = read_table(build.inputs["prompts"].payload / "prompts.parquet", PromptTable)
    texts = prompts.select("prompt_id", "prompt", "solution")
    rows = changed.join(texts, on="prompt_id", how="left", maintain_order="left").head(SHOWN)
    build.run.table(rows.to_dicts(), "tables/changed_prompts.json")
    (build.payload / "comparison.md").write_text(render(summary, rows))
    build.console.line(
        f"{summary['label_changed']} of {summary['in_both']} prompts changed class; kept in both "
        f"{summary['kept_both']}, only before {summary['kept_only_a']}, only after {summary['kept_only_b']}"
    )
    return {name: value for name, value in summary.items() if isinstance(value, int)}


def compare_selections(a: pl.DataFrame, b: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, Any]]:
    """Every prompt of either SelectionTable with what it was in both, and counts.

    Returns:
        A table sorted by prompt_id: `prompt_id`, `source`, and `label`, `pass_rate`, `kept`, `reason` of each with the
        endings `_a` and `_b` (null where a selection does not have the prompt); and a summary:

        - `prompts`, `in_both`, `only_in_a`, `only_in_b`: how many prompts the tables have;
        - `kept_both`, `kept_only_a`, `kept_only_b`: how many were kept (a prompt that a table lacks is not kept in it);
        - `label_changed`: prompts of both with another label; `labels`: {label in a: {label in b: prompts of both}}.
    """
    import polars as pl

    from data.schemas import LABELS

    columns = ("label", "pass_rate", "kept", "reason")
    left, right = (
        table.select("prompt_id", "source", pl.col(columns).name.suffix(end))
        for table, end in ((a, "_a"), (b, "_b"))
    )
    both = left.join(right, on="prompt_id", how="full", coalesce=True, suffix="_b").with_columns(
        pl.coalesce("source", "source_b").alias("source")
    )
    table = both.drop("source_b").sort("prompt_id")
    shared = table.filter(pl.col("label_a").is_not_null() & pl.col("label_b").is_not_null())
    labels = {label: dict.fromkeys(LABELS, 0) for label in LABELS}
    for label_a, label_b, count in shared.group_by("label_a", "label_b").agg(pl.len()).iter_rows():
        labels[label_a][label_b] = count
    kept_a, kept_b = table["kept_a"].fill_null(False), table["kept_b"].fill_null(False)
    return table, {
        "prompts": table.height,
        "in_both": shared.height,
        "only_in_a": table["label_b"].null_count(),
        "only_in_b": table["label_a"].null_count(),
        "kept_both": int((kept_a & kept_b).sum()),
        "kept_only_a": int((kept_a & ~kept_b).sum()),
        "kept_only_b": int((~kept_a & kept_b).sum()),
        "label_changed": shared.filter(pl.col("label_a") != pl.col("label_b")).height,
        "labels": labels,
    }


def render(summary: Mapping[str, Any], changed: pl.DataFrame) -> str:
    """The Markdown of a comparison: classes before by classes after, and the first prompts that changed."""
    labels: Mapping[str, Mapping[str, int]] = summary["labels"]
    used = [
        label for label in labels if any(labels[label].values()) or any(row[label] for row in labels.values())
    ]
    lines = [
        f"{summary['label_changed']} of {summary['in_both']} prompts changed class. Kept in both: "
        f"{summary['kept_both']}, only before: {summary['kept_only_a']}, only after: {summary['kept_only_b']}.",
        "",
        "| before \\ after | " + " | ".join(used) + " |",
        "|---|" + "---|" * len(used),
        *(
            f"| {before} | " + " | ".join(str(labels[before][after]) for after in used) + " |"
            for before in used
        ),
    ]
    if len(changed):
        lines += ["", "| prompt | class before | class after |", "|---|---|---|"]
        lines += [
            f"| {row['prompt_id']} | {row['label_a']} | {row['label_b']} |"
            for row in changed.head(20).iter_rows(named=True)
        ]
    return "\n".join(lines) + "\n"


def publish_comparison(pipeline: Pipeline) -> None:
    """Show the newest comparison in Prefect and in the parent MLflow run; nothing without one."""
    outcome = pipeline.newest(COMPARE_SELECTIONS.name)
    if outcome is None or pipeline.parent is None:
        return
    for file in sorted(outcome.ref.payload.iterdir()):
        pipeline.parent.file(file, "comparison")
    markdown = (outcome.ref.payload / "comparison.md").read_text()
    console.publish_markdown("comparison", markdown, "Which prompts changed class")


COMPARE_SELECTIONS = Stage("compare_selections", StageName.REPORT, "report", 1, compare, seeded=False)
