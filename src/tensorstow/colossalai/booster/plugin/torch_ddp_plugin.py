"""``TorchDDPPlugin``: torch's DistributedDataParallel; the optimizer stays as it is."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tensorstow.base.errors import OptionError
from tensorstow.colossalai.booster.plugin.place_model import refuse_boosted, refuse_values
from tensorstow.colossalai.booster.plugin.plugin_base import Plugin
from tensorstow.colossalai.interface import ModelWrapper, OptimizerWrapper
from tensorstow.fsdp.sharding import current_device, join_ranks

_REFUSED: Mapping[str, tuple[object, str]] = {
    "check_reduction": (False, "torch has deprecated it"),
    "fp8_communication": (False, "gradients are reduced in their own dtype"),
}


class DDPWrapper(ModelWrapper):
    """A model in torch's DistributedDataParallel, which is ``module``.

    Its parameters' names begin with "module.module.", as upstream's do.

    Args:
        module: Torch's wrapper.
    """

    module: DistributedDataParallel

    def unwrap(self, unwrap_peft: bool = True) -> nn.Module:  # noqa: FBT001, FBT002  # upstream's
        """Return the model that was given.

        Args:
            unwrap_peft: Not used: a model of peft is returned as it was given.

        Returns:
            The model.
        """
        del unwrap_peft
        model: nn.Module = self.module.module
        return model


class TorchDDPPlugin(Plugin):
    """Every rank has the whole model, on its device, in torch's DistributedDataParallel.

    The optimizer is the one that was given, of any class; the model is on this rank's device where
    there is one. Where there is no process group one of torchrun's ranks is made, or of this
    process alone. On an accelerator BatchNorm becomes SyncBatchNorm, as upstream; on the CPU, for
    which torch has none, each rank has statistics of its own.

    Args:
        broadcast_buffers: As of ``DistributedDataParallel``.
        bucket_cap_mb: As of ``DistributedDataParallel``.
        find_unused_parameters: As of ``DistributedDataParallel``.
        check_reduction: Refused: torch has deprecated it.
        gradient_as_bucket_view: As of ``DistributedDataParallel``.
        static_graph: As of ``DistributedDataParallel``.
        fp8_communication: Refused.

    Raises:
        OptionError: An argument that cannot be honoured.
    """

    def __init__(
        self,
        broadcast_buffers: bool = True,  # noqa: FBT001, FBT002  # upstream's, all below
        bucket_cap_mb: int = 25,
        find_unused_parameters: bool = False,  # noqa: FBT001, FBT002
        check_reduction: bool = False,  # noqa: FBT001, FBT002
        gradient_as_bucket_view: bool = False,  # noqa: FBT001, FBT002
        static_graph: bool = False,  # noqa: FBT001, FBT002
        fp8_communication: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        """Create the plugin; the class documents the arguments."""
        refuse_values(
            type(self).__name__,
            _REFUSED,
            check_reduction=check_reduction,
            fp8_communication=fp8_communication,
        )
        # Torch warns of the name with any value.
        self._keywords: dict[str, Any] = {} if broadcast_buffers else {"broadcast_buffers": False}
        self._keywords |= {
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
        }

    def _place(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        lr_scheduler: Any,  # noqa: ANN401  # torch's: it goes on with the same optimizer
    ) -> tuple[nn.Module, Optimizer | None]:
        del lr_scheduler
        refuse_boosted(model)
        device = current_device()
        there = all(p.device.type == device.type for p in model.parameters())
        if optimizer is not None and not there and isinstance(optimizer, Optimizer):
            message = (
                f"TorchDDPPlugin was given a model that is not on {device} and an optimizer over"
                " it, whose states are laid out for where it is: move the model first."
            )
            raise OptionError(message)
        join_ranks(device)
        model.to(device)
        if device.type != "cpu":
            convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
            model = convert(model)
        ddp = DistributedDataParallel(model, **self._keywords)
        wrapper = None if optimizer is None else OptimizerWrapper(optimizer)
        return DDPWrapper(ddp), wrapper

    def support_no_sync(self) -> bool:
        """Return whether ``no_sync`` can be called.

        Returns:
            True.
        """
        return True

    def no_sync(
        self, model: nn.Module | None = None, optimizer: Optimizer | None = None
    ) -> AbstractContextManager[None]:
        """Return a context in which gradients are not reduced.

        Args:
            model: What ``boost`` returned.
            optimizer: What ``boost`` returned.

        Returns:
            The context manager.

        Raises:
            OptionError: The model is another one.
        """
        del optimizer
        if not isinstance(model, DDPWrapper):
            message = (
                f"no_sync() was given a {type(model).__name__}: give it what boost() returned."
            )
            raise OptionError(message)
        return model.module.no_sync()
