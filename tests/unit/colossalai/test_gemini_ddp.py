"""Gemini without a booster: what ColossalAI's own tests of it assert (tests/test_zero/test_gemini).

Their reference is apex, with a tolerance. Here it is the same arithmetic without Gemini: fp32
weights that forward casts, and HybridAdam; the bits are the same.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from compare import all_equal
from ranks.gemini import whole_on_one
from ranks.pool import Ranks
from tensorstow.base.errors import OptionError
from tensorstow.colossalai.adam import HybridAdam
from tensorstow.colossalai.zero import GeminiAdamOptimizer, GeminiDDP, GeminiOptimizer

WIDTH = 8


class Chain(nn.Module):
    """Blocks, and a head; a buffer."""

    def __init__(self, recomputes: bool = False) -> None:  # noqa: FBT001, FBT002
        """Make the layers; ``recomputes``: blocks run again in backward."""
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((), 0.5))
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        for block in self.blocks:
            run = torch.nn.Sequential(block, nn.Tanh())
            x = checkpoint(run, x, use_reentrant=False) if self.recomputes else run(x)
        logits: torch.Tensor = self.head(x) * self.scale
        return logits


class OfTheRoot(nn.Module):
    """A parameter that no layer has."""

    def __init__(self) -> None:
        """Make it between two layers."""
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use all three."""
        out: torch.Tensor = self.out(nn.functional.linear(self.into(x), self.weight))
        return out


class SharedLayer(nn.Module):
    """A layer whose weight another one uses too, and that runs twice."""

    def __init__(self) -> None:
        """Make the layer, and a bias for the other."""
        super().__init__()
        self.layer, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use the layer, its weight, and the layer again."""
        x = nn.functional.linear(self.layer(x), self.layer.weight, self.bias)
        out: torch.Tensor = self.out(self.layer(x))
        return out


class Listed(nn.Module):
    """Layers that a list has in the order of their calls, some twice."""

    def __init__(self) -> None:
        """Make three layers and the list."""
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.calls = [self.first, self.second, self.first, self.second, self.last]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call them."""
        for layer in self.calls:
            x = layer(x)
        return x


Made = Callable[[], nn.Module]


def made_of(make: Made) -> nn.Module:
    torch.manual_seed(42)
    return make()


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return out.float().square().mean()


class Reference:
    """The same training without Gemini: forward casts fp32 weights, HybridAdam updates them."""

    def __init__(self, make: Made, dtype: torch.dtype, scale: float = 1.0) -> None:
        """Make the model."""
        self.model, self.dtype, self.scale = made_of(make), dtype, scale
        self.optimizer = HybridAdam(self.model.parameters(), lr=1e-2)

    def out(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the model returns in the dtype."""
        cast = {n: p.to(self.dtype) for n, p in self.model.named_parameters()}
        out: torch.Tensor = functional_call(self.model, cast, (x.to(self.dtype),))
        return out

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients of the scaled loss."""
        (loss * self.scale).backward()

    def step(self, max_norm: float = 0.0) -> None:
        """Update by gradients without the scale."""
        factor = self.scale
        if max_norm:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            norm = float(nn.utils.get_total_norm(gradients)) / self.scale
            factor = self.scale / min(1.0, max_norm / (norm + 1e-6))
        self.optimizer.step(div_scale=factor)
        self.optimizer.zero_grad()


def gemini_of(make: Made, scale: float = 1.0, max_norm: float = 0.0, **given: Any) -> Any:  # noqa: ANN401
    model = GeminiDDP(made_of(make), **given)
    optimizer = HybridAdam(model.parameters(), lr=1e-2)
    return model, GeminiOptimizer(optimizer, model, initial_scale=scale, max_norm=max_norm)


def assert_same_weights(model: GeminiDDP, plain: nn.Module) -> None:
    ours, theirs = model.state_dict(only_rank_0=False), plain.state_dict()
    assert list(ours) == list(theirs)
    assert all_equal(list(ours.values()), list(theirs.values()))


POLICIES: list[dict[str, Any]] = [
    {"shard_param_frac": 0.3, "offload_param_frac": 0.3, "offload_optim_frac": 0.3},
    {"placement_policy": "auto"},
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_steps_are_those_without_gemini(policy: dict[str, Any], dtype: torch.dtype) -> None:
    """test_optim.py, exam_model_step."""
    scale = 128.0 if dtype == torch.float16 else 1.0
    plain = Reference(Chain, dtype, scale)
    model, optimizer = gemini_of(Chain, scale=scale, mixed_precision=dtype, **policy)
    for step in range(3):
        out, expected = model(batch(step)), plain.out(batch(step))
        assert torch.equal(out, expected)
        optimizer.backward(loss_of(out))
        plain.backward(loss_of(expected))
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
        assert_same_weights(model, plain.model)


def test_weights_in_half_precision_alone() -> None:
    """test_optim.py with master_weights=False: the model is cast for good."""
    half = {"mixed_precision": torch.bfloat16, "master_weights": False}
    model, optimizer = gemini_of(Chain, **half)
    cast, same = gemini_of(lambda: Chain().bfloat16(), **half)
    for step in range(2):
        for m, o in ((model, optimizer), (cast, same)):
            o.backward(loss_of(m(batch(step))))
            o.step()
            o.zero_grad()
    ours, theirs = (m.state_dict(only_rank_0=False) for m in (model, cast))
    weights = [name for name in ours if name != "scale"]  # buffers are not cast
    assert {ours[name].dtype for name in weights} == {torch.bfloat16}
    assert all(torch.equal(ours[name], theirs[name]) for name in weights)


@pytest.mark.parametrize("make", [OfTheRoot, SharedLayer, Listed])
def test_models_of_odd_shapes(make: Made) -> None:
    """test_optim.py, exam_tiny_example."""
    plain = Reference(make, torch.float16, 2.0)
    model, optimizer = gemini_of(make, scale=2.0, mixed_precision=torch.float16)
    for step in range(3):
        optimizer.backward(loss_of(model(batch(step))))
        plain.backward(loss_of(plain.out(batch(step))))
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
    for ours, theirs in zip(model.state_dict().values(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("recomputes", [False, True])
def test_two_backwards_a_step_and_a_clip(recomputes: bool) -> None:  # noqa: FBT001
    """test_grad_accum.py; test_grad_clip.py."""

    def make() -> nn.Module:
        return Chain(recomputes)

    plain = Reference(make, torch.float32)
    model, optimizer = gemini_of(
        make, max_norm=0.01, enable_gradient_accumulation=True, mixed_precision=torch.float32
    )
    for step in range(2):
        for part in range(2):
            optimizer.backward(loss_of(model(batch(2 * step + part))) / 2)
            plain.backward(loss_of(plain.out(batch(2 * step + part))) / 2)
        optimizer.step()
        optimizer.zero_grad()
        plain.step(max_norm=0.01)
    assert optimizer.get_grad_norm() > 0.01
    ours = model.state_dict(only_rank_0=False)
    for name, theirs in plain.model.state_dict().items():
        torch.testing.assert_close(ours[name], theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shard", [0.0, 0.5, 1.0])
def test_evaluation_between_steps(shard: float) -> None:
    """test_inference.py."""
    plain = Reference(Chain, torch.float16, 128.0)
    model, optimizer = gemini_of(
        Chain, scale=128.0, shard_param_frac=shard, mixed_precision=torch.float16
    )
    model.eval()
    for step in range(3):
        if step == 1:
            with torch.no_grad():
                assert torch.equal(model(batch(9)), plain.out(batch(9)))
        optimizer.backward(loss_of(model(batch(step))))
        plain.backward(loss_of(plain.out(batch(step))))
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
    assert_same_weights(model, plain.model)


@pytest.mark.parametrize("is_placed", [False, True])
def test_weights_as_a_whole_and_in_parts(is_placed: bool) -> None:  # noqa: FBT001
    """test_zeroddp_state_dict.py."""
    model, plain = GeminiDDP(made_of(Chain)), made_of(Chain)
    if is_placed:
        GeminiAdamOptimizer(model, lr=1e-2, initial_scale=8)
    assert_same_weights(model, plain)
    other = {name: values + 1 for name, values in plain.state_dict().items()}
    model.load_state_dict(other)
    ours = model.state_dict(only_rank_0=False)
    assert all_equal(list(ours.values()), list(other.values()))
    total = sum(v.nbytes for v in ours.values()) / 2**20
    parts = list(model.state_dict_shard(prefix="m.", max_shard_size=total / 3, only_rank_0=False))
    assert len(parts) >= 3
    assert sum(size for _, size in parts) == pytest.approx(total)
    assert [name for part, _ in parts for name in part] == [f"m.{name}" for name in ours]
    assert all(size <= total / 3 or len(part) == 1 for part, size in parts)
    with pytest.raises(OptionError, match="keep_vars=True was given"):
        model.state_dict(keep_vars=True)


@pytest.mark.parametrize("optim", [0.0, 0.5, 1.0])
def test_states_are_loaded_as_they_were_saved(optim: float) -> None:
    """test_zerooptim_state_dict.py."""
    model, optimizer = gemini_of(
        Chain, scale=32.0, offload_optim_frac=optim, mixed_precision=torch.float16
    )
    optimizer.backward(loss_of(model(batch(0))))
    optimizer.step()
    saved = optimizer.state_dict()
    kept = {i: {n: v.clone() for n, v in entry.items()} for i, entry in saved["state"].items()}
    assert len(kept) == len(list(model.parameters()))
    optimizer.load_state_dict(saved)
    again = optimizer.state_dict()
    for index, entry in kept.items():
        assert entry.keys() == again["state"][index].keys()
        assert all(torch.equal(v, again["state"][index][n]) for n, v in entry.items())
    assert again["scaler"] == saved["scaler"]


def test_whole_states_of_two_ranks(ranks: Callable[[int], Ranks]) -> None:
    """Rank 0 has them, or both where that is asked."""
    first, second = ranks(2).run(whole_on_one)
    (plain,) = ranks(1).run(whole_on_one)
    assert first["weights"] == plain["weights"]
    assert first["states"] == plain["states"]
    assert set(second["weights"]) == {(0,)}
    assert not any(second["states"])
    assert len(plain["everywhere"]) == 3 * len(plain["weights"])
    for found in (first, second, plain):
        assert all_equal(found["everywhere"], plain["everywhere"])
        assert found["is_loaded"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mixed_precision": torch.float64}, r"mixed_precision=torch\.float64 was given"),
        ({"placement_policy": "gpu"}, "placement_policy='gpu' was given"),
    ],
    ids=str,
)
def test_what_a_model_is_refused_with(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        GeminiDDP(Chain(), **given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_norm": -1.0}, r"max_norm=-1\.0 was given"),
        ({"hysteresis": -1}, "hysteresis=-1 was given"),
    ],
    ids=str,
)
def test_what_an_optimizer_is_refused_with(given: dict[str, Any], said: str) -> None:
    model = GeminiDDP(Chain())
    optimizer = HybridAdam(model.parameters())
    with pytest.raises(OptionError, match=said):
        GeminiOptimizer(optimizer, model, **given)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    optimizer.close()


def test_calls_in_the_wrong_order() -> None:
    model = GeminiDDP(Chain())
    with pytest.raises(OptionError, match="was given a Chain"):
        GeminiOptimizer(HybridAdam(model.parameters()), model.module)
    with pytest.raises(OptionError, match=r"set_params_to_ignore\(\) was called"):
        model.set_params_to_ignore([])
    with torch.no_grad():
        assert model(batch(0)).dtype == torch.float32  # placed without an optimizer
    with pytest.raises(OptionError, match="before the model's first forward"):
        GeminiAdamOptimizer(model)
