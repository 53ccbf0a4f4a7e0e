"""DeepSpeed configurations with odd values: read, and trained by for two steps."""

import json
import random
from typing import Any

import torch

from attacks.values import altered
from tensorstow.base.errors import StowError
from tensorstow.deepspeed.config.reading import read_settings
from tensorstow.deepspeed.config.summary import summary_of
from tensorstow.deepspeed.optimizers import maker_of
from tensorstow.deepspeed.runtime.lr_schedules import make_scheduler

OPTIMIZERS: tuple[dict[str, Any], ...] = (
    {
        "type": "Adam",
        "params": {
            "lr": 1e-3,
            "betas": [0.9, 0.99],
            "eps": 1e-8,
            "weight_decay": 0.1,
            "amsgrad": False,
            "adam_w_mode": True,
            "torch_adam": False,
            "foreach": None,
            "bias_correction": True,
            "fp32_optimizer_states": True,
        },
    },
    {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "dampening": 0.0}},
    {"type": "Lion", "params": {"lr": 0.1, "betas": [0.9, 0.99], "weight_decay": 0.1}},
    {"type": "Adagrad", "params": {"lr": 0.1, "eps": 1e-8}},
)
_CYCLE = {
    "cycle_min_lr": 0.1,
    "cycle_max_lr": 0.2,
    "decay_lr_rate": 0.0,
    "cycle_first_step_size": 10,
    "cycle_second_step_size": 10,
    "decay_step_size": 1,
    "cycle_first_stair_count": 0,
    "cycle_momentum": True,
    "cycle_min_mom": 0.8,
}
SCHEDULERS: tuple[dict[str, Any], ...] = (
    {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 10}},
    {"type": "WarmupDecayLR", "params": {"total_num_steps": 100, "warmup_type": "linear"}},
    {"type": "WarmupCosineLR", "params": {"total_num_steps": 100, "cos_min_ratio": 0.1}},
    {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 10}},
    {"type": "OneCycle", "params": _CYCLE},
    {"type": "StepLR", "params": {"step_size": 10, "gamma": 0.1}},
    {"type": "MultiStepLR", "params": {"milestones": [1, 2], "gamma": 0.1}},
)
WHOLE: dict[str, Any] = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "min_loss_scale": 1},
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": True,
        "sub_group_size": 1e9,
        "offload_optimizer": {"device": "cpu", "ratio": 1.0},
    },
    "aio": {"block_size": 10, "queue_depth": 8},
    "activation_checkpointing": {"cpu_checkpointing": False, "number_checkpoints": 4},
    "steps_per_print": 10,
    "log_level": "info",
    "seed": 1,
    "communication_data_type": "fp16",
    "csv_monitor": {"enabled": False, "output_path": "x", "job_name": "y"},
    "flops_profiler": {"enabled": True},
}


def train(configuration: Any) -> None:  # noqa: ANN401  # whatever was made of one
    """Read a configuration, and take two steps of what it names."""
    settings = read_settings(configuration, 1)
    summary_of(configuration)
    model = torch.nn.Linear(2, 2)
    make = maker_of(settings.optimizer, None, model)
    if make is None:
        return
    optimizer = make(list(model.named_parameters()))
    schedule = settings.scheduler and make_scheduler(settings.scheduler, optimizer)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.1)
        optimizer.step()
        if schedule is not None:
            schedule.step()


def attack(tries: int, seed: int) -> tuple[list[str], int]:
    """Train by ``tries`` altered configurations; return what was wrong, and how many trained."""
    dice = random.Random(seed)  # noqa: S311
    wrong, trained = [], 0
    for number in range(tries):
        parts = {"optimizer": dice.choice(OPTIMIZERS), "scheduler": dice.choice(SCHEDULERS)}
        name = dice.choice(("optimizer", "scheduler", ""))
        whole = {**WHOLE, **parts}
        changed = {**whole, name: altered(parts[name], dice)} if name else altered(whole, dice)
        try:
            train(changed)
            trained += 1
        except StowError as error:
            if len(str(error)) > 2000:
                wrong.append(f"try {number}: {len(str(error))} characters of an error")
        except Exception as error:  # noqa: BLE001  # that is the finding
            given = json.dumps(changed.get(name, changed), default=repr)[:300]
            wrong.append(f"try {number}: a bare {error!r} of {given}"[:600])
    return wrong, trained
