"""Micro-batches in vertical order: the bits of accumulation, and one reading of each weight."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import tensorstow
from ranks.twin import ADAMW, whole
from tensorstow import Plan
from tensorstow.base.errors import OptionError, StowError
from tensorstow.fsdp.module_hooks import param_groups_of
from tensorstow.fsdp.vertical_order import WeightSum
from tensorstow.nn import TiledLinear
from tensorstow.optim.stowed_adam import StowedAdam
from torch_versions import RESETS_FSDP
from unit.fsdp.test_stow_transformers import WORDS, model_of

WIDTH, TOKENS = 16, 6
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]
Gradients = dict[str, torch.Tensor | None]


def blocks(count: int = 3, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(count)]
    return nn.Sequential(*made).to(dtype)


def batch(step: int, size: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, TOKENS, WIDTH, generator=generator).to(dtype)


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


@contextmanager
def stowed(model: nn.Module, plan: Plan, **options: Any) -> Iterator[tuple[nn.Module, StowedAdam]]:  # noqa: ANN401
    model, optimizer = tensorstow.stow(model, ADAMW, plan=plan, **options)
    yield model, optimizer
    optimizer.close()


def gradients(model: nn.Module) -> Gradients:
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def weights(model: nn.Module) -> Gradients:
    return {name: whole(p) for name, p in model.named_parameters()}


def train(
    make: Callable[[], nn.Module],
    loss: Loss,
    data: Sequence[torch.Tensor],
    plan: Plan,
    passes: int = 1,
    **options: Any,  # noqa: ANN401
) -> list[Gradients]:
    """Return the gradients of each step, and the weights behind the last."""
    found = []
    with stowed(make(), plan, **options) as (model, optimizer):
        for x in data:
            for part in x.chunk(passes):
                (loss(model, part.clone()) / passes).backward()
            found.append(gradients(model) if plan.overlap != "backward" else {})
            optimizer.step()
            optimizer.zero_grad()
        optimizer.wait()
        found.append(weights(model))
    return found


def both(
    make: Callable[[], nn.Module],
    loss: Loss,
    data: Sequence[torch.Tensor],
    plan: Plan,
    count: int,
    **options: Any,  # noqa: ANN401
) -> tuple[list[Gradients], list[Gradients]]:
    """Train by ``count`` micro-batches in vertical order, and by as many passes."""
    vertical = train(make, loss, data, plan.but(micro_batches=count), **options)
    return vertical, train(
        make, loss, data, plan.but(accumulation_steps=count), passes=count, **options
    )


def unequal(ours: Gradients, theirs: Gradients) -> set[str]:
    """Return the names of those that are not the same to the bit and in dtype."""
    return {
        name
        for name, mine in ours.items()
        if (other := theirs[name]) is None
        or mine is None
        or mine.dtype != other.dtype
        or not torch.equal(mine, other)
    }


@pytest.mark.parametrize(
    ("tier", "dtype"), [("host", torch.bfloat16), ("disk", torch.float32), ("disk", torch.bfloat16)]
)
@pytest.mark.parametrize("count", [2, 4, 8])
def test_it_trains_to_the_bits_of_accumulation(tier: str, dtype: torch.dtype, count: int) -> None:
    data = [batch(step, dtype=dtype) for step in range(2)]
    found = both(lambda: blocks(dtype=dtype), squares, data, Plan(parameters=tier), count)
    for ours, theirs in zip(*found, strict=True):
        assert not unequal(ours, theirs)


def test_parts_of_the_batch_begin_where_torchs_own_tensors_do() -> None:
    """Libraries choose kernels by addresses: here the second part is 12 bytes further."""

    def odd() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(23, 23), nn.GELU()) for _ in range(3)))

    data = [torch.randn(6, 23, generator=torch.Generator().manual_seed(step)) for step in range(2)]
    for ours, theirs in zip(*both(odd, squares, data, Plan(parameters="disk"), 2), strict=True):
        assert not unequal(ours, theirs)


def test_updates_run_when_the_last_micro_batch_has_left_a_unit() -> None:
    plan = Plan(parameters="disk", overlap="backward")
    ours, theirs = both(blocks, squares, [batch(step) for step in range(3)], plan, 4)
    assert not unequal(ours[-1], theirs[-1])


def language_model(kind: str) -> Any:  # noqa: ANN401  # another library's
    made = model_of(kind)
    made.config.use_cache = False
    return made


def next_token(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(tokens)
    mask[:, -2:] = 0
    found: torch.Tensor = model(input_ids=tokens, attention_mask=mask, labels=tokens).loss
    return found


def of_transformers(kind: str, count: int) -> tuple[set[str], set[str], float]:
    """Return what differs in gradients, in the first step and all, and how much at most."""
    generator = torch.Generator().manual_seed(1)
    data = [torch.randint(WORDS, (8, TOKENS), generator=generator) for _ in range(2)]
    plan = Plan(parameters="disk")
    ours, theirs = both(lambda: language_model(kind), next_token, data, plan, count)
    apart = [
        ((mine - other).abs().max() / other.abs().max()).item()
        for name, mine in ours[0].items()
        if mine is not None and (other := theirs[0][name]) is not None
    ]
    everywhere = unequal(ours[0], theirs[0]) | unequal(ours[2], theirs[2])
    return unequal(ours[0], theirs[0]), everywhere, max(apart)


def test_a_llama_shaped_model_has_the_bits_of_accumulation() -> None:
    assert of_transformers("llama", 4) == (set(), set(), 0.0)


def test_only_weights_that_all_samples_or_two_modules_share_are_summed_otherwise() -> None:
    first, _, apart = of_transformers("gpt2", 4)
    assert first == {"transformer.wte.weight", "transformer.wpe.weight"}
    assert apart < 4 * 2**-23


def refused(model: nn.Module, x: torch.Tensor, **plan: Any) -> str:  # noqa: ANN401
    with stowed(model, Plan(parameters="disk", **plan)) as (made, _):
        with pytest.raises(OptionError) as caught:
            made(x)
        with torch.no_grad():
            made(x)  # nothing was left half done
    return str(caught.value)


class Scalar(nn.Linear):
    """Returns what has no batch."""

    def forward(self, x: torch.Tensor) -> Any:  # noqa: ANN401
        return super().forward(x).mean()


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    assert "a batch of 6" in refused(blocks(), batch(0, 6), micro_batches=4)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Scalar(WIDTH, WIDTH))
    message = refused(model, batch(0), micro_batches=2)
    assert "unit '1'" in message
    assert "without the batch (output 0)" in message


@pytest.mark.parametrize(
    "given", [{"parameters": "device"}, {"parameters": "host", "stage": 2}, {"parameters": "disk"}]
)
def test_a_plan_refuses_micro_batches_that_would_change_nothing(given: dict[str, Any]) -> None:
    count = 0 if given["parameters"] == "disk" else 2
    with pytest.raises(OptionError, match=f"micro_batches={count} was given"):
        Plan(micro_batches=count, **given)


def bytes_read(plan: Plan, passes: int) -> int:
    """Return the bytes of weights read in the third step, with room for four of nine units."""
    plan = plan.but(parameters="disk", overlap="backward", weight_ram_budget="16KiB")
    with stowed(blocks(9), plan) as (model, optimizer):
        (part,) = optimizer._recorded_parts
        for step in range(3):
            part().pools[0].synchronize()
            before = part().moved()["weights read"]
            for x in batch(step).chunk(passes):
                (squares(model, x) / passes).backward()
            optimizer.step()
            read: int = part().moved()["weights read"] - before
            optimizer.zero_grad()
    return read


def test_a_weight_is_read_as_often_as_for_one_micro_batch() -> None:
    units, in_memory, unit = 9, 4, 4096
    once = 2 * (units - in_memory) * unit
    assert bytes_read(Plan(micro_batches=8), 1) == once
    assert bytes_read(Plan(accumulation_steps=8), 8) == 8 * once


class Inner(nn.Module):
    """A block around one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)


class Counting(Inner):
    """Counts how many of its intermediate tensors are alive at most."""

    alive: int = 0
    most: int = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = torch.tanh(self.inner(x))
        Counting.alive += 1
        Counting.most = max(Counting.most, Counting.alive)
        weakref.finalize(inside.untyped_storage(), self.gone)
        return x + inside.sin()

    @staticmethod
    def gone() -> None:
        Counting.alive -= 1


def most_alive(activations: Any) -> int:  # noqa: ANN401
    plan = Plan(parameters="disk", micro_batches=4, activations=activations)
    with stowed(nn.Sequential(Counting(), Counting()), plan) as (model, _):
        squares(model, batch(0)).backward()
        Counting.most = Counting.alive = 0
        squares(model, batch(1)).backward()
    return Counting.most


def test_recomputing_holds_the_inside_of_one_micro_batch_of_one_unit() -> None:
    assert most_alive("keep") == 8
    assert most_alive("recompute") == 1


def test_sums_in_fp32_are_those_of_one_unit_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    most = [0]
    add = WeightSum.add

    with stowed(blocks(4, torch.bfloat16), Plan(parameters="disk", micro_batches=4)) as (model, _):

        def counted(total: WeightSum, alias: torch.Tensor, *, is_deferred: bool) -> None:
            add(total, alias, is_deferred=is_deferred)
            sums = [
                sharded.unsharded_accumulated_grad
                for module in model.children()
                for group in param_groups_of(module._get_fsdp_state())
                for sharded in group.fsdp_params
            ]
            most[0] = max(most[0], sum(s.nbytes for s in sums if s is not None))

        monkeypatch.setattr(WeightSum, "add", counted)
        squares(model, batch(0, dtype=torch.bfloat16)).backward()
    assert most[0] == 4 * (WIDTH * WIDTH + WIDTH)


class Dropping(Inner):
    """A block with dropout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(torch.tanh(self.inner(x)), 0.3, self.training)


def dropped(activations: Any, seed: int, passes: int = 1) -> Gradients:  # noqa: ANN401
    plan = Plan(parameters="disk", activations=activations)
    plan = plan.but(micro_batches=4) if passes == 1 else plan.but(accumulation_steps=passes)
    torch.manual_seed(0)
    with stowed(nn.Sequential(Dropping(), Dropping()), plan) as (model, _):
        torch.manual_seed(seed)
        for part in batch(0).chunk(passes):
            (squares(model, part) / passes).backward()
        return gradients(model)


def test_dropout_follows_the_seed_and_is_drawn_in_another_order_than_by_accumulation() -> None:
    kept = dropped("keep", 1)
    assert not unequal(kept, dropped("keep", 1))
    assert not unequal(kept, dropped("recompute", 1))
    assert unequal(kept, dropped("keep", 2))
    assert unequal(kept, dropped("keep", 1, passes=4))


class Normed(Inner):
    """A block whose buffers follow what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(TOKENS)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        found: torch.Tensor = self.norm(self.inner(x))
        return found


def test_the_first_forward_leaves_buffers_and_random_numbers_as_accumulation_does() -> None:
    def trained(plan: Plan, passes: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        torch.manual_seed(0)
        with stowed(nn.Sequential(Normed(), Normed()), plan) as (model, _):
            for x in reversed(batch(0).chunk(passes)):  # vertical order takes the last first
                squares(model, x).backward()
            return [b.clone() for b in model.buffers()], torch.rand(2)

    ours, drawn = trained(Plan(parameters="disk", micro_batches=4), 1)
    theirs, expected = trained(Plan(parameters="disk", accumulation_steps=4), 4)
    assert all(map(torch.equal, ours, theirs))
    assert torch.equal(drawn, expected)


class Failing(Inner):
    """Fails where it is told to."""

    fails: str = ""
    calls: int = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.tanh(self.inner(x))
        Failing.calls += y.requires_grad
        if Failing.fails == "forward" and Failing.calls == 6:
            raise RuntimeError(Failing.fails)
        if Failing.fails == "backward" and y.requires_grad:
            y.register_hook(self.fail)
        return y

    @staticmethod
    def fail(_: torch.Tensor) -> None:
        raise RuntimeError(Failing.fails)


@pytest.mark.parametrize("where", ["forward", "backward"])
@RESETS_FSDP
def test_a_model_goes_on_behind_an_exception(where: str) -> None:
    def trained(fails: str) -> Gradients:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(Failing(), Failing(), Failing())
        with stowed(model, Plan(parameters="disk", micro_batches=4)) as (model, _):
            Failing.fails, Failing.calls = fails, 0
            if fails:
                x = batch(0)
                with pytest.raises(RuntimeError, match=fails):
                    squares(model, x).backward()
                model.zero_grad()
            Failing.fails = ""
            squares(model, batch(1)).backward()
            return gradients(model)

    assert not unequal(trained(where), trained(""))


def test_evaluation_takes_any_batch_and_runs_whole() -> None:
    with stowed(blocks(), Plan(parameters="disk", micro_batches=4)) as (model, _):
        squares(model, batch(0)).backward()
        with torch.no_grad():
            found = model(batch(1, 3))
    assert torch.equal(found, blocks()(batch(1, 3)))


class Masked(nn.Module):
    """Takes a mask, or none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(MaskedBlock() for _ in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, mask=mask)
        return x


class MaskedBlock(Inner):
    """Multiplies by the mask."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.tanh(self.inner(x))
        return y if mask is None else y * mask


def test_what_comes_late_runs_whole_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    mask = torch.arange(8.0)[:, None, None]
    with stowed(Masked(), Plan(parameters="disk", micro_batches=4)) as (model, _):
        model(batch(0)).sum().backward()
        model.zero_grad()
        assert not caplog.records
        model(batch(0), mask).sum().backward()
        model(batch(0), mask).sum().backward()
        found = gradients(model)
    told = [record.getMessage() for record in caplog.records]
    assert [text.split()[1] for text in told] == ["blocks.0", "blocks.1"]
    assert "mask is of shape (8, 1, 1)" in told[0]
    with stowed(Masked(), Plan(parameters="disk")) as (model, _):
        for _ in range(2):
            model(batch(0), mask).sum().backward()
        wanted = gradients(model)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name])


class Twice(nn.Module):
    """Calls each of its blocks twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MaskedBlock() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return x


@pytest.mark.parametrize("overlap", ["none", "backward"])
def test_a_unit_that_is_called_twice_is_summed_within_rounding(overlap: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Twice()

    plan = Plan(parameters="disk", overlap=overlap)
    ours, theirs = both(make, squares, [batch(0)], plan, 4)
    for name, gradient in ours[0].items():
        torch.testing.assert_close(gradient, theirs[0][name])
    for name, weight in ours[1].items():
        torch.testing.assert_close(weight, theirs[1][name])


class Stopping(Inner):
    """Stops the gradient of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x.detach()))


def test_a_sum_that_nothing_waits_for_is_an_error() -> None:
    once, twice = Stopping(), Stopping()
    plan = Plan(parameters="disk", micro_batches=4)
    with stowed(nn.Sequential(once, MaskedBlock()), plan, units=[once]) as (model, _):
        squares(model, batch(0)).backward()
        assert all(gradient is not None for gradient in gradients(model).values())
    model = Twice()
    model.blocks[0] = twice
    stops = pytest.raises(StowError, match="stops the gradient")
    with stowed(model, plan) as (model, _), stops:
        squares(model, batch(0)).backward()


class Tiled(nn.Module):
    """A block with units inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up = TiledLinear(WIDTH, 32, out_splits=2)
        self.down = nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def test_tiles_run_whole_and_what_is_beside_them_in_parts() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Tiled(), Tiled())

    plan = Plan(parameters="disk", overlap="backward")
    ours, theirs = both(make, squares, [batch(0)], plan, 4)
    for name, weight in ours[-1].items():
        torch.testing.assert_close(weight, theirs[-1][name])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo, of any view
def test_a_compiled_unit_is_cut_and_its_forward_is_compiled() -> None:
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:  # noqa: ANN401
        graphs.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward

    plan = Plan(parameters="disk", micro_batches=4)
    with stowed(Masked(), plan) as (model, _):
        for block in model.blocks:
            block.compile(backend=backend)
        squares(model, batch(0)).backward()
        found = gradients(model)
    assert sum(graphs) >= 2  # a linear and a tanh at least
    with stowed(Masked(), plan) as (model, _):
        squares(model, batch(0)).backward()
        assert not unequal(found, gradients(model))


def test_it_composes_with_autocast_and_with_accumulation() -> None:
    def cast(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return squares(model, x)

    ours, theirs = both(blocks, cast, [batch(0)], Plan(parameters="disk"), 4)
    assert not unequal(ours[0], theirs[0])
    plan = Plan(parameters="disk", micro_batches=2, accumulation_steps=2)
    two = train(blocks, squares, [batch(0)], plan, passes=2)
    four = train(blocks, squares, [batch(0)], Plan(parameters="disk", accumulation_steps=4), 4)
    for name, gradient in two[0].items():  # (0 + 1) + (2 + 3), and ((0 + 1) + 2) + 3
        torch.testing.assert_close(gradient, four[0][name])
