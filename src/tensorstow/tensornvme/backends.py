"""TensorNVMe's names of backends, and the backend that serves each."""

import logging

from tensorstow.base.errors import OptionError
from tensorstow.io.engine import BackendChoice, choose_backend

logger = logging.getLogger("tensorstow")

_SERVED_BY = {"uring": "uring", "aio": "uring", "pthread": "threads"}
_NO_AIO = "Linux AIO is not supported; io_uring is its successor"


def choose_tensornvme_backend(backend: str | None) -> BackendChoice:
    """Return the backend that serves TensorNVMe's name of one; None: the best one."""
    if backend is None:
        return choose_backend()
    if backend not in _SERVED_BY:
        message = f"backend={backend!r} was requested. Give one of {', '.join(_SERVED_BY)}."
        raise OptionError(message)
    choice = choose_backend(_SERVED_BY[backend])
    if backend == "aio":
        choice = BackendChoice(choice.name, (("aio", _NO_AIO), *choice.refused))
    logger.info("TensorNVMe's backend %s is served by %s", backend, choice)
    return choice
