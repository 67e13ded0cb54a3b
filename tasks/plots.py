"""The plots of curation and of the report, as PNG files.

matplotlib's figures are used directly, so no display is touched. Numbers come in counted; nothing is computed here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

DPI = 110
LIGHT, STRONG, WARN = "#b9c6d3", "#2b6cb0", "#c05621"
MOST_TICKS = 13
# Okabe and Ito's colours, which colour-blind readers tell apart; grey for what says nothing.
LABEL_COLORS = {
    "mixed": "#0072b2",
    "solved": "#56b4e9",
    "unsolved_so_far": "#e69f00",
    "truncated": "#cc79a7",
    "unscored": "#999999",
    "suspect_gold": "#d55e00",
}
STOP_COLORS = {"mixed": "#0072b2", "cap": "#e69f00", "budget": "#d55e00", "fixed": "#999999"}


def pass_rates(
    histogram: Mapping[str, Sequence[Any]],
    path: Path,
    title: str = "Pass rate of the warm start on the curation prompts",
) -> None:
    """Prompts by pass rate, all and kept.

    `histogram` holds `rates`, `before` and `after` (n each), and perhaps `labels`, the names of the n places. Places
    are drawn at equal distances: bins need not be equally wide.
    """
    figure, axes = _axes(title)
    names = histogram.get("labels") or [f"{rate:.3g}" for rate in histogram["rates"]]
    places = range(len(names))
    for name, color, label in (("before", LIGHT, "all prompts"), ("after", STRONG, "kept")):
        axes.bar(
            places, histogram[name], width=0.86, color=color, label=f"{label} ({sum(histogram[name]):,})"
        )
    every = math.ceil(len(names) / MOST_TICKS)
    small = 8 if len(names) > 6 and max(map(len, names)) > 5 else None
    axes.set_xticks(places[::every], names[::every], fontsize=small)
    axes.set_xlabel("pass rate")
    axes.set_ylabel("prompts")
    _legend_below(axes)
    _save(figure, path)


def classes_by_source(counts: Iterable[tuple[str, str, int]], path: Path, most: int = 20) -> None:
    """Prompts of each source by label: (source, label, prompts) triples; the largest `most` sources, then the rest."""
    table: dict[str, Counter[str]] = {}
    for source, label, count in counts:
        table.setdefault(source, Counter())[label] += count
    ranked = sorted(table, key=lambda source: (-table[source].total(), source))
    bars = [(_short(source), table[source]) for source in ranked[:most]]
    if rest := ranked[most:]:
        bars.append((f"other ({len(rest)})", sum((table[source] for source in rest), Counter())))
    figure, axes = _axes("Prompts by source and class", height=1.5 + 0.26 * max(len(bars), 3))
    _stack(axes.barh, [count for _, count in bars], LABEL_COLORS)
    axes.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=9)
    axes.set_ylim(len(bars) - 0.4, -0.6)  # the largest on top
    axes.set_xlabel("prompts")
    _legend_below(axes)
    _save(figure, path)


def samples_per_prompt(counts: Iterable[tuple[int, str, int]], path: Path) -> None:
    """Prompts by the completions that they got and by why there are no more: (trials, stop_rule, prompts) triples."""
    table: dict[int, Counter[str]] = {}
    for trials, rule, count in counts:
        table.setdefault(trials, Counter())[rule] += count
    drawn = sum(trials * row.total() for trials, row in table.items())
    figure, axes = _axes(f"Completions drawn per prompt ({drawn:,} in all)")
    trials = sorted(table)
    _stack(axes.bar, [table[number] for number in trials], STOP_COLORS)
    every = math.ceil(len(trials) / MOST_TICKS)
    axes.set_xticks(range(len(trials))[::every], [str(number) for number in trials[::every]])
    axes.set_xlabel("completions of a prompt")
    axes.set_ylabel("prompts")
    _legend_below(axes)
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


def _axes(title: str, height: float = 3.6) -> tuple[Figure, Any]:
    figure = Figure(figsize=(7, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _stack(draw: Any, rows: Sequence[Counter[str]], colors: Mapping[str, str]) -> None:
    """One bar a row, its parts in the order of `colors`; parts that no row has are left out, also of the legend."""
    ends = [0] * len(rows)
    start = "left" if draw.__name__ == "barh" else "bottom"
    for name, color in colors.items():
        parts = [row[name] for row in rows]
        if any(parts):
            label = f"{name.replace('_', ' ')} ({sum(parts):,})"
            draw(range(len(rows)), parts, 0.8, color=color, label=label, **{start: ends})
        ends = [end + part for end, part in zip(ends, parts, strict=True)]


def _legend_below(axes: Any) -> None:
    """A legend under the plot, where it hides no bar."""
    if axes.get_legend_handles_labels()[0]:
        axes.figure.legend(frameon=False, fontsize=9, ncols=3, loc="outside lower center")


def _short(text: str) -> str:
    return text if len(text) <= 32 else f"{text[:20]}...{text[-9:]}"


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
