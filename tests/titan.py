"""torchtitan's own Trainer on the CPU, with a tiny Llama: for tests, and for ranks of tests.

torchtitan takes "cuda" for a machine without an accelerator (tools/utils.py:59), asks the device's
module for what ``torch.cpu`` lacks (components/metrics.py:42), torch.distributed for a function
that torch 2.13 lacks (distributed/utils.py:595), and gloo for a sum that it lacks. Nothing else of
it is replaced here.
"""

import gc
import os
import tempfile
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchtitan.tools.utils
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import distribute_tensor

import trainers
from tensorstow import AdamW

_CPU = types.SimpleNamespace(
    current_device=lambda: 0,
    device_count=torch.cpu.device_count,
    empty_cache=lambda: None,
    get_device_name=lambda _: "cpu",
    get_device_properties=lambda _: types.SimpleNamespace(total_memory=1 << 30),
    memory_stats=lambda _: {},
    reset_peak_memory_stats=lambda: None,
    set_device=torch.cpu.set_device,
    synchronize=torch.cpu.synchronize,
)
torchtitan.tools.utils.device_type = "cpu"  # before anything of torchtitan reads them
torchtitan.tools.utils.device_module = _CPU

import torchtitan.trainer  # noqa: E402
from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.config.override import parse_cli_imports  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402

LEARNING_RATE = 1e-2
BATCHES = 8
_WIDTH = 16


class NoTokenizer(BaseTokenizer):
    """Tokens are given as numbers."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """No options."""

    def __init__(self, config: Config, **_: object) -> None:  # noqa: ARG002
        super().__init__()

    def encode(self, *_: object, **__: object) -> list[int]:
        return []

    def decode(self, *_: object, **__: object) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return trainers.WORDS


class Batches(BaseDataLoader):
    """Gives each rank its part of ``micro_batches``, and goes on where it was."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """No options."""

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **_: object) -> None:  # noqa: ARG002
        self._own = trainers.micro_batches(BATCHES)[dp_rank::dp_world_size]
        self._next = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while self._next < len(self._own):
            self._next += 1
            tokens = self._own[self._next - 1]
            yield {"input": tokens}, tokens.roll(-1, 1)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._next = state_dict["next"]


def _tiny() -> Any:  # noqa: ANN401
    spec = llama3.model_registry("debugmodel")
    rope = replace(spec.model.layers[0].attention.rope, dim=_WIDTH // 2, max_seq_len=64)
    layers = llama3._build_llama3_layers(
        n_layers=2, dim=_WIDTH, n_heads=2, hidden_dim=32, rope=rope, attn_backend="flex"
    )
    for layer in layers:  # flex has no backward on the CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    words = {"num_embeddings": trainers.WORDS, "embedding_dim": _WIDTH}
    model = replace(
        spec.model,
        dim=_WIDTH,
        vocab_size=trainers.WORDS,
        tok_embeddings=replace(spec.model.tok_embeddings, **words),
        norm=replace(spec.model.norm, normalized_shape=_WIDTH),
        lm_head=replace(spec.model.lm_head, in_features=_WIDTH, out_features=trainers.WORDS),
        layers=layers,
    )
    return replace(spec, model=model)


def trainer(
    place: Path,
    override: str | None = None,
    *,
    steps: int = 4,
    checkpoint: dict[str, Any] | None = None,
    **training: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Return torchtitan's Trainer; ``override`` is what its command line takes after the name."""
    config = torchtitan.trainer.Trainer.Config(
        model_spec=_tiny(),
        dump_folder=str(place),
        tokenizer=NoTokenizer.Config(),
        dataloader=Batches.Config(),
        loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(lr=LEARNING_RATE),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, min_lr_factor=1.0),
        training=TrainingConfig(
            **{
                "steps": steps,
                "local_batch_size": trainers.BATCH,
                "seq_len": trainers.LENGTH,
                "mixed_precision_param": "float32",
                "disable_cuda_graphs": True,
                **training,
            }
        ),
        checkpoint=CheckpointManager.Config(
            **{
                "enable": checkpoint is not None,
                "interval": 2,
                "last_save_model_only": False,
                "keep_latest_k": 0,
                **(checkpoint or {}),
            }
        ),
        activation_checkpoint=None,
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
    )
    config.debug.seed = 0
    config.metrics.log_freq = 100
    if override is not None:
        name = f"tensorstow.integrations.torchtitan.stowed{override}"
        config.override.imports = parse_cli_imports([name])
    made = torchtitan.trainer.Trainer(config)
    (model,) = made.model_parts
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():  # what torchtitan draws on the CPU depends on the number of ranks
        for p in model.parameters():
            value = torch.randn(p.shape, generator=numbers) / 8
            whole = distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)
            p.copy_(whole)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # gloo has no sum that divides before
            module.set_force_sum_reduction_for_comms(enable=True)
    return made


def train(made: Any) -> list[bytes]:  # noqa: ANN401
    made.train()
    made.close()
    (optimizer,) = made.optimizers
    getattr(optimizer, "wait", lambda: None)()
    found = bits(made.model_parts[0])
    getattr(optimizer, "close", lambda: None)()
    return found


def bits(model: torch.nn.Module) -> list[bytes]:
    return [p.full_tensor().detach().numpy().tobytes() for p in model.parameters()]


def by_hand(place: Path, steps: int = 4, accumulation: int = 1, clip: float = 1.0) -> list[bytes]:
    """Train torchtitan's model in a plain loop, with states in RAM."""
    made = trainer(place)
    (model,) = made.model_parts
    options: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, **options)
    for window in trainers.windows(BATCHES, accumulation)[:steps]:
        words = torch.tensor(sum(tokens.numel() for tokens in window))
        for tokens in window:
            made.loss_fn(model(tokens), tokens.roll(-1, 1), words)[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    made.close()
    return bits(model)


@contextmanager
def on_the_cpu(rank: int = 0) -> Iterator[None]:
    """Let torchtitan train; put back what it sets for the whole process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", str(rank))
        patch.setenv("PYTHONHASHSEED", os.environ.get("PYTHONHASHSEED", "0"))
        patch.setattr(torchtitan.trainer.dist_utils, "set_pg_timeouts", lambda **_: None)
        # Rank 0 sleeps two seconds for the others.
        clock = types.SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)
        patch.setattr(torchtitan.trainer, "time", clock)
        if not dist.is_initialized():
            store = dist.FileStore(tempfile.mkdtemp() + "/meeting", 1)
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        yield
        gc.enable()  # torchtitan collects by itself
