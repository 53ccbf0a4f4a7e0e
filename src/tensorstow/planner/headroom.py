"""Headroom: memory that a budget leaves free for what is not allocated tensor by tensor.

The driver's context and its libraries' workspaces are on an accelerator. Python, torch and their
libraries are in host memory. The allocators keep some of what was freed, and cannot use all of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tensorstow.base.tiers import Tier

_CONTEXT = 614 << 20
"""0.6 GiB: CUDA's context takes about 0.5 GiB, workspaces of its libraries the rest."""
_PROCESS = 512 << 20
"""Python with torch for the CPU: 0.4 GiB were measured."""
_PROCESS_AWAY = 3 * _PROCESS
"""The same with an accelerator's libraries, which are several times as large."""
_SHARE = 0.08
"""Share of what a run holds that allocators keep of freed memory, in pieces of other sizes."""


@dataclass(frozen=True, slots=True)
class Headroom:
    """The memory of one tier that a run must leave free."""

    fixed: int = 0
    """Bytes that do not depend on what the run holds."""
    share: float = 0.0
    """The rest, as a share of what the run holds."""

    def beside(self, held: int) -> int:
        """Return the bytes to leave free by a run that holds ``held`` bytes."""
        return self.fixed + int(self.share * held)

    def within(self, limit: float) -> int:
        """Return the most bytes that a run can hold if it and the headroom share ``limit``."""
        return self.growth(limit - self.fixed)

    def growth(self, left: float) -> int:
        """Return by how much a run can grow if ``left`` bytes are unused."""
        rounded = 1 if self.share else 0  # ``beside`` rounds
        return max(int((left - rounded) / (1 + self.share)), 0)


def usual_headroom(*, device_is_host: bool) -> Mapping[Tier, Headroom]:
    """Return the headroom of each tier of memory; ``device_is_host``: the CPU computes."""
    if device_is_host:
        return {Tier.HOST: Headroom(_PROCESS, _SHARE)}
    return {Tier.DEVICE: Headroom(_CONTEXT, _SHARE), Tier.HOST: Headroom(_PROCESS_AWAY, _SHARE)}
