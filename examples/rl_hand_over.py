"""Reinforcement learning with TRL's GRPOTrainer, and a server that gets the weights of each step.

The model is trained by ``stow``; a server writes the completions. After a step
``tensorstow.named_weights`` hands the weights over, one whole tensor at a time. Here the server is
a copy of the model in this process, which checks what it receives; in its place put the client of
yours: vLLM's and SGLang's weight updates take names and tensors too.
You need ``pip install .[trainers]``.

    python examples/rl_hand_over.py --data prompts.jsonl --output /nvme/grpo
    python examples/rl_hand_over.py --tiny    # a toy model on the CPU, in seconds

Each line of prompts.jsonl is {"prompt": "..."}.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tensorstow import Plan, named_weights
from tensorstow.integrations.transformers import Stowed


class Server:
    """Generates by weights of its own, in the place of vLLM's."""

    def __init__(self, name: str) -> None:
        """Load the model that training begins with."""
        self.model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
        self.step = 0
        """The step whose weights it has."""

    @torch.no_grad()
    def update(self, step: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take the weights of a step; raise ValueError unless they are all of the model's own."""
        awaited = dict(self.model.named_parameters())
        for name, tensor in weights:
            parameter = awaited.pop(name, None)
            if parameter is None or (parameter.shape, parameter.dtype) != (
                tensor.shape,
                tensor.dtype,
            ):
                message = f"The server has no {name} of {tuple(tensor.shape)}, {tensor.dtype}."
                raise ValueError(message)
            parameter.copy_(tensor)
        if awaited:
            message = f"The server did not get {', '.join(awaited)}."
            raise ValueError(message)
        self.step = step

    def generate(self, prompts: list[str], tokens: int) -> tuple[list[list[int]], list[list[int]]]:
        """Return the tokens of the prompts, and those that the model appends."""
        rows = self.tokenizer(prompts, padding=True, return_tensors="pt")
        written = self.model.generate(
            rows["input_ids"],
            attention_mask=rows["attention_mask"],
            max_new_tokens=tokens,
            do_sample=True,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        width = rows["input_ids"].shape[1]
        masks = rows["attention_mask"].bool()
        pairs = zip(rows["input_ids"], masks, strict=True)
        prompt_ids = [row[mask].tolist() for row, mask in pairs]
        return prompt_ids, [row.tolist() for row in written[:, width:]]


class StowedGRPO(Stowed, GRPOTrainer):
    """TRL's trainer with a placed model."""


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="Qwen/Qwen3-4B", help="name or folder")
    parser.add_argument("--data", default="prompts.jsonl")
    parser.add_argument("--output", default="grpo", help="for checkpoints and states")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a completion")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--tiny", action="store_true", help="a toy model: needs nothing")
    args = parser.parse_args(words)
    if args.tiny:
        from tiny import make_tiny  # noqa: PLC0415  # you need it for --tiny only

        args.model, texts = make_tiny(Path(args.output) / "tiny")
        args.data = f"{args.output}/prompts.jsonl"
        lines = Path(texts).read_text(encoding="utf-8").splitlines()
        prompts = [" ".join(json.loads(line)["text"].split()[:4]) for line in lines]
        Path(args.data).write_text("\n".join(json.dumps({"prompt": p}) for p in prompts))
        args.tokens, args.lr, args.steps = 8, 1e-3, min(args.steps, 3)
    return args


def different_words(completions: list[str], **_: object) -> list[float]:
    """Return the rewards: one for each different word. Write your own."""
    return [float(len(set(text.split()))) for text in completions]


def main(args: argparse.Namespace) -> Any:  # noqa: ANN401  # transformers has no types here
    """Train, and return the trainer."""
    server = Server(args.model)

    def roll_out(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        """Return completions by the weights of the last step: TRL calls this before each."""
        step = trainer.state.global_step
        if step != server.step:
            server.update(step, named_weights(trainer.model))
        prompt_ids, completion_ids = server.generate(prompts, args.tokens)
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}

    training = GRPOConfig(
        args.output,
        learning_rate=args.lr,
        max_steps=args.steps,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=args.tokens,
        bf16=False,  # the weights are bf16; autocast would hold a second copy of each
        gradient_checkpointing=False,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
    )
    trainer = StowedGRPO(
        AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16),
        different_words,
        training,
        train_dataset=load_dataset("json", data_files=args.data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        rollout_func=roll_out,
        stow={"plan": Plan(parameters="host", states="disk", overlap="forward")},
    )
    trainer.train()
    server.update(args.steps, named_weights(trainer.model))
    return trainer


if __name__ == "__main__":
    main(parse())
