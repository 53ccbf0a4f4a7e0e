"""States to a safetensors file and back: nothing is lost, and what does not fit is named."""

import copy
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from compare import all_equal
from states_on_disk import printed
from tensorstow import AdamW, PipelinePolicy
from tensorstow.base.errors import DamageError, DirectoryError, OptionError
from tensorstow.checkpoint.optimizer_export import state_dict_of
from tensorstow.colossalai import HybridAdam
from tensorstow.io import digest_list

SMALL = PipelinePolicy(chunk_elements=4096)


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32)).to(dtype)


def adamw(net: nn.Module, directory: Path | None, **options: object) -> AdamW:
    where = {} if directory is None else {"states": "disk", "dir": directory}
    return AdamW(net.parameters(), policy=SMALL, **where | options)  # type: ignore[arg-type]


def train(net: nn.Module, opt: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        opt.step()
        opt.zero_grad()


def same_states(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a["state"].keys() == b["state"].keys() and all(
        torch.equal(tensor, b["state"][i][name])
        for i, entry in a["state"].items()
        for name, tensor in entry.items()
    )


def test_names_are_the_models_and_the_library_reads_it(tmp_path: Path) -> None:
    net = model(torch.bfloat16)
    opt = adamw(net, tmp_path / "run", module=net, lr=0.25)
    train(net, opt, range(3))
    path = tmp_path / "states.safetensors"
    opt.save_safetensors(path)
    found = load_file(path)
    names = [name for name, _ in net.named_parameters()]
    kinds = ("step", "exp_avg", "exp_avg_sq", "master")
    assert found.keys() == {f"{name}.{kind}" for name in names for kind in kinds}
    for index, entry in opt.state_dict()["state"].items():
        for kind, tensor in entry.items():
            assert torch.equal(found[f"{names[index]}.{kind}"], tensor)
    with safe_open(path, "pt") as file:
        (group,) = json.loads(file.metadata()["param_groups"])
    assert group["lr"] == 0.25
    assert group["params"] == names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{"states": "ram"}, {"states": 0.5, "durability": "none"}, {}])
def test_a_run_goes_on_bitwise_in_another_place(
    tmp_path: Path, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    whole, half = model(dtype), model(dtype)
    train(whole, adamw(whole, None, amsgrad=True), range(6))
    (tmp_path / "a").mkdir()
    first = adamw(half, tmp_path / "a", amsgrad=True)
    train(half, first, range(3))
    first.save_safetensors(tmp_path / "x")
    first.close()
    if options:
        where = None if options["states"] == "ram" else tmp_path
        second = adamw(half, where, **options)
    else:
        second = adamw(half, tmp_path / "b")
    second.load_safetensors(tmp_path / "x")
    train(half, second, range(3, 6))
    assert all_equal(whole.parameters(), half.parameters())


@pytest.mark.parametrize("source", ["fp32", "split", "bf16", "int8"])
@pytest.mark.parametrize("target", ["fp32", "split"])
def test_exact_formats_take_every_format_as_it_is(tmp_path: Path, source: str, target: str) -> None:
    net = model(torch.bfloat16)
    first = adamw(net, tmp_path / "a", state_format=source)
    train(net, first, range(2))
    first.save_safetensors(tmp_path / "x")
    second = adamw(net, tmp_path / "b", state_format=target)
    second.load_safetensors(tmp_path / "x")
    assert same_states(second.state_dict(), first.state_dict())


def test_hyper_parameters_come_back_as_they_were(tmp_path: Path) -> None:
    net = model()
    halves = [list(net[0].parameters()), list(net[2].parameters())]
    lr = torch.tensor(1 / 3, dtype=torch.float64)
    groups = [{"params": halves[0], "lr": lr, "betas": (0.5, 0.75)}, {"params": halves[1]}]
    opt = AdamW(groups, lr=1e-3, weight_decay=0.1 + 0.2)
    opt.param_groups[1]["weight_decay"] = 0.1
    opt.param_groups[1]["note"] = {"of": ["the", "caller"], 3: None}
    opt.save_safetensors(tmp_path / "x")
    new = AdamW([{"params": half} for half in halves])
    new.load_safetensors(tmp_path / "x")
    assert [{k: v for k, v in g.items() if k != "params"} for g in new.param_groups] == [
        {k: v for k, v in g.items() if k != "params"} for g in opt.param_groups
    ]
    assert new.param_groups[0]["lr"].dtype == torch.float64
    new.param_groups[0]["lr"].fill_(2.0)  # not the file's memory


def test_parameters_in_another_order_are_found_by_name(tmp_path: Path) -> None:
    net = model()
    opt = adamw(net, tmp_path / "a", module=net)
    train(net, opt, range(2))
    opt.save_safetensors(tmp_path / "x")
    turned = AdamW(list(reversed(list(net.named_parameters()))))
    turned.load_safetensors(tmp_path / "x")
    wanted = opt.state_dict()["state"]
    for index, entry in turned.state_dict()["state"].items():
        assert torch.equal(entry["exp_avg"], wanted[3 - index]["exp_avg"])
    by_place = AdamW(net.parameters())
    by_place.load_safetensors(tmp_path / "x")
    assert same_states(by_place.state_dict(), opt.state_dict())


def test_names_that_look_like_places_are_names(tmp_path: Path) -> None:
    net = nn.ParameterList([torch.zeros(5), torch.zeros(5)])
    turned = AdamW([net[1], net[0]], module=net)
    net[1].grad = torch.ones(5)
    turned.step()
    turned.save_safetensors(tmp_path / "x")
    opt = AdamW(net.parameters(), module=net)
    opt.load_safetensors(tmp_path / "x")
    assert not opt.state[net[0]]
    assert opt.state[net[1]]["exp_avg"].all()


def test_unused_frozen_and_empty_parameters(tmp_path: Path) -> None:
    def make() -> list[nn.Parameter]:
        frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        return [nn.Parameter(torch.zeros(0)), frozen, *(nn.Parameter(torch.ones(7)) for _ in "ab")]

    weights = make()
    opt = AdamW(weights, states="disk", dir=tmp_path, durability="none")
    weights[0].grad, weights[2].grad = torch.ones(0), torch.ones(7)
    opt.step()
    opt.save_safetensors(tmp_path / "x")
    again = make()
    new = AdamW(again)
    new.load_safetensors(tmp_path / "x")
    assert new.state_dict()["state"].keys() == {0, 2}
    assert same_states(new.state_dict(), opt.state_dict())


@pytest.mark.parametrize("foreach", [None, True])
def test_to_plain_torch_and_back(tmp_path: Path, foreach: bool | None) -> None:  # noqa: FBT001
    net, plain = model(), model()
    opt = adamw(net, tmp_path / "a", module=net, lr=0.01)
    train(net, opt, range(3))
    opt.save_safetensors(tmp_path / "x")
    plain.load_state_dict(net.state_dict())
    theirs = torch.optim.AdamW(plain.parameters(), foreach=foreach)
    theirs.load_state_dict(state_dict_of(tmp_path / "x", theirs.param_groups, plain))
    assert theirs.param_groups[0]["lr"] == 0.01
    assert same_states(theirs.state_dict(), opt.state_dict())
    train(plain, theirs, range(3, 4))
    back = adamw(plain, tmp_path / "b")
    back.load_state_dict(theirs.state_dict())
    assert same_states(back.state_dict(), theirs.state_dict())


def test_bf16_moments_of_torch_lose_nothing_here_and_ours_are_rounded_there() -> None:
    """What is lossless: torch's bf16 states to us and back; ours to files, not to its optimizer."""
    net, other = model(torch.bfloat16), model(torch.bfloat16)
    theirs = torch.optim.AdamW(net.parameters())
    train(net, theirs, range(2))
    ours = AdamW(net.parameters())
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for p in net.parameters():
        assert torch.equal(ours.state[p]["master"], p.float())
    back = torch.optim.AdamW(net.parameters())
    back.load_state_dict(ours.state_dict())
    assert same_states(theirs.state_dict(), back.state_dict())

    full = AdamW(other.parameters())
    train(other, full, range(2))
    rounded = torch.optim.AdamW(other.parameters())
    rounded.load_state_dict(full.state_dict())
    for p in other.parameters():
        kept, cast = full.state[p]["exp_avg"], rounded.state[p]["exp_avg"]
        assert torch.equal(cast, kept.to(torch.bfloat16))
        assert not torch.equal(cast.float(), kept)


def test_states_that_torch_keeps_are_exported_too(tmp_path: Path) -> None:
    net = model()
    opt = HybridAdam(net.parameters())
    train(net, opt, range(1))
    opt.save_safetensors(tmp_path / "x")
    new = HybridAdam(net.parameters())
    new.load_safetensors(tmp_path / "x")
    assert same_states(new.state_dict(), opt.state_dict())


def test_a_failure_keeps_the_old_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    opt = adamw(net, tmp_path / "run")
    train(net, opt, range(1))
    path = tmp_path / "x"
    opt.save_safetensors(path)
    kept = path.read_bytes()
    train(net, opt, range(1, 2))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(5, "broken")))
        with pytest.raises(OSError, match="x was requested: Input/output error"):
            opt.save_safetensors(path)
    assert path.read_bytes() == kept
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "x", "x.digests"]
    opt.save_safetensors(path)
    assert path.read_bytes() != kept
    with pytest.raises(DirectoryError, match="was requested"):
        opt.save_safetensors(tmp_path / "no" / "x")


def test_what_does_not_fit_is_named_and_nothing_is_changed(tmp_path: Path) -> None:
    net = model()
    opt = adamw(net, None, module=net)
    train(net, opt, range(1))
    opt.save_safetensors(tmp_path / "x")

    def refuses(params: Iterable[object], message: str, **options: object) -> None:
        target = AdamW(params, **options)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match=message):
            target.load_safetensors(tmp_path / "x")
        assert target.state_dict()["state"] == {}

    other = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 33))
    refuses(other.parameters(), r"2\.weight\.exp_avg in .* \(32, 128\).* \(33, 128\)")
    refuses(other[0].parameters(), "4 parameters in group 0 and this optimizer 2")
    refuses([{"params": [p]} for p in net.parameters()], r"1 parameter groups.* 4")
    deeper = nn.Sequential(*net, nn.Linear(32, 2))
    refuses(deeper.parameters(), r"only the optimizer has 3\.weight, 3\.bias", module=deeper)
    refuses(net[0].parameters(), r"only the file has 0\.weight", module=net[0])


def test_other_files_are_refused(tmp_path: Path) -> None:
    opt = AdamW(model().parameters())
    save_file({"0.exp_avg": torch.zeros(3)}, tmp_path / "x")
    with pytest.raises(OptionError, match="another kind of file"):
        opt.load_safetensors(tmp_path / "x")
    for groups in ("[", "[{}]", '[{"params": ["0"], "lr": {"__tensor__": 0}}]', "3"):
        metadata = {"tensorstow": "1", "keyed_by": "place", "param_groups": groups}
        save_file({"0.exp_avg": torch.zeros(3)}, tmp_path / "x", metadata)
        with pytest.raises(OptionError, match=r"parameter groups in .* cannot be read"):
            opt.load_safetensors(tmp_path / "x")
    groups = json.dumps([{"params": ["0", "1", "2", "3"]}])
    metadata = {"tensorstow": "1", "keyed_by": "place", "param_groups": groups}
    save_file({"0.exp_avg": torch.zeros(128, 64)}, tmp_path / "x", metadata)
    with pytest.raises(OptionError, match="no step count for 0"):
        opt.load_safetensors(tmp_path / "x")


def test_a_state_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    net = model()
    opt = AdamW(net.parameters())
    train(net, opt, range(1))
    opt.state[net[0].weight]["note"] = "mine"
    with pytest.raises(OptionError, match=r"'note' of 0 is a str.*torch\.save"):
        opt.save_safetensors(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


CHILD = """
opt = trained(2, 1 << 20, torch.bfloat16)
_, new = make(2, 1 << 20, torch.bfloat16)
reset()
peak, anonymous = memory("VmHWM"), memory("RssAnon")
opt.save_safetensors(path + "/x")
print(memory("VmHWM") - peak)
new.load_safetensors(path + "/x")
print(memory("RssAnon") - anonymous)
"""


@pytest.mark.slow
def test_memory_stays_bounded_by_pieces(tmp_path: Path) -> None:
    """192 MiB of states in fp32."""
    saved, loaded = printed(CHILD, tmp_path)
    assert (tmp_path / "x").stat().st_size >> 20 == 192
    assert saved < 24
    assert loaded < 128  # the new ring (48), masters of one parameter rounded at a time (16)


def values_of(optimizer: AdamW) -> list[torch.Tensor]:
    states = copy.deepcopy(optimizer.state_dict()["state"])
    return [tensor for entry in states.values() for tensor in entry.values()]


def test_a_damaged_export_is_not_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest_list, "_warned_unlisted", set())
    layer = nn.Linear(8, 8)
    optimizer = AdamW(layer.parameters(), states="disk", module=layer)
    layer(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    path = tmp_path / "states.safetensors"
    optimizer.save_safetensors(path)
    optimizer.load_safetensors(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    before = values_of(optimizer)
    with pytest.raises(DamageError, match=r"states\.safetensors has another checksum"):
        optimizer.load_safetensors(path)
    assert all_equal(values_of(optimizer), before)
    assert "has no list" not in caplog.text
    (tmp_path / "states.safetensors.digests").unlink()
    for _ in range(2):
        optimizer.load_safetensors(path)
    assert caplog.text.count("has no list of digests") == 1
    optimizer.save_safetensors(path)
    optimizer.load_safetensors(path)
    optimizer.close()


BAD: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any], str]] = {
    "step of two": ({"0.step": torch.ones(2)}, {}, "'step' of Parameter 0"),
    "step, NaN": ({"0.step": torch.tensor(float("nan"))}, {}, "'step' of Parameter 0 is nan"),
    "step, negative": ({"0.step": torch.tensor(-1.0)}, {}, r"'step' of Parameter 0 is -1\.0"),
    "step, huge": ({"0.step": torch.tensor(1e30)}, {}, "'step' of Parameter 0 is 1"),
    "step, half": ({"0.step": torch.tensor(1.5)}, {}, r"'step' of Parameter 0 is 1\.5"),
    "integers": ({"0.exp_avg": torch.ones(2, 3).long()}, {}, "'exp_avg'.*int64"),
    "booleans": ({"0.exp_avg": torch.ones(2, 3).bool()}, {}, "'exp_avg'.*bool"),
    "nested": ({}, {"params": [["a"]]}, "cannot be read.*no text"),
    "a device": ({}, {"lr": {"__device__": "x"}}, "cannot be read"),
}
"""Tensors and options that are put into a file, and what is said of them."""


@pytest.mark.parametrize("name", BAD)
def test_values_that_no_optimizer_saved_are_refused(tmp_path: Path, name: str) -> None:
    tensors, changed, said = BAD[name]
    weight, path = nn.Parameter(torch.ones(2, 3)), tmp_path / "states.safetensors"
    with AdamW([weight]) as optimizer:
        weight.sum().backward()
        optimizer.step()
        optimizer.save_safetensors(path)
        with safe_open(path, "pt") as file:
            metadata = dict(file.metadata())
        groups = json.loads(metadata["param_groups"])
        metadata["param_groups"] = json.dumps([{**groups[0], **changed}])
        save_file({**load_file(path), **tensors}, path, metadata)
        path.with_name(f"{path.name}.digests").unlink()
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(OptionError, match=said):
            optimizer.load_safetensors(path)
        assert same_states(optimizer.state_dict(), before)
