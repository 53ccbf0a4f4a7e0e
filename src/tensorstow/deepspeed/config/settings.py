"""``Settings``: a DeepSpeed configuration as typed values, and all keys that it has.

HONOURED: a key has an effect. NO_MEANING: it tunes or observes machinery that does not exist here,
and training computes the same without it; logged once. REFUSED: it would change what is computed or
stored, so any value but its ``off`` one is an error with advice. See [Note: One section].
"""

# ruff: noqa: RUF009  # settings and parts are fields

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal

from tensorstow.base.fields import PositiveFloat, PositiveInt, read_value
from tensorstow.deepspeed.config.key import (
    ANY_NUMBER,
    ANY_WHOLE,
    ANYTHING,
    BOOL,
    OBJECT,
    STEPS,
    STRING,
    TEXT,
    Key,
    Keys,
    idle,
    keys_of,
    number,
    one_of,
    optional,
    part,
    positive,
    refused,
    refused_sections,
    setting,
    whole,
)
from tensorstow.doorkit.keyword_table import Support

Device = Literal["none", "cpu", "nvme"]

_DEVICE = one_of("none", "cpu", "nvme")
_DTYPE = one_of("fp16", "bf16", "fp32")
_DTYPES = one_of(
    *("fp16", "float16", "half", "bf16", "bfloat16", "fp32", "float32", "float"),
    *("torch.float16", "torch.bfloat16", "torch.float32"),
)
_WHERE_IT_HELPS = "host memory is pinned where that helps"
_IN_ORDER = "units are fetched and let go in their order, not by counts of elements"
_WHEN_CALLED = "save_16bit_model() gathers whenever it is called"


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

    other_keys: ClassVar[Keys] = (Key("type", TEXT), Key("params", OBJECT))


@dataclass(frozen=True, slots=True)
class Fp16:
    """Half precision with loss scaling; ``loss_scale`` 0 is dynamic.

    Raises:
        OptionError: A number that a dynamic scale cannot have.
    """

    loss_scale: float = setting(number(), 0.0)
    initial_scale_power: int = setting(whole(0, 127), 16)
    loss_scale_window: int = setting(ANY_WHOLE, 1000)
    hysteresis: int = setting(whole(1), 2)
    consecutive_hysteresis: bool = setting(BOOL, off=False)
    min_loss_scale: float = setting(ANY_NUMBER, 1.0)

    other_keys: ClassVar[Keys] = (
        Key("enabled", BOOL, off=False),
        *refused(BOOL, "auto_cast", off=False, instead="cast inputs to half in the model"),
        *refused(
            BOOL,
            "fp16_master_weights_and_grads",
            off=False,
            instead="leave it out: masters are exact, and 10 bytes per element hold all states",
        ),
    )

    def __post_init__(self) -> None:
        """Check a dynamic scale. A static one ignores these numbers, as upstream."""
        if self.loss_scale == 0.0:
            read_value(PositiveInt, self.loss_scale_window, "fp16.loss_scale_window")
            read_value(PositiveFloat, self.min_loss_scale, "fp16.min_loss_scale")


@dataclass(frozen=True, slots=True)
class Autocast:
    """The section ``torch_autocast``: a dtype around forward."""

    enabled: bool = setting(BOOL, off=False)
    dtype: str | None = setting(_DTYPES)

    other_keys: ClassVar[Keys] = idle(
        ANYTHING,
        "lower_precision_safe_modules",
        why="gradients are reduced in fp32, whatever the module",
    )


@dataclass(frozen=True, slots=True)
class OffloadOptimizer:
    """The device of optimizer states; ``ratio`` is the share of them that the CPU updates."""

    device: Device = setting(_DEVICE, "none")
    nvme_path: str | None = setting(TEXT)
    ratio: float = setting(number(0.0, 1.0), 1.0)

    other_keys: ClassVar[Keys] = (
        *idle(whole(), "buffer_count", why="the ring has room for what is in flight"),
        *idle(BOOL, "pin_memory", why=_WHERE_IT_HELPS),
        *idle(BOOL, "pipeline", "pipeline_read", "pipeline_write", why="I/O overlaps always"),
        *idle(BOOL, "fast_init", why="states are zero until they are written"),
        *idle(BOOL, "super_offload", why="updates run during passes where they can"),
        *idle(number(0.0, 1.0), "cpuadam_cores_perc", why="threads follow the cores allowed"),
    )


@dataclass(frozen=True, slots=True)
class OffloadParam:
    """The device of parameters; ``max_in_cpu``: elements of those on disk kept in host memory."""

    device: Device = setting(_DEVICE, "none")
    nvme_path: str | None = setting(TEXT)
    max_in_cpu: int = setting(whole(), 1_000_000_000)

    other_keys: ClassVar[Keys] = (
        *idle(whole(), "buffer_count", "buffer_size", why="a buffer holds the largest unit"),
        *idle(BOOL, "pin_memory", why=_WHERE_IT_HELPS),
    )


@dataclass(frozen=True, slots=True)
class Zero:
    """The section ``zero_optimization``."""

    stage: int = setting(whole(0, 3), 0)
    offload_optimizer: OffloadOptimizer = part(OffloadOptimizer, "offload_optimizer")
    offload_param: OffloadParam = part(OffloadParam, "offload_param")
    enable_sanity_checks: bool = setting(BOOL, off=False)
    """Whether a write inside of ``GatheredParameters`` that is dropped is an error."""
    mics_shard_size: int = setting(whole(-1), -1)
    stage3_gather_16bit_weights_on_model_save: bool | None = setting(
        BOOL,
        support=Support.NO_MEANING,
        note=_WHEN_CALLED,
        also=("gather_16bit_weights_on_model_save",),
    )

    other_keys: ClassVar[Keys] = (
        *idle(
            BOOL,
            *("contiguous_gradients", "reduce_scatter", "use_multi_rank_bucket_allreduce"),
            *("allgather_partitions", "round_robin_gradients", "parameter_alignment"),
            why="FSDP2 lays out shards and reduces gradients by unit",
        ),
        *idle(
            whole(),
            "reduce_bucket_size",
            "allgather_bucket_size",
            why="a unit of the model is what is gathered and reduced at once",
        ),
        *idle(BOOL, "overlap_comm", why="FSDP2 overlaps collectives with computation"),
        *idle(BOOL, "compute_grad_norm", why="a norm is computed when it is asked for"),
        *idle(BOOL, "load_from_fp32_weights", why="masters are restored exactly"),
        *idle(BOOL, "elastic_checkpoint", "legacy_stage1", why="a format of older DeepSpeeds"),
        *idle(BOOL, "grad_hooks", why="gradients leave by hooks in any case"),
        *idle(BOOL, "ignore_unused_parameters", why="a parameter without gradient is left as is"),
        *idle(whole(), "sub_group_size", why="states move in chunks of a few MiB"),
        *idle(BOOL, "save_muon_momentum_buffer_in_memory", why="a budget decides what stays"),
        *idle(BOOL, "memory_efficient_linear", why="torch's linear layers keep no more"),
        *idle(BOOL, "pipeline_loading_checkpoint", why="checkpoints are read by parts always"),
        *idle(BOOL, "override_module_apply", why="modules are not patched"),
        *idle(BOOL, "log_trace_cache_warnings", why="there is no trace"),
        *idle(ANYTHING, "leaf_module.*", why="a whole block is gathered at once already"),
        *idle(BOOL, "cpu_offload_use_pin_memory", why=_WHERE_IT_HELPS),
        *idle(
            whole(),
            "zero_hpz_partition_size",
            why="weights are gathered from the shards of all ranks",
            off=1,
        ),
        *idle(BOOL, "mics_hierarchical_params_gather", why="NCCL knows the topology"),
        *(
            replace(key, path=f"stage3_{key.path}", also=(key.path,))
            for key in (
                # Of TRL 0.9 times a square, as it comes.
                *idle(number(), "prefetch_bucket_size", why=_IN_ORDER),
                *idle(
                    whole(),
                    *("max_live_parameters", "max_reuse_distance", "param_persistence_threshold"),
                    *("model_persistence_threshold", "module_granularity_threshold"),
                    why=_IN_ORDER,
                ),
                *idle(BOOL, "use_all_reduce_for_fetch_params", why="FSDP2 gathers"),
                *idle(BOOL, "allgather_sequential", why="FSDP2 gathers"),
                *idle(BOOL, "gather_fp16_weights_on_model_save", why=_WHEN_CALLED),
            )
        ),
        *refused(
            BOOL,
            *("zero_quantized_weights", "zero_quantized_nontrainable_weights"),
            "zero_quantized_gradients",
            off=False,
            instead="leave it out: what travels is not rounded",
        ),
        *refused_sections("zeropp_loco_param", instead="leave it out: gradients are not rounded"),
        *refused_sections(
            "zenflow",
            instead="leave it out: updates are exact, and run during passes where they can",
        ),
    )


@dataclass(frozen=True, slots=True)
class Aio:
    """The section ``aio``: blocks in flight per rank."""

    queue_depth: int | None = setting(whole(1))

    other_keys: ClassVar[Keys] = (
        *idle(whole(1), "block_size", why="transfers are cut into blocks of 1 MiB", off=1 << 20),
        Key(
            "intra_op_parallelism",
            whole(1),
            1,
            Support.NO_MEANING,
            "the kernel works on many transfers for one thread",
            ("thread_count", "num_threads"),
        ),
        *idle(BOOL, "single_submit", "overlap_events", why="transfers are submitted together"),
        *idle(BOOL, "use_gds", why="what the host updates passes through its memory"),
    )


@dataclass(frozen=True, slots=True)
class ActivationCheckpointing:
    """The section ``activation_checkpointing``."""

    cpu_checkpointing: bool = setting(BOOL, off=False)

    other_keys: ClassVar[Keys] = (
        *idle(
            BOOL, "partition_activations", why="one model-parallel rank keeps the whole", off=False
        ),
        *idle(whole(1), "number_checkpoints", why="each call of checkpoint() is one"),
        *idle(BOOL, "contiguous_memory_optimization", why="torch's allocator is kept"),
        *idle(BOOL, "synchronize_checkpoint_boundary", "profile", why="use torch.profiler"),
    )


@dataclass(frozen=True, slots=True)
class MonitorFiles:
    """The section ``tensorboard`` or ``csv_monitor``."""

    enabled: bool = setting(BOOL, off=False)
    output_path: str = setting(STRING, "")
    job_name: str = setting(TEXT, "DeepSpeedJobName")


@dataclass(frozen=True, slots=True)
class WandbMonitor:
    """The section ``wandb``."""

    enabled: bool = setting(BOOL, off=False)
    group: str | None = setting(STRING)
    team: str | None = setting(STRING)
    project: str = setting(TEXT, "deepspeed")


@dataclass(frozen=True, slots=True)
class Settings:
    """A whole configuration, checked; None for a section that is absent or disabled."""

    batch: Batch
    managed_accumulation: bool = setting(BOOL, off=True, path="managed_gradient_accumulation")
    """Whether ``step()`` is called after each micro-batch; False: after the last of a step."""
    dataloader_drop_last: bool = setting(BOOL, off=False)
    optimizer: Named | None = optional(Named, "optimizer")
    scheduler: Named | None = optional(Named, "scheduler")
    gradient_clipping: float = setting(number(), 0.0)
    allows_untested_optimizer: bool = setting(BOOL, off=False, path="zero_allow_untested_optimizer")
    """Whether a class is declared to update each parameter by itself."""
    fp16: Fp16 | None = optional(Fp16, "fp16")
    bf16: bool = setting(BOOL, off=False, path="bf16.enabled")
    check_grad_overflow: bool = setting(
        BOOL, off=False, path="bf16.check_grad_overflow", also=("bf16.check_overflow",)
    )
    """Whether bf16 steps whose gradients are not finite must be skipped."""
    torch_autocast: Autocast = part(Autocast, "torch_autocast")
    communication_data_type: str | None = setting(_DTYPE)
    gradient_allreduce_op: str = setting(one_of("mean", "sum"), "mean")
    zero: Zero = part(Zero, "zero_optimization")
    aio: Aio = part(Aio, "aio")
    activation_checkpointing: ActivationCheckpointing = part(
        ActivationCheckpointing, "activation_checkpointing"
    )
    load_universal: bool = setting(BOOL, off=False, path="checkpoint.load_universal")
    """Whether ``load_checkpoint`` takes the tag in ``latest_universal`` where none is given."""
    steps_per_print: int = setting(STEPS, 10)
    wall_clock_breakdown: bool = setting(BOOL, off=False)
    log_level: str | None = setting(one_of("debug", "info", "warning", "error", "critical"))
    """A name of one of ``logging``'s levels, in small letters."""
    tensorboard: MonitorFiles = part(MonitorFiles, "tensorboard")
    csv_monitor: MonitorFiles = part(MonitorFiles, "csv_monitor")
    wandb: WandbMonitor = part(WandbMonitor, "wandb")

    other_keys: ClassVar[Keys] = (
        Key("train_batch_size", whole(1)),
        Key("train_micro_batch_size_per_gpu", whole(1)),
        Key("gradient_accumulation_steps", whole(1)),
        *idle(BOOL, "optimizer.legacy_fusion", why="there is one fused update", off=False),
        *idle(BOOL, "optimizer.torch_adam", why="it is a key of optimizer.params", off=False),
        *idle(BOOL, "zero_force_ds_cpu_optimizer", why="torch's optimizers are taken"),
        *idle(BOOL, "bf16.immediate_grad_update", why="gradients leave as they come"),
        *refused(
            BOOL,
            "bf16.bf16_master_weights_and_grads",
            "bf16.bf16_optimizer_states",
            off=False,
            instead='stow() the model by partial(tensorstow.AdamW, state_format="bf16")',
        ),
        *refused_sections("amp", instead='use {"bf16": {"enabled": true}}'),
        *idle(_DTYPES, "data_types.grad_accum_dtype", why="micro-batches are summed in fp32"),
        *refused(
            _DTYPES,
            "data_types.param_dtype",
            "data_types.buffer_dtype",
            off=None,
            instead="cast the model before initialize",
        ),
        *idle(ANYTHING, "data_types.keep_in_fp32_modules", why="buffers keep their dtype"),
        *idle(BOOL, "prescale_gradients", why="a mean is taken when gradients are reduced"),
        *idle(positive(), "gradient_predivide_factor", why="gradients are reduced to a mean"),
        *idle(BOOL, "disable_allgather", why="FSDP2 gathers"),
        *idle(whole(), "allgather_size", why="a unit of the model is gathered at once"),
        *refused(
            BOOL, "sparse_gradients", off=False, instead="use dense embeddings (sparse=False)"
        ),
        *refused(whole(1), "sequence_parallel_size", off=1, instead="split sequences in the model"),
        *idle(_DTYPE, "seq_parallel_communication_data_type", why="sequences are not split"),
        *idle(
            one_of("ignore", "warn", "fail"),
            "checkpoint.tag_validation",
            why="different tags on ranks are an error",
        ),
        *idle(
            BOOL,
            "checkpoint.use_node_local_storage",
            why="ranks write into the directory of the call",
        ),
        *idle(BOOL, "checkpoint.parallel_write.pipeline_stage", why="there are no pipeline stages"),
        *idle(
            ANYTHING,
            *("checkpoint.checkpoint_serialization", "checkpoint.writer", "nebula"),
            "datastates_ckpt",
            why="there is one way of writing",
        ),
        *idle(BOOL, "memory_breakdown", why="use torch.cuda.memory_summary()"),
        *idle(BOOL, "dump_state", why="print deepspeed.summary_of(config)"),
        *refused_sections("comet", instead="use tensorboard, csv_monitor or wandb"),
        *idle(ANYTHING, "flops_profiler.*", why="use torch.utils.flop_counter"),
        *idle(ANYTHING, "comms_logger.*", why="use torch.profiler"),
        *idle(ANYTHING, "timers.*", why="wall_clock_breakdown is what is measured"),
        *idle(BOOL, "disable_python_gc", why="call gc.disable() yourself"),
        *idle(whole(), "seed", why="call torch.manual_seed() yourself"),
        *idle(whole(1), "vocabulary_size", why="only its alignment was checked"),
        *refused_sections("elasticity", instead="write the batch sizes of this run"),
        *refused_sections("autotuning", instead='let stow(plan="auto") choose the places'),
        *refused_sections("compression_training", instead="compress the model after training"),
        *refused_sections(
            "data_efficiency", "curriculum_learning", instead="order the data in your own sampler"
        ),
        *refused_sections("progressive_layer_drop", instead="drop layers in the model"),
        *refused_sections("eigenvalue", instead="leave it out: it served quantized training only"),
        *refused_sections("quantize_training", instead="use torchao for quantized training"),
        *refused_sections("weight_quantization", instead="use torchao for quantized weights"),
        *refused_sections("sparse_attention", instead="use torch's flex_attention in the model"),
        *refused_sections("hybrid_engine", instead="generate with the module, or another engine"),
        *refused_sections(
            "expert_parallel", instead="leave it out: experts are sharded as other parameters are"
        ),
        *refused(
            whole(),
            "tensor_parallel.autotp_size",
            off=0,
            instead="leave it out: the engine shards whole parameters, and takes no DTensors",
        ),
        *idle(ANYTHING, "tensor_parallel.*", why="autotp_size is 0"),
        *idle(BOOL, "use_data_before_expert_parallelism", why="experts are not split"),
        *idle(ANYTHING, "pipeline.*", why="there are no pipeline stages"),
        *idle(ANYTHING, "compile.*", why="compile the model's blocks by torch.compile"),
        *idle(ANYTHING, "graph_harvesting", why="use torch.compile"),
    )


KEYS: Final = MappingProxyType({key.path: key for key in keys_of(Settings)})
SPELLINGS: Final = MappingProxyType(
    {name: key.path for key in KEYS.values() for name in (*key.spellings, *key.also)}
)
# Sections that have another path with everything in them.
SECTIONS: Final = MappingProxyType({"bfloat16": "bf16", "zero_optimization.aio": "aio"})
# Old switches that set a value of another key.
SWITCHES: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "fp32_allreduce": ("communication_data_type", "fp32"),
        "zero_optimization.cpu_offload": ("zero_optimization.offload_optimizer.device", "cpu"),
        "zero_optimization.cpu_offload_param": ("zero_optimization.offload_param.device", "cpu"),
        "zero_optimization.cpu_offload_params": ("zero_optimization.offload_param.device", "cpu"),
    }
)
