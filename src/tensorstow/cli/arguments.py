"""The commands and their arguments, declared without importing the commands' modules.

Importing torch takes a second; help and usage errors need not wait for it.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tensorstow.measure.known_models import KNOWN

DTYPES = ("fp32", "bf16", "fp16")
"""Names that `tensorstow plan` uses for the dtypes of a model's parameters."""
_MODULES = {"verify": "verify.run"}
"""Modules whose names are not those of their commands."""
_JSON_BY_RANK = "one JSON object, or a list of them by rank,"
_EXAMPLES = {
    "doctor": """\
examples:
  tensorstow doctor                    is this machine ready, and what to do if not
  tensorstow doctor /nvme              this directory too
  tensorstow doctor --json             for a bug report
  torchrun --nnodes 2 --nproc-per-node 8 --no-python tensorstow doctor --ranks /nvme
                                       all machines: links, drives, what differs
""",
    "calibrate": """\
examples:
  tensorstow calibrate /nvme           memory, cores, an accelerator, and this directory's disk
  tensorstow calibrate /nvme --json    the profile, for `tensorstow plan --profile`
""",
    "plan": """\
examples:
  tensorstow plan llama-3-8b --card 4090 --host 64GiB --batch 1 --seq 2048   memory and seconds
  tensorstow plan llama-3-8b --device 24GiB --host 64GiB --disk 1TiB         memory alone
  tensorstow plan llama-3-70b --card h100 --lora r=16                        adapters, base frozen
  tensorstow plan mine:make_model --host 16GiB                               your own: returns a
                                                                             module, or
                                                                             (module, (batch,))
  tensorstow plan gpt2 --json | jq .plan                                     for a script

words:
  rank          one process, with one GPU if there are any; ranks share the model
  micro-batch   what one forward and one backward take: --batch sequences of --seq tokens
  step          one update of the weights, after --accumulation-steps micro-batches
  unit          a block of the model, such as a layer, whose weights move together
  host          the machine's CPU memory; device: a GPU's memory
""",
    "quantize": """\
examples:
  tensorstow quantize /nvme/llama /nvme/llama-int8 --int8   half of bf16's bytes
  tensorstow quantize /nvme/llama /nvme/llama-nf4 --nf4     a quarter; bitsandbytes reads it too
  tensorstow quantize /nvme/mixtral /nvme/small --nf4 --experts
""",
    "verify": """\
examples:
  tensorstow verify /nvme                    a small transformer
  tensorstow verify /nvme --model gpt2       GPT-2, cut to two layers
  tensorstow verify --model mine:make_model  your own: returns a module, or (module, (batch,))
  tensorstow verify --json | jq .is_equal

exit status: 0, all bits are equal; 1, they are not, or your function raised an error; 2, it could
not be carried out
""",
    "run": """\
examples:
  tensorstow run inspect /nvme/run     what it holds, also while it is live
  tensorstow run scrub /nvme/run       read everything and verify checksums
  tensorstow run recover /nvme/run     what is intact; --yes repairs it
  tensorstow run clean /nvme/run       what would be removed; --yes removes it
  tensorstow run push /nvme/run s3://bucket/run    copy its newest commit there
  tensorstow run pull s3://bucket/run /nvme/run    copy a snapshot back
  tensorstow run scrub s3://bucket/run             read all copies and verify checksums
  tensorstow run clean s3://bucket/run --snapshot old    what would be removed there
""",
}


@dataclass(frozen=True, slots=True)
class Command:
    """A command of `tensorstow`."""

    name: str
    summary: str
    declare_own: Callable[[argparse.ArgumentParser], None]
    """Function that declares the options of this command only."""
    json: str = "one JSON object"
    """What ``--json`` prints."""

    @property
    def module(self) -> str:
        """Return the module whose ``run`` is called with the parsed arguments."""
        return f"tensorstow.cli.{_MODULES.get(self.name, self.name)}"

    def declare(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options of the command, and its examples."""
        add_examples(parser, self.name)
        self.declare_own(parser)
        parser.add_argument("--json", action="store_true", help=f"print {self.json} instead")


def add_examples(parser: argparse.ArgumentParser, name: str) -> None:
    """Let the help of a command end with its examples."""
    parser.epilog = _EXAMPLES.get(name)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def _doctor(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("named", metavar="DIR", nargs="*", default=[], help="directories to look at too")
    several = "the same; may be given several times"
    add("--directory", metavar="DIR", action="append", default=[], help=several)
    add(
        "--local-ranks",
        metavar="N",
        type=int,
        help="show how N processes on this machine share it (default: LOCAL_WORLD_SIZE, or 1)",
    )
    add(
        "--ranks",
        action="store_true",
        help="meet the other ranks of a launcher, and print one table of all machines",
    )


def _calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directories",
        metavar="DIR",
        nargs="*",
        type=Path,
        help="a directory that states will be in (default: the one that scratch files go to)",
    )


def _plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"one of {', '.join(KNOWN)}, or its name on the Hub; a transformers configuration"
        " (file or folder); or module:function, which returns a module, or a module and the"
        " arguments of its forward",
    )
    _add_training(parser.add_argument_group("how you train"))
    _add_machine(parser.add_argument_group("what the machine has"))
    add = parser.add_argument_group("what is printed").add_argument
    for name, text in (
        ("all", "list placements that do not fit too"),
        ("deepspeed", "print the plan as a DeepSpeed configuration too"),
        ("gemini", "print it as arguments of ColossalAI's Gemini too"),
    ):
        add(f"--{name}", action="store_true", help=text)
    add("--html", metavar="FILE", type=Path, help="draw memory and a step as a page too")


def _add_training(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--batch", metavar="B", type=int, help="sequences of a micro-batch")
    add("--seq", metavar="S", type=int, help="tokens of a sequence")
    add(
        "--accumulation-steps",
        metavar="N",
        type=_steps,
        default=1,
        help="micro-batches of a step (default: 1); auto: divide --batch as is best",
    )
    add("--world-size", metavar="N", type=int, default=1, help="ranks (default: 1)")
    add(
        "--ordered-reduce",
        choices=("mean", "sum"),
        help="add gradients in the order of micro-batches, whatever the number of ranks",
    )
    add(
        "--lora",
        metavar="r=N",
        type=_rank,
        help="train adapters of rank N on all linear layers, as peft does; the base is frozen",
    )
    add("--dtype", choices=DTYPES, help="dtype of parameters (default: the model's own)")
    add(
        "--ema", metavar="DECAY", type=float, help="keep averages of the weights, such as of 0.9999"
    )
    add(
        "--commits",
        action="store_true",
        help="the run can be resumed: count the disk space that its commits take",
    )
    add(
        "--allow-inexact",
        action="store_true",
        help="allow optimizer states in bf16 or int8: smaller, and results differ by rounding",
    )


def _add_machine(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--card",
        metavar="NAME",
        help="plan for this card with nominal rates: 3090, 4090, a100-40, a100-80, h100, h100-pcie"
        " or l40s",
    )
    spread = "machines that the ranks are spread over evenly (default: 1)"
    add("--machines", metavar="N", type=int, default=1, help=spread)
    add(
        "--network",
        metavar="RATE",
        help="bytes or bits that each machine can send in a second, such as 12GB or 100Gbit",
    )
    for name, text in (
        ("device", "GPU memory of each rank, or a card's name; 0: the CPU computes (default: 0)"),
        ("host", "CPU memory of each rank, or none for no limit (default: this machine's)"),
        ("disk", "disk space of each rank (default: no limit)"),
    ):
        add(f"--{name}", metavar="SIZE", help=text)
    add(
        "--headroom",
        metavar="SIZE",
        help="memory to leave free on the device and on the host, each (default: 0.6 GiB and 8%% of"
        " what is held on a device; 1.5 GiB, or 0.5 without a device, and 8%% on the host)",
    )
    fastest = "directory for states on disk (default: the fastest that was measured)"
    add("--directory", metavar="DIR", type=Path, help=fastest)
    measured = "rates that `tensorstow calibrate --json` printed (default: this machine's)"
    add("--profile", metavar="FILE", type=Path, help=measured)
    add(
        "--tbw",
        metavar="SIZE",
        help="bytes that the drive may be written in its life, such as 600TB, to say how long it"
        " lasts",
    )


def _verify(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "directory",
        metavar="DIR",
        nargs="?",
        help="directory for states on disk; nothing is left there (default: the first real disk"
        " among the usual places)",
    )
    add(
        "--model",
        metavar="MODEL",
        help=f"one of {', '.join(KNOWN)}, or a transformers configuration (file or folder), cut to"
        " two narrow layers; or module:function, as it is (default: a small transformer)",
    )
    add("--device", help="device that the model computes on (default: the accelerator, else cpu)")


def _inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", type=Path, help="the run's first directory")


def _quantize(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="FOLDER", type=Path, help="config.json and safetensors of a model")
    add("target", metavar="OUT", type=Path, help="the new folder")
    kind = parser.add_mutually_exclusive_group(required=True)
    for name, text in (
        ("int8", "8 bits, and a scale for each row of a matrix"),
        ("nf4", "4 bits with double quantization, as bitsandbytes has them"),
    ):
        kind.add_argument(f"--{name}", dest="encoder", action="store_const", const=name, help=text)
    add(
        "--experts",
        action="store_true",
        help="also the matrices of experts that the model stacks; other programs may not read them",
    )


def _scrub(parser: argparse.ArgumentParser) -> None:
    first = "the run's first directory, or the address that it was pushed to"
    parser.add_argument("directory", metavar="DIR", type=_place, help=first)
    parser.add_argument(
        "--generation",
        metavar="NAME",
        help="read only this commit: a snapshot's name, or a number (default: all that are kept)",
    )


def _push(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("directory", metavar="DIR", type=Path, help="the run's first directory")
    add("url", metavar="URL", help="a folder, or an address such as s3://bucket/run")
    add("--snapshot", metavar="NAME", help="the snapshot to copy (default: the newest commit)")
    add("--name", help='its name there (default: that of the snapshot, else "step-" and the step)')


def _pull(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("url", metavar="URL", help="where the run was pushed to")
    add("directory", metavar="DIR", type=Path, help="the run's directory, empty")
    add("--snapshot", metavar="NAME", help="the snapshot to copy (default: that of the last step)")
    add("--rank", type=_index, help="copy the store of this rank only (default: of all)")


def _recover(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    every = "all directories of the run, in their order"
    add("directories", metavar="DIR", type=Path, nargs="+", help=every)
    for name, text in (
        ("yes", "repair it, if that loses nothing (default: only look)"),
        ("accept-loss", "repair it, though steps or snapshots are lost"),
    ):
        add(f"--{name}", action="store_true", help=text)


def _clean(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "directories",
        metavar="DIR",
        type=_place,
        nargs="+",
        help="directories of the run, the first one first: no other is changed; or an address, of"
        " which objects are removed that no snapshot lists",
    )
    several = "of an address: remove this snapshot too; may be given several times"
    add("--snapshot", metavar="NAME", action="append", default=[], help=several)
    add("--yes", action="store_true", help="remove the files (default: only print which)")


def _place(text: str) -> str | Path:
    """Return a path, or an address as it is."""
    return text if "://" in text else Path(text)


def _steps(text: str) -> int | None:
    """Return a number of micro-batches; None for "auto"."""
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        message = f"{text!r} was given: it is a number, at least 1, or auto"
        raise argparse.ArgumentTypeError(message) from None


def _rank(text: str) -> int:
    """Return the rank of adapters: "r=16" or "16"."""
    digits = text.removeprefix("r=")
    if not (digits.isascii() and digits.isdecimal()) or not int(digits):
        message = f"{text!r} was given: it is the adapters' rank, such as r=16"
        raise argparse.ArgumentTypeError(message)
    return int(digits)


def _index(text: str) -> int:
    """Return the number of a rank."""
    if not (text.isascii() and text.isdecimal()):
        message = f"{text!r} was given: it is the number of a rank, from 0 on"
        raise argparse.ArgumentTypeError(message)
    return int(text)


RUN_COMMANDS = tuple(
    Command(name, summary, declare_own, _JSON_BY_RANK)
    for name, summary, declare_own in (
        ("inspect", "print what a run's directory holds, also while the run is live", _inspect),
        ("scrub", "read everything of a run or its copies, and report damage", _scrub),
        ("recover", "print what is intact of a damaged run, and repair it with --yes", _recover),
        ("clean", "print what a dead run or a killed push left, remove it with --yes", _clean),
        ("push", "copy a commit of a run to a bucket or another folder", _push),
        ("pull", "copy a snapshot back from a bucket or another folder", _pull),
    )
)
"""The commands of `tensorstow run`."""
_PROFILE = "the profile as JSON, which `plan --profile` reads,"
_COPY = "write a copy of a model's folder in 8 or 4 bits, to be read or adapted"
_SAME = "train with states in memory and on disk, and compare the results bit for bit"
COMMANDS = (
    Command("doctor", "say whether this machine is ready, and what to do if not", _doctor),
    Command(
        "calibrate", "measure this machine's memory, disks, cores and GPU", _calibrate, _PROFILE
    ),
    Command(
        "plan", "say whether a model fits, where its parts go, and how long a step takes", _plan
    ),
    Command("quantize", _COPY, _quantize),
    Command("verify", _SAME, _verify),
)
RUN_SUMMARY = "inspect, scrub, recover, clean or copy a run's directory"
