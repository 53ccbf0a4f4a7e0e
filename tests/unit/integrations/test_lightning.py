"""Lightning with our optimizer, and with models that ``stow`` places."""

import os
import signal
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

import tensorstow
import trainers
from ranks.pool import Ranks
from tensorstow import AdamW, Plan
from tensorstow.base.errors import OptionError
from tensorstow.fsdp.full_tensors import whole_weights
from tensorstow.fsdp.optimizer_factory import names_of, with_groups
from tensorstow.integrations.lightning import StopCheckpoint, StowStrategy

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,  # which shuffles
}
pytestmark = [
    # Of a machine with few cores, and of libraries that it uses.
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Module(lightning.LightningModule):
    def __init__(self, net: Any = None, **where: Any) -> None:  # noqa: ANN401
        super().__init__()
        self.net, self.where = (trainers.model() if net is None else net).train(), where

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        return self.net(input_ids=batch["input_ids"], labels=batch["labels"]).loss

    def validation_step(self, batch: dict[str, torch.Tensor], number: int) -> None:
        self.training_step(batch, number)

    def configure_optimizers(self) -> AdamW:
        groups = trainers.plain_groups(self.net)
        return AdamW(groups, lr=1e-2, module=self.net, policy=trainers.SMALL, **self.where)

    def on_before_optimizer_step(self, optimizer: Any) -> None:  # noqa: ANN401
        if "overlap" not in self.where:
            optimizer.clip_grad_norm_(0.1)


class ByHand(Module):
    """Manual optimization, through Lightning's wrapper of the optimizer."""

    automatic_optimization = False

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(super().training_step(batch, number))
        optimizer.step()
        optimizer.zero_grad()


def loader(batches: int) -> Any:  # noqa: ANN401
    return torch.utils.data.DataLoader(trainers.examples(batches), batch_size=trainers.BATCH)


def fit(module: Module, batches: int, path: Path | None = None, **given: Any) -> list[bytes]:  # noqa: ANN401
    trainer = lightning.Trainer(
        **{"enable_checkpointing": False, "max_epochs": 1, **QUIET, **given}
    )
    trainer.fit(module, loader(batches), loader(1), ckpt_path=path, weights_only=True)
    found = trainers.bits(module.net)
    trainer.optimizers[0].close()
    return found


by_hand = partial(trainers.mean_loop, clip=0.1)


def test_weights_are_those_of_the_plain_loop() -> None:
    """Five micro-batches by two, with validation between steps."""
    given = {"accumulate_grad_batches": 2, "val_check_interval": 2}
    assert fit(Module(states="disk"), 5, **given) == by_hand(5, 2)


def test_manual_optimization_and_updates_beside_backward() -> None:
    """Lightning's wrapper delegates; nothing clips by default, so backward may update."""
    assert fit(ByHand(states="disk"), 3, limit_val_batches=0) == by_hand(3)
    beside = Module(states="disk", overlap="backward")
    assert fit(beside, 3) == by_hand(3, clip=None)


def test_a_checkpoint_is_small_and_goes_on(tmp_path: Path) -> None:
    where = {"states": "disk", "dir": tmp_path / "run", "checkpoints": "reference"}

    def trained(path: Path | None = None) -> list[bytes]:
        saves = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
        given = {"callbacks": [saves], "enable_checkpointing": True, "max_epochs": 2}
        return fit(Module(**where), 2, path, **given)

    complete = trained()
    (path,) = tmp_path.glob("epoch=0.ckpt")
    saved = torch.load(path, weights_only=True)
    assert saved["optimizer_states"][0]["state"] == {}
    weights = sum(t.numel() * t.element_size() for t in saved["state_dict"].values())
    assert path.stat().st_size - weights < 1 << 20
    assert trained(path) == complete == by_hand(2, epochs=2)


def test_states_on_disk_stay_there_when_all_are_moved() -> None:
    """As before and behind each fit, and when a checkpoint was loaded."""
    net = trainers.model()
    optimizer = AdamW(net.parameters(), states="disk", policy=trainers.SMALL)
    batch = trainers.micro_batches(1)[0]
    for _ in range(2):
        net(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _optimizer_to_device(optimizer, torch.device("meta"))  # stands in for a GPU
    other = trainers.model()
    plain = AdamW(other.parameters())
    for _ in range(2):
        other(input_ids=batch, labels=batch).loss.backward()
        plain.step()
        plain.zero_grad()
    assert trainers.bits(net) == trainers.bits(other)
    optimizer.close()


# --- placed models ---

ON_DISK = Plan(parameters="disk", states="disk")


class Placed(Module):
    """Its model is placed where its optimizer is made."""

    def __init__(self, plan: Plan = ON_DISK, net: Any = None, **where: Any) -> None:  # noqa: ANN401
        super().__init__(net, overlap=None, **where)
        self.plan = plan
        self.seen = nn.Parameter(torch.tensor(0.0), requires_grad=False)  # none of the model's

    def configure_optimizers(self) -> Any:  # noqa: ANN401
        groups = names_of(self.net, trainers.plain_groups(self.net))
        given = {k: v for k, v in self.where.items() if k == "checkpoints"}
        make = with_groups(partial(AdamW, lr=1e-2, policy=trainers.SMALL, **given), groups)
        where = {k: v for k, v in self.where.items() if k == "dir"}
        return tensorstow.stow(self.net, make, plan=self.plan, **where)[1]

    def on_train_batch_end(self, *_: object) -> None:
        self.seen += 1


@pytest.fixture
def _own_group() -> Iterator[None]:
    """The strategy joins ranks, of which there is one; nobody else does here."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "NODE_RANK"):
            patch.setenv(name, "")  # so that what Lightning sets is taken back
            patch.delenv(name)
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("_own_group")
@pytest.mark.parametrize("plan", [ON_DISK, Plan(states="disk", overlap="forward")], ids=str)
def test_a_placed_model_has_the_weights_of_the_plain_loop(plan: Plan) -> None:
    """Five micro-batches by two, clipped, with validation between steps."""
    given = {"accumulate_grad_batches": 2, "val_check_interval": 2, "gradient_clip_val": 0.1}
    assert fit(Placed(plan), 5, strategy=StowStrategy(), **given) == by_hand(5, 2)


@pytest.mark.usefixtures("_own_group")
def test_a_placed_model_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """A reference brings the weights, the file all else; snapshots go with files."""

    def trained(path: Path | None = None) -> tuple[Placed, list[bytes]]:
        module = Placed(dir=tmp_path / "run", checkpoints="reference")
        saves = ModelCheckpoint(tmp_path, "{epoch}", monitor="epoch", mode="max", save_top_k=2)
        given = {"callbacks": [saves], "enable_checkpointing": True, "max_epochs": 3}
        strategy = StowStrategy()
        return module, fit(module, 2, path, gradient_clip_val=0.1, strategy=strategy, **given)

    _, complete = trained()
    path = tmp_path / "epoch=1.ckpt"
    saved = torch.load(path, weights_only=True)
    assert saved["state_dict"] == {"seen": torch.tensor(4.0)}
    assert path.stat().st_size < 1 << 14
    module, again = trained(path)
    assert module.seen == 6
    assert again == complete == by_hand(2, epochs=3)
    for_names = AdamW(module.net.parameters(), dir=tmp_path / "run")
    assert [s.step for s in for_names.snapshots()] == [4, 6, 6]
    assert len(list(tmp_path.glob("*.ckpt"))) == 3  # two runs have saved the last one
    for_names.close()


class Runs:
    """What runs code of its own where a pickle is opened."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.file.touch, ()


class Optimizers:
    """A strategy with an optimizer, outside of a Trainer."""

    def __init__(self, directory: Path) -> None:
        net = nn.Linear(4, 4)
        self.optimizer = AdamW(
            net.parameters(), dir=directory, checkpoints="reference", commit_every=None
        )
        self.module = Module(net)
        self.step()
        self.begin_process()

    def step(self) -> None:
        self.module.net(torch.ones(1, 4)).sum().backward()
        self.optimizer.step()

    def begin_process(self) -> None:
        """Forget what the process before has saved."""
        self.strategy = StowStrategy()
        self.strategy.optimizers = [self.optimizer]
        self.strategy.broadcast = lambda obj: obj
        self.strategy._lightning_module = self.module

    def save(self, path: Path, **more: Any) -> None:  # noqa: ANN401
        states = {
            "optimizer_states": [self.strategy.optimizer_state(self.optimizer)],
            "state_dict": {},
        }
        self.strategy.save_checkpoint({**states, **more}, path)

    def names(self) -> list[str]:
        return [name for summary in self.optimizer.snapshots() for name in summary.names]


@pytest.mark.usefixtures("_own_group")
def test_a_checkpoint_is_removed_without_running_what_is_in_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, path, proof = Optimizers(tmp_path / "run"), tmp_path / "a.ckpt", tmp_path / "proof"
    made.save(path, hyper_parameters=Runs(proof))
    (name,) = made.names()
    made.begin_process()
    made.strategy.remove_checkpoint(path)
    assert not proof.exists()
    assert not path.exists()
    assert made.names() == [name]
    assert f"{path} cannot be read without running code" in caplog.text
    made.optimizer.close()


@pytest.mark.usefixtures("_own_group")
def test_a_checkpoint_that_is_there_has_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may be killed between the two: then a snapshot is left, which costs its place."""
    made, path = Optimizers(tmp_path / "run"), tmp_path / "a.ckpt"
    made.save(path, epoch=1)
    monkeypatch.setattr(made.strategy, "_drop", lambda names: seen.append((path.exists(), names)))
    seen: list[tuple[bool, list[str]]] = []
    made.strategy.remove_checkpoint(path)
    assert seen == [(False, made.names())]
    made.optimizer.close()


@pytest.mark.usefixtures("_own_group")
def test_a_checkpoint_that_cannot_be_removed_keeps_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, path = Optimizers(tmp_path / "run"), tmp_path / "a.ckpt"
    made.save(path, epoch=1)
    sent: list[list[str]] = []

    def broadcast(names: list[str]) -> list[str]:
        sent.append(names)
        return names

    def refuse(_: object) -> None:
        raise PermissionError(str(path))

    made.strategy.broadcast = broadcast
    monkeypatch.setattr(made.strategy.checkpoint_io, "remove_checkpoint", refuse)
    with pytest.raises(PermissionError):
        made.strategy.remove_checkpoint(path)
    assert sent == [[]]  # the other ranks wait for it
    assert len(made.names()) == 1
    made.optimizer.close()


@pytest.mark.usefixtures("_own_group")
@pytest.mark.parametrize("is_later_process", [False, True])
def test_a_snapshot_goes_with_the_last_checkpoint_that_names_it(
    tmp_path: Path, *, is_later_process: bool
) -> None:
    made, paths = Optimizers(tmp_path / "run"), [tmp_path / "a.ckpt", tmp_path / "last.ckpt"]
    for path in paths:
        made.save(path, epoch=1)
    (name,) = made.names()
    if is_later_process:
        made.begin_process()
    made.strategy.remove_checkpoint(paths[0])
    assert made.names() == [name]
    made.strategy.remove_checkpoint(paths[1])
    assert made.names() == []
    made.strategy.remove_checkpoint(tmp_path / "never")
    made.optimizer.close()


@pytest.mark.usefixtures("_own_group")
@pytest.mark.parametrize("other", ["folder", "unreadable", "link"])
def test_a_snapshot_that_another_file_of_an_earlier_process_may_need_is_kept(
    other: str, tmp_path: Path
) -> None:
    """In the folder of another callback, unreadable without running code, or behind a link."""
    made, folder = Optimizers(tmp_path / "run"), tmp_path / "best"
    latest, best = tmp_path / "latest" / "a.ckpt", folder / "a.ckpt"
    folder.mkdir()
    latest.parent.mkdir()
    made.save(latest)
    if other == "unreadable":
        best = latest.with_name("best.ckpt")
        made.save(best, hyper_parameters=Runs(tmp_path / "proof"))
    else:
        made.save(best)
    if other == "link":
        latest.with_name("link.ckpt").symlink_to(best)
    (name,) = made.names()
    made.begin_process()
    if other == "folder":
        made.strategy._checkpoint_callbacks = [
            ModelCheckpoint(latest.parent),
            ModelCheckpoint(folder),
        ]
    made.strategy.remove_checkpoint(latest)
    assert made.names() == [name]
    made.save(latest)  # of the same step: the reference names what the earlier process made
    made.strategy.remove_checkpoint(latest)
    assert made.names() == [name]
    made.step()
    made.save(latest)
    assert len(made.names()) == 2
    made.strategy.remove_checkpoint(latest)  # nothing else can name what this process has made
    assert made.names() == [name]
    made.optimizer.close()


@pytest.mark.usefixtures("_own_group")
@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available")
@pytest.mark.filterwarnings("ignore:.*was called without a model")  # Lightning's, in any case
def test_what_would_go_wrong_with_a_placed_model_is_refused(tmp_path: Path) -> None:
    refused: list[tuple[dict[str, Any], Module, str]] = [
        ({"precision": "bf16-mixed"}, Placed(), "16-bit copy of every weight"),
        ({}, Module(), "27 more parameters that stow"),
        (
            {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
            Placed(),
            "by their norm",
        ),
        ({"enable_checkpointing": True}, Placed(), "weights of a placed model in it"),
        (
            {"callbacks": StopCheckpoint(tmp_path), "enable_checkpointing": True},
            Placed(),
            "weights of a placed model in it",
        ),
    ]
    for given, module, message in refused:
        plain = {"max_epochs": 1, "enable_checkpointing": False, "strategy": StowStrategy()}
        trainer = lightning.Trainer(**{**plain, **QUIET, **given}, default_root_dir=tmp_path)
        with pytest.raises(OptionError, match=message):
            trainer.fit(module, loader(1), loader(1))
        for optimizer in trainer.optimizers:
            optimizer.close()


@pytest.mark.usefixtures("_own_group")
def test_ranks_that_lightning_does_not_know_of_are_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    trainer = lightning.Trainer(
        max_epochs=1, strategy=StowStrategy(), **QUIET, default_root_dir=tmp_path
    )
    with pytest.raises(OptionError, match=r"devices=1, but by RANK=1 and WORLD_SIZE=2"):
        trainer.fit(Placed(), loader(1), loader(1))


class WithoutTransformers(nn.Module):
    """Which ranks need not import then: seconds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(trainers.WORDS, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, trainers.WORDS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        logits = self.head(x).flatten(0, 1)
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels.flatten()))


def of_two_ranks(place: Path) -> list[list[bytes]]:
    """Train with checkpoints, then from the first one in new objects."""
    rank, found = dist.get_rank(), []
    with trainers.environment_of_two(rank):
        for path in (None, place / "epoch=0.ckpt"):
            module = Placed(net=WithoutTransformers(), dir=place / "run", checkpoints="reference")
            saves = ModelCheckpoint(place, "{epoch}", save_top_k=-1)
            given = {**QUIET, "devices": 2, "max_epochs": 2, "callbacks": [saves]}
            trainer = lightning.Trainer(**given, strategy=StowStrategy(), limit_val_batches=0)
            rows = [row for i in range(2) for row in of_rank(rank, i)]
            batches = torch.utils.data.DataLoader(rows, batch_size=trainers.BATCH)
            trainer.fit(module, batches, ckpt_path=path, weights_only=True)
            values = module.net.state_dict().values()
            found.append([v.full_tensor().numpy().tobytes() for v in values])
            trainer.optimizers[0].close()
    return found


def of_rank(rank: int, step: int) -> list[dict[str, torch.Tensor]]:
    first = (2 * step + rank) * trainers.BATCH
    return trainers.examples(4)[first : first + trainers.BATCH]


def test_two_ranks_name_the_snapshot_of_their_reference(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    """Two ranks with a micro-batch each are one with two."""
    plain = by_hand(4, 2, clip=None, epochs=2, net=WithoutTransformers())
    assert ranks(2).run(of_two_ranks, tmp_path) == [[plain, plain]] * 2


# --- signals ---

STATUS = 75
MOMENTS = {
    "forward": "on_train_batch_start",
    "backward": "on_before_backward",
    "step": "on_before_optimizer_step",
    "validation": "on_validation_start",
}
"""The hook of a module in which a signal comes."""


class Counted:
    """A loader that goes on where it was, as a StatefulDataLoader does."""

    def __init__(self, rows: list[dict[str, torch.Tensor]]) -> None:
        self.rows, self.begun, self.position = rows, 0, 0

    def __len__(self) -> int:
        return len(self.rows) // trainers.BATCH

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        begun, self.begun = self.begun, 0
        for batch in range(begun, len(self)):
            self.position = batch + 1
            rows = self.rows[batch * trainers.BATCH :][: trainers.BATCH]
            yield {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begun = state["position"] % len(self)


class Signalled(Placed):
    """It gets a signal once, at a hook of a step, and has a scheduler."""

    def __init__(
        self,
        moment: str | None,
        at: int,
        interval: str,
        *,
        placed: bool = True,
        **where: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(checkpoints="reference", **where)
        self.epochs_ended = self.snapshots = 0
        self.hook, self.at, self.interval, self.placed = (
            MOMENTS.get(str(moment)),
            at,
            interval,
            placed,
        )

    def configure_optimizers(self) -> Any:  # noqa: ANN401
        placed = super().configure_optimizers
        if not self.placed:
            self.where.pop("overlap", None)
        optimizer = placed() if self.placed else Module.configure_optimizers(self)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 / (1 + n))
        return [optimizer], [{"scheduler": schedule, "interval": self.interval}]

    def on_before_optimizer_step(self, *_: Any) -> None:  # noqa: ANN401
        self.come("on_before_optimizer_step")

    def on_before_backward(self, *_: Any) -> None:  # noqa: ANN401
        self.come("on_before_backward")

    def on_train_batch_start(self, *_: Any) -> None:  # noqa: ANN401
        self.come("on_train_batch_start")

    def on_validation_start(self) -> None:
        self.come("on_validation_start")

    def on_train_epoch_end(self) -> None:
        self.epochs_ended += 1

    def come(self, hook: str) -> None:
        if hook == self.hook and self.trainer.global_step == self.at:
            self.hook = None
            os.kill(os.getpid(), signal.SIGTERM)


def until_done(module: Signalled, place: Path, **given: Any) -> tuple[object, int, list[bytes]]:  # noqa: ANN401
    """Return the status with which a run ends, its steps, and its weights."""
    stops = StopCheckpoint(place / "stops", stop_signals={"SIGTERM": STATUS})
    saves = ModelCheckpoint(place / "saves", save_last=True, every_n_epochs=1)
    callbacks = {
        "callbacks": [saves, stops],
        "strategy": StowStrategy() if module.placed else "auto",
    }
    batches = Counted(trainers.examples(4))
    trainer = lightning.Trainer(**{**QUIET, **callbacks, "max_epochs": 2, **given})
    status: object = None
    try:
        trainer.fit(module, batches, loader(1), ckpt_path="last", weights_only=True)
    except SystemExit as ended:
        status = ended.code
    weights = [values.numpy().tobytes() for _, values in whole_weights(module.net)]
    module.snapshots = sum(len(s.names) for s in trainer.optimizers[0].snapshots())
    trainer.optimizers[0].close()
    return status, trainer.global_step, weights


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[bytes]]:
    """Give the weights of a run that no signal stops."""

    @cache
    def train(interval: str, accumulation: int, *, placed: bool) -> list[bytes]:
        place = tmp_path_factory.mktemp("whole")
        module = Signalled(None, 0, interval, dir=place / "run", placed=placed)
        status, steps, weights = until_done(module, place, accumulate_grad_batches=accumulation)
        assert (status, steps) == (None, 8 // accumulation)
        return weights

    return train


@pytest.mark.usefixtures("_own_group")
@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available")
@pytest.mark.parametrize(
    ("moment", "at", "interval", "accumulation", "stopped"),
    [
        ("forward", 1, "epoch", 1, 2),
        ("backward", 1, "step", 1, 2),
        ("step", 2, "step", 1, 3),
        ("step", 1, "epoch", 2, 2),  # with the last batch of an epoch
        ("backward", 0, "step", 2, 1),
        ("forward", 3, "epoch", 1, 4),  # the last batch of an epoch
        ("validation", 4, "epoch", 1, 4),
        ("step", 6, "epoch", 1, 7),  # in the second epoch
        ("step", 7, "step", 1, 8),  # the last one
    ],
)
@pytest.mark.parametrize("placed", [True, False])
def test_a_signal_saves_a_checkpoint_and_fit_goes_on_from_it(
    tmp_path: Path,
    moment: str,
    at: int,
    interval: str,
    accumulation: int,
    stopped: int,
    placed: bool,  # noqa: FBT001
    whole_run: Callable[..., list[bytes]],
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    given = {"accumulate_grad_batches": accumulation}
    where: dict[str, Any] = {"dir": tmp_path / "run", "placed": placed}
    module = Signalled(moment, at, interval, **where)
    status, steps, _ = until_done(module, tmp_path, **given)
    assert (status, steps, module.epochs_ended) == (STATUS, stopped, stopped * accumulation // 4)
    assert signal.getsignal(signal.SIGTERM) == before
    assert (tmp_path / "stops" / "stopped.ckpt").exists()
    module = Signalled(None, 0, interval, **where)
    status, steps, weights = until_done(module, tmp_path, **given)
    assert (status, steps) == (None, 8 // accumulation)
    assert not (tmp_path / "stops" / "stopped.ckpt").exists()
    assert weights == whole_run(interval, accumulation, placed=placed)


@pytest.mark.usefixtures("_own_group")
@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available")
def test_a_second_stop_replaces_the_first_and_an_error_saves_nothing(tmp_path: Path) -> None:
    for at in (1, 4):
        module = Signalled("step", at, "step", dir=tmp_path / "run")
        status, steps, _ = until_done(module, tmp_path, enable_checkpointing=True)
        assert (status, steps) == (STATUS, at + 1)
    assert module.snapshots == 2  # with those of the epoch, which its file and last.ckpt name
    before = signal.getsignal(signal.SIGTERM)
    module = Signalled(None, 0, "step", dir=tmp_path / "run")
    module.on_before_backward = lambda *_: 1 / 0
    modified = (tmp_path / "stops" / "stopped.ckpt").stat().st_mtime_ns
    with pytest.raises(ZeroDivisionError):
        until_done(module, tmp_path)
    assert (tmp_path / "stops" / "stopped.ckpt").stat().st_mtime_ns == modified
    assert signal.getsignal(signal.SIGTERM) == before


def stopped_of_two(place: Path, moment: str, rank: int) -> list[tuple[object, int, list[bytes]]]:
    """Stop by a signal to ``rank``, go on, and train without a stop."""
    mine, found = dist.get_rank(), []
    with trainers.environment_of_two(mine):
        for name, folder in (("run", "a"), ("run", "a"), ("whole", "b")):
            comes = moment if not found and mine == rank else None
            module = Signalled(comes, 2, "step", net=WithoutTransformers(), dir=place / name)
            given = {"devices": 2, "limit_val_batches": 0}
            status, steps, weights = until_done(module, place / folder, **given)
            found.append((status, steps, weights))
    return found


@trainers.MOMENTS_OF_RANKS
def test_a_signal_to_one_rank_stops_both(
    ranks: Callable[[int], Ranks], tmp_path: Path, moment: str, rank: int
) -> None:
    for found in ranks(2).run(stopped_of_two, tmp_path, moment, rank):
        (status, steps, _), (_, _, resumed), (_, _, whole) = found
        assert (status, steps) == (STATUS, 3)
        assert resumed == whole
