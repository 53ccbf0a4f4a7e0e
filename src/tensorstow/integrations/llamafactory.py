"""LLaMA-Factory's second trainer (v1): ``optim_config: {name: tensorstow, ...}``.

LLaMA-Factory imports no plugins that are not its own, and ``llamafactory-cli`` starts other
processes, so this module is the command: ``python -m tensorstow.integrations.llamafactory``.
"""

from argparse import REMAINDER, ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from llamafactory.v1 import launcher
from llamafactory.v1.plugins.trainer_plugins.optimizer import OptimizerPlugin

from tensorstow.base.errors import OptionError
from tensorstow.base.update_on import timing_of
from tensorstow.integrations.late_adamw import REFERENCES, is_durable
from tensorstow.optim.adam import AdamW

_COMMANDS = ("sft", "train", "rm")
_YAML = (".yaml", ".yml")


@OptimizerPlugin("tensorstow").register()
def adamw(model: torch.nn.Module, config: Mapping[str, Any]) -> AdamW:
    """Return the optimizer of a model that LLaMA-Factory has placed.

    Args:
        model: The model.
        config: Keywords of ``tensorstow.AdamW``, and ``name``. With ``dir`` checkpoints are
            snapshot references.

    Returns:
        The optimizer of the trained parameters.

    Raises:
        OptionError: No ``lr``, ``overlap="backward"``, or ``dir`` on several processes.
    """
    options = {name: value for name, value in config.items() if name != "name"}
    durable, message = is_durable(options), None
    world = dist.get_world_size() if dist.is_initialized() else 1
    if "lr" not in options:  # LLaMA-Factory does not pass its learning_rate
        message = "optim_config without lr was given: add it, for learning_rate is not passed on."
    elif timing_of(options.get("overlap", "auto")).begins_early:
        message = (
            'overlap="backward" or "speculative" was given: LLaMA-Factory asks for the norm of all'
            ' gradients after backward, when they are already used. Use overlap="none" or'
            ' "forward".'
        )
    elif durable and world > 1:
        message = (
            f"dir={options['dir']!r} was given for {world} processes, and a checkpoint is of rank 0"
            " alone: leave dir= out for scratch files."
        )
    if message is not None:
        raise OptionError(message)
    if durable:
        options = {**REFERENCES, **options}
    trained = [p for p in model.parameters() if p.requires_grad]
    return AdamW(trained, **{"module": model, **options})


def main() -> None:
    """Run ``sft``, ``train`` or ``rm`` of LLaMA-Factory with the command line of this process.

    Exits with status 2 and one line for another command, which LLaMA-Factory's function would
    ignore, and for a file that does not exist.
    """
    command = ArgumentParser(
        prog=f"python -m {__spec__.name}",
        description="Train by LLaMA-Factory's second trainer with tensorstow's AdamW.",
        epilog="For other commands use llamafactory-cli.",
    )
    command.add_argument("command", help=f"{', '.join(_COMMANDS)}, or a YAML file")
    command.add_argument("options", nargs=REMAINDER, help="a YAML file, or LLaMA-Factory's options")
    words = command.parse_args()
    named = [words.command, *words.options[:1]]
    if words.command in _COMMANDS:
        if not words.options:
            command.error(f"{words.command} needs a YAML file or options: add one")
        named = named[1:]
    elif not words.command.endswith(_YAML):
        command.error(f"{words.command!r} is none of {', '.join(_COMMANDS)}, and no YAML file")
    if not named[0].startswith("-") and not Path(named[0]).is_file():
        command.error(f"{named[0]} is not a file: name the YAML file of the training")
    launcher.main()


if __name__ == "__main__":
    main()
