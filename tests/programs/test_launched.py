"""Processes that launchers start, by the variables that each launcher sets."""

from pathlib import Path

import pytest

import children
from ports import free_port

TRAINED = """
import hashlib, os, sys
from functools import partial
import torch
import torch.distributed as dist
import tensorstow
from tensorstow import Plan

rank = int(sys.argv[1])
torch.set_num_threads(1)
torch.manual_seed(rank)
model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(3)])
plan = eval(sys.argv[2])
model, optimizer = tensorstow.stow(model, partial(tensorstow.AdamW, lr=1e-2), plan=plan)
for _ in range(2):
    model(torch.randn(4, 16)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
optimizer.wait()
whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
values = b"".join(w.detach().numpy().tobytes() for w in whole)
print(dist.get_world_size(), hashlib.sha256(values).hexdigest())
optimizer.close()
dist.barrier()
dist.destroy_process_group()
"""
TORCH = ({"RANK": "{rank}", "WORLD_SIZE": "2"}, "Plan(parameters='disk')")
SRUN = {"SLURM_PROCID": "{rank}", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("variables", "plan"),
    [TORCH, (SRUN, "Plan()"), (MPIRUN, "'auto'")],
    ids=["kubernetes", "srun", "mpirun"],
)
def test_processes_that_a_launcher_started_train_one_model(
    variables: dict[str, str], plan: str, tmp_path: Path
) -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    outputs = [tmp_path / str(rank) for rank in range(2)]
    started = []
    for rank, path in enumerate(outputs):
        given = meeting | {name: value.format(rank=rank) for name, value in variables.items()}
        with path.open("wb") as file:
            command = ("-c", TRAINED, str(rank), plan)
            started.append(children.start(*command, environment=given, stdout=file))
    assert [process.wait(110) for process in started] == [0, 0]
    first, second = (path.read_text() for path in outputs)
    assert first == second  # though each began with other weights and had other batches
    assert first.startswith("2 ")
