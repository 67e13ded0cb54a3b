"""The rules of selection: which measured prompts are kept, why the others are not, and how often GRPO sees each.

Pure: a measured table and a recipe in, the same table with `reason`, `kept` and `weight` out. Rules are applied in the
order of `data.schemas.REASONS`, and a prompt has the first reason that applies:

1. `suspect_gold`, `unscored`: nothing is known about the prompt. `truncated`: no completion was correct, and more than
   half were cut (if `drop_truncated`).
2. `below_band`, `above_band`: by the observed rate, or by the whole interval (`judge_by`). An open band at 0 or 1 drops
   what was never or always solved in either case: no interval excludes a rate that is nearly 0.
3. The prompts left are taken one by one in the order of their ids, and each is kept unless its near-duplicates
   (`near_duplicate`), its source (`source_quota`), its stratum of difficulty (`difficulty_quota`) or the selection
   (`target_size`) is full by then. An id is a hash of the prompt's content, so this order is as good as random, does
   not depend on the order of rows, and favours no difficulty.

Shares count of `quota_base`: the prompts that would be kept without any share. A share of 0.3 of 100 is at most 30
prompts; fractions are rounded up. Where one quota leaves the selection short, no other is raised to fill it, so the
final share of a source can be above its limit when the others have too few prompts; the stage says so.

Not covered: counts, rates and labels (`tasks.selection`).
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from tasks.recipes import SelectRecipe

if TYPE_CHECKING:
    import polars as pl

_SLACK = 1e-9  # 0.1 * 30 is a little above 3 in floating point and must not round up to 4


def apply_rules(measured: pl.DataFrame, recipe: SelectRecipe) -> pl.DataFrame:
    """`measured` with `reason`, `kept` and `weight`, sorted by prompt_id.

    Args:
        measured: one row a prompt, with `prompt_id`, `source`, `cluster`, `label`, `pass_rate`, and
            `pass_rate_estimate`, `pass_rate_low`, `pass_rate_high`.
    """
    import polars as pl

    judged = measured.sort("prompt_id").with_columns(_reason_alone(recipe).alias("reason"))
    entrants = judged.filter(pl.col("reason") == "kept")
    taken = entrants.select("prompt_id", pl.Series("verdict", _take(entrants, recipe), dtype=pl.String))
    return (
        judged.join(taken, on="prompt_id", how="left", maintain_order="left")
        .with_columns(pl.coalesce("verdict", "reason").alias("reason"))
        .with_columns((pl.col("reason") == "kept").alias("kept"))
        .with_columns(_weight(recipe).alias("weight"))
        .drop("verdict")
    )


def quota_base(measured: pl.DataFrame, recipe: SelectRecipe) -> int:
    """The number that shares count of: prompts in the band, at most `max_per_cluster` a cluster and `target_size`."""

    return _base(measured.filter(_reason_alone(recipe) == "kept"), recipe)


def quota(share: float, base: int) -> int:
    """Most prompts that a share of `base` allows."""
    return math.ceil(share * base - _SLACK)


def stratum(estimate: float, strata: int) -> int:
    """Which of equally wide strata of 0..1 an estimated pass rate is in; 0 is the hardest."""
    return min(int(estimate * strata), strata - 1)


def _reason_alone(recipe: SelectRecipe) -> pl.Expr:
    """The reason that a prompt has by itself, whatever the others are."""
    import polars as pl

    label = pl.col("label")
    by_rate = recipe.judge_by == "rate"
    most = pl.col("pass_rate" if by_rate else "pass_rate_high")
    least = pl.col("pass_rate" if by_rate else "pass_rate_low")
    below = most < recipe.low if recipe.low_closed else most <= recipe.low
    above = least > recipe.high if recipe.high_closed else least >= recipe.high
    if not by_rate and recipe.low == 0 and not recipe.low_closed:
        below = below | (pl.col("pass_rate") == 0)
    if not by_rate and recipe.high == 1 and not recipe.high_closed:
        above = above | (pl.col("pass_rate") == 1)
    hidden = ["suspect_gold", "unscored", *(["truncated"] if recipe.drop_truncated else [])]
    return (
        pl.when(label.is_in(hidden))
        .then(label)
        .when(below)
        .then(pl.lit("below_band"))
        .when(above)
        .then(pl.lit("above_band"))
        .otherwise(pl.lit("kept"))
    )


def _base(entrants: pl.DataFrame, recipe: SelectRecipe) -> int:
    count = entrants.height
    if recipe.max_per_cluster is not None:
        count = sum(min(size, recipe.max_per_cluster) for size in Counter(entrants["cluster"]).values())
    return count if recipe.target_size is None else min(count, recipe.target_size)


def _take(entrants: pl.DataFrame, recipe: SelectRecipe) -> list[str]:
    """The verdict on each entrant in turn: `kept`, or what was full."""
    base = _base(entrants, recipe)
    shares = recipe.difficulty_shares or []
    # A place in each: what is asked in turn, which group of it the prompt is in, and how many each group may hold.
    limits: list[tuple[str, list, dict | int]] = []
    if recipe.max_per_cluster is not None:
        limits.append(("near_duplicate", entrants["cluster"].to_list(), recipe.max_per_cluster))
    if recipe.max_source_share is not None:
        limits.append(("source_quota", entrants["source"].to_list(), quota(recipe.max_source_share, base)))
    if shares:
        places = [stratum(estimate, len(shares)) for estimate in entrants["pass_rate_estimate"]]
        limits.append(("difficulty_quota", places, {at: quota(s, base) for at, s in enumerate(shares)}))
    if recipe.target_size is not None:
        limits.append(("target_size", [0] * entrants.height, recipe.target_size))
    held: list[Counter] = [Counter() for _ in limits]
    verdicts = []
    for row in range(entrants.height):
        for (reason, groups, most), counts in zip(limits, held, strict=True):
            group = groups[row]
            if counts[group] >= (most if isinstance(most, int) else most[group]):
                verdicts.append(reason)
                break
        else:
            verdicts.append("kept")
            for (_, groups, _), counts in zip(limits, held, strict=True):
                counts[groups[row]] += 1
    return verdicts


def _weight(recipe: SelectRecipe) -> pl.Expr:
    """1 for kept prompts, or p (1 - p) of the estimate over its mean; 0 for dropped ones."""
    import polars as pl

    kept = pl.col("kept")
    if recipe.weighting == "none":
        return kept.cast(pl.Float64)
    estimate = pl.col("pass_rate_estimate")
    variance = estimate * (1 - estimate)
    return pl.when(kept).then(variance / variance.filter(kept).mean()).otherwise(0.0)
