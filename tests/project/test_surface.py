"""Surfaces that users and frontends hold on to, frozen."""

import subprocess
import sys

import tensorstow
import tensorstow.colossalai
import tensorstow.deepspeed
import tensorstow.tensornvme


def test_exported_names() -> None:
    assert sorted(tensorstow.__all__) == [
        "Adam",
        "AdamW",
        "Budget",
        "DelayedUpdate",
        "PipelinePolicy",
        "Plan",
        "StowError",
        "StowedOptimizer",
        "Tier",
        "__version__",
        "errors",
        "named_weights",
        "offload_activations",
        "plan_of",
        "quantize_to_int8",
        "save_safetensors",
        "set_memory_limit",
        "state_dict_of",
        "stow",
        "usage",
    ]
    assert sorted(tensorstow.colossalai.__all__) == [
        "CPUAdam",
        "HybridAdam",
        "__version__",
        "accelerator",
        "launch",
        "launch_from_openmpi",
        "launch_from_slurm",
        "launch_from_torch",
    ]
    assert tensorstow.deepspeed.__all__ == [
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
    assert sorted(tensorstow.tensornvme.__all__) == ["AsyncFileWriter", "DiskOffloader"]


def test_the_version_is_the_installed_one() -> None:
    assert tensorstow.__version__.count(".") == 2


def test_importing_does_not_bring_torchs_compiler() -> None:
    code = "import tensorstow, sys; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_errors_are_reached_from_the_root() -> None:
    code = "from tensorstow import StowError; import tensorstow; tensorstow.errors.OptionError"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
