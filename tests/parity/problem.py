"""The small model that every case trains, its data, and what a run leaves behind."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from parity.axes import DTYPES, Recipe

STEPS = 6
RESUME_AFTER = 2
"""A resumed run saves after this step (from 0) and goes on elsewhere."""
INF_STEP = 3
"""With a GradScaler, a gradient is infinite here."""
VOCABULARY, WIDTH = 97, 48
LR = 0.01
LR_FACTORS = (1.0, 0.5, 2.0, 0.25, 1.0, 0.5, 1.0)
"""Powers of two, so that a float32 lr tensor goes through them without rounding."""
LEAST_NORM = 0.05
"""Below every step's gradient norm: clipping always clips."""
DIV_SCALE = 3.0
INITIAL_SCALE = 1024.0

BFLOAT_OF_MIXED = frozenset({"embedding", "wide", "narrow", "sometimes", "frozen"})
SECOND_GROUP = ("bias", "gain", "sometimes")

ON_HOST_OF_SOME = frozenset({"wide", "narrow", "sometimes", "frozen"})
"""The blocks' matrices; chunks hold parameters of both sides then."""

Make = Callable[..., nn.Parameter]


class Mix(nn.Module):
    """A block that is left out in some micro-batches."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.sometimes = make("sometimes", WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + linear(x, self.sometimes)


class Mlp(nn.Module):
    """A block of several parameters, its own and its children's, that reads all of them itself."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.wide = make("wide", 2 * WIDTH, WIDTH)
        self.bias = make("bias", 2 * WIDTH)
        self.inner = nn.ParameterDict({"narrow": make("narrow", WIDTH, 2 * WIDTH)})
        self.gain = make("gain", 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = linear(x, self.wide)
        hidden = torch.tanh(hidden + self.bias.to(x.dtype))
        return x + linear(hidden, self.inner["narrow"]) * self.gain.to(x.dtype)


class Model(nn.Module):
    """Tied, frozen, sometimes unused, one-element and zero-sized parameters, some in blocks."""

    def __init__(self, recipe: Recipe, seed: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def parameter(name: str, *shape: int) -> nn.Parameter:
            values = torch.randn(*shape, generator=generator) * WIDTH**-0.5
            return nn.Parameter(values.to(device_of(recipe, name), dtype_of(recipe, name)))

        self.embedding = parameter("embedding", VOCABULARY, WIDTH)  # and the head
        self.empty = parameter("empty", 0, 7)
        self.frozen = parameter("frozen", WIDTH, WIDTH)
        self.frozen.requires_grad = False
        self.blocks = nn.ModuleList([Mix(parameter), Mlp(parameter)])
        # There from the beginning: to copy them in a step is to wait for the device.
        self.tokens = {
            (step, micro): tokens_of(step, micro).to(self.embedding.device)
            for step in range(STEPS)
            for micro in range(recipe.accumulation)
        }

    def loss(self, step: int, micro: int) -> Tensor:
        """Return the loss of one micro-batch; ``sometimes`` has no part in some."""
        loss: Tensor = self(step, micro)
        return loss

    def forward(self, step: int, micro: int) -> Tensor:
        if (step, micro) not in self.tokens:  # a training that is longer
            self.tokens[step, micro] = tokens_of(step, micro).to(self.embedding.device)
        tokens = self.tokens[step, micro]
        x = functional.embedding(tokens[:, :-1], self.embedding)
        x = x + linear(x, self.frozen)
        if step % 3 != 1 and micro != 1:
            x = self.blocks[0](x)
        x = self.blocks[1](x)
        logits = functional.linear(x, self.embedding).float()
        loss: Tensor = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return loss + self.empty.float().sum()


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product, made where the weight is."""
    return functional.linear(x.to(weight.device), weight).to(x.device)


def tokens_of(step: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + micro)
    return torch.randint(VOCABULARY, (2, 9), generator=generator)


def device_of(recipe: Recipe, name: str) -> torch.device:
    if recipe.on_device == "none" or (recipe.on_device == "some" and name in ON_HOST_OF_SOME):
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


def dtype_of(recipe: Recipe, name: str) -> torch.dtype:
    if recipe.dtype == "mixed":
        return torch.bfloat16 if name in BFLOAT_OF_MIXED else torch.float32
    return DTYPES[recipe.dtype]


def group_names(model: nn.Module) -> tuple[list[str], list[str]]:
    """Return the parameters of the first group and of the second."""
    names = [name for name, _ in model.named_parameters()]
    second = [n for n in names if n.rpartition(".")[2] in SECOND_GROUP]
    return [n for n in names if n not in second], second


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Keep torch's threads, which spin, off the cores that the kernels use; reductions stay put."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class Outcome:
    """Everything that must be equal to the bit."""

    weights: list[dict[str, Tensor]] = field(default_factory=list)
    """After each step; empty where nobody looked, for looking waits."""
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """After the last."""
    losses: list[Tensor] = field(default_factory=list)

    def note(self, model: nn.Module | None, loss: Tensor) -> None:
        named = () if model is None else model.named_parameters()
        self.weights.append({n: p.detach().clone() for n, p in named})
        self.losses.append(loss)


def differences(got: Outcome, want: Outcome) -> list[str]:
    """Name all that is not bitwise equal, the earliest first."""
    found = []
    if len(got.weights) != len(want.weights):
        found.append(f"{len(got.weights)} steps were taken instead of {len(want.weights)}")
    for step, (ours, theirs) in enumerate(zip(got.weights, want.weights, strict=False)):
        found += [f"step {step}: weight {n}" for n in (unequal(ours, theirs) if ours else ())]
    ours, theirs = ([loss.item() for loss in outcome.losses] for outcome in (got, want))
    found += [f"step {s}: loss" for s in range(STEPS) if ours[s : s + 1] != theirs[s : s + 1]]
    found += [f"states of {n} exist or not" for n in got.states.keys() ^ want.states.keys()]
    for name in got.states.keys() & want.states.keys():
        found += [f"{name}.{key}" for key in unequal(got.states[name], want.states[name])]
    return found


def unequal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[str]:
    names = sorted(ours.keys() | theirs.keys())
    return [n for n in names if n not in ours or n not in theirs or not same(ours[n], theirs[n])]


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bits."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return torch.equal(a.cpu().contiguous().view(bits), b.cpu().contiguous().view(bits))
