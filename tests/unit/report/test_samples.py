import time
from itertools import pairwise

from tensorstow.report.samples import MemorySampler, Samples
from tensorstow.report.spans import Sample


def test_samples_are_bounded_and_cover_the_whole_time() -> None:
    samples = Samples(most=8)
    for moment in range(1000):
        samples.add(Sample(float(moment), moment))
    times = [sample.time for sample in samples.kept]
    assert 4 <= len(times) <= 8
    assert times[0] == 0.0
    steps = {later - earlier for earlier, later in pairwise(times)}
    assert len(steps) == 1  # regular
    assert times[-1] >= 1000 - 2 * steps.pop()


def test_process_and_named_counts_are_sampled_in_a_thread() -> None:
    held = iter(range(1000))
    with MemorySampler({"pool": lambda: next(held)}) as sampler:
        time.sleep(0.3)
    pool, process = sampler.held["pool"].kept, sampler.held["process"].kept
    assert len(pool) == len(process) >= 4
    assert [sample.nbytes for sample in pool] == list(range(len(pool)))
    assert all(sample.nbytes > 1 << 20 for sample in process)
