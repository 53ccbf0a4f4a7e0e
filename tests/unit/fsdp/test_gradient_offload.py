"""Gradients leave a device beside backward, and the update reads them where they are.

The CPU stands in for the device, over links whose copies are late.
"""

import gc
import weakref
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from compare import all_equal
from ranks import sharded as ranks_sharded
from ranks.pool import Pool
from ranks.twin import whole
from remote import LateLink, every, make_remote
from tensorstow.base.errors import OptionError
from tensorstow.base.plan import Plan
from tensorstow.fsdp import placements as placements_module
from tensorstow.fsdp import sharding as sharding_module
from tensorstow.fsdp.gradient_offload import (
    D2HQueue,
    GradientOffload,
    HostGradient,
    HostSum,
    PinnedBuffer,
    PinnedBufferPool,
)
from tensorstow.fsdp.report import parameter_bytes
from tensorstow.fsdp.sharding import move_buffers
from tensorstow.fsdp.stow import stow
from tensorstow.io.device_link import PlainLink
from tensorstow.optim.adam import AdamW
from tensorstow.tensors.dtensor import has_offloaded_gradient, shard_of

WIDTH = 16
RunConfig = dict[str, object]
CONFIGS: list[RunConfig] = [
    {},
    {"overlap": "forward"},
    {"micro_batches": 3},
    {"micro_batches": 2, "overlap": "forward", "dtype": torch.float32},
    {"clip": "ours"},
    {"clip": "torch", "micro_batches": 2},
    {"scaled": True},
    {"frozen": True, "micro_batches": 2},
    {"tied": True, "states": "disk", "clip": "ours"},
    {"stage": 3, "micro_batches": 2, "states": "disk"},
    {"stage": 0, "overlap": "forward"},
]


def blocks(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers).to(dtype)


@contextmanager
def current_device(*, stands_in: bool) -> object:
    """Let the CPU be a device of its own inside; give the links of gradients."""
    links: list[LateLink] = []

    def opened(_: torch.device) -> LateLink:
        links.append(LateLink())
        return links[-1]

    with pytest.MonkeyPatch.context() as patch:
        if stands_in:
            make_remote(patch, every)
            patch.setattr(placements_module, "is_away", lambda _: True)
            patch.setattr(sharding_module, "is_away", lambda _: True)
            patch.setattr(placements_module, "open_link", opened)
        yield links


def trained(config: RunConfig, *, stands_in: bool, mesh: bool = False) -> tuple[list[object], int]:
    """Train; return the weights, and the bytes of gradients that fell of themselves."""
    dtype = config.get("dtype", torch.bfloat16)
    model = blocks(dtype)
    if config.get("frozen"):
        model[1][0].weight.requires_grad = False
    if config.get("tied"):
        model[2][0].weight = model[0][0].weight
    micro_batches = int(config.get("micro_batches", 1))
    plan = Plan(
        parameters="device",
        overlap=config.get("overlap", "none"),
        accumulation_steps=micro_batches,
        states=config.get("states", "host"),
        stage=config.get("stage", 2),
    )
    first = 0
    with current_device(stands_in=stands_in) as links:
        # What replicates wants a mesh of two dimensions, which stow makes itself.
        own = sharded_mesh() if mesh and config.get("stage") != 0 else None
        scratch = {"durability": "none"} if "states" in config else {}
        make = partial(AdamW, lr=1e-2, **scratch)
        model, optimizer = stow(model, make, plan=plan, mesh=own)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=bool(config.get("scaled")))
        for step in range(3):
            if step == 2 and config.get("frozen"):
                model[1][0].weight.requires_grad = True
            for batch in range(micro_batches):
                generator = torch.Generator().manual_seed(10 * step + batch)
                x = torch.randn(4, WIDTH, generator=generator, dtype=dtype)
                scaler.scale(model(x).square().mean()).backward()
            if stands_in:
                given = [p for p in model.parameters() if p.grad is not None]
                assert all(map(has_offloaded_gradient, given))
            if config.get("clip") == "ours":
                optimizer.clip_grad_norm_(0.05)
            elif config.get("clip") == "torch":
                nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=False)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            first = first or optimizer._traffic().bytes_down
        optimizer.wait()
        if stands_in and not config.get("frozen"):
            # The weights came down once, and no gradient by the optimizer.
            assert optimizer._traffic().bytes_down == first
            steps = 3 * micro_batches
            moved = sum(shard_of(p).nbytes for p in model.parameters()) * steps
            assert parameter_bytes(model).link_bytes_down == moved
        weights = [whole(p) for p in model.parameters()]
        optimizer.close()
        return weights, sum(link.bytes_down for link in links)


def sharded_mesh() -> object:
    world = torch.distributed.get_world_size()
    return torch.distributed.init_device_mesh("cpu", (world,))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_whole_parameters_are_updated_by_what_came_down(config: RunConfig) -> None:
    here, none = trained(config, stands_in=False)
    there, bytes_down = trained(config, stands_in=True)
    assert none == 0
    assert bytes_down > 0
    assert all_equal(there, here)


def sharded(config: RunConfig) -> tuple[bool, int]:
    here, _ = trained(config, stands_in=False, mesh=True)
    there, bytes_down = trained(config, stands_in=True, mesh=True)
    return all_equal(there, here), bytes_down


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_shards_are_updated_by_what_came_down(ranks: Pool, config: RunConfig, world: int) -> None:
    for equal, bytes_down in ranks(world).run(sharded, config):
        assert equal
        assert bytes_down > 0


def test_a_gradient_that_somebody_keeps_stays() -> None:
    buffer = PinnedBuffer(torch.empty(8, dtype=torch.uint8))
    queue = D2HQueue(LateLink())
    kept = queue.copy(torch.ones(2), buffer)
    other = queue.copy(torch.zeros(2), buffer)
    assert other.elements.tolist() == [0, 0]
    assert kept.elements.tolist() == [1, 1]
    at = kept.elements.data_ptr()
    del kept
    assert queue.copy(torch.ones(2), buffer).elements.data_ptr() == at


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_gradient_may_have_another_dtype_than_its_parameter(dtype: torch.dtype) -> None:
    buffer = PinnedBuffer(torch.empty(8, dtype=torch.uint8))
    queue = D2HQueue(LateLink())
    copied = queue.copy(torch.ones(2, dtype=dtype), buffer).elements
    assert (copied.dtype, copied.tolist()) == (dtype, [1, 1])


def test_the_device_has_its_memory_back_when_a_gradient_is_down() -> None:
    queue = D2HQueue(LateLink())
    gradient = torch.ones(2)
    alive = weakref.ref(gradient)
    copied = queue.copy(gradient, PinnedBuffer(torch.empty(8, dtype=torch.uint8)))
    del gradient
    assert alive() is not None
    assert copied.elements.tolist() == [1, 1]
    queue.poll()
    assert alive() is None


def test_memory_that_gradients_pass_through_is_taken_again_when_nobody_uses_it() -> None:
    pool = PinnedBufferPool(PlainLink())
    like = torch.ones(8, dtype=torch.bfloat16)
    first, second = pool.allocate(like), pool.allocate(like)
    address = first.data_ptr()
    assert second.data_ptr() != address
    part = first[2:]  # a view of a part alone does not keep it
    del first, part
    assert pool.allocate(like.view(2, 4)).data_ptr() == address
    assert pool.allocate(torch.ones(8)).shape == (8,)
    assert sum(block.nbytes for block in pool._blocks) == 2 * 16 + 32


def _sharded(values: torch.Tensor) -> DTensor:
    mesh = DeviceMesh("cpu", [0])
    return nn.Parameter(DTensor.from_local(values, mesh, [Shard(0)]))


@torch.no_grad()
def _taken_down(seed: int) -> tuple[list[float], list[float], int, bool]:
    """Let two micro-batches' gradients be copied by a link whose copies are late."""
    parameter = _sharded(torch.zeros(4, dtype=torch.bfloat16))
    link = LateLink(seed)
    offload = GradientOffload([parameter], link)
    (hook,) = parameter._post_accumulate_grad_hooks.values()
    mesh, placements = parameter.device_mesh, parameter.placements
    first = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16)
    parameter.grad = DTensor.from_local(first, mesh, placements)
    hook(parameter)
    local = parameter.grad.to_local()
    stands_in = isinstance(local, HostGradient)
    once = local.elements.tolist()
    local.accumulate(torch.full((4,), 2.0**-9, dtype=torch.bfloat16))  # lost in a sum of bf16
    del offload
    return once, local.elements.tolist(), link.bytes_down, stands_in


@pytest.mark.parametrize("seed", range(3))
def test_a_late_gradient_is_waited_for_and_summed_in_fp32(ranks: Pool, seed: int) -> None:
    ((once, twice, moved, stands_in),) = ranks(1).run(_taken_down, seed)
    assert stands_in
    assert once == [1, 2, 3, 4]
    assert twice == [x + 2.0**-9 for x in once]
    assert moved == 2 * 8  # two bytes per element, of each


def _settled() -> list[bool]:
    """Tell whether the memory was freed: with the offload, and before."""
    settled: list[bool] = []

    class Noting(LateLink):
        def synchronize(self) -> None:
            settled.append(True)
            super().synchronize()

    offload = GradientOffload([_sharded(torch.zeros(4))], Noting())
    gc.collect()
    before = bool(settled)
    del offload
    gc.collect()
    return [before, bool(settled)]


def test_gradients_fall_into_memory_that_is_pinned_as_long_as_they_may(ranks: Pool) -> None:
    assert ranks(1).run(_settled) == [[False, True]]


def _thawed() -> list[bool]:
    """Watch a parameter that is frozen at first."""
    parameter = _sharded(torch.zeros(2))
    parameter.requires_grad = False
    offload = GradientOffload([parameter])
    before = bool(parameter._post_accumulate_grad_hooks)
    parameter.requires_grad = True
    offload.register_unfrozen()
    return [before, bool(parameter._post_accumulate_grad_hooks)]


def test_what_is_unfrozen_later_is_hooked_then(ranks: Pool) -> None:
    assert ranks(1).run(_thawed) == [[False, True]]


def _hooked() -> str:
    """Register a hook behind the sharding: the next forward says that it is not called."""
    parameter = _sharded(torch.zeros(2))
    offload = GradientOffload([parameter])
    offload.register_unfrozen()
    parameter.register_hook(lambda gradient: gradient)
    with pytest.raises(OptionError) as raised:
        offload.register_unfrozen()
    return str(raised.value)


def test_a_hook_of_the_user_s_is_refused_by_the_next_forward(ranks: Pool) -> None:
    assert "has a hook (register_hook)" in ranks(1).run(_hooked)[0]


def test_buffers_with_values_move() -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("empty", torch.empty(1, device="meta"))
    move_buffers(module, torch.device("cpu"))
    assert module.running_mean.is_cpu
    assert module.empty.is_meta


@pytest.mark.parametrize("world", [1, 2])
def test_a_sum_on_the_device_is_wide(ranks: Pool, world: int) -> None:
    for (total,) in ranks(world).run(ranks_sharded.widened, 4):
        assert total.dtype == torch.float32
        assert torch.equal(total, torch.full((1, ranks_sharded.WIDTH), 259.0))


# --- the tensor in .grad ---


def host_gradient(values: torch.Tensor) -> HostGradient:
    return HostGradient(torch.empty_like(values), HostSum(values))


def test_operations_act_on_the_elements_in_host_memory() -> None:
    gradient = host_gradient(torch.tensor([3.0, 4.0]))
    norm = torch.linalg.vector_norm(gradient)
    assert (type(norm), norm.item()) == (torch.Tensor, 5.0)
    assert gradient.mul_(0.5) is gradient
    assert gradient.elements.tolist() == [1.5, 2.0]


def test_an_alias_shares_its_elements() -> None:
    gradient = host_gradient(torch.ones(2))
    gradient.detach().zero_()
    assert gradient.elements.eq(0.0).all()


@pytest.mark.parametrize("on_host", [False, True])
def test_a_later_micro_batch_makes_the_sum_fp32(on_host: bool) -> None:  # noqa: FBT001
    first = torch.tensor([256.0], dtype=torch.bfloat16)
    later = torch.ones(1, dtype=torch.bfloat16)
    gradient = host_gradient(first)
    for _ in range(3):
        gradient.accumulate(host_gradient(later) if on_host else later)
    assert gradient.elements.dtype == torch.float32
    assert gradient.elements.tolist() == [259.0]  # a bf16 sum would stay 256
