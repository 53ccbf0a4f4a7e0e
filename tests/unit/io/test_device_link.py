import pytest
import torch

from tensorstow.io import device_link
from tensorstow.io.device_link import CopyQueue, PlainLink, StreamLink, is_remote, open_link


def test_without_an_accelerator_nothing_is_remote() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is one: tests/gpu")
    assert not is_remote(torch.zeros(3))
    assert not is_remote(torch.zeros(3, device="meta"))


def test_what_the_current_accelerator_has_is_remote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        device_link, "_accelerator", lambda: "meta"
    )  # any device that is not the CPU
    assert is_remote(torch.zeros(3, device="meta"))
    assert not is_remote(torch.zeros(3))


def test_a_link_to_the_cpu_copies_at_once_and_counts() -> None:
    link = open_link(torch.device("cpu"))
    assert isinstance(link, PlainLink)
    host, away = torch.zeros(6), torch.arange(6.0)
    mark = link.d2h([(host[:4], away[:4]), (host[5:], away[5:])], [link.record_event()])
    assert mark.query()
    assert host.tolist() == [0, 1, 2, 3, 0, 5]
    assert (link.bytes_down, link.bytes_up) == (20, 0)
    mark = link.h2d([(away[:1], host[3:4])])
    mark.synchronize()
    link.join(mark)
    link.synchronize()
    assert away.tolist() == [3, 1, 2, 3, 4, 5]
    assert (link.bytes_down, link.bytes_up) == (20, 4)


def test_another_link_s_event_is_refused() -> None:
    link = StreamLink(torch.device("cpu"))  # it takes no other events either
    with pytest.raises(TypeError, match="event of another link"):
        link.d2h([], [PlainLink().record_event()])


class Copy:
    """The event of a copy that ends when somebody waits for it, or sets ``is_over``."""

    is_over = False

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.is_over = True


def test_complete_copies_come_out_as_long_as_the_oldest_is() -> None:
    queue: CopyQueue[int] = CopyQueue()
    assert queue.oldest is None
    copies = [Copy() for _ in range(4)]
    for number, copy in enumerate(copies):
        queue.add(number, copy)
    copies[0].is_over = copies[2].is_over = True
    assert list(queue.pop_complete()) == [0]
    assert (len(queue), queue.oldest) == (3, copies[1])
    assert queue.pop() == 1
    assert copies[1].is_over
    assert list(queue.pop_complete()) == [2]
    assert not copies[3].is_over
    queue.clear()
    assert not queue
