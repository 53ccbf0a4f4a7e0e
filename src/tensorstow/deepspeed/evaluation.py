"""Places a model without an optimizer, which evaluates and generates.

[Note: Evaluation] Nothing is reduced, so nothing is sharded: every rank has a model of its own,
with the values of rank 0. Weights that are where they are computed with are plain parameters, which
may be written to (a moving average, a reference model that follows). Others are only read (ADR
0037): on disk in one safetensors file for all ranks of a machine, which has no name any more once
they have opened it.
"""

import logging
import secrets
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from tensorstow.base.directories import make_directories
from tensorstow.base.errors import OptionError
from tensorstow.base.launch import launched
from tensorstow.base.plan import Plan
from tensorstow.base.regular_file import remove_file
from tensorstow.base.tiers import Tier
from tensorstow.deepspeed.config.settings import Settings
from tensorstow.deepspeed.plans import PARAMETER_TIERS, directory_of, dtype_of, weight_ram_budget
from tensorstow.deepspeed.states import cast_model
from tensorstow.fsdp.sharding import (
    current_device,
    from_every_rank,
    host_group,
    on_every_rank,
    rank_here,
)
from tensorstow.fsdp.stow import stow
from tensorstow.io.digest_list import DigestList, digest_of

logger = logging.getLogger("tensorstow")


def place_for_evaluation(model: nn.Module, settings: Settings) -> nn.Module:
    """Cast a model, give it the values of rank 0, and place it; collective.

    Raises OptionError if a parameter has no values.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            message = (
                f"{name} is on the meta device, and initialize() was called without an optimizer: a"
                " model that evaluates has values already. Load them before."
            )
            raise OptionError(message)
    if settings.bf16 or settings.fp16 is not None:  # else it is computed with as it is
        cast_model(model, dtype_of(settings))
    _share_values(model)
    device = current_device()
    tier = PARAMETER_TIERS[settings.zero.offload_param.device]
    stays = tier == Tier.DEVICE or (tier == Tier.HOST and device.type == "cpu")
    logger.info(
        "initialize() was called without an optimizer: the model evaluates, whole on each rank,"
        " parameters=%s",
        tier,
    )
    if stays:
        return model.to(device)
    if tier == Tier.HOST:
        return stow(model, None, plan=Plan(parameters=tier))[0]
    return _stow_on_disk(model, settings)


def _stow_on_disk(model: nn.Module, settings: Settings) -> nn.Module:
    """Write the weights to a file in ``nvme_path`` and read them from there."""
    plan = Plan(parameters=Tier.DISK, weight_ram_budget=weight_ram_budget(settings))
    file = _file_of_machine(Path(directory_of(settings) or "."))
    listed = DigestList(file)

    def write() -> None:
        if _writes_file():
            make_directories([file.parent])
            save_file({n: _own_memory(p) for n, p in model.named_parameters()}, file)
            listed.note(file, digest_of(file))
            listed.write()

    def place() -> nn.Module:
        return stow(model, None, plan=plan, weights=file)[0]

    def remove() -> None:
        if _writes_file():
            remove_file(file)
            listed.remove()

    try:
        on_every_rank(write, "write the model's weights")
        return on_every_rank(place, "place the model")
    finally:  # once all have opened it
        on_every_rank(remove, "remove a file")


def _file_of_machine(directory: Path) -> Path:
    """Return a new name, the same for all ranks of a machine."""
    token = from_every_rank(secrets.token_hex(8))[0]
    return directory / f"tensorstow-{token}-{_first_of_machine()}.safetensors"


def _first_of_machine() -> int:
    """Return the first rank of this machine; this one if no launcher has set it."""
    return rank_here() - (launched().local_rank or 0)


def _writes_file() -> bool:
    return rank_here() == _first_of_machine()


def _own_memory(parameter: torch.Tensor) -> torch.Tensor:
    """Return values that no other tensor's memory is around, as files of tensors have them."""
    values = parameter.detach().cpu().contiguous()
    is_own = values.untyped_storage().nbytes() == values.numel() * values.itemsize
    return values if is_own else values.clone()


@torch.no_grad()
def _share_values(model: nn.Module) -> None:
    """Give parameters and buffers the values of rank 0; collective."""
    group = host_group()
    if group is None:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        # The group's collectives are of host memory.
        values = tensor.detach().cpu().contiguous()
        dist.broadcast(values, 0, group)
        tensor.copy_(values)
