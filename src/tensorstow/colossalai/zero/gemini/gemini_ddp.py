"""``GeminiDDP``: a model that Gemini places once it has its optimizer."""

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from tensorstow.base.errors import OptionError
from tensorstow.colossalai.booster.plugin.gemini_plugin import GeminiPlugin
from tensorstow.colossalai.booster.plugin.place_model import DTYPES, refuse_values, tell_idle
from tensorstow.colossalai.gemini import GeminiModel
from tensorstow.colossalai.interface import OptimizerWrapper
from tensorstow.fsdp.sharding import current_device

_REFUSED = {
    "zero_group": (None, "the ranks are all there are; tensorstow.stow(mesh=) takes others"),
    "extra_dp_group": (None, "GeminiPlugin(extra_dp_size=) has several full copies"),
}
_IDLE = {"scatter_after_inference": (True, "a unit that is sharded is so behind its forward")}


class GeminiDDP(GeminiModel):
    """A model as ``GeminiPlugin`` places it, without a booster.

    It is placed when ``GeminiOptimizer`` is made over it, or by its first forward where it has no
    optimizer. Until then its parameters are the module's own, for an optimizer to be made over.

    Args:
        module: The model.
        chunk_config_dict: Refused unless None.
        chunk_init_device: Changes nothing.
        placement_policy: "static", "cuda", "cpu", "const" or "auto", as of ``GeminiPlugin``.
        enable_gradient_accumulation: Changes nothing: gradients of several backwards add up.
        max_prefetch: How many units are copied to the device ahead of use.
        shard_param_frac: The fraction of the parameters' bytes that is sharded between forward and
            backward too.
        offload_optim_frac: The fraction of the states' bytes in host memory.
        offload_param_frac: The fraction of the parameters' bytes in host memory.
        warmup_non_model_data_ratio: Under "auto", the part of the device's memory that is left to
            everything but parameters until steps are measured.
        steady_cuda_cap_ratio: Under "auto", the part of the device's memory that copies of
            parameters and everything else may take together.
        search_range_m: Changes nothing: no chunk size is searched.
        hidden_dim: Changes nothing.
        min_chunk_size_m: Changes nothing.
        pin_memory: Changes nothing: host memory is pinned for an accelerator.
        force_outputs_fp32: Whether floating point outputs of the model are cast to fp32.
        strict_ddp_mode: Changes nothing.
        scatter_after_inference: Changes nothing.
        mixed_precision: ``torch.float16``, ``torch.bfloat16`` or ``torch.float32``. Default: None,
            float16 as upstream where an accelerator computes, float32 where the CPU does.
        zero_group: Refused unless None.
        memstats: Refused unless None.
        master_weights: Whether parameters keep their dtype, rather than being cast for good to
            ``mixed_precision``.
        extra_dp_group: Refused unless None.
        verbose: Whether the report on the placement is a warning rather than information.
        enable_async_reduce: Changes nothing.
        fp8_communication: Refused.
        use_fp8: Refused.

    Raises:
        OptionError: An argument that cannot be honoured.
    """

    def __init__(  # noqa: PLR0913, PLR0917  # upstream's own signature
        self,
        module: nn.Module,
        chunk_config_dict: dict[Any, Any] | None = None,
        chunk_init_device: torch.device | str | int | None = None,
        placement_policy: str = "static",
        enable_gradient_accumulation: bool = False,  # noqa: FBT001, FBT002  # upstream's, all below
        max_prefetch: int = 0,
        shard_param_frac: float = 1.0,
        offload_optim_frac: float = 0.0,
        offload_param_frac: float = 0.0,
        warmup_non_model_data_ratio: float = 0.8,
        steady_cuda_cap_ratio: float = 0.9,
        search_range_m: int = 32,
        hidden_dim: int | None = None,
        min_chunk_size_m: float = 32,
        pin_memory: bool = False,  # noqa: FBT001, FBT002
        force_outputs_fp32: bool = False,  # noqa: FBT001, FBT002
        strict_ddp_mode: bool = False,  # noqa: FBT001, FBT002
        scatter_after_inference: bool = True,  # noqa: FBT001, FBT002
        mixed_precision: torch.dtype | None = None,
        zero_group: object = None,
        memstats: object = None,
        master_weights: bool = True,  # noqa: FBT001, FBT002
        extra_dp_group: object = None,
        verbose: bool = False,  # noqa: FBT001, FBT002
        enable_async_reduce: bool = True,  # noqa: FBT001, FBT002
        fp8_communication: bool = False,  # noqa: FBT001, FBT002
        use_fp8: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        """Wrap the model; the class documents the arguments."""
        owner = type(self).__name__
        refuse_values(
            owner,
            _REFUSED,
            zero_group=zero_group,
            extra_dp_group=extra_dp_group,
        )
        tell_idle(
            owner,
            _IDLE,
            scatter_after_inference=scatter_after_inference,
        )
        dtype = mixed_precision or _usual_dtype()
        precisions = {dtype: name for name, dtype in DTYPES.items()}
        if dtype not in precisions:
            message = (
                f"mixed_precision={dtype} was given: it is one of"
                f" {', '.join(map(str, precisions))}."
            )
            raise OptionError(message)
        plugin = GeminiPlugin(
            precision=precisions[dtype],
            chunk_config_dict=chunk_config_dict,
            chunk_init_device=chunk_init_device,
            placement_policy=placement_policy,
            enable_gradient_accumulation=enable_gradient_accumulation,
            max_prefetch=max_prefetch,
            shard_param_frac=shard_param_frac,
            offload_optim_frac=offload_optim_frac,
            offload_param_frac=offload_param_frac,
            warmup_non_model_data_ratio=warmup_non_model_data_ratio,
            steady_cuda_cap_ratio=steady_cuda_cap_ratio,
            search_range_m=search_range_m,
            hidden_dim=hidden_dim,
            min_chunk_size_m=min_chunk_size_m,
            pin_memory=pin_memory,
            force_outputs_fp32=force_outputs_fp32,
            strict_ddp_mode=strict_ddp_mode,
            memstats=memstats,
            master_weights=master_weights,
            verbose=verbose,
            enable_async_reduce=enable_async_reduce,
            fp8_communication=fp8_communication,
            use_fp8=use_fp8,
        )
        super().__init__(
            module,
            outputs_fp32=force_outputs_fp32,
            inputs_dtype=None if dtype == torch.float32 else dtype,
        )
        self.mixed_precision: torch.dtype = dtype
        self._plugin: GeminiPlugin | None = plugin
        """What places the model; None: it is placed."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # the module's own
        """Call the module, which is placed without an optimizer where it has none.

        Args:
            args: The module's.
            kwargs: The module's.

        Returns:
            What the module returned.
        """
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
            OptionError: It is placed, or something cannot be honoured; the model was not changed.
        """
        if self._plugin is None:
            message = (
                "GeminiOptimizer was made over a model that is placed: make it once, before the"
                " model's first forward."
            )
            raise OptionError(message)
        _, made, *_ = self._plugin.configure(self.module, optimizer)
        self._plugin = None
        wrapper: OptimizerWrapper = made
        return wrapper

    @staticmethod
    def set_params_to_ignore(params_to_ignore: Iterable[torch.Tensor]) -> NoReturn:
        """Refuse: every parameter of the model is placed.

        Args:
            params_to_ignore: Not used.

        Raises:
            OptionError: Always.
        """
        del params_to_ignore
        message = (
            "set_params_to_ignore() was called: every parameter of the model is placed, and those"
            " that are not trained are frozen by requires_grad_(False)."
        )
        raise OptionError(message)


def _usual_dtype() -> torch.dtype:
    return torch.float32 if current_device().type == "cpu" else torch.float16
