"""The process that cells are forked from: it imports torch once, and every cell still has a process of its own.

Reads pickled jobs from its standard input and writes pickled outcomes to its standard output, one for one. The parent
kills the whole process group where a cell exceeds its time limit.
"""

import os
import pickle
import signal
import sys
from typing import Any, BinaryIO

from moe_compile.compatibility.cells import Outcome
from moe_compile.compatibility.measure import Job, run_cell
from moe_compile.errors import ModelFunctionError


def main() -> None:
    """Serves jobs until the parent closes the pipe."""
    jobs, outcomes = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a model prints must not end up among the outcomes
    while True:
        try:
            job = pickle.load(jobs)
        except EOFError:
            return
        pickle.dump(_in_a_fork(job), outcomes)
        outcomes.flush()


def _in_a_fork(job: Job) -> Any:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with os.fdopen(writing, "wb") as file:
            _run(job, file)
        os._exit(0)  # without the exit handlers of a process that has only been borrowed
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        written = file.read()
    _, status = os.waitpid(child, 0)
    if written:
        return pickle.loads(written)
    code = os.waitstatus_to_exitcode(status)
    died = f"the process died of {signal.Signals(-code).name}" if code < 0 else f"the process exited with {code}"
    return Outcome("error", died)


def _run(job: Job, file: BinaryIO) -> None:
    try:
        result: Any = run_cell(job)
    except ModelFunctionError as error:
        result = error
    pickle.dump(result, file)


if __name__ == "__main__":
    main()
