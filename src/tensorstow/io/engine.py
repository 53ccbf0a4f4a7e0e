"""Chooses the I/O backend: tries io_uring, else a thread pool, and says why."""

import errno as codes
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

import tensorstow._native as _native
from tensorstow.base.core_share import part
from tensorstow.base.errors import BackendError, BudgetError, OptionError
from tensorstow.base.sizes import format_bytes
from tensorstow.io.local_ranks import local_ranks
from tensorstow.io.numa_binding import NodeChoice, bind_threads

logger = logging.getLogger("tensorstow")

BACKENDS = ("uring", "threads")
DEPTH = 32
"""Blocks in flight on one disk, for all ranks of a machine together."""
BLOCK_BYTES = 1 << 20
PAGE_BLOCK = 4096

_REASONS = {
    codes.ENOSYS: "this kernel has no io_uring, or a container's seccomp filter hides it",
    codes.EPERM: "io_uring is forbidden here (container seccomp profile, or the sysctl"
    " kernel.io_uring_disabled)",
    codes.EACCES: "io_uring is forbidden here by a security module",
    codes.ENOMEM: "the kernel would not give io_uring its locked memory (`ulimit -l`)",
}


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The chosen backend, and why each better one was not chosen."""

    name: str
    refused: tuple[tuple[str, str], ...]
    """(backend, reason) pairs, best first; empty where the best one serves."""

    def __str__(self) -> str:
        """Return one line for people."""
        return "; ".join([self.name, *(f"not {name}: {why}" for name, why in self.refused)])


def probe_backend(name: str, directory: Path | None = None) -> str | None:
    """Write and read back some bytes with backend ``name``; return None, or why it does not work.

    The bytes go to an unlinked file in ``directory`` (default: the system's temporary one).
    """
    if name not in BACKENDS:
        message = f"Backend {name!r} was requested; there are {', '.join(BACKENDS)}."
        raise OptionError(message)
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            return _round_trip(name, file.fileno())
    except OSError as error:
        code = error.errno or 0
        return _REASONS.get(code, os.strerror(code)) + f" ({codes.errorcode.get(code, code)})"


def choose_backend(wanted: str | None = None) -> BackendChoice:
    """Choose the backend: ``wanted``, else $TENSORSTOW_IO, else the first of BACKENDS that works.

    A backend that was named and does not work gives way to the next one, with a warning.
    """
    wanted = wanted or os.environ.get("TENSORSTOW_IO") or None
    choice = _probe_all(wanted)
    if wanted is not None and choice.name != wanted:
        logger.warning("I/O backend %s was requested; using %s", wanted, choice)
    return choice


def open_engine(
    wanted: str | None = None,
    *,
    depth: int | None = None,
    block_bytes: int = BLOCK_BYTES,
    said_by: str = "depth",
    node: NodeChoice = "auto",
    drives: int = 1,
) -> _native.Engine:
    """Start an I/O engine: ``depth`` blocks of ``block_bytes`` in flight on the chosen backend.

    ``depth``: None takes this rank's part of DEPTH for each of ``drives``, as if all of its
    machine's used the same. ``drives``: how many its files are on. ``said_by``: what users call the
    depth. ``node``: where its threads run.
    """
    # Before the engine: each of its threads is bound when it starts.
    bind_threads(node)
    if depth is None:
        local = local_ranks()
        depth = part(DEPTH * drives, local.count, local.rank)
    value: object = depth  # as users typed it
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        message = (
            f"{said_by}={depth!r} was given: it is the number of blocks in flight, at least 1."
        )
        raise OptionError(message)
    if block_bytes < PAGE_BLOCK or block_bytes % PAGE_BLOCK:
        message = f"Blocks of {block_bytes} bytes were requested: use a multiple of {PAGE_BLOCK}."
        raise OptionError(message)
    try:
        return _native.Engine(choose_backend(wanted).name, depth, block_bytes, drives)
    except OSError as error:
        if error.errno != codes.ENOMEM:
            raise
        message = (
            f"{said_by}={depth} was given, which is {depth} blocks of {format_bytes(block_bytes)}"
            " in flight: no memory for their buffers. Lower it, or raise `ulimit -v`."
        )
        raise BudgetError(message) from error


_PERMANENT = ("ENOSYS", "EPERM", "EACCES")
_chosen: dict[str | None, BackendChoice] = {}


def _probe_all(wanted: str | None) -> BackendChoice:
    if wanted in _chosen:
        return _chosen[wanted]
    order = [wanted, *(b for b in BACKENDS if b != wanted)] if wanted else list(BACKENDS)
    refused: list[tuple[str, str]] = []
    for name in order:
        reason = probe_backend(name)
        if reason is None:
            choice = BackendChoice(name, tuple(refused))
            # A shortage passes (too many open files, say); what a kernel or a container forbids
            # does not.
            if all(why.endswith(tuple(f"({code})" for code in _PERMANENT)) for _, why in refused):
                _chosen[wanted] = choice
            elif wanted is None:
                logger.warning("I/O backend for now: %s", choice)
            return choice
        refused.append((name, reason))
    reasons = "; ".join(f"{name}: {why}" for name, why in refused)
    message = f"An I/O backend was requested and none works here ({reasons}). Free that up first."
    raise BackendError(message)


def _round_trip(name: str, fd: int) -> str | None:
    engine = _native.Engine(name, 2, PAGE_BLOCK)
    file = engine.add_file(fd, 1, drop_cache=False)
    sent = torch.arange(3 * PAGE_BLOCK // 8, dtype=torch.int64)
    back = torch.zeros_like(sent)
    nbytes = sent.numel() * sent.element_size()
    for start, tensor in ((engine.write, sent), (engine.read, back)):
        ticket = start(file, tensor.data_ptr(), nbytes, 0, tensor)
        ticket.wait()
        code, _, _ = ticket.error()
        if code:
            raise OSError(code, os.strerror(code))
    return None if torch.equal(sent, back) else "it returned other bytes than were written"
