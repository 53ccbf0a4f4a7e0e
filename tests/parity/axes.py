"""The axes of the parity matrix: what is computed (Recipe) and on which way (Route)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import torch

from parity.cover import Row, Value

RECIPE_AXES: Mapping[str, tuple[Value, ...]] = {
    "optimizer": (
        *("AdamW", "Adam", "HybridAdam-adamw", "HybridAdam-l2"),
        *("CPUAdam-adamw", "CPUAdam-l2", "CPUAdam-uncorrected"),
    ),
    "dtype": ("fp32", "bf16", "fp16", "mixed"),
    "grad_dtype": ("own", "fp32", "bf16", "fp16"),
    "amsgrad": (False, True),
    "ema": (0.0, 0.7),
    "maximize": (False, True),
    "weight_decay": (0.0, 0.1),
    "accumulation": (1, 3),
    "clipping": ("none", "torch", "ours"),
    "scaling": ("none", "GradScaler", "div_scale"),
    "lr": ("fixed", "scheduled", "tensor", "tensor-scheduled"),
}
ROUTE_AXES: Mapping[str, tuple[Value, ...]] = {
    "placement": ("ram", "split", "disk"),
    "chunk": (1024, 4096, 1 << 19),
    "ring": ("default", "least"),
    "schedule": ("pipelined", "naive"),
    "backend": ("uring", "threads"),
    "isa": ("scalar", "avx2", "avx512"),
    "threads": (1, 2, 3),
    "overlap": ("none", "forward", "backward", "speculative"),
    "nan_until_published": (False, True),
    "final": ("counted", "context"),
    "format": ("default", "fp32", "split"),
    "durability": ("none", "commit"),
    "share": ("none", "some"),
    "resume": ("none", "model-first", "model-last", "rewind", "torch", "commit", "crash"),
}
AXES = {**RECIPE_AXES, **ROUTE_AXES}

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Recipe:
    """What decides the result. ``mixed`` has bf16 matrices and fp32 vectors."""

    optimizer: str = "AdamW"
    dtype: str = "fp32"
    grad_dtype: str = "own"
    amsgrad: bool = False
    ema: float = 0.0
    """The decay of the average; 0: none is kept."""
    maximize: bool = False
    weight_decay: float = 0.1
    accumulation: int = 1
    clipping: str = "none"
    scaling: str = "none"
    lr: str = "fixed"
    on_device: str = "none"
    """Which parameters are on the accelerator, "all", "some": of the matrix in tests/gpu alone."""

    @property
    def decoupled(self) -> bool:
        return self.optimizer == "AdamW" or self.optimizer.endswith("-adamw")

    @property
    def bias_correction(self) -> bool:
        return self.optimizer != "CPUAdam-uncorrected"


@dataclass(frozen=True)
class Route:
    """What must not decide anything."""

    placement: str = "disk"
    chunk: int = 4096
    ring: str = "default"
    schedule: str = "pipelined"
    backend: str = "uring"
    isa: str = "avx512"
    threads: int = 2
    overlap: str = "none"
    nan_until_published: bool = False
    """Weights are NaN until they are published."""
    final: str = "counted"
    """How updates beside backward know the last micro-batch."""
    format: str = "default"
    durability: str = "none"
    share: str = "none"
    """States that the RAM budget keeps in memory beyond the ring."""
    resume: str = "none"
    update_on: str | float = "host"
    """Where updates run: not an axis of the matrix, for "device" wants an accelerator."""

    @property
    def fraction(self) -> float:
        return {"ram": 0.0, "split": 0.37, "disk": 1.0}[self.placement]


@dataclass(frozen=True)
class Case:
    recipe: Recipe
    route: Route

    def __str__(self) -> str:
        """Return the id of a test: what differs from the default."""
        parts = [
            f"{f.name}={getattr(part, f.name)}"
            for part in (self.recipe, self.route)
            for f in fields(part)
            if getattr(part, f.name) != f.default
        ]
        return ",".join(parts) or "default"

    def row(self) -> Row:
        return {f.name: getattr(p, f.name) for p in (self.recipe, self.route) for f in fields(p)}


def case_of(row: Mapping[str, Value]) -> Case:
    """Return the case of a row; axes that it leaves out have their defaults."""
    recipe, route = Recipe(), Route()
    for name, value in row.items():
        object.__setattr__(recipe if hasattr(recipe, name) else route, name, value)
    return Case(recipe, route)


def allowed(row: Mapping[str, Value]) -> bool:
    """Return whether a (partial) row can be asked for at all."""
    return not any(_objections(row))


def _objections(row: Mapping[str, Value]) -> Iterator[bool]:
    upstream = str(row.get("optimizer", "")).split("-")[0] in {"HybridAdam", "CPUAdam"}
    if "optimizer" in row:
        # ram_budget= is a keyword of tensorstow's own classes, div_scale of ColossalAI's.
        yield upstream and row.get("ring") == "least"
        yield not upstream and row.get("scaling") == "div_scale"
        yield upstream and bool(row.get("ema"))
    yield row.get("ring") == "least" and row.get("scaling") == "div_scale"
    yield bool(row.get("ema")) and row.get("scaling") == "div_scale"
    # The average is of masters that are whole.
    split = row.get("format") == "split" and row.get("dtype", "fp32") in {"bf16", "mixed"}
    yield bool(row.get("ema")) and split
    yield row.get("placement") == "ram" and row.get("ring") == "least"
    yield from _objections_to_schedules(row, upstream=upstream)
    yield from _objections_to_commits(row, upstream=upstream)
    # torch.optim casts states to the parameter's dtype and knows no master.
    yield row.get("resume") == "torch" and row.get("dtype", "fp32") != "fp32"
    # GradScaler.unscale_ refuses fp16 gradients.
    halves = row.get("grad_dtype") == "fp16" or (
        row.get("dtype") == "fp16" and row.get("grad_dtype") == "own"
    )
    clips = row.get("clipping", "none") != "none"
    yield halves and clips and row.get("scaling") == "GradScaler"


def _objections_to_schedules(row: Mapping[str, Value], *, upstream: bool) -> Iterator[bool]:
    overlap = row.get("overlap", "backward" if row.get("final") == "context" else None)
    # The keywords are those of tensorstow's own classes.
    theirs = upstream or row.get("scaling") == "div_scale"
    yield theirs and overlap in {"forward", "backward", "speculative"}
    yield theirs and (row.get("nan_until_published") is True or row.get("final") == "context")
    yield theirs and row.get("format") in {"fp32", "split"}
    yield overlap == "none" and row.get("nan_until_published") is True
    # Only beside backward must the last micro-batch be known.
    yield row.get("final") == "context" and overlap not in {"backward", "speculative"}
    yield row.get("final") == "context" and row.get("accumulation") == 1
    # These look at gradients before they are used: refused by name, see test_backward.
    looks = row.get("clipping", "none") != "none" or row.get("scaling", "none") != "none"
    yield overlap == "backward" and looks
    # What is undone has a second copy on disk.
    yield overlap == "speculative" and row.get("placement") == "ram"


def _objections_to_commits(row: Mapping[str, Value], *, upstream: bool) -> Iterator[bool]:
    theirs = upstream or row.get("scaling") == "div_scale"
    from_store = row.get("resume") in {"commit", "crash"}
    yield theirs and (row.get("durability") == "commit" or from_store)
    yield theirs and row.get("share") == "some"
    yield from_store and row.get("durability") == "none"
    # With all states in RAM a budget buys nothing; "least" is a budget for the ring alone.
    yield row.get("share") == "some" and row.get("placement") == "ram"
    yield row.get("share") == "some" and row.get("ring") == "least"
    # A commit within step() cannot hold what the scaler's update() decides after it.
    yield row.get("resume") == "crash" and row.get("scaling", "none") != "none"
