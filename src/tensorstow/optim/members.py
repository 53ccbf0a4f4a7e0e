"""Which parameters have states in the store, and under which number."""

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tensorstow.optim.layout import Family
from tensorstow.optim.policy import PipelinePolicy
from tensorstow.optim.states import Placement, StateStore


@dataclass(slots=True)
class Member:
    """A parameter whose states we keep."""

    parameter: torch.Tensor
    number: int
    """Its name in the store."""
    family: Family
    numel: int
    views: dict[str, torch.Tensor]
    """Its states in the parameter's shape, where all of them are in RAM; else empty."""
    begun: bool = False
    """It has states that are not zero."""
    written: tuple[int, int] | None = None
    """Version counter and address after our last update; others mean that someone else wrote."""

    def fits(self, parameter: torch.Tensor, *, amsgrad: bool) -> bool:
        """Return whether ``parameter`` is still what its states were made for."""
        family = self.family
        return (
            parameter.numel() == self.numel
            and parameter.dtype == family.dtype
            and amsgrad == family.amsgrad
        )

    @property
    def written_by_others(self) -> bool:
        """Return whether a 16-bit weight must be compared with its master."""
        return self.written != (self.parameter._version, self.parameter.data_ptr())  # noqa: SLF001

    def remember(self) -> None:
        """Take what is there now for our own writing."""
        self.written = (self.parameter._version, self.parameter.data_ptr())  # noqa: SLF001


class Members:
    """The parameters of one optimizer, the store of their states, and the hooks on them."""

    def __init__(self, placement: Placement, policy: PipelinePolicy) -> None:
        """Begin with nobody; raises for a directory that cannot hold states."""
        self._placement = placement
        self._policy = policy
        # By id: hashing a tensor is a call into Python, a hundred times a step. Members hold the
        # parameters, so no id is used twice.
        self._by_id: dict[int, Member] = {}
        self._hooks: list[Any] = []
        weakref.finalize(self, _remove, self._hooks)
        self.store = StateStore(placement, policy)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._by_id)

    def find(self, parameter: torch.Tensor) -> Member | None:
        """Return the member that ``parameter`` is, or None."""
        return self._by_id.get(id(parameter))

    def get(self, parameter: torch.Tensor) -> Member:
        """Return the member that ``parameter`` is; KeyError where it is none."""
        return self._by_id[id(parameter)]

    def all(self) -> Iterable[Member]:
        """Return every member."""
        return self._by_id.values()

    def attach(self, parameters: Iterable[torch.Tensor], amsgrad: Mapping[int, bool]) -> None:
        """Give states to those of ``parameters`` that have none.

        ``amsgrad`` tells for every parameter of the optimizer, by id, whether it wants that state.
        """
        new = [p for p in parameters if id(p) not in self._by_id]
        if self._by_id and self._by_id.keys().isdisjoint(amsgrad):
            self.renew()  # every parameter was exchanged for another, as accelerate does
        if not new and self._by_id:
            return
        families = [Family(p.dtype, amsgrad[id(p)]) for p in new]
        numbers = self.store.extend([p.numel() for p in new], families)
        for parameter, number, family in zip(new, numbers, families, strict=True):
            states = self.store.views(number)
            views = {name: view.view(parameter.shape) for name, view in states.items()}
            self._by_id[id(parameter)] = Member(parameter, number, family, parameter.numel(), views)
        if self._placement.disk_fraction > 0:
            self._hook(new)

    def differ(self, amsgrad: Mapping[int, bool]) -> bool:
        """Return whether a member has other states than its group wants."""
        members = self._by_id.items()
        return any(amsgrad.get(i, m.family.amsgrad) != m.family.amsgrad for i, m in members)

    def forget_versions(self) -> None:
        """Compare every weight with its master at the next update."""
        for member in self._by_id.values():
            member.written = None

    def renew(self) -> None:
        """Drop all states and begin with an empty store in the same place."""
        self.close()
        self.store = StateStore(self._placement, self._policy)
        self._by_id = {}

    def close(self) -> None:
        """Drop states, buffers, files and hooks. Idempotent."""
        _remove(self._hooks)
        self.store.close()

    def _hook(self, parameters: Iterable[torch.Tensor]) -> None:
        """Start reading when the first gradient of a backward lands."""
        # Weakly: a parameter must not keep the optimizer that it was once given to.
        reads = weakref.WeakMethod(self.store.pipeline.prefetch)

        def start_reading(_: torch.Tensor) -> None:
            prefetch = reads()
            if prefetch is not None:
                prefetch()

        for parameter in parameters:
            register: Any = parameter.register_post_accumulate_grad_hook
            self._hooks.append(register(start_reading))


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()
