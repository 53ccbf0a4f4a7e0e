"""LoRA adapters for a 70B Llama whose base does not fit: it stays in its files on disk.

Each block of the base is read just before it computes, in forward and in backward; nothing of it is
copied. Adapters and their states are in memory. You need ``pip install .[trainers]``, a GPU of
24 GB, 32 GiB of CPU memory, and the base on a fast local drive (140 GB).

    python examples/lora.py --model /nvme/Llama-3.1-70B --data texts.jsonl
    python examples/lora.py --tiny    # a toy model on the CPU, in seconds

Each line of texts.jsonl is {"text": "..."}. The same command goes on from the newest checkpoint.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from tensorstow import Plan
from tensorstow.integrations.transformers import Stowed
from tensorstow.losses import chunk_loss


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="meta-llama/Llama-3.1-70B", help="name or folder")
    parser.add_argument("--data", default="texts.jsonl")
    parser.add_argument("--output", default="adapters", help="for checkpoints")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=1, help="a larger one hides the reads")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save-steps", type=int, default=100)
    parser.add_argument("--tiny", action="store_true", help="a toy model: needs nothing")
    args = parser.parse_args(words)
    if args.tiny:
        from tiny import make_tiny  # noqa: PLC0415  # you need it for --tiny only

        args.model, args.data = make_tiny(Path(args.output) / "tiny")
        args.length, args.batch, args.lr = 32, 4, 1e-2
        args.steps, args.save_steps = min(args.steps, 4), 2
    return args


def sequences(args: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """Return the texts, joined and cut into sequences of equal length."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    lines = Path(args.data).read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] + tokenizer.eos_token for line in lines]
    tokens = torch.tensor([token for ids in tokenizer(texts)["input_ids"] for token in ids])
    rows = tokens[: len(tokens) // args.length * args.length].view(-1, args.length)
    return [{"input_ids": row, "labels": row} for row in rows]


def newest_checkpoint(output: str) -> str | None:
    """Return the newest checkpoint that is complete: trainer_state.json is written last."""
    complete = [file.parent for file in Path(output).glob("checkpoint-*/trainer_state.json")]
    newest = max(complete, key=lambda folder: int(folder.name.split("-")[1]), default=None)
    return newest and str(newest)


def main(args: argparse.Namespace) -> Any:  # noqa: ANN401  # transformers has no types here
    """Train, save the adapters, and return the Trainer."""
    base = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)  # maps its files
    base.config.use_cache = False  # a cache of keys and values holds what recomputing frees
    model = get_peft_model(base, LoraConfig(r=args.rank, target_modules="all-linear"))
    chunk_loss(model)  # logits of 2,048 tokens over 128,256 words would take 2.5 GiB
    training = TrainingArguments(
        args.output,
        learning_rate=args.lr,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        save_steps=args.save_steps,
        logging_steps=1,
        report_to="none",
    )
    plan = Plan(parameters="disk", states="host", activations="recompute")
    trainer = Stowed(model, training, train_dataset=sequences(args), stow={"plan": plan})
    trainer.train(resume_from_checkpoint=newest_checkpoint(args.output))
    trainer.save_model(f"{args.output}/model")  # for PeftModel.from_pretrained
    return trainer


if __name__ == "__main__":
    main(parse())
