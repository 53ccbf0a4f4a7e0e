"""Supervised fine-tuning of an 8B Llama on one GPU of 24 GB, with TRL's SFTTrainer.

``Stowed`` as the first base class places the model of any trainer that is built on transformers'.
You need ``pip install .[trainers]``, 40 GiB of CPU memory and 300 GB of an NVMe drive for --output.

    python examples/sft_trl.py --data chats.jsonl --output /nvme/sft
    python examples/sft_trl.py --tiny    # a toy model on the CPU, in seconds

Each line of chats.jsonl is {"messages": [{"role": "user", "content": "..."}, ...]}, or another
format of TRL: {"text": "..."}, {"prompt": "...", "completion": "..."}.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from tensorstow import Plan
from tensorstow.integrations.transformers import Stowed


class StowedSFT(Stowed, SFTTrainer):
    """TRL's trainer with a placed model."""


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--model", default="meta-llama/Llama-3.1-8B-Instruct", help="name or folder"
    )
    parser.add_argument("--data", default="chats.jsonl")
    parser.add_argument("--output", default="sft", help="for checkpoints and states")
    parser.add_argument("--length", type=int, default=2048, help="most tokens of a sample")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save-steps", type=int, default=200)
    parser.add_argument("--tiny", action="store_true", help="a toy model: needs nothing")
    parser.set_defaults(accumulate=8)
    args = parser.parse_args(words)
    if args.tiny:
        from tiny import make_tiny  # noqa: PLC0415  # you need it for --tiny only

        args.model, args.data = make_tiny(Path(args.output) / "tiny")
        args.length, args.lr, args.accumulate = 32, 1e-3, 2
        args.steps, args.save_steps = min(args.steps, 4), 2
    return args


def newest_checkpoint(output: str) -> str | None:
    """Return the newest checkpoint that is complete: trainer_state.json is written last."""
    complete = [file.parent for file in Path(output).glob("checkpoint-*/trainer_state.json")]
    newest = max(complete, key=lambda folder: int(folder.name.split("-")[1]), default=None)
    return newest and str(newest)


def main(args: argparse.Namespace) -> Any:  # noqa: ANN401  # transformers has no types here
    """Train, save, and return the trainer."""
    training = SFTConfig(
        args.output,
        learning_rate=args.lr,
        max_steps=args.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=args.accumulate,
        max_length=args.length,
        bf16=False,  # the weights are bf16; autocast would hold a second copy of each
        gradient_checkpointing=False,  # the plan recomputes
        save_steps=args.save_steps,
        save_total_limit=1,
        logging_steps=1,
        report_to="none",
    )
    plan = Plan(parameters="device", states="disk", activations="recompute")
    trainer = StowedSFT(
        AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16, use_cache=False),
        training,
        train_dataset=load_dataset("json", data_files=args.data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        stow={"plan": plan, "dir": f"{args.output}/states"},
    )
    trainer.train(resume_from_checkpoint=newest_checkpoint(args.output))
    trainer.save_model(f"{args.output}/model")
    return trainer


if __name__ == "__main__":
    main(parse())
