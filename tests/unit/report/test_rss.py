import mmap

import pytest

from tensorstow.report.rss import peak_bytes, resident_bytes, return_freed_memory

SIZE = 64 << 20


@pytest.mark.usefixtures("garbage_apart")
def test_touched_memory_is_seen_now_and_at_the_peak() -> None:
    before = resident_bytes()
    with mmap.mmap(-1, SIZE) as memory:
        for offset in range(0, SIZE, mmap.PAGESIZE):
            memory[offset] = 1
        assert resident_bytes() - before > 0.9 * SIZE
    peak = peak_bytes()
    assert peak is None or peak >= before + 0.9 * SIZE
    return_freed_memory()
    assert resident_bytes() - before < 0.5 * SIZE
