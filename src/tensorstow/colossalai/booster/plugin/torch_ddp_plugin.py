"""``TorchDDPPlugin``: torch's DistributedDataParallel; the optimizer stays as it is."""

from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tensorstow.base.errors import OptionError
from tensorstow.base.launch import launched
from tensorstow.colossalai.booster.plugin.place_model import refuse_boosted
from tensorstow.colossalai.booster.plugin.plugin_base import Plugin
from tensorstow.colossalai.interface import ModelWrapper, OptimizerWrapper
from tensorstow.doorkit.keyword_table import Table, checks_keywords, honoured, refused
from tensorstow.fsdp.sharding import backend_of, current_device, join_ranks

_OF_TORCH = (
    *("broadcast_buffers", "bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view"),
    "static_graph",
)
_TABLE: Table = {
    **dict.fromkeys(_OF_TORCH, honoured("As of ``DistributedDataParallel``.")),
    **refused("torch has deprecated it", "check_reduction"),
    **refused("gradients are reduced in their own dtype", "fp8_communication"),
}


class DDPWrapper(ModelWrapper):
    """A model in torch's DistributedDataParallel, which is ``module``.

    Its parameters' names begin with "module.module.", as upstream's do.
    """

    module: DistributedDataParallel

    def unwrap(self, unwrap_peft: bool = True) -> nn.Module:
        """Return the model that was given."""
        del unwrap_peft
        model: nn.Module = self.module.module
        return model


@checks_keywords(_TABLE)
class TorchDDPPlugin(Plugin):
    """Every rank has the whole model, on its device, in torch's DistributedDataParallel.

    The optimizer is the one that was given, of any class; the model is on this rank's device where
    there is one. Where there is no process group one of torchrun's ranks is made, or of this
    process alone. On an accelerator BatchNorm becomes SyncBatchNorm, as upstream; on the CPU, for
    which torch has none, each rank has statistics of its own.
    """

    def __init__(
        self,
        broadcast_buffers: bool = True,
        bucket_cap_mb: int = 25,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        fp8_communication: bool = False,
    ) -> None:
        arguments = locals()
        # Torch warns of the name with any value.
        self._keywords: dict[str, Any] = {name: arguments[name] for name in _OF_TORCH}
        if broadcast_buffers:
            del self._keywords["broadcast_buffers"]

    def _place(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any
    ) -> tuple[nn.Module, Optimizer | None]:
        del lr_scheduler
        refuse_boosted(model)
        device = current_device()
        is_on_device = all(p.device.type == device.type for p in model.parameters())
        if optimizer is not None and not is_on_device and isinstance(optimizer, Optimizer):
            message = (
                f"TorchDDPPlugin was given a model that is not on {device} and an optimizer over"
                " it, whose states are for the model's old device: move the model first."
            )
            raise OptionError(message)
        join_ranks(launched(), backend_of(device))
        model.to(device)
        if device.type != "cpu":
            convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
            model = convert(model)
        ddp = DistributedDataParallel(model, **self._keywords)
        wrapper = None if optimizer is None else OptimizerWrapper(optimizer)
        return DDPWrapper(ddp), wrapper

    def support_no_sync(self) -> bool:
        """Return True: ``no_sync`` can be called."""
        return True

    def no_sync(
        self, model: nn.Module | None = None, optimizer: Optimizer | None = None
    ) -> AbstractContextManager[None]:
        """Return a context in which gradients are not reduced.

        Raises:
            OptionError: The model is another one.
        """
        del optimizer
        if not isinstance(model, DDPWrapper):
            name = type(model).__name__
            message = f"no_sync() was given a {name}: pass the model that boost() returned."
            raise OptionError(message)
        return model.module.no_sync()
