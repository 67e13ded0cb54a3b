"""The report's plots, as PNG files. matplotlib's figures are used directly, so no display is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

DPI = 110
LIGHT, STRONG, WARN = "#b9c6d3", "#2b6cb0", "#c05621"


def pass_rates(histogram: Mapping[str, Sequence[float]], path: Path) -> None:
    """Prompts by pass rate, all and kept; `histogram` holds `rates`, `before` and `after` (n each)."""
    figure, axes = _axes("Pass rate of the warm start on the curation prompts")
    rates = histogram["rates"]
    for name, color, label in (("before", LIGHT, "all prompts"), ("after", STRONG, "kept")):
        axes.bar(rates, histogram[name], width=0.9 / max(len(rates) - 1, 1), color=color, label=label)
    axes.set_xlabel("pass rate")
    axes.set_ylabel("prompts")
    axes.legend(frameon=False)
    _save(figure, path)


def training(history: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Mean reward and zero-variance share by optimizer step; `history` is {"step", "metrics"} lines."""
    figure, axes = _axes("GRPO on the kept prompts")
    for name, color in (("reward", STRONG), ("zero_variance_share", WARN)):
        points = [(line["step"], line["metrics"][name]) for line in history if name in line["metrics"]]
        if points:
            axes.plot(*zip(*points, strict=True), color=color, label=name.replace("_", " "))
    axes.set_xlabel("optimizer step")
    axes.set_ylim(0, 1)
    axes.legend(frameon=False)
    _save(figure, path)


def benchmarks(results: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Greedy accuracy and mean@k of each model, with their intervals."""
    figure, axes = _axes("Held-out prompts")
    names = list(results)
    for offset, metric, color in ((-0.2, "greedy", STRONG), (0.2, "mean@k", LIGHT)):
        heights = [results[name][metric] for name in names]
        errors = [
            [height - results[name][f"{metric}_low"] for name, height in zip(names, heights, strict=True)],
            [results[name][f"{metric}_high"] - height for name, height in zip(names, heights, strict=True)],
        ]
        label = metric.replace("k", str(int(results[names[0]]["k"]))) if metric == "mean@k" else metric
        places = [position + offset for position in range(len(names))]
        bars = axes.bar(places, heights, 0.38, yerr=errors, color=color, label=label, capsize=3)
        axes.bar_label(bars, [f"{height:.0%}" for height in heights], padding=3)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylim(0, 1.1)
    axes.legend(frameon=False, loc="upper left")
    _save(figure, path)


def _axes(title: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
