"""Checks of what is loaded: that a file can be read, and that it is of this model."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tensorstow.base.errors import OptionError, StoreFormatError, StowError


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise StoreFormatError for what damaged bytes raise in the block, which is any error."""
    try:
        yield
    except (OSError, StowError, MemoryError):
        raise
    except Exception as error:
        message = (
            f"{path} cannot be read: it is damaged or cut short ({error!r}). Load another"
            " checkpoint."
        )
        raise StoreFormatError(message) from error


def refuse_other_names(
    source: object, saved: Iterable[str], own: Iterable[str], keyword: str
) -> None:
    """Raise OptionError for names that a checkpoint lacks or has more; ``keyword`` allows them."""
    missing, unexpected = set(own) - set(saved), set(saved) - set(own)
    if missing or unexpected:
        message = (
            f"{source} is of another model: it lacks {sorted(missing)} and also has"
            f" {sorted(unexpected)}. Pass {keyword}=False to load what both have."
        )
        raise OptionError(message)


def refuse_other_shape(source: object, name: str, saved: Sequence[int], own: Sequence[int]) -> None:
    """Raise OptionError if a weight has another shape in a checkpoint than in the model."""
    if tuple(saved) != tuple(own):
        message = (
            f"{name} is {tuple(saved)} in {source} and {tuple(own)} in the model: it is of another"
            " model."
        )
        raise OptionError(message)
