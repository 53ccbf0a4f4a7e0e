"""Units of stage 3 that stay unsharded from forward to backward."""

import pytest
from torch.distributed.tensor import DTensor

from ranks.pool import Pool
from ranks.stowed import loss_of, twins
from tensorstow import Plan
from tensorstow.base.errors import OptionError

KEPT = ("blocks.1", "blocks.2")


def trained(plan: Plan) -> list[str]:
    """Train beside plain FSDP2; return the units that are whole behind a forward."""
    both = twins(plan)
    both.train(range(3))
    loss_of(both.stowed, both.rank, 3)
    whole = {
        name.rpartition(".")[0].rpartition(".")[0]
        for name, parameter in both.stowed.named_parameters()
        if not isinstance(parameter, DTensor) and name.startswith("blocks.")
    }
    both.close()
    return sorted({".".join(name.split(".")[:2]) for name in whole})


def test_they_are_whole_behind_a_forward_and_train_alike(ranks: Pool) -> None:
    for found in ranks(2).run(trained, Plan(unsharded=KEPT)):
        assert found == list(KEPT)
    for found in ranks(2).run(trained, Plan()):
        assert found == []


def test_a_plan_carries_them(ranks: Pool) -> None:
    del ranks
    plan = Plan(unsharded=["a"])
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    "given",
    [{"stage": 2}, {"parameters": "disk"}, {"parameter_units": {"blocks.1": "disk"}}],
    ids=str,
)
def test_where_they_mean_nothing_they_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(OptionError, match="it is for units of stage 3 that are in memory"):
        Plan(unsharded=KEPT, **given)  # type: ignore[arg-type]
