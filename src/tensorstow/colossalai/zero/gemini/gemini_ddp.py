"""``GeminiDDP``: a model that Gemini places once it has its optimizer."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tensorstow.base.errors import OptionError
from tensorstow.colossalai.booster.plugin.gemini_plugin import PLACEMENT, GeminiPlugin
from tensorstow.colossalai.booster.plugin.place_model import DTYPES, PRECISIONS, TrainingOptions
from tensorstow.colossalai.gemini import GeminiModel
from tensorstow.colossalai.interface import OptimizerWrapper
from tensorstow.doorkit.keyword_table import (
    Support,
    Table,
    checks_keywords,
    honoured,
    no_effect,
    refused,
    refused_call,
)

_TABLE: Table = {
    **PLACEMENT,
    "module": honoured("The model."),
    **no_effect("a sharded unit is resharded after its forward", "scatter_after_inference"),
    "mixed_precision": honoured(
        "``torch.float16``, ``torch.bfloat16`` or ``torch.float32``. Default: None, float16 as"
        " upstream where an accelerator computes, float32 where the CPU does."
    ),
    **refused("the ranks are all there are; tensorstow.stow(mesh=) takes others", "zero_group"),
    **refused("GeminiPlugin(extra_dp_size=) has several full copies", "extra_dp_group"),
}
_OF_PLUGIN = [name for name, word in PLACEMENT.items() if word.support is Support.HONOURED]


@checks_keywords(_TABLE)
class GeminiDDP(GeminiModel):
    """A model as ``GeminiPlugin`` places it, without a booster.

    ``GeminiOptimizer`` places it; without an optimizer, its first forward does. Until then its
    parameters are the module's own, and an optimizer can be created over them.
    """

    def __init__(
        self,
        module: nn.Module,
        chunk_config_dict: dict[Any, Any] | None = None,
        chunk_init_device: torch.device | str | int | None = None,
        placement_policy: str = "static",
        enable_gradient_accumulation: bool = False,
        max_prefetch: int = 0,
        shard_param_frac: float = 1.0,
        offload_optim_frac: float = 0.0,
        offload_param_frac: float = 0.0,
        warmup_non_model_data_ratio: float = 0.8,
        steady_cuda_cap_ratio: float = 0.9,
        search_range_m: int = 32,
        hidden_dim: int | None = None,
        min_chunk_size_m: float = 32,
        pin_memory: bool = False,
        force_outputs_fp32: bool = False,
        strict_ddp_mode: bool = False,
        scatter_after_inference: bool = True,
        mixed_precision: torch.dtype | None = None,
        zero_group: object = None,
        memstats: object = None,
        master_weights: bool = True,
        extra_dp_group: object = None,
        verbose: bool = False,
        enable_async_reduce: bool = True,
        fp8_communication: bool = False,
        use_fp8: bool = False,
    ) -> None:
        arguments = locals()
        dtype = mixed_precision or DTYPES[TrainingOptions().meant]
        if dtype not in PRECISIONS:
            message = (
                f"mixed_precision={dtype} was given: it is one of"
                f" {', '.join(map(str, PRECISIONS))}."
            )
            raise OptionError(message)
        placement = {name: arguments[name] for name in _OF_PLUGIN}
        plugin = GeminiPlugin(precision=PRECISIONS[dtype], **placement)
        super().__init__(
            module,
            outputs_fp32=force_outputs_fp32,
            inputs_dtype=None if dtype == torch.float32 else dtype,
        )
        self.mixed_precision: torch.dtype = dtype
        self._plugin: GeminiPlugin | None = plugin
        """What places the model; None: it is placed."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, which is placed without an optimizer where it has none."""
        if self._plugin is not None:
            self._plugin.configure(self.module)
            self._plugin = None
        return super().forward(*args, **kwargs)

    def place(self, optimizer: Optimizer) -> OptimizerWrapper:
        """Place the module, and recreate its optimizer.

        Args:
            optimizer: As of ``Booster.boost``.

        Returns:
            The optimizer over the placed parameters.

        Raises:
            OptionError: It is placed, or an argument is not supported; the model was not changed.
        """
        if self._plugin is None:
            message = (
                "GeminiOptimizer was created over a model that is placed: create it once, before"
                " the model's first forward."
            )
            raise OptionError(message)
        _, boosted, *_ = self._plugin.configure(self.module, optimizer)
        self._plugin = None
        wrapper: OptimizerWrapper = boosted
        return wrapper

    set_params_to_ignore = staticmethod(
        refused_call(
            "set_params_to_ignore",
            "every parameter of the model is placed, and those that are not trained are frozen by"
            " requires_grad_(False)",
        )
    )
