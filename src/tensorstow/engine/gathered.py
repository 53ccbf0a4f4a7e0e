"""Gathered weights: made where training can use them, and let go of before they are old.

[Note: Gathered weights] FSDP2 makes the memory of a gathered weight at the first forward and uses
it ever after, and it gathers nothing that is still gathered. Three things follow that are mended
here, by hooks and what FSDP2 offers its users:

* Under inference_mode that memory could never be trained with, nor the views of shards that FSDP2
  takes before: such a forward does both outside of it.
* A unit's dtypes are those of what was trained at its first forward: a unit that was all frozen
  then is asked again once something in it is trained.
* Below stage 3 weights stay gathered behind a forward. Behind one without gradients they would be
  the model's parameters from then on (which have no gradients to clip or drop), and behind any they
  would outlive an update.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tensorstow.engine.units import Unit


class Gathered:
    """Watches the gathered weights of a model that FSDP2 has sharded."""

    def __init__(self, model: nn.Module, units: Iterable[Unit]) -> None:
        """Take ``units`` of ``model`` before they are sharded."""
        self._root = model
        self._names = {id(unit.module): list(unit.parameters) for unit in units}
        self._modules: list[FSDPModule] = []
        self._frozen: dict[int, list[nn.Parameter]] = {}

    def watch(self, optimizer: torch.optim.Optimizer, *, stage: int) -> None:
        """Put the hooks in place, now that the model is sharded."""
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                self._modules.append(module)
                own = [self._root.get_parameter(n) for n in self._names.get(id(module), ())]
                if not any(p.requires_grad for p in own):
                    self._frozen[id(module)] = own
                module.register_forward_pre_hook(self._before_forward, prepend=True)
        if stage < 3:
            self._root.register_forward_hook(self._after_forward)
            optimizer.register_step_pre_hook(self._let_go)

    # A graph would take what is asked here for constants.
    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    def _before_forward(self, module: nn.Module, _: Any) -> None:  # noqa: ANN401  # torch's own
        if not isinstance(module, FSDPModule):
            return
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(mode=False), torch.no_grad():
                if module is self._root:
                    self._root._get_fsdp_state()._lazy_init()  # noqa: SLF001  # nothing public does
                module.unshard()
        elif any(p.requires_grad for p in self._frozen.get(id(module), ())):
            del self._frozen[id(module)]
            module.unshard()

    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    def _after_forward(self, *_: Any) -> None:  # noqa: ANN401
        if not torch.is_grad_enabled():
            self._let_go()

    def _let_go(self, *_: Any) -> None:  # noqa: ANN401
        for module in self._modules:
            module.reshard()
