"""``deepspeed.ops.op_builder``: nothing is built, ``load`` returns what is there."""

from types import SimpleNamespace

from tensorstow.deepspeed.absent import refuse_names
from tensorstow.deepspeed.ops.aio_handle import AioHandle

__all__ = ["AsyncIOBuilder"]


class AsyncIOBuilder:
    """Where scripts look for ``aio_handle``."""

    NAME = "async_io"

    def is_compatible(self, verbose: bool = False) -> bool:  # noqa: FBT001, FBT002  # upstream's
        """Return whether files can be read and written: on every machine.

        Args:
            verbose: Not used.

        Returns:
            True.
        """
        del verbose
        return True

    def load(self, verbose: bool = True) -> SimpleNamespace:  # noqa: FBT001, FBT002  # upstream's
        """Return the functions.

        Args:
            verbose: Not used.

        Returns:
            An object with ``aio_handle``.
        """
        del verbose
        return SimpleNamespace(aio_handle=AioHandle)


__getattr__ = refuse_names(
    __name__, "the native core is built with the package, and optimizers are in deepspeed.ops.adam"
)
