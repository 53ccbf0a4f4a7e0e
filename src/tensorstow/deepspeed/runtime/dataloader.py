"""``deepspeed.runtime.dataloader``: a loader that begins again."""

from collections.abc import Iterable
from typing import Any, Self

__all__ = ["RepeatingLoader"]


class RepeatingLoader:
    """An iterator over a loader that begins again where the loader ends.

    Args:
        loader: What is iterated over, again and again.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        """Begin; the class documents the arguments."""
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Self:
        """Return itself."""
        return self

    def __next__(self) -> Any:  # noqa: ANN401  # the loader's
        """Return the next batch; StopIteration where the loader has none at all."""
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)
