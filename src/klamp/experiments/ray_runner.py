"""Jobs on a Ray cluster. The experiment's folder must be on a file system that every node sees.

Ray is started on this machine where no cluster is named by ``RAY_ADDRESS``.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from klamp.errors import ConfigError, ExperimentError
from klamp.experiments.progress import Progress
from klamp.experiments.worker import Job


def need_ray() -> None:
    """Say that Ray is missing before anything is made."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("--engine ray needs Ray. pip install 'klamp[ray]', or leave --engine out.")


def run_ray(jobs: Sequence[Job], *, at_once: int = 0, progress: Progress) -> None:
    """Every job as a Ray task of one core, and of a share of a GPU where the cluster has some."""
    if not jobs:
        return
    need_ray()
    import ray

    own = not ray.is_initialized()
    if own:
        ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
    try:
        _run(ray, list(jobs), at_once, progress)
    finally:
        if own:
            ray.shutdown()


def _run(ray: Any, waiting: list[Job], at_once: int, progress: Progress) -> None:
    gpus = 0.25 if ray.cluster_resources().get("GPU") else 0
    # A run is resumed by running the command again, not retried by Ray behind its back.
    task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}})(
        _work
    )
    room = at_once or int(ray.cluster_resources().get("CPU", 1))
    running: dict[Any, Job] = {}
    while waiting or running:
        while waiting and len(running) < room:
            job = waiting.pop(0)
            running[task.remote(_absolute(job))] = job
        done, _ = ray.wait(list(running))
        for handle in done:
            job = running.pop(handle)
            try:
                failure = ray.get(handle)
            except Exception as error:
                failure = str(error).strip().splitlines()[-1][:500]
            if failure:
                for other in running:
                    ray.cancel(other)
                raise ExperimentError(f"run {job.label!r} failed: {failure}. Run the same command again to go on.")
            progress.step(0, job.label, job.steps, "")


def _work(job: dict[str, Any]) -> str | None:
    """The job, in a Ray worker; what went wrong, as text that any process can read."""
    import torch

    from klamp.errors import KlampError
    from klamp.experiments.worker import run_job

    torch.set_num_threads(1)
    try:
        run_job(Job(**job), lambda step, text: None)
    except KlampError as error:
        return str(error)
    return None


def _absolute(job: Job) -> dict[str, Any]:
    """The job with its paths made absolute: Ray's workers start elsewhere."""
    found = job.to_dict()
    found["reference"] = str(Path(job.reference).resolve())
    found["config"] = {**job.config, "run": os.fspath(Path(job.config["run"]).resolve())}
    for name in ("heldout",):
        found[name] = None if found[name] is None else str(Path(found[name]).resolve())
    return found
