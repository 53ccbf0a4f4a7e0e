import pytest

from tensorstow.io import transfer_log
from tensorstow.io.transfer_log import LoggedTransfer, TransferLog


def test_a_log_keeps_the_first_entries_and_counts_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer_log, "_MOST", 2)
    log = TransferLog()
    for start in range(5):
        log.add(LoggedTransfer("link up", "link up", start, start + 1))
    assert [transfer.start for transfer in log.transfers] == [0, 1]
    assert log.dropped == 3
