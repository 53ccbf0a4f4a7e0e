"""The kernel of updates on this machine: its instruction set and its threads."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import tensorstow._native as _native
from tensorstow.io.numa_binding import bind_threads
from tensorstow.states.policy import PipelinePolicy

Caller = Literal["waits", "computes", "helps", "launches", "updates"]
"""The caller's work during a step: none; computing on the same cores; the same, with calls of
``help`` in between; launching work of an accelerator; updating the chunks that ``caller_chunks``
has chosen. Except for "waits" the call returns at once."""
_FEW_THREADS = 4
"""The most threads that update while the caller computes. Four, not one: one busy core already
stalls the caller's OpenMP team at its barriers, and one thread would do so for longer."""
_most_threads = 0
"""The most threads of any policy: the process has one pool, and each pipeline uses part of it."""


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """The kernel that is used, and the others that this CPU can run."""

    isa: str
    supported: tuple[str, ...]
    threads: int


def prepare_kernels(policy: PipelinePolicy | None = None) -> KernelFacts:
    """Size the kernels' pool by this rank's share or by ``policy``; return the kernel's facts."""
    global _most_threads  # noqa: PLW0603  # one for the process, like the pool
    policy = policy or PipelinePolicy()
    # Never fewer than before: other pipelines may be using them.
    _most_threads = max(_most_threads, policy.threads or 0)
    _native.set_pool_threads(max(bind_threads(policy.node).threads, _most_threads))
    return KernelFacts(
        isa=policy.isa or _native.best_isa(),
        supported=tuple(_native.supported_isas()),
        threads=_native.pool_threads(),
    )


class ThreadCounts(NamedTuple):
    """How many threads update."""

    whole: int
    few: int
    """While the caller computes on the same cores."""
    most: int
    """While the caller launches work of an accelerator, for which it needs one core."""

    def beside(self, caller: Caller) -> int:
        """Return the number while nobody waits for the step; a caller who helps has them all."""
        return {"computes": self.few, "launches": self.most}.get(caller, self.whole)


def team_of(policy: PipelinePolicy) -> ThreadCounts:
    """Return the numbers of threads that update."""
    threads = policy.threads or bind_threads(policy.node).threads
    few = min(_FEW_THREADS, threads)
    return ThreadCounts(threads, few, max(few, threads - 1))
