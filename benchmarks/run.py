"""Run the benchmarks: `python benchmarks/run.py [NAME ...]`, all of them by default."""

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path

# The folder of this file would otherwise come first and its modules hide others: a `kernels` is
# what transformers looks for.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

SUBJECTS = {
    "kernels": "the update kernels against torch's and DeepSpeed's",
    "optimizer": "opt.step of the seed example in RAM",
    "averages": "a step that keeps averages of the weights, and torch's AveragedModel beside it",
    "touched_rows": "updates of untouched rows made later, and dense updates: bytes and bits",
    "offload": "the offloaded step against disk and kernel alone",
    "raw_io": "reads and writes against fio",
    "durable": "commits, pins, resumes, and bytes per parameter",
    "reshard": "a run of one rank resumed on two, and back, against raw reads and writes",
    "worlds": "one run on 1 to 8 ranks, changed and killed on the way: its weights",
    "overlap": "updates beside backward and beside the next forward",
    "placements": "a step of GPT-2 in each placement, in fresh processes with their own allocator",
    "engine": "whole models through stow",
    "plans": "what the planner predicts against what runs hold and take",
    "plan_memory": "peak resident memory against the bound that a plan prints, for drawn pairs",
    "plan_command": "`tensorstow plan` of a model of 70B: seconds and memory",
    "plan_bytes": "peak bytes predicted for an accelerator, on the simulated one",
    "gpu": "a model on an accelerator, where there is one: ours, no offload, and peers",
    "gpu_overlap": "when updates run beside an accelerator, where there is one",
    "accelerator_model": "plans on the simulated accelerator: a step at break-even",
    "activations": "saved activations of GPT-2 at 4 x 1024: kept, on disk, recomputed",
    "drives": "two drives, one twice as fast: bytes and steps, by rate, in equal parts, and alone",
    "vertical": "eight micro-batches with weights on disk: vertical order, and accumulation",
    "cross_entropy": "a loss over 131,072 classes in chunks, in fresh processes",
    "generation": "generation with weights on disk: accelerate's offload, and a raw read",
    "experts": "generation by a mixture of experts on disk: routed experts, and whole layers",
    "lora_large": "adapters over a base of 7 billion parameters on disk, in bf16, int8 and NF4",
    "lora": "adapters over a frozen base on disk, and the same without stow: memory and losses",
    "trainer": "a step of transformers' Trainer with our optimizer, and the same loop by hand",
    "deepspeed_step": "a step at stage 2 on two ranks, and DeepSpeed's, where installed",
    "deepspeed_numbers": "what DeepSpeed's door computes, against a plain loop: 288 cells",
    "seed_example": "the seed example with and without offload, in fresh processes",
    "lecture": "no offload, naive offloading, ZeRO-Offload and ZeRO-Infinity side by side",
    "delayed": "loss curves of delayed updates beside exact ones, on the seed example",
    "peers": "DeepSpeed and TensorNVMe, where installed",
}

FOLDERS = dict.fromkeys(("gpu", "gpu_overlap", "accelerator_model", "plan_bytes"), "accelerator")
"""Of the others: cpu."""

PICTURES = {"lecture": "lecture_picture", "delayed": "delayed_picture"}
"""Modules that draw what a subject saved."""


def main(arguments: list[str] | None = None) -> None:
    """Measure the subjects asked for, save each when it is done, print everything at the end."""
    options = _parser().parse_args(arguments)
    if options.simulated:
        sys.path.append(str(Path(sys.path[0], "tests")))
        simulated = importlib.import_module("simulated")
    measure = importlib.import_module("benchmarks.measure")
    pairs = options.pairs or (2 if options.quick else measure.LEAST_PAIRS)
    settings = measure.Settings(
        pairs,
        options.quick,
        options.directory,
        cpu_as_device=options.cpu_as_device,
        size=options.size,
        journal=options.journal,
        judge_only=options.judge_only,
        way_seconds=options.way_seconds,
    )
    facts = measure.machine_facts(options.directory)
    print(*(f"{key}: {value}" for key, value in facts.items()), sep="\n", flush=True)
    everything = []
    for name in options.names or SUBJECTS:
        print(f"\n{name}: {SUBJECTS[name]}", flush=True)
        figures = []
        module = importlib.import_module(f"benchmarks.{FOLDERS.get(name, 'cpu')}.{name}")
        try:
            for figure in module.figures(settings):
                print(f"  {figure.name}  {figure.found}  {figure.verdict}", flush=True)
                figures.append(figure)
        finally:  # what was measured is kept
            machine = module.machine_of(settings) if hasattr(module, "machine_of") else None
            path = measure.save(options.out, name, settings, machine or facts, figures)
        everything += figures
        if name in PICTURES and all(figure.measured is not None for figure in figures):
            print(f"  {_draw(name, path)}", flush=True)
    print()
    measure.print_table(everything)
    print(f"\nSaved beside the JSON: {measure.save_table(options.out)}")
    if options.simulated and (hazards := simulated.take_hazards()):
        sys.exit(f"{len(hazards)} hazards, first:\n" + "\n".join(sorted(set(hazards))[:6]))


def _draw(name: str, path: Path) -> str:
    """Draw what was saved of a subject, and return a line about it for people."""
    if importlib.util.find_spec("matplotlib") is None:
        return "not drawn: matplotlib is not installed"
    return f"drawn: {importlib.import_module(f'benchmarks.cpu.{PICTURES[name]}').draw(path)}"


def _parser() -> argparse.ArgumentParser:
    listing = "\n".join(f"  {name:17} {what}" for name, what in SUBJECTS.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*SUBJECTS, []])
    parser.add_argument("--pairs", type=int, help="interleaved pairs per figure (default 9)")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results", help="folder for the JSON"
    )
    parser.add_argument("--directory", type=Path, help="where scratch files go")
    parser.add_argument(
        "--cpu-as-device",
        action="store_true",
        help="gpu: the CPU in an accelerator's place: does it run?",
    )
    parser.add_argument(
        "--simulated", action="store_true", help="gpu: the simulated accelerator of the tests"
    )
    parser.add_argument(
        "--size", choices=["1B", "3B", "8B"], default="1B", help="gpu: parameters (default 1B)"
    )
    parser.add_argument(
        "--journal", type=Path, help="gpu: folder that keeps each measurement, to go on from"
    )
    parser.add_argument(
        "--judge-only", action="store_true", help="gpu: measure nothing, judge what --journal has"
    )
    parser.add_argument(
        "--way-seconds", type=float, help="gpu: end the process, with status 75, in a longer turn"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run at all?")
    return parser


if __name__ == "__main__":
    main()
