"""The command line of a flow: `python -m flows.<name> --config ... --set ... --fresh ... --dry-run`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import yaml

from tasks.configs import StageName
from tasks.launch import JobCancelled
from tasks.recipes import RewardSpec
from tasks.services import running_services


def parser(program: str, description: str) -> argparse.ArgumentParser:
    """Arguments that every flow takes."""
    made = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    made.add_argument("--config", default="text2sql_racing", help="a name of flows/configs, or a YAML file")
    made.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one field, e.g. grpo.recipe.beta=0.04; may be repeated",
    )
    made.add_argument(
        "--seed", type=int, default=0, help="seed of data, initial weights and sampling (default 0)"
    )
    made.add_argument(
        "--fresh",
        nargs="+",
        choices=[str(name) for name in StageName],
        default=[],
        metavar="PART",
        help=f"rebuild these parts and what follows from them: {', '.join(StageName)}",
    )
    made.add_argument(
        "--dry-run", action="store_true", help="validate everything and print the plan; train nothing"
    )
    return made


def main(run: Callable[[], dict[str, Any]], show: Callable[[dict[str, Any]], None]) -> int:
    """Run a flow (or its plan), show its result, and print it as one JSON line, the last of stdout.

    Uses the Prefect server of `make up` when it runs, else Prefect's embedded one.
    """
    # Ends through SystemExit, so that Prefect's embedded server is stopped at exit instead of orphaned.
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    try:
        with ExitStack() as stack:
            _use_running_server(stack)
            result = run()
    except (ValueError, RuntimeError, OSError) as error:  # ours all are; Prefect has logged the traceback
        print(f"\n{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except JobCancelled as error:
        print(f"\n{error}", file=sys.stderr)
        return 130
    show(result)
    sys.stdout.flush()
    print(json.dumps(result), flush=True)
    return 0


def _use_running_server(stack: ExitStack) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    services = running_services()
    if services is None or PREFECT_API_URL.value():
        return
    os.environ.setdefault("FURLONG_PREFECT_UI_URL", services["prefect_ui_url"])
    os.environ.setdefault("FURLONG_MLFLOW_UI_URL", services["mlflow_ui_url"])
    stack.enter_context(temporary_settings({PREFECT_API_URL: services["prefect_api_url"]}))


def reward_spec(text: str) -> RewardSpec:
    """`text2sql_v1` or `text2sql_v1={timeout_s: 2}` (YAML) as a RewardSpec, for argparse."""
    name, _, params = text.partition("=")
    try:
        return RewardSpec(name=name, params=yaml.safe_load(params) or {})
    except (yaml.YAMLError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"'{text}' is neither a reward's name nor name={{param: value}} ({error})"
        ) from error


def show_plan(rows: Sequence[dict[str, Any]]) -> None:
    """Print a plan as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("stage", "action", "key", title="Plan", title_justify="left")
    for row in rows:
        table.add_row(row["stage"], row["action"], row["key"])
    Console().print(table)
