"""Names of other projects that are not here: every way to import one says what to use instead."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator

import pytest

import tensorstow.base
from tensorstow.base.absent_names import add_absent_modules, refuse, refuse_names
from tensorstow.base.errors import AbsentAttributeError, AbsentError

GONE = "tensorstow.base.gone"


@pytest.fixture
def _gone() -> Iterator[None]:
    add_absent_modules("tensorstow.base", {"gone": "use what is here"})
    yield
    del sys.modules[GONE]


def test_a_name_is_refused_with_its_reason() -> None:
    with pytest.raises(AbsentAttributeError, match=r"^Old is not in a\.module: use New\.$"):
        refuse("a.module", "Old", {"Old": "use New"})
    with pytest.raises(AttributeError, match=r"module 'a\.module' has no attribute 'Other'"):
        refuse("a.module", "Other", {"Old": "use New"})


def test_every_name_of_a_module_is_refused_but_those_of_python() -> None:
    getter = refuse_names("a.module", "use New")
    with pytest.raises(AbsentAttributeError, match=r"^Any is not in a\.module: use New\.$"):
        getter("Any")
    with pytest.raises(AttributeError, match="__file__"):
        getter("__file__")


@pytest.mark.usefixtures("_gone")
@pytest.mark.parametrize(
    "line",
    [
        "from tensorstow.base.gone import Name",
        "from tensorstow.base.gone.deep.below import Name",
        "import tensorstow.base.gone.deep",
        "import tensorstow.base.gone.deep.below as short",
    ],
)
def test_a_module_is_refused_however_it_is_imported(line: str) -> None:
    with pytest.raises(AbsentError, match=r"tensorstow\.base\.gone.*: use what is here\."):
        exec(line)  # noqa: S102


@pytest.mark.usefixtures("_gone")
def test_what_looks_through_all_modules_finds_nothing() -> None:
    module = importlib.import_module(GONE)
    assert not hasattr(module, "__file__")
    assert not hasattr(module, "_private")
    assert not hasattr(tensorstow.base, "gone")
    assert module.__doc__ == "Not here: use what is here."


def test_a_module_that_is_there_stays() -> None:
    known = sys.modules["tensorstow.base.errors"]
    add_absent_modules("tensorstow.base", {"errors": "nothing"})
    assert sys.modules["tensorstow.base.errors"] is known


@pytest.mark.parametrize(
    ("line", "guide"),
    [
        ("from tensorstow.deepspeed.runtime.no_such.below import Name", "deepspeed.md"),
        ("import tensorstow.deepspeed.no_such", "deepspeed.md"),
        ("from tensorstow.colossalai.no_such import Name", "colossalai.md"),
        ("import tensorstow.colossalai.nn.no_such", "colossalai.md"),
        ("from tensorstow.tensornvme.no_such import Name", "colossalai.md"),
    ],
)
def test_any_other_module_names_the_guide(line: str, guide: str) -> None:
    package = importlib.import_module(".".join(line.split()[1].split(".")[:2]))
    for _ in range(2):  # once more after the package was loaded anew
        with pytest.raises(AbsentError, match=rf"no_such is not here: docs/guides/{guide} lists"):
            exec(line)  # noqa: S102
        importlib.reload(package)
    assert importlib.util.find_spec(f"{package.__name__}.__main__") is None
    assert importlib.util.find_spec(f"{package.__name__}.no_such") is None
    with pytest.raises(ModuleNotFoundError):
        import tensorstow.base.no_such  # noqa: F401, PLC0415
