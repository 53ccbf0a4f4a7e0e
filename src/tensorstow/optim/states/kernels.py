"""What the update runs on here: instruction set and threads."""

from dataclasses import dataclass

import tensorstow._native as _native
from tensorstow.base.cores import usable_cores


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """The kernel that serves, and what else this CPU runs."""

    isa: str
    supported: tuple[str, ...]
    threads: int


def prepare_kernels(isa: str | None = None) -> KernelFacts:
    """Size the kernels' pool by the usable cores; return what updates run on."""
    _native.set_pool_threads(usable_cores())
    return KernelFacts(
        isa=isa or _native.best_isa(),
        supported=tuple(_native.supported_isas()),
        threads=_native.pool_threads(),
    )
