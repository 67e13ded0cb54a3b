"""The page to look at: hostile text stays text, the limits are kept and said, and a browser can filter it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.schemas import (
    LABELS,
    STOP_RULES,
    PromptTable,
    SampleTable,
    ScoreTable,
    SelectionTable,
    check_table,
    write_table,
)
from tasks import plots
from tasks.browsing import (
    MEANINGS,
    Completion,
    Page,
    PromptRow,
    render_page,
    shorten,
    visible,
    write_browse_page,
)

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = shutil.which("chromium")
HOSTILE = (
    "</script><script>alert(1)</script>",
    "</pre></div></details><script>document.title = 'ran'</script>",
    "<img src=x onerror=alert(1)>",
    "<iframe srcdoc='<script>alert(1)</script>'></iframe><svg onload=alert(1)>",
    "</style><style>body{display:none}</style>",
    "<meta http-equiv=refresh content='0;url=https://example.org'><base href=https://example.org/>",
    "{{7*7}} {% raw %} {{ row.__class__ }} {# gone #}",
    '" onmouseover="alert(1)" x=\'',
    "&lt;script&gt; &amp; &#x3C;",
    "<!-- <![CDATA[ -->",
    "nul \x00 bell \x07 escape \x1b[31m",
    "turned \u202e txet \u2066 isolated \u200f",
    "\ud800 alone \udfff",
)


class Elements(HTMLParser):
    """All elements of a page with their attributes, and what each one holds as text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def row(number: int = 0, label: str = "unsolved_so_far", **changes: Any) -> PromptRow:
    completion = Completion("SELECT 1", 3, "incorrect", "1 row, gold has 2", 4, False)
    plain = PromptRow(
        prompt_id=f"p{number:04d}",
        label=label,
        source="wins",
        prompt="CREATE TABLE runs (n INTEGER);\n\nHow many wins?",
        solution="SELECT COUNT(*) FROM runs",
        trials=16,
        successes=0,
        unscored=0,
        truncated=0,
        stop_rule="cap",
        estimate=0.0556,
        low=0.0,
        high=0.1936,
        completions=(completion,),
        distinct=1,
        found=3,
    )
    return replace(plain, **changes)


def hostile_row(number: int, text: str) -> PromptRow:
    completion = Completion(text, 1, text, text, 1, True)
    return row(number, source=text, prompt=text, solution=text, note=text, completions=(completion,))


def page_of(rows: list[PromptRow], **options: Any) -> Page:
    return render_page(rows, Counter(one.label for one in rows), **options)


def tables(folder: Path, counts: dict[str, int], samples: int = 6) -> dict[str, Any]:
    """Tables of `counts` prompts of each label, `samples` completions each, of which three are the same."""
    ids = [(f"{label}-{number:04d}", label) for label, count in counts.items() for number in range(count)]
    prompts = [
        {"prompt_id": name, "split": "curation", "prompt": f"Question {name}?", "completion": None}
        | {"solution": f"gold of {name}", "db_id": None, "source": f"source {len(name) % 3}"}
        | {"gold_status": "suspect_gold" if label == "suspect_gold" else "ok", "cluster": name}
        for name, label in ids
    ]
    drawn = [(name, index) for name, _ in ids for index in range(samples)]
    keys = {"prompt_id": [name for name, _ in drawn], "sample_index": [index for _, index in drawn]}
    texts = ["the same" if index < 3 else f"other {index} of {name}" for name, index in drawn]
    cut = [index == 5 for _, index in drawn]
    lengths = {"completion_tokens": [index + 1 for _, index in drawn], "seed": keys["sample_index"]}
    ends = {"finish_reason": ["length" if one else "stop" for one in cut], "truncated": cut}
    judged = {
        "score": [0.0] * len(drawn),
        "status": ["incorrect"] * len(drawn),
        "detail": ["wrong rows"] * len(drawn),
    }
    write_table(
        pl.DataFrame({**keys, "completion": texts, **lengths, **ends}),
        folder / "samples.parquet",
        SampleTable,
    )
    write_table(pl.DataFrame({**keys, **judged, "truncated": cut}), folder / "scores.parquet", ScoreTable)
    selection = [
        {
            "prompt_id": name,
            "source": f"source {len(name) % 3}",
            "cluster": name,
            "trials": samples,
            "unscored": 0,
        }
        | {"truncated": 1, "successes": 0, "stop_rule": "cap", "pass_rate": 0.0, "pass_rate_estimate": 0.1}
        | {"pass_rate_low": 0.0, "pass_rate_high": 0.4, "mean_score": 0.0, "label": label, "kept": False}
        | {"reason": "below_band", "weight": 0.0}
        for name, label in ids
    ]
    return {
        "prompts": check_table(pl.DataFrame(prompts, infer_schema_length=None), PromptTable, "prompts"),
        "samples": folder / "samples.parquet",
        "scores": folder / "scores.parquet",
        "selection": check_table(pl.DataFrame(selection), SelectionTable, "selection"),
        "path": folder / "browse.html",
    }


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_makes_no_element_and_is_shown_as_it_is(text: str) -> None:
    plain, hostile = (
        page_of([row()], title="t"),
        page_of([hostile_row(0, text)], title=text, about={text: text}),
    )
    expected, found = Elements(plain.html), Elements(hostile.html)
    assert Counter(tag for tag, _ in found.found) - Counter(tag for tag, _ in expected.found) <= Counter(
        ["dl", "div", "dt", "dd", "p", "span"]  # `about`, the note and the mark of a cut completion
    )
    assert not [name for _, attributes in found.found for name in attributes if name.startswith("on")]
    assert "".join(found.texts).count(visible(text)) >= 8
    hostile.html.encode()  # lone surrogates are gone


@settings(deadline=None)
@given(st.text(st.characters(codec=None, exclude_categories=()), max_size=300))
def test_any_text_keeps_the_elements_of_the_page(text: str) -> None:
    tags = [tag for tag, _ in Elements(page_of([hostile_row(0, "plain")]).html).found]
    html = page_of([hostile_row(0, text or "plain")]).html
    assert [tag for tag, _ in Elements(html).found] == tags
    assert not re.search("[\x00\u202e\u2066\ud800-\udfff]", html)


def test_a_megabyte_of_text_is_cut_in_the_middle_and_says_so() -> None:
    text = "a" * 500_000 + "<b>" + "z" * 500_000
    html = page_of([hostile_row(0, text)]).html
    assert len(html) < 40_000
    assert shorten(text, 1000) in html and "999,003 characters left out" in html
    assert shorten(text, 1000).startswith("a" * 667) and shorten(text, 1000).endswith("z" * 333)
    assert shorten("x" * 1000, 1000) == "x" * 1000


def test_the_policy_names_the_script_and_style_of_the_page_and_nothing_else() -> None:
    html = page_of([row()]).html
    policies = [
        found.get("content")
        for tag, found in Elements(html).found
        if "Policy" in str(found.get("http-equiv"))
    ]
    assert len(policies) == 1
    assert str(policies[0]).startswith("default-src 'none'") and "unsafe" not in str(policies[0])
    assert html.index("Content-Security-Policy") < html.index("<style>") < html.index("<script>")
    assert not re.search(r"(?:src|href|action)=|https?://|url\(|@import", html)


def test_what_is_left_out_is_counted_and_said(tmp_path: Path) -> None:
    counts = {"suspect_gold": 2, "unsolved_so_far": 7, "truncated": 1, "mixed": 5, "solved": 4, "unscored": 1}
    page = write_browse_page(**tables(tmp_path, counts), max_prompts=3, max_completions=2)
    assert page.shown == {"suspect_gold": 2, "unsolved_so_far": 3, "truncated": 1}
    assert page.total == {"suspect_gold": 2, "unsolved_so_far": 7, "truncated": 1}
    html = (tmp_path / "browse.html").read_text()
    assert html == page.html
    assert "shows 6 of the 10 prompts with these labels; 4 are left out" in html
    assert "3 of 7 prompts on this page, those with the most samples; 4 left out" in html
    assert "4 distinct of 6; the 2 most frequent are shown" in html
    assert html.count("<b>3 times</b>") == 6 and html.count('class="completion"') == 12
    assert "mixed-0000" not in html and "gold of suspect_gold-0001" in html


def test_prompts_with_most_samples_come_first_and_the_page_is_the_same_again(tmp_path: Path) -> None:
    given_tables = tables(tmp_path, {"unsolved_so_far": 9})
    more = pl.when(pl.col("prompt_id") == "unsolved_so_far-0007").then(12).otherwise("trials")
    given_tables["selection"] = given_tables["selection"].with_columns(more.cast(pl.Int64).alias("trials"))
    page = write_browse_page(**given_tables, max_prompts=2)
    assert re.findall(r"<code>(.*?)</code>", page.html) == ["unsolved_so_far-0007", "unsolved_so_far-0000"]
    shuffled = {
        name: given_tables[name].sample(fraction=1, shuffle=True, seed=1) for name in ("prompts", "selection")
    }
    assert write_browse_page(**{**given_tables, **shuffled}, max_prompts=2).html == page.html


def test_the_file_stays_small_whatever_the_texts(tmp_path: Path) -> None:
    text = '"' * 2000  # five bytes a character once it is escaped
    long = [row(number, label, prompt=text, solution=text) for label in MEANINGS for number in range(300)]
    page = page_of(long, max_bytes=1_000_000)
    assert 800_000 < len(page.html.encode()) < 1_050_000
    assert len(set(page.shown.values())) <= 2 and 0 < sum(page.shown.values()) < 900
    assert f"{900 - sum(page.shown.values())} are left out" in page.html


def test_no_prompt_to_look_at_gives_a_page_that_says_so(tmp_path: Path) -> None:
    page = write_browse_page(**tables(tmp_path, {"mixed": 3}))
    assert "There is nothing to look at: no prompt is suspect_gold, unsolved_so_far, truncated." in page.html
    assert "<details" not in page.html and "<script" not in page.html
    assert sum(page.total.values()) == 0


def test_prompts_without_samples_or_scores_are_listed(tmp_path: Path) -> None:
    given_tables = tables(tmp_path, {"suspect_gold": 2})
    nothing = pl.read_parquet(given_tables["scores"]).head(0)
    write_table(nothing, given_tables["scores"], ScoreTable)
    samples = pl.read_parquet(given_tables["samples"]).filter(pl.col("prompt_id") == "suspect_gold-0000")
    write_table(samples, given_tables["samples"], SampleTable)
    rates = ("pass_rate", "pass_rate_estimate", "pass_rate_low", "pass_rate_high", "stop_rule")
    given_tables["selection"] = given_tables["selection"].with_columns(
        pl.lit(None).alias(name) for name in rates
    )
    page = write_browse_page(**given_tables, notes={"suspect_gold-0001": "no such table: <runs>"})
    assert page.shown["suspect_gold"] == 2
    assert page.html.count("not scored") == 4 and page.html.count("None was drawn.") == 1
    assert "pass rate not known" in page.html and "no such table: &lt;runs&gt;" in page.html


def test_the_templates_are_found_from_any_folder(tmp_path: Path) -> None:
    code = "from tasks.browsing import render_page; print(len(render_page([], {}).html))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (make setup)")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine (Debian: apt install chromium)")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield found
        found.close()


def opened(browser: Any, html: str, folder: Path) -> tuple[Any, list[str]]:
    """The page in a browser, and a list that fills with dialogs, requests, console messages and errors."""
    (folder / "page.html").write_text(html, encoding="utf-8")
    page, events = browser.new_page(viewport={"width": 1280, "height": 900}), list[str]()
    page.set_default_timeout(20_000)
    page.on("dialog", lambda dialog: (events.append(f"dialog {dialog.message}"), dialog.dismiss()))
    page.on("console", lambda message: events.append(f"console {message.text}"))
    page.on("pageerror", lambda error: events.append(f"error {error}"))
    page.goto((folder / "page.html").as_uri())
    page.on("request", lambda request: events.append(f"request {request.url}"))
    return page, events


def test_hostile_completions_run_nothing_in_a_browser(browser: Any, tmp_path: Path) -> None:
    rows = [hostile_row(number, text) for number, text in enumerate(HOSTILE)]
    page, events = opened(browser, page_of(rows, title="Look").html, tmp_path)
    page.click("#open")
    page.wait_for_timeout(300)
    assert page.title() == "Look" and events == []
    assert page.locator("script").count() == 1 and page.locator("img, iframe, base").count() == 0
    for number, text in enumerate(HOSTILE):
        assert page.locator("details").nth(number).locator(".completion pre").text_content() == visible(text)
    assert page.locator(".completion pre").first.is_visible()


def test_the_policy_stops_a_script_even_if_escaping_failed(browser: Any, tmp_path: Path) -> None:
    broken = "<img src=x onerror=\"document.title='ran'\"><script>document.title = 'ran'</script>"
    html = page_of([row()], title="Look").html.replace("How many wins?", broken)
    page, events = opened(browser, html, tmp_path)
    page.wait_for_timeout(300)
    assert page.locator("script").count() > 1  # the markup did get in
    assert page.title() == "Look" and all("Content Security Policy" in event for event in events)


def test_label_source_and_search_filter_what_is_shown(browser: Any, tmp_path: Path) -> None:
    rows = [row(0, "suspect_gold"), row(1), row(2, source='say "wins"'), row(3, prompt="Where is Elmfield?")]
    page, events = opened(browser, page_of(rows).html, tmp_path)

    def shown() -> list[str]:
        cards = page.locator("main details:visible code")
        return [cards.nth(place).text_content() for place in range(cards.count())]

    assert shown() == ["p0000", "p0001", "p0002", "p0003"]
    page.check("input[value=unsolved_so_far]")
    assert shown() == ["p0001", "p0002", "p0003"] and page.text_content("#count") == "3 of 4 shown"
    page.select_option("#source", 'say "wins"')
    assert shown() == ["p0002"]
    page.select_option("#source", "")
    page.fill("#search", "ELMFIELD")
    page.get_by_text("1 of 4 shown", exact=True).wait_for()
    assert shown() == ["p0003"]
    page.fill("#search", "no such word")
    page.get_by_text("0 of 4 shown", exact=True).wait_for()
    assert page.locator("#none").is_visible() and events == []


def test_the_page_fits_a_narrow_window(browser: Any, tmp_path: Path) -> None:
    page, _ = opened(browser, page_of([row(prompt="x" * 900, source="y" * 300)]).html, tmp_path)
    page.click("#open")
    for width in (1280, 380):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_page_shows_the_colours_of_the_plots() -> None:
    style = (ROOT / "tasks/templates/browse.css").read_text()
    for label in MEANINGS:
        assert re.search(rf"\.{label} {{[^}}]*{plots.LABEL_COLORS[label]}", style), label


def test_every_class_and_stop_rule_has_a_colour_of_its_own() -> None:
    for names, colors in ((LABELS, plots.LABEL_COLORS), (STOP_RULES, plots.STOP_COLORS)):
        assert set(names) == set(colors) and len(set(colors.values())) == len(names)


def test_the_plots_are_drawn_and_count_what_they_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    save = plots._save
    monkeypatch.setattr(plots, "_save", lambda figure, path: (figures.append(figure), save(figure, path)))
    sources = [
        (f"source {number:02d}", label, number + 1) for number in range(30) for label in ("mixed", "solved")
    ]
    plots.classes_by_source(sources, tmp_path / "classes.png")
    plots.samples_per_prompt([(16, "cap", 2), (4, "mixed", 5), (16, "mixed", 1)], tmp_path / "samples.png")
    bins = {"rates": [0, 0.05, 0.95, 1], "before": [4, 3, 2, 1], "after": [0, 3, 2, 0]}
    plots.pass_rates({**bins, "labels": ["0", "0-0.1", "0.9-1", "1"]}, tmp_path / "rates.png")
    plots.classes_by_source([], tmp_path / "empty.png")
    assert all(
        (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        for name in ("classes", "samples", "rates")
    )

    classes, samples, rates = (figure.axes[0] for figure in figures[:3])
    names = [tick.get_text() for tick in classes.get_yticklabels()]
    assert names[:2] == ["source 29", "source 28"] and names[-1] == "other (10)" and len(names) == 21
    assert sum(bar.get_width() for bar in classes.patches) == 2 * sum(range(1, 31))
    assert "(68 in all)" in samples.get_title(loc="left")
    assert [tick.get_text() for tick in samples.get_xticklabels()] == ["4", "16"]
    assert [tick.get_text() for tick in rates.get_xticklabels()] == ["0", "0-0.1", "0.9-1", "1"]
    assert sorted(bar.get_height() for bar in rates.patches) == [0, 0, 1, 2, 2, 3, 3, 4]
