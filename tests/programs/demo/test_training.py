import pytest
import torch

from demo.configurations import CONFIGURATIONS, FULL, SMALL
from demo.training import (
    Clock,
    Training,
    config_of,
    make_model,
    make_optimizer,
)
from tensorstow.cli.digests import checksum
from tensorstow.colossalai import HybridAdam

transformers = pytest.importorskip("transformers")


def test_the_full_model_is_the_default_one() -> None:
    ours, default = config_of(FULL).to_dict(), transformers.GPT2Config().to_dict()
    assert ours == default


def test_the_number_of_parameters_is_the_formula() -> None:
    assert sum(p.numel() for p in make_model(SMALL).parameters()) == SMALL.parameters
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config_of(FULL))
    assert sum(p.numel() for p in model.parameters()) == FULL.parameters


def test_hyper_parameters_are_those_of_torch() -> None:
    model = make_model(SMALL)
    theirs, ours = (make_optimizer(row, SMALL, model, None) for row in CONFIGURATIONS[:2])
    assert isinstance(theirs, torch.optim.AdamW)
    assert isinstance(ours, HybridAdam)
    for name in ("lr", "betas", "eps", "weight_decay", "amsgrad", "decoupled_weight_decay"):
        assert ours.defaults[name] == theirs.defaults[name]


def test_training_is_the_same_every_time_and_told_as_it_goes() -> None:
    outcomes = []
    for turns in (1, 2):
        said: list[tuple[int, str]] = []
        model = make_model(SMALL)
        torch.rand(7)  # as an optimizer might: dropout must not depend on it
        clock = Clock(lambda step, part, said=said: said.append((step, part)))
        training = Training(
            model, make_optimizer(CONFIGURATIONS[1], SMALL, model, None), SMALL, clock
        )
        for _ in range(turns):
            training.take(2 // turns)
        outcomes.append((training.losses, checksum(model)))
        assert said == [(s.step, s.name) for s in clock.spans]
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0][0]) == 2


def test_another_process_goes_on_where_chance_stood() -> None:
    model, other = make_model(SMALL), make_model(SMALL)
    whole = Training(
        model, make_optimizer(CONFIGURATIONS[0], SMALL, model, None), SMALL, Clock(_nothing)
    )
    whole.take(1)
    kept = whole.kept()
    other.load_state_dict(model.state_dict())
    whole.take(1)
    optimizer = make_optimizer(CONFIGURATIONS[0], SMALL, other, None)
    rest = Training(other, optimizer, SMALL, Clock(_nothing))
    rest.go_on(1, kept)
    assert rest.make_gradients(1) == whole.losses[1]


def _nothing(_step: int, _part: str) -> None:
    pass


def test_the_checksum_sees_one_bit() -> None:
    model = make_model(SMALL)
    before = checksum(model)
    with torch.no_grad():
        last = list(model.parameters())[-1].view(torch.int32)
        last[0] ^= 1
    assert checksum(model) != before
