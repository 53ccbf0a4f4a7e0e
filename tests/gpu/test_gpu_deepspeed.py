"""DeepSpeed's door on an accelerator: shares of updates, and updates beside the next forward."""

from typing import Any

import pytest
import torch
from torch import nn

import tensorstow.deepspeed as deepspeed
from compare import all_equal
from tensorstow.activations.offload import ActivationOffload, offload_activations
from tensorstow.base.errors import OptionError
from tensorstow.deepspeed import checkpointing

WIDTH, BLOCKS = 64, 4


def train(
    device: torch.device, *, overflows: bool = False, clip: float = 0.1, **offload: object
) -> tuple[list[torch.Tensor], Any]:
    """Train some steps, with clipping or without; return the weights and the engine."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    engine, optimizer, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": clip,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", **offload}},
        },
    )
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, WIDTH, generator=generator).to(device)
        engine.backward(engine(x).square().mean())
        engine.step()
        if overflows:
            engine.backward(engine(x * float("inf")).square().mean())
            engine.step()
    engine.get_global_grad_norm()
    optimizer.wait()
    return [value.cpu().clone() for value in engine.module.state_dict().values()], optimizer


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_a_step_that_overflows_is_skipped_wherever_its_gradients_are(
    ratio: float, device: torch.device
) -> None:
    want, plain = train(device, ratio=ratio)
    got, skipping = train(device, overflows=True, ratio=ratio)
    assert skipping._runtime.commits.step == 2 * plain._runtime.commits.step
    assert all_equal(got, want)
    plain.close()
    skipping.close()


@pytest.mark.parametrize("ratio", [0.0, 0.5])
@pytest.mark.parametrize(("clip", "overlap"), [(0.1, "none"), (0.0, "backward")])
def test_a_share_of_updates_runs_on_the_device(
    ratio: float, clip: float, overlap: str, device: torch.device
) -> None:
    want, whole = train(device, clip=clip)
    assert whole.offload_policy.overlap == "forward"
    got, shared = train(device, clip=clip, ratio=ratio)
    assert shared.offload_policy.overlap == overlap
    assert (whole._memory().device_bytes > 0, shared._memory().device_bytes > 0) == (False, True)
    assert all_equal(got, want)
    whole.close()
    shared.close()


@pytest.mark.parametrize("in_cpu", [False, True])
def test_inputs_of_what_is_recomputed_leave_the_device(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, *, in_cpu: bool
) -> None:
    made = []

    def watched(model: nn.Module, *, to: str) -> ActivationOffload:
        made.append(offload_activations(model, to=to))
        return made[-1]

    monkeypatch.setattr(checkpointing, "offload_activations", watched)
    x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(0)).to(device)
    weight = torch.eye(WIDTH, device=device).mul_(0.5).requires_grad_()

    def block(rows: torch.Tensor) -> torch.Tensor:
        return (rows @ weight).relu()

    block(block(x)).sum().backward()
    want, weight.grad = weight.grad, None
    checkpointing.configure(checkpoint_in_cpu=in_cpu)
    try:
        checkpointing.checkpoint(block, checkpointing.checkpoint(block, x)).sum().backward()
    finally:
        checkpointing.reset()
    assert torch.equal(weight.grad, want)
    assert [each._pool.nbytes().bytes_down for each in made] == [2 * x.nbytes] * in_cpu


def test_classes_other_than_adam_are_refused_before_anything_is_placed() -> None:
    model = nn.Linear(3, 4)
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    with pytest.raises(OptionError, match="SGD was given with an accelerator"):
        deepspeed.initialize(model=model, config={"train_batch_size": 1, "optimizer": sgd})
    assert {p.device.type for p in model.parameters()} == {"cpu"}
