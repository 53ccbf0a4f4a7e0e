"""Training a model through DeepSpeed's engine, and the same through ``stow`` by hand."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import tensorstow
import tensorstow.deepspeed as deepspeed
from compare import all_equal
from ranks.stowed import loss_of, model_of
from ranks.twin import mesh_here, weights_of, whole
from tensorstow.base.errors import OptionError
from tensorstow.base.update_on import Overlap
from tensorstow.deepspeed import utils, zero
from tensorstow.deepspeed.config.settings import Batch, Settings, Zero
from tensorstow.deepspeed.plans import dtype_of, placement_keywords, plan_of
from tensorstow.deepspeed.runtime.engine import DeepSpeedEngine
from tensorstow.deepspeed.states import MasterWeights, states_of
from tensorstow.fsdp import full_tensors
from tensorstow.fsdp.full_tensors import resharded
from tensorstow.tensors.dtensor import part_of

STEPS = 3


@dataclass(frozen=True)
class Drive:
    """One way of training."""

    zero: Zero = field(default_factory=Zero)
    accumulation: int = 1
    clip: float = 0.0
    bf16: bool = False
    overlap: Overlap | None = None

    def __str__(self) -> str:
        """Name what differs from the default."""
        zero = self.zero
        places = f"{zero.offload_param.device}-{zero.offload_optimizer.device}"
        told = f"acc{self.accumulation}-clip{self.clip}-bf16{self.bf16}-{self.overlap}"
        return f"z{zero.stage}-{places}-{told}"

    def settings(self, world: int) -> Settings:
        """Return them for ``world`` ranks."""
        batch = Batch(2 * self.accumulation * world, 2, self.accumulation)
        return Settings(batch, zero=self.zero, gradient_clipping=self.clip, bf16=self.bf16)


@dataclass
class FixedScale:
    """A loss scale that notes what it is told."""

    scale: float = 1024.0
    told: list[bool] = field(default_factory=list)
    dynamic: bool = False

    def update(self, *, overflowed: bool) -> None:
        """Note it."""
        self.told.append(overflowed)

    def state_dict(self) -> dict[str, object]:
        """Return what ``load_state_dict`` takes."""
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on."""
        self.scale = state["scale"]


def placed(
    settings: Settings, overlap: Overlap | None = None, model: nn.Module | None = None
) -> tuple[nn.Module, tensorstow.AdamW]:
    """Place a model, or the tests' model, as the settings say."""
    model = model_of(torch.float32) if model is None else model
    masters = MasterWeights(model, dtype_of(settings))

    def make(named: object, **placement: object) -> tensorstow.AdamW:
        return tensorstow.AdamW(named, lr=1e-2, **placement_keywords(settings, placement))

    plan = plan_of(settings, device_is_host=True, overlap=overlap)
    model, optimizer = tensorstow.stow(model, make, plan=plan, mesh=mesh_here())
    masters.assign(model, optimizer)
    return model, optimizer


def engine_of(
    settings: Settings,
    overlap: Overlap | None = None,
    model: nn.Module | None = None,
    **more: object,
) -> DeepSpeedEngine:
    """Return an engine over a model, or the tests' model."""
    model, optimizer = placed(settings, overlap, model)
    return DeepSpeedEngine(model, optimizer, settings, **more)


def step(engine: DeepSpeedEngine, number: int, times: float = 1.0) -> None:
    """Take one step through the engine; the loss is multiplied by ``times``."""
    for micro in range(engine.gradient_accumulation_steps()):
        loss = loss_of(engine, dist.get_rank(), number, micro)
        engine.backward(loss * times)
        engine.step()


@contextmanager
def closing(engine: DeepSpeedEngine) -> Iterator[DeepSpeedEngine]:
    """End the engine's optimizer behind it."""
    try:
        yield engine
    finally:
        engine.destroy()


def driven(drive: Drive) -> list[torch.Tensor]:
    """Train through the engine."""
    with closing(engine_of(drive.settings(dist.get_world_size()))) as engine:
        for number in range(STEPS):
            step(engine, number)
        assert engine.global_steps == STEPS
        assert engine.micro_steps == STEPS * drive.accumulation
        return weights_of(engine.module)


def with_norms(drive: Drive, boundaries: bool = False) -> list[torch.Tensor]:  # noqa: FBT001, FBT002
    """Train through the engine; return weights, and the norm of each step's gradients.

    With ``boundaries`` steps have one micro-batch more, and less, than was configured.
    """
    engine = engine_of(drive.settings(dist.get_world_size()), drive.overlap)
    norms = []
    with closing(engine):
        for number in range(STEPS):
            micros = drive.accumulation + (number - 1 if boundaries else 0)
            for micro in range(micros):
                if boundaries:
                    engine.set_gradient_accumulation_boundary(micro == micros - 1)
                engine.backward(loss_of(engine, dist.get_rank(), number, micro))
                engine.step()
            assert engine.was_step_applied()
            norms.append(engine.get_global_grad_norm())
        assert engine.global_steps == STEPS
        return [*weights_of(engine.module), torch.tensor(norms, dtype=torch.float64)]


def by_hand(drive: Drive) -> list[torch.Tensor]:
    """Train as somebody does who has read no more than ``stow``: updates in ``step()``."""
    model, optimizer = placed(drive.settings(dist.get_world_size()), "none")
    for number in range(STEPS):
        for micro in range(drive.accumulation):
            loss = loss_of(model, dist.get_rank(), number, micro)
            (loss / drive.accumulation).backward()
        if drive.clip:
            optimizer.clip_grad_norm_(drive.clip)
        optimizer.step()
        optimizer.zero_grad()
    weights = weights_of(model)
    optimizer.close()
    return weights


def overflowing() -> tuple[list[bool], list[float], int]:
    """Return whether weights changed with each step, the second of which overflows on one rank."""
    world = dist.get_world_size()
    scale = FixedScale()
    engine = engine_of(Drive(Zero(stage=3)).settings(world), scale=scale)
    changed = []
    with closing(engine):
        before = weights_of(engine.module)
        for number, times in enumerate(
            (1.0, torch.inf if dist.get_rank() == world - 1 else 1.0, 1.0)
        ):
            step(engine, number, times)
            after = weights_of(engine.module)
            changed.append(not all_equal(before, after))
            before = after
    return changed, scale.told, engine.skipped_steps


def scaled(drive: Drive) -> list[torch.Tensor]:
    """Train through the engine with a loss scale that is a power of two."""
    settings = drive.settings(dist.get_world_size())
    with closing(engine_of(settings, scale=FixedScale())) as engine:
        for number in range(STEPS):
            step(engine, number)
        return weights_of(engine.module)


def saving_half_way(drive: Drive, folder: str) -> list[torch.Tensor]:
    """Save after one step and go on; return the weights of the end."""
    with closing(engine_of(drive.settings(dist.get_world_size()))) as engine:
        step(engine, 0)
        engine.save_checkpoint(folder, client_state={"epoch": 7})
        for number in range(1, STEPS):
            step(engine, number)
        return weights_of(engine.module)


def saved_with_masters(drive: Drive, folder: str) -> dict[str, torch.Tensor]:
    """Train a step with a frozen weight and save; return whole weights as fp32 has them."""
    settings = drive.settings(dist.get_world_size())
    model = model_of(torch.float32)
    model.blocks[0].requires_grad_(False)  # noqa: FBT003
    with closing(engine_of(settings, model=model)) as engine:
        step(engine, 0)
        with zero.GatheredParameters([engine.module.head.weight], modifier_rank=0):
            engine.module.head.weight.data[0] = 3.0  # its master is another until the next step
        engine.save_checkpoint(folder)
        engine.save_checkpoint(folder, "trained", save_latest=False, exclude_frozen_parameters=True)
        values = {}
        for name, parameter in resharded(engine.module).named_parameters():
            get = utils.safe_get_full_fp32_param
            trained = parameter.requires_grad
            values[name] = get(parameter) if trained else whole(parameter)
        return values


def written_before_a_step(folder: str) -> torch.Tensor:
    """Write to a weight whose master no step has used yet, save, and return the fp32 values."""
    settings = Drive(Zero(2), bf16=True).settings(1)
    model = model_of(torch.float32)
    values = model.head.weight.detach().clone()
    with closing(engine_of(settings, model=model)) as engine:
        with zero.GatheredParameters([engine.module.head.weight], modifier_rank=0):
            engine.module.head.weight.data[0] = values[0] = 3.0
        engine.save_checkpoint(folder)
    return values


def saving_by_rank(drive: Drive, folder: str) -> list[str]:
    """Save to no directory, by a tag and to a directory of each rank; return what is said."""
    said = []
    own = str(dist.get_rank())
    with closing(engine_of(drive.settings(dist.get_world_size()))) as engine:
        for place, tag in (("", own), (folder, f"rank{own}"), (f"{folder}/{own}", "same")):
            try:
                engine.save_checkpoint(place, tag)
            except OptionError as error:
                said.append(str(error))
        engine.save_checkpoint(f"{folder}/there")
        try:  # of a machine whose disk is not shared
            engine.load_checkpoint(f"{folder}/{('there', 'elsewhere')[dist.get_rank()]}")
        except OptionError as error:
            said.append(str(error))
    return said


def going_on(drive: Drive, folder: str) -> list[torch.Tensor]:
    """Load what was saved and go on; return the weights of the end."""
    with closing(engine_of(drive.settings(dist.get_world_size()))) as engine:
        found, state = engine.load_checkpoint(folder)
        assert found is not None
        assert found.endswith("global_step1")
        assert state == {"epoch": 7}
        assert (engine.global_steps, engine.micro_steps) == (1, drive.accumulation)
        for number in range(1, STEPS):
            step(engine, number)
        return weights_of(engine.module)


def loaded(drive: Drive, folder: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return the weights that were saved, and the first moments, joined over ranks or not."""
    with closing(engine_of(drive.settings(dist.get_world_size()))) as engine:
        engine.load_checkpoint(folder)
        states = states_of(engine.module, engine.optimizer)
        moments = {name: shard_values(entry["master"]) for name, entry in states.items()}
        return weights_of(engine.module), moments


def shard_values(state: torch.Tensor) -> torch.Tensor:
    """Return this rank's own."""
    return state.to_local() if isinstance(state, DTensor) else state


def read_and_set(drive: Drive) -> None:
    """Read whole values through deepspeed.utils, set others, and read them again."""
    with closing(engine_of(drive.settings(dist.get_world_size()), drive.overlap)) as engine:
        weight = next(engine.parameters())
        given = next(model_of(torch.float32).parameters()).detach()
        assert torch.equal(utils.safe_get_full_fp32_param(weight), given)
        assert utils.safe_get_full_grad(weight) is None
        engine.backward(loss_of(engine, dist.get_rank(), 0, 0))
        gradient = utils.safe_get_full_grad(weight)
        assert gradient.shape == weight.shape
        utils.safe_set_full_grad(weight, 2 * gradient)
        assert torch.equal(utils.safe_get_full_grad(weight), 2 * gradient)
        utils.safe_update_full_grad_vectorized([weight], lambda full, _: 2 * full)
        assert torch.equal(utils.safe_get_full_grad(weight), 4 * gradient)
        utils.safe_set_full_grad(weight, 2 * gradient)
        gradient = 2 * gradient
        engine.step()
        moment = utils.safe_get_full_optimizer_state(weight, "exp_avg")
        assert torch.allclose(moment, 0.1 * gradient, rtol=1e-5)
        master = utils.safe_get_full_fp32_param(weight)
        assert not torch.equal(master, given)
        assert torch.equal(master.to(weight.dtype), weights_of(engine.module)[0])
        new = torch.arange(weight.numel()).view(weight.shape) / 7.0
        utils.safe_set_full_fp32_param(weight, new)
        utils.safe_set_full_optimizer_state(weight, torch.zeros_like(new), "exp_avg")
        utils.safe_set_full_optimizer_state(weight, torch.ones_like(new), "exp_avg_sq")
        for _ in range(2):
            assert torch.equal(utils.safe_get_full_fp32_param(weight), new)
            engine.optimizer.param_groups[0]["lr"] = 0.0
            step(engine, 1)
        assert torch.equal(weights_of(engine.module)[0], new.to(weight.dtype))
        second = utils.safe_get_full_optimizer_state(weight, "exp_avg_sq")
        assert (second > 0.99).all()


def gathered(drive: Drive) -> list[list[torch.Tensor]]:
    """Change a weight inside of GatheredParameters on the last rank; return all weights."""
    world = dist.get_world_size()
    with closing(engine_of(drive.settings(world))) as engine:
        before = weights_of(engine.module)
        captured = dict(engine.module.named_parameters())
        inside = []
        for name, parameter in captured.items():
            with zero.GatheredParameters([parameter]):
                inside.append(parameter.data.clone())
                assert type(inside[-1]) is torch.Tensor
                assert engine.module.get_parameter(name) is parameter
                parameter.data.zero_()  # dropped, which is said
        assert all_equal(before, weights_of(engine.module))
        assert all_equal(before, inside)
        with zero.GatheredParameters(engine.parameters()):
            loss_of(engine, dist.get_rank(), 0, 0)  # the first forward
        last = dist.get_rank() == world - 1
        block = engine.module.blocks[1]
        with zero.GatheredParameters(block.parameters(), modifier_rank=world - 1):
            if last:
                block.load_state_dict(
                    {n: torch.full(p.shape, 5.0) for n, p in block.named_parameters()}
                )
        with zero.GatheredParameters(block.parameters()):
            assert all(p.eq(5.0).all() for p in block.parameters())
        weight = captured["blocks.1.up.weight"]
        with zero.GatheredParameters([weight, weight], modifier_rank=world - 1):
            if last:
                nn.init.constant_(weight, 3.0)
        step(engine, 0)
        with zero.GatheredParameters(weight):  # behind the update that is under way
            assert not weight.eq(3.0).any()
        step(engine, 1)
        return [before, weights_of(engine.module)]


def engine_by(model: nn.Module | None = None, micro: int = 1, **config: object) -> DeepSpeedEngine:
    """Return an engine of ``initialize`` over a model, or the tests' model; with Adam."""
    model = model_of(torch.float32) if model is None else model
    config = {"train_micro_batch_size_per_gpu": micro, "optimizer": {"type": "Adam"}, **config}
    return deepspeed.initialize(model=model, config=config)[0]


def initialized(config: dict[str, object], steps: int) -> tuple[list[torch.Tensor], float, int]:
    """Train through ``deepspeed.initialize``; return weights, the loss scale, and skipped steps."""
    engine, *_ = deepspeed.initialize(model=model_of(torch.float32), config=config)
    with closing(engine):
        for number in range(steps):
            step(engine, number)
        return weights_of(engine.module), engine.loss_scale, engine.skipped_steps


def exported(drive: Drive, folder: str) -> list[torch.Tensor]:
    """Write whole weights to one file, behind a forward that leaves them gathered."""
    with closing(engine_of(drive.settings(dist.get_world_size()))) as engine:
        with torch.no_grad():
            engine.eval()(torch.zeros(1, 2, dtype=torch.long))
        owned = {id(p) for group in engine.optimizer.param_groups for p in group["params"]}
        assert {id(p) for p in engine.parameters()} == owned
        engine.save_16bit_model(folder)
        engine.save_checkpoint(folder, "behind", save_latest=False)
        return weights_of(engine.module)


def boundary_by_hand(drive: Drive) -> list[bool]:
    """Take a step at boundaries that are said by hand, with gradients kept whole until the last."""
    drive_settings = drive.settings(dist.get_world_size())
    changed = []
    with closing(engine_of(drive_settings)) as engine:
        before = weights_of(engine.module)
        for micro in range(3):
            engine.set_gradient_accumulation_boundary(micro == 2)
            if micro < 2:
                with engine.no_sync():
                    engine.backward(loss_of(engine, dist.get_rank(), 0, micro))
                    first = next(engine.parameters())
                    if first.grad is not None:  # else FSDP2 has it
                        assert torch.equal(utils.safe_get_full_grad(first), first.grad)
            else:
                engine.backward(loss_of(engine, dist.get_rank(), 0, micro))
            engine.step()
            after = weights_of(engine.module)
            changed.append(not all_equal(before, after))
        assert engine.global_steps == 1
        assert engine.micro_steps == 3
    return changed


def with_boundaries_of_its_own(stage: int) -> None:
    """End steps in each way that is not counting calls of step(), and compare with that."""
    settings = Drive(Zero(stage=stage), accumulation=2).settings(dist.get_world_size())
    found = {way: _after_steps(settings, way) for way in ("counted", "by hand", "alone")}
    for taken in found.values():
        assert all_equal(taken[0], found["counted"][0])
    assert all_equal(found["by hand"][1], found["alone"][1])
    unmanaged = replace(settings, managed_accumulation=False)
    for way, told in (("coalesced", settings), ("unmanaged", unmanaged)):
        for got, want in zip(_after_steps(told, way), found["by hand"], strict=True):
            # Stage 1 reduces the sum of micro-batches, and these ways each of them.
            assert all(torch.allclose(*pair) for pair in zip(got, want, strict=True))
            assert stage == 1 or all_equal(got, want)


def _after_steps(settings: Settings, way: str) -> list[list[torch.Tensor]]:
    """Return the weights behind a step of 2 micro-batches, and behind one of 3 if not counted."""
    rank, taken, seen = dist.get_rank(), [], 0
    with closing(engine_of(settings)) as engine:
        for number, count in enumerate((2,) if way == "counted" else (2, 3)):
            together = way == "coalesced"
            with engine.coalesce_grad_reduction() if together else nullcontext():
                for micro in range(count):
                    if settings.managed_accumulation and way != "counted":
                        engine.set_gradient_accumulation_boundary(micro == count - 1)
                    if way == "alone" and rank == 0 and settings.zero.stage < 3:
                        loss_of(engine, rank, 9, 9)  # a forward that goes nowhere
                    engine.backward(loss_of(engine, rank, number, micro))
                    if way == "counted":
                        engine.step()
            if way != "counted":
                engine.step()
            seen += count
            assert engine.was_step_applied()
            taken.append(weights_of(engine.module))
        if way in {"counted", "unmanaged"}:
            assert engine.global_samples == seen * 2 * dist.get_world_size()
    return taken


def summed(stage: int) -> None:
    """Take gradients that are summed over ranks, by the engine and without it."""
    norms: dict[tuple[bool, bool], float] = {}
    for sums in (False, True):
        settings = Drive(Zero(stage=stage), accumulation=2).settings(dist.get_world_size())
        for direct in (False, True):
            summing = replace(settings, gradient_allreduce_op="sum" if sums else "mean")
            with closing(engine_of(summing)) as engine:
                for micro in range(2):
                    loss = loss_of(engine, dist.get_rank(), 0, micro)
                    loss.backward() if direct else engine.backward(loss)
                    engine.step()
                norms[sums, direct] = engine.get_global_grad_norm()
    assert norms[True, False] == norms[True, True]
    assert norms[False, False] == norms[False, True]
    assert norms[True, True] == dist.get_world_size() * norms[False, True]


def sharded_and_full(stage: int) -> None:
    """Write whole values to odd shards and read them back."""
    with closing(engine_of(Drive(Zero(stage=stage)).settings(dist.get_world_size()))) as engine:
        for parameter in engine.parameters():
            whole = torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape)
            full_tensors.copy_from_full(parameter, whole)
            assert torch.equal(full_tensors.full_copy(parameter), whole)
            own = part_of(whole, parameter, "The value")
            assert torch.equal(full_tensors.to_local(parameter).detach(), own)
            assert torch.equal(full_tensors.full_tensor(own.clone(), parameter), whole)
