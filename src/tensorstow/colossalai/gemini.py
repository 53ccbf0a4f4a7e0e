"""The model and optimizer of Gemini's plugin, whose state dicts are whole and on rank 0."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any

import torch.distributed as dist
from torch import nn

from tensorstow.base.sizes import parts_within
from tensorstow.colossalai.interface import ModelWrapper, OptimizerWrapper
from tensorstow.doorkit.keyword_table import checks_keywords, refused
from tensorstow.fsdp.full_tensors import whole_weights
from tensorstow.fsdp.sharding import from_every_rank, host_group, rank_here

_SHARDED = refused("parameters are sharded. state_dict() of model.unwrap() has them", "keep_vars")


class GeminiModel(ModelWrapper):
    """A placed model whose parameters have the module's own names.

    ``state_dict`` returns whole tensors: call it on every rank. The arguments are those of
    ``ModelWrapper``.
    """

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the module's parameters by its own names."""
        yield from self.module.named_parameters(*args, **kwargs)

    @checks_keywords(_SHARDED)
    def state_dict(  # type: ignore[override]  # upstream's signature
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,  # noqa: ARG002  # upstream's
        only_rank_0: bool = True,
    ) -> dict[str, Any]:
        """Return whole weights and persistent buffers; collective.

        Args:
            destination: What they are put into. Default: None, a new dict.
            prefix: Is put before each name.
            only_rank_0: Whether the other ranks have empty tensors in place of the weights.

        Returns:
            Tensors in host memory by the module's names, in the parameters' dtype. One rank alone
            has the memory of its parameters, as of ``torch.nn.Module.state_dict``.
        """
        weights: dict[str, Any] = OrderedDict() if destination is None else destination
        for name, values in whole_weights(self.module):
            weights[prefix + name] = values if _keeps(only_rank_0) else values.new_empty(0)
        return weights

    @checks_keywords(_SHARDED)
    def state_dict_shard(
        self,
        prefix: str = "",
        keep_vars: bool = False,  # noqa: ARG002  # upstream's
        max_shard_size: float = 1024,
        only_rank_0: bool = True,
    ) -> Iterator[tuple[dict[str, Any], float]]:
        """Yield what ``state_dict`` returns in parts; collective.

        Args:
            prefix, only_rank_0: As of ``state_dict``.
            max_shard_size: The largest part in MiB; a larger tensor is a part of its own.

        Yields:
            A part, and its size in MiB.
        """
        sized = (  # gathered one after the other
            (prefix + name, v if _keeps(only_rank_0) else v.new_empty(0), v.nbytes / 2**20)
            for name, v in whole_weights(self.module)
        )
        # map() holds no part while the next one is gathered.
        yield from map(_with_size, filter(None, parts_within(sized, max_shard_size, itemgetter(2))))

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,  # torch's
        assign: bool = False,
    ) -> Any:
        """Load whole weights by the module's names; call it on every rank with all of them.

        Returns:
            The names that were missing and those that were not expected.
        """
        return self.module.load_state_dict(state_dict, strict, assign)


class GeminiStates(OptimizerWrapper):
    """An optimizer over what Gemini has placed, whose state dict is on rank 0.

    The arguments are those of ``OptimizerWrapper``.
    """

    def state_dict(self, only_rank_0: bool = True) -> dict[str, Any]:
        """Return whole states, and the loss scale's under fp16; collective.

        Args:
            only_rank_0: Whether the other ranks have an empty dict in place of each parameter's
                states.

        Returns:
            What torch's Adam would return; "scaler" is the loss scale's state.
        """
        return self.gathered_state_dict(keeps=_keeps(only_rank_0))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load whole states; call it on every rank, with all of them or with those of its own.

        Args:
            state_dict: What ``state_dict()`` returned on this rank, or torch's Adam saved.
        """
        super().load_state_dict({**state_dict, "state": _from_rank_0(state_dict["state"])})


def _from_rank_0(states: Mapping[int, Mapping[str, Any]]) -> Mapping[int, Mapping[str, Any]]:
    """Return rank 0's states if ``only_rank_0`` left a rank without any, else this rank's."""
    group = host_group()
    # Asked on every rank: all take part in the broadcasts below, or none.
    if group is None or not any(from_every_rank(any(not entry for entry in states.values()))):
        return states
    broadcast = {}
    for index, entry in states.items():
        received = [entry]
        dist.broadcast_object_list(received, 0, group)
        broadcast[index] = received[0]
    return broadcast


def _with_size(part: list[tuple[str, Any, float]]) -> tuple[dict[str, Any], float]:
    return OrderedDict((name, values) for name, values, _ in part), sum(n for *_, n in part)


def _keeps(only_rank_0: bool) -> bool:
    return not (only_rank_0 and rank_here() > 0)
