"""The exception tree, and what a failed transfer says."""

import errno
import pickle

import pytest

from tensorstow import errors as exported
from tensorstow.base import errors
from tensorstow.base.errors import DirectoryError, OptionError, StowError, TransferError

BUILTINS = {
    "OptionError": ValueError,
    "AbsentError": ImportError,
    "AbsentAttributeError": AttributeError,
    "DTypeError": TypeError,
    "KeywordError": TypeError,
    "BudgetError": ValueError,
    "DirectoryError": OSError,
    "TransferError": OSError,
    "BackendError": OSError,
    "BackwardError": RuntimeError,
    "ForkError": RuntimeError,
    "OptimizerError": RuntimeError,
    "PoisonedError": RuntimeError,
    "RankError": RuntimeError,
    "RemoteError": OSError,
    "LockedError": OSError,
    "StoreFormatError": ValueError,
    "CommitError": OSError,
    "SyncError": OSError,
    "UnlinkedError": OSError,
    "DamageError": OSError,
}


def failed_write(code: int) -> TransferError:
    return TransferError("/nvme/run/states.0", "write", offset=4096, length=1 << 20, errno=code)


def defined_errors() -> dict[str, type[BaseException]]:
    return {
        name: item
        for name, item in vars(errors).items()
        if isinstance(item, type) and issubclass(item, BaseException)
    }


def test_every_error_is_a_stow_error_and_the_builtin_a_caller_would_catch() -> None:
    found = defined_errors()
    assert set(found) == {"StowError", "StoreError", *BUILTINS}
    for name, builtin in BUILTINS.items():
        assert issubclass(found[name], StowError)
        assert issubclass(found[name], builtin)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = errors.__doc__ or ""
    for name, builtin in BUILTINS.items():
        assert f"─ {name} ({builtin.__name__})" in drawn


def test_a_plain_error_prints_its_message_alone() -> None:
    assert str(OptionError("fraction=2")) == "fraction=2"
    assert str(DirectoryError("/x is full")) == "/x is full"


def test_transfer_error_carries_what_was_asked_and_found() -> None:
    error = failed_write(errno.ENOSPC)
    assert (error.path, error.operation) == ("/nvme/run/states.0", "write")
    assert (error.offset, error.length, error.errno) == (4096, 1 << 20, errno.ENOSPC)
    assert error.filename == "/nvme/run/states.0"


def test_transfer_error_says_what_was_asked_found_and_to_do() -> None:
    message = str(failed_write(errno.ENOSPC))
    assert message.startswith("write of 1048576 bytes at offset 4096 of /nvme/run/states.0")
    assert "ENOSPC, No space left on device" in message
    assert message.endswith(failed_write(errno.ENOSPC).advice)


@pytest.mark.parametrize(
    ("code", "word"),
    [
        (errno.ENOSPC, "space"),
        (errno.EIO, "dmesg"),
        (errno.EACCES, "permission"),
        (errno.ENOENT, "gone"),
        (errno.EINVAL, "alignment"),
        (errno.ENOMEM, "ulimit -l"),
        (errno.EROFS, "read-only"),
    ],
)
def test_advice_fits_the_error_number(code: int, word: str) -> None:
    assert word in failed_write(code).advice


def test_an_unknown_number_still_gets_advice() -> None:
    error = failed_write(9999)
    assert "errno 9999" in str(error)
    assert error.advice


def test_errno_zero_is_an_early_end_of_file() -> None:
    error = TransferError("/f", "read", offset=0, length=10, errno=0)
    assert "met the end of the file" in str(error)
    assert "Success" not in str(error)


def test_transfer_error_survives_a_process_boundary() -> None:
    error = failed_write(errno.EIO)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is TransferError
    assert str(copy) == str(error)
    assert (copy.path, copy.offset, copy.errno) == (error.path, error.offset, error.errno)


def test_all_errors_are_exported() -> None:
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, StowError)
    }
    assert set(exported.__all__) == classes
    assert all(getattr(exported, name) is getattr(errors, name) for name in classes)
