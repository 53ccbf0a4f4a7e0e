"""The Dockerfile, read line by line: no Docker is needed to see these faults."""

import re
import shlex
from collections.abc import Iterator
from string import Template

import pytest

from tree import ROOT


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile: the word, and the rest with its lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (line.split()[0].upper(), line.partition(" ")[2].strip())
        for line in joined.splitlines()
        if line.strip()
    ]


def faults(text: str) -> Iterator[str]:
    """Yield what is wrong with a Dockerfile."""
    user, stages = "root", set()
    values = dict(rest.split("=", 1) for word, rest in instructions(text) if word == "ARG")
    for word, rest in instructions(text):
        if word == "FROM":
            image, _, name = Template(rest).safe_substitute(values).partition(" AS ")
            if image not in stages and not re.search(r":\d+\.\d+\.\d+\S*$|@sha256:", image):
                yield f"{image} is no release"
            user = "root"
            stages.add(name)
        elif word == "USER":
            user = rest
        elif word == "COPY":
            yield from faults_of_copy(rest)
        elif word == "RUN":
            yield from faults_of_run(rest)
    if user in {"root", "0"}:
        yield "it runs as root"


def faults_of_copy(rest: str) -> Iterator[str]:
    *sources, _ = shlex.split(rest)
    if not rest.startswith("--from="):
        yield from (f"{s} is not in the tree" for s in sources if not (ROOT / s).exists())
        yield from (f"{s} is more than is built" for s in sources if s in {".", "./"})


def faults_of_run(rest: str) -> Iterator[str]:
    if "apt-get install" in rest and "rm -rf /var/lib/apt/lists" not in rest:
        yield "lists of packages stay in the image"
    if "pip " in rest and "--no-cache-dir" not in rest:
        yield "wheels stay in the image"


def test_the_dockerfile_has_no_fault() -> None:
    assert list(faults((ROOT / "Dockerfile").read_text("utf-8"))) == []


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("ARG PYTHON=3.13.5-slim-bookworm", "ARG PYTHON=latest", "python:latest is no release"),
        ("ARG PYTHON=3.13.5-slim-bookworm", "ARG PYTHON=3", "python:3 is no release"),
        ("USER stow\n", "", "it runs as root"),
        ("COPY src src", "COPY . .", ". is more than is built"),
        ("COPY src src", "COPY source src", "source is not in the tree"),
        ("rm -rf /var/lib/apt/lists/*", "true", "lists of packages stay in the image"),
        ("pip install --no-cache-dir ${TORCH}", "pip install ${TORCH}", "wheels stay in the image"),
    ],
)
def test_a_fault_is_found(before: str, after: str, fault: str) -> None:
    text = (ROOT / "Dockerfile").read_text("utf-8")
    assert before in text
    assert fault in faults(text.replace(before, after))


def test_what_it_says_of_system_calls_is_what_the_core_calls() -> None:
    """The head allows the calls of io_uring that csrc/ makes, and no others."""
    text = (ROOT / "Dockerfile").read_text("utf-8")
    made = set()
    for file in (ROOT / "csrc/io").glob("*"):
        made |= set(re.findall(r"__NR_(io_uring_\w+)", file.read_text("utf-8")))
    assert made
    allowed = re.search(r'"names": \[(.*?)\]', text)
    assert allowed is not None
    assert set(re.findall(r'"(\w+)"', allowed[1])) == made
    assert "--security-opt seccomp=seccomp.json" in text
