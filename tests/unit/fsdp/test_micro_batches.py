"""Stage 1: the last micro-batch reduces, and a step without it is refused."""

from ranks.pool import Ranks
from ranks.stowed import incomplete


def test_a_step_before_the_last_micro_batch_is_refused(ranks: "Ranks") -> None:
    for message in ranks(1).run(incomplete):
        assert "after 1 of accumulation_steps=2" in message
