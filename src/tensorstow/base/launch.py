"""Reads from the environment which rank this process is, and of how many.

[Note: Launchers] torchrun, Kubernetes' PyTorchJob and most trainers set RANK and WORLD_SIZE. Others
set variables of their own: mpirun (Open MPI; MPICH and Intel MPI; MVAPICH2), PALS (HPE Cray), jsrun
(LSF), flux and srun. Launchers are nested (srun starts torchrun, and mpirun may use srun), so the
innermost counts. A batch script of Slurm has the job's SLURM_NTASKS and
SLURM_PROCID=0, but it is one process: only a step of srun has a SLURM_STEP_ID. RANK or LOCAL_RANK
alone describes no ranks. WORLD_SIZE=1 comes before the launchers, so that a user can say that each
process of srun or mpirun trains a model of its own.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tensorstow.base.errors import OptionError

_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    (
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
    ),
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", ""),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""),
)
"""The variables of each launcher, the innermost first: rank, ranks, and both on this machine."""
_ADDRESS, _PORT = "MASTER_ADDR", "MASTER_PORT"
_THERE = " in the environment"
_MOST_RANKS = (1 << 31) - 1
_LAST_PORT = (1 << 16) - 1
_SHOWN = 40
"""Characters of a value that an error quotes."""
_ALONE = " If this process trains a model of its own, set WORLD_SIZE=1."


@dataclass(frozen=True, slots=True)
class Launch:
    """This process among the ranks that the environment describes; rank 0 of one if it does not."""

    world: int = 1
    rank: int | None = 0
    """None if only the number of ranks is known."""
    local_world: int | None = None
    """The number of ranks on this machine; None if it is not known."""
    local_rank: int | None = None
    """The rank on this machine; None if it is not known."""
    source: str = ""
    """What describes the ranks: variables with their values; empty: nothing does."""
    host: str | None = None
    """The address of rank 0."""
    port: str | None = None
    """The port of rank 0."""

    def refuse_unjoined(self, request: str) -> None:
        """Raise OptionError for work that does not join other ranks, unless this process is alone.

        ``request`` is what was asked, as the start of a sentence.
        """
        if self.world > 1:
            message = (
                f"{request}, and by {self.source} there are {self.world} ranks, which have not met:"
                " each would train alone. Call torch.distributed.init_process_group() first."
                f"{_ALONE}"
            )
            raise OptionError(message)

    def meeting(self) -> tuple[int, str, int]:
        """Return what this process needs to join the others: its rank, rank 0's address and port.

        Any port will do for one rank alone.

        Raises:
            OptionError: Something of it is not set, or is no port.
        """
        if self.world == 1:
            return 0, self.host or "127.0.0.1", _port(self.port or "0", least=0)
        needed = {"RANK": self.rank, _ADDRESS: self.host, _PORT: self.port}
        missing = [name for name, value in needed.items() if value in {None, ""}]
        if missing or self.rank is None or self.host is None or self.port is None:
            message = (
                f"By {self.source} there are {self.world} ranks, and {' and '.join(missing)}, by"
                f" which they meet, {'are' if len(missing) > 1 else 'is'} not set. Start the ranks"
                " with torchrun, or set what is missing for each, or call"
                f" torch.distributed.init_process_group() first.{_ALONE}"
            )
            raise OptionError(message)
        return self.rank, self.host, _port(self.port, least=1)


def launched(environ: Mapping[str, str] = os.environ) -> Launch:
    """Return which rank this process is, and of how many ([Note: Launchers]).

    Raises:
        OptionError: A variable is no number, or a rank is not below the number of ranks.
    """
    launch = Launch(host=environ.get(_ADDRESS), port=environ.get(_PORT))
    launch = _on_machine(launch, environ, *_LAUNCHERS[0][2:])
    rows = [row for row in _LAUNCHERS if _describes(environ, *row[:2])]
    if "WORLD_SIZE" in environ:
        world = _number(environ, "WORLD_SIZE", least=1)
        described = replace(launch, world=world, source=f"WORLD_SIZE={world}{_THERE}")
        if world == 1:
            return described
        if "RANK" not in environ:  # which another launcher of as many ranks may give
            rows = [row for row in rows if environ[row[1]] == environ["WORLD_SIZE"]]
            if not rows:
                return replace(described, rank=None)
    if not rows:
        return launch
    names = rows[0]
    rank, world = _place(environ, *names[:2])
    if launch.local_world is None and launch.local_rank is None:
        launch = _on_machine(launch, environ, *names[2:])
    source = f"{names[0]}={rank} and {names[1]}={world}{_THERE}"
    return replace(launch, world=world, rank=rank, source=source)


def _describes(environ: Mapping[str, str], rank: str, world: str) -> bool:
    """Return whether a launcher has set both variables for this process."""
    if rank not in environ or world not in environ:
        return False
    # A batch script has these too, as the process 0 of its job.
    return world != "SLURM_NTASKS" or "SLURM_STEP_ID" in environ or environ[rank] != "0"


def _on_machine(launch: Launch, environ: Mapping[str, str], rank: str, world: str) -> Launch:
    """Return ``launch`` with the ranks on this machine and this rank's number, if they are set."""
    if world not in environ:
        is_set = environ.get(rank, "").isdecimal()  # -1 means none
        return replace(launch, local_rank=_number(environ, rank, least=0) if is_set else None)
    if rank not in environ:
        return replace(launch, local_world=_number(environ, world, least=1))
    number, count = _place(environ, rank, world)
    return replace(launch, local_world=count, local_rank=number)


def _place(environ: Mapping[str, str], rank: str, world: str) -> tuple[int, int]:
    number, count = _number(environ, rank, least=0), _number(environ, world, least=1)
    if number >= count:
        message = (
            f"{rank}={number} and {world}={count} are in the environment: ranks count from 0. Set"
            f" both as the launcher does, or unset {world}."
        )
        raise OptionError(message)
    return number, count


def _port(text: str, *, least: int) -> int:
    return _number({_PORT: text}, _PORT, least=least, most=_LAST_PORT)


def _number(environ: Mapping[str, str], name: str, *, least: int, most: int = _MOST_RANKS) -> int:
    text = environ[name]
    digits = text.lstrip("0") or "0"
    is_number = text.isdecimal() and len(digits) <= len(str(most))  # Python refuses 5,000 digits
    if not is_number or not least <= int(digits) <= most:
        quoted = repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
        message = (
            f"{name}={quoted} in the environment is not a number from {least} to {most}."
            " Set it so, or unset it."
        )
        raise OptionError(message)
    return int(digits)
