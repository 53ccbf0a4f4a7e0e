"""``Settings``: a DeepSpeed configuration as typed values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Device = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch sizes: ``train = micro * accumulation * world``."""

    train: int
    micro: int
    accumulation: int


@dataclass(frozen=True, slots=True)
class Named:
    """An optimizer or a scheduler: its type in the JSON, and its parameters."""

    type: str
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fp16:
    """Half precision with loss scaling; ``loss_scale`` 0 is dynamic."""

    loss_scale: float = 0.0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class OffloadOptimizer:
    """The device of optimizer states; ``ratio`` is the share of them that the CPU updates."""

    device: Device = "none"
    nvme_path: str | None = None
    ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class OffloadParam:
    """The device of parameters; ``max_in_cpu``: elements of those on disk kept in host memory."""

    device: Device = "none"
    nvme_path: str | None = None
    max_in_cpu: int = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Zero:
    """The section ``zero_optimization``."""

    stage: int = 0
    offload_optimizer: OffloadOptimizer = field(default_factory=OffloadOptimizer)
    offload_param: OffloadParam = field(default_factory=OffloadParam)
    enable_sanity_checks: bool = False
    """Whether a write inside of ``GatheredParameters`` that is dropped is an error."""
    hpz_partition_size: int = 1
    mics_shard_size: int = -1


@dataclass(frozen=True, slots=True)
class Aio:
    """The section ``aio``: bytes of a block, blocks in flight per rank, threads."""

    block_size: int = 1 << 20
    queue_depth: int | None = None
    threads: int = 1


@dataclass(frozen=True, slots=True)
class ActivationCheckpointing:
    """The section ``activation_checkpointing``."""

    partition_activations: bool = False
    cpu_checkpointing: bool = False
    number_checkpoints: int | None = None


@dataclass(frozen=True, slots=True)
class MonitorFiles:
    """The section ``tensorboard`` or ``csv_monitor``."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


@dataclass(frozen=True, slots=True)
class WandbMonitor:
    """The section ``wandb``."""

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


@dataclass(frozen=True, slots=True)
class Settings:
    """A whole configuration, checked; None for a section that is absent or disabled."""

    batch: Batch
    managed_accumulation: bool = True
    """Whether ``step()`` is called after each micro-batch; False: after the last of a step."""
    sums_gradients: bool = False
    """Whether gradients are summed over ranks; False: averaged."""
    optimizer: Named | None = None
    allows_untested_optimizer: bool = False
    """Whether a class is declared to update each parameter by itself."""
    scheduler: Named | None = None
    fp16: Fp16 | None = None
    bf16: bool = False
    check_grad_overflow: bool = False
    """Whether bf16 steps whose gradients are not finite must be skipped."""
    autocast: torch.dtype | None = None
    """The dtype of ``torch.autocast`` around forward; None: there is none."""
    gradient_clipping: float = 0.0
    zero: Zero = field(default_factory=Zero)
    aio: Aio = field(default_factory=Aio)
    activation_checkpointing: ActivationCheckpointing = field(
        default_factory=ActivationCheckpointing
    )
    steps_per_print: int = 10
    wall_clock_breakdown: bool = False
    log_level: str | None = None
    """A name of one of ``logging``'s levels, in small letters."""
    tensorboard: MonitorFiles = field(default_factory=MonitorFiles)
    csv_monitor: MonitorFiles = field(default_factory=MonitorFiles)
    wandb: WandbMonitor = field(default_factory=WandbMonitor)
    dataloader_drop_last: bool = False
    load_universal: bool = False
    """Whether ``load_checkpoint`` takes the tag in ``latest_universal`` where none is given."""
