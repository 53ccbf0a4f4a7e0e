"""The Trainer of transformers: against the plain loop, and from checkpoint to checkpoint."""

import gc
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import children
import tensorstow
import trainers
from largest_tensor import LargestTensor
from tensorstow.base.errors import OptionError
from tensorstow.integrations.trainer_snapshots import _in_order
from tensorstow.integrations.transformers import DropSnapshots, LateAdamW, adamw, attach

DURABLE: dict[str, Any] = {"states": "disk", "dir": True}
PLACES: list[dict[str, Any]] = [
    {"states": "disk"},
    {"states": "disk", "overlap": "forward"},
    {"states": 0.5, "dir": True},
]


def trainer(
    place: Path,
    where: dict[str, Any],
    *,
    batches: int = 5,
    callbacks: Any = (),  # noqa: ANN401
    **given: Any,  # noqa: ANN401
) -> transformers.Trainer:
    if where.get("dir"):
        where = {**where, "dir": place / "run"}
    args = trainers.arguments(place, **given)
    return transformers.Trainer(
        trainers.model(),
        args,
        train_dataset=trainers.examples(batches),
        eval_dataset=trainers.examples(1),
        optimizer_cls_and_kwargs=adamw(args, policy=trainers.SMALL, **where),
        callbacks=list(callbacks),
    )


def inner(made: transformers.Trainer) -> tensorstow.AdamW:
    return made.optimizer.optimizer  # accelerate's wrapper holds it


@pytest.mark.parametrize("where", PLACES, ids=str)
def test_weights_are_those_of_the_plain_loop(where: dict[str, Any], tmp_path: Path) -> None:
    """Evaluation between steps too: it changes nothing."""
    made = trainer(tmp_path, where, eval_strategy="steps", eval_steps=2)
    made.train()
    assert trainers.finish(made) == trainers.plain_loop(trainers.windows(5, 1))


def test_the_last_window_may_be_short(tmp_path: Path) -> None:
    """Eight micro-batches by three; the norm is clipped as in the plain loop, which it changes."""
    made = trainer(
        tmp_path,
        {"states": "disk"},
        batches=8,
        gradient_accumulation_steps=3,
        max_grad_norm=0.1,
    )
    made.train()
    by_hand = partial(trainers.plain_loop, trainers.windows(8, 3))
    assert trainers.finish(made) == by_hand(clip=0.1) != by_hand(clip=1.0)


def test_a_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """From the older of two, in new objects; checkpoints are small, and generation is allowed."""
    first = trainer(tmp_path, DURABLE, save_strategy="steps", save_steps=2)
    first.train()
    tokens = torch.tensor([[1, 2]])
    first.model.generate(tokens, max_new_tokens=2, do_sample=False, pad_token_id=0)
    checkpoints = sorted((tmp_path / "out").glob("checkpoint-*"))
    assert [path.name for path in checkpoints] == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
    assert all(trainers.nbytes_beside_weights(path) < 1 << 20 for path in checkpoints)
    assert (checkpoints[0] / "optimizer.pt").stat().st_size < 10_000
    complete = trainers.finish(first)
    del first
    gc.collect()

    second = trainer(tmp_path, DURABLE)
    second.train(resume_from_checkpoint=str(checkpoints[0]))
    assert second.state.global_step == 5
    assert trainers.finish(second) == complete == trainers.plain_loop(trainers.windows(5, 1))


class Copies(transformers.TrainerCallback):
    """Reads weights past forward, as an average of weights or a reference model does."""

    def __init__(self) -> None:
        self.read: list[list[bytes]] = []

    def on_step_end(self, *_: object, model: nn.Module, **__: object) -> None:
        self.read.append([p.data.clone().numpy().tobytes() for p in model.parameters()])


def test_weights_that_are_read_past_forward_are_new_ones(tmp_path: Path) -> None:
    found = []
    for where in ({"states": "disk", "overlap": "forward"}, {"states": "host"}):
        copies = Copies()
        made = trainer(tmp_path, where, batches=3, callbacks=[copies])
        made.train()
        trainers.finish(made)
        found.append(copies.read)
    beside, plain = found
    assert beside == plain
    assert plain[0] != plain[1] != plain[2]


def test_snapshots_go_with_their_checkpoints(tmp_path: Path) -> None:
    saves = {**trainers.EACH_STEP, "save_total_limit": 1}
    first = trainer(tmp_path, DURABLE, callbacks=[DropSnapshots()], batches=3, **saves)
    first.train()
    (kept,) = inner(first).snapshots()
    assert kept.step == 3
    inner(first).snapshot("mine")
    trainers.finish(first)
    second = trainer(tmp_path, DURABLE, callbacks=[DropSnapshots()], batches=4, **saves)
    second.train(resume_from_checkpoint=True)
    named = {each.step: each.names for each in inner(second).snapshots()}
    assert named.keys() == {3, 4}
    assert tuple(named[3]) == ("mine",)  # the reference of the process before is gone
    trainers.finish(second)


class Meddles(transformers.TrainerCallback):
    """Does something in the folder of the checkpoints at the begin of a step."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self.step, self.act = step, act

    def on_step_begin(self, *given: Any, **_: Any) -> None:  # noqa: ANN401
        if given[1].global_step == self.step:
            self.act()


def flip(path: Path) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[200] ^= 4
    path.write_bytes(damaged)


def test_a_checkpoint_that_is_damaged_or_moved_keeps_its_snapshot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The bit may be repaired, and the moved checkpoint is loaded from its new place."""
    out = tmp_path / "out"

    def meddle() -> None:
        flip(out / "checkpoint-1" / "optimizer.pt")
        (out / "checkpoint-2").rename(tmp_path / "best")

    saves = {**trainers.EACH_STEP, "save_total_limit": 3}
    callbacks = [DropSnapshots(), Meddles(2, meddle)]
    first = trainer(tmp_path, DURABLE, callbacks=callbacks, batches=3, **saves)
    first.train()
    assert [s.step for s in inner(first).snapshots()] == [1, 2, 3]
    assert f"{out / 'checkpoint-2'} is gone, and the Trainer did not remove it" in caplog.text
    trainers.finish(first)
    caplog.clear()
    second = trainer(tmp_path, DURABLE, callbacks=[DropSnapshots()], batches=6, **saves)
    second.train(resume_from_checkpoint=str(out / "checkpoint-3"))
    assert [s.step for s in inner(second).snapshots()] == [1, 2, 4, 5, 6]  # 3 was removed
    assert f"{out / 'checkpoint-1' / 'optimizer.pt'} was to be read, and is damaged" in caplog.text
    assert not (out / "checkpoint-1").exists()
    inner(second).load_state_dict(torch.load(tmp_path / "best" / "optimizer.pt"))
    assert inner(second)._runtime.commits.step == 2
    trainers.finish(second)


@pytest.mark.parametrize("seconds", [0.01, 10])
def test_checkpoints_are_in_the_order_of_the_trainer(seconds: float, tmp_path: Path) -> None:
    for place, name in enumerate(["10", "2", "best", "2-best"]):
        folder = tmp_path / f"checkpoint-{name}"
        folder.mkdir()
        os.utime(folder, (0, 1000 + place * seconds))
    theirs = transformers.trainer_utils.sort_checkpoints(str(tmp_path), use_mtime=True)
    assert [str(folder) for folder in _in_order(tmp_path)] == theirs


class Moves(transformers.TrainerCallback):
    """Moves a folder in one event of the third step."""

    def __init__(self, event: str, folder: Path, to: Path) -> None:
        self.folder, self.to = folder, to
        setattr(self, event, self.move)

    def move(self, *given: Any, **_: Any) -> None:  # noqa: ANN401
        if given[1].global_step == 3:
            self.folder.rename(self.to)


@pytest.mark.parametrize(
    ("event", "limit"), [("on_save", 10), ("on_save", None), ("on_save", 0), ("on_step_end", 2)]
)
def test_a_checkpoint_that_a_callback_moves_keeps_its_snapshot(
    event: str, limit: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The Trainer removes none: their number does not exceed the limit."""
    folder, archived = tmp_path / "out" / "checkpoint-1", tmp_path / "archived"
    moves = Moves(event, folder, archived)
    callbacks = [moves, DropSnapshots()] if event == "on_save" else [DropSnapshots(), moves]
    saves = {**trainers.EACH_STEP, "save_total_limit": limit}
    made = trainer(tmp_path, DURABLE, callbacks=callbacks, batches=3, **saves)
    made.train()
    assert [s.step for s in inner(made).snapshots()] == [1, 2, 3]
    assert f"{folder} is gone, and the Trainer did not remove it" in caplog.text
    inner(made).load_state_dict(torch.load(archived / "optimizer.pt", weights_only=True))
    trainers.finish(made)


class CopiesFirst(transformers.TrainerCallback):
    """Copies the first checkpoint; moves the copy at a later step."""

    def __init__(self, copy: Path, moved_at: int | None) -> None:
        self.copy, self.moved_at = copy, moved_at

    def on_save(self, *given: Any, **_: Any) -> None:  # noqa: ANN401
        if given[1].global_step == 1:
            shutil.copytree(self.copy.with_name("checkpoint-1"), self.copy)
        if given[1].global_step == self.moved_at:
            self.copy.rename(self.copy.parent.with_name("best"))


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("moved_at", [None, 2])
def test_a_snapshot_that_a_copy_of_its_checkpoint_names_is_kept(
    tmp_path: Path, *, is_first: bool, moved_at: int | None
) -> None:
    """In the folder or moved out of it; copied before ``DropSnapshots`` is called, or after."""
    copy = tmp_path / "out" / "checkpoint-1-best"
    copies, ours = CopiesFirst(copy, moved_at), DropSnapshots()
    callbacks = [copies, ours] if is_first else [ours, copies]
    saves = {**trainers.EACH_STEP, "save_total_limit": 2 + (moved_at is None)}
    made = trainer(tmp_path, DURABLE, callbacks=callbacks, batches=3, **saves)
    made.train()
    place = copy if moved_at is None else tmp_path / "best"
    assert place.is_dir()
    assert not copy.with_name("checkpoint-1").exists()
    assert [s.step for s in inner(made).snapshots()] == [1, 2, 3]
    inner(made).load_state_dict(torch.load(place / "optimizer.pt", weights_only=True))
    trainers.finish(made)


def test_a_damaged_copy_keeps_the_snapshots_of_an_earlier_process(tmp_path: Path) -> None:
    """It may be repaired, and which snapshot it names is not known."""
    saves = {**trainers.EACH_STEP, "save_total_limit": 3}
    first = trainer(tmp_path, DURABLE, callbacks=[DropSnapshots()], batches=1, **saves)
    first.train()
    trainers.finish(first)
    out = tmp_path / "out"
    copy = shutil.copytree(out / "checkpoint-1", out / "checkpoint-900") / "optimizer.pt"
    flip(copy)
    os.utime(copy.parent, (2**32, 2**32))  # the Trainer removes the oldest
    second = trainer(tmp_path, DURABLE, callbacks=[DropSnapshots()], **saves)
    second.train(resume_from_checkpoint=str(out / "checkpoint-1"))
    assert copy.exists()
    assert not (out / "checkpoint-1").exists()
    assert [s.step for s in inner(second).snapshots()] == [1, 4, 5]
    trainers.finish(second)


@pytest.mark.parametrize(
    "saved", [torch.ones(3), 7, None, "a text", {"state": {}}, {"tensorstow": 1}]
)
def test_what_is_no_reference_names_no_snapshot(
    saved: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = tmp_path / "out" / "checkpoint-1"
    checkpoint.mkdir(parents=True)
    torch.save(saved, checkpoint / "optimizer.pt")
    saves = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    made = trainer(tmp_path, DURABLE, callbacks=[DropSnapshots()], batches=4, **saves)
    made.train()
    assert [s.step for s in inner(made).snapshots()] == [4]
    assert ("Its snapshot is kept" in caplog.text) == (saved == {"tensorstow": 1})
    trainers.finish(made)


def test_attach_is_the_same_for_a_trainer_that_is_made(tmp_path: Path) -> None:
    args = trainers.arguments(tmp_path, save_strategy="steps", save_steps=2)
    made = transformers.Trainer(trainers.model(), args, train_dataset=trainers.examples(3))
    attach(made, states="disk", dir=tmp_path / "run", policy=trainers.SMALL)
    made.train()
    assert any(isinstance(one, DropSnapshots) for one in made.callback_handler.callbacks)
    with pytest.raises(OptionError, match="has an optimizer already"):
        attach(made, states="disk")
    assert trainers.finish(made) == trainers.plain_loop(trainers.windows(3, 1))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks it
def test_adapters_of_peft_are_trained(tmp_path: Path) -> None:
    """The base is frozen and in no group; what decays is what the Trainer's own groups have."""
    args = trainers.arguments(tmp_path)
    results = []
    for given in ({}, {"states": "disk", "policy": trainers.SMALL}):
        made = transformers.Trainer(trainers.adapted(), args, train_dataset=trainers.examples(3))
        if given:
            attach(made, **given)
        else:  # the class: the Trainer makes the groups
            made.optimizer_cls_and_kwargs = (tensorstow.AdamW, {"lr": trainers.LEARNING_RATE})
        made.train()
        results.append(trainers.finish(made))
    assert results[0] == results[1]


def test_groups_and_options_are_the_trainers(tmp_path: Path) -> None:
    args = trainers.arguments(tmp_path, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6)
    made = transformers.Trainer(trainers.model(), args)
    theirs = made.create_optimizer().param_groups
    kind, options = adamw(args)
    ours = kind()(made.model, args, **options).param_groups  # axolotl passes args too
    for mine, other in zip(ours, theirs, strict=True):
        assert [id(p) for p in mine["params"]] == [id(p) for p in other["params"]]
        assert {mine[k] == other[k] for k in ("lr", "betas", "eps", "weight_decay")} == {True}


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "backward": ({}, {"overlap": "backward"}, "norm of all gradients after backward"),
    "deepspeed": ({"deepspeed": {"bf16": {}}}, {}, "DeepSpeed's own optimizer"),
    "fsdp": ({"fsdp": True}, {}, "exchanges the parameters"),
    "ranks": ({"world_size": 2}, {"dir": "/nvme"}, "for 2 processes"),
    "tries": ({"auto_find_batch_size": True}, {"dir": "/nvme"}, "second try"),
    "optimizer": ({"optim": "adafactor"}, {}, 'optim="adafactor" was given'),
    "8 bit": ({"optim": "adamw_torch_8bit"}, {}, 'optim="adamw_torch_8bit" was given'),
    "arguments": ({"optim_args": "amsgrad=True"}, {}, 'optim_args="amsgrad=True" was given'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_go_wrong_in_silence_is_refused(name: str) -> None:
    given, where, message = REFUSED[name]
    plain = {"deepspeed": None, "fsdp": None, "world_size": 1, "auto_find_batch_size": False}
    plain |= {"optim": "adamw_torch_fused", "optim_args": None}
    with pytest.raises(OptionError, match=message):
        adamw(SimpleNamespace(**{**plain, **given}), **where)


def test_a_factory_is_no_class_of_torchs() -> None:
    """The Trainer would make its own groups for one, and pass no model."""
    assert not issubclass(LateAdamW, torch.optim.Optimizer)
    net = nn.Linear(2, 2)
    made = LateAdamW()(net, lr=0.5)
    assert [len(group["params"]) for group in made.param_groups] == [1, 1]


# --- a run that is killed ---


def be_killed(place: Path) -> None:
    """Train until the second checkpoint, and be killed when half of its reference is written."""
    torch.set_num_threads(1)  # as the tests: sums of several have other bits
    saved = torch.save

    def save(content: Any, file: Any) -> None:  # noqa: ANN401
        saved(content, file)
        if str(file).endswith("checkpoint-4/optimizer.pt"):
            path = Path(file)
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = save
    trainer(place, DURABLE, save_strategy="steps", save_steps=2).train()


def test_a_run_that_was_killed_while_it_saved_goes_on_in_a_new_process(tmp_path: Path) -> None:
    """Its snapshot was made, and its reference was not: the checkpoint before is whole."""
    code = f"""
from pathlib import Path
import test_transformers
test_transformers.be_killed(Path({str(tmp_path)!r}))
"""
    done = children.run("-c", code, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    saves = {**trainers.EACH_STEP, "save_total_limit": 1}
    made = trainer(tmp_path, DURABLE, callbacks=[DropSnapshots()], **saves)
    assert [s.step for s in snapshots_before(made)] == [2, 4]
    made.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    names = [name for s in inner(made).snapshots() for name in s.names]
    assert len(names) == 2  # the last one, and that of the checkpoint that was never complete
    assert trainers.finish(made) == trainers.plain_loop(trainers.windows(5, 1))


def snapshots_before(made: transformers.Trainer) -> Any:  # noqa: ANN401
    made.create_optimizer()
    return made.optimizer.snapshots()


def test_no_states_are_in_memory_while_a_reference_is_saved_and_loaded(tmp_path: Path) -> None:
    made = trainer(tmp_path, DURABLE, batches=2)
    made.train()
    (tmp_path / "saved").mkdir()
    with LargestTensor() as seen:
        made._save_optimizer_and_scheduler(str(tmp_path / "saved"))
        made._load_optimizer_and_scheduler(str(tmp_path / "saved"))
    assert seen.nbytes < 1000
    with LargestTensor() as whole:
        torch.ones(1000)
    assert whole.nbytes >= 4000  # it sees what there is
    trainers.finish(made)
