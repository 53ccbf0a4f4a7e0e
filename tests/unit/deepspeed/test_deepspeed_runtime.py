"""What users import from inside upstream is where they look for it."""

from tensorstow.deepspeed import runtime, zero
from tensorstow.deepspeed.runtime.zero import stage3, stage_1_and_2


def test_estimators_are_in_the_modules_of_their_stages() -> None:
    for module in (stage3, stage_1_and_2):
        for name in module.__all__:
            assert getattr(module, name) is getattr(zero, name)
    assert len(stage3.__all__) == len(stage_1_and_2.__all__) + 1 == 3


def test_modules_are_reached_by_attributes() -> None:
    assert runtime.zero.stage3 is stage3
    assert runtime.lr_schedules.WarmupLR.__name__ == "WarmupLR"
