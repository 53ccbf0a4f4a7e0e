"""The table of keys agrees with itself, with Settings, and with what it promises to cover."""

from dataclasses import fields

from tensorstow.deepspeed.config.reading import read_settings
from tensorstow.deepspeed.config.settings import (
    KEYS,
    SECTIONS,
    SPELLINGS,
    SWITCHES,
    Aio,
    Batch,
    Fp16,
    Settings,
)
from tensorstow.doorkit.keyword_table import Support

# What a configuration may name, of all versions whose documents are at hand.
COVERED = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps steps_per_print
wall_clock_breakdown dump_state optimizer.type optimizer.params optimizer.legacy_fusion
scheduler.type scheduler.params fp16.enabled fp16.auto_cast fp16.loss_scale
fp16.initial_scale_power fp16.loss_scale_window fp16.hysteresis fp16.consecutive_hysteresis
fp16.min_loss_scale fp16.fp16_master_weights_and_grads bf16.enabled bf16.immediate_grad_update
bf16.check_grad_overflow bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states amp.*
torch_autocast.enabled torch_autocast.dtype torch_autocast.lower_precision_safe_modules
gradient_clipping prescale_gradients gradient_predivide_factor
gradient_allreduce_op communication_data_type data_types.grad_accum_dtype
zero_allow_untested_optimizer zero_force_ds_cpu_optimizer sparse_gradients sparse_attention.*
elasticity.* autotuning.* compression_training.* data_efficiency.* curriculum_learning.*
eigenvalue.* pipeline.* tensor_parallel.autotp_size hybrid_engine.* seed
tensorboard.enabled tensorboard.output_path tensorboard.job_name
wandb.enabled wandb.project wandb.group wandb.team
csv_monitor.enabled csv_monitor.output_path csv_monitor.job_name
comet.* flops_profiler.* comms_logger.* compile.* nebula dataloader_drop_last
checkpoint.tag_validation checkpoint.load_universal checkpoint.use_node_local_storage
checkpoint.parallel_write.pipeline_stage checkpoint.writer aio.block_size aio.queue_depth
aio.intra_op_parallelism aio.single_submit aio.overlap_events aio.use_gds
activation_checkpointing.partition_activations activation_checkpointing.cpu_checkpointing
activation_checkpointing.contiguous_memory_optimization
activation_checkpointing.number_checkpoints activation_checkpointing.profile
activation_checkpointing.synchronize_checkpoint_boundary
"""
ZERO = """
stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
allgather_partitions allgather_bucket_size overlap_comm load_from_fp32_weights elastic_checkpoint
sub_group_size stage3_prefetch_bucket_size stage3_param_persistence_threshold
stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params
stage3_allgather_sequential ignore_unused_parameters legacy_stage1 round_robin_gradients
zero_hpz_partition_size grad_hooks zero_quantized_weights zero_quantized_nontrainable_weights
zero_quantized_gradients mics_shard_size mics_hierarchical_params_gather memory_efficient_linear
pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings zenflow.*
leaf_module.* zeropp_loco_param.* cpu_offload_use_pin_memory
offload_optimizer.device offload_optimizer.nvme_path offload_optimizer.buffer_count
offload_optimizer.pin_memory offload_optimizer.pipeline_read offload_optimizer.pipeline_write
offload_optimizer.fast_init offload_optimizer.ratio offload_optimizer.super_offload
offload_param.device offload_param.nvme_path offload_param.buffer_count offload_param.buffer_size
offload_param.max_in_cpu offload_param.pin_memory
"""


def test_every_key_that_is_promised_is_known() -> None:
    assert {*COVERED.split(), *(f"zero_optimization.{n}" for n in ZERO.split())} <= KEYS.keys()


def test_keys_that_are_not_honoured_say_why() -> None:
    for key in KEYS.values():
        assert bool(key.note) == (key.support is not Support.HONOURED), key.path
        assert not key.note.endswith("."), key.path


def test_values_that_hold_without_a_key_are_of_its_kind() -> None:
    for key in KEYS.values():
        if key.off is not None:
            assert key.kind.take(key.off) == key.off, key.path


def test_older_spellings_lead_to_keys_and_hide_none() -> None:
    for spelling, path in SPELLINGS.items():
        assert path in KEYS
        assert spelling not in KEYS
    for path, (target, value) in SWITCHES.items():
        assert path not in KEYS
        assert KEYS[target].kind.take(value) == value
    assert not set(SECTIONS) & {path.partition(".")[0] for path in KEYS}
    assert SPELLINGS["zero_optimization.max_live_parameters"] == (
        "zero_optimization.stage3_max_live_parameters"
    )


def test_without_any_key_all_is_as_settings_say() -> None:
    assert read_settings({"train_batch_size": 1}, 1) == Settings(Batch(1, 1, 1))


def test_every_field_of_settings_is_filled_from_a_key() -> None:
    sections = [Settings(Batch(1, 1, 1)), Fp16()]
    for section in sections:
        for field in fields(section):
            if "part" in field.metadata:
                sections.append(getattr(section, field.name))
            assert field.metadata or field.name == "batch", field.name
    assert Aio() in sections
