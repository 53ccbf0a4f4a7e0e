"""Fine-tune an 8B Llama on several GPUs with a loop of your own: sharded, committed, resumed.

Every rank has its part of each weight on its GPU, and its part of the states on disk. You need
``pip install .[trainers]`` and a folder with the model's files:

    torchrun --nproc-per-node 4 examples/several_ranks.py --model /nvme/llama --dir /nvme/run
    torchrun --nproc-per-node 2 examples/several_ranks.py --tiny    # a toy model on the CPU

The run commits every ten minutes and at its end. After a crash or a kill the same command goes on
from the last commit, on as many ranks or others. Each line of --data is {"text": "..."}.
"""

import argparse
import json
import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import tensorstow
from tensorstow import Plan


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="llama", help="folder")
    parser.add_argument("--data", default="texts.jsonl")
    parser.add_argument("--dir", default="run", help="of the run; each rank writes its part there")
    parser.add_argument("--output", default="finetuned", help="for the trained weights")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--steps", type=int, help="default: 1000; 6 with --tiny")
    parser.add_argument("--commit-every", default="10min", help="a time, or a number of steps")
    parser.add_argument("--bucket", help="of restart.py: where snapshots go, s3://bucket/run")
    parser.add_argument("--snapshot-every", type=int, default=500, help="steps; with --bucket")
    parser.add_argument("--tiny", action="store_true", help="a toy model: needs nothing")
    args = parser.parse_args(words)
    if args.tiny:
        from tiny import make_tiny  # noqa: PLC0415  # you need it for --tiny only

        args.model, args.data = make_tiny(Path(args.output) / "tiny")
        args.length, args.lr, args.steps = 32, 1e-3, args.steps or 6
    args.steps = args.steps or 1000
    return args


def sequences(args: argparse.Namespace) -> torch.Tensor:
    """Return the texts, joined and cut into rows of equal length."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    lines = Path(args.data).read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] + tokenizer.eos_token for line in lines]
    tokens = torch.tensor([token for ids in tokenizer(texts)["input_ids"] for token in ids])
    return tokens[: len(tokens) // args.length * args.length].view(-1, args.length)


def place(
    args: argparse.Namespace, stop_signals: dict[str, int] | None = None
) -> tuple[torch.nn.Module, tensorstow.AdamW]:
    """Return the model, sharded over the ranks that were started, and its optimizer."""
    if torch.accelerator.is_available():
        local_rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID", "0")
        torch.accelerator.set_device_index(int(local_rank))
    with torch.device("meta"):  # takes no memory: stow() reads each rank's part of the files
        config = AutoConfig.from_pretrained(args.model, use_cache=False)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plan = Plan(parameters="device", states="disk", activations="recompute")
    every = int(args.commit_every) if args.commit_every.isdecimal() else args.commit_every
    options = {"lr": args.lr, "commit_every": every, "stop_signals": stop_signals}
    adamw = partial(tensorstow.AdamW, **options)
    return tensorstow.stow(model, adamw, plan=plan, weights=args.model, dir=args.dir)


def place_among_ranks() -> tuple[int, int]:
    """Return this rank and the number of ranks, also of a process that is alone."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def train_step(model: torch.nn.Module, optimizer: tensorstow.AdamW, row: torch.Tensor) -> float:
    """Take one step with one sequence on each rank; return the loss of this rank."""
    row = row[None].to(model.device)
    loss = model(input_ids=row, labels=row).loss
    loss.backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def main(args: argparse.Namespace) -> None:
    """Train, save the weights for ``from_pretrained``, and leave the group."""
    model, optimizer = place(args)
    rows, (rank, ranks) = sequences(args), place_among_ranks()
    with optimizer:  # commits on all ranks together when the block ends
        for step in range(optimizer.resume() or 0, args.steps):  # None: there is no commit yet
            loss = train_step(model, optimizer, rows[(step * ranks + rank) % len(rows)])
            if rank == 0:
                print(f"step {step + 1}: loss {loss:.3f}", flush=True)
        tensorstow.save_safetensors(model, f"{args.output}/model")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(parse())
