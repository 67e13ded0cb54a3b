"""Runs the shards of a job on Ray, each as a Prefect task of the flow run that it belongs to (`prefect-ray`).

A shard is an ordinary job with its own channel folder, so a cluster has to share this checkout, its environment
and `$FURLONG_HOME`. When the flow is cancelled, fails or is killed, the shards and their process trees end too.
Not covered: a cluster's set-up and its authentication (Ray reads `RAY_AUTH_MODE`). Linux only, as `supervise`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.console import Console, flow_run_is_cancelled
from tasks.jobs import protocol
from tasks.jobs.protocol import Request
from tasks.launch import CANCEL_POLL_SECONDS, GRACE_SECONDS, JobCancelled, JobFailed, Listener, run_job
from tasks.recipes import SamplingRuntime

if TYPE_CHECKING:
    from prefect_ray.task_runners import RayTaskRunner

POLL_SECONDS = 0.5
OBJECT_STORE_BYTES = 100 * 1024 * 1024
"""Nothing but requests and facts passes through it; Ray's own choice is a third of the memory."""


def run_shards(program: str, requests: Sequence[Request], runtime: SamplingRuntime) -> list[dict[str, Any]]:
    """Run one job a request, as many at once as Ray has room for.

    Args:
        program: of `tasks.jobs`.
        requests: one a shard, each with a channel of its own.
        runtime: `ray_address`, and the environment and time-out of every shard.

    Returns:
        The facts of each shard's result, in order.

    Raises:
        JobFailed: a shard failed, with its message; the others are ended by then.
        JobCancelled: the flow run was cancelled; all are ended by then.
    """
    console = Console(program)
    with _ray(runtime.ray_address or "local", len(requests)) as runner:
        futures = _submit(runner, program, requests, runtime)
        try:
            return _follow(futures, requests, console)
        except BaseException:
            _end(futures)
            raise


def run_shard(program: str, request: dict[str, Any], runtime: dict[str, Any]) -> dict[str, Any]:
    """One shard, in a Ray worker. What it says stays in its channel, where the parent looks."""
    silent = Listener(lambda lines: None, lambda done, total, text: None, lambda line: None, lambda: False)
    settings = SamplingRuntime.model_validate(runtime)
    return run_job(
        program,
        Request(**request),
        silent,
        environment=settings.environment,
        timeout_s=settings.timeout_s,
    )


@contextlib.contextmanager
def _ray(address: str, shards: int) -> Iterator[RayTaskRunner[Any]]:
    """A started task runner; `local` starts Ray for it on this machine alone, and ends it afterwards."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from prefect_ray.task_runners import RayTaskRunner

    folder = Path(tempfile.mkdtemp(prefix="furlong-ray-"))  # a short path: Ray's sockets lie below it
    arguments: dict[str, Any] = {"log_to_driver": False, "runtime_env": {"env_vars": _environment()}}
    if address == "local":
        arguments |= {
            "num_cpus": max(shards, os.cpu_count() or 1),
            "object_store_memory": OBJECT_STORE_BYTES,
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
            "_temp_dir": str(folder),
        }
    # RayTaskRunner takes its own address `auto` for "start one if there is none"; as an argument Ray refuses then.
    runner = RayTaskRunner(None if address == "auto" else address, init_kwargs=arguments)
    if address == "auto":
        runner.init_kwargs["address"] = "auto"
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with runner:
            with contextlib.suppress(ValueError):  # Ray puts its own handler in Prefect's place
                signal.signal(signal.SIGTERM, handler)
            yield runner
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _environment() -> dict[str, str]:
    """Of Ray's workers."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        url = str(client.api_url)
    return {
        "PREFECT_API_URL": url,  # the flow run's server, also when it is an embedded one
        # An ending worker would kill its child, our supervisor, which then could not end the job's tree.
        "RAY_kill_child_processes_on_worker_exit": "false",
        "RAY_worker_niceness": "0",  # a shard is no less urgent than a job without Ray
    }


def _submit(
    runner: RayTaskRunner[Any], program: str, requests: Sequence[Request], runtime: SamplingRuntime
) -> list[Any]:
    from prefect import task
    from prefect.cache_policies import NO_CACHE
    from prefect_ray.context import remote_options

    futures = []
    with remote_options(**_resources(program, requests[0], runtime), max_retries=0):
        for shard, request in enumerate(requests):
            one = task(name=f"{program}-{shard}", cache_policy=NO_CACHE, persist_result=False)(run_shard)
            parameters = {
                "program": program,
                "request": asdict(request),
                "runtime": runtime.model_dump(mode="json"),
            }
            futures.append(runner.submit(one, parameters))
    return futures


def _resources(program: str, request: Request, runtime: SamplingRuntime) -> dict[str, float]:
    """Of one shard: a CPU, and the GPUs that its engine spreads over where the cluster has any."""
    import ray

    if request.options.get("engine") == "server" or not ray.cluster_resources().get("GPU"):
        return {"num_cpus": 1}
    arguments = runtime.engine_arguments
    gpus = arguments.get("tensor_parallel_size", 1) * arguments.get("pipeline_parallel_size", 1)
    return {"num_cpus": 1, "num_gpus": gpus}


def _follow(futures: Sequence[Any], requests: Sequence[Request], console: Console) -> list[dict[str, Any]]:
    """Show the progress of all together, until each has its facts or one has failed."""
    import ray

    pending = {future.wrapped_future: shard for shard, future in enumerate(futures)}
    facts: dict[int, dict[str, Any]] = {}
    shown, asked = "", time.monotonic()
    while pending:
        done, _ = ray.wait(list(pending), timeout=POLL_SECONDS)
        shown = _show_progress(requests, console, shown)
        for reference in done:
            shard = pending.pop(reference)
            facts[shard] = _facts(futures[shard], shard, len(futures))
        if time.monotonic() - asked > CANCEL_POLL_SECONDS:
            asked = time.monotonic()
            if flow_run_is_cancelled():
                raise JobCancelled(f"{console.label}: the flow run was cancelled")
    return [facts[shard] for shard in range(len(futures))]


def _facts(future: Any, shard: int, shards: int) -> dict[str, Any]:
    from prefect.exceptions import PrefectException
    from ray.exceptions import RayError

    try:
        return future.result()
    except (JobFailed, PrefectException, RayError) as error:
        raise JobFailed(f"shard {shard} of {shards}: {error}") from error


def _show_progress(requests: Sequence[Request], console: Console, shown: str) -> str:
    done = total = 0
    for request in requests:
        with contextlib.suppress(FileNotFoundError):
            progress = json.loads((Path(request.channel) / protocol.PROGRESS).read_text())
            done, total = done + progress["done"], total + progress["total"]
    text = f"{done}/{total}"
    if total and text != shown:
        console.progress(done, total, f"in {len(requests)} shards")
    return text


def _end(futures: Sequence[Any]) -> None:
    """End what still runs, in order: a cancelled worker is interrupted, and ends its job's tree."""
    import ray

    references = [future.wrapped_future for future in futures]
    for reference in references:
        ray.cancel(reference)
    _, stubborn = ray.wait(references, num_returns=len(references), timeout=GRACE_SECONDS + 5)
    for reference in stubborn:
        ray.cancel(reference, force=True)
