"""Binds this rank's native threads to its cores, and memory to its NUMA node.

[Note: NUMA binding] Only the library's own threads are bound, each when it starts; the threads
of the caller, torch and the interpreter are not. A process is one rank and has one share. Running
threads keep their binding when the share changes.
"""

import logging
import os
from typing import Literal

import tensorstow._native as _native
from tensorstow.base.core_share import CoreShare
from tensorstow.base.errors import OptionError
from tensorstow.base.nodes import read_nodes, within
from tensorstow.io.local_share import fair_threads, share_here

logger = logging.getLogger("tensorstow")

NodeChoice = int | Literal["auto", "any"]
"""A NUMA node's number; ``auto``: this rank's, near its accelerator; ``any``: no restriction."""


class _Process:
    """The binding of the process."""

    asked: NodeChoice = "auto"
    share: CoreShare | None = None
    is_warned = False


def bind_threads(node: NodeChoice = "auto") -> CoreShare:
    """Bind native threads that start from now on to this rank's share of the cores; return it.

    An explicit ``node`` holds for the process until another one is given. Raises OptionError if
    this process has no core on the node.
    """
    asked = _Process.asked if node == "auto" else node
    if asked == "auto":
        share = share_here()
    elif asked == "any":
        share = CoreShare(fair_threads())
    else:
        _check(asked)
        share = share_here(asked)
    _native.set_thread_cores(list(share.cores))
    _Process.asked, _Process.share = asked, share
    return share


def prefer_own_node(address: int, nbytes: int) -> None:
    """Allocate pages that are touched from now on on this rank's node, if it has a single one."""
    share = _Process.share or bind_threads()
    if len(share.nodes) != 1:
        return
    (node,) = share.nodes
    error = _native.prefer_node(address, nbytes, node)
    if error and not _Process.is_warned:
        _Process.is_warned = True
        logger.warning(
            "Memory could not be bound to NUMA node %d (mbind: %s): it comes from the node of the"
            " thread that touches it first. In containers, --cap-add SYS_NICE lets it.",
            node,
            os.strerror(error),
        )


def _check(node: int) -> None:
    nodes = within(read_nodes(), frozenset(os.sched_getaffinity(0)))
    if node not in {n.number for n in nodes}:
        names = ", ".join(str(n.number) for n in nodes) or "none that the system tells of"
        message = (
            f"node={node} was given, and the NUMA nodes with cores that this process may run on"
            f" are: {names}. Name one of them, or leave node out (`tensorstow doctor` shows them)."
        )
        raise OptionError(message)
