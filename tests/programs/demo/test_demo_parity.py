import math
from dataclasses import replace

import pytest
from demo_results import CRASH, MIB, judged, make_results, spoil

from demo.parity import Circumstances, Cost


def said(*results: object, **given: object) -> str:
    return " ".join(judged(*results, **given).sentences())


def test_equal_rows_are_called_equal() -> None:
    parity = judged(make_results())
    assert parity.is_equal
    assert parity.differing == ()
    assert "All 7 tensorstow configurations are bitwise equal" in said(make_results())


def test_one_bit_of_one_loss_is_enough() -> None:
    results = make_results()
    losses = results[3].losses
    changed = (*losses[:-1], math.nextafter(losses[-1], math.inf))
    spoiled = spoil(results, "half", losses=changed)
    assert judged(spoiled).differing == ("half",)
    assert "NOT bitwise equal to everything in RAM: tensorstow, 50% disk" in said(spoiled)


@pytest.mark.parametrize("key", ["full", "forward", "backward", "stow"])
def test_other_parameters_are_enough(key: str) -> None:
    assert judged(spoil(make_results(), key, checksum="0" * 64)).differing == (key,)


def test_not_a_number_is_not_hidden() -> None:
    results = make_results()
    losses = (math.nan, *results[2].losses[1:])
    assert judged(spoil(results, "naive", losses=losses)).differing == ("naive",)


def test_the_distance_to_torch_is_the_largest() -> None:
    results = make_results()
    losses = tuple(x + d for x, d in zip(results[0].losses, (0.0, -0.25, 0.125), strict=True))
    parity = judged(spoil(results, "torch", losses=losses))
    assert parity.is_equal
    assert math.isclose(parity.loss_distance, 0.25, rel_tol=1e-12)


def test_why_the_hash_of_torch_is_another_is_said() -> None:
    words = said(make_results())
    assert "one step of each differs by at most 2.5 ULP" in words
    assert "in 25% of the weights" in words
    assert "fuses multiplications with additions" in words


def test_the_cost_is_one_sentence_with_measured_numbers() -> None:
    cost = Cost(903 * MIB, 949 * MIB, 4.43, 4.10, noise=0.05)
    assert str(cost) == (
        "With its states on disk the process holds 903 MiB less RAM than with torch's AdamW, 95% of"
        " what the states take, for a step that is 8% longer (4.43 s instead of 4.1 s)."
    )
    assert "is 20% shorter" in str(replace(cost, seconds=3.28))
    assert str(replace(cost, less_bytes=-5 * MIB, seconds=None)) == (
        "With its states on disk the process holds 5 MiB more RAM than with torch's AdamW."
    )


def test_a_difference_within_the_noise_is_none() -> None:
    cost = Cost(903 * MIB, 949 * MIB, 4.43, 4.10, noise=0.49)
    assert str(cost).endswith("for a step that takes about as long (4.43 s and 4.1 s).")
    assert "52% longer" in str(replace(cost, seconds=1.52, torch_seconds=1.0))
    assert "8% longer" in str(replace(cost, noise=None))
    assert "about as much RAM as with torch's AdamW, for a" in str(replace(cost, less_bytes=400))
    assert "about as much RAM as with" in str(replace(cost, less_bytes=-400))


def test_the_cost_is_that_of_states_on_disk_against_torch() -> None:
    cost = judged(make_results()).cost
    assert (cost.less_bytes, cost.state_bytes) == (30 * MIB, MIB)
    assert cost.seconds == pytest.approx(3.5)


@pytest.mark.parametrize(
    ("spread", "others", "is_busy"),
    [(0.05, 0.05, False), (0.49, 0.01, False), (0.05, 0.11, True), (None, None, False)],
)
def test_a_busy_machine_is_said(spread: float, others: float, *, is_busy: bool) -> None:
    found = Circumstances(spread, others, at_once=True)
    assert found.is_busy == is_busy
    assert ("THE MACHINE WAS BUSY" in str(found)) == is_busy
    assert ("differences of times mean nothing" in str(found)) == (is_busy or spread == 0.49)
    assert "one behind the other" not in str(found)
    assert "one after another" in str(replace(found, at_once=False))


def test_the_spread_is_the_largest_of_all_rows() -> None:
    results = make_results(4)
    slow = results[2].spans[-1]
    spans = tuple(
        replace(s, stop=s.stop + 0.35) if (s.name, s.step) == ("opt.step", 3) else s
        for s in results[2].spans
    )
    assert slow in spans
    found = judged(spoil(results, "naive", spans=spans)).circumstances
    assert found.spread == pytest.approx(0.35 / 3.675)
    assert judged(results).circumstances.spread == pytest.approx(0.0)


def test_a_run_that_resumes_to_other_bits_is_no_success() -> None:
    parity = judged(make_results(), replace(CRASH, checksum="4" * 64))
    assert not parity.is_equal
    assert "44444444, NOT 33333333" in " ".join(parity.sentences())
    assert "33333333, that of the run which was never killed" in said(make_results())
