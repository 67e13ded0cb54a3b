"""Stage `check_staleness`: do the labels of curated prompts still hold for another checkpoint?

A small stratified part of the prompts is sampled again, by the same plan, and the share of labels that flipped is
estimated for all of them. Labels flip by chance too: the same policy, sampled anew, gives a prompt of rate 0.1 another
label in a third of all cases. How many flips chance alone would bring is reported beside what was found.

It is stale when more flipped than the limit, and more than chance explains: the interval lies above what chance alone
would flip. `truncated` and `unsolved_so_far` count as one label here, for neither has a correct completion.

Not covered: which rate a prompt has now; curate again for that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from data.artifacts import ArtifactRef
from data.label_flips import label_chances, stratified_interval
from data.pass_rate import Beta
from tasks import console
from tasks.configs import StageName
from tasks.pipeline import Pipeline
from tasks.recipes import StalenessRecipe
from tasks.rewarding import open_reward, reward_arguments
from tasks.sampling import draw_completions, engine_request, samples_draw
from tasks.scoring import score_table
from tasks.selection import measure
from tasks.stage import Build, Stage

if TYPE_CHECKING:
    import polars as pl

LABELS = ("mixed", "solved", "unsolved_so_far", "truncated")
"""Labels that a policy can change; a suspect gold stays one."""


def check_staleness(build: Build) -> Mapping[str, Any]:
    """Payload: `staleness.json`, `flips.parquet` (a row a prompt sampled again), and the samples and scores behind it."""
    import polars as pl

    from data.schemas import (
        PromptTable,
        SampleTable,
        ScoreTable,
        SelectionTable,
        StopTable,
        read_table,
        write_table,
    )

    recipe: StalenessRecipe = build.recipe
    assert recipe.sampling is not None, "the flow fills it in"
    prompts = read_table(build.inputs["prompts"].payload / "prompts.parquet", PromptTable)
    selection = read_table(build.inputs["selection"].payload / "selection.parquet", SelectionTable)
    chosen = choose(selection, recipe.prompts, build.seed)
    facts = draw_completions(
        build,
        recipe.sampling.engine,
        "curation",
        [samples_draw(recipe.sampling)],
        reward=reward_arguments(build.reward, build.inputs["prompts"]),
        prompt_ids=chosen["prompt_id"].to_list(),
        seed=_own_seed(build.seed),
    )
    samples = read_table(build.payload / "samples.parquet", SampleTable)
    scores = score_table(samples, prompts, open_reward(build.reward, build.inputs["prompts"]))
    write_table(scores, build.payload / "scores.parquet", ScoreTable)
    again = prompts.join(chosen.select("prompt_id"), on="prompt_id", how="semi")
    stops = read_table(build.payload / "stops.parquet", StopTable)
    found = measure(again, scores, stops, recipe.sampling.first_samples).table
    flips = chosen.join(found.select("prompt_id", pl.col("label").alias("label_now")), on="prompt_id")
    flips = only_measured(flips, build.experiment.score.recipe.max_unscored_share)
    flips = flipped(flips)
    result = summarise(flips, selection, recipe, _prior(build))
    flips.write_parquet(build.payload / "flips.parquet")
    (build.payload / "staleness.json").write_text(json.dumps(result, indent=2) + "\n")
    build.run.table(flips.to_dicts(), "tables/flips.json")
    build.console.line(spell(result))
    return {**facts, **{name: value for name, value in result.items() if not isinstance(value, dict)}}


def flipped(flips: pl.DataFrame) -> pl.DataFrame:
    """With `flipped`: whether `label_now` is another than `label`; `truncated` and `unsolved_so_far` are one."""
    import polars as pl

    before, now = (pl.col(name).replace("truncated", "unsolved_so_far") for name in ("label", "label_now"))
    return flips.with_columns((before != now).alias("flipped"))


def only_measured(flips: pl.DataFrame, most: float) -> pl.DataFrame:
    """Without the prompts that got no label this time: that says nothing about the policy.

    Raises:
        RuntimeError: these are a larger share than `most`.
    """
    measured = flips.filter(flips["label_now"].is_in(LABELS))
    lost = 1 - len(measured) / len(flips)
    if lost > most or measured.is_empty():
        raise RuntimeError(
            f"check_staleness: {lost:.0%} of {len(flips)} prompts could not be measured again; score.recipe.max_unscored_share "
            f"allows {most:.0%}. See the status and detail of scores.parquet, or the budget in staleness.recipe.sampling"
        )
    return measured


def _own_seed(seed: int) -> int:
    """Another seed than the curation's: with its own, an unchanged policy would draw the very same completions."""
    return int.from_bytes(hashlib.sha256(f"staleness {seed}".encode()).digest()[:4], "big") & 0x7FFFFFFF


def choose(selection: pl.DataFrame, count: int, seed: int) -> pl.DataFrame:
    """`count` prompts (at most all), dealt to the labels in proportion to their size, at least one of each.

    Returns:
        Rows of the selection, sorted by prompt_id; which ones follows from the seed and their ids alone.
    """
    import polars as pl

    usable = selection.filter(pl.col("label").is_in(LABELS))
    if usable.is_empty():
        raise ValueError(
            "check_staleness: the selection has no prompt with a pass rate; nothing can be compared"
        )
    order = pl.Series("order", [_order(seed, prompt_id) for prompt_id in usable["prompt_id"]])
    shuffled = usable.with_columns(order).sort("order").drop("order")
    sizes = dict(shuffled.group_by("label").len().sort("label").iter_rows())
    parts = [
        shuffled.filter(pl.col("label") == label).head(part) for label, part in deal(sizes, count).items()
    ]
    return pl.concat(parts).sort("prompt_id")


def deal(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """`count` places (at most all, at least one each) dealt to groups in proportion to their sizes; largest remainders
    first."""
    total = sum(sizes.values())
    count = max(min(count, total), len(sizes))
    exact = {name: count * size / total for name, size in sizes.items()}
    dealt = {name: max(1, int(share)) for name, share in exact.items()}
    while (missing := count - sum(dealt.values())) != 0:
        step = 1 if missing > 0 else -1
        open_groups = [name for name in sizes if (dealt[name] < sizes[name] if step > 0 else dealt[name] > 1)]
        dealt[max(open_groups, key=lambda name: step * (exact[name] - dealt[name]))] += step
    return dealt


def _order(seed: int, prompt_id: str) -> str:
    return hashlib.sha256(f"staleness {seed} {prompt_id}".encode()).hexdigest()


def summarise(
    flips: pl.DataFrame, selection: pl.DataFrame, recipe: StalenessRecipe, prior: Beta
) -> dict[str, Any]:
    """Share of flipped labels over all prompts with its interval, what chance alone would flip, and by label.

    Args:
        flips: rows of the selection with `label_now` and `flipped`.
        prior: of the pass rates that the selection was estimated with.
    """
    assert recipe.sampling is not None
    labels = sorted(flips["label"].unique())
    sizes = {label: int((selection["label"] == label).sum()) for label in labels}
    counts = {label: flips.filter(flips["label"] == label) for label in labels}
    found = {label: int(rows["flipped"].sum()) for label, rows in counts.items()}
    share, low, high = stratified_interval(
        [found[label] for label in labels],
        [len(counts[label]) for label in labels],
        [sizes[label] for label in labels],
        recipe.confidence,
    )
    chance = {
        label: _chance_of_a_flip(rows, prior, recipe.sampling.max_samples) for label, rows in counts.items()
    }
    total = sum(sizes.values())
    expected = sum(chance[label] * sizes[label] for label in labels) / total
    return {
        "flipped_share": share,
        "flipped_low": low,
        "flipped_high": high,
        "expected_by_chance": expected,
        "confidence": recipe.confidence,
        "limit": recipe.max_flipped_share,
        "stale": share > recipe.max_flipped_share and low > expected,
        "sampled": len(flips),
        "of": total,
        "by_label": {
            label: {
                "sampled": len(counts[label]),
                "flipped": found[label],
                "expected_by_chance": chance[label],
            }
            for label in labels
        },
    }


def _chance_of_a_flip(rows: pl.DataFrame, prior: Beta, cap: int) -> float:
    """Mean chance that the same policy, sampled anew, gives these prompts another label."""
    scored = rows["trials"] - rows["unscored"]
    solved, unsolved = label_chances(prior, rows["successes"], scored, cap)
    same = {
        "solved": solved,
        "unsolved_so_far": unsolved,
        "truncated": unsolved,
        "mixed": 1 - solved - unsolved,
    }
    return float(sum(1 - same[label][place] for place, label in enumerate(rows["label"])) / len(rows))


def _prior(build: Build) -> Beta:
    facts = build.inputs["selection"].manifest().facts
    return Beta(facts["prior_a"], facts["prior_b"])


def spell(result: Mapping[str, Any]) -> str:
    """One line for people."""
    verdict = "stale" if result["stale"] else "still good"
    return (
        f"{result['flipped_share']:.0%} of the labels flipped ({result['confidence']:.0%} interval "
        f"{result['flipped_low']:.0%} to {result['flipped_high']:.0%}; chance alone: {result['expected_by_chance']:.0%}), "
        f"limit {result['limit']:.0%}: the curation is {verdict}"
    )


def _request(recipe: StalenessRecipe) -> dict[str, Any]:
    engine = recipe.sampling.engine if recipe.sampling else "transformers"
    return {**recipe.model_dump(mode="json", exclude={"sampling": {"policy"}}), **engine_request(engine)}


CHECK_STALENESS = Stage(
    "check_staleness", StageName.STALENESS, "report", 2, check_staleness, rewarded=True, request=_request
)


def is_stale(check: ArtifactRef) -> bool:
    return json.loads((check.payload / "staleness.json").read_text())["stale"]


def staleness_summary(pipeline: Pipeline) -> dict[str, Any]:
    """The newest check's result; also logged to the parent MLflow run and shown in Prefect."""
    check = pipeline.newest(CHECK_STALENESS.name)
    assert check is not None, "the flow checks before it asks"
    result = json.loads((check.ref.payload / "staleness.json").read_text())
    if pipeline.parent is not None:
        pipeline.parent.metrics({f"staleness/{name}": value for name, value in result.items()})
    console.publish_markdown("staleness", spell(result) + "\n", "Whether the curated labels still hold")
    return result
