"""What was chosen is seen without logging, once, and an application that logs decides by itself."""

import pytest

import children

SHOW = """
import logging
{}
from tensorstow.base import notices
notices.show("a line")
root = logging.getLogger()
assert logging.getLogger("tensorstow").handlers == []
assert root.level == logging.WARNING or {!r}
"""
STOW = """
import tensorstow, torch
tensorstow.stow(torch.nn.Linear(4, 4), {})[1]
"""


def written(script: str) -> str:
    done = children.run("-c", script)
    assert not done.stdout
    return done.stderr


@pytest.mark.parametrize("before", ["", "logging.getLogger('tensorstow').setLevel('INFO')"])
def test_a_line_is_written_where_nothing_is_set_up(before: str) -> None:
    assert written(SHOW.format(before, before)) == "tensorstow: a line\n"


@pytest.mark.parametrize(
    "before",
    [
        "logging.getLogger('tensorstow').setLevel('WARNING')",
        "logging.basicConfig(level='INFO')",
        "logging.getLogger().addHandler(logging.NullHandler())",
        "logging.disable('INFO')",
        "logging.lastResort = None",
        "logging.getLogger('tensorstow').disabled = True",
    ],
)
def test_an_application_silences_it_by_its_logging(before: str) -> None:
    assert written(SHOW.format(before, before)) == ""


@pytest.mark.parametrize("optimizer", ["tensorstow.AdamW", "None"])
def test_the_plan_that_was_chosen_is_one_line(optimizer: str) -> None:
    (line,) = written(STOW.format(optimizer)).splitlines()
    assert line.startswith('tensorstow: plan="auto"')
    quiet = "import logging; logging.getLogger('tensorstow').setLevel('WARNING')"
    assert written(quiet + STOW.format(optimizer)) == ""
    table = written("import logging; logging.basicConfig(level='INFO')" + STOW.format(optimizer))
    assert "tensorstow: plan=" not in table
    assert table.count('plan="auto"') == 1


DOORS = {
    "the DeepSpeed configuration means parameters=": """
import tensorstow.deepspeed as deepspeed, torch
config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)
engine.destroy()
""",
    "placing 1 units is completed in ": """
import tensorstow.colossalai as colossalai, torch
from tensorstow.colossalai.booster import Booster
from tensorstow.colossalai.booster.plugin import GeminiPlugin
from tensorstow.colossalai.nn.optimizer import HybridAdam
colossalai.launch_from_torch()
model = torch.nn.Linear(4, 4)
model, optimizer, *_ = Booster(plugin=GeminiPlugin(precision="fp32")).boost(
    model, HybridAdam(model.parameters()))
""",
}


@pytest.mark.parametrize("begins", DOORS)
def test_the_doors_say_what_they_placed(begins: str) -> None:
    lines = [
        line for line in written(DOORS[begins]).splitlines() if "placing" in line or "means" in line
    ]
    assert len(lines) == 1
    assert lines[0].startswith(f"tensorstow: {begins}")
