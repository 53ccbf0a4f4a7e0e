"""One step of many parameters: reads pieces ahead, steps one by one, writes in the background."""

from collections.abc import Sequence

from tensorstow.optim.generic.piece_step import Job, names_of, step_piece
from tensorstow.optim.generic.pieces import Piece
from tensorstow.optim.generic.shared_values import StepBatch
from tensorstow.optim.generic.stepper import Stepper
from tensorstow.optim.generic.transfers import Transfers


def step_streamed(
    stepper: Stepper, transfers: Transfers, jobs: Sequence[Job], *, naive: bool
) -> None:
    """Step ``jobs``: first those whose states stay in RAM, while the first pieces are read.

    ``naive``: nothing is read ahead, and each piece is on disk before the next one is read.
    """
    steps = [(job, piece) for job in jobs for piece in job.param.pieces]
    pieces = [piece for _, piece in steps]
    ahead = 0 if naive else _read_ahead(transfers, pieces, 0)
    step_in_ram(stepper, [job for job in jobs if not job.param.pieces])
    for index, (job, piece) in enumerate(steps):
        region = None if piece.extent is None else transfers.read(piece)
        if piece.stepped and not naive:
            ahead = _read_ahead(transfers, pieces, max(index + 1, ahead))
        packed = step_piece(stepper, job, piece, region)
        if packed.slots != piece.slots:
            for other in pieces[index + 1 : ahead]:
                transfers.drop(other)
            ahead = index + 1
        transfers.put(piece, packed)
        if naive:
            transfers.wait_written()


def _read_ahead(transfers: Transfers, pieces: Sequence[Piece], first: int) -> int:
    """Start reading pieces from ``first`` on; return the index of the first that was not."""
    for index in range(first, len(pieces)):
        piece = pieces[index]
        # Read nothing after a new piece: it comes first, and will need room.
        if not piece.stepped or (piece.extent and not transfers.read_ahead(piece)):
            return index
    return len(pieces)


def step_in_ram(stepper: Stepper, jobs: Sequence[Job]) -> None:
    """Step parameters whose states stay in RAM: those of a group in one call."""
    groups: dict[int, list[Job]] = {}
    for job in jobs:
        groups.setdefault(id(job.group), []).append(job)
    runs = [
        StepBatch(
            same[0].group,
            [(j.leaf, dict(j.resident)) for j in same],
            names_of(same),
        )
        for same in groups.values()
    ]
    if runs:
        for same, entries in zip(groups.values(), stepper.run(runs), strict=True):
            for job, entry in zip(same, entries, strict=True):
                job.resident.clear()
                job.resident.update(entry)
