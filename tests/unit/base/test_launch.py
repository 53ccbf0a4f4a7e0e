"""What launchers write to the environment, and what only looks like it."""

import pytest

from tensorstow.base.errors import OptionError
from tensorstow.base.launch import Launch, launched

MANY_DIGITS = "9" * 5000
"""More than Python takes for a number."""
MEETING = {"MASTER_ADDR": "host", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
KUBERNETES = {"RANK": "1", "WORLD_SIZE": "2", **MEETING}
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
PALS = {"PALS_RANKID": "3", "PMI_SIZE": "4", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2"}
JSRUN = {
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
}
FLUX = {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1"}


def places(environ: dict[str, str]) -> tuple[int | None, int, int | None, int | None]:
    here = launched(environ)
    return here.rank, here.world, here.local_rank, here.local_world


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        (TORCHRUN, (5, 8, 1, 4)),
        (KUBERNETES, (1, 2, None, None)),
        (SRUN, (1, 2, 0, None)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}, (0, 2, None, None)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (1, 2, None, None)),
        (MPIRUN, (2, 3, 0, 1)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2, None, None)),
        (MVAPICH, (3, 4, 1, 2)),
        (PALS, (3, 4, 1, 2)),
        (JSRUN, (3, 4, 1, 2)),
        (FLUX, (3, 4, 1, None)),
        # The innermost launcher counts: srun starts torchrun, and mpirun may use srun.
        (SRUN | TORCHRUN, (5, 8, 1, 4)),
        (SRUN | MPIRUN, (2, 3, 0, 1)),
        (SRUN | FLUX, (3, 4, 1, None)),
        (JSRUN | MPIRUN, (2, 3, 0, 1)),
        (PALS | {"PMI_RANK": "0", "PMI_SIZE": "2"}, (0, 2, None, None)),
        # A script that exports the number and leaves the rank to srun.
        (SRUN | {"WORLD_SIZE": "2"} | MEETING, (1, 2, 0, None)),
    ],
)
def test_each_launcher_says_its_rank(
    environ: dict[str, str], wanted: tuple[int | None, ...]
) -> None:
    assert places(environ) == wanted
    assert launched(environ).source


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"RANK": "3"},
        {"RANK": "admiral"},
        {"LOCAL_RANK": "0"},
        {"LOCAL_RANK": "-1"},
        MEETING,
        BATCH,
        {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"},
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun --pty bash
        BATCH | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_a_process_that_is_no_rank_is_alone(environ: dict[str, str]) -> None:
    here = launched(environ)
    assert (here.rank, here.world) == (0, 1)
    here.refuse_unjoined("A step was taken")


@pytest.mark.parametrize(
    "environ", [KUBERNETES, SRUN, MPIRUN, TORCHRUN, MVAPICH, PALS, JSRUN, FLUX]
)
def test_a_user_can_say_that_each_process_trains_alone(environ: dict[str, str]) -> None:
    alone = {**environ, "WORLD_SIZE": "1"}
    with pytest.raises(OptionError, match="set WORLD_SIZE=1"):
        launched(environ).refuse_unjoined("A step was taken")
    launched(alone).refuse_unjoined("A step was taken")
    assert launched(alone).meeting()[0] == 0


@pytest.mark.parametrize(
    ("environ", "missing"),
    [
        (SRUN, "MASTER_ADDR and MASTER_PORT, by which they meet, are not set"),
        (MPIRUN | {"MASTER_ADDR": "host"}, "MASTER_PORT, by which they meet, is not set"),
        ({"WORLD_SIZE": "2"} | MEETING, "RANK, by which they meet, is not set"),
        (SRUN | {"WORLD_SIZE": "16"} | MEETING, "WORLD_SIZE=16 .* RANK, by which they meet, is"),
        (KUBERNETES | {"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
        (KUBERNETES | {"MASTER_PORT": "65536"}, "'65536' .* is not a number from 1 to 65535"),
    ],
)
def test_what_a_launcher_left_out_is_named(environ: dict[str, str], missing: str) -> None:
    with pytest.raises(OptionError, match=missing):
        launched(environ).meeting()


def test_ranks_know_where_they_meet() -> None:
    assert launched(KUBERNETES).meeting() == (1, "host", 29500)
    assert Launch().meeting() == (0, "127.0.0.1", 0)


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "two"},
        {"WORLD_SIZE": "0"},
        {"LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "4"},
        {"RANK": MANY_DIGITS, "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": MANY_DIGITS},
        {"LOCAL_RANK": MANY_DIGITS},
        {"RANK": "0", "WORLD_SIZE": "2147483648"},
    ],
)
def test_a_rank_that_cannot_be_is_an_error(environ: dict[str, str]) -> None:
    with pytest.raises(OptionError, match="in the environment") as found:
        launched(environ)
    assert len(str(found.value)) < 200


def test_zeros_in_front_of_a_rank_are_no_digits_of_it() -> None:
    assert places({"RANK": "0" * 5000 + "1", "WORLD_SIZE": "02"}) == (1, 2, None, None)
