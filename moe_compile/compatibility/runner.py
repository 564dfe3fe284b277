"""Runs cells in processes of their own, with a time limit, and stops without leaving anything behind."""

import concurrent.futures
import contextlib
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from moe_compile.compatibility.cells import Key, Outcome
from moe_compile.compatibility.measure import Job
from moe_compile.errors import OptionError

# Each cell compiles alone; a pool of compile workers would outlive it.
_ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class _Worker:
    """A process that forks one cell at a time."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moe_compile.compatibility.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **_ENVIRONMENT},
            start_new_session=True,  # ctrl-C is for the parent, which then ends the whole group
        )

    def run(self, job: Job, timeout: float) -> Any:
        """The outcome of a cell, or the exception that stands for all of them; None if it took too long or died."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            pickle.dump(job, self.process.stdin)
            self.process.stdin.flush()
            ready, _, _ = select.select([self.process.stdout], [], [], timeout)
            return pickle.load(self.process.stdout) if ready else Outcome("timeout", f"more than {timeout:g} s")
        except (EOFError, BrokenPipeError):
            return None

    def end(self) -> None:
        """Ends the process and everything it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if stream is not None:
                    stream.close()


class Runner:
    """Runs cells.

    Args:
        device: "cpu" or "cuda".
        model: `module:function`, None for the small block.
        timeout: seconds that a cell may take, over and above the start of a worker.
        jobs: cells that run at the same time.

    Raises:
        OptionError: for a limit or a number of jobs that is not positive.
    """

    def __init__(self, device: str, model: str | None, timeout: float, jobs: int) -> None:
        if timeout <= 0 or jobs < 1:
            raise OptionError(f"timeout={timeout}, jobs={jobs}", "both must be positive", "Leave them out")
        self.device, self.model, self.timeout, self.jobs = device, model, timeout, jobs
        self._workers: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._alive: set[_Worker] = set()
        self._starting = threading.Lock()
        self._stopped = False

    def run(self, keys: Sequence[Key]) -> Iterator[tuple[Key, Outcome]]:
        """Outcomes as they come; closing the iterator, or an exception in it, ends all processes.

        Raises:
            ModelFunctionError: if the user's model function gives no model that runs.
        """
        with tempfile.TemporaryDirectory() as folder:
            jobs = [Job(key, self.device, self.model, os.path.join(folder, "timing")) for key in keys]
            pool = concurrent.futures.ThreadPoolExecutor(self.jobs)
            try:
                futures = {pool.submit(self._one, job): job.key for job in jobs}
                for future in concurrent.futures.as_completed(futures):
                    result = future.result()
                    if isinstance(result, Exception):
                        raise result
                    yield futures[future], result
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                with self._starting:  # no worker that starts meanwhile escapes
                    self._stopped = True
                for worker in tuple(self._alive):
                    worker.end()

    def _one(self, job: Job) -> Any:
        try:
            worker = self._workers.get_nowait()
        except queue.Empty:
            with self._starting:
                if self._stopped:
                    return Outcome("error", "the run was stopped")
                worker = _Worker()
                self._alive.add(worker)
        result = worker.run(job, self.timeout)
        if result is None or (isinstance(result, Outcome) and result.kind == "timeout"):
            self._alive.discard(worker)
            worker.end()
            return result or Outcome("error", "the process that ran it died")
        self._workers.put(worker)
        return result


@contextlib.contextmanager
def progress_bar(total: int, done: int, wanted: bool) -> Iterator[Callable[[Key, Outcome], None]]:
    """A bar on standard error that is told of every finished cell."""
    start, before = time.monotonic(), done
    if wanted and done:
        print(f"going on where an earlier run stopped: {done} of {total} cells are known", file=sys.stderr)
    terminal = sys.stderr.isatty()

    def show(key: Key, outcome: Outcome) -> None:
        nonlocal done
        done += 1
        if not wanted:
            return
        left = (time.monotonic() - start) / (done - before) * (total - done)
        bar = "#" * round(24 * done / total)
        line = f"[{bar:24}] {done}/{total}, {left:.0f} s left  {key}: {outcome.kind}"
        print(f"\r\033[K{line[:160]}" if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if wanted and terminal:
            print(file=sys.stderr)
