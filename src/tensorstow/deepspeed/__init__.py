"""DeepSpeed's interface: ``import tensorstow.deepspeed as deepspeed``.

Names are imported on first use: importing FSDP2 takes a second, and reading a configuration does
not need it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from tensorstow.base.absent_names import add_absent_modules, refuse, refuse_other_modules

if TYPE_CHECKING:
    from tensorstow.deepspeed import (
        accelerator,
        checkpointing,
        comm,
        moe,
        ops,
        runtime,
        utils,
        zero,
    )
    from tensorstow.deepspeed.accelerator import get_accelerator
    from tensorstow.deepspeed.comm import init_distributed
    from tensorstow.deepspeed.config.summary import summary_of
    from tensorstow.deepspeed.initialization import add_config_arguments, initialize
    from tensorstow.deepspeed.name import take_name
    from tensorstow.deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
    from tensorstow.deepspeed.runtime.engine import DeepSpeedEngine
    from tensorstow.deepspeed.utils import log_dist, logger
    from tensorstow.deepspeed.zero import OnDevice

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "OnDevice",
    "__git_branch__",
    "__git_hash__",
    "__version__",
    "__version_major__",
    "__version_minor__",
    "__version_patch__",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "moe",
    "ops",
    "runtime",
    "summary_of",
    "take_name",
    "utils",
    "zero",
]

__version__ = "0.19.6"
"""The version of DeepSpeed whose interface this is, for scripts that compare it."""
__version_major__, __version_minor__, __version_patch__ = 0, 19, 6
__git_hash__ = __git_branch__ = "[none]"
"""Upstream's value if it was not built from its repository."""

_MODULES = {
    "DeepSpeedConfig": "runtime.config",
    "DeepSpeedConfigError": "runtime.config",
    "DeepSpeedEngine": "runtime.engine",
    "OnDevice": "zero",
    "add_config_arguments": "initialization",
    "get_accelerator": "accelerator",
    "init_distributed": "comm",
    "initialize": "initialization",
    "log_dist": "utils",
    "logger": "utils",
    "summary_of": "config.summary",
    "take_name": "name",
}
"""The module of each name that is not a module itself."""


_NO_STAGES = (
    "there are no pipeline stages. tensorstow.stow() takes a whole model, whose blocks may be on"
    " disk"
)
_NO_KERNELS = "use torch's scaled_dot_product_attention and torch.compile in the model"
_ONLY_READ = (
    "its kernels are not here. tensorstow.stow(model, None, weights=folder) places a model that is"
    " only read: on the device, in host memory or in its files (ZeRO-Inference)"
)
_NO_AUTOTUNER = (
    'nothing is tried out. tensorstow.stow(plan="auto") computes a plan from sizes and rates, which'
    " `tensorstow plan` prints"
)
_ABSENT_MODULES = {
    "autotuning": _NO_AUTOTUNER,
    "elasticity": "start ranks by torchrun --nnodes=MIN:MAX. Any number of ranks loads a"
    " checkpoint",
    "inference": _ONLY_READ,
    "launcher": "start ranks by torchrun",
    "linear": "use peft for LoRA, and torchao for quantized weights",
    "module_inject": _ONLY_READ,
    "monitor.monitor": "the engine writes its scalars by the sections tensorboard, csv_monitor and"
    " wandb of the configuration",
    "pipe": _NO_STAGES,
    "profiling": "use torch.profiler, torch.utils.flop_counter.FlopCounterMode for operations, and"
    " engine.optimizer.report(directory) for bytes and waits",
    "sequence": "ranks share no sequence. Long ones fit with tensorstow.offload_activations,"
    " tensorstow.nn.TiledLinear and tensorstow.losses",
}
"""Why modules of upstream are not here."""
_ABSENT = {
    **_ABSENT_MODULES,
    "init_inference": _ONLY_READ,
    "add_tuning_arguments": f"its options are those of the autotuner, and {_NO_AUTOTUNER}",
    "PipelineEngine": _NO_STAGES,
    "PipelineModule": _NO_STAGES,
    "InferenceEngine": _ONLY_READ,
    "DeepSpeedHybridEngine": _ONLY_READ,
    "tp_model_init": "the engine shards whole parameters over data-parallel ranks, and takes no"
    " DTensors. Leave it out",
    "compression": "compress the model after training, by torchao",
    "DeepSpeedTransformerLayer": _NO_KERNELS,
    "DeepSpeedTransformerConfig": _NO_KERNELS,
    "replace_transformer_layer": _NO_KERNELS,
}
"""Why names of upstream are not here."""
add_absent_modules(__name__, _ABSENT_MODULES)
refuse_other_modules(__name__, "docs/guides/deepspeed.md")


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name not in __all__:
        refuse(__name__, name, _ABSENT)
    module = import_module(f"{__name__}.{_MODULES.get(name, name)}")
    attribute = getattr(module, name) if name in _MODULES else module
    globals()[name] = attribute
    return attribute


def __dir__() -> list[str]:
    """Return the names of the module, those not imported yet among them."""
    return sorted({*globals(), *__all__})
