"""What `make soak` runs with the kernels of other processors is derived from the tests' sources."""

from pathlib import Path

import pytest

from parity.processors import ALSO, EXEMPT, compares_bits, files_of_equal_bits
from tree import ROOT, TESTS


def test_whoever_compares_bits_is_run_or_is_exempt() -> None:
    run = set(files_of_equal_bits())
    assert run >= {
        "tests/properties/test_gemini_parity.py",
        "tests/properties/test_stow.py",
        "tests/unit/activations/test_recompute.py",
        "tests/unit/checkpoint/test_snapshot_reference.py",
        "tests/unit/colossalai/test_checkpoint_io.py",
        "tests/unit/deepspeed/test_deepspeed_evaluation.py",
        "tests/unit/fsdp/test_stow_clipping.py",
        "tests/unit/integrations/test_torchtitan.py",
    }
    assert "tests/unit/base/test_launch.py" not in run
    direct = [p for p in TESTS.rglob("test_*.py") if "assert torch.equal(" in p.read_text()]
    left_out = [str(p.relative_to(ROOT)) for p in direct if str(p.relative_to(ROOT)) not in run]
    assert [file for file in left_out if not file.startswith(tuple(EXEMPT))] == []
    assert all((ROOT / file).is_file() for file in run)


@pytest.mark.parametrize("room", EXEMPT)
def test_an_exempt_room_has_such_tests(room: str) -> None:
    assert any(compares_bits(path) for path in (ROOT / room).rglob("test_*.py"))


@pytest.mark.parametrize("file", ALSO)
def test_a_file_that_is_added_by_hand_is_not_found_otherwise(file: str) -> None:
    assert not compares_bits(ROOT / file)


@pytest.mark.parametrize(
    ("source", "compares"),
    [
        ("assert torch.equal(a, b)", True),
        ("assert_same(a, b)", True),
        ("assert ours.tobytes() == theirs.tobytes()", True),
        ("from compare import all_equal\nassert all_equal(a, b)", True),
        ("from ranks.evaluated import logits_of_evaluation", True),
        ("from parity import processors\nfrom compare import same_products", False),
        ("import ranks.pool", False),
        ("assert a == b", False),
    ],
)
def test_comparisons_are_found_in_a_file_and_in_what_it_imports(
    tmp_path: Path, source: str, *, compares: bool
) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(source)
    assert compares_bits(file) is compares
