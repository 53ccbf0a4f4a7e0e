import pytest

from tensorstow.colossalai.grad_scaler import DynamicGradScaler


def scales(scaler: DynamicGradScaler, steps: str) -> list[float]:
    """Return the scale after each step; "x" is one that overflowed."""
    found = []
    for step in steps:
        scaler.update(overflow=step == "x")
        found.append(scaler.scale)
    return found


# What colossalai.amp.naive_amp.grad_scaler.DynamicGradScaler (0.5.0) does, by its code.
@pytest.mark.parametrize(
    ("given", "steps", "after"),
    [
        ({"growth_interval": 2}, "....", [16, 32, 32, 64]),
        ({"growth_interval": 2, "max_scale": 32}, "....", [16, 32, 32, 32]),
        ({"hysteresis": 2}, "xx", [16, 8]),
        ({"hysteresis": 2}, "xxx", [16, 8, 4]),
        ({"hysteresis": 2}, "x.x", [16, 16, 8]),
        ({"hysteresis": 2, "growth_interval": 1}, "x.x", [16, 32, 32]),
        ({"hysteresis": 0}, "x", [8]),
        ({"hysteresis": 1, "backoff_factor": 0.25}, "xx", [4, 1]),
        ({"hysteresis": 1, "min_scale": 8}, "xxx", [8, 8, 8]),
        ({"growth_interval": 2, "growth_factor": 4}, ".x..", [16, 16, 16, 64]),
    ],
    ids=str,
)
def test_the_scale_after_each_step(given: dict[str, float], steps: str, after: list[float]) -> None:
    assert scales(DynamicGradScaler(16, **given), steps) == after  # type: ignore[arg-type]


def test_a_state_goes_on_where_it_was() -> None:
    first, second = (DynamicGradScaler(16, growth_interval=3) for _ in range(2))
    scales(first, "x..")
    second.load_state_dict(first.state_dict())
    assert scales(first, ".xx.") == scales(second, ".xx.")
