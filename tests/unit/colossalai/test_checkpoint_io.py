import json
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from compare import all_equal
from ranks.boosted import goes_on
from ranks.pool import Ranks
from tensorstow import save_safetensors
from tensorstow.base.errors import DirectoryError, OptionError, StoreFormatError
from tensorstow.colossalai.adam import HybridAdam
from tensorstow.colossalai.booster import Booster
from tensorstow.colossalai.booster.plugin import GeminiPlugin
from tensorstow.io.digest_list import DigestList


class Tied(nn.Module):
    """Blocks, and a head that is the embedding; a buffer."""

    def __init__(self, seed: int) -> None:
        """Make the weights of ``seed``."""
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.register_buffer("scale", torch.rand(()))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        logits: torch.Tensor = self.head(self.norm(x) * self.scale)
        return logits


class Run:
    """A boosted model, and what trains it."""

    def __init__(self, seed: int, **plugin: Any) -> None:  # noqa: ANN401
        """Boost the model of ``seed``."""
        self.booster = Booster(plugin=GeminiPlugin(**plugin))
        model = Tied(seed)
        given = HybridAdam(model.parameters(), lr=1e-2)
        self.model, self.optimizer, _, _, self.schedule = self.booster.boost(
            model, given, lr_scheduler=ExponentialLR(given, 0.9)
        )

    def train(self, steps: range) -> None:
        """Take steps."""
        for step in steps:
            tokens = torch.randint(32, (8,), generator=torch.Generator().manual_seed(step))
            loss = nn.functional.cross_entropy(self.model(tokens).float(), tokens)
            self.booster.backward(loss, self.optimizer)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()

    @property
    def weights(self) -> list[torch.Tensor]:
        """Whole weights and buffers."""
        return [
            (v.full_tensor() if hasattr(v, "full_tensor") else v).detach().clone()
            for v in self.model.state_dict().values()
        ]


PLUGINS: list[dict[str, Any]] = [
    {},
    {"precision": "bf16"},
    {"precision": "fp16", "initial_scale": 64, "growth_interval": 2},
]


@pytest.mark.parametrize("plugin", PLUGINS, ids=str)
@pytest.mark.parametrize("shard", [False, True])
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, plugin: dict[str, Any], shard: bool) -> None:  # noqa: FBT001
    run, other = Run(0, **plugin), Run(1, **plugin)
    run.train(range(3))
    booster = run.booster
    booster.save_model(run.model, tmp_path / "model", shard=shard, size_per_shard=1)
    booster.save_optimizer(run.optimizer, tmp_path / "optimizer", shard=shard)
    booster.save_lr_scheduler(run.schedule, tmp_path / "schedule")
    run.train(range(3, 5))
    other.booster.load_model(other.model, tmp_path / "model")
    other.booster.load_optimizer(other.optimizer, tmp_path / "optimizer")
    other.booster.load_lr_scheduler(other.schedule, tmp_path / "schedule")
    other.train(range(3, 5))
    assert all_equal(other.weights, run.weights)
    assert other.optimizer.loss_scale == run.optimizer.loss_scale
    assert other.schedule.get_last_lr() == run.schedule.get_last_lr()
    assert other.schedule.state_dict() == run.schedule.state_dict()


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_of_two_ranks_goes_on_bit_for_bit(
    ranks: Callable[[int], Ranks],
    tmp_path: Path,
    precision: str,
    shard: bool,  # noqa: FBT001
) -> None:
    given = {"precision": precision, "max_norm": 0.5}
    assert all(ranks(2).run(goes_on, GeminiPlugin, given, str(tmp_path), shard))


def test_one_file_is_torchs_own(tmp_path: Path) -> None:
    run = Run(0)
    run.train(range(2))
    run.booster.save_model(run.model, tmp_path / "model.pt")
    run.booster.save_optimizer(run.optimizer, tmp_path / "optimizer.pt")
    plain = Tied(1)
    plain.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert all_equal(list(plain.state_dict().values()), run.weights)
    adam = torch.optim.AdamW(plain.parameters())
    adam.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    assert adam.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.9**2)
    assert all(float(s["step"]) == 2 for s in adam.state.values())


def test_shards_are_bounded_and_indexed(tmp_path: Path) -> None:
    booster = Booster(plugin=GeminiPlugin())
    layers = nn.Sequential(*(nn.Linear(512, 256, bias=False) for _ in range(5)))  # 0.5 MiB each
    model, optimizer, *_ = booster.boost(layers, HybridAdam(layers.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    booster.save_model(model, tmp_path / "m", shard=True, size_per_shard=1, prefix="net")
    index = json.loads((tmp_path / "m/pytorch_model.bin.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 2**19
    assert list(index["weight_map"]) == [f"net.{i}.weight" for i in range(5)]
    assert [
        len(torch.load(tmp_path / "m" / f)) for f in sorted(set(index["weight_map"].values()))
    ] == [2, 2, 1]
    booster.save_optimizer(optimizer, tmp_path / "o", shard=True, size_per_shard=1)
    names = sorted(f.name for f in (tmp_path / "o").iterdir())
    assert names == [
        *(f"pytorch_optim-{i:05}.bin" for i in range(1, 6)),
        "pytorch_optim.bin.index.json",
        "pytorch_optim.bin.index.json.digests",
        "pytorch_optim_group.bin",
    ]
    index = json.loads((tmp_path / "o/pytorch_optim.bin.index.json").read_text())
    step = 4
    assert index["metadata"]["total_size"] == 5 * (2 * 2**19 + step)
    saved = optimizer.state_dict()["state"]
    zeros = {
        i: {k: v if k == "step" else torch.zeros_like(v) for k, v in entry.items()}
        for i, entry in saved.items()
    }
    optimizer.load_state_dict({**optimizer.state_dict(), "state": zeros})
    booster.load_optimizer(optimizer, tmp_path / "o")
    loaded = optimizer.state_dict()["state"]
    assert len(loaded) == 5
    for i, entry in saved.items():
        assert all(torch.equal(loaded[i][name], value) for name, value in entry.items())
    booster.save_optimizer(optimizer, tmp_path / "named", shard=True, prefix="run")
    assert sorted(f.name for f in (tmp_path / "named").iterdir()) == [
        "run.pytorch_optim-00001.bin",
        "run.pytorch_optim.bin.index.json",
        "run.pytorch_optim.bin.index.json.digests",
        "run.pytorch_optim_group.bin",
    ]
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    booster.load_optimizer(optimizer, tmp_path / "named")
    assert optimizer.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize("many", [False, True])
def test_safetensors_are_read_as_they_are_written(tmp_path: Path, many: bool) -> None:  # noqa: FBT001
    run, other = Run(0), Run(1)
    if many:
        save_safetensors(run.model.unwrap(), tmp_path, max_shard_bytes=2000)
    else:
        run.booster.save_model(run.model, tmp_path, shard=True, use_safetensors=True)
    other.booster.load_model(other.model, tmp_path)
    assert all_equal(other.weights, run.weights)


def test_one_file_of_safetensors_is_called_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """test_gemini_checkpoint_io.py writes such files, where it asks for use_async."""
    run, other = Run(0), Run(1)
    file = tmp_path / "new/model.safetensors"
    run.booster.save_model(run.model, file, use_async=True)
    assert "Booster: use_async=True changes nothing" in caplog.text
    assert set(load_file(file)) == set(run.model.state_dict()) - {"head.weight"}  # tied
    other.booster.load_model(other.model, file)
    assert all_equal(other.weights, run.weights)
    with pytest.raises(OptionError, match="they and their groups are files of torch"):
        run.booster.save_optimizer(run.optimizer, tmp_path / "optimizer.safetensors")
    with pytest.raises(OptionError, match="no prefix"):
        run.booster.save_model(run.model, file, prefix="net")


def test_files_of_torch_have_the_configuration_of_transformers_beside_them(tmp_path: Path) -> None:
    """test_plugins_huggingface_compatibility.py."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=8)
    torch.manual_seed(0)
    made = transformers.GPT2LMHeadModel(config)
    model, optimizer, *_ = Booster(plugin=GeminiPlugin()).boost(made, HybridAdam(made.parameters()))
    Booster(plugin=GeminiPlugin()).save_model(model, tmp_path / "m", shard=True, size_per_shard=1)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "m")
    ours = model.state_dict(only_rank_0=False)
    assert all(torch.equal(values, ours[name]) for name, values in again.state_dict().items())
    optimizer.close()


def test_another_models_names_are_refused_unless_asked(tmp_path: Path) -> None:
    run = Run(0)
    torch.save({"embed.weight": torch.zeros(32, 16), "more": torch.ones(1)}, tmp_path / "part.pt")
    with pytest.raises(OptionError, match=r"it lacks \['blocks\.0\.bias'.*also has \['more'\]"):
        run.booster.load_model(run.model, tmp_path / "part.pt")
    run.booster.load_model(run.model, tmp_path / "part.pt", strict=False)
    assert not run.model.head.weight.any()


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    run = Run(0)
    with pytest.raises(StoreFormatError, match="nothing was saved under that name"):
        run.booster.load_model(run.model, tmp_path)
    with pytest.raises(StoreFormatError, match="nothing was saved under that name"):
        run.booster.load_optimizer(run.optimizer, tmp_path / "none")
    with pytest.raises(StoreFormatError, match="does not exist"):
        run.booster.load_lr_scheduler(run.schedule, tmp_path / "none")


@pytest.mark.parametrize("key", ["weight_map", "param_groups"])
def test_an_index_names_files_of_its_directory_alone(tmp_path: Path, key: str) -> None:
    run = Run(0)
    run.booster.save_optimizer(run.optimizer, tmp_path / "o", shard=True)
    (tmp_path / "o" / "pytorch_optim_group.bin").rename(tmp_path / "elsewhere")
    index = tmp_path / "o" / "pytorch_optim.bin.index.json"
    read = json.loads(index.read_text())
    if key == "weight_map":
        read[key] = {"0": "../elsewhere"}
    else:
        read["metadata"][key] = str(tmp_path / "elsewhere")
    index.write_text(json.dumps(read))
    index.with_name(f"{index.name}.digests").unlink()
    with pytest.raises(
        StoreFormatError, match=r"index\.json names '.*elsewhere', which is no file"
    ):
        run.booster.load_optimizer(run.optimizer, tmp_path / "o")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gather_dtensor": False}, "gather_dtensor=False was given"),
        ({"use_safetensors": True}, "Pass shard=True, or such a name, and no prefix"),
        ({"size_per_shard": 0}, "size_per_shard=0 was given"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    run = Run(0)
    with pytest.raises(OptionError, match=said):
        run.booster.save_model(run.model, tmp_path / "m", **given)
    assert not (tmp_path / "m").exists()


def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    run = Run(0)
    (tmp_path / "file").write_text("before")
    with pytest.raises(DirectoryError, match=r"A file has that name(.|\n)*Rank 0 could not write"):
        run.booster.save_model(run.model, tmp_path / "file/model.pt")
    assert (tmp_path / "file").read_text() == "before"


def test_a_write_that_fails_halfway_leaves_no_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(0)
    run.booster.save_model(run.model, tmp_path / "model.pt")
    before = (tmp_path / "model.pt").read_bytes()

    def fail(_: object, file: IO[bytes]) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match=r"No space(.|\n)*an older file is unchanged"):
        run.booster.save_model(run.model, tmp_path / "model.pt")
    assert (tmp_path / "model.pt").read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.pt", "model.pt.digests"]


@pytest.mark.parametrize("ends_at", ["a file", "the index"])
def test_several_files_that_were_cut_off_are_no_mixture_of_two_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_at: str
) -> None:
    booster = Booster(plugin=GeminiPlugin())
    layers = nn.Sequential(*(nn.Linear(512, 256, bias=False) for _ in range(5)))  # 0.5 MiB each
    model, optimizer, *_ = booster.boost(layers, HybridAdam(layers.parameters(), lr=0.5))
    booster.save_model(model, tmp_path / "m", shard=True, size_per_shard=1)
    booster.save_optimizer(optimizer, tmp_path / "o", shard=True)
    before, first = files_of(tmp_path), [whole(p) for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    count, real = 0, torch.save

    def fail(*given: Any) -> None:  # noqa: ANN401
        nonlocal count
        count += 1
        if count % 2 == 0:  # the second file of each
            raise OSError(28, "No space left on device")
        real(*given)

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if ends_at == "a file":
            patch.setattr(torch, "save", fail)
        else:
            patch.setattr(DigestList, "write_main", fails)
        with pytest.raises(OSError, match="No space"):
            booster.save_model(model, tmp_path / "m", shard=True, size_per_shard=1)
        with pytest.raises(OSError, match="No space"):
            booster.save_optimizer(optimizer, tmp_path / "o", shard=True)
    if ends_at == "a file":
        assert files_of(tmp_path) == before
        booster.load_model(model, tmp_path / "m")
        assert all_equal([whole(p) for p in model.parameters()], first)
        return
    with pytest.raises(StoreFormatError, match="has no weights and no index"):
        booster.load_model(model, tmp_path / "m")
    with pytest.raises(StoreFormatError, match="not a file or a directory with an index"):
        booster.load_optimizer(optimizer, tmp_path / "o")


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(f): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def whole(tensor: Any) -> torch.Tensor:  # noqa: ANN401
    """Return a copy of a tensor, or of the whole of a sharded one."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def test_an_optimizer_that_was_not_boosted_is_refused(tmp_path: Path) -> None:
    run = Run(0)
    with pytest.raises(OptionError, match=r"pass the optimizer that boost\(\) returned"):
        run.booster.save_optimizer(run.optimizer.unwrap(), tmp_path / "o")


def test_weights_are_loaded_behind_a_forward_that_left_some_unsharded(tmp_path: Path) -> None:
    unsharded = {"precision": "bf16", "placement_policy": "static", "shard_param_frac": 0.0}
    known, run = Run(1, **unsharded), Run(2, **unsharded)
    known.booster.save_model(known.model, tmp_path / "model")
    tokens = torch.arange(8)
    with torch.no_grad():
        wanted, before = known.model(tokens), run.model(tokens)
        assert not torch.equal(before, wanted)
        run.booster.load_model(run.model, tmp_path / "model")
        assert torch.equal(run.model(tokens), wanted)
    known.optimizer.close()
    run.optimizer.close()
