"""A stowed model as safetensors, and back: bounded memory, one set of files, every rank agrees."""

import json
import resource
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

import children
import tensorstow
from ranks.pool import Pool, Ranks
from ranks.stowed import Model, loss_of, model_of, twins
from ranks.twin import ADAMW, FETCHED, mesh_here, whole
from tensorstow import Plan
from tensorstow.base.errors import DirectoryError, OptionError, StoreFormatError, StowError
from tensorstow.base.new_file import NewFile
from tensorstow.fsdp import export
from tensorstow.fsdp.export import save_safetensors
from tensorstow.fsdp.full_tensors import copy_from_files


def saved(plan: Plan, folder: str, most: int) -> None:
    """Write newest weights; read them back in other places, on the meta device, in trained ones."""
    both = twins(plan, torch.bfloat16)
    both.train()
    save_safetensors(both.stowed, folder, max_shard_bytes=most)
    wanted = [whole(p) for p in both.alone.parameters()]
    both.close()
    for back in (Plan(), FETCHED, Plan(parameters="device")):
        with torch.device("meta"):
            model = Model().bfloat16()
        model, optimizer = tensorstow.stow(
            model, ADAMW, plan=back, mesh=mesh_here(), weights=folder
        )
        assert all(map(torch.equal, map(whole, model.parameters()), wanted))
        assert model.head.weight is model.embedding.weight
        optimizer.close()
    for here in (Plan(stage=2), FETCHED):
        model, optimizer = tensorstow.stow(
            model_of(torch.bfloat16), ADAMW, plan=here, mesh=mesh_here()
        )
        copy_from_files(model, folder)
        assert all(map(torch.equal, map(whole, model.parameters()), wanted))
        optimizer.close()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("plan", [Plan(overlap="forward"), FETCHED], ids=lambda p: p.parameters)
def test_what_is_written_is_loaded_anywhere(
    ranks: Pool, tmp_path: Path, plan: Plan, world: int
) -> None:
    folder = tmp_path / "model"
    for most in (500, 1 << 30) if world == 1 else (500,):
        ranks(world).run(saved, plan, str(folder), most)
        files = sorted(file.name for file in folder.iterdir())
        if most == 500:
            index = json.loads((folder / "model.safetensors.index.json").read_text())
            own = {"model.safetensors.index.json", "model.safetensors.index.json.digests"}
            assert set(index["weight_map"].values()) == {*files} - own
            sizes = {name: (folder / name).stat().st_size for name in index["weight_map"].values()}
            assert len(sizes) > 2
            assert "head.weight" not in index["weight_map"]  # tied
        else:
            assert files == ["model.safetensors", "model.safetensors.digests"]
            tensors = load_file(folder / "model.safetensors")
            assert list(tensors) == [n for n, _ in Model().named_parameters()]
            assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())


def saved_while_gathered(folder: str) -> None:
    """Save behind a forward that leaves weights gathered, in the dtype they are computed with."""
    model, optimizer = tensorstow.stow(
        model_of(torch.float32),
        ADAMW,
        plan=Plan(stage=2),
        mesh=mesh_here(),
        compute_dtype=torch.bfloat16,
    )
    loss_of(model, 0, 0)
    assert next(model.parameters()).dtype == torch.bfloat16
    save_safetensors(model, folder)
    optimizer.close()


def test_masters_are_written_and_not_what_is_gathered(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(saved_while_gathered, str(tmp_path))
    written = load_file(tmp_path / "model.safetensors")
    for name, parameter in model_of(torch.float32).named_parameters():
        assert torch.equal(written[name], parameter.detach()), name


class Counted(nn.Module):
    """Has buffers, of which one is not to be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def test_buffers_are_saved_and_loaded(tmp_path: Path) -> None:
    model, optimizer = tensorstow.stow(Counted(), ADAMW, plan=Plan())
    model(torch.randn(8, 4)).sum().backward()
    save_safetensors(model, tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(model.state_dict())
    for fresh in (Counted(), Counted().to("meta")):
        if fresh.passing.is_meta:
            fresh.passing = torch.ones(2)
        back, other = tensorstow.stow(fresh, ADAMW, plan=Plan(), weights=tmp_path)
        assert torch.equal(back.norm.running_mean, model.norm.running_mean)
        assert back.norm.num_batches_tracked.item() == 1
        other.close()
    optimizer.close()


def saved_by_rank(folder: str) -> list[str]:
    """Write a file on each rank; return the names of those that this one opened."""
    both = twins(FETCHED, torch.bfloat16)
    both.train()
    opened = []
    new_file = NewFile.__init__

    def begin(file: NewFile, path: Path, **given: bool) -> None:
        opened.append(path.name)
        new_file(file, path, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NewFile, "__init__", begin)
        save_safetensors(both.stowed, folder, by_rank=True)
    names = {n: whole(p) for n, p in both.alone.named_parameters()}
    both.close()
    files = Path(folder).glob("*.safetensors")
    found = {name: t for file in files for name, t in load_file(file).items()}
    assert found.keys() >= names.keys()
    assert all(torch.equal(found[n], t) for n, t in names.items())
    return opened


@pytest.mark.parametrize("world", [1, 2])
def test_each_rank_writes_its_own_file(ranks: Pool, tmp_path: Path, world: int) -> None:
    opened = ranks(world).run(saved_by_rank, str(tmp_path / "model"))
    index = "model.safetensors.index.json"
    own = [[name for name in names if name != index] for names in opened]
    assert all(own)
    written = sorted(name for names in own for name in names)
    assert len(set(written)) == len(written)
    assert len(written) >= world
    assert [index in names for names in opened] == [world > 1] + [False] * (world - 1)


def refused(folder: str, by_rank: bool) -> str:  # noqa: FBT001  # goes to another process
    """Write where there is no room for a directory: known on one rank, told on all."""
    both = twins(Plan())
    if dist.get_rank() != 1 and by_rank:
        Path(folder).parent.mkdir(exist_ok=True)
        folder += "-of-another"
    try:
        save_safetensors(both.stowed, folder, by_rank=by_rank)
    except (OSError, StowError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        both.close()
    return "written"


def test_every_rank_says_what_failed_on_the_first(ranks: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    first, second = ranks(2).run(refused, str(tmp_path / "file"), False)  # noqa: FBT003
    assert "DirectoryError" in first
    assert "DirectoryError" in second
    assert "could not write the model" in second


def test_every_rank_says_what_failed_on_another(ranks: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    first, second = ranks(2).run(refused, str(tmp_path / "file"), True)  # noqa: FBT003
    assert "DirectoryError" in second
    assert "Rank 1 could not write the model" in first


def refused_by_transformers(folder: str) -> str:
    """Write a model whose configuration transformers refuses to save: no error of a file's."""
    both = twins(Plan())

    def refuse(*_: object) -> None:
        message = "temperature is set and sampling is off"
        raise ValueError(message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "write_configuration", refuse)
        try:
            save_safetensors(both.stowed, folder)
        except (ValueError, StowError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            both.close()
    return "written"


def test_every_rank_says_what_was_no_error_of_a_file(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks(2).run(refused_by_transformers, str(tmp_path))
    assert first == "ValueError: temperature is set and sampling is off"
    assert "StowError: Rank 0 could not write the model" in second


@pytest.mark.parametrize("fails", ["second file", "second name", "index"])
@pytest.mark.parametrize("most", [100, 1 << 20], ids=["from several", "from one"])
def test_files_that_were_cut_off_are_no_mixture_of_two_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, most: int
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    save_safetensors(model, tmp_path, max_shard_bytes=most)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    calls: list[NewFile] = []
    what = "publish" if fails == "second name" else "__init__"
    turn = {"second file": 1, "second name": 1, "index": 3}[fails]  # calls that do not fail
    kept: Callable[..., None] = getattr(NewFile, what)

    def failing(file: NewFile, *args: Path, **given: bool) -> None:
        calls.append(file)
        if len(calls) > turn:
            raise OSError(28, "No space left on device", tmp_path)
        kept(file, *args, **given)

    monkeypatch.setattr(NewFile, what, failing)
    with pytest.raises(OSError, match="No space left"):
        save_safetensors(model, tmp_path, max_shard_bytes=100)
    assert len(calls) == turn + 1
    monkeypatch.undo()
    whole = [load_file(path) for path in tmp_path.glob(".model-*.safetensors.*")]
    assert len(whole) == (2 if fails == "second name" else 0)  # these alone have the weights
    found = {k: v for path in tmp_path.glob("*.safetensors") for k, v in load_file(path).items()}
    if fails == "second file":
        assert all(torch.equal(found[name], value) for name, value in before.items())
    else:
        assert all(torch.equal(value, before[name] + 1) for name, value in found.items())
        assert not (tmp_path / "model.safetensors.index.json").exists()
    save_safetensors(model, tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["model.safetensors", "model.safetensors.digests"]
    assert all(
        torch.equal(value, before[name] + 1)
        for name, value in load_file(tmp_path / "model.safetensors").items()
    )


_KILLED = """
import os, signal, sys
import torch
from tensorstow.base.new_file import NewFiles
from tensorstow.fsdp.export import save_safetensors
NewFiles.keep = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # all of the contents are written
save_safetensors(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))), sys.argv[1],
                 max_shard_bytes=10_000)
"""


def test_a_process_that_is_killed_leaves_no_file(tmp_path: Path) -> None:
    done = children.run("-c", _KILLED, tmp_path, check=False)
    assert done.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_a_senseless_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="max_shard_bytes=0"):
        save_safetensors(nn.Linear(1, 1), tmp_path, max_shard_bytes=0)


def test_a_tensor_that_is_not_there_is_named_with_the_nearest(tmp_path: Path) -> None:
    save_file({"layers.0.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(StoreFormatError, match=r"no tensor 'blocks\.0\.weight', the nearest is"):
        tensorstow.stow(Counted(), ADAMW, plan=Plan(), weights=tmp_path)


WIDE, DEEP = 1024, 24
"""A model of 96 MiB in units of 4 MiB."""


def peaks() -> tuple[int, int]:
    """Return how much resident memory grew while a model on disk was made and saved."""
    plan = Plan(parameters="disk", states="disk", prefetch=0)
    small = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
    tensorstow.stow(small, ADAMW, plan=plan, mesh=mesh_here())[1].close()  # what any needs
    before = _peak()
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(DEEP)))
    model, optimizer = tensorstow.stow(model, ADAMW, plan=plan, mesh=mesh_here())
    made = _peak()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        save_safetensors(model, folder, max_shard_bytes=16 << 20)
        optimizer.close()
        with torch.device("meta"):
            again = nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(DEEP)))
        tensorstow.stow(again, ADAMW, plan=plan, mesh=mesh_here(), weights=folder)[1].close()
    return made - before, _peak() - made


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def test_no_rank_ever_has_the_model_in_memory() -> None:
    pool = Ranks(1)  # its own: the highest use of memory is a process's for life
    try:
        ((made, moved),) = pool.run(peaks)
    finally:
        pool.close()
    assert made < 40 << 20, made
    assert moved < 40 << 20, moved


@pytest.mark.parametrize("directory", ["/proc/x", "/sys/x", "/dev/null/x"])
def test_a_directory_that_cannot_be_made_is_an_error_of_ours(directory: str) -> None:
    with pytest.raises(DirectoryError, match=directory):
        tensorstow.save_safetensors(nn.Linear(2, 2), directory)
