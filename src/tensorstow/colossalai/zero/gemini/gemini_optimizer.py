"""``GeminiOptimizer``: places a ``GeminiDDP``, and trains it."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tensorstow.base.errors import OptionError
from tensorstow.colossalai.adam import HybridAdam
from tensorstow.colossalai.booster.plugin.place_model import refuse_values, tell_idle
from tensorstow.colossalai.gemini import GeminiStates
from tensorstow.colossalai.grad_scaler import DynamicGradScaler
from tensorstow.colossalai.zero.gemini.gemini_ddp import GeminiDDP

_REFUSED = {
    "gpu_margin_mem_ratio": (0.0, "states stay where the policy places them"),
    "norm_type": (2.0, "gradients are clipped by their 2-norm"),
    "tp_group": (None, "models are sharded over data-parallel ranks, and their layers are not cut"),
    "params_info": (None, "there is no tensor parallelism whose parameters it could be of"),
}
_IDLE = {
    "verbose": (False, "a step that is skipped is always logged"),
    "enable_async_reduce": (True, "gradients are always reduced beside backward"),
}


class GeminiOptimizer(GeminiStates):
    """Places a model, and is its optimizer: scales the loss under fp16, clips, and updates.

    Args:
        optim: HybridAdam, CPUAdam, AdamW or Adam (tensorstow's or torch's) over the parameters of
            ``module``, without a step. It is closed, and recreated over the placed parameters.
        module: The model, a ``GeminiDDP``.
        gpu_margin_mem_ratio: Refused unless 0.
        initial_scale: The first loss scale; this and the next six are of fp16.
        min_scale: The least loss scale.
        growth_factor: What the scale is multiplied by after ``growth_interval`` good steps.
        backoff_factor: What it is multiplied by at an overflow.
        growth_interval: Good steps in a row until the scale grows.
        hysteresis: Overflows until the scale falls.
        max_scale: The largest loss scale.
        max_norm: The 2-norm that gradients are clipped to in each step; 0: not at all.
        norm_type: 2.
        tp_group: Refused unless None.
        params_info: Refused unless None.
        verbose: Changes nothing.
        enable_async_reduce: Changes nothing.

    Raises:
        OptionError: An argument that cannot be honoured; the model was not changed.
    """

    def __init__(  # noqa: PLR0913, PLR0917  # upstream's own signature
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
        verbose: bool = False,  # noqa: FBT001, FBT002  # upstream's
        *,
        enable_async_reduce: bool = True,
    ) -> None:
        """Place the model; the class documents the arguments."""
        owner = type(self).__name__
        refuse_values(
            owner,
            _REFUSED,
            gpu_margin_mem_ratio=gpu_margin_mem_ratio,
            norm_type=norm_type,
            tp_group=tp_group,
            params_info=params_info,
        )
        tell_idle(
            owner,
            _IDLE,
            verbose=verbose,
            enable_async_reduce=enable_async_reduce,
        )
        if not isinstance(module, GeminiDDP):
            message = (
                f"GeminiOptimizer was given a {type(module).__name__}: give it a GeminiDDP, or let"
                " Booster.boost make both."
            )
            raise OptionError(message)
        if not max_norm >= 0.0:
            message = f"max_norm={max_norm} was given: it is 0 (no clipping) or positive."
            raise OptionError(message)
        scaler = DynamicGradScaler(
            initial_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            min_scale,
            max_scale,
            hysteresis,
        )
        made = module.place(optim)
        scales = module.mixed_precision == torch.float16
        super().__init__(made.unwrap(), max_norm=max_norm, scaler=scaler if scales else None)


class GeminiAdamOptimizer(GeminiOptimizer):
    """``GeminiOptimizer`` over a ``HybridAdam`` of all parameters.

    Args:
        model: The model.
        defaults: As of ``GeminiOptimizer``; the others as of ``HybridAdam``.

    Raises:
        OptionError: As of ``GeminiOptimizer``.
    """

    def __init__(self, model: GeminiDDP, **defaults: Any) -> None:  # noqa: ANN401
        """Place the model; the class documents the arguments."""
        own = {name: defaults.pop(name) for name in list(defaults) if name in _OF_GEMINI}
        super().__init__(HybridAdam(model.parameters(), **defaults), model, **own)


_OF_GEMINI = frozenset(GeminiOptimizer.__init__.__annotations__) - {"optim", "module", "return"}
