"""Bytes of files in a buffer: what follows each other is read at once, at its place of a block."""

from pathlib import Path

import torch

from tensorstow.io.arena import TENSOR_ALIGN
from tensorstow.io.file_runs import BufferLayout, Run, runs_of
from tensorstow.io.files import ALIGN, IoFuture
from tensorstow.io.safetensors import Entry


class Opened:
    """A file that is never read."""

    path = Path("model.safetensors")

    def read(self, offset: int, into: torch.Tensor) -> IoFuture:
        raise NotImplementedError

    def validate_unchanged(self) -> None:
        raise NotImplementedError


def test_what_follows_each_other_in_file_and_buffer_is_one_run() -> None:
    file, other = Opened(), Opened()
    half = Entry(torch.float32, (16,), 640)
    tensors = [(file, half, 128), (file, Entry(torch.float32, (16,), 704), 192)]
    (run,) = runs_of(tensors)
    assert (run.offset, run.at, run.nbytes) == (640, 128, 128)
    apart: list[list[tuple[Opened, Entry, int]]] = [
        [tensors[0], (other, tensors[1][1], 192)],
        [tensors[0], (file, tensors[1][1], 256)],
        [tensors[0], (file, Entry(torch.float32, (16,), 768), 192)],
    ]
    assert all(len(runs_of(each)) == 2 for each in apart)


def test_nothing_is_read_of_an_empty_tensor() -> None:
    runs: list[Run] = runs_of([(Opened(), Entry(torch.float32, (0, 3), 64), 0)])
    assert runs == []


def test_tensors_lie_at_the_same_place_of_a_block_as_in_the_file() -> None:
    layout = BufferLayout()
    at, cast_at = layout.place(Entry(torch.float32, (100,), 5 * ALIGN + 128), torch.float32)
    assert (at % ALIGN, cast_at) == (128, None)
    odd, cast_at = layout.place(Entry(torch.bfloat16, (3,), 1001), torch.float32)
    assert cast_at is not None
    assert odd >= at + 400
    assert odd % TENSOR_ALIGN == cast_at % TENSOR_ALIGN == 0
    assert layout.nbytes == cast_at + 12
