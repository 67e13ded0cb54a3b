"""One HTML file to look at the prompts that curation could not use, with what the policy wrote for them.

Lists the prompts that are `suspect_gold`, `unsolved_so_far` or `truncated`. Prompts, golds and completions are
hostile text: each is escaped by jinja2, control and direction characters are made visible, and the page's policy
(CSP) runs and loads nothing but its own script and style, named by their hashes. The file needs no network.

Not covered: what the labels mean (`tasks.selection`), and any change to a prompt; the page only shows.
polars and jinja2 are imported inside functions, so that importing a flow stays light.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2
    import polars as pl

TEMPLATES = Path(__file__).resolve().parent / "templates"
LIMITS = {"prompt": 2000, "solution": 1500, "completion": 1000, "detail": 300}
"""Characters of a text on the page."""
MEANINGS = {
    "suspect_gold": "The gold does not score 1.0 against itself, so the prompt is set aside, whatever the policy "
    "writes. Correct the gold or remove the prompt.",
    "unsolved_so_far": "No completion was correct. Read a few: the prompt may be too hard for this policy, or its "
    "gold may be wrong.",
    "truncated": "Most failures are completions that were cut off at the length limit. Raise "
    "sample.recipe.max_completion_length, or ask for shorter answers.",
}
"""The labels on the page, in its order, and what to do about each."""

# Control characters, marks that are invisible or turn the direction of text, lone surrogates, non-characters.
# The joiners U+200C and U+200D stay: scripts and emoji need them.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffc\ufffe\uffff\ud800-\udfff\U000e0000-\U000e007f]"
)


@dataclass(frozen=True)
class Completion:
    """A distinct completion of a prompt and how often it was drawn; `tokens` is the fewest of the alike."""

    text: str
    times: int
    status: str
    detail: str
    tokens: int
    truncated: bool


@dataclass(frozen=True)
class PromptRow:
    """What the page says about one prompt.

    Attributes:
        note: why the gold is suspect, or empty.
        estimate: pass rate in [0, 1] with its interval `low`, `high`; all three are None without scored samples.
        completions: the most frequent ones; there are `distinct` in all, drawn `found` times together.
    """

    prompt_id: str
    label: str
    source: str
    prompt: str
    solution: str
    trials: int
    successes: int
    unscored: int
    truncated: int
    stop_rule: str | None
    estimate: float | None
    low: float | None
    high: float | None
    note: str = ""
    completions: tuple[Completion, ...] = ()
    distinct: int = 0
    found: int = 0


@dataclass(frozen=True)
class Page:
    """The HTML, and of each label how many prompts it shows of how many there are."""

    html: str
    shown: Mapping[str, int]
    total: Mapping[str, int]


def write_browse_page(
    prompts: pl.DataFrame,
    samples: Path,
    scores: Path,
    selection: pl.DataFrame,
    path: Path,
    *,
    title: str = "Prompts to look at",
    about: Mapping[str, str] | None = None,
    notes: Mapping[str, str] | None = None,
    max_prompts: int = 300,
    max_completions: int = 8,
    max_bytes: int = 4_000_000,
) -> Page:
    """Write the page to `path`; the same tables give the same bytes.

    Args:
        prompts: PromptTable. samples, scores: Parquet files of a SampleTable and a ScoreTable, of which only the
            prompts on the page are read. selection: SelectionTable.
        about: names and values shown at the top, such as the policy and the reward.
        notes: prompt_id -> why its gold is suspect.
        max_prompts: of each label; those with the most samples come first.
        max_completions: distinct completions of a prompt; the most frequent ones come first.
        max_bytes: about the size of the file; each label has an equal part of it.
    """
    import polars as pl

    listed = selection.filter(pl.col("label").is_in(list(MEANINGS)))
    total = Counter(listed["label"].to_list())
    chosen = (
        listed.sort(["trials", "truncated", "prompt_id"], descending=[True, True, False])
        .group_by("label", maintain_order=True)
        .head(max_prompts)
        .join(prompts.select("prompt_id", "prompt", "solution"), on="prompt_id", maintain_order="left")
    )
    drawn = read_completions(samples, scores, chosen.select("prompt_id"), max_completions)
    rows = [_row(values, drawn, notes or {}) for values in chosen.iter_rows(named=True)]
    page = render_page(rows, total, title=title, about=about or {}, max_bytes=max_bytes)
    path.write_text(page.html, encoding="utf-8", newline="\n")
    return page


def read_completions(
    samples: Path, scores: Path, wanted: pl.DataFrame, most: int
) -> dict[str, dict[str, Any]]:
    """The distinct completions of the prompts in `wanted` (column `prompt_id`).

    Returns:
        prompt_id -> {"distinct", "found", "completions": at most `most`, by falling frequency}. Prompts without
        completions are missing. A completion without a score row has the status `not scored`.
    """
    import polars as pl

    keys = ["prompt_id", "sample_index"]
    judged = pl.scan_parquet(scores).select(*keys, "status", "detail")
    found = (
        pl.scan_parquet(samples)
        .select(*keys, "completion", "completion_tokens", "truncated")
        .join(wanted.lazy(), on="prompt_id", how="semi")
        .join(judged.join(wanted.lazy(), on="prompt_id", how="semi"), on=keys, how="left")
        .with_columns(pl.col("status").fill_null("not scored"), pl.col("detail").fill_null(""))
        .sort("sample_index")
        .group_by("prompt_id", "completion", "status", "truncated")
        .agg(
            pl.len().alias("times"),
            pl.col("detail").first(),
            pl.col("completion_tokens").min().alias("tokens"),
            pl.col("sample_index").min(),
        )
        .sort(["times", "sample_index"], descending=[True, False])
        .group_by("prompt_id")
        .agg(
            pl.len().alias("distinct"),
            pl.col("times").sum().alias("found"),
            pl.struct(pl.col("completion").alias("text"), "times", "status", "detail", "tokens", "truncated")
            .head(most)
            .alias("completions"),
        )
        .collect(engine="streaming")
    )
    return {row["prompt_id"]: row for row in found.iter_rows(named=True)}


def render_page(
    rows: Sequence[PromptRow],
    total: Mapping[str, int],
    *,
    title: str = "Prompts to look at",
    about: Mapping[str, str] | None = None,
    max_bytes: int = 4_000_000,
) -> Page:
    """The page as text. `total` counts all prompts of a label, `rows` holds those that may be shown."""
    from markupsafe import Markup

    environment = _environment()
    style, script = ((TEMPLATES / f"browse.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    sections, shown = [], list[PromptRow]()
    for label, meaning in MEANINGS.items():
        cards = _cards(environment, [row for row in rows if row.label == label], max_bytes // len(MEANINGS))
        shown += [row for row, _ in cards]
        section = {"label": label, "meaning": meaning, "cards": [Markup(card) for _, card in cards]}
        sections.append({**section, "counted": _counted(len(cards), total.get(label, 0))})
    counts = Counter(row.label for row in shown)
    everything = sum(total.get(label, 0) for label in MEANINGS)
    html = environment.get_template("browse.html").render(
        title=visible(title),
        about={visible(name): visible(value) for name, value in (about or {}).items()},
        policy=_policy(style, script),
        style=Markup(style),
        script=Markup(script),
        labels=list(MEANINGS),
        nothing=everything == 0,
        summary=_summary(len(shown), everything),
        count=len(shown),
        sections=sections,
        sources=sorted(Counter(shorten(row.source, 200) for row in shown).items()),
    )
    return Page(
        html, {name: counts[name] for name in MEANINGS}, {name: total.get(name, 0) for name in MEANINGS}
    )


def visible(text: str) -> str:
    """`text` with characters that cannot be seen, or that turn what follows, written as [U+202E]."""
    return _UNSEEN.sub(lambda found: f"[U+{ord(found[0]):04X}]", text.replace("\r\n", "\n"))


def shorten(text: str, limit: int) -> str:
    """At most `limit` characters of `text`, made visible: its beginning and its end, with a note between.

    The end stays because a prompt often ends with the question, and a completion with its answer.
    """
    left_out = len(text) - limit
    if left_out <= 0:
        return visible(text)
    tail = limit // 3
    return visible(f"{text[: limit - tail]} [... {left_out:,} characters left out ...] {text[-tail:]}")


def _row(
    values: Mapping[str, Any], drawn: Mapping[str, Mapping[str, Any]], notes: Mapping[str, str]
) -> PromptRow:
    name = values["prompt_id"]
    found = drawn.get(name, {"completions": [], "distinct": 0, "found": 0})
    same = (
        "label",
        "source",
        "prompt",
        "solution",
        "trials",
        "successes",
        "unscored",
        "truncated",
        "stop_rule",
    )
    return PromptRow(
        prompt_id=name,
        **{column: values[column] for column in same},
        estimate=values["pass_rate_estimate"],
        low=values["pass_rate_low"],
        high=values["pass_rate_high"],
        note=notes.get(name, ""),
        completions=tuple(Completion(**completion) for completion in found["completions"]),
        distinct=found["distinct"],
        found=found["found"],
    )


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shown"] = shorten
    return environment


def _cards(
    environment: jinja2.Environment, rows: Sequence[PromptRow], max_bytes: int
) -> list[tuple[PromptRow, str]]:
    """The rows that fit into `max_bytes` of UTF-8, each with its HTML; the first one always does."""
    template = environment.get_template("browse_prompt.html")
    cards, size = list[tuple[PromptRow, str]](), 0
    for row in rows:
        card = template.render(
            row=row, headline=_headline(row.prompt), estimate=_estimate(row), limits=LIMITS
        )
        size += len(card.encode())
        if size > max_bytes and cards:
            break
        cards.append((row, card))
    return cards


def _headline(prompt: str) -> str:
    """The last line of a prompt: what comes before it is mostly a schema or an instruction that all share."""
    lines = prompt.strip().splitlines()
    return lines[-1].strip() if lines else ""


def _estimate(row: PromptRow) -> str:
    if row.estimate is None or row.low is None or row.high is None:
        return "not known"
    return f"{100 * row.estimate:.1f} % [{100 * row.low:.1f}, {100 * row.high:.1f}]"


def _counted(shown: int, total: int) -> str:
    if total == 0:
        return "no prompt"
    if shown == total:
        return f"{total:,} prompt{'s' if total > 1 else ''}, all on this page"
    return f"{shown:,} of {total:,} prompts on this page, those with the most samples; {total - shown:,} left out"


def _summary(shown: int, total: int) -> str:
    left_out = total - shown
    cut = f"; {left_out:,} are left out so that the file stays small" if left_out else ""
    return f"This page shows {shown:,} of the {total:,} prompts with these labels{cut}."


def _policy(style: str, script: str) -> str:
    """A Content-Security-Policy that allows these two texts and nothing else."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    return (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )
