"""``TracedOffload``: activations that leave their blocks while a model is traced without values."""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tensorstow.activations.offload import LEAST_BYTES
from tensorstow.activations.saved import StorageIdentity, address_of, version_of


@dataclass(eq=False, slots=True, weakref_slot=True)
class _TracedStorage:
    """A saved storage; it lives as long as autograd has a tensor of it."""

    nbytes: int
    identity: StorageIdentity
    restored: torch.Tensor | None = None


class TracedOffload:
    """Hooks on blocks like those of ``ActivationOffload``, which count and move nothing.

    What a block saves leaves at once; what backward asks for stays until backward releases it.
    """

    def __init__(self, bring: Callable[[torch.Tensor], object]) -> None:
        """Begin at zero; ``bring`` is called with each storage that comes back."""
        self.saved_bytes = 0
        """Bytes saved in one forward, each storage once."""
        self.largest_bytes = 0
        """Bytes of the largest saved storage."""
        self._bring = bring
        self._storages: weakref.WeakValueDictionary[tuple[int, int], _TracedStorage] = (
            weakref.WeakValueDictionary()
        )
        self._parameters: set[int] = set()
        self._entered: list[saved_tensors_hooks] = []

    def register(self, blocks: Iterable[nn.Module]) -> None:
        """Put hooks on blocks, whose parameters stay where they are."""
        for block in blocks:
            self._parameters |= {address_of(p.untyped_storage()) for p in block.parameters()}
            block.register_forward_pre_hook(self._enter)
            block.register_forward_hook(self._leave, always_call=True)

    def _enter(self, *_: object) -> None:
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._entered.append(hooks)

    def _leave(self, *_: object) -> None:
        self._entered.pop().__exit__()

    def _pack(self, tensor: torch.Tensor) -> Any:  # noqa: ANN401  # torch's own signature
        source = tensor.untyped_storage()
        address, nbytes = address_of(source), source.nbytes()
        if address in self._parameters or nbytes < LEAST_BYTES:
            return tensor.detach()
        key = (address, version_of(tensor))
        storage = self._storages.get(key)
        if storage is None:
            storage = self._storages[key] = _TracedStorage(nbytes, StorageIdentity(source))
            self.saved_bytes += nbytes
            self.largest_bytes = max(self.largest_bytes, nbytes)
        offset = int(tensor.storage_offset())
        return storage, tensor.dtype, (tensor.size(), tensor.stride(), offset)

    def _unpack(self, saved: Any) -> torch.Tensor:  # noqa: ANN401
        if isinstance(saved, torch.Tensor):
            return saved
        storage, dtype, layout = saved
        if storage.restored is None:
            storage.restored = torch.empty(storage.nbytes, dtype=torch.uint8)
            self._bring(storage.restored)
        whole: torch.Tensor = storage.restored.view(dtype)
        return whole.as_strided(*layout)
