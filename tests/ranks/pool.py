"""Processes that are the ranks of a run, kept for all tests that want as many."""

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import current_process
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import children

Task = Callable[..., Any]


Pool = Callable[[int], "Ranks"]
"""The fixture ``ranks``: processes by their number."""


class RankError(Exception):
    """A rank failed; its traceback is the message."""


class Ranks:
    """``world`` processes with a group among them, of ``device``'s collectives and of gloo's."""

    def __init__(self, world: int, device: str = "cpu") -> None:
        """Start them."""
        self.world = world
        self._folder = tempfile.TemporaryDirectory(prefix="tensorstow-ranks-")
        meeting = str(Path(self._folder.name) / "meeting")
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = Pipe()
            words = (str(rank), str(world), meeting, device)
            with theirs:
                process = children.start("-m", "ranks.pool", *words, stdin=theirs.fileno())
            ours.send_bytes(current_process().authkey)  # tensors are handed over by it
            self._ends.append(ours)
            self._processes.append(process)

    def run(self, task: Task, *given: Any) -> list[Any]:  # noqa: ANN401  # whatever tasks take
        """Call ``task`` in every rank; return what each returned, by rank."""
        for end in self._ends:
            end.send((task, given))
        answers = [end.recv() for end in self._ends]
        failed = [f"rank {i}: {text}" for i, (ok, text) in enumerate(answers) if not ok]
        if failed:
            raise RankError("\n".join(failed))
        return [value for _, value in answers]

    def close(self) -> None:
        """End them."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        self._folder.cleanup()


def _serve(end: Connection, rank: int, world: int, meeting: str, device: str) -> None:
    import torch  # noqa: PLC0415  # in the child alone
    import torch.distributed as dist  # noqa: PLC0415

    current_process().authkey = end.recv_bytes()
    torch.set_num_threads(1)
    check = _join_device(device, rank)
    store = dist.FileStore(meeting, world)
    patience = timedelta(seconds=40)  # a rank that waits for one that failed says so, in time
    backend = "gloo"
    if device != "cpu":
        backend = f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=patience)
    while True:
        try:
            task, given = end.recv()
        except EOFError:
            break
        try:
            answer = task(*given)
            check()
            end.send((True, answer))
        except BaseException:  # noqa: BLE001  # the parent raises it
            end.send((False, traceback.format_exc()))
    dist.destroy_process_group()


def _join_device(device: str, rank: int) -> Callable[[], None]:
    """Take the rank's accelerator; return what says whether a task's work on it was in order."""
    import torch  # noqa: PLC0415

    if device == "simulated":
        import simulated  # noqa: PLC0415  # registers the device, in a process of its own

        return simulated.check_order
    if device != "cpu":
        torch.accelerator.set_device_index(rank)
    return lambda: None


if __name__ == "__main__":
    _serve(Connection(os.dup(0)), int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
