from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from ranks.pool import Ranks
from tensorstow.base.errors import OptionError
from tensorstow.colossalai.cluster import DistCoordinator


def facts() -> dict[str, Any]:
    """Return what the coordinator says of this rank, and in which order ranks ran."""
    here = DistCoordinator()
    ran = here.on_master_only()(lambda: "ran")()
    store = dist.distributed_c10d._get_default_store()
    with here.priority_execution(executor_rank=1):
        turn = store.add("turn", 1)
    here.block_all()
    return {
        "place": (here.rank, here.world_size, here.local_rank),
        "master": here.is_master(),
        "last": here.is_last_process(),
        "ran": ran,
        "turn": turn,
    }


def test_two_ranks(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).run(facts)
    assert first == {
        "place": (0, 2, -1),
        "master": True,
        "last": False,
        "ran": "ran",
        "turn": first["turn"],
    }
    assert second["place"] == (1, 2, -1)
    assert (second["master"], second["last"], second["ran"]) == (False, True, None)
    assert first["turn"] == second["turn"] + 1


def test_one_process_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    here = DistCoordinator()
    assert (here.rank, here.world_size, here.local_rank) == (0, 1, 0)
    assert here.is_master()
    assert here.is_node_master()
    assert here.is_last_process()
    with here.priority_execution():
        here.print_on_master("one")
    here.print_on_node_master("two")
    here.destroy()
    assert capsys.readouterr().out == "one\ntwo\n"


def test_the_nodes_master_is_the_launchers_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match="LOCAL_RANK is not set"):
        DistCoordinator().is_node_master()
