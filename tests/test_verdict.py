import math

from demo_results import make_results, spoil
from tensorstow.cli.demo.verdict import judge


def test_equal_rows_are_called_equal() -> None:
    verdict = judge(make_results())
    assert verdict.is_equal
    assert verdict.differing == ()
    assert "All 4 tensorstow rows are bitwise equal" in str(verdict)


def test_one_bit_of_one_loss_is_enough() -> None:
    results = make_results()
    losses = results[3].losses
    changed = (*losses[:-1], math.nextafter(losses[-1], math.inf))
    verdict = judge(spoil(results, "half", losses=changed))
    assert verdict.differing == ("half",)
    assert "NOT bitwise equal to everything in RAM: tensorstow, 50% disk" in str(verdict)


def test_other_parameters_are_enough() -> None:
    assert judge(spoil(make_results(), "full", checksum="0" * 64)).differing == ("full",)


def test_not_a_number_is_not_hidden() -> None:
    results = make_results()
    losses = (math.nan, *results[2].losses[1:])
    assert judge(spoil(results, "naive", losses=losses)).differing == ("naive",)


def test_the_distance_to_torch_is_the_largest() -> None:
    results = make_results()
    losses = tuple(x + d for x, d in zip(results[0].losses, (0.0, -0.25, 0.125), strict=True))
    verdict = judge(spoil(results, "torch", losses=losses))
    assert verdict.is_equal
    assert math.isclose(verdict.loss_distance, 0.25, rel_tol=1e-12)
