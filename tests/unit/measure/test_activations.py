"""A deep model's activations are those of its layers, and what is traced is what is held."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from models import FeedForward
from tensorstow import AdamW, Plan, stow
from tensorstow.base.activation_placement import ActivationPlacement
from tensorstow.base.errors import OptionError
from tensorstow.fsdp.placed_activations import PlacedActivations
from tensorstow.fsdp.traced_activations import Peaks, loss_of
from tensorstow.fsdp.traced_placement import TracedPlacement
from tensorstow.measure import activations
from tensorstow.measure.activations import between, trace, trace_function
from tensorstow.measure.models import NamedModel, build_model, from_config

pytest.importorskip("transformers")
TIED = {"model_type": "gpt2", "n_embd": 64, "n_head": 2, "vocab_size": 512}
UNTIED = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "vocab_size": 512,
}


def _model(given: dict[str, object], layers: int, folder: Path) -> NamedModel:
    file = folder / "config.json"
    file.write_text(json.dumps({**given, "num_hidden_layers": layers}), encoding="utf-8")
    return build_model(str(file))


@pytest.mark.parametrize(
    ("given", "batch", "sequence", "placed"),
    [
        (TIED, 1, 8, "keep"),
        (UNTIED, 2, 64, "keep"),
        (TIED, 2, 64, "recompute"),
        (UNTIED, 2, 128, "disk"),
    ],
)
def test_layers_add_up(
    given: dict[str, object],
    batch: int,
    sequence: int,
    placed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, traced = _model(given, 6, tmp_path), TracedPlacement(ActivationPlacement(placed))
    added = trace(model, batch, sequence, traced)
    monkeypatch.setattr(activations, "_WHOLE_LAYERS", 6)
    assert added == trace(model, batch, sequence, traced)


def test_more_tokens_hold_more_and_a_matrix_takes_six_operations(tmp_path: Path) -> None:
    model = _model(UNTIED, 2, tmp_path)
    one, four = trace(model, 1, 64), trace(model, 4, 64)
    assert four.peak_bytes > 3 * one.peak_bytes
    # Of each token, for each weight of a product; attention adds to that.
    weights = sum(
        p.numel() for n, p in model.module.named_parameters() if p.ndim == 2 and "embed" not in n
    )
    assert 6 * weights * 64 <= one.operations <= 1.3 * 6 * weights * 64


def test_dropout_draws_a_number_for_each_element(tmp_path: Path) -> None:
    model = _model(TIED, 2, tmp_path)
    found = trace(model, 4, 128)
    rows, width = 4 * 128, 64
    # behind the embeddings, attention's weights, attention and the feed-forward part
    assert found.random_elements == rows * width + 2 * (2 * rows * width + 2 * rows * 128)


def test_what_is_held_is_what_torchs_memory_tracker_says(tmp_path: Path) -> None:
    config = _model(TIED, 2, tmp_path).config
    with FakeTensorMode():
        module = from_config(config, "cpu").train()
        ids = torch.zeros((2, 16), dtype=torch.long)
        tracker, seen = MemTracker(), Peaks(module)
        tracker.track_external(module)

        def held() -> int:
            return int(tracker.get_tracker_snapshot()[torch.device("cpu")]["Total"])

        with tracker, seen:
            assert seen.held == held() > 0
            loss = module(input_ids=ids, labels=ids, use_cache=False).loss
            after_forward = seen.held
            assert after_forward == held()
            loss.backward()
            assert seen.held == held() != after_forward


class Squares(nn.Module):
    """Whose activations are known: one squared, of which the input is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1 << 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).square()


def squares() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Squares(), (torch.ones(64, 1 << 10),)


def needs_a_value() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    class Reads(Squares):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum().item() > 0 else x

    return Reads(), (torch.ones(64, 1 << 10),)


def test_a_function_s_own_inputs_are_traced() -> None:
    one = 64 * (1 << 10) * 4
    whole = trace_function(build_model(f"{__name__}:squares"))
    assert 3 * one <= whole.peak_bytes <= 6 * one + 64  # three powers are saved, and gradients
    half = trace_function(build_model(f"{__name__}:squares", torch.bfloat16))
    assert half.peak_bytes < whole.peak_bytes
    with pytest.raises(OptionError, match=r"needs_a_value cannot be traced.* module alone"):
        trace_function(build_model(f"{__name__}:needs_a_value"))


def feed_forwards() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return nn.Sequential(*(FeedForward(128) for _ in range(4))), (torch.ones(96, 128),)


@pytest.mark.parametrize("part", [2, 3, 5])
def test_small_and_large_activations_between_two_batches_are_bounds(
    part: int, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    sizes = {"n_layer": 2, "n_embd": 256, "n_head": 4, "vocab_size": 512}
    file.write_text(json.dumps({"model_type": "gpt2", **sizes}), encoding="utf-8")
    model = build_model(str(file))
    one, whole, found = (trace(model, batch, 512) for batch in (1, 8, part))
    bound = between(one, whole, 8, part).held()
    held = found.held()
    assert bound.small >= held.small
    assert bound.large >= held.large
    assert bound.large_beside_gradients >= held.large_beside_gradients


def many_rows() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    module, _ = feed_forwards()
    return module, (torch.ones(1 << 14, 128),)


def test_small_activations_are_counted_apart_from_large_ones() -> None:
    small = trace_function(build_model(f"{__name__}:feed_forwards")).held()
    assert small.small == small.peak > 0
    assert small.large == 0
    large = trace_function(build_model(f"{__name__}:many_rows")).held()
    assert large.small < large.peak / 100
    assert large.large == pytest.approx(large.peak, rel=1e-2)
    assert large.large_beside_gradients <= large.beside_gradients


@pytest.mark.parametrize("placed", ["keep", "recompute", "disk"])
def test_what_is_traced_is_what_a_run_holds_and_moves(placed: str) -> None:
    model = build_model(f"{__name__}:feed_forwards")
    # The run's tensors that are back from disk are seen too, as those of an accelerator would be.
    traced = trace_function(model, TracedPlacement(ActivationPlacement(placed)))
    plan = Plan(activations=placed, activation_ram_budget=0 if placed == "disk" else None)
    module, (x,) = feed_forwards()
    module, optimizer = stow(module, partial(AdamW, lr=1e-4), plan=plan)
    with optimizer:
        parts = [p for p in optimizer._parts() if isinstance(p, PlacedActivations)]
        seen = Peaks(module)
        with seen:
            loss_of(module(x)).backward()
        found = seen.seen
        # The pool lets go of a storage when it is asked for the next.
        late = 4 * 96 * 128 if placed == "disk" else 0
        assert found.peak_bytes == traced.peak_bytes + late
        assert found.held().beside_gradients == traced.held().beside_gradients + late
        assert found.operations == traced.operations
        if placed == "disk":
            (part,) = parts
            assert part.moved()["activations written"] == traced.saved_bytes
            assert traced.largest_saved_bytes == 4 * 96 * 4 * 128
