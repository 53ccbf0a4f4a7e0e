"""TRL's trainers with our optimizer: against a loop by hand over the same losses."""

import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

import trainers
from ranks.pool import Ranks
from tensorstow import Plan
from tensorstow.integrations.transformers import DropSnapshots, Stowed, adamw, attach

STEPS = 4
WHOLE: dict[str, Any] = {"bf16": False, "gradient_checkpointing": False, "max_length": None}
"""What TRL has otherwise than transformers."""
pytestmark = [
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing`:FutureWarning"),  # TRL's
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what TRL imports
]


@pytest.fixture(autouse=True, scope="module")
def _loaded() -> None:
    """Load TRL in the one process that tests it, and hide it from the collector too."""
    import trl.trainer.dpo_trainer  # noqa: PLC0415  # seconds
    import trl.trainer.grpo_trainer  # noqa: PLC0415
    import trl.trainer.sft_trainer  # noqa: F401, PLC0415

    gc.freeze()


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return one that is made here: TRL asks the hub for a model's own."""
    words = {f"w{i}": i for i in range(trainers.WORDS)}
    made = Tokenizer(WordLevel(words, unk_token="w1"))  # noqa: S106  # no password
    made.pre_tokenizer = WhitespaceSplit()
    names = {"eos_token": "w0", "pad_token": "w0", "unk_token": "w1"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)


def rows() -> list[list[int]]:
    return [row["input_ids"].tolist() for row in trainers.examples(STEPS)]


def data(**columns: list[Any]) -> Any:  # noqa: ANN401
    import datasets  # noqa: PLC0415

    return datasets.Dataset.from_dict(columns)


def sft(place: Path, *, stow: Any = None, **given: Any) -> Any:  # noqa: ANN401
    from trl import SFTConfig, SFTTrainer  # noqa: PLC0415

    class StowedSFT(Stowed, SFTTrainer):  # as in the guide
        pass

    given = {"dataset_kwargs": {"skip_prepare_dataset": True}, **given}
    args = SFTConfig(str(place / "out"), **{**trainers.OF_A_TRAINER, **WHOLE, **given})
    found = data(input_ids=rows(), labels=rows())
    named = {"train_dataset": found, "eval_dataset": found, "processing_class": tokenizer()}
    if stow is not None:
        return StowedSFT(trainers.model(), args, **named, stow=stow)
    return SFTTrainer(trainers.model(), args, **named)


def dpo(place: Path, **given: Any) -> Any:  # noqa: ANN401
    from trl import DPOConfig, DPOTrainer  # noqa: PLC0415

    args = DPOConfig(str(place / "out"), **{**trainers.OF_A_TRAINER, **WHOLE, **given})
    words = [[f"w{token}" for token in row] for row in rows()]
    found = data(
        prompt=[" ".join(row[:3]) for row in words],
        chosen=[" ".join(row[3:]) for row in words],
        rejected=[" ".join(row[:2:-1]) for row in words],
    )
    named = {"train_dataset": found, "eval_dataset": found, "processing_class": tokenizer()}
    return DPOTrainer(trainers.model(), trainers.model(), args, **named)


def different_words(completions: list[str], **_: object) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def grpo(place: Path, **given: Any) -> Any:  # noqa: ANN401
    from trl import GRPOConfig, GRPOTrainer  # noqa: PLC0415

    whole = {name: value for name, value in WHOLE.items() if name != "max_length"}
    short = {"num_generations": 2, "max_completion_length": 4, "max_steps": 3}
    args = GRPOConfig(str(place / "out"), **{**trainers.OF_A_TRAINER, **whole, **short, **given})
    prompts = data(prompt=[f"w{row[0]} w{row[1]}" for row in rows()])
    named = {"train_dataset": prompts, "processing_class": tokenizer()}
    return GRPOTrainer(trainers.model(), different_words, args, **named)


def by_hand(
    made: Any,  # noqa: ANN401
    accumulation: int = 1,
    clip: float | None = 1.0,
    *,
    inside: bool = False,
) -> list[bytes]:
    """Train a trainer's model by its own loss, with states in RAM, as ``plain_loop`` does."""
    batches = list(made.get_train_dataloader())
    steps = [batches[i : i + accumulation] for i in range(0, len(batches), accumulation)]

    def losses(net: Any, window: list[Any]) -> Iterator[torch.Tensor]:  # noqa: ANN401
        items = None
        if "labels" in window[0]:
            items = sum((batch["labels"][:, 1:] != -100).sum() for batch in window)
        for batch in window:
            yield made.compute_loss(net, batch, num_items_in_batch=items)

    net, total = made.model.train(), len(steps)
    return trainers.by_hand(net, steps, losses, clip=clip, inside=inside, total=total)


@pytest.mark.parametrize(("make", "overlap"), [(sft, "none"), (dpo, "forward")])
def test_weights_are_those_of_the_plain_loop(make: Any, overlap: Any, tmp_path: Path) -> None:  # noqa: ANN401
    """Evaluation between steps too: it changes nothing."""
    made = make(tmp_path, eval_strategy="steps", eval_steps=2)
    attach(made, states="disk", policy=trainers.SMALL, overlap=overlap)
    made.train()
    assert trainers.finish(made) == by_hand(make(tmp_path))


def test_the_last_window_may_be_short(tmp_path: Path) -> None:
    """Four micro-batches by three; clipping changes weights as it does in the plain loop."""
    given: dict[str, Any] = {"gradient_accumulation_steps": 3, "max_grad_norm": 0.1}
    made = sft(tmp_path, **given)
    made.optimizer_cls_and_kwargs = adamw(made.args, states="disk", policy=trainers.SMALL)
    made.train()
    plain = partial(by_hand, accumulation=3)
    assert trainers.finish(made) == plain(sft(tmp_path), clip=0.1) != plain(sft(tmp_path))


@pytest.mark.parametrize("make", [sft, dpo])
def test_a_run_goes_on_from_a_checkpoint(make: Any, tmp_path: Path) -> None:  # noqa: ANN401
    where = {"states": "disk", "dir": tmp_path / "run", "policy": trainers.SMALL}
    first = make(tmp_path, **trainers.EACH_STEP, save_total_limit=2)
    attach(first, **where)
    assert any(isinstance(one, DropSnapshots) for one in first.callback_handler.callbacks)
    first.train()
    assert [s.step for s in first.optimizer.optimizer.snapshots()] == [3, 4]
    folder = tmp_path / "out" / "checkpoint-3"
    assert trainers.nbytes_beside_weights(folder) < 1 << 20
    assert (folder / "optimizer.pt").stat().st_size < 10_000
    complete = trainers.finish(first)
    del first
    gc.collect()
    second = make(tmp_path)
    attach(second, **where)
    second.train(resume_from_checkpoint=str(folder))
    assert second.state.global_step == STEPS
    assert trainers.finish(second) == complete == by_hand(make(tmp_path))


def test_a_trainer_that_generates_reads_the_weights_of_then(tmp_path: Path) -> None:
    """GRPO's completions come from the model between steps: other weights, other completions."""
    results = []
    for where in ({}, {"states": "disk", "overlap": "forward"}):
        made = grpo(tmp_path)
        attach(made, policy=trainers.SMALL, **where)
        made.train()
        results.append(trainers.finish(made))
    assert results[0] == results[1] != trainers.bits(trainers.model())


def test_a_reference_model_follows_the_weights_of_then(tmp_path: Path) -> None:
    """A callback reads parameters right behind a step, whose update may still run."""
    results = []
    for where in ({}, {"states": "disk", "overlap": "forward"}):
        made = dpo(tmp_path, sync_ref_model=True, ref_model_sync_steps=1)
        attach(made, policy=trainers.SMALL, **where)
        made.train()
        results.append([trainers.bits(made.ref_model), trainers.finish(made)])
    assert results[0] == results[1]
    assert results[0][0] != trainers.bits(trainers.model())


def test_whole_models_on_disk(tmp_path: Path) -> None:
    """``Stowed`` before a trainer of TRL."""
    placement = {"plan": Plan(parameters="disk", states="disk"), "policy": trainers.SMALL}
    made = sft(tmp_path, stow=placement, eval_strategy="steps", eval_steps=2)
    made.train()
    assert trainers.finish(made) == by_hand(sft(tmp_path), inside=True)


def numbered(place: Path) -> list[list[bytes]]:
    """Train with checkpoints, then from the first of them, on two ranks."""
    placement = {"plan": Plan(parameters="disk", states="disk"), "dir": place / "run"}
    given: dict[str, Any] = {"stow": {**placement, "policy": trainers.SMALL}, "max_grad_norm": 0}
    with trainers.one_of_two(dist.get_rank()):
        first = sft(place, **trainers.EACH_STEP, **given)
        first.train()
        found = [trainers.whole(first)]
        dist.barrier()
        second = sft(place, **given)
        second.train(resume_from_checkpoint=str(place / "out" / "checkpoint-1"))
        return [*found, trainers.whole(second)]


def test_two_ranks_share_a_model(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """Two ranks with a micro-batch each are one with two."""
    plain = by_hand(sft(tmp_path), accumulation=2, clip=None)
    assert ranks(2).run(numbered, tmp_path) == [[plain, plain]] * 2
