"""A process that a command starts and controls with lines of text; it answers in JSON lines."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TextIO

from tensorstow.base.errors import StowError
from tensorstow.base.signals import SignalsDeferred

OPTIMIZER = "opt.step"
"""Name of the part of a step that updates."""


class Process:
    """A new interpreter that runs one module; created by ``started``."""

    def __init__(
        self, name: str, child: subprocess.Popen[bytes], lines: IO[str], output: IO[bytes]
    ) -> None:
        self.name = name
        self._child = child
        self._orders: Any = child.stdin  # a pipe, as ``started`` requests it
        self._lines = lines
        self._output = output

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield its messages until it ends; raise StowError with its last output if it failed."""
        for line in self._lines:
            message: dict[str, Any] = json.loads(line)
            yield message
        status = self._child.wait()
        if status != 0:
            raise StowError(_last_words(self.name, status, self._output))

    def tell(self, line: str) -> None:
        """Write a line to its standard input; if it has ended, ``messages`` raises."""
        with suppress(BrokenPipeError):
            self._orders.write(f"{line}\n".encode())
            self._orders.flush()

    def tell_no_more(self) -> None:
        """Close its standard input."""
        with suppress(BrokenPipeError):
            self._orders.close()

    def kill(self) -> None:
        """Send SIGKILL, as ``kill -9`` does, unless it has ended, and wait for its end."""
        self._child.send_signal(signal.SIGKILL)
        self._child.wait()


@contextmanager
def started(
    name: str, module: str, arguments: Sequence[str], folder: Path | None = None
) -> Iterator[Process]:
    """Run ``module`` in a new process, which is killed when the block ends or raises.

    ``module`` takes ``--descriptor``, to which it writes its messages, and ``arguments``. ``name``
    is the process's in errors; ``folder`` is where ``module`` is, unless it is installed.
    """
    reader, writer = os.pipe()
    # -P: modules in the working directory must not be imported instead.
    command = [sys.executable, "-P", "-m", module, *arguments]
    path = [*([] if folder is None else [str(folder)]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    process = None
    with tempfile.TemporaryFile() as output, os.fdopen(reader, encoding="utf-8") as lines:
        try:
            with SignalsDeferred():  # Popen, interrupted, forgets its process
                try:
                    child = subprocess.Popen(  # noqa: S603  # this interpreter
                        [*command, "--descriptor", str(writer)],
                        env=environment,
                        pass_fds=[writer],
                        stdin=subprocess.PIPE,
                        stdout=output,
                        stderr=output,
                    )
                finally:
                    os.close(writer)  # the child's copy is the last: its end is that of the lines
                process = Process(name, child, lines, output)
            yield process
        finally:
            if process is not None:
                process.kill()
                process.tell_no_more()


def teller(pipe: TextIO) -> Callable[[int, str], None]:
    """Return the function by which the process reports the step and the part that begins."""
    return lambda step, part: say(pipe, json.dumps({"step": step, "part": part}))


def say(pipe: TextIO, line: str) -> None:
    """Write ``line`` and flush."""
    pipe.write(line + "\n")
    pipe.flush()


def kill_in_an_update(
    process: Process, first_step: int, announce: Callable[[int, str], None]
) -> None:
    """Kill a training process, which reports parts of steps with ``teller``, in its first update.

    ``first_step`` is the first step to kill in, counted from 0; an earlier one must be committed.
    Raises StowError if the process ends by itself.
    """
    for report in process.messages():
        announce(report["step"], report["part"])
        if report["step"] >= first_step and report["part"] == OPTIMIZER:
            process.kill()
            return
    message = (
        f"{process.name} ended by itself before it could be killed. This is a bug: please report"
        " it."
    )
    raise StowError(message)


def _last_words(name: str, status: int, output: IO[bytes]) -> str:
    output.seek(0)
    last_lines = output.read().decode(errors="replace").strip().splitlines()[-20:]
    ended = f"signal {-status}" if status < 0 else f"exit status {status}"
    hint = " (signal 9 is mostly the system's answer to too little memory)" * (status == -9)
    quoted = "\n  ".join(["It said last:", *last_lines]) if last_lines else "It said nothing."
    return f"The process {name!r} ended with {ended}{hint}. {quoted}"
