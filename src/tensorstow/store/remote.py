"""Objects in buckets and other places that fsspec reaches."""

import importlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tensorstow.base.errors import OptionError, RemoteError
from tensorstow.store.schema import MANIFEST_NAME

logger = logging.getLogger("tensorstow")

_T = TypeVar("_T")
_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds before a request is repeated."""
_OBJECT_STORES = frozenset(
    ["s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "memory"]
)
"""Where a write is whole or not there; elsewhere it is renamed when it is whole."""


def address_of(place: str | Path) -> "Remote | None":
    """Return what a command's argument reaches: an address, or a folder of copies; else None."""
    if isinstance(place, str):
        return Remote(place)
    is_run = os.path.exists(place / MANIFEST_NAME)  # noqa: PTH110  # False for a name too long
    return Remote(str(place)) if not is_run and os.path.isdir(place / "objects") else None  # noqa: PTH112


class Remote:
    """The objects under an address. Any thread may call any method."""

    def __init__(self, url: str) -> None:
        """Reach ``url``, such as "s3://bucket/run"; raise OptionError if nothing here can."""
        if not url:
            message = f"{url!r} was named for a snapshot: name a folder, or an address."
            raise OptionError(message)
        if "://" not in url and "::" not in url:  # the same, whatever the working directory is
            url = str(Path(url).expanduser().absolute())
        self.url = url.rstrip("/")
        try:
            fsspec: Any = importlib.import_module("fsspec")  # it comes with torch
            self._files, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            message = (
                f"{url!r} was named for a snapshot, and fsspec cannot reach it ({error}). Name a"
                ' folder, or an address such as "s3://bucket/run" whose package is installed'
                " (s3fs, gcsfs, adlfs)."
            )
            raise OptionError(message) from error
        protocol = self._files.protocol
        names = {protocol} if isinstance(protocol, str) else set(protocol)
        self._is_whole_at_once = bool(names & _OBJECT_STORES)

    def get(self, name: str) -> bytes | None:
        """Return an object's bytes, or None if it does not exist."""

        def read() -> bytes | None:
            try:
                data: bytes = self._files.cat_file(self._path(name))
            except FileNotFoundError:
                return None
            return data

        return self._repeated(f"The read of {name}", read)

    def put(self, name: str, data: bytes) -> None:
        """Write an object; a reader finds all of it or nothing."""
        path = self._path(name)

        def write() -> None:
            if self._is_whole_at_once:
                self._files.pipe_file(path, data)
                return
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            part = f"{path}.{uuid.uuid4().hex}.part"
            try:
                self._files.pipe_file(part, data)
                self._files.mv(part, path)
            except BaseException:
                # The error of the write is raised, whatever becomes of the part.
                with suppress(Exception):
                    self._files.rm_file(part)
                raise

        self._repeated(f"The write of {name}", write)

    def list(self, folder: str) -> dict[str, int]:
        """Return the names of the objects in ``folder`` and their bytes."""
        # fsspec keeps lists of folders, and other processes write there too.
        self._files.invalidate_cache()

        def find() -> dict[str, int]:
            try:
                files: Mapping[str, Any] = self._files.find(self._path(folder), detail=True)
            except FileNotFoundError:
                return {}
            begin = len(self._path(folder)) + 1
            return {path[begin:]: int(info["size"] or 0) for path, info in files.items()}

        return self._repeated(f"The list of {folder}", find)

    def remove(self, name: str, *, repeats: bool = True) -> None:
        """Remove an object, if there is one; ``repeats``: repeat the request after errors."""

        def remove() -> None:
            with suppress(FileNotFoundError):
                self._files.rm_file(self._path(name))

        self._repeated(f"The removal of {name}", remove, None if repeats else ())

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _repeated(
        self, request: str, act: Callable[[], _T], pauses: Sequence[float] | None = None
    ) -> _T:
        """Return the result of ``act``, repeated after errors; raise RemoteError after the last.

        ``pauses``: seconds before each repeat; None: the usual ones.
        """
        for pause in (*(_PAUSES if pauses is None else pauses), None):
            try:
                return act()
            # A repeat does not change these.
            except (PermissionError, NotADirectoryError) as error:
                self._refuse(request, error)
            except Exception as error:  # noqa: BLE001  # each store raises errors of its own
                if pause is None:
                    self._refuse(request, error)
                logger.warning("%s at %s failed and is repeated: %r", request, self.url, error)
                time.sleep(pause)
        # The last turn returns or raises an error.
        raise AssertionError

    def _refuse(self, request: str, error: Exception) -> NoReturn:
        if "TimeTooSkewed" in f"{error!r}{error.__cause__!r}":
            advice = "This machine's clock is wrong: set it"
        elif isinstance(error, PermissionError):
            advice = "Check that these credentials may read, write, list and delete"
        else:
            advice = "Check the address, the credentials and the network"
        message = (
            f"{request} at {self.url} failed: {error!r}. {advice}, then push or pull again: it goes"
            " on where it stopped."
        )
        raise RemoteError(message) from error
