"""``deepspeed.checkpoint.ds_to_universal``: an engine's checkpoint as one that DeepSpeed loads.

As a command: ``python -m tensorstow.deepspeed.checkpoint.ds_to_universal --input_folder
checkpoints/global_step3 --output_folder checkpoints/global_step3_universal``. DeepSpeed loads it
with ``checkpoint.load_universal``, at any stage and on any number of ranks.
"""

import os
import shutil
from argparse import ArgumentParser, Namespace
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tensorstow.base.directories import make_folder, path_inside
from tensorstow.base.errors import OptionError
from tensorstow.checkpoint.serialize import inflate
from tensorstow.deepspeed.checkpoint.sharded import (
    LATEST_UNIVERSAL,
    read_common,
    read_states,
    read_whole,
    saved_weights,
    write_tag,
)
from tensorstow.deepspeed.checkpoint.zero_files import UNIVERSAL_MAIN
from tensorstow.io.digest_list import DigestList, digest_of

_STATES = ("exp_avg", "exp_avg_sq")
_HYPER_PARAMETERS = ("lr", "betas", "eps", "weight_decay", "initial_lr")
_VERSION = "0.19.6"
"""The version of DeepSpeed whose layout this is."""


def main(args: Namespace) -> None:
    """Write a universal checkpoint, one parameter in memory at a time.

    Args:
        args: ``input_folder``, a checkpoint of an engine with its tag, and ``output_folder``, whose
            name ``latest_universal`` next to it will have. Others of upstream's have no effect.

    Raises:
        StoreFormatError: There is no checkpoint of an engine.
        OptionError: Its optimizer is neither Adam nor AdamW, or the folder is not empty.
    """
    source, target = Path(args.input_folder), Path(args.output_folder)
    common = read_common(source)
    if target.exists() and any(target.iterdir()):
        message = f"output_folder={target} is not empty: name another one."
        raise OptionError(message)
    if not common["groups"]:
        message = f"{source} was saved without an optimizer: it has no states to write."
        raise OptionError(message)
    zero = target / "zero"
    make_folder(target)
    make_folder(zero)
    shapes = [_write_states(source, common, group, zero) for group in common["groups"]]
    torch.save(_optimizer_state(common), zero / "optimizer_state.pt")
    # Upstream looks for the first name up to stage 2, and for the other one under stage 3.
    file = target / UNIVERSAL_MAIN
    torch.save(_model_states(source, common, shapes), file)
    _link(file, target / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    listed = DigestList(file)
    for written in target.rglob("*.pt"):
        listed.note(written, digest_of(written))
    listed.write()
    # Last, so that it never names half a checkpoint.
    write_tag(target.parent / LATEST_UNIVERSAL, target.name)


def _write_states(
    source: Path, common: Mapping[str, Any], group: Mapping[str, Any], zero: Path
) -> dict[str, torch.Size]:
    """Write the folders of a group's parameters; return their shapes."""
    weights, step = saved_weights(source), _step_of(source, common, group)
    shapes: dict[str, torch.Size] = OrderedDict()
    for name in group["params"]:
        if name in common["frozen"]:
            continue
        weight = read_whole(source, {name: weights[name]})[name].float()
        states = read_states(source, name)
        if not states.keys() <= {*_STATES, "master"}:
            message = (
                f"{source} has the states {sorted(states)} of {name}: only those of Adam and AdamW"
                " are written."
            )
            raise OptionError(message)
        of_weight = path_inside(zero, name, source)
        of_weight.mkdir()
        shapes[name] = weight.shape
        whole = {key: states.get(key, torch.zeros_like(weight)) for key in _STATES}
        for key, values in {"fp32": weight, **whole}.items():
            torch.save({"cat_dim": 0, "param": values}, of_weight / f"{key}.pt")
        torch.save(torch.tensor(step), of_weight / "step.pt")
    return shapes


def _step_of(source: Path, common: Mapping[str, Any], group: Mapping[str, Any]) -> float:
    """Return how often a group was updated; parameters that never were have empty states."""
    steps = {common["steps"].get(name, 0.0) for name in group["params"]} - {0.0}
    if len(steps) > 1:
        message = (
            f"{source} has parameters of one group that were updated {sorted(steps)} times:"
            " DeepSpeed counts the updates of a group. Save after all have had their gradients in"
            " each step, or give them groups of their own."
        )
        raise OptionError(message)
    return max(steps, default=0.0)


def _optimizer_state(common: Mapping[str, Any]) -> dict[str, Any]:
    groups = [
        {**{k: group[k] for k in _HYPER_PARAMETERS if k in group}, "params": [number]}
        for number, group in enumerate(common["groups"])
    ]
    # Under stage 3 upstream gives all groups the first one's: it has what they have in common.
    shared = {k: v for k, v in groups[0].items() if all(g.get(k) == v for g in groups)}
    step = torch.tensor(max(common["steps"].values(), default=0.0))
    of_stage_3 = {"state": {0: {"step": step}}, "param_groups": [{**shared, "params": [0]}]}
    return {"param_groups": groups, "optimizer_state_dict": of_stage_3, "ds_version": _VERSION}


def _model_states(
    source: Path, common: Mapping[str, Any], shapes: list[dict[str, torch.Size]]
) -> dict[str, Any]:
    """Return the counters, buffers and frozen weights; trained ones are in the folder zero."""
    weights = saved_weights(source)
    trained = {name for group in shapes for name in group}
    untrained = {name: saved for name, saved in weights.items() if name not in trained}
    whole = read_whole(source, untrained)
    module = {
        name: torch.empty(0, dtype=saved.dtype) if name in trained else whole[name]
        for name, saved in weights.items()
    }
    tied = {other: name for name, more in common["tied"].items() for other in more}
    module |= {other: module[name] for other, name in tied.items()}
    plain, tensors = common["client_state"]
    return {
        "module": module,
        "buffer_names": sorted(untrained.keys() - set(common["frozen"])),
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": tied,
        "lr_scheduler": common["scheduler"],
        "sparse_tensor_module_names": set(),
        "global_steps": common["global_steps"],
        "global_samples": common["global_samples"],
        "skipped_steps": common["skipped_steps"],
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": _VERSION,
        **inflate(plain, tensors.__getitem__),
    }


def _link(file: Path, name: Path) -> None:
    """Give a file another name, or copy it if the file system has no links."""
    try:
        os.link(file, name)
    except OSError:
        shutil.copyfile(file, name)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(description="Writes an engine's checkpoint as a universal one.")
    parser.add_argument("--input_folder", required=True, help="a checkpoint, with its tag")
    parser.add_argument("--output_folder", required=True, help="the folder that is written")
    for name in ("--num_extract_workers", "--num_merge_workers"):
        parser.add_argument(name, type=int, help="upstream's; there is one process")
    for name in ("--keep_temp_folder", "--no_strict", "--inject_missing_state"):
        parser.add_argument(name, action="store_true", help="upstream's; no effect")
    return parser


if __name__ == "__main__":
    main(_parser().parse_args())
