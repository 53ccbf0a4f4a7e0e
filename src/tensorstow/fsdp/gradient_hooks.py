"""The hooks by which gradients leave the device, on parameters that may be frozen at first."""

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tensorstow.base.sizes import round_up
from tensorstow.fsdp.gradient_copies import GradientCopies
from tensorstow.fsdp.gradient_offload import Passage, Room, WholeTaker, take_down
from tensorstow.fsdp.validation import validate_no_hooks
from tensorstow.io.device_link import DeviceLink
from tensorstow.io.pinned import PinnedBlock
from tensorstow.tensors.dtensor import shard_of

_ALIGN = 128
_LANDINGS: "weakref.WeakKeyDictionary[torch.nn.Module, Landing]" = weakref.WeakKeyDictionary()


class Landing:
    """Sees to it that the gradient of every trained one of some parameters leaves the device."""

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        link: DeviceLink | None = None,
        *,
        pass_on: bool = False,
    ) -> None:
        """Watch the trained of ``parameters`` now, before their optimizer does; others later.

        ``link``: what carries gradients, into pinned memory for one of each; None: each is copied
        when it is there. ``pass_on``: they are used when they are down, and memory is there for as
        many as are not.
        """
        self._unhooked: list[Any] = list(parameters)
        self._sharded = [p for p in self._unhooked if isinstance(p, DTensor)]
        self._block: PinnedBlock | None = None  # pinned as long as this lives
        if link is not None and pass_on:
            self._rooms: dict[int, Room] = dict.fromkeys(map(id, self._unhooked), Passage(link))
        else:
            self._block, self._rooms = _rooms(self._unhooked, link)
        self._copies = None if link is None else GradientCopies(link)
        self.hook()

    def watch(self, model: torch.nn.Module) -> None:
        """Look before every forward of ``model`` for what was unfrozen since."""
        model.register_forward_pre_hook(self.hook, prepend=True)
        _LANDINGS[model] = self

    @property
    def bytes_down(self) -> int:
        """Return the bytes that came down of gradients of parameters on the device."""
        return sum(room.bytes_down for room in self._rooms.values())

    @property
    def pinned_bytes(self) -> int:
        """Return the pinned bytes of the memory that gradients fall into or pass through."""
        own = 0 if self._block is None else self._block.pinned_bytes
        return own + (0 if self._copies is None else self._copies.pinned_bytes)

    def hook(self, *_: Any) -> None:  # noqa: ANN401  # also a module's forward pre-hook
        """Watch those that were unfrozen since."""
        if self._copies is not None:
            self._copies.move_on()
        for parameter in self._sharded:
            validate_no_hooks(parameter, "a parameter")
        still = []
        for parameter in self._unhooked:
            if parameter.requires_grad:
                self._watch(parameter, self._rooms.get(id(parameter)))
            else:
                still.append(parameter)
        self._unhooked = still

    def _watch(self, parameter: Any, room: Room | None) -> None:  # noqa: ANN401  # hooks
        if self._copies is not None and room is not None and not isinstance(parameter, DTensor):
            WholeTaker(parameter, self._copies, room)
        else:
            taker = partial(take_down, copies=self._copies, room=room)
            parameter.register_post_accumulate_grad_hook(taker)


@torch.no_grad()
def _rooms(
    parameters: Sequence[torch.Tensor], link: DeviceLink | None
) -> tuple[PinnedBlock | None, dict[int, Room]]:
    """Return the memory that gradients fall into, and each parameter's part of it, by id."""
    if link is None:
        return None, {}
    sizes = [round_up(shard_of(p).nbytes, _ALIGN) for p in parameters]
    block = PinnedBlock(sum(sizes), link.device, link.synchronize)
    starts = accumulate(sizes, initial=0)
    rooms = {
        id(p): Room(block.tensor(at, shard_of(p).nbytes, torch.uint8))
        for p, at in zip(parameters, starts, strict=False)
    }
    return block, rooms


def landed_bytes(model: torch.nn.Module) -> int:
    """Return the bytes that came down of gradients of parameters on the device."""
    landing = _LANDINGS.get(model)
    return 0 if landing is None else landing.bytes_down


def landing_bytes(model: torch.nn.Module) -> int:
    """Return the pinned bytes of the memory that gradients of ``model`` fall into."""
    landing = _LANDINGS.get(model)
    return 0 if landing is None else landing.pinned_bytes
