"""Models without memory, and whole values inside of a context."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ranks.driven import Drive, closing, engine_by, engine_of, gathered
from ranks.pool import Ranks
from ranks.stowed import loss_of
from tensorstow.base.errors import OptionError
from tensorstow.deepspeed import utils, zero
from tensorstow.deepspeed.config import values
from tensorstow.deepspeed.config.settings import OffloadParam, Zero


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_one_rank_s_change_is_everybody_s(
    ranks: "Ranks",
    world: int,
    bf16: bool,  # noqa: FBT001
    device: str,
) -> None:
    drive = Drive(Zero(3, offload_param=OffloadParam(device)), bf16=bf16)
    for before, behind in ranks(world).run(gathered, drive):
        changed = {
            i: b.mean().item()
            for i, (a, b) in enumerate(zip(before, behind, strict=True))
            if not torch.allclose(a, b, atol=0.1)
        }
        assert changed == pytest.approx({4: 3.0, 5: 5.0, 6: 5.0}, abs=0.1)


class Norm(nn.Module):
    """A module without reset_parameters, whose constructor sets its values."""

    def __init__(self) -> None:
        """Make it."""
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0))
        self.register_buffer("positions", torch.arange(4.0))
        assert self.positions.sum().item() == 6.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale."""
        return x * self.weight + self.positions


@pytest.mark.parametrize("world", [1, 2])
def test_modules_made_inside_keep_the_values_of_the_first_rank(ranks: "Ranks", world: int) -> None:
    ranks(world).run(made_inside)


def made_inside() -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    with zero.Init(config_dict_or_path={"train_batch_size": 1}):
        model = nn.Sequential(Norm(), nn.Linear(4, 3), nn.Linear(3, 3))
        nn.init.constant_(model[1].weight, 1.0 if rank == 0 else 7.0)
    with zero.GatheredParameters(model[1].weight):
        assert model[1].weight.eq(1.0).all()
    with zero.GatheredParameters(model[1].bias, modifier_rank=last):
        if rank == last:
            model[1].bias.data.fill_(5.0)
    engine = engine_by(model, zero_optimization={"stage": 3})
    assert engine.module[0].positions.tolist() == [0.0, 1.0, 2.0, 3.0]
    values = {0: (2.0, None), 1: (1.0, 5.0)}
    for layer, (weight, bias) in values.items():
        with zero.GatheredParameters(list(engine.module[layer].parameters())):
            assert engine.module[layer].weight.eq(weight).all()
            assert bias is None or engine.module[layer].bias.eq(bias).all()
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.destroy()


def test_what_a_layer_lacks_is_left_out() -> None:
    layer = nn.Linear(2, 2, bias=False)
    with zero.GatheredParameters([layer.weight, layer.bias], modifier_rank=0) as given:
        assert given == [layer.weight, None]


def test_modules_are_made_in_the_dtype_that_was_asked() -> None:
    with zero.Init(dtype=torch.bfloat16):
        assert nn.Linear(3, 2).weight.dtype == torch.bfloat16
    assert nn.Linear(3, 2).weight.dtype == torch.float32
    model = nn.Linear(3, 2)
    zero.Init(module=model, dtype=torch.bfloat16)
    assert model.weight.dtype == torch.bfloat16


def test_keywords_are_idle_or_unknown(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="tensorstow"):
        zero.Init(remote_device="cpu", pin_memory=True)
    assert "pin_memory, remote_device have no effect here" in caplog.text
    with pytest.raises(OptionError, match=r"pin_memry=, which .* Did you mean pin_memory="):
        zero.Init(pin_memry=True)


def test_a_disabled_context_yields_what_it_was_given() -> None:
    weight = nn.Linear(3, 2).weight
    with zero.GatheredParameters(weight, enabled=False) as found:
        assert found[0] is weight


@pytest.mark.parametrize("world", [1, 2])
def test_a_variable_from_before_initialize_is_current_and_written_inside(
    ranks: "Ranks", world: int
) -> None:
    ranks(world).run(captured_before)


def captured_before() -> None:
    model = nn.Linear(3, 4)
    weight = model.weight
    with zero.GatheredParameters(weight, modifier_rank=0):
        nn.init.constant_(weight, float(dist.get_rank()))
    assert weight.eq(0.0).all()
    engine = engine_by(model, zero_optimization={"stage": 3})
    with zero.GatheredParameters(weight, modifier_rank=dist.get_world_size() - 1):
        weight.data.add_(float(1 + dist.get_rank()))
    written = float(dist.get_world_size())
    assert utils.safe_get_full_fp32_param(engine.module.weight).eq(written).all()
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()
    if dist.get_world_size() > 1:  # a rank alone keeps the parameter itself
        assert not torch.equal(weight, utils.safe_get_full_fp32_param(weight))
    with zero.GatheredParameters(weight):
        assert torch.equal(weight, utils.safe_get_full_fp32_param(weight))
        assert not weight.eq(written).any()
    engine.destroy()


def test_what_a_forward_unsharded_is_read_and_not_written(ranks: "Ranks") -> None:
    ranks(2).run(between_forward_and_backward)


def between_forward_and_backward() -> None:
    with closing(engine_of(Drive(Zero(2)).settings(2), "backward")) as engine:
        loss = loss_of(engine, dist.get_rank(), 0, 0)
        weight = engine.module.embedding.weight
        assert not isinstance(weight, DTensor)
        with zero.GatheredParameters(weight):
            assert engine.module.embedding.weight is weight
        with pytest.raises(OptionError, match="between a forward and its backward"):
            zero.GatheredParameters(weight, modifier_rank=0).__enter__()
        engine.backward(loss)
        engine.step()


def test_an_engine_is_whole_and_generates_inside_and_trains_behind(ranks: "Ranks") -> None:
    ranks(2).run(generated_inside)


def generated_inside() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    engine = engine_by(model, zero_optimization={"stage": 3})
    x = torch.ones(1, 3)
    for _ in range(2):
        with zero.unwrap_model_for_generation(engine) as found, torch.no_grad():
            assert found is engine
            weights = [p.detach().clone() for p in engine.module.parameters()]
            generated = engine(x)
        assert [w.shape for w in weights] == [(4, 3), (4,), (2, 4), (2,)]
        hidden = nn.functional.linear(x, *weights[:2])
        assert torch.equal(generated, nn.functional.linear(hidden, *weights[2:]))
        assert all(isinstance(p, DTensor) for p in engine.module.parameters())
        engine.backward(engine(x).sum())
        engine.step()
        assert engine.was_step_applied()
    assert not torch.equal(weights[0], utils.safe_get_full_fp32_param(engine.module[0].weight))
    engine.destroy()


def dropped(writes: str) -> list[str]:
    """Write without a modifier_rank on the last rank; return what is said: logged, then raised."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    for checks in (False, True):
        section = {"stage": 3, "enable_sanity_checks": checks}
        engine = engine_by(nn.Linear(3, 4), zero_optimization=section)
        weight = engine.module.weight
        before = utils.safe_get_full_fp32_param(weight)
        values.say_once.cache_clear()
        values.logger.addHandler(handler)
        try:
            with zero.GatheredParameters(weight), zero.GatheredParameters(weight):
                weight.sum()
            with zero.GatheredParameters(engine.module.parameters()), torch.no_grad():
                if dist.get_rank() == dist.get_world_size() - 1:
                    (weight if writes == "counted" else weight.data)[-1] = 7.0
        except OptionError as error:
            said.append(f"raised: {error}")
        finally:
            values.logger.removeHandler(handler)
        assert torch.equal(utils.safe_get_full_fp32_param(weight), before)
        engine.destroy()
    return said


@pytest.mark.parametrize("writes", ["counted", "to .data"])
def test_a_write_that_is_dropped_is_said_or_refused(ranks: "Ranks", writes: str) -> None:
    first, last = ranks(2).run(dropped, writes)
    (refused,) = first
    logged, raised = last
    assert "1 parameter (written to weight) changed inside of GatheredParameters" in logged
    assert raised == f"raised: {logged}"
    assert refused == raised.replace("to weight", "by another rank")


def kept_below_stage_3() -> None:
    engine = engine_by(nn.Linear(3, 4), zero_optimization={"stage": 2}, bf16={"enabled": True})
    weight = engine.module.weight
    for value, modifier in ((2.0, None), (3.0, dist.get_world_size() - 1)):
        engine.backward(engine(torch.ones(1, 3, dtype=torch.bfloat16)).sum())
        engine.step()
        with zero.GatheredParameters(weight, modifier_rank=modifier):
            if modifier in {None, dist.get_rank()}:
                weight.data.fill_(value)
        assert weight.eq(value).all()
    engine.backward(engine(torch.ones(1, 3, dtype=torch.bfloat16)).sum())
    engine.step()
    assert utils.safe_get_full_fp32_param(weight).sub(3.0).abs().max() < 0.01
    engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_plain_parameters_keep_what_is_written(ranks: "Ranks", world: int) -> None:
    ranks(world).run(kept_below_stage_3)


def test_the_master_of_a_weight_that_was_written_is_the_weight() -> None:
    engine = engine_by(nn.Linear(3, 4), fp16={"enabled": True, "loss_scale": 1.0})
    weight = engine.module.weight
    before = utils.safe_get_full_fp32_param(weight)
    assert not torch.equal(before, weight.float())
    with zero.GatheredParameters(weight, modifier_rank=0):
        weight.data[0] = 3.0
    assert torch.equal(utils.safe_get_full_fp32_param(weight), weight.float())
    engine.destroy()


def of_a_scalar() -> None:
    model = nn.Linear(3, 4)
    model.scale = nn.Parameter(torch.tensor(0.5))
    engine = engine_by(model, zero_optimization={"stage": 3}, bf16={"enabled": True})
    scale = engine.module.scale
    with zero.GatheredParameters(engine.module.parameters(), modifier_rank=0):
        scale.data.fill_(2.0 + dist.get_rank())
    assert utils.safe_get_full_fp32_param(scale).item() == 2.0
    engine.backward((engine(torch.ones(1, 3, dtype=torch.bfloat16)).sum() * scale).float())
    assert utils.safe_get_full_grad(scale).shape == ()
    utils.safe_set_full_grad(scale, torch.tensor(0.25))
    engine.step()
    assert utils.safe_get_full_fp32_param(scale).item() == pytest.approx(1.999)
    assert utils.safe_get_full_optimizer_state(scale, "exp_avg").item() == pytest.approx(0.025)
    utils.safe_set_full_fp32_param(scale, torch.tensor(4.0))
    assert utils.safe_get_full_fp32_param(scale).item() == 4.0
    engine.destroy()


def test_scalars_are_read_and_written_under_stage_3(ranks: "Ranks") -> None:
    ranks(2).run(of_a_scalar)
