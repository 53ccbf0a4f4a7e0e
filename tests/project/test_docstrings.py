"""Every public name says what it takes, returns and raises: Args, Returns, Raises, as Google's."""

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest

from tree import ROOT

MODULES = (
    "tensorstow",
    "tensorstow.errors",
    "tensorstow.colossalai",
    "tensorstow.colossalai.accelerator",
    "tensorstow.colossalai.booster",
    "tensorstow.colossalai.booster.plugin",
    "tensorstow.colossalai.cluster",
    "tensorstow.colossalai.initialize",
    "tensorstow.colossalai.interface",
    "tensorstow.colossalai.lazy",
    "tensorstow.colossalai.logging",
    "tensorstow.colossalai.nn.optimizer",
    "tensorstow.colossalai.utils",
    "tensorstow.colossalai.utils.model.colo_init_context",
    "tensorstow.colossalai.zero",
    "tensorstow.colossalai.zero.gemini",
    "tensorstow.deepspeed",
    "tensorstow.deepspeed.checkpointing",
    "tensorstow.deepspeed.ops.adam",
    "tensorstow.deepspeed.runtime.lr_schedules",
    "tensorstow.deepspeed.runtime.zero.stage3",
    "tensorstow.deepspeed.runtime.zero.stage_1_and_2",
    "tensorstow.deepspeed.runtime.zero.tiling",
    "tensorstow.deepspeed.utils",
    "tensorstow.deepspeed.zero",
    "tensorstow.integrations.accelerate",
    "tensorstow.integrations.lightning",
    "tensorstow.integrations.transformers",
    "tensorstow.losses",
    "tensorstow.nn",
    "tensorstow.tensornvme",
    "tensorstow.tensornvme.async_file_io",
)
_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):\s*$")
_ENTRY = re.compile(r"^    (\**\w+(?:, \**\w+)*):(?:\s|$)")

Function = Callable[..., Any]


def public_names(module: ModuleType) -> list[str]:
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return [name for name in listed if not isinstance(getattr(module, name), ModuleType)]
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def sections(text: str | None) -> dict[str, list[str]]:
    """Return the lines of each section of a docstring, and those before the first as ""."""
    found: dict[str, list[str]] = {"": []}
    name = ""
    for line in inspect.cleandoc(text or "").splitlines():
        match = _SECTION.match(line)
        if match:
            name = match[1]
            found[name] = []
        elif line and not line.startswith(" ") and name:
            name = ""  # a paragraph after the section
        else:
            found[name].append(line)
    return found


def entries(lines: list[str]) -> set[str]:
    names: set[str] = set()
    for line in lines:
        if match := _ENTRY.match(line):
            names.update(name.strip("* ") for name in match[1].split(","))
    return names


def parameters(function: Function) -> list[str]:
    found = inspect.signature(function).parameters
    return [name for name in found if name not in {"self", "cls"} and not name.startswith("_")]


def raised(function: Function) -> set[str]:
    """Return the exceptions that the body itself raises, by name."""
    code = inspect.unwrap(function)
    tree = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    names = set()
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.Raise) and node.exc is not None:
            error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if isinstance(error, ast.Name) and error.id[0].isupper():
                names.add(error.id)
        waiting.extend(ast.iter_child_nodes(node))
    return names


def returns_something(function: Function) -> bool:
    annotation = inspect.signature(function).return_annotation
    return annotation not in {None, "None", inspect.Signature.empty} and "NoReturn" not in str(
        annotation
    )


def faults_of_function(
    function: Function, *docs: str | None, overridden: Function | None = None
) -> Iterator[str]:
    """Yield what the docstring of ``function`` lacks; ``docs``: others that may have it.

    The parameters and the result of the method that it overrides need not be described again.
    """
    found: dict[str, list[str]] = {}
    for text in (function.__doc__, *docs):
        for name, lines in sections(text).items():
            found.setdefault(name, []).extend(lines)
    if not any(line.strip() for line in found[""]):
        yield "has no docstring"
        return
    known = entries(found.get("Args", []) + found.get("Attributes", []))
    if overridden is not None:
        passed_on = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
        own = inspect.signature(function).parameters
        known |= {*parameters(overridden), *(n for n, p in own.items() if p.kind in passed_on)}
    missing = [name for name in parameters(function) if name not in known]
    if missing:
        yield f"Args lacks {', '.join(missing)}"
    unknown = entries(found.get("Args", [])) - set(inspect.signature(function).parameters)
    if unknown:
        yield f"Args has {', '.join(sorted(unknown))}, which it does not take"
    # As in Google's guide, a first sentence such as "Return the rank." needs no section.
    summary_says = found[""][0].startswith("Return ")
    said = summary_says or overridden or found.get("Returns") or found.get("Yields")
    if returns_something(function) and not said:
        yield "has no Returns"
    unsaid = raised(function) - entries(found.get("Raises", []))
    if unsaid:
        yield f"Raises lacks {', '.join(sorted(unsaid))}"


def owner_of(cls: type, name: str) -> type | None:
    """Return the class that defines ``name``, if it is one of ours."""
    owner = next(c for c in cls.__mro__ if name in vars(c))
    return owner if owner.__module__.startswith("tensorstow") else None


def faults_of_class(cls: type) -> Iterator[str]:
    if not (cls.__doc__ or "").strip():
        yield "has no docstring"
    if dataclasses.is_dataclass(cls):
        known = entries(
            [
                line
                for name in ("Args", "Attributes")
                for line in sections(cls.__doc__).get(name, [])
            ]
        )
        missing = [f.name for f in dataclasses.fields(cls) if f.init and f.name not in known]
        if missing:
            yield f"Args lacks {', '.join(missing)}"
    elif (owner := owner_of(cls, "__init__")) is not None:
        for fault in faults_of_function(owner.__init__, owner.__doc__):  # type: ignore[misc]
            yield f"__init__ {fault}"
    yield from faults_of_methods(cls)


def faults_of_methods(cls: type) -> Iterator[str]:
    for name in dir(cls):
        if name.startswith("_") or (owner := owner_of(cls, name)) is None:
            continue
        value = vars(owner)[name]
        value = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if isinstance(value, property):
            if not (value.__doc__ or "").strip():
                yield f"{name} has no docstring"
        elif inspect.isfunction(value):
            bases = cls.__mro__[cls.__mro__.index(owner) + 1 :]
            overridden = next((vars(base)[name] for base in bases if name in vars(base)), None)
            for fault in faults_of_function(value, overridden=overridden):
                yield f"{name}() {fault}"


def surface() -> Iterator[tuple[str, Any]]:
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in public_names(module):
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                yield f"{module_name}.{name}", value


@pytest.mark.parametrize(
    ("name", "value"), list(surface()), ids=lambda v: v if isinstance(v, str) else ""
)
def test_a_public_name_says_what_it_takes_returns_and_raises(name: str, value: Any) -> None:  # noqa: ANN401
    faults = list(faults_of_class(value) if inspect.isclass(value) else faults_of_function(value))
    assert not faults, "\n".join([name, *faults])


def test_the_surface_is_all_that_users_import() -> None:
    """What the README, the guides and the seeds import, and modules that they name."""
    pages = [ROOT / "README.md", *(ROOT / "docs/guides").glob("*.md")]
    texts = [page.read_text("utf-8") for page in (*pages, *(ROOT / "tests/seeds").glob("*.py"))]
    imported = {m for text in texts for m in re.findall(r"(?:from|import) (tensorstow\S*)", text)}
    assert len(imported) > 8
    named = {m for text in texts for m in re.findall(r"`(tensorstow\.[a-z_.]+[a-z_])", text)}
    modules = {name for name in named if find_spec(name.rpartition(".")[0]) and find_spec(name)}
    assert "tensorstow.colossalai.zero" in modules
    of_others = {"tensorstow.integrations.llamafactory"}  # imports a package that is not here
    assert not (imported | modules) - {*MODULES} - of_others
    names = {name for name, _ in surface()}
    assert {"tensorstow.stow", "tensorstow.AdamW", "tensorstow.deepspeed.zero.Init"} <= names


def complete(size: int, *names: str, **options: object) -> int:
    """Return something.

    Args:
        size: In bytes.
        names: What to call it.
        options: The rest.

    Returns:
        A number.

    Raises:
        ValueError: Always.
    """
    del names, options
    if size:
        raise ValueError
    return size


def lacking(size: int) -> int:  # noqa: D417  # which is the point
    """Make something.

    Args:
        width: Another name.
    """
    if size:
        raise ValueError
    raise TypeError


def overriding(size: int, width: int) -> int:
    """Make something."""
    return size + width


def test_what_is_missing_is_found() -> None:
    assert list(faults_of_function(overriding, overridden=complete)) == ["Args lacks width"]
    assert list(faults_of_function(complete)) == []
    assert list(faults_of_function(lacking)) == [
        "Args lacks size",
        "Args has width, which it does not take",
        "has no Returns",
        "Raises lacks TypeError, ValueError",
    ]
