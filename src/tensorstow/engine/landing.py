"""The hooks by which gradients leave the device, on parameters that may be frozen at first."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tensorstow.engine.gradients import take_down
from tensorstow.io.pinned import PinnedBlock
from tensorstow.optim.accelerator.device import Link
from tensorstow.optim.states.layout import round_up

_ALIGN = 128
Taker = Callable[[torch.Tensor], None]


class Landing:
    """Sees to it that the gradient of every stowed parameter that is trained leaves the device."""

    def __init__(self, parameters: Iterable[DTensor], link: Link | None = None) -> None:
        """Watch the trained of ``parameters`` now, before their optimizer does; others later.

        ``link``: what carries gradients, into pinned memory for one of each; None: each is copied
        when it is there.
        """
        self._unhooked: list[Any] = list(parameters)
        self._room, takers = _takers(self._unhooked, link)  # pinned as long as this lives
        self._takers = dict(takers)
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
) -> tuple[PinnedBlock | None, Iterator[tuple[int, Taker]]]:
    """Return the memory that gradients fall into, and the hook of each parameter, by id."""
    shards = {id(p): p.to_local() for p in parameters}
    if link is None:
        return None, iter(dict.fromkeys(shards, take_down).items())
    sizes = {key: round_up(shard.nbytes, _ALIGN) for key, shard in shards.items()}
    block = PinnedBlock(sum(sizes.values()), link.device, link.settle)
    starts = accumulate(sizes.values(), initial=0)
    rooms = {
        key: block.tensor(at, shard.nbytes, torch.uint8)
        for at, (key, shard) in zip(starts, shards.items(), strict=False)
    }
    return block, ((key, partial(take_down, link=link, room=rooms[key])) for key in shards)


def move_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Move every buffer that has values to ``device``."""
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):  # noqa: SLF001
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)  # noqa: SLF001
