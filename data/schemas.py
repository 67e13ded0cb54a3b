"""The tables that stages hand to each other, each with its rules, and how they are read and written.

Prompts, samples, stops, scores, selection: one place. Every rule is checked when a table
is read and when it is written, so a bad row is found where it arose and named with its file.

Not covered: rules between tables (whether each sample has its prompt), which the stages check.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pandera.polars as pa
import polars as pl
from pandera.api.polars.types import PolarsData

SPLITS = ("train", "curation", "heldout")
GOLD_STATUSES = ("ok", "suspect_gold")
FINISH_REASONS = ("stop", "length")
STOP_RULES = ("fixed", "mixed", "cap", "budget")
LABELS = ("mixed", "solved", "unsolved_so_far", "truncated", "unscored", "suspect_gold")
REASONS = (
    "kept",
    "suspect_gold",
    "unscored",
    "truncated",
    "below_band",
    "above_band",
    "near_duplicate",
    "source_quota",
    "difficulty_quota",
    "target_size",
)

_SHOWN = 5  # rows named in an error: enough to see the pattern, few enough to read
_VALUE_LENGTH = 60  # characters of a value shown in an error


class TableError(ValueError):
    """A table broke its rules or could not be read; the message names file, rule and rows."""


def _filled(data: PolarsData) -> pl.LazyFrame:
    text = pl.col(data.key or "*")
    return data.lazyframe.select(text.str.strip_chars().str.len_chars() > 0)


def _finite(data: PolarsData) -> pl.LazyFrame:
    return data.lazyframe.select(pl.col(data.key or "*").is_finite())


_FILLED = pa.Check(_filled, name="text that is not blank")
_FINITE = pa.Check(_finite, name="a finite number")


def _rate(**kwargs: Any) -> pa.Column:
    return pa.Column(pl.Float64, [_FINITE, pa.Check.in_range(0, 1)], nullable=True, **kwargs)


def _text(*checks: pa.Check) -> pa.Column:
    return pa.Column(pl.String, [_FILLED, *checks])


def _count() -> pa.Column:
    return pa.Column(pl.Int64, pa.Check.ge(0))


def _successes_fit(data: PolarsData) -> pl.LazyFrame:
    scored = pl.col("trials") - pl.col("unscored")
    return data.lazyframe.select((pl.col("successes") <= scored) & (scored >= 0))


def _interval_holds_estimate(data: PolarsData) -> pl.LazyFrame:
    slack = 1e-9
    rate = pl.col("pass_rate_estimate")
    inside = (pl.col("pass_rate_low") <= rate + slack) & (rate <= pl.col("pass_rate_high") + slack)
    return data.lazyframe.select(inside.fill_null(True))


#: One row a prompt. `prompt` is the user message the model sees, `completion` the demonstration
#: (null where there is none), `solution` the gold, `db_id` the database of a SQL gold (null for other tasks),
#: `source` a template or a data set, `cluster` the prompt_id that stands for its near-duplicates (its own if alone).
PromptTable = pa.DataFrameSchema(
    {
        "prompt_id": pa.Column(pl.String, _FILLED, unique=True),
        "split": _text(pa.Check.isin(SPLITS)),
        "prompt": _text(),
        "completion": pa.Column(pl.String, _FILLED, nullable=True),
        "solution": _text(),
        "db_id": pa.Column(pl.String, _FILLED, nullable=True),
        "source": _text(),
        "gold_status": _text(pa.Check.isin(GOLD_STATUSES)),
        "cluster": _text(),
    },
    name="PromptTable",
    strict=True,
)

#: One row a completion; `sample_index` counts from 0 within a prompt and with `prompt_id` and the run's seed
#: gives `seed`. Empty completions are real. `truncated`: cut at the length limit.
SampleTable = pa.DataFrameSchema(
    {
        "prompt_id": _text(),
        "sample_index": _count(),
        "completion": pa.Column(pl.String),
        "completion_tokens": _count(),
        "finish_reason": _text(pa.Check.isin(FINISH_REASONS)),
        "truncated": pa.Column(pl.Boolean),
        "seed": _count(),
    },
    name="SampleTable",
    strict=True,
    unique=["prompt_id", "sample_index"],
)

#: One row a sampled prompt: how many completions it got, and why there are no more. `fixed`: the plan draws
#: the same number for all; `mixed`: decided; `cap` and `budget`: undecided when the cap or a total was reached.
StopTable = pa.DataFrameSchema(
    {
        "prompt_id": pa.Column(pl.String, _FILLED, unique=True),
        "trials": _count(),
        "stop_rule": _text(pa.Check.isin(STOP_RULES)),
    },
    name="StopTable",
    strict=True,
)

#: One row a scored completion; a null score means unscored. `term_<name>` columns are free.
ScoreTable = pa.DataFrameSchema(
    {
        "prompt_id": _text(),
        "sample_index": _count(),
        "score": pa.Column(pl.Float64, _FINITE, nullable=True),
        "status": _text(),
        "detail": pa.Column(pl.String),
        "truncated": pa.Column(pl.Boolean),
        "^term_.+$": pa.Column(pl.Float64, _FINITE, nullable=True, required=False, regex=True),
    },
    name="ScoreTable",
    strict=True,
    unique=["prompt_id", "sample_index"],
)

#: One row a prompt: what its completions showed, what it counts as, and why it is kept or dropped.
#: `trials` counts all samples, `unscored` those without a score, `truncated` those cut at the length limit.
#: `pass_rate` is successes / scored; after an early stop it is biased, and `pass_rate_estimate` with
#: `pass_rate_low` and `pass_rate_high` is not misled by the stop rule (`data.pass_rate`). `weight` is how often
#: GRPO sees a kept prompt, relative to the others; 0 when dropped.
SelectionTable = pa.DataFrameSchema(
    {
        "prompt_id": pa.Column(pl.String, _FILLED, unique=True),
        "source": _text(),
        "cluster": _text(),
        "trials": _count(),
        "unscored": _count(),
        "truncated": _count(),
        "successes": _count(),
        "stop_rule": pa.Column(pl.String, pa.Check.isin(STOP_RULES), nullable=True),
        "pass_rate": _rate(),
        "pass_rate_estimate": _rate(),
        "pass_rate_low": _rate(),
        "pass_rate_high": _rate(),
        "mean_score": pa.Column(pl.Float64, _FINITE, nullable=True),
        "label": _text(pa.Check.isin(LABELS)),
        "kept": pa.Column(pl.Boolean),
        "reason": _text(pa.Check.isin(REASONS)),
        "weight": pa.Column(pl.Float64, [_FINITE, pa.Check.ge(0)]),
    },
    checks=[
        pa.Check(_successes_fit, name="successes <= trials - unscored"),
        pa.Check(_interval_holds_estimate, name="pass_rate_low <= pass_rate_estimate <= pass_rate_high"),
    ],
    name="SelectionTable",
    strict=True,
)


def column_types(schema: pa.DataFrameSchema) -> dict[str, pl.DataType]:
    """Names and polars types of the fixed columns of a table, in order."""
    return {str(name): column.dtype.type for name, column in schema.columns.items() if not column.regex}


def check_table(frame: pl.DataFrame, schema: pa.DataFrameSchema, where: str) -> pl.DataFrame:
    """Return `frame` with its columns in order and its types settled, or raise TableError.

    Only conversions that lose nothing are made: a column without any value takes the type of the
    table, small integers become Int64, integers become floats where floats are due. `where` opens
    the message and says which file or function the table comes from.
    """
    frame = _settle(frame, schema)
    try:
        schema.validate(frame, lazy=True)
    except pa.errors.SchemaErrors as error:
        raise TableError(_explain(error.failure_cases, frame, schema, where)) from None
    return frame


def require_demonstrations(prompts: pl.DataFrame, where: str) -> None:
    """Raise TableError unless every prompt of the split train has a completion."""
    train = prompts.filter(pl.col("split") == "train")
    missing = train.filter(pl.col("completion").is_null())
    if train.is_empty() or not missing.is_empty():
        examples = ", ".join(missing["prompt_id"].head(_SHOWN).to_list())
        raise TableError(
            f"{where}: {missing.height} of {train.height} prompts of split 'train' have no "
            f"completion ({examples or 'the split is empty'}); supervised training expects one for "
            "each: add demonstrations, or drop the stage that trains on them"
        )


def read_table(path: str | os.PathLike[str], schema: pa.DataFrameSchema) -> pl.DataFrame:
    """Read a .parquet, .jsonl or .csv file and check it against `schema`.

    Raises TableError when the file is missing, unreadable, of another kind, or breaks a rule.
    """
    file = Path(path)
    if not file.is_file():
        raise TableError(f"{file}: found no file; expected a {schema.name}: build it first")
    kind = file.suffix.lower()
    types = column_types(schema)
    try:
        if kind == ".parquet":
            frame = pl.read_parquet(file)
        elif kind in (".jsonl", ".ndjson"):
            empty = file.stat().st_size == 0  # polars refuses to read what it wrote for no rows
            frame = pl.DataFrame(schema=types) if empty else pl.read_ndjson(file, infer_schema_length=None)
        elif kind == ".csv":
            # Types from the table, not from a guess: an id such as 007 has to stay text.
            frame = pl.read_csv(file, infer_schema_length=None, schema_overrides=types)
        else:
            raise TableError(_wrong_kind(file))
    except (pl.exceptions.PolarsError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TableError(
            f"{file}: could not be read as {kind[1:]} ({reason}); expected a {schema.name}: "
            "check that the file is whole and has the ending of its kind"
        ) from error
    return check_table(frame, schema, str(file))


def write_table(frame: pl.DataFrame, path: str | os.PathLike[str], schema: pa.DataFrameSchema) -> Path:
    """Check `frame` and write it to `path` (.parquet, .jsonl or .csv) in one step; return the path.

    The same rows in the same order give the same bytes, whatever the order of the columns and
    however the frame was put together. A reader never sees half a file.
    """
    file = Path(path)
    frame = check_table(frame, schema, str(file)).rechunk()
    kind = file.suffix.lower()
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        if kind == ".parquet":
            frame.write_parquet(partial, compression="zstd", row_group_size=100_000)
        elif kind in (".jsonl", ".ndjson"):
            frame.write_ndjson(partial)
        elif kind == ".csv":
            frame.write_csv(partial, quote_style="non_numeric")  # tells "" from a missing value
        else:
            raise TableError(_wrong_kind(file))
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
    return file


def _wrong_kind(file: Path) -> str:
    return f"{file}: found the ending {file.suffix!r}; expected .parquet, .jsonl or .csv"


def _settle(frame: pl.DataFrame, schema: pa.DataFrameSchema) -> pl.DataFrame:
    types = column_types(schema)
    extra = sorted(name for name in frame.columns if name not in types)
    casts = []
    for name in frame.columns:
        found, wanted = frame.schema[name], types.get(name, pl.Float64)
        free = name in types or name.startswith("term_")
        empty = frame[name].null_count() == frame.height
        widens = (found.is_integer() and wanted in (pl.Int64, pl.Float64)) or (
            found == pl.Float32 and wanted == pl.Float64
        )
        if free and found != wanted and (empty or widens):
            casts.append(pl.col(name).cast(wanted, strict=False))
    fixed = [name for name in types if name in frame.columns]
    return frame.with_columns(casts).select(*fixed, *extra)


def _explain(cases: pl.DataFrame, frame: pl.DataFrame, schema: pa.DataFrameSchema, where: str) -> str:
    """Turn pandera's list of failures into one message: a line for each broken rule."""
    lines = []
    for (column, rule), rows in cases.group_by("column", "check", maintain_order=True):
        numbers = rows["index"].drop_nulls().unique(maintain_order=True).to_list()
        if rule == "column_in_schema":
            lines.append(f"column {rows['failure_case'][0]!r} is not one of the table's")
        elif rule == "column_in_dataframe":
            lines.append(f"column {rows['failure_case'][0]!r} is missing")
        elif str(rule).startswith("dtype("):
            lines.append(f"column {column!r} is {rows['failure_case'][0]}; expected {rule}")
        elif numbers:
            lines.append(_rows_line(column, str(rule), numbers, frame, schema))
    expected = ", ".join(str(name) for name in schema.columns)
    return (
        f"{where}: breaks {len(lines)} rule(s) of {schema.name}:\n  "
        + "\n  ".join(lines)
        + f"\n  Expected columns: {expected}. Correct the rows named (row 1 is the first row of data)."
    )


def _rows_line(
    column: object, rule: str, numbers: list[int], frame: pl.DataFrame, schema: pa.DataFrameSchema
) -> str:
    """One broken rule: how many rows, which, and what stands there."""
    names = [str(column)] if column in frame.columns else [str(name) for name in schema.unique or ()]
    wording = {
        "not_nullable": "a value",
        "field_uniqueness": "values that occur once",
        "multiple_fields_uniqueness": f"pairs ({', '.join(names)}) that occur once",
    }.get(rule, rule)
    shown = []
    for number in numbers[:_SHOWN]:
        values = ", ".join(_short(frame[name][number]) for name in names)
        shown.append(f"row {number + 1}{': ' + values if values else ''}")
    subject = f"column {column!r}" if column in frame.columns else "the table"
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return (
        f"{subject}: expected {wording}; {len(numbers)} of {frame.height} rows differ "
        f"({'; '.join(shown)}{more})"
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _VALUE_LENGTH else text[: _VALUE_LENGTH - 3] + "..."
