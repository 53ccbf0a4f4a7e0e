"""The command line arguments by which scripts are told of a DeepSpeed configuration."""

from argparse import ArgumentParser


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config`` to ``parser``, and return it.

    The older ``--deepscale`` and ``--deepscale_config`` are taken for the same.
    """
    group = parser.add_argument_group("DeepSpeed", "where to find the configuration")
    group.add_argument(
        "--deepspeed",
        "--deepscale",
        action="store_true",
        help="for the script's own use: says that initialize() is to be called",
    )
    group.add_argument(
        "--deepspeed_config",
        "--deepscale_config",
        metavar="FILE",
        help="the configuration, a JSON file",
    )
    return parser
