"""``GeminiOptimizer``: places a ``GeminiDDP``, and trains it."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tensorstow.base.errors import OptionError
from tensorstow.colossalai.adam import HybridAdam
from tensorstow.colossalai.booster.plugin.gemini_plugin import PLACEMENT, PRECISION
from tensorstow.colossalai.booster.plugin.place_model import TrainingOptions
from tensorstow.colossalai.gemini import GeminiStates
from tensorstow.colossalai.grad_scaler import LOSS_SCALE, DynamicGradScaler
from tensorstow.colossalai.zero.gemini.gemini_ddp import GeminiDDP
from tensorstow.doorkit.keyword_table import Table, checks_keywords, honoured, no_effect, refused

_TABLE: Table = {
    "optim": honoured(
        "HybridAdam, CPUAdam, AdamW or Adam (tensorstow's or torch's) over the parameters of"
        " ``module``, without a step. It is closed, and recreated over the placed parameters."
    ),
    "module": honoured("The model, a ``GeminiDDP``."),
    **LOSS_SCALE,
    **{name: PRECISION[name] for name in ("max_norm", "norm_type")},
    **refused("states stay where the policy places them", "gpu_margin_mem_ratio"),
    **refused(
        "models are sharded over data-parallel ranks, and their layers are not cut", "tp_group"
    ),
    **refused("there is no tensor parallelism whose parameters it could be of", "params_info"),
    **no_effect("a step that is skipped is always logged", "verbose"),
    "enable_async_reduce": PLACEMENT["enable_async_reduce"],
}


@checks_keywords(_TABLE)
class GeminiOptimizer(GeminiStates):
    """Places a model, and is its optimizer: scales the loss under fp16, clips, and updates.

    Raises:
        OptionError: An argument that is not supported; the model was not changed.
    """

    def __init__(
        self,
        optim: Optimizer,
        module: nn.Module,
        gpu_margin_mem_ratio: float = 0.0,
        initial_scale: float = 2**32,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        tp_group: object = None,
        params_info: object = None,
        verbose: bool = False,
        *,
        enable_async_reduce: bool = True,
    ) -> None:
        arguments = locals()
        if not isinstance(module, GeminiDDP):
            message = (
                f"GeminiOptimizer was given a {type(module).__name__}: pass a GeminiDDP, or let"
                " Booster.boost make both."
            )
            raise OptionError(message)
        TrainingOptions(max_norm=max_norm)  # raises an error if it cannot be used
        scaler = DynamicGradScaler(**{name: arguments[name] for name in LOSS_SCALE})
        wrapper = module.place(optim)
        scales = module.mixed_precision == torch.float16
        super().__init__(wrapper.unwrap(), max_norm=max_norm, scaler=scaler if scales else None)


class GeminiAdamOptimizer(GeminiOptimizer):
    """``GeminiOptimizer`` over a ``HybridAdam`` of all parameters.

    Args:
        model: The model.
        defaults: As of ``GeminiOptimizer``; the others as of ``HybridAdam``.

    Raises:
        OptionError: As of ``GeminiOptimizer``.
    """

    def __init__(self, model: GeminiDDP, **defaults: Any) -> None:
        gemini_options = {name: defaults.pop(name) for name in list(defaults) if name in _OF_GEMINI}
        super().__init__(HybridAdam(model.parameters(), **defaults), model, **gemini_options)


_OF_GEMINI = frozenset(GeminiOptimizer.__init__.__annotations__) - {"optim", "module", "return"}
