"""The table of all keys of a DeepSpeed configuration, with the support of each.

HONOURED: it has an effect. NO_MEANING: it tunes or observes machinery that does not exist here, and
training computes the same without it; logged once. REFUSED: it would change what is computed or
stored, so any value but its ``off`` one is an error with advice.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

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
    honoured,
    idle,
    number,
    one_of,
    positive,
    refused,
    section,
    whole,
    with_prefix,
)
from tensorstow.doorkit.keyword_table import Support

_DEVICE = one_of("none", "cpu", "nvme")
_DTYPE = one_of("fp16", "bf16", "fp32")
_DTYPES = one_of(
    *("fp16", "float16", "half", "bf16", "bfloat16", "fp32", "float32", "float"),
    *("torch.float16", "torch.bfloat16", "torch.float32"),
)
_Z = "zero_optimization."
_OO, _OP = f"{_Z}offload_optimizer.", f"{_Z}offload_param."
_AC, _CK = "activation_checkpointing.", "checkpoint."

_BATCH = [
    honoured("train_batch_size", whole(1), off=None),
    honoured("train_micro_batch_size_per_gpu", whole(1), off=None),
    honoured("gradient_accumulation_steps", whole(1), off=None),
    honoured("managed_gradient_accumulation", BOOL, off=True),
    honoured("dataloader_drop_last", BOOL, off=False),
]

_OPTIMIZER = [
    honoured("optimizer.type", TEXT, off=None),
    honoured("optimizer.params", OBJECT, off=None),
    *idle("optimizer.", BOOL, "legacy_fusion", why="there is one fused update", off=False),
    *idle("optimizer.", BOOL, "torch_adam", why="it is a key of optimizer.params", off=False),
    honoured("scheduler.type", TEXT, off=None),
    honoured("scheduler.params", OBJECT, off=None),
    honoured("gradient_clipping", number(), off=0.0),
    honoured("zero_allow_untested_optimizer", BOOL, off=False),
    *idle("", BOOL, "zero_force_ds_cpu_optimizer", why="torch's optimizers are taken"),
]

_PRECISION = [
    honoured("fp16.enabled", BOOL, off=False),
    honoured("fp16.loss_scale", number(), off=0.0),
    honoured("fp16.initial_scale_power", whole(0, 127), off=16),
    honoured("fp16.loss_scale_window", ANY_WHOLE, off=1000),
    honoured("fp16.hysteresis", whole(1), off=2),
    honoured("fp16.consecutive_hysteresis", BOOL, off=False),
    honoured("fp16.min_loss_scale", ANY_NUMBER, off=1.0),
    refused("fp16.auto_cast", BOOL, off=False, instead="cast inputs to half in the model"),
    refused(
        "fp16.fp16_master_weights_and_grads",
        BOOL,
        off=False,
        instead="leave it out: masters are exact, and 10 bytes per element hold all states",
    ),
    honoured("bf16.enabled", BOOL, off=False),
    *idle("bf16.", BOOL, "immediate_grad_update", why="gradients leave as they come"),
    replace(honoured("bf16.check_grad_overflow", BOOL, off=False), also=("bf16.check_overflow",)),
    *(
        refused(
            f"bf16.{name}",
            BOOL,
            off=False,
            instead='stow() the model by partial(tensorstow.AdamW, state_format="bf16")',
        )
        for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states")
    ),
    section("amp", instead='use {"bf16": {"enabled": true}}'),
    honoured("torch_autocast.enabled", BOOL, off=False),
    honoured("torch_autocast.dtype", _DTYPES, off=None),
    *idle(
        "torch_autocast.",
        ANYTHING,
        "lower_precision_safe_modules",
        why="gradients are reduced in fp32, whatever the module",
    ),
    honoured("communication_data_type", _DTYPE, off=None),
    *idle("data_types.", _DTYPES, "grad_accum_dtype", why="micro-batches are summed in fp32"),
    *(
        refused(f"data_types.{name}", _DTYPES, off=None, instead="cast the model before initialize")
        for name in ("param_dtype", "buffer_dtype")
    ),
    *idle("data_types.", ANYTHING, "keep_in_fp32_modules", why="buffers keep their dtype"),
]

_REDUCTION = [
    *idle("", BOOL, "prescale_gradients", why="a mean is taken when gradients are reduced"),
    *idle("", positive(), "gradient_predivide_factor", why="gradients are reduced to a mean"),
    honoured("gradient_allreduce_op", one_of("mean", "sum"), off="mean"),
    *idle("", BOOL, "disable_allgather", why="FSDP2 gathers"),
    refused("sparse_gradients", BOOL, off=False, instead="use dense embeddings (sparse=False)"),
    refused("sequence_parallel_size", whole(1), off=1, instead="split sequences in the model"),
    *idle("", _DTYPE, "seq_parallel_communication_data_type", why="sequences are not split"),
]

_ZERO = [
    honoured(f"{_Z}stage", whole(0, 3), off=0),
    *idle(
        _Z,
        BOOL,
        "contiguous_gradients",
        "reduce_scatter",
        "use_multi_rank_bucket_allreduce",
        "allgather_partitions",
        "round_robin_gradients",
        "parameter_alignment",
        why="FSDP2 lays out shards and reduces gradients by unit",
    ),
    *idle(
        _Z,
        whole(0),
        "reduce_bucket_size",
        "allgather_bucket_size",
        why="a unit of the model is what is gathered and reduced at once",
    ),
    *idle("", whole(0), "allgather_size", why="a unit of the model is gathered at once"),
    *idle(_Z, BOOL, "overlap_comm", why="FSDP2 overlaps collectives with computation"),
    *idle(_Z, BOOL, "compute_grad_norm", why="a norm is computed when it is asked for"),
    *idle(_Z, BOOL, "load_from_fp32_weights", why="masters are restored exactly"),
    *idle(_Z, BOOL, "elastic_checkpoint", "legacy_stage1", why="a format of older DeepSpeeds"),
    *idle(_Z, BOOL, "grad_hooks", why="gradients leave by hooks in any case"),
    *idle(_Z, BOOL, "ignore_unused_parameters", why="a parameter without gradient is left as is"),
    *idle(_Z, whole(0), "sub_group_size", why="states move in chunks of a few MiB"),
    *idle(_Z, BOOL, "save_muon_momentum_buffer_in_memory", why="a budget decides what stays"),
    *idle(_Z, BOOL, "memory_efficient_linear", why="torch's linear layers keep no more"),
    *idle(_Z, BOOL, "pipeline_loading_checkpoint", why="checkpoints are read by parts always"),
    *idle(_Z, BOOL, "override_module_apply", why="modules are not patched"),
    *idle(_Z, BOOL, "log_trace_cache_warnings", why="there is no trace"),
    honoured(f"{_Z}enable_sanity_checks", BOOL, off=False),
    *idle(f"{_Z}leaf_module.", ANYTHING, "*", why="a whole block is gathered at once already"),
    *idle(_Z, BOOL, "cpu_offload_use_pin_memory", why="host memory is pinned where that helps"),
    *idle(
        _Z,
        whole(0),
        "zero_hpz_partition_size",
        why="weights are gathered from the shards of all ranks",
        off=1,
    ),
    honoured(f"{_Z}mics_shard_size", whole(-1), off=-1),
    *idle(_Z, BOOL, "mics_hierarchical_params_gather", why="NCCL knows the topology"),
    *(
        refused(
            f"{_Z}{name}",
            BOOL,
            off=False,
            instead="leave it out: what travels is not rounded",
        )
        for name in (
            "zero_quantized_weights",
            "zero_quantized_nontrainable_weights",
            "zero_quantized_gradients",
        )
    ),
    section(f"{_Z}zeropp_loco_param", instead="leave it out: gradients are not rounded"),
    section(
        f"{_Z}zenflow",
        instead="leave it out: updates are exact, and run during passes where they can",
    ),
]

_STAGE3 = with_prefix(
    "stage3_",
    [
        *idle(
            f"{_Z}stage3_",
            number(),
            "prefetch_bucket_size",  # of TRL 0.9 times a square, as it comes
            why="units are fetched and let go in their order, not by counts of elements",
        ),
        *idle(
            f"{_Z}stage3_",
            whole(0),
            "max_live_parameters",
            "max_reuse_distance",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "module_granularity_threshold",
            why="units are fetched and let go in their order, not by counts of elements",
        ),
        *idle(
            f"{_Z}stage3_",
            BOOL,
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
            why="FSDP2 gathers",
        ),
        *idle(
            f"{_Z}stage3_",
            BOOL,
            "gather_16bit_weights_on_model_save",
            "gather_fp16_weights_on_model_save",
            why="save_16bit_model() gathers whenever it is called",
        ),
    ],
)

_OFFLOAD = [
    honoured(f"{_OO}device", _DEVICE, off="none"),
    honoured(f"{_OO}nvme_path", TEXT, off=None),
    honoured(f"{_OO}ratio", number(0.0, 1.0), off=1.0),
    *idle(_OO, whole(0), "buffer_count", why="the ring has room for what is in flight"),
    *idle(_OO, BOOL, "pin_memory", why="host memory is pinned where that helps"),
    *idle(_OO, BOOL, "pipeline", "pipeline_read", "pipeline_write", why="I/O overlaps always"),
    *idle(_OO, BOOL, "fast_init", why="states are zero until they are written"),
    *idle(_OO, BOOL, "super_offload", why="updates run during passes where they can"),
    *idle(_OO, number(0.0, 1.0), "cpuadam_cores_perc", why="threads follow the cores allowed"),
    honoured(f"{_OP}device", _DEVICE, off="none"),
    honoured(f"{_OP}nvme_path", TEXT, off=None),
    honoured(f"{_OP}max_in_cpu", whole(0), off=1_000_000_000),
    *idle(_OP, whole(0), "buffer_count", "buffer_size", why="a buffer holds the largest unit"),
    *idle(_OP, BOOL, "pin_memory", why="host memory is pinned where that helps"),
    *idle(
        "aio.", whole(1), "block_size", why="transfers are cut into blocks of 1 MiB", off=1 << 20
    ),
    honoured("aio.queue_depth", whole(1), off=None),
    Key(
        "aio.intra_op_parallelism",
        whole(1),
        1,
        Support.NO_MEANING,
        "the kernel works on many transfers for one thread",
        ("aio.thread_count", "aio.num_threads"),
    ),
    *idle("aio.", BOOL, "single_submit", "overlap_events", why="transfers are submitted together"),
    *idle("aio.", BOOL, "use_gds", why="what the host updates passes through its memory"),
]

_CHECKPOINTS = [
    *idle(
        _AC, BOOL, "partition_activations", why="one model-parallel rank keeps the whole", off=False
    ),
    honoured(f"{_AC}cpu_checkpointing", BOOL, off=False),
    *idle(_AC, whole(1), "number_checkpoints", why="each call of checkpoint() is one"),
    *idle(_AC, BOOL, "contiguous_memory_optimization", why="torch's allocator is kept"),
    *idle(_AC, BOOL, "synchronize_checkpoint_boundary", "profile", why="use torch.profiler"),
    *idle(
        _CK,
        one_of("ignore", "warn", "fail"),
        "tag_validation",
        why="different tags on ranks are an error",
    ),
    honoured(f"{_CK}load_universal", BOOL, off=False),
    *idle(_CK, BOOL, "use_node_local_storage", why="ranks write into the directory of the call"),
    *idle(f"{_CK}parallel_write.", BOOL, "pipeline_stage", why="there are no pipeline stages"),
    *idle(_CK, ANYTHING, "checkpoint_serialization", "writer", why="there is one way of writing"),
    *idle("", ANYTHING, "nebula", "datastates_ckpt", why="there is one way of writing"),
]

_WATCHING = [
    honoured("steps_per_print", STEPS, off=10),
    honoured("wall_clock_breakdown", BOOL, off=False),
    *idle("", BOOL, "memory_breakdown", why="use torch.cuda.memory_summary()"),
    *idle("", BOOL, "dump_state", why="print deepspeed.summary_of(config)"),
    honoured("log_level", one_of("debug", "info", "warning", "error", "critical"), off=None),
    *(
        key
        for name in ("tensorboard", "csv_monitor")
        for key in (
            honoured(f"{name}.enabled", BOOL, off=False),
            honoured(f"{name}.output_path", STRING, off=""),
            honoured(f"{name}.job_name", TEXT, off="DeepSpeedJobName"),
        )
    ),
    honoured("wandb.enabled", BOOL, off=False),
    honoured("wandb.group", STRING, off=None),
    honoured("wandb.team", STRING, off=None),
    honoured("wandb.project", TEXT, off="deepspeed"),
    section("comet", instead="use tensorboard, csv_monitor or wandb"),
    *idle("flops_profiler", ANYTHING, ".*", why="use torch.utils.flop_counter"),
    *idle("comms_logger", ANYTHING, ".*", why="use torch.profiler"),
    *idle("timers", ANYTHING, ".*", why="wall_clock_breakdown is what is measured"),
    *idle("", BOOL, "disable_python_gc", why="call gc.disable() yourself"),
    *idle("", whole(0), "seed", why="call torch.manual_seed() yourself"),
    *idle("", whole(1), "vocabulary_size", why="only its alignment was checked"),
]

_OTHER = [
    section("elasticity", instead="write the batch sizes of this run"),
    section("autotuning", instead='let stow(plan="auto") choose the places'),
    section("compression_training", instead="compress the model after training"),
    section("data_efficiency", instead="order the data in your own sampler"),
    section("curriculum_learning", instead="order the data in your own sampler"),
    section("progressive_layer_drop", instead="drop layers in the model"),
    section("eigenvalue", instead="leave it out: it served quantized training only"),
    section("quantize_training", instead="use torchao for quantized training"),
    section("weight_quantization", instead="use torchao for quantized weights"),
    section("sparse_attention", instead="use torch's flex_attention in the model"),
    section("hybrid_engine", instead="generate with the module, or another engine"),
    section("expert_parallel", instead="leave it out: experts are sharded as other parameters are"),
    refused(
        "tensor_parallel.autotp_size",
        whole(0),
        off=0,
        instead="leave it out: the engine shards whole parameters, and takes no DTensors",
    ),
    *idle("tensor_parallel", ANYTHING, ".*", why="autotp_size is 0"),
    *idle("", BOOL, "use_data_before_expert_parallelism", why="experts are not split"),
    *idle("pipeline", ANYTHING, ".*", why="there are no pipeline stages"),
    *idle("compile", ANYTHING, ".*", why="compile the model's blocks by torch.compile"),
    *idle("graph_harvesting", ANYTHING, "", why="use torch.compile"),
]

KEYS: Final = MappingProxyType(
    {
        key.path: key
        for key in (
            *_BATCH,
            *_OPTIMIZER,
            *_PRECISION,
            *_REDUCTION,
            *_ZERO,
            *_STAGE3,
            *_OFFLOAD,
            *_CHECKPOINTS,
            *_WATCHING,
            *_OTHER,
        )
    }
)
SPELLINGS: Final = MappingProxyType(
    {name: key.path for key in KEYS.values() for name in (*key.spellings, *key.also)}
)
# Sections that have another path with everything in them.
SECTIONS: Final = MappingProxyType({"bfloat16": "bf16", f"{_Z}aio": "aio"})
# Old switches that set a value of another key.
SWITCHES: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "fp32_allreduce": ("communication_data_type", "fp32"),
        f"{_Z}cpu_offload": (f"{_OO}device", "cpu"),
        f"{_Z}cpu_offload_param": (f"{_OP}device", "cpu"),
        f"{_Z}cpu_offload_params": (f"{_OP}device", "cpu"),
    }
)
