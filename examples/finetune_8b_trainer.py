"""Fine-tune all weights of an 8B Llama on one GPU of 24 GB, with the Trainer of transformers.

Weights are on the GPU, states of AdamW on disk, and activations are recomputed. You need
``pip install .[trainers]``, 40 GiB of CPU memory and 300 GB of an NVMe drive for --output.

    python examples/finetune_8b_trainer.py --data texts.jsonl --output /nvme/finetuned
    python examples/finetune_8b_trainer.py --tiny    # a toy model on the CPU, in seconds

Each line of texts.jsonl is {"text": "..."}. The same command goes on from the newest checkpoint.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from tensorstow import Plan
from tensorstow.integrations.transformers import Stowed
from tensorstow.losses import chunk_loss


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B", help="name or folder")
    parser.add_argument("--data", default="texts.jsonl")
    parser.add_argument("--output", default="finetuned", help="for checkpoints and states")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
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
    """Train, save, and return the Trainer."""
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    model.config.use_cache = False  # a cache of keys and values holds what recomputing frees
    chunk_loss(model)  # logits of 4,096 tokens over 128,256 words would take 7 GiB
    training = TrainingArguments(
        args.output,
        learning_rate=args.lr,
        max_steps=args.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=args.accumulate,
        save_steps=args.save_steps,
        save_total_limit=1,
        logging_steps=1,
        report_to="none",
    )
    plan = Plan(parameters="device", states="disk", activations="recompute")
    stow = {"plan": plan, "dir": f"{args.output}/states"}
    trainer = Stowed(model, training, train_dataset=sequences(args), stow=stow)
    trainer.train(resume_from_checkpoint=newest_checkpoint(args.output))
    trainer.save_model(f"{args.output}/model")
    return trainer


if __name__ == "__main__":
    main(parse())
