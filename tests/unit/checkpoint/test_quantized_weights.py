"""Files in int8: what is quantized, when a copy is made anew, and what is refused."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import tensorstow
from tensorstow import Plan, quantize_to_int8
from tensorstow.base.errors import DamageError, OptionError, StoreFormatError, TransferError
from tensorstow.checkpoint import weight_encoders
from tensorstow.fsdp.read_only import stream_of
from tensorstow.io.mapped import PieceFile

WIDTH = 64


class Net(nn.Module):
    """Linear blocks between an embedding with a head of its own, or a tied one."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 32, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


TOKENS = torch.arange(24).view(2, 12)


def saved(folder: Path, *, tied: bool = False, dtype: torch.dtype = torch.float32) -> Net:
    """Save a net to two files in ``folder``."""
    torch.manual_seed(0)
    net = Net(tied=tied).to(dtype)
    tensors = {n: t for n, t in net.state_dict().items() if not (tied and n == "head.weight")}
    first = {n: t for n, t in tensors.items() if "blocks.1" not in n}
    folder.mkdir(exist_ok=True)
    save_file(first, folder / "a.safetensors")
    save_file({n: tensors[n] for n in tensors.keys() - first.keys()}, folder / "b.safetensors")
    return net


def on_meta(*, tied: bool = False, dtype: torch.dtype = torch.float32) -> Net:
    with torch.device("meta"):
        return Net(tied=tied).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_wherever_the_copy_is_read_its_values_are_the_same(
    tmp_path: Path, dtype: torch.dtype, *, tied: bool
) -> None:
    net = saved(tmp_path / "model", tied=tied, dtype=dtype)
    model = on_meta(tied=tied, dtype=dtype)
    folder = quantize_to_int8(model, tmp_path / "model", tmp_path / "int8")
    copy = load_file(folder / "model.safetensors")
    coded = {name for name, tensor in copy.items() if tensor.dtype == torch.int8}
    assert coded == {f"blocks.{i}.weight" for i in range(3)} | (set() if tied else {"head.weight"})
    same = {n: t for n, t in copy.items() if n not in coded and not n.endswith("_scale")}
    assert all(torch.equal(t, net.state_dict()[n]) for n, t in same.items())
    expected = Net(tied=tied).to(dtype)
    expected.load_state_dict(net.state_dict())
    for name in coded:
        scale, weight = copy[f"{name}_scale"][:, 0], net.state_dict()[name].float()
        values = copy[name].float() * scale[:, None]
        assert ((weight - values).abs() <= scale[:, None] * (0.5 + 2**-16)).all()
        expected.get_parameter(name).data = values.to(dtype)
    expected.requires_grad_(requires_grad=False)
    for plan in (
        Plan(parameters="disk"),
        Plan(),
        Plan(parameters="disk", parameter_units={"blocks.1": "host", "norm": "host"}),
    ):
        read, _ = tensorstow.stow(on_meta(tied=tied, dtype=dtype), None, plan=plan, weights=folder)
        for _ in range(2):
            assert torch.equal(read(TOKENS), expected(TOKENS))
        stream = stream_of(read)
        if stream is not None:
            block = next(unit for unit in stream.units if unit.name == "blocks.0")
            nbytes = WIDTH * WIDTH + WIDTH * (4 + dtype.itemsize)
            assert sum(run.nbytes for run in block.runs) == nbytes


def test_a_copy_is_made_once_and_again_of_other_files(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    made = quantize_to_int8(on_meta(), tmp_path / "model", tmp_path / "int8") / "model.safetensors"
    first = made.stat()
    quantize_to_int8(on_meta(), tmp_path / "model", tmp_path / "int8")
    assert (made.stat().st_ino, made.stat().st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    path = tmp_path / "model" / "b.safetensors"
    tensors = {name: 2 * tensor for name, tensor in load_file(path).items()}
    facts = path.stat()
    save_file(tensors, path)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    before = load_file(made)["blocks.1.weight_scale"].clone()
    quantize_to_int8(on_meta(), tmp_path / "model", tmp_path / "int8")
    assert torch.equal(load_file(made)["blocks.1.weight_scale"], 2 * before)


def test_an_existing_copy_is_verified_before_it_is_returned(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    made = quantize_to_int8(on_meta(), tmp_path / "model", tmp_path / "int8") / "model.safetensors"
    listed, whole = made.with_name("model.safetensors.digests"), made.read_bytes()
    made.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    with pytest.raises(DamageError, match=f"Remove it and {listed}, and call"):
        quantize_to_int8(on_meta(), tmp_path / "model", tmp_path / "int8")
    listed.unlink()  # as after a kill before the list was written
    quantize_to_int8(on_meta(), tmp_path / "model", tmp_path / "int8")
    assert (made.read_bytes(), listed.exists()) == (whole, True)
    listed.write_bytes(listed.read_bytes()[:-1])
    with pytest.raises(DamageError, match="or its list of digests is not what was written"):
        quantize_to_int8(on_meta(), tmp_path / "model", tmp_path / "int8")


def test_what_fails_leaves_the_old_copy_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "model")
    writes = 0
    real = PieceFile.write

    def failing(file: PieceFile, values: torch.Tensor, offset: int) -> None:
        nonlocal writes
        writes += 1
        if writes == 6:
            raise TransferError(file.path, "write", offset=offset, length=1, errno=5)
        real(file, values, offset)

    monkeypatch.setattr(PieceFile, "write", failing)
    with pytest.raises(TransferError, match="EIO"):
        quantize_to_int8(on_meta(), tmp_path / "model", tmp_path / "int8")
    assert list((tmp_path / "int8").iterdir()) == []


def test_what_it_is_not_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_encoders, "_PIECE", 2 * WIDTH)  # pieces of rows
    net = saved(tmp_path / "model")
    with pytest.raises(OptionError, match=r"a\.safetensors is in the directory of a copy"):
        quantize_to_int8(on_meta(), tmp_path / "model", tmp_path / "model")
    (tmp_path / "other").mkdir()
    save_file(net.state_dict(), tmp_path / "other" / "model.safetensors")
    with pytest.raises(OptionError, match="has not made it"):
        quantize_to_int8(on_meta(), tmp_path / "model", tmp_path / "other")
    save_file({"x": torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(StoreFormatError, match=r"no tensor 'blocks\.0\.weight'"):
        quantize_to_int8(on_meta(), tmp_path / "x.safetensors", tmp_path / "int8")
    folder = quantize_to_int8(on_meta(), tmp_path / "model", tmp_path / "int8")
    tensors = load_file(folder / "model.safetensors")
    tensors["blocks.1.weight_scale"] = torch.ones(5)
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(StoreFormatError, match=r"blocks\.1\.weight.* scales than one for each row"):
        tensorstow.stow(on_meta(), None, weights=tmp_path / "x.safetensors", plan=Plan())
    del tensors["blocks.1.weight_scale"]
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(StoreFormatError, match=r"is of I8, and"):
        tensorstow.stow(on_meta(), None, weights=tmp_path / "x.safetensors", plan=Plan())
    damaged = {**net.state_dict(), "blocks.2.weight": torch.full((WIDTH, WIDTH), torch.inf)}
    save_file(damaged, tmp_path / "x.safetensors")
    with pytest.raises(StoreFormatError, match="not finite"):
        quantize_to_int8(on_meta(), tmp_path / "x.safetensors", tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
