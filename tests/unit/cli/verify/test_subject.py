from pathlib import Path

import pytest
import torch

from tensorstow.base.errors import OptionError
from tensorstow.cli.verify.subject import Subject, subject_of

CPU = torch.device("cpu")
MODELS = """
import torch
from torch import nn

def linear():
    return nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 2))

def given():
    return nn.Bilinear(3, 3, 2), (torch.ones(2, 3), torch.ones(2, 3))

def half():
    return nn.Linear(2, 2).half()

def unknown():
    return nn.Bilinear(3, 3, 2)

def nothing():
    return 3
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "verified_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))


def is_repeated(subject: Subject, dtype: str) -> bool:
    """Return whether the model and its losses are the same when they are made again."""
    found = []
    for _ in range(2):
        module = subject.make(dtype, CPU)
        losses = [subject.loss(module, step) for step in range(2)]
        losses[0].backward()
        found.append((losses, [p.detach().clone() for p in module.parameters()]))
    (first, weights), (second, again) = found
    assert first[0] != first[1]
    return first == second and all(map(torch.equal, weights, again))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_small_model_is_the_same_each_time(dtype: str) -> None:
    subject = subject_of(None)
    assert subject.dtypes == ("fp32", "bf16")
    assert is_repeated(subject, dtype)


@pytest.mark.parametrize("name", ["gpt2", "llama-3-70b"])
def test_a_known_model_is_cut_and_says_so(name: str) -> None:
    subject = subject_of(name)
    module = subject.make("fp32", CPU)
    assert sum(p.numel() for p in module.parameters()) < 5e6
    assert subject.note.startswith("cut from ")
    assert is_repeated(subject, "fp32")


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("function", ["linear", "given"])
def test_a_function_is_taken_as_it_is(function: str) -> None:
    subject = subject_of(f"verified_models:{function}")
    assert (subject.dtypes, subject.note) == (("fp32",), "")
    module = subject.make("fp32", CPU)
    subject.loss(module, 0).backward()
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("verified_models:half", "whose parameters are torch.float16"),
        ("verified_models:unknown", "return the module and the arguments"),
        ("verified_models:nothing", "returned int, no nn.Module"),
        ("verified_models:lacking", "verified_models has no lacking"),
        ("no_such_module_here:make", "No module named"),
        ("gpt9", "it is none of"),
    ],
)
def test_what_cannot_be_verified_is_said(name: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        subject_of(name)
