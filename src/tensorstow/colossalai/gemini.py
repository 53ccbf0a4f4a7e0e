"""The model and optimizer of Gemini's plugin, whose state dicts are whole and on rank 0."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.colossalai.interface import ModelWrapper, OptimizerWrapper
from tensorstow.fsdp.full_tensors import whole_weights
from tensorstow.fsdp.sharding import host_group


class GeminiModel(ModelWrapper):
    """A placed model whose parameters have the module's own names.

    ``state_dict`` returns whole tensors: call it on every rank.

    Args:
        module: The placed module.
        outputs_fp32: Whether floating point outputs are cast to fp32.
        inputs_dtype: What floating point inputs are cast to. Default: None, they are not.
    """

    def named_parameters(
        self,
        *args: Any,  # noqa: ANN401  # torch's
        **kwargs: Any,  # noqa: ANN401
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the module's parameters by its own names.

        Args:
            args: As of ``torch.nn.Module.named_parameters``.
            kwargs: As of ``torch.nn.Module.named_parameters``.

        Yields:
            Names and parameters.
        """
        yield from self.module.named_parameters(*args, **kwargs)

    def state_dict(  # type: ignore[override]  # upstream's signature
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,  # noqa: FBT001, FBT002  # upstream's
        only_rank_0: bool = True,  # noqa: FBT001, FBT002
    ) -> dict[str, Any]:
        """Return whole weights and persistent buffers; collective.

        Args:
            destination: What they are put into. Default: None, a new dict.
            prefix: Is put before each name.
            keep_vars: Refused: parameters themselves are sharded.
            only_rank_0: Whether the other ranks have empty tensors in place of the weights.

        Returns:
            Tensors in host memory by the module's names, in the parameters' dtype. One rank alone
            has the memory of its parameters, as of ``torch.nn.Module.state_dict``.

        Raises:
            OptionError: ``keep_vars`` is set.
        """
        _refuse_keep_vars(keep_vars)
        found: dict[str, Any] = OrderedDict() if destination is None else destination
        for name, values in whole_weights(self.module):
            found[prefix + name] = values if _keeps(only_rank_0) else values.new_empty(0)
        return found

    def state_dict_shard(
        self,
        prefix: str = "",
        keep_vars: bool = False,  # noqa: FBT001, FBT002  # upstream's
        max_shard_size: float = 1024,
        only_rank_0: bool = True,  # noqa: FBT001, FBT002
    ) -> Iterator[tuple[dict[str, Any], float]]:
        """Yield what ``state_dict`` returns in parts; collective.

        Args:
            prefix: As of ``state_dict``.
            keep_vars: As of ``state_dict``.
            max_shard_size: The largest part in MiB; a larger tensor is a part of its own.
            only_rank_0: As of ``state_dict``.

        Yields:
            A part, and its size in MiB.
        """
        _refuse_keep_vars(keep_vars)
        part: dict[str, Any] = OrderedDict()
        held = 0.0
        for name, values in whole_weights(self.module):  # gathered one after the other
            size = values.nbytes / 2**20
            if part and held + size > max_shard_size:
                yield part, held
                part, held = OrderedDict(), 0.0
            part[prefix + name] = values if _keeps(only_rank_0) else values.new_empty(0)
            held += size
        if part:
            yield part, held

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,  # noqa: FBT001, FBT002  # torch's
        assign: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:  # noqa: ANN401
        """Load whole weights by the module's names; call it on every rank with all of them.

        Args:
            state_dict: Tensors by the module's names.
            strict: Whether the names must be the module's.
            assign: As of ``torch.nn.Module.load_state_dict``.

        Returns:
            The names that were missing and those that were not expected.
        """
        return self.module.load_state_dict(state_dict, strict, assign)


class GeminiStates(OptimizerWrapper):
    """An optimizer over what Gemini has placed, whose state dict is on rank 0.

    The arguments are those of ``OptimizerWrapper``.
    """

    def state_dict(self, only_rank_0: bool = True) -> dict[str, Any]:  # noqa: FBT001, FBT002
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
    """Return the states of rank 0 where ``only_rank_0`` left a rank without, else this rank's."""
    group = host_group()
    if group is None:
        return states
    lacking = [False] * dist.get_world_size(group)
    dist.all_gather_object(lacking, any(not entry for entry in states.values()), group)
    if not any(lacking):
        return states
    found = {}
    for index, entry in states.items():
        received = [entry]
        dist.broadcast_object_list(received, 0, group)
        found[index] = received[0]
    return found


def _keeps(only_rank_0: bool) -> bool:  # noqa: FBT001
    return not (only_rank_0 and dist.is_initialized() and dist.get_rank() > 0)


def _refuse_keep_vars(keep_vars: bool) -> None:  # noqa: FBT001
    if keep_vars:
        message = (
            "keep_vars=True was given to the state dict of a model that Gemini has placed, whose"
            " parameters are sharded: leave it out, or call state_dict() of model.unwrap()."
        )
        raise OptionError(message)
