"""``Stowed``: placed models in the Trainer of transformers, against the plain loop."""

import gc
import os
import signal
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

import tensorstow
import trainers
from ranks.pool import Ranks
from tensorstow import Plan
from tensorstow.base.errors import KeywordError, OptionError
from tensorstow.integrations import trainer_refusals
from tensorstow.integrations.transformers import (
    DropSnapshots,
    StopCallback,
    Stowed,
    adamw,
    attach,
)

Pool = Callable[[int], Ranks]
ON_DISK = Plan(parameters="disk", states="disk")
TOKENS = torch.tensor([[1, 2]])


def trainer(
    place: Path,
    plan: Plan = ON_DISK,
    *,
    model: Any = None,  # noqa: ANN401
    batches: int = 3,
    durable: bool = False,
    callbacks: Any = (),  # noqa: ANN401
    **given: Any,  # noqa: ANN401
) -> Stowed:
    where: dict[str, Any] = {"plan": plan, "policy": trainers.SMALL}
    if durable:
        where["dir"] = place / "run"
    return Stowed(
        trainers.model() if model is None else model,
        trainers.arguments(place, **given),
        train_dataset=trainers.examples(batches),
        eval_dataset=trainers.examples(1),
        callbacks=list(callbacks),
        stow=where,
    )


def finish(made: Stowed) -> list[bytes]:
    optimizer = made._optimizer()
    optimizer.wait()
    found = trainers.bits(made.model)
    optimizer.close()
    return found


def by_hand(batches: int, accumulation: int = 1, clip: float | None = 1.0) -> list[bytes]:
    return trainers.plain_loop(trainers.windows(batches, accumulation), clip=clip, inside=True)


class Generates(transformers.TrainerCallback):
    """Greedy tokens after each step, of the weights of then."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []

    def on_step_end(self, *_: object, model: Any, **__: object) -> None:  # noqa: ANN401
        found = model.generate(TOKENS, max_new_tokens=3, do_sample=False, pad_token_id=0)
        self.tokens.append(found[0].tolist())


@pytest.mark.parametrize(
    "plan",
    [Plan(), ON_DISK, Plan(states="disk", overlap="forward")],
    ids=["host", "disk", "forward"],
)
def test_weights_are_those_of_the_plain_loop(plan: Plan, tmp_path: Path) -> None:
    """Evaluation before and between steps, and generation, read the weights of then."""
    generates = Generates()
    made = trainer(tmp_path, plan, callbacks=[generates], eval_strategy="steps", eval_steps=2)
    before = made.evaluate()["eval_loss"]
    batch = trainers.micro_batches(1)[0]
    assert before == pytest.approx(trainers.model()(input_ids=batch, labels=batch).loss.item())
    made.train()
    assert len(generates.tokens) == 3
    again = made.model.generate(TOKENS, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert generates.tokens[-1] == again[0].tolist()
    assert tensorstow.plan_of(made.model) == plan.settled()
    assert finish(made) == by_hand(3)


def test_the_last_window_may_be_short(tmp_path: Path) -> None:
    made = trainer(tmp_path, batches=8, gradient_accumulation_steps=3, max_grad_norm=0.1)
    made.train()
    assert finish(made) == by_hand(8, 3, clip=0.1) != by_hand(8, 3)


def test_updates_run_beside_backward_and_the_norm_is_logged(tmp_path: Path) -> None:
    plan = Plan(parameters="disk", states="disk", overlap="backward")
    made = trainer(tmp_path, plan, max_grad_norm=0, logging_strategy="steps", logging_steps=1)
    made.train()
    norms = [row["grad_norm"] for row in made.state.log_history if "grad_norm" in row]
    assert len(norms) == 3
    assert min(norms) > 0
    assert finish(made) == by_hand(3, clip=None)


@pytest.mark.parametrize("most", [1.0, 1e-3, 1e9])
def test_updates_beside_backward_are_undone_where_it_clips(most: float, tmp_path: Path) -> None:
    plan = Plan(states="disk", overlap="speculative", accumulation_steps=2)
    made = trainer(
        tmp_path, plan, batches=8, gradient_accumulation_steps=2, max_grad_norm=most, durable=False
    )
    made.train()
    assert finish(made) == by_hand(8, 2, clip=most)


@pytest.mark.parametrize("durable", [True, False], ids=["reference", "files"])
def test_a_run_goes_on_from_a_checkpoint(tmp_path: Path, durable: bool) -> None:  # noqa: FBT001
    """In new objects, whose weights are others; the files are those of ``from_pretrained``."""
    saves = {**trainers.EACH_STEP, "save_total_limit": 2}
    first = trainer(tmp_path, durable=durable, batches=4, **saves)
    first.train()
    folder = tmp_path / "out" / "checkpoint-3"
    if durable:
        assert trainers.nbytes_beside_weights(folder) < 1 << 20
        assert (folder / "optimizer.pt").stat().st_size < 10_000
        assert [s.step for s in first._optimizer().snapshots()] == [3, 4]
    complete = finish(first)
    del first
    gc.collect()
    read = transformers.AutoModelForCausalLM.from_pretrained(folder.with_name("checkpoint-4"))
    assert trainers.bits(read) == complete

    other = trainers.model()
    torch.nn.init.normal_(other.transformer.wte.weight)
    second = trainer(tmp_path, durable=durable, batches=4, model=other)
    second.train(resume_from_checkpoint=str(folder))
    assert second.state.global_step == 4
    assert finish(second) == complete == by_hand(4)


class Worse(transformers.TrainerCallback):
    """A score that falls from step to step: the first checkpoint is the best."""

    def on_evaluate(
        self,
        args: object,  # noqa: ARG002
        state: transformers.TrainerState,
        control: object,  # noqa: ARG002
        metrics: dict[str, float],
        **_: object,
    ) -> None:
        metrics["eval_score"] = -state.global_step


BEST: dict[str, Any] = {
    **trainers.EACH_STEP,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "score",
    "greater_is_better": True,
}


@pytest.mark.parametrize(
    "plan", [ON_DISK, Plan(states="disk", overlap="forward")], ids=["disk", "forward"]
)
def test_the_best_weights_are_read_into_place_at_the_end(plan: Plan, tmp_path: Path) -> None:
    """A tensor at a time, with updates under way before; tied weights are there once."""
    made = trainer(tmp_path, plan, durable=True, save_total_limit=1, callbacks=[Worse()], **BEST)
    made.train()
    assert str(made.state.best_model_checkpoint).endswith("checkpoint-1")
    read = transformers.AutoModelForCausalLM.from_pretrained(made.state.best_model_checkpoint)
    assert [s.step for s in made._optimizer().snapshots()] == [1, 3]
    assert finish(made) == trainers.bits(read) != by_hand(3)


class Stop(transformers.TrainerCallback):
    """The signal of a scheduler, after a step; transformers itself waits some seconds first."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.jit_manager: Any = None

    def on_step_end(
        self,
        _args: object,
        state: transformers.TrainerState,
        *_: object,
        **__: object,
    ) -> None:
        """Send the signal, and wait until it is to be served."""
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)
            while not self.jit_manager.is_checkpoint_requested:
                time.sleep(0.01)


def test_a_signal_saves_a_checkpoint_and_ends_training(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    stop = Stop(2)
    first = trainer(tmp_path, batches=4, durable=True, callbacks=[stop], enable_jit_checkpoint=True)
    (jit,) = (c for c in first.callback_handler.callbacks if "JIT" in type(c).__name__)
    stop.jit_manager = jit.jit_manager
    stop.jit_manager.kill_wait = 0
    first.train()
    assert first.state.global_step < 4
    assert signal.getsignal(signal.SIGTERM) == before
    finish(first)
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-2"]
    second = trainer(tmp_path, batches=4, durable=True)
    second.train(resume_from_checkpoint=True)
    assert finish(second) == by_hand(4)


class Sends(transformers.TrainerCallback):
    """A signal in the step after ``step`` others, in forward, in backward or before the update."""

    def __init__(self, moment: str, step: int) -> None:
        self.moment, self.step = moment, step
        self.is_next = False

    def on_step_begin(
        self,
        _args: object,
        state: transformers.TrainerState,
        *_: object,
        model: Any,  # noqa: ANN401
        **__: object,
    ) -> None:
        self.is_next = state.global_step == self.step
        if self.is_next and self.moment in {"forward", "backward"}:
            block = model.transformer.h[1]
            if self.moment == "forward":
                block.register_forward_pre_hook(lambda *_: self.send())
            else:
                block.register_full_backward_hook(lambda *_: self.send())

    def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
        if self.moment == "step":
            self.send()

    def send(self) -> None:
        if self.is_next:
            self.is_next = False
            os.kill(os.getpid(), signal.SIGTERM)


def until_stopped(
    place: Path,
    moment: str,
    step: int,
    *,
    sends: bool = True,
    **given: Any,  # noqa: ANN401
) -> tuple[object, int, list[bytes]]:
    """Stop after a step, and train on; return the status, the step, and the last weights."""
    before = signal.getsignal(signal.SIGTERM)
    stops = StopCallback({"SIGTERM": 75})
    callbacks = [Sends(moment, step), stops] if sends else [stops]
    first = trainer(place, durable=True, callbacks=callbacks, max_grad_norm=0, **given)
    with pytest.raises(SystemExit) as ended:
        first.train()
    stopped = first.state.global_step
    trainers.whole(first)
    stops._close()
    assert signal.getsignal(signal.SIGTERM) == before
    second = trainer(place, durable=True, callbacks=[stops], max_grad_norm=0, **given)
    second.train(resume_from_checkpoint=True)
    assert signal.getsignal(signal.SIGTERM) == before
    return ended.value.code, stopped, trainers.whole(second)


@pytest.mark.parametrize("moment", ["forward", "backward", "step"])
@pytest.mark.parametrize(
    ("step", "given"),
    [
        (1, {"gradient_accumulation_steps": 2}),
        (1, {"eval_strategy": "steps", "eval_steps": 2}),
        (3, {**trainers.EACH_STEP}),  # the last step
    ],
)
def test_a_stop_saves_a_checkpoint_and_training_goes_on_from_it(
    tmp_path: Path, moment: str, step: int, given: dict[str, Any]
) -> None:
    accumulation = given.get("gradient_accumulation_steps", 1)
    batches = 4 * accumulation
    status, stopped, weights = until_stopped(tmp_path, moment, step, batches=batches, **given)
    assert (status, stopped) == (75, step + 1)
    assert weights == by_hand(batches, accumulation, clip=None)


def test_one_of_both_ways_to_save_at_a_signal(tmp_path: Path) -> None:
    made = trainer(tmp_path, durable=True, callbacks=[StopCallback()], enable_jit_checkpoint=True)
    with pytest.raises(OptionError, match="which saves at the signal too"):
        made.train()
    finish(made)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks it
def test_adapters_over_a_base_on_disk(tmp_path: Path) -> None:
    """The base is frozen; a checkpoint has the adapters alone, and the run goes on from it."""
    plain = transformers.Trainer(
        trainers.adapted(),
        args := trainers.arguments(tmp_path, max_grad_norm=0),
        train_dataset=trainers.examples(3),
        optimizer_cls_and_kwargs=adamw(args),
    )
    plain.train()
    saves = {"save_strategy": "steps", "save_steps": 2, "max_grad_norm": 0}
    first = trainer(tmp_path, model=trainers.adapted(), **saves)
    first.train()
    folder = tmp_path / "out" / "checkpoint-2"
    assert (folder / "adapter_model.safetensors").exists()
    assert not (folder / "model.safetensors").exists()
    second = trainer(tmp_path, model=trainers.adapted(), max_grad_norm=0)
    second.train(resume_from_checkpoint=str(folder))
    assert finish(first) == finish(second) == trainers.bits(plain.model)


# --- several ranks ---


def numbered(place: Path) -> list[list[bytes]]:
    """Train with a checkpoint in each step, then from the third in new objects."""
    with trainers.one_of_two(dist.get_rank()):
        given: dict[str, Any] = {"batches": 8, "durable": True, "max_grad_norm": 0}
        saves = {**trainers.EACH_STEP, "save_total_limit": 2}
        first = trainer(place, ON_DISK, **given, **saves)
        assert first.args.world_size == 2
        first.train()
        assert [s.step for s in first._optimizer().snapshots()] == [3, 4]
        found = [trainers.whole(first)]
        dist.barrier()
        second = trainer(place, ON_DISK, callbacks=[Worse()], **given, **BEST)
        second.train(resume_from_checkpoint=str(place / "out" / "checkpoint-3"))
        assert second.state.global_step == 4
        assert str(second.state.best_model_checkpoint).endswith("checkpoint-4")
        return [*found, trainers.whole(second)]


def test_ranks_name_the_snapshot_that_a_reference_needs(ranks: Pool, tmp_path: Path) -> None:
    """Two ranks with a micro-batch each are one with two; snapshots go with checkpoints."""
    plain = by_hand(8, 2, clip=None)
    assert ranks(2).run(numbered, tmp_path) == [[plain, plain]] * 2
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint-4")
    assert trainers.bits(read) == plain


def adapters_of_two(place: Path, plan: Plan, **options: Any) -> list[list[bytes]]:  # noqa: ANN401
    """Train adapters with a checkpoint in each step, then from the third in new objects."""
    with trainers.one_of_two(dist.get_rank()), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's, of transformers
        given: dict[str, Any] = {"batches": 8, "durable": True, "max_grad_norm": 0}
        saves = {**trainers.EACH_STEP, "save_total_limit": 2}
        first = trainer(place, plan, model=trainers.adapted(**options), **given, **saves)
        first.train()
        found = [trainers.whole(first)]
        dist.barrier()
        second = trainer(
            place, plan, model=trainers.adapted(**options), callbacks=[Worse()], **given, **BEST
        )
        second.train(resume_from_checkpoint=str(place / "out" / "checkpoint-3"))
        assert str(second.state.best_model_checkpoint).endswith("checkpoint-4")
        found.append(trainers.whole(second))
        best = {**given, **BEST, "save_total_limit": 1}
        third = trainer(
            place / "best", plan, model=trainers.adapted(**options), callbacks=[Worse()], **best
        )
        third.train()
        assert str(third.state.best_model_checkpoint).endswith("checkpoint-1")
        return [*found, trainers.whole(third)]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks it
@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (ON_DISK, {}),
        (Plan(states="disk", stage=1), {"modules_to_save": ["ln_f"]}),
        (Plan(parameters="host", states="disk"), {"modules_to_save": ["ln_f"]}),
    ],
    ids=["disk", "stage 1", "host"],
)
def test_adapters_on_two_ranks(
    ranks: Pool, tmp_path: Path, plan: Plan, options: dict[str, Any]
) -> None:
    """The bits of one process with both micro-batches; peft reads what rank 0 has saved."""
    import peft  # noqa: PLC0415  # seconds

    alone = trainer(
        tmp_path / "alone",
        ON_DISK,
        model=trainers.adapted(**options),
        batches=8,
        gradient_accumulation_steps=2,
        max_grad_norm=0,
    )
    alone.train()
    wanted = finish(alone)
    found = ranks(2).run(partial(adapters_of_two, **options), tmp_path, plan)

    def saved(folder: Path) -> list[bytes]:
        return trainers.bits(peft.PeftModel.from_pretrained(trainers.model(), folder))

    assert saved(tmp_path / "out" / "checkpoint-4") == wanted
    best = saved(tmp_path / "best" / "out" / "checkpoint-1")
    assert best != wanted
    assert found == [[wanted, wanted, best]] * 2


def stopped_of_two(place: Path, moment: str, rank: int) -> tuple[object, int, list[bytes]]:
    with trainers.one_of_two(dist.get_rank()):
        return until_stopped(place, moment, 1, sends=dist.get_rank() == rank, batches=8)


@trainers.MOMENTS_OF_RANKS
def test_a_signal_to_one_rank_stops_both(
    ranks: Pool, tmp_path: Path, moment: str, rank: int
) -> None:
    plain = by_hand(8, 2, clip=None)
    assert ranks(2).run(stopped_of_two, tmp_path, moment, rank) == [(75, 2, plain)] * 2


# --- what is refused ---

REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "autocast": ({"bf16": True}, {}, "16-bit copy of every weight"),
    "cast": ({"bf16_full_eval": True}, {}, "casts the model"),
    "optimizer": ({"optim": "adamw_torch_8bit"}, {}, 'optim="adamw_torch_8bit" was given'),
    "tries": ({"auto_find_batch_size": True}, {}, "second try"),
    "clipping": ({}, {"plan": Plan(overlap="backward")}, "max_grad_norm=1.0"),
    "count": (
        {"gradient_accumulation_steps": 3},
        {"plan": Plan(stage=1, accumulation_steps=2)},
        "make them equal",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_go_wrong_in_silence_is_refused(name: str, tmp_path: Path) -> None:
    given, where, message = REFUSED[name]
    with pytest.raises(OptionError, match=message):
        Stowed(trainers.model(), trainers.arguments(tmp_path, **given), stow=where)
    trainers.forget_state()  # of another precision


MADE = SimpleNamespace(
    accelerator=SimpleNamespace(mixed_precision="no"),
    is_deepspeed_enabled=False,
    is_fsdp_enabled=False,
    model=object(),
    model_init=None,
    optimizer=None,
    optimizer_cls_and_kwargs=None,
)
ARGUMENTS = SimpleNamespace(
    auto_find_batch_size=False,
    bf16_full_eval=False,
    device=torch.device("cpu"),
    fp16_full_eval=False,
    gradient_accumulation_steps=1,
    max_grad_norm=1.0,
    n_gpu=1,
    optim="adamw_torch",
    optim_args=None,
    save_only_model=False,
    save_strategy="steps",
    torch_compile=False,
    world_size=1,
)
SEVERAL = {"world_size": 2}
REFUSED_OF: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "nothing": ({}, {}, ""),
    "fsdp": ({"is_fsdp_enabled": True}, {}, "place the model too"),
    "compiled": ({}, {"torch_compile": True}, "compile its blocks before"),
    "DataParallel": ({}, {"n_gpu": 2}, "one for each GPU, with torchrun"),
    "device": ({}, {"device": torch.device("cuda")}, "computes on cuda"),
    "anew": ({"model_init": object()}, {}, "makes a model anew"),
    "made before": ({"optimizer": object()}, {}, "an optimizer was given"),
    "of attach": ({"optimizer_cls_and_kwargs": (dict, {})}, {}, "an optimizer was given"),
    "vLLM": ({}, {"use_vllm": True}, "vLLM is sent the weights"),
    "reference": ({}, {"sync_ref_model": True}, "the reference model is moved"),
    "rank 0": ({}, SEVERAL, "in which it has its part of the states"),
    "srun": ({}, {**SEVERAL, "save_strategy": "no"}, "knows of 2 ranks, and stow of 1"),
}


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the arguments are of the CPU")
@pytest.mark.parametrize("name", REFUSED_OF)
def test_other_machines_and_trainers_are_refused_too(name: str) -> None:
    trainer_has, given, message = REFUSED_OF[name]
    made: Any = SimpleNamespace(**{**vars(MADE), **trainer_has})
    made.args = SimpleNamespace(**{**vars(ARGUMENTS), **given})
    if not message:
        trainer_refusals.refuse_for_model(made, {}, durable=False)
        return
    with pytest.raises(OptionError, match=message):
        trainer_refusals.refuse_for_model(made, {}, durable=False)


def test_attach_is_not_for_a_placed_model(tmp_path: Path) -> None:
    made = trainer(tmp_path, durable=True)
    assert any(isinstance(one, DropSnapshots) for one in made.callback_handler.callbacks)
    with pytest.raises(OptionError, match=r"keywords in its stow="):
        attach(made, states="disk")


def test_a_misspelled_keyword_of_stow_is_found_at_once(tmp_path: Path) -> None:
    for keyword, meant in (("plam", "plan"), ("state_fromat", "state_format")):
        with pytest.raises(KeywordError, match=f"{keyword}=.*Did you mean {meant}="):
            Stowed(trainers.model(), trainers.arguments(tmp_path), stow={keyword: ON_DISK})


def test_a_stop_leaves_an_epoch_its_evaluation() -> None:
    stops = StopCallback()
    ended: list[str] = []
    stops._end = lambda: ended.append("ended")
    for strategy, wanted in (("epoch", 0), ("steps", 1), ("no", 2)):
        args = transformers.TrainingArguments("nowhere", eval_strategy=strategy, use_cpu=True)
        stops.on_epoch_end(args)
        assert len(ended) == wanted
