"""``deepspeed.ops.op_builder``: nothing is built, ``load`` returns what exists."""

from tensorstow.base.absent_names import refuse_names
from tensorstow.base.errors import AbsentError
from tensorstow.deepspeed.ops.aio import AsyncIOBuilder

__all__ = ["AsyncIOBuilder", "CPUAdamBuilder", "FusedAdamBuilder"]


class CPUAdamBuilder:
    """What scripts load before ``initialize``, to have upstream's Adam compiled."""

    NAME = "cpu_adam"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return True: the CPU updates on every machine."""
        del verbose
        return True

    def load(self, verbose: bool = True) -> "PackagedKernels":
        """Return the kernels, which need not be compiled."""
        del verbose
        return PackagedKernels()


class FusedAdamBuilder(CPUAdamBuilder):
    """The same for ``FusedAdam``."""

    NAME = "fused_adam"


class PackagedKernels:
    """The kernels of this package: their names are those of ``deepspeed.ops.adam``."""

    def __getattr__(self, name: str) -> object:
        """Refuse a name of upstream's extension."""
        if name.startswith("__"):  # what Python itself looks for
            raise AttributeError(name)
        message = (
            f"{name} is a function of upstream's extension: here deepspeed.ops.adam has the"
            " optimizers, and calls its kernels itself."
        )
        raise AbsentError(message)


__getattr__ = refuse_names(
    __name__, "the native core is built with the package, and optimizers are in deepspeed.ops.adam"
)
