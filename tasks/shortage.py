"""What is said when a selection holds too few prompts: what was found, what is needed, and what would help.

Asked before any accelerator starts. Not covered: whether the prompts that are left are good ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data.artifacts import ArtifactRef
from tasks.configs import ConfigError
from tasks.recipes import GrpoRecipe

_HELP = {
    "suspect_gold": "Most golds fail their own check: correct the prompts labelled suspect_gold in selection.parquet, or "
    "leave that source out.",
    "unscored": "Most have no scored completion: read the column `detail` of scores.parquet for the reason; where nothing "
    "was sampled, raise sample.recipe.max_total_samples or max_total_tokens.",
    "truncated": "Most completions were cut at the length limit: raise sample.recipe.max_completion_length (and "
    "grpo.recipe.max_completion_length with it).",
    "unsolved": "Most were never solved: train the warm start longer (sft.recipe.steps), add easier prompts, or raise "
    "sample.recipe.max_samples so that rare successes are seen.",
    "solved": "Most were always solved: add harder prompts, or raise sample.recipe.max_samples so that rare failures are "
    "seen.",
    "below_band": "Most are solved, but too rarely for the band: lower select.recipe.low, or train the warm start longer "
    "(sft.recipe.steps).",
    "above_band": "Most fail at times, but too rarely for the band: raise select.recipe.high, or add harder prompts.",
    "near_duplicate": "Most are near-duplicates of kept prompts: add prompts that differ, or raise "
    "select.recipe.max_per_cluster.",
    "source_quota": "Most belong to sources that are full: add prompts of other sources, or raise "
    "select.recipe.max_source_share.",
    "difficulty_quota": "Most are of a difficulty that is full: change select.recipe.difficulty_shares, or add prompts of "
    "the others.",
    "target_size": "Most were dropped by the target: raise select.recipe.target_size.",
    "nothing": "There are too few curation prompts: add some.",
}


_LIMITS = ("target_size", "difficulty_quota", "source_quota", "near_duplicate")
"""Reasons that a field of the recipe lifts at once, cheapest first; the prompts they hold back are in the band."""


def require_batch(kept: ArtifactRef, recipe: GrpoRecipe) -> None:
    """Check that the selection `kept` has prompts for one GRPO batch.

    Raises:
        ConfigError: it has fewer than batch_size / num_generations; the message says what would help.
    """
    import polars as pl

    if kept.is_pending:  # a plan only promises it
        return
    needed = recipe.batch_size // recipe.num_generations
    found = pl.scan_parquet(kept.payload / "prompts.parquet").select(pl.len()).collect().item()
    if found >= needed:
        return
    facts = kept.manifest().facts
    needs = (
        f"one batch needs {needed} (grpo.recipe.batch_size {recipe.batch_size} / num_generations "
        f"{recipe.num_generations})"
    )
    text = shortage("train_grpo", {"kept": found, "total": found, **facts}, needs, needed)
    raise ConfigError(f"{text} A smaller grpo.recipe.batch_size needs fewer.")


def shortage(stage: str, facts: Mapping[str, Any], needs: str, needed: int = 1) -> str:
    """The message, from the facts of `select_prompts`; see `_cause` for which help it gives."""
    from data.schemas import LABELS, REASONS

    reasons = {name: facts.get(f"dropped/{name}", 0) for name in REASONS if name != "kept"}
    labels = {name: facts.get(name, 0) for name in LABELS}
    text = f"{stage}: {facts['kept']} of {facts['total']} curation prompts were kept; {needs}."
    if any(labels.values()):
        text += f" They count as: {_spell(labels)}."
    if any(reasons.values()):
        text += f" Dropped: {_spell(reasons)}."
    return f"{text} {_HELP[_cause(reasons, labels, needed - facts['kept'], facts['total'] < needed)]}"


def _cause(reasons: Mapping[str, int], labels: Mapping[str, int], missing: int, too_few: bool) -> str:
    """What to mend: a limit that alone holds back enough prompts, or else what most of them died of."""
    limits = [name for name in _LIMITS if reasons[name] >= missing]
    if limits:
        return limits[0]
    cause = max(reasons, key=lambda name: reasons[name])
    if too_few or not reasons[cause]:
        return "nothing"
    never = labels["unsolved_so_far"] + labels["truncated"] - reasons["truncated"]
    if cause == "below_band" and 2 * never >= reasons[cause]:
        return "unsolved"
    if cause == "above_band" and 2 * labels["solved"] >= reasons[cause]:
        return "solved"
    return cause


def _spell(counts: Mapping[str, int]) -> str:
    most = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{count} {name}" for name, count in most if count)
