"""Models that are only read: the same bits as in memory, and what is refused by name."""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import tensorstow
from models import ResidualStack
from ranks.evaluated import outputs_from_files
from ranks.pool import Pool
from tensorstow import Budget, Plan
from tensorstow.base.errors import (
    BudgetError,
    DamageError,
    OptionError,
    StoreFormatError,
    TransferError,
)
from tensorstow.fsdp.read_only import stream_of
from tensorstow.fsdp.weight_stream import WeightStream
from tensorstow.io.files import IoFuture
from tensorstow.nn import TiledLinear

WIDTH, BLOCKS = 64, 6
BLOCK_BYTES = 4 * WIDTH * (WIDTH + 1)
DISK = Plan(parameters="disk")


class Net(nn.Module):
    """Blocks between two layers that share a weight, and a buffer that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.body = ResidualStack(WIDTH, BLOCKS)
        self.head = nn.Linear(WIDTH, 32, bias=True)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        out: torch.Tensor = self.head(self.body(self.embed(tokens)) * self.scale)
        return out


TOKENS = torch.arange(24).view(2, 12)


def saved(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Net, torch.Tensor]:
    """Save a net to ``folder`` in two files; return it, and its logits."""
    torch.manual_seed(0)
    net = Net().to(dtype)
    tensors = {n: t for n, t in net.state_dict().items() if n != "head.weight"}
    first = {n: t for n, t in tensors.items() if "blocks" not in n}
    save_file(first, folder / "a.safetensors")
    save_file({n: tensors[n] for n in set(tensors) - set(first)}, folder / "b.safetensors")
    with torch.no_grad():
        return net, net(TOKENS)


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


def stream(model: nn.Module) -> WeightStream:
    found = stream_of(model)
    assert found is not None
    return found


# --- the same bits ---


@pytest.mark.parametrize(
    "plan",
    [
        DISK,
        Plan(),
        Plan(parameters="device"),
        Plan(parameters="disk", prefetch=0),
        Plan(parameters="disk", prefetch=9),
        Plan(parameters="disk", parameter_units={"": "host", "body.blocks.3": "host"}),
        Plan(parameter_units={"body.blocks.0": "disk", "embed": "disk"}),
    ],
    ids=["disk", "host", "device", "alone", "all-ahead", "root-in-memory", "two-on-disk"],
)
def test_wherever_weights_are_results_are_the_same(tmp_path: Path, plan: Plan) -> None:
    _, expected = saved(tmp_path)
    model, optimizer = tensorstow.stow(on_meta(), None, plan=plan, weights=tmp_path)
    assert optimizer is None
    assert tensorstow.plan_of(model) == plan
    for _ in range(3):
        assert torch.equal(model(TOKENS), expected)
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("plan", [DISK, Plan()], ids=["disk", "host"])
def test_weights_begin_where_torchs_own_do_wherever_files_have_them(
    tmp_path: Path, plan: Plan
) -> None:
    """Libraries choose kernels by addresses, above all for products of one row."""
    net = nn.Sequential(nn.Linear(23, 29), nn.Linear(29, 5))
    row = torch.randn(1, 23)
    for more in range(8):
        file = tmp_path / f"{more}.safetensors"
        save_file(net.state_dict(), file, {"more": 8 * more * "."})
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(23, 29), nn.Linear(29, 5))
        model, _ = tensorstow.stow(model, None, plan=plan, weights=file)
        seen = []
        for layer in model:
            layer.register_forward_pre_hook(
                lambda layer, _, seen=seen: seen.extend(
                    p.data_ptr() % 64 for p in layer.parameters()
                )
            )
        with torch.no_grad():
            assert torch.equal(model(row), net(row))
        assert seen == [0, 0, 0, 0]


class Nested(nn.Module):
    """A parameter of the model itself, blocks with tiles in them, and a weight that two share."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(1, WIDTH))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), TiledLinear(WIDTH, WIDTH, in_splits=2, out_splits=2))
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return features of the input's shape."""
        for block in self.blocks:
            x = x + block(x + self.first)
        return x


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_units_inside_of_units_are_in_memory_together(tmp_path: Path, prefetch: int) -> None:
    torch.manual_seed(0)
    net, x = Nested(), torch.randn(3, WIDTH)
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Nested()
    plan = Plan(parameters="disk", prefetch=prefetch)
    model, _ = tensorstow.stow(model, None, plan=plan, weights=tmp_path)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(x), net(x))
    assert stream(model).host.memory.peak <= stream(model).host.memory.capacity


def test_weights_may_be_cast_on_the_way(tmp_path: Path) -> None:
    saved(tmp_path)
    net = Net().bfloat16()
    net.load_state_dict(load_file(tmp_path / "a.safetensors"), strict=False)
    net.load_state_dict(load_file(tmp_path / "b.safetensors"), strict=False)
    for make in (lambda: on_meta().bfloat16(), on_meta):
        for plan in (DISK, Plan(), Plan(parameter_units={"embed": "disk"})):
            model, _ = tensorstow.stow(
                make(), None, plan=plan, weights=tmp_path, compute_dtype=torch.bfloat16
            )
            model.scale = model.scale.bfloat16()
            assert torch.equal(model(TOKENS), net(TOKENS))


def test_a_model_in_memory_stays_as_it_is_and_needs_no_files() -> None:
    torch.manual_seed(0)
    net = Net()
    expected = net(TOKENS)
    model, _ = tensorstow.stow(net, None, plan=Plan())
    assert torch.equal(model(TOKENS), expected)
    assert stream_of(model) is None
    with pytest.raises(
        OptionError, match=r"Unit 'body\.blocks\.0' is to be on disk.*pass weights="
    ):
        tensorstow.stow(Net(), None, plan=Plan(parameter_units={"body.blocks.0": "disk"}))


def test_a_compiled_model_gives_the_same_bits(tmp_path: Path) -> None:
    _, expected = saved(tmp_path)
    model, _ = tensorstow.stow(on_meta(), None, plan=DISK, weights=tmp_path)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(compiled(TOKENS), expected)


# --- memory and bytes read ---


def test_each_pass_reads_each_weight_once_within_the_buffers(tmp_path: Path) -> None:
    saved(tmp_path)
    model, _ = tensorstow.stow(on_meta(), None, plan=DISK, weights=tmp_path)
    for _ in range(4):
        model(TOKENS)
    read = stream(model)
    block = -(-BLOCK_BYTES // 4096) * 4096
    assert read.host.memory.peak <= read.host.memory.capacity <= 3 * block + 2 * 4096
    total = BLOCKS * BLOCK_BYTES + 4 * 32 * (WIDTH + 1)
    # The tied weight is read for the head, and serves the next pass; three units are read ahead.
    assert 4 * total <= read.bytes_read <= 4 * total + 3 * block + 4 * 32 * WIDTH


def test_what_lies_together_is_read_at_once(tmp_path: Path) -> None:
    saved(tmp_path)
    model, _ = tensorstow.stow(on_meta(), None, plan=DISK, weights=tmp_path)
    units = [call.unit for call in stream(model).calls if "blocks" in call.unit.name]
    assert [len(unit.runs) for unit in units] == [1] * BLOCKS
    assert all(unit.runs[0].nbytes == BLOCK_BYTES for unit in units)


def test_a_budget_keeps_what_fits_in_memory(tmp_path: Path) -> None:
    _, expected = saved(tmp_path)
    budget = Budget(host=6 * BLOCK_BYTES)
    model, _ = tensorstow.stow(on_meta(), None, budget=budget, weights=tmp_path)
    plan = tensorstow.plan_of(model)
    stay = [name for name, tier in plan.parameter_units.items() if tier == "host"]
    assert 1 <= len([name for name in stay if "blocks" in name]) < BLOCKS
    assert torch.equal(model(TOKENS), expected)
    before = stream(model).bytes_read
    model(TOKENS)
    on_disk = BLOCKS - len([name for name in stay if "blocks" in name])
    assert stream(model).bytes_read - before <= (on_disk + 1) * BLOCK_BYTES
    resident = sum(p.nbytes for n, p in model.named_parameters() if n.rsplit(".", 1)[0] in stay)
    assert resident + stream(model).host.memory.capacity <= 6 * BLOCK_BYTES

    model, _ = tensorstow.stow(on_meta(), None, budget=Budget(host="1GiB"), weights=tmp_path)
    assert stream_of(model) is None
    with pytest.raises(BudgetError, match="the largest unit has"):
        tensorstow.stow(on_meta(), None, budget=Budget(host=BLOCK_BYTES // 2), weights=tmp_path)
    with pytest.raises(BudgetError, match="must fit in it: the model has no weights="):
        tensorstow.stow(Net(), None, budget=Budget(host=BLOCK_BYTES))


def test_what_it_holds_and_reads_can_be_asked_for(tmp_path: Path) -> None:
    saved(tmp_path)
    plan = Plan(parameters="disk", parameter_units={"body.blocks.1": "host", "": "host"})
    model, _ = tensorstow.stow(on_meta(), None, plan=plan, weights=tmp_path)
    model(TOKENS)
    counted = tensorstow.usage(nn.Sequential(model)).parameters
    assert counted.host_bytes == BLOCK_BYTES + 4 * 32 * (WIDTH + 1)
    assert counted.disk_bytes == (BLOCKS - 1) * BLOCK_BYTES
    assert counted.buffer_pool_bytes == counted.most_buffer_pool_bytes
    assert counted.buffer_pool_bytes == stream(model).host.memory.capacity
    assert counted.bytes_read == stream(model).bytes_read > counted.disk_bytes
    assert counted.pinned_bytes == counted.link_bytes_up == counted.device_bytes == 0
    in_memory, _ = tensorstow.stow(Net(), None, plan=Plan())
    assert tensorstow.usage(in_memory).parameters.disk_bytes == 0


def test_buffers_that_hold_no_unit_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    plan = Plan(parameters="disk", weight_ram_budget=4096)
    with pytest.raises(BudgetError, match=r"weight_ram_budget=.* the largest unit has"):
        tensorstow.stow(on_meta(), None, plan=plan, weights=tmp_path)


# --- refusals ---


def broken(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    saved(folder)
    tensors = load_file(folder / "a.safetensors")
    change(tensors)
    save_file(tensors, folder / "a.safetensors")


@pytest.mark.parametrize("plan", [DISK, Plan()], ids=["disk", "host"])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.pop("head.bias"), "no tensor 'head.bias'"),
        (lambda t: t.update(extra=torch.ones(2)), "has 'extra' that this Net lacks"),
        (
            lambda t: t.update({"head.bias": torch.ones(33)}),
            r"'head.bias' in .* is \(33,\) and the model's is \(32,\)",
        ),
    ],
    ids=["missing", "unexpected", "shape"],
)
def test_files_of_another_model_are_refused_at_once(
    tmp_path: Path, plan: Plan, change: Callable[[dict[str, torch.Tensor]], object], told: str
) -> None:
    broken(tmp_path, change)
    model = on_meta()
    with pytest.raises(StoreFormatError, match=told):
        tensorstow.stow(model, None, plan=plan, weights=tmp_path)
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"dir": "somewhere"}, "dir='somewhere' was given without an optimizer"),
        ({"tokens": 5}, "tokens=5 was given without an optimizer"),
        ({"plan": Plan(overlap="backward")}, "overlap='backward' .* is for training"),
        (
            {"plan": Plan(parameter_units={"body.blocks.9": "disk"})},
            "units that the model does not have",
        ),
        ({"plan": DISK, "budget": Budget()}, 'budget= only applies to plan="auto"'),
        ({"weights": None}, "is on the meta device.* pass weights="),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, given: dict[str, Any], told: str) -> None:
    saved(tmp_path)
    with pytest.raises(OptionError, match=told):
        tensorstow.stow(on_meta(), None, **{"weights": tmp_path, **given})


def test_it_is_not_trained_copied_cast_or_written_to(tmp_path: Path) -> None:
    net, expected = saved(tmp_path)
    model, _ = tensorstow.stow(on_meta(), None, plan=DISK, weights=tmp_path)
    block = model.body.blocks[0]
    with pytest.raises(
        OptionError, match=r"'body\.blocks\.0' was called with a tensor that requires"
    ):
        block(torch.ones(WIDTH, requires_grad=True))
    with pytest.raises(OptionError, match="only read"):
        block.weight.zero_()
    with pytest.raises(RuntimeError, match="a model that is only read"):
        model.load_state_dict(net.state_dict())
    with pytest.raises(OptionError, match="Cast before stow"):
        model.half()
    assert model.to("cpu") is model
    with pytest.raises(
        OptionError, match=r"A copy \(by torch\.save, pickle or copy\) was called on"
    ):
        torch.save(model.state_dict(), tmp_path / "copy.pt")
    with pytest.raises(OptionError, match="placed before"):
        tensorstow.stow(model, None, plan=DISK, weights=tmp_path)

    def write(module: nn.Linear, *_: object) -> None:
        with torch.no_grad():
            module.weight.clamp_(max=0.0)

    told = r"body\.blocks\.0\.weight of unit .* was written to"
    with block.register_forward_hook(write, prepend=True), pytest.raises(OptionError, match=told):
        model(TOKENS)
    assert torch.equal(model(TOKENS), expected)  # the change is dropped

    model, _ = tensorstow.stow(on_meta(), None, plan=Plan(), weights=tmp_path)
    with torch.no_grad():
        model.body.blocks[1].bias.zero_()
    with pytest.raises(OptionError, match=r"body\.blocks\.1\.bias was written to"):
        model(TOKENS)


def test_a_graph_that_outlives_its_weights_raises(tmp_path: Path) -> None:
    saved(tmp_path)
    model, _ = tensorstow.stow(on_meta(), None, plan=DISK, weights=tmp_path)
    block, scale = model.body.blocks[0], torch.ones(WIDTH, requires_grad=True)
    # Within a unit an adapter may have gradients.
    with block.register_forward_pre_hook(lambda _, given: (given[0] * scale,)):
        out = block(torch.ones(WIDTH))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_weights_that_are_late_are_waited_for(tmp_path: Path) -> None:
    _, expected = saved(tmp_path)
    model, _ = tensorstow.stow(on_meta(), None, plan=DISK, weights=tmp_path)
    stream(model).calls[0].unit.runs[0].file.engine.inject_fault("read", times=-1, delay_us=2000)
    assert torch.equal(model(TOKENS), expected)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_thread_that_waits_for_a_read_keeps_no_other_from_what_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefetch: int
) -> None:
    saved(tmp_path)
    plan = Plan(parameters="disk", prefetch=prefetch, weight_ram_budget="1GiB")
    model, _ = tensorstow.stow(on_meta(), None, plan=plan, weights=tmp_path)
    read = stream(model)
    first, last = read.calls[0], read.calls[-2]
    assert first.unit is not last.unit
    read.enter(first)
    read.leave(first)
    is_waiting, may_end, done, wait = Event(), Event(), IoFuture.done, IoFuture.wait

    def late(future: IoFuture) -> None:
        is_waiting.set()
        assert may_end.wait(10)
        wait(future)

    monkeypatch.setattr(IoFuture, "done", lambda future: may_end.is_set() and done(future))
    monkeypatch.setattr(IoFuture, "wait", late)
    with ThreadPoolExecutor(3) as threads:
        entered = [threads.submit(read.enter, last) for _ in range(2)]
        try:
            assert is_waiting.wait(10)
            threads.submit(read.enter, first).result(timeout=5)
            threads.submit(read.leave, first).result(timeout=5)
        finally:
            may_end.set()
        for other in entered:
            other.result(timeout=10)
    assert last.unit.attached
    assert (last.depth, last.unit.users, first.unit.users) == (2, 2, 0)
    read.leave(last)
    read.leave(last)
    assert not last.unit.attached


def test_a_read_that_fails_is_told_and_the_next_pass_goes_on(tmp_path: Path) -> None:
    _, expected = saved(tmp_path)
    model, _ = tensorstow.stow(on_meta(), None, plan=DISK, weights=tmp_path)
    engine = stream(model).calls[0].unit.runs[0].file.engine
    engine.inject_fault("read", after=2, error=5)
    with pytest.raises(TransferError, match=r"safetensors met EIO"):
        model(TOKENS)
    engine.clear_faults()
    assert torch.equal(model(TOKENS), expected)
    assert torch.equal(model(TOKENS), expected)
    os.truncate(tmp_path / "b.safetensors", 2000)
    # What was read ahead was read before or after it.
    with pytest.raises((TransferError, DamageError), match=r"the end of the file|was changed"):
        model(TOKENS)


@pytest.mark.parametrize("units", [{}, {"": "host", "body.blocks.3": "host"}], ids=["all", "some"])
def test_files_that_were_written_to_are_refused_from_then_on(
    tmp_path: Path, units: dict[str, Any]
) -> None:
    _, expected = saved(tmp_path)
    plan = Plan(parameters="disk", parameter_units=units, prefetch=0)
    model, _ = tensorstow.stow(on_meta(), None, plan=plan, weights=tmp_path)
    assert torch.equal(model(TOKENS), expected)
    path = tmp_path / "b.safetensors"
    seen, content = path.stat(), bytearray(path.read_bytes())
    content[-4:] = b"\0\0\0\0"
    path.write_bytes(content)
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))  # as if nothing had happened
    for _ in range(2):
        with pytest.raises(DamageError, match=r"b\.safetensors was changed while a model is"):
            model(TOKENS)
    model, _ = tensorstow.stow(on_meta(), None, plan=plan, weights=tmp_path)
    assert not torch.equal(model(TOKENS), expected)


@pytest.mark.parametrize("optimizer", [None, tensorstow.AdamW])
@pytest.mark.parametrize("place", ["device", "host"])
def test_weights_in_memory_are_none_of_the_files_any_more(
    tmp_path: Path, optimizer: Callable[..., Any] | None, place: str
) -> None:
    _, expected = saved(tmp_path)
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for file in files:  # its tensors begin where the memory of tensors does, so they can be mapped
        tensors, padding = load_file(file), 0
        while (8 + int.from_bytes(file.read_bytes()[:8], "little")) % 64:
            save_file(tensors, file, {"padding": " " * (padding := padding + 1)})
    plan = Plan(parameters=place)
    model, made = tensorstow.stow(on_meta(), optimizer, plan=plan, weights=tmp_path)
    for file in files:
        with file.open("r+b") as opened:
            opened.seek(-4000, os.SEEK_END)
            opened.write(bytes(4000))
    assert torch.equal(model(TOKENS), expected)
    if made is not None:
        made.close()


def test_a_new_file_of_the_same_name_is_another_one(tmp_path: Path) -> None:
    _, expected = saved(tmp_path)
    model, _ = tensorstow.stow(on_meta(), None, plan=DISK, weights=tmp_path)
    (tmp_path / "b.safetensors").unlink()
    for _ in range(2):
        assert torch.equal(model(TOKENS), expected)


def test_an_index_that_names_no_file_or_a_strange_one_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for name, told in (("c.safetensors", "cannot be read as safetensors"), ("../a", "no file in")):
        index.write_text(json.dumps({"weight_map": {"embed.weight": name}}), encoding="utf-8")
        model = on_meta()
        with pytest.raises(StoreFormatError, match=told):
            tensorstow.stow(model, None, plan=DISK, weights=tmp_path)
        assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_each_rank_has_a_model_of_its_own(tmp_path: Path, tier: str, ranks: Pool) -> None:
    torch.manual_seed(0)
    net, x = ResidualStack(WIDTH, BLOCKS), torch.randn(3, WIDTH)
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    with torch.no_grad():
        expected = net(x)
    for found in ranks(2).run(outputs_from_files, str(tmp_path), tier, WIDTH, BLOCKS, x):
        assert all(torch.equal(each, expected) for each in found)
