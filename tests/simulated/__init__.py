"""A simulated accelerator: torch's device "simulated", with memory and time of its own.

Importing this package registers it (and builds it, the first time). It is a PrivateUse1 backend
that behaves as CUDA does where offload can go wrong, on any machine with a C++ compiler:

* Its addresses are mapped for nobody: host code that reads them is stopped by a segmentation fault.
  Work uses the same bytes at another address. Memory is filled with NaN when it is freed. There are
  statistics and a limit (``set_memory_limit``); past it, an allocation is torch.OutOfMemoryError.
* A stream is a thread that works in order. Operators return at once: the meta device foretells
  what they return, the CPU's kernels compute it. Where elements decide (``item``), the host waits.
* Copies to and from the host take ``bytes / rate``, one after the other in each direction, and a
  delay. A source that is written under way arrives as NaN. Copies of pageable memory are
  synchronous, as CUDA's are. Pinned memory that is freed is unmapped once no copy uses it; host
  memory can be registered, as by cudaHostRegister.
* Products of matrices take what ``set_compute`` says. ``take_trace()`` tells what was when, by
  these times alone: this machine's own work for it delays nothing but what waits on the host.
* The delays of copies and operators are drawn between none and twice what is set, by a seed.
* ``take_hazards()``: each piece of work that is given to a stream is compared, by vector clocks,
  with what touched the same memory before. Does an event, the same stream, or a wait of the host
  put it behind that? The answer does not depend on timing.
* ``take_counts()``: bytes over the link in each direction, and how often the host has waited.
* Collectives of FSDP2, and all-to-all: "simulated_gloo", gloo in the thread of a stream.
  torch.compile in "eager" and "aot_eager". torch.autocast casts what it casts on CUDA.

It has one device in a process, no graphs, and no memory that processes share.
What the host does to pinned memory is not in the vector clocks: lateness alone shows that.

``pytest -p simulated.plugin`` runs tests on it and lets hazards fail them. Environment:
SIMULATED_COPY_US (delay of a copy, 1000), SIMULATED_LINK_GBS (5), SIMULATED_OP_US (delay of an
operator, 0), SIMULATED_MEMORY_MIB (4096), SIMULATED_SEED (0).
"""

import atexit
import types
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch._meta_registrations  # what operators return is asked of the meta device
import torch.distributed as dist

from simulated.build import load

DEVICE = "simulated"
BACKEND = "simulated_gloo"

torch.utils.rename_privateuse1_backend(DEVICE)
native: Any = load()

take_hazards = native.take_hazards
"""Return what was wrong with the order of work since the last call, as texts."""
take_counts = native.take_counts
"""Return {"bytes_down", "bytes_up", "host_waits"} since the last call."""
busy = native.busy
"""Let the current stream do nothing for so many seconds."""
hold = native.hold
"""Hold the current stream up until ``release()`` of what is returned, or for so many seconds at
most; ``release()`` returns whether it was held until then."""
set_delays = native.set_delays
"""Set the delay of a copy in s, the rate of the link in bytes/s, the delay of an operator in s."""
set_compute = native.set_compute
"""Set the seconds that a product of matrices takes for each of its 2 m n k operations."""
start_trace = native.start_trace
"""Begin a log of what takes its time."""
take_trace = native.take_trace
"""Return the log: (stream, name, start, stop, bytes), by ``time.monotonic()``; stream -1: the host
waited."""
set_memory_limit = native.set_memory_limit
"""Set how many bytes the device has."""
set_pinned_limit = native.set_pinned_limit
"""Set how many bytes of host memory may be registered."""
registered_bytes = native.registered_bytes
"""Return how many are."""


class _Runtime:
    """What ``cudart()`` of CUDA's module returns, as far as host memory goes."""

    cudaHostRegister = staticmethod(native.register_host)  # noqa: N815
    cudaHostUnregister = staticmethod(native.unregister_host)  # noqa: N815


def check_order() -> None:
    """Wait for all work; raise AssertionError if any since the last take_hazards() was wrong."""
    native.synchronize()
    found = take_hazards()
    first = "\n".join(sorted(set(found))[:6])
    assert not found, f"{len(found)} hazards, first:\n{first}"


class _Device(types.ModuleType):
    """``torch.simulated``: what torch asks of the module of a device."""

    _initialized = True  # else checkpoints leave the generator's state out

    @staticmethod
    def Stream(device: object = None, priority: int = 0) -> torch.Stream:  # noqa: N802
        del device
        return torch.Stream(DEVICE, priority=priority)

    @staticmethod
    def Event(*, enable_timing: bool = False) -> torch.Event:  # noqa: N802
        return torch.Event(DEVICE, enable_timing=enable_timing)

    @staticmethod
    def cudart() -> _Runtime:
        return _Runtime()

    @staticmethod
    def is_available() -> bool:
        return not native.is_in_bad_fork()

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return bool(native.is_in_bad_fork())

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def set_device(device: object) -> None:
        del device

    @staticmethod
    def synchronize(device: object = None) -> None:
        del device
        native.synchronize()

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @property
    def default_generators(self) -> tuple[torch.Generator]:
        return (native.default_generator(),)

    @staticmethod
    @contextmanager
    def stream(stream: torch.Stream | None) -> Iterator[None]:
        if stream is None:
            yield
        else:
            with stream:
                yield

    @staticmethod
    @contextmanager
    def device(device: object) -> Iterator[None]:
        del device
        yield

    @staticmethod
    def get_rng_state(device: object = None) -> torch.Tensor:
        del device
        state: torch.Tensor = native.default_generator().get_state()
        return state

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: object = None) -> None:
        del device
        native.default_generator().set_state(state)

    @staticmethod
    def manual_seed(seed: int) -> None:
        native.default_generator().manual_seed(seed)

    manual_seed_all = manual_seed
    current_stream = staticmethod(torch.accelerator.current_stream)
    set_stream = staticmethod(torch.accelerator.set_stream)
    empty_cache = staticmethod(torch.accelerator.empty_cache)
    memory_allocated = staticmethod(torch.accelerator.memory_allocated)
    max_memory_allocated = staticmethod(torch.accelerator.max_memory_allocated)


def _collectives(store: dist.Store, rank: int, size: int, timeout: timedelta) -> object:
    gloo = dist.ProcessGroupGloo(dist.PrefixStore(BACKEND, store), rank, size, timeout=timeout)
    return native.Collectives(gloo, rank, size)


torch._register_device_module(DEVICE, _Device(f"torch.{DEVICE}"))
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
dist.Backend.register_backend(BACKEND, _collectives, devices=[DEVICE])
atexit.register(native.synchronize)
