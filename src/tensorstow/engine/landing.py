"""The hooks by which gradients leave the device, on parameters that may be frozen at first."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tensorstow.engine.gradients import take_down
from tensorstow.io.pinned import PinnedBlock
from tensorstow.optim.accelerator.device import Link
from tensorstow.optim.states.layout import round_up

_ALIGN = 128


class Landing:
    """Sees to it that the gradient of every stowed parameter that is trained leaves the device."""

    def __init__(self, parameters: Iterable[DTensor], link: Link | None = None) -> None:
        """Watch the trained of ``parameters`` now, before their optimizer does; others later.

        ``link``: what carries gradients, into pinned memory for one of each; None: each is copied
        when it is there.
        """
        self._unhooked: list[Any] = list(parameters)
        self._takers = dict(_takers(self._unhooked, link))
        self.hook()

    def hook(self, *_: Any) -> None:  # noqa: ANN401  # also a module's forward pre-hook
        """Watch those that were unfrozen since."""
        still = []
        for parameter in self._unhooked:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._takers[id(parameter)])
            else:
                still.append(parameter)
        self._unhooked = still


@torch.no_grad()
def _takers(
    parameters: Iterable[DTensor], link: Link | None
) -> Iterator[tuple[int, Callable[[torch.Tensor], None]]]:
    shards = {id(p): p.to_local() for p in parameters}
    if link is None:
        yield from dict.fromkeys(shards, take_down).items()
        return
    sizes = {key: round_up(shard.nbytes, _ALIGN) for key, shard in shards.items()}
    block = PinnedBlock(sum(sizes.values()), link.device, link.settle)
    at = 0
    for key, shard in shards.items():
        room = block.tensor(at, shard.nbytes, torch.uint8)
        at += sizes[key]
        yield key, partial(take_down, link=link, room=room)


def move_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Move every buffer that has values to ``device``."""
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):  # noqa: SLF001
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)  # noqa: SLF001
