"""Draws the prompt table of the racing task: three splits, the first with demonstrations.

Demonstrations are of mixed quality on purpose: a policy taught by them knows the right query and the
wrong one, and GRPO has something true to fix. In most templates one demonstration in five is wrong;
in a third of them the wrong variant is the commoner one, so that the most likely completion of the
warm start is wrong although the right one is within reach of sampling.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from data.content import fenced, normalise_prompt, prompt_id, word_ngrams, words_of
from data.racing.combinations import Combination, QuestionSource
from data.racing.templates import Template, all_templates, flipped
from data.schemas import PromptTable, check_table, column_types

UNSHARED_WORDS = 13  # no question to train on shares so many consecutive words with a heldout one
SPREAD = 0.5  # a template's share of mistakes lies in mistake_share * (1 - SPREAD, 1 + SPREAD)


@dataclass(frozen=True)
class _Mix:
    """How the demonstrations of one template are mixed."""

    share: float
    flipped: bool


def make_racing(
    database_path: str | Path,
    *,
    seed: int,
    train: int = 5000,
    curation: int = 600,
    heldout: int = 300,
    mistake_share: float = 0.2,
    flipped_share: float = 0.62,
    flipped_templates: float = 1 / 3,
) -> pl.DataFrame:
    """Return the prompt table of the racing task for a database made by `build_database`.

    `train`, `curation` and `heldout` are numbers of prompts; each split has all templates, in equal
    numbers to within one. A template's share of wrong train demonstrations is drawn evenly between
    half and one and a half times `mistake_share`; in `flipped_templates` (a share of the templates,
    the same ones for every seed) it is `flipped_share`, all with the same mistake. Curation and
    heldout have no completion. `db_id` is the stem of the database's file name, `source` the name
    of the template. Splits share no prompt and no gold SQL, and no question of train or curation has 13
    consecutive words of a heldout one: templates alone would make one in sixty do so.

    Raises ValueError when a share lies outside 0..1 or a template has too few combinations.
    """
    shares = {
        "mistake_share": mistake_share,
        "flipped_share": flipped_share,
        "flipped_templates": flipped_templates,
    }
    for name, value in shares.items():
        if not 0 <= value <= 1:
            raise ValueError(f"make_racing: {name} is {value}; expected a share from 0 to 1")
    templates = all_templates()
    turned = set(flipped(templates, flipped_templates))
    sizes = {"heldout": heldout, "curation": curation, "train": train}
    quotas = _quotas(templates, sizes, seed)
    db_id = Path(database_path).stem
    rows: list[dict[str, Any]] = []
    taken_sql: set[str] = set()
    taken_prompts: set[str] = set()
    with closing(QuestionSource(database_path)) as source:
        for item in templates:
            rng = random.Random(f"demonstrations {item.name} {seed}")
            spread = rng.uniform(1 - SPREAD, 1 + SPREAD)
            is_flipped = item.name in turned
            mix = _Mix(flipped_share if is_flipped else min(1.0, mistake_share * spread), is_flipped)
            quota = quotas[item.name]
            pool = _take(source, item, seed, sum(quota.values()), taken_sql)
            drawn = _ask(pool, quota, rng, taken_prompts)
            rows += _demonstrate(drawn, mix, rng, db_id)
    order = {"train": 0, "curation": 1, "heldout": 2}
    random.Random(f"order {seed}").shuffle(rows)
    rows.sort(key=lambda row: order[row["split"]])
    return check_table(pl.DataFrame(rows, schema=column_types(PromptTable)), PromptTable, "make_racing")


def flipped_template_names(flipped_templates: float = 1 / 3) -> tuple[str, ...]:
    """Names of the templates in which the mistake is the commoner demonstration."""
    return flipped(all_templates(), flipped_templates)


def describe_mistakes(prompts: pl.DataFrame) -> pl.DataFrame:
    """Count the wrong train demonstrations that were really drawn, one row a template.

    Columns: source, kind, train (demonstrations), mistaken, share (mistaken / train), flipped
    (whether the mistakes outnumber the gold). Works on any table that `make_racing` returned.
    """
    kinds = {item.name: item.kind for item in all_templates()}
    gold = pl.lit("```sql\n") + pl.col("solution") + pl.lit("\n```")
    return (
        prompts.filter((pl.col("split") == "train") & pl.col("completion").is_not_null())
        .group_by("source", maintain_order=True)
        .agg(pl.len().alias("train"), (pl.col("completion") != gold).sum().alias("mistaken"))
        .with_columns(
            pl.col("source").replace_strict(kinds, default="", return_dtype=pl.String).alias("kind"),
            (pl.col("mistaken") / pl.col("train")).round(4).alias("share"),
        )
        .with_columns((pl.col("share") > 0.5).alias("flipped"))
        .select("source", "kind", "train", "mistaken", "share", "flipped")
        .sort("source")
    )


def _quotas(templates: Sequence[Template], sizes: dict[str, int], seed: int) -> dict[str, dict[str, int]]:
    """Prompts per template and split; the templates that get one more are drawn by `seed`."""
    quotas: dict[str, dict[str, int]] = {item.name: {} for item in templates}
    for split, size in sizes.items():
        names = list(quotas)
        random.Random(f"quota {split} {seed}").shuffle(names)
        base, extra = divmod(size, len(names))
        for index, name in enumerate(names):
            quotas[name][split] = base + (index < extra)
    return quotas


def _take(
    source: QuestionSource, item: Template, seed: int, wanted: int, taken_sql: set[str]
) -> list[Combination]:
    """Up to `wanted` combinations whose gold no other template has used."""
    pool: list[Combination] = []
    for combination in source.combinations(item, seed):
        if combination.gold not in taken_sql:
            taken_sql.add(combination.gold)
            pool.append(combination)
            if len(pool) == wanted:
                break
    return pool


def _ask(
    pool: list[Combination], quota: dict[str, int], rng: random.Random, taken_prompts: set[str]
) -> list[tuple[str, str, Combination]]:
    """Deal the combinations to the splits: triples (split, prompt, combination).

    Heldout and curation get a combination for each prompt. Train gets the rest, and asks again in
    other words where there are fewer combinations than prompts. What shares `UNSHARED_WORDS` words
    with a heldout question is asked in other words, or not at all.
    """
    name = pool[0].template.name if pool else "a template"
    drawn: list[tuple[str, str, Combination]] = []
    held_grams: set[str] = set()

    def add(split: str, combination: Combination, phrasing: int) -> bool:
        prompt = combination.prompt(phrasing)
        folded = normalise_prompt(prompt)
        grams = set(word_ngrams(words_of(prompt), UNSHARED_WORDS))
        if folded in taken_prompts or (split != "heldout" and grams & held_grams):
            return False
        if split == "heldout":
            held_grams.update(grams)
        taken_prompts.add(folded)
        drawn.append((split, prompt, combination))
        return True

    waiting = iter(pool)
    for split in ("heldout", "curation"):
        missing = quota[split]
        while missing and (combination := next(waiting, None)):
            start = rng.randrange(len(combination.template.phrasings))
            turns = range(start, start + len(combination.template.phrasings))
            missing -= any(add(split, combination, turn) for turn in turns)
    for_train = list(waiting)
    starts = [rng.randrange(len(item.template.phrasings)) for item in for_train]
    asked = 0
    for turn in range(len(for_train[0].template.phrasings) if for_train else 0):
        for combination, start in zip(for_train, starts, strict=True):
            if asked < quota["train"]:
                asked += add("train", combination, start + turn)
    if len(drawn) < sum(quota.values()):
        raise ValueError(
            f"make_racing: {name} gives {len(drawn)} prompts from {len(pool)} combinations, "
            f"expected {sum(quota.values())}; ask for fewer prompts"
        )
    return drawn


def _demonstrate(
    drawn: list[tuple[str, str, Combination]], mix: _Mix, rng: random.Random, db_id: str
) -> list[dict[str, Any]]:
    """Rows of the prompt table; an exact number of the train rows, chosen by `rng`, is wrong."""
    train = [index for index, (split, _, _) in enumerate(drawn) if split == "train"]
    wrong = set(rng.sample(train, round(mix.share * len(train))))
    rows = []
    for index, (split, prompt, combination) in enumerate(drawn):
        sql = combination.gold
        if index in wrong:
            choices = combination.mistakes[:1] if mix.flipped else combination.mistakes
            sql = rng.choice(choices)[1]
        identity = prompt_id(db_id, prompt, combination.gold)
        rows.append(
            {
                "prompt_id": identity,
                "split": split,
                "prompt": prompt,
                "completion": fenced(sql) if split == "train" else None,
                "solution": combination.gold,
                "db_id": db_id,
                "source": combination.template.name,
                "gold_status": "ok",
                "cluster": identity,
            }
        )
    return rows
