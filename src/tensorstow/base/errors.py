"""Every error that tensorstow raises on purpose, as a tree of classes.

::

    StowError
    ├── OptionError (ValueError)     an argument that cannot be used
    │   └── KeywordError (TypeError)     a keyword that the function does not have
    ├── AbsentError (ImportError)    a name of another project that has no counterpart here
    ├── AbsentAttributeError (AttributeError)    the same, asked for as an attribute
    ├── DTypeError (TypeError)       a dtype, layout or device that no kernel takes
    ├── BudgetError (ValueError)     a budget too small for the request
    ├── DirectoryError (OSError)     a directory that is missing, read-only, full or in RAM
    ├── TransferError (OSError)      a read or write that the system refused
    ├── RemoteError (OSError)        a bucket or another place that stays unreachable
    ├── BackendError (OSError)       no way of doing I/O works here
    ├── ForkError (RuntimeError)     an object used in a process that inherited it by fork
    ├── PoisonedError (RuntimeError) an object used after a failure that left it half done
    ├── OptimizerError (RuntimeError) a stowed optimizer class raised an error of its own
    ├── BackwardError (RuntimeError) a backward() that the configuration rules out
    ├── RankError (RuntimeError)     other ranks failed, stayed away or did something else
    └── StoreError                   the root of what a store refuses:
        ├── LockedError (OSError)        a store that another process or object holds
        ├── StoreFormatError (ValueError) files that are no store, another run's, or too new
        ├── CommitError (OSError)        a commit that did not happen; the last one is whole
        ├── SyncError (OSError)          the disk may have lost writes: nothing more is committed
        ├── UnlinkedError (OSError)      a store whose files were deleted or moved while open
        └── DamageError (OSError)        bytes on disk that are not those that were written

Each is also the builtin that a caller would catch without knowing this module. A message
says three things: what was asked, what was found, what to do.
"""

import errno as codes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_ADVICE = {
    0: "The file ended early: something else truncated or replaced it. Start from fresh files.",
    codes.ENOSPC: "Free some space on that filesystem, or name a directory on a larger one.",
    codes.EDQUOT: "The disk quota is used up: free some space, or name another directory.",
    codes.EIO: "The device reported a failure: look at `dmesg` and the drive's health before"
    " using this directory again.",
    codes.EACCES: "Give this user read and write permission there, or name another directory.",
    codes.EPERM: "The system forbids it here (a container's policy, or an immutable file):"
    " name another directory.",
    codes.EROFS: "The filesystem is mounted read-only: name a directory on a writable one.",
    codes.ENOENT: "The directory or file is gone: create the directory again and start over.",
    codes.EEXIST: "A file has that name: name another directory.",
    codes.ENOTDIR: "A file is where a directory would have to be: name another directory.",
    codes.EINVAL: "The filesystem refused the size, offset or address, mostly an alignment that"
    " direct I/O does not take there: name a directory on another filesystem.",
    codes.EOPNOTSUPP: "The filesystem cannot do this: name a directory on another one.",
    codes.ENOMEM: "The system is out of memory, or of locked memory (`ulimit -l`): lower the"
    " RAM budget or raise the limit.",
    codes.ELOOP: "A symbolic link is in the way: remove it, or name another directory.",
    codes.EFBIG: "The file would pass the size limit: raise `ulimit -f`, or name a filesystem"
    " that takes larger files.",
    codes.EMFILE: "Too many open files in this process: raise `ulimit -n`.",
    codes.ENFILE: "Too many open files on this machine: raise `fs.file-max`.",
    codes.EAGAIN: "The system is short of resources for the moment: try again with less in flight.",
    codes.EBADF: "The file was closed while a transfer was in flight: keep it open until"
    " everything has completed.",
    codes.ESTALE: "The network filesystem lost the file: name a local directory.",
}
_NO_ADVICE = "Look at `dmesg`, or name another directory."
_LONGEST = 80


def advice_for(errno: int) -> str:
    """Return a sentence about what to do about an error of the system; 0 is the end of a file."""
    return _ADVICE.get(errno, _NO_ADVICE)


def abbreviated(value: object) -> str:
    """Return the ``repr`` of a value for a message: at most some 80 characters of it."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of more digits than Python prints
        text = f"{type(value).__name__} that is too long to print"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


class StowError(Exception):
    """The root: catch this to catch every error of tensorstow."""


class OptionError(StowError, ValueError):
    """An argument has a value that cannot be used."""


class KeywordError(OptionError, TypeError):
    """A function was called with a keyword that it does not have."""


class AbsentError(StowError, ModuleNotFoundError):
    """A name of another project that has no counterpart here."""


class AbsentAttributeError(StowError, AttributeError):
    """The same, asked for as an attribute of a module."""


class DTypeError(StowError, TypeError):
    """A tensor has a dtype, layout or device that no kernel here takes."""


class BudgetError(StowError, ValueError):
    """A budget is smaller than the least that the work needs."""


class DirectoryError(StowError, OSError):
    """A directory is missing, read-only, full, or held in RAM."""


class BackendError(StowError, OSError):
    """No I/O backend works on this machine."""


class ForkError(StowError, RuntimeError):
    """An object was used in a child process that inherited it by fork."""


class PoisonedError(StowError, RuntimeError):
    """An object was used after a failure that left its contents half updated."""


class OptimizerError(StowError, RuntimeError):
    """A class given to StowedOptimizer raised an error of its own, which is the cause of this."""


class BackwardError(StowError, RuntimeError):
    """A backward was begun by a call that lacks what this configuration needs."""


class RankError(StowError, RuntimeError):
    """Other ranks of the run failed, stayed away, or did something else at this point."""


class StoreError(StowError):
    """The root of what a store refuses; one of the classes below is what is raised."""


class LockedError(StoreError, OSError):
    """A store is in use: by another process, or by another object of this one."""


class StoreFormatError(StoreError, ValueError):
    """Files are no store, belong to another run, or were written by a newer version."""


class CommitError(StoreError, OSError):
    """A commit did not happen. The last one before it is whole, and this one may be tried again."""


class SyncError(StoreError, OSError):
    """A sync failed, so it is unknown whether writes are durable; later commits are refused."""


class UnlinkedError(StoreError, OSError):
    """A store's files were deleted or moved while open: its commits could not be found."""

    committed: object = None
    """What was committed in them all the same, when that was found out: a store's Generation."""


class DamageError(StoreError, OSError):
    """Bytes were read that are not those that were written."""


@contextmanager
def named(asked: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise an OSError of the block as DirectoryError, unless it is an error of ours already.

    Args:
        asked: What was requested, of ``path``, as the begin of a sentence.
        path: A file or a directory.
    """
    try:
        yield
    except StowError:
        raise
    except OSError as error:
        code = error.errno or codes.EIO
        subject = error.filename or path
        suffix = "" if os.fspath(subject) == os.fspath(path) else f" ({subject})"
        message = (
            f"{asked} {os.fspath(path)} was requested: {os.strerror(code)}{suffix}."
            f" {advice_for(code)}"
        )
        raise DirectoryError(message) from error


class RemoteError(StowError, OSError):
    """A place that fsspec reaches could not be read or written, in spite of repeats."""


class TransferError(StowError, OSError):
    """A read or write failed in the system, or moved fewer bytes than requested.

    Args:
        path: The file.
        operation: "read", "write", "open" ...
        offset: Of the first byte in the file.
        length: In bytes.
        errno: The system's number; 0 stands for an end of file in the middle of the range: no
            system call failed, yet the bytes are not there.
    """

    path: str
    operation: str
    offset: int
    length: int
    errno: int
    advice: str

    def __init__(
        self,
        path: str | os.PathLike[str],
        operation: str,
        *,
        offset: int,
        length: int,
        errno: int,
    ) -> None:
        self.path = os.fspath(path)
        self.operation = operation
        self.offset = offset
        self.length = length
        self.advice = advice_for(errno)
        reason = f"{_name_of(errno)}, {os.strerror(errno)}" if errno else "the end of the file"
        message = (
            f"{operation} of {length} bytes at offset {offset} of {self.path}"
            f" met {reason}. {self.advice}"
        )
        super().__init__(errno, message, self.path)

    def __str__(self) -> str:
        """Return the sentence alone: OSError would put the number before it and the path after."""
        return str(self.strerror)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by what was observed: OSError would replay three positional arguments."""
        return _transfer_error, (self.path, self.operation, self.offset, self.length, self.errno)


def _transfer_error(
    path: str, operation: str, offset: int, length: int, errno: int
) -> TransferError:
    return TransferError(path, operation, offset=offset, length=length, errno=errno)


def _name_of(errno: int) -> str:
    return codes.errorcode.get(errno, f"errno {errno}")
