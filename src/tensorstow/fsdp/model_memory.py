"""The memory that a stowed model gives back at ``optimizer.release()`` ([Note: Released])."""

import weakref
from functools import partial
from typing import Any

from torch import nn

from tensorstow.activations.offload import activations_of
from tensorstow.base.errors import OptionError
from tensorstow.base.sizes import format_bytes
from tensorstow.fsdp.full_tensors import resharded
from tensorstow.fsdp.h2d_prefetch import h2d_prefetcher_of
from tensorstow.fsdp.module_hooks import records_of
from tensorstow.fsdp.stowed_parameter import storage_of
from tensorstow.memory.buffer_pool import BufferPool, PooledBuffer
from tensorstow.step.call_lock import refuse_released
from tensorstow.tensors.dtensor import to_local


class ModelMemory:
    """Gathered weights, copies on the device, and buffers of weights on disk."""

    def __init__(self, model: "weakref.ref[nn.Module]") -> None:
        """Hold the model weakly, as its optimizer does."""
        self._model = model
        self._capacities: dict[BufferPool, int] = {}
        """The bytes that pools had before they were released."""
        self._hooks: list[Any] = []

    def check_release(self, *, host: bool) -> None:
        """Raise OptionError in the middle of accumulation, or if weights cannot leave."""
        model = self._alive()
        for _, record in records_of(model.modules()):
            # FSDP2 makes the unsharded parameter at its first all-gather.
            unsharded = getattr(record, "_unsharded_param", None)
            if record.unsharded_accumulated_grad is not None or (
                unsharded is not None and unsharded.grad is not None
            ):
                message = (
                    "release() was called between micro-batches, whose gradients are not reduced"
                    " yet: take all of the step, then call step() and zero_grad() first."
                )
                raise OptionError(message)
        # Count the weights that cannot leave, by the memory that they live in.
        on_device = on_host = 0
        codes: dict[PooledBuffer, int] = {}
        for parameter in resharded(model).parameters():
            storage, local = storage_of(parameter), to_local(parameter)
            if storage is None and local.device.type != "cpu":
                on_device += local.nbytes
            elif parameter.ndim and (storage is None or storage.pager is None):
                on_host += local.nbytes
            elif storage is not None and storage.pager is not None and storage.pager.decoder:
                codes[storage.pager] = storage.pager.decoder.held_bytes
        on_host += sum(codes.values())
        if on_device:
            message = (
                f"release() was called, and {format_bytes(on_device)} of weights live on the"
                ' device, from which they are not moved: place them by Plan(parameters="host") or'
                ' "disk", or parameter_units=, and they are copied there for their use alone.'
            )
            raise OptionError(message)
        if host and on_host:
            message = (
                f"release(host=True) was called, and {format_bytes(on_host)} of weights live in"
                ' CPU memory, from which they are not moved: place them by Plan(parameters="disk");'
                " or call release(), for the device alone."
            )
            raise OptionError(message)
        saved = sum(count.host_bytes for count in activations_of(model))
        if host and saved:
            message = (
                f"release(host=True) was called, and {format_bytes(saved)} of activations wait for"
                " backward: call it after backward, or drop the loss."
            )
            raise OptionError(message)

    def release(self, *, host: bool) -> None:
        """Reshard, discard copies on the device, and evict weights on disk from ``host`` memory."""
        model = resharded(self._alive())
        prefetcher = h2d_prefetcher_of(model)
        if prefetcher is not None:
            prefetcher.discard()
            prefetcher.buffers.free()
        for parameter in model.parameters() if host else ():
            storage = storage_of(parameter)
            if storage is not None and storage.pager is not None:
                # A unit that FSDP2 has gathered ahead and not used is still pinned.
                storage.unpin_after_copy()
                pool = storage.pager.pool
                # A second release() finds 0 here, and wake() restores what the first one found.
                self._capacities.setdefault(pool, pool.memory.capacity)
        for pool in self._capacities:
            pool.resize(0, least=0)
        if not self._hooks:
            self._refuse_computing(model)

    def wake(self) -> None:
        """Let forwards run, and pools hold as much as before."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for pool, capacity in self._capacities.items():
            pool.resize(capacity)
        self._capacities.clear()

    def _refuse_computing(self, model: nn.Module) -> None:
        """Refuse forwards from now on, and backwards of those that were before."""
        forward = partial(refuse_released, "A forward")
        backward = partial(refuse_released, "A backward")
        for module in model.modules():
            self._hooks.append(module.register_forward_pre_hook(forward, prepend=True))
        for parameter in model.parameters():
            if parameter.requires_grad:
                hooked: Any = parameter
                self._hooks.append(hooked.register_post_accumulate_grad_hook(backward))

    def _alive(self) -> nn.Module:
        """Return the model, or one without parameters if it was dropped."""
        model = self._model()
        return nn.Module() if model is None else model
