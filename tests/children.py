"""Child programs that find torch loaded: ``run("-c", code, *arguments)`` is as ``python -c`` is.

A server forks them, from a process that has one thread. Each has the environment, the folder and
the module path of the process that starts it. A test whose subject is an import, the end of an
interpreter, all of its memory, or a variable that is read at an import starts an interpreter by
itself; memory that is added counts in a fork, too.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import IO

_LOADED = (
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "crash.child",
    "ranks.kill_points",
    "ranks.stowed",
)
_READ_AT_IMPORT = ("ATEN_", "GLIBC_", "LD_", "MALLOC_", "MKL_", "OMP_", "PYTHON", "TRITON_")
_MESSAGE_BYTES = 1 << 18
Stream = int | IO[bytes] | socket.socket


class Child:
    """A running program."""

    def __init__(self, pid: int, end: socket.socket) -> None:
        self.pid, self._end = pid, end
        self.returncode: int | None = None

    def kill(self) -> None:
        """Kill it, unless it is known to have ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status, or the number of the signal that ended it, negative."""
        if self.returncode is None:
            if not select.select([self._end], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self.returncode = int(self._end.recv(64))
            self._end.close()
        return self.returncode


def run(
    *command: str | Path,
    environment: Mapping[str, str] | None = None,
    check: bool = True,
    teardown: bool = False,
    timeout: float = 100.0,
) -> "subprocess.CompletedProcess[str]":
    """Run ``-c`` code or ``-m`` module with its arguments to the end; return what it wrote."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        child = start(
            *command, environment=environment, teardown=teardown, stdout=output, stderr=errors
        )
        try:
            child.wait(timeout)
        finally:
            child.kill()
            status = child.wait()
        written = []
        for file in (output, errors):
            file.seek(0)
            written.append(file.read().decode())
    assert status == 0 or not check, f"exit {status}: {written[1]}"
    return subprocess.CompletedProcess(command, status, *written)


def start(
    *command: str | Path,
    environment: Mapping[str, str] | None = None,
    teardown: bool = False,
    stdin: Stream | None = None,
    stdout: Stream = 1,
    stderr: Stream = 2,
) -> Child:
    """Start ``-c`` code or ``-m`` module, with ``environment`` in addition to this process's.

    With ``teardown`` it ends as an interpreter does, which takes nearly a second: its modules are
    taken apart. Without, functions of atexit are called and the process ends.
    """
    late = [name for name in environment or {} if name.startswith(_READ_AT_IMPORT)]
    assert not late, f"{late} are read at an import: start an interpreter"
    words = ["teardown" if teardown else "", *map(str, command)]
    job = [words, {**os.environ, **(environment or {})}, str(Path.cwd()), sys.path]
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with theirs, Path(os.devnull).open("rb") as nothing:
        streams = [nothing if stdin is None else stdin, stdout, stderr, theirs]
        files = [each if isinstance(each, int) else each.fileno() for each in streams]
        socket.send_fds(_server(), [json.dumps(job).encode()], files)
    return Child(int(ours.recv(64)), ours)


@cache
def _server() -> socket.socket:
    """Start the server, which ends with this process."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
    owner = os.getpid()

    def end() -> None:
        if os.getpid() == owner:
            ours.close()
            process.wait()

    atexit.register(end)
    return ours


def _serve(requests: socket.socket) -> list[str]:
    """Fork a child for each request, and tell its pid and its exit status.

    Returns in the children: what each is to run.
    """
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for ready in select.select([requests, *running], [], [])[0]:
            if ready is not requests:
                pid, end = running.pop(ready)
                os.close(ready)
                with end, suppress(BrokenPipeError):
                    end.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                continue
            message, files, *_ = socket.recv_fds(requests, _MESSAGE_BYTES, 4)
            if not message:
                os._exit(0)
            command, environment, folder, sys.path = json.loads(message)
            pid = os.fork()
            if pid == 0:
                for number, file in enumerate(files[:3]):
                    os.dup2(file, number)
                requests.close()
                for _, end in running.values():
                    end.close()
                for file in (*files, *running):
                    os.close(file)
                os.environ.clear()
                os.environ.update(environment)
                os.chdir(folder)
                return list(command)
            end = socket.socket(fileno=files.pop())
            for file in files:
                os.close(file)
            running[os.pidfd_open(pid)] = pid, end
            end.send(b"%d" % pid)


def _main() -> None:
    for name in _LOADED:
        importlib.import_module(name)
    assert len(list(Path("/proc/self/task").iterdir())) == 1
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch takes its libraries of operators apart
    gc.collect()
    gc.freeze()  # else each child's first collection would copy all of this memory
    teardown, *command = _serve(socket.socket(fileno=os.dup(0)))
    if teardown:
        gc.unfreeze()
        _execute(*command)
        return
    status: object = 0
    try:
        _execute(*command)
    except SystemExit as end:
        status = end.code or 0
        if not isinstance(status, int):
            sys.stderr.write(f"{status}\n")
    except BaseException:  # noqa: BLE001  # as an interpreter
        status = 1
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)


def _execute(how: str, program: str, *arguments: str) -> None:
    sys.argv = [how, *arguments]
    if how == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    module = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(program, "<string>", "exec"), module.__dict__)  # noqa: S102


if __name__ == "__main__":
    _main()
