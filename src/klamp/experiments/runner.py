"""Run jobs in processes of their own, as many at a time as there are cores; or on a Ray cluster.

A process serves one job after another, so that imports are paid once. Each has a session of its own: Ctrl-C reaches the
parent alone, which asks every process to stop after its step; the runs keep a checkpoint and go on next time.

With Ray the experiment's folder must be on a file system that every node sees. Ray is started on this machine where no
cluster is named by ``RAY_ADDRESS``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from klamp.errors import ConfigError, ExperimentError, require_number
from klamp.experiments.job_process import Job
from klamp.progress import Progress

PATIENCE = 60.0
"""Seconds that processes are given to finish their step when asked to stop."""


class Stopped(BaseException):
    """Ctrl-C or SIGTERM."""


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_asked(asked: int) -> None:
    """Refuse a number of processes that is none."""
    require_number("--jobs", asked, at_least=0, way_out="It is the number of runs at a time; 0 for one a core.")


def processes(asked: int, jobs: int) -> int:
    """How many to run at a time: what was asked, otherwise a core each; on GPUs at most four to one."""
    import torch

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    usual = min(cores(), 4 * devices) if devices else cores()
    return max(1, min(asked or usual, jobs))


def run_local(jobs: Sequence[Job], *, kind: str = "run", at_once: int, logs: Path, progress: Progress) -> None:
    """Every job, ``at_once`` at a time; :class:`ExperimentError` when one fails, once the others have been stopped."""
    if not jobs:
        return
    logs.mkdir(parents=True, exist_ok=True)
    events: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
    workers: list[Worker] = []
    waiting = list(jobs)
    with _signals():
        try:
            for n in range(min(at_once, len(jobs))):
                workers.append(Worker(n, logs / f"worker-{n}.log", events))
                workers[n].start(kind, waiting.pop(0))
            _serve(workers, waiting, kind, events, progress)
        except Stopped:
            _stop(workers)
            raise ExperimentError("stopped. Run the same command again to go on from here.") from None
        except BaseException:
            _stop(workers)
            raise
        for worker in workers:
            worker.close()


def _serve(
    workers: list[Worker],
    waiting: list[Job],
    kind: str,
    events: queue.SimpleQueue[tuple[int, dict[str, Any]]],
    progress: Progress,
) -> None:
    while any(w.job for w in workers):
        number, event = events.get()
        worker = workers[number]
        if worker.job is None:
            continue
        if event["event"] == "step":
            progress.step(number, worker.job.label, event["step"], event["text"])
        elif event["event"] == "done":
            progress.done(number, worker.job.label)
            worker.job = None
            if waiting:
                worker.start(kind, waiting.pop(0))
        else:
            reason = event.get("error") or worker.post_mortem()
            raise ExperimentError(f"run {worker.job.label!r} failed: {reason} (log: {worker.log})")


def _stop(workers: list[Worker]) -> None:
    """Ask every process once, wait, then insist."""
    for worker in workers:
        worker.ask()
    for worker in workers:
        with contextlib.suppress(Stopped):
            worker.wait(PATIENCE)
        worker.kill()


class Worker:
    """A child process and the job it is at."""

    def __init__(self, number: int, log: Path, events: queue.SimpleQueue[tuple[int, dict[str, Any]]]) -> None:
        self.number, self.log, self.job = number, log, None  # type: int, Path, Job | None
        self.events = events
        with log.open("wb") as handle:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "klamp.experiments.job_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=handle,
                env=_environment(number),
                start_new_session=True,
                text=True,
                encoding="utf-8",
            )
        threading.Thread(target=self._read, daemon=True).start()

    def start(self, kind: str, job: Job) -> None:
        """Hand over a job."""
        self.job = job
        assert self.process.stdin is not None
        # A process that is gone is heard of through its stdout.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"kind": kind, "job": job.to_dict()}) + "\n")
            self.process.stdin.flush()

    def ask(self) -> None:
        """Ask it to stop after its step."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float) -> None:
        """Wait for its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def close(self) -> None:
        """No more jobs."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.wait(PATIENCE)
        self.kill()

    def kill(self) -> None:
        """End it if it is still there, and close the pipes."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def post_mortem(self) -> str:
        """Why a process ended without saying so."""
        self.wait(5)
        code = self.process.returncode
        how = f"its process was ended by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"{how}{'; last line: ' + lines[-1][:300] if lines else ''}. Run the same command again to go on."

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            for line in self.process.stdout:
                if line.startswith("{"):  # anything else was printed while the process was still importing
                    self.events.put((self.number, json.loads(line)))
        self.events.put((self.number, {"event": "gone"}))


def _environment(number: int) -> dict[str, str]:
    """One thread each, waiting quietly; GPUs dealt out in turn."""
    import torch

    own = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
        own["CUDA_VISIBLE_DEVICES"] = str(number % devices)
    return {**os.environ, **own}


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """SIGINT and SIGTERM become :class:`Stopped`, in the main thread; elsewhere they stay as they are."""

    def hear(number: int, frame: FrameType | None) -> None:
        raise Stopped

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, hear) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    from klamp.experiments.job_process import run_job

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
