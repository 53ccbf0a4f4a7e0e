"""Wrappers returned by ``Booster.boost``: a model and an optimizer with ColossalAI's interface."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from tensorstow.base.errors import OptionError
from tensorstow.colossalai.grad_scaler import DynamicGradScaler
from tensorstow.doorkit.keyword_table import checks_keywords, refused, refused_call
from tensorstow.doorkit.stop_point import StopPoint
from tensorstow.fsdp.full_tensors import full_tensor
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.tensors.dtensor import layout_of

logger = logging.getLogger("tensorstow")


class ModelWrapper(nn.Module):
    """A placed model: ``module``, or ``unwrap()``. It has the module's attributes.

    Its parameters' names begin with "module.", as upstream's do.

    Args:
        module: The placed module.
        outputs_fp32: Whether floating point outputs are cast to fp32.
        inputs_dtype: What floating point inputs are cast to. Default: None, they are not.
    """

    module: nn.Module
    stop_point = StopPoint()
    """Where the run ends at a signal, as ``Booster`` was asked."""

    def __init__(
        self,
        module: nn.Module,
        *,
        outputs_fp32: bool = False,
        inputs_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self._outputs_fp32, self._inputs_dtype = outputs_fp32, inputs_dtype

    def unwrap(self, unwrap_peft: bool = True) -> nn.Module:  # upstream's
        """Return the module.

        Args:
            unwrap_peft: Not used: a model of peft is returned as it was given.
        """
        del unwrap_peft
        return self.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; after a step and a signal of ``stop_signals``, save and end instead."""
        if torch.is_grad_enabled():
            self.stop_point.reach()
        if self._inputs_dtype is not None:
            args, kwargs = tree_map(partial(_cast, dtype=self._inputs_dtype), (args, kwargs))
        outputs = self.module(*args, **kwargs)
        if self._outputs_fp32:
            return tree_map(partial(_cast, dtype=torch.float32), outputs)
        return outputs

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Not set yet: asking ``unwrap`` for it would recur without end.
            if name == "module":
                raise
            return getattr(self.unwrap(), name)


class OptimizerWrapper(Optimizer):
    """An optimizer that also computes gradients, scales the loss, and clips: ``optim`` inside.

    Groups, states and hooks are those of ``optim``. A step whose gradients are not finite is
    skipped under a loss scale, on every rank.

    Args:
        optim: The optimizer over what was placed.
        max_norm: The 2-norm that gradients are clipped to in each step; 0: not at all.
        scaler: The loss scale. Default: None, without fp16.
    """

    stop_point = StopPoint()
    """Where the run ends at a signal, as ``Booster`` was asked."""

    def __init__(
        self, optim: Optimizer, *, max_norm: float = 0.0, scaler: DynamicGradScaler | None = None
    ) -> None:
        # torch's constructor is not called: it would make groups and states of its own.
        self.optim = optim
        self._max_norm = max_norm
        self._scaler = scaler
        self._norm: torch.Tensor | None = None
        self._is_scaled = False
        """Whether a backward of ours has scaled the gradients."""

    def __getattr__(self, name: str) -> Any:
        # Not set yet: asking ``self.optim`` for it would recur without end.
        if name == "optim":
            raise AttributeError(name)
        return getattr(self.optim, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The optimizer's groups."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The optimizer's states."""
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The optimizer's defaults."""
        return self.optim.defaults

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The optimizer's parameters."""
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def loss_scale(self) -> float:
        """The number that a loss is multiplied by."""
        return 1.0 if self._scaler is None else self._scaler.scale

    def __repr__(self) -> str:
        return repr(self.optim)

    def __getstate__(self) -> dict[str, Any]:
        """Return the optimizer's state, which raises an error if it cannot be pickled."""
        return self.optim.__getstate__()

    def unwrap(self) -> Optimizer:
        """Return the optimizer."""
        return self.optim

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer."""
        self.optim.add_param_group(param_group)

    def backward(
        self,
        loss: torch.Tensor,
        inputs: Any = None,
        retain_graph: bool = False,  # upstream's
        **kwargs: Any,
    ) -> None:
        """Compute the gradients of a loss, multiplied by the loss scale, and add them up.

        Args:
            loss: A scalar tensor.
            inputs, retain_graph, kwargs: As of ``torch.Tensor.backward``.
        """
        self.stop_point.reach()  # of a module that was called directly
        factor = self.loss_scale
        scaled = loss if self._scaler is None else loss.float() * factor
        self._is_scaled = True
        scaled.backward(inputs=inputs, retain_graph=retain_graph, **kwargs)  # type: ignore[no-untyped-call]

    @checks_keywords(
        refused("call Booster.backward, which scales the loss, then step()", "closure")
    )
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Clip, update, and adapt the loss scale.

        Raises:
            OptionError: A closure was given, or the gradients were not scaled under fp16.
        """
        if self._scaler is not None and not self._is_scaled:
            message = (
                "step() was called under fp16 without Booster.backward(loss, optimizer), which"
                " scales the loss: its gradients would be divided by a scale that they have not."
            )
            raise OptionError(message)
        if self._scaler is None and self._max_norm == 0.0:
            self.optim.step()
        else:
            self._clipped_step()
        self.stop_point.note_step()

    def _clipped_step(self) -> None:
        optimizer, factor = self.optim, self.loss_scale
        if not isinstance(optimizer, StowedAdam):
            kind = type(optimizer).__name__
            message = f"Clipping and fp16 was called on a {kind}: pass boost() a HybridAdam."
            raise OptionError(message)
        limit = self._max_norm or math.inf
        self._norm = norm = optimizer.clip_grad_norm_(limit, loss_scale=factor)
        overflow = self._scaler is not None and not bool(torch.isfinite(norm))
        self._is_scaled = False
        if overflow:
            logger.warning("A step was skipped: the norm of its gradients is %s", norm.item())
            optimizer.zero_grad()
        else:
            optimizer._step_scaled(factor)  # noqa: SLF001  # a hook of the engine
        if self._scaler is not None:
            self._scaler.update(overflow=overflow)

    def zero_grad(self, set_to_none: bool = True) -> None:  # torch's
        """Drop the gradients."""
        self.optim.zero_grad(set_to_none)

    def get_grad_norm(self, **kwargs: Any) -> float | None:
        """Return the 2-norm of the last step's gradients before clipping.

        Args:
            kwargs: Not used.

        Returns:
            The norm of all ranks' together; None if neither ``max_norm`` nor fp16 needs it.
        """
        del kwargs
        return None if self._norm is None else float(self._norm)

    def clip_grad_by_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,  # upstream's
    ) -> torch.Tensor:
        """Clip the gradients of the next ``step()`` by their global norm.

        Args:
            max_norm: The largest norm.
            norm_type: 2; of an optimizer of torch, as of ``torch.nn.utils.clip_grad_norm_``.
            error_if_nonfinite: Whether a norm that is not finite is an error.

        Returns:
            The norm before clipping.

        Raises:
            OptionError: Another norm, or the plugin clips, or the loss is scaled.
        """
        if not isinstance(self.optim, StowedAdam):
            return nn.utils.clip_grad_norm_(
                self.parameters, max_norm, norm_type, error_if_nonfinite
            )
        if norm_type != 2.0 or self._max_norm or self._scaler is not None:
            message = (
                f"clip_grad_by_norm(norm_type={norm_type}) was called, with max_norm="
                f"{self._max_norm} and a loss scale of {self.loss_scale}: it clips by the 2-norm,"
                " once, gradients that are not scaled. Pass max_norm= to the plugin."
            )
            raise OptionError(message)
        return self.optim.clip_grad_norm_(max_norm, error_if_nonfinite=error_if_nonfinite)

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clip each element of the gradients, where torch's optimizer has them whole.

        Args:
            clip_value: The largest absolute value.

        Raises:
            OptionError: The optimizer is tensorstow's, which clips by the norm.
        """
        if not isinstance(self.optim, StowedAdam):
            nn.utils.clip_grad_value_(self.parameters, clip_value)
            return
        message = (
            f"clip_grad_by_value({clip_value}) was called: gradients are clipped by their norm, by"
            " max_norm= of the plugin."
        )
        raise OptionError(message)

    backward_by_grad = refused_call(
        "backward_by_grad", "it is for pipelines, and models are not cut into stages here"
    )

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state dict, and the loss scale's under fp16; collective.

        Returns:
            What torch's optimizer would return, with whole states on every rank; "scaler" is the
                loss scale's state.
        """
        return self.gathered_state_dict(keeps=True)

    def gathered_state_dict(self, *, keeps: bool) -> dict[str, Any]:
        """Return the state dict with whole states; collective.

        Args:
            keeps: Whether this rank has them, rather than an empty dict for each parameter.
        """
        saved = self.own_state_dict()
        whole = self.whole_states(saved["state"])
        return {**saved, "state": {index: entry if keeps else {} for index, entry in whole}}

    def own_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the states, and the loss scale's as "scaler"."""
        state = self.optim.state_dict()
        return state if self._scaler is None else {**state, "scaler": self._scaler.state_dict()}

    def whole_states(
        self, states: Mapping[int, Mapping[str, Any]]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the whole states of one parameter after the other; collective.

        Args:
            states: This rank's part, by the parameters' order.

        Yields:
            A parameter's place in the order, and its states, in host memory.
        """
        parameters = self.parameters
        for index, entry in states.items():
            yield index, {name: _whole(v, parameters[index], name) for name, v in entry.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned, or torch's Adam saved."""
        state = dict(state_dict)
        scale = state.pop("scaler", None)
        self.optim.load_state_dict(state)
        if self._scaler is not None and scale is not None:
            self._scaler.load_state_dict(scale)


def _whole(value: Any, parameter: torch.Tensor, name: str) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    layout = layout_of(parameter)
    if name != "step" and layout is not None and layout.device_mesh.size() > 1:
        value = full_tensor(value, parameter)
    elif isinstance(value, DTensor):
        value = value.to_local()
    return value.cpu()


def _cast(value: object, dtype: torch.dtype) -> object:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value
