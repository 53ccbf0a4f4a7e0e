"""What every Adam here shares: torch's interface over stowed states."""

from collections.abc import Callable, Iterable
from typing import Any, overload

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

import tensorstow._native as _native
from tensorstow.base.errors import OptionError, StowError
from tensorstow.optim import options
from tensorstow.optim.layout import StateMemory
from tensorstow.optim.members import Member, Members
from tensorstow.optim.pipeline import StepRow, TraceEvent, Traffic
from tensorstow.optim.policy import PipelinePolicy
from tensorstow.optim.reference import adam_scalars
from tensorstow.optim.states import Placement, StateStore

_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The kernels' numbers for dtypes: csrc/kernels/kernels.h."""
_NO_STEP = StepRow()


class StowedAdam(Optimizer):
    """What Adam, AdamW and the frontends' optimizers share; not made by users.

    Every placement of the states gives bitwise the same parameters ([Note: The Adam rule] in
    csrc/kernels/kernels.h; ``optim.reference`` is the same rule in plain torch).
    """

    # torch.amp.GradScaler then hands its scale over instead of making a pass over the gradients.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        placement: Placement,
        *,
        policy: PipelinePolicy | None = None,
        grad_dtype: torch.dtype | None = None,
    ) -> None:
        """Check everything, then reserve memory and disk for the states of ``params``."""
        options.check_hyper(defaults)
        options.refuse_torch_keywords(defaults)
        self._isa = policy.isa if policy else None
        self._members: Members | None = None  # until the groups are known
        self._clip_factor = 1.0
        super().__init__(params, defaults)
        if grad_dtype is not None:
            options.accept_grad_dtype(self._parameters(), grad_dtype)
        self.register_state_dict_post_hook(_complete_state_dict, prepend=True)
        self._members = Members(placement, policy or PipelinePolicy())
        self._attach(p for p in self._parameters() if p.requires_grad)

    # --- torch.optim.Optimizer ---

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does; its states go where the others' go."""
        given = param_group["params"]
        if isinstance(given, Iterable) and not isinstance(given, torch.Tensor):
            param_group["params"] = given = list(given)
            options.refuse_duplicates(given)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            options.check_hyper(group)
            options.refuse_torch_keywords(group)
            for index, parameter in enumerate(group["params"]):
                if self._takes(parameter):
                    options.check_parameter(parameter, _name(self.param_groups, group, index))
            if self._members is not None:
                self._attach(p for p in group["params"] if p.requires_grad)
        except BaseException:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step; return once every parameter has its new value.

        Writes of states run on behind it. Raises DTypeError for a gradient that cannot be used,
        before any state is touched; TransferError where the disk failed, after which the
        optimizer refuses every further step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update(1.0)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002  # torch's
        """Drop the gradients, and the clip factor that was computed from them."""
        super().zero_grad(set_to_none)
        self._clip_factor = 1.0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what this class or ``torch.optim.Adam(W)`` saved, without loss.

        torch casts states to the parameter's dtype on the way in; here they stay fp32. Raises
        OptionError for states that do not fit their parameter, before anything is changed.
        """
        loaded: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

        def keep_tensors_back(_: Optimizer, full: dict[str, Any]) -> dict[str, Any]:
            saved = [(key, g) for g in full["param_groups"] for key in g["params"]]
            owner = dict(zip((key for key, _ in saved), self._parameters(), strict=False))
            amsgrad = {key: bool(g.get("amsgrad")) for key, g in saved}
            light = dict(full["state"])
            for key, entry in full["state"].items():
                if key in owner and self._takes(owner[key]):
                    name = f"Parameter {key}"
                    options.check_saved(entry, owner[key], name, amsgrad=amsgrad[key])
                    loaded[owner[key]] = entry
                    light[key] = {"step": _as_step(entry["step"])}
            return {**full, "state": light}

        def put_tensors_in_place(_: Optimizer) -> None:
            self._load_states(loaded)

        # Ours is the last before and the first after, so users' hooks see whole state dicts.
        before = self.register_load_state_dict_pre_hook(keep_tensors_back)
        after = self.register_load_state_dict_post_hook(put_tensors_in_place, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take groups saved by another version or by torch: keys they lack keep our defaults."""
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse pickle and copy: files, threads and buffers cannot be carried."""
        message = (
            f"{type(self).__name__} was asked to be pickled or copied: its states are on disk and"
            " its threads in this process. Save state_dict() instead."
        )
        raise StowError(message)

    # --- beyond torch ---

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, *, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Clip the gradients of the next ``step()`` by their global 2-norm; return that norm.

        The norm is the root of binary64 sums per parameter, added in parameter order. The factor
        ``min(1, max_norm / (norm + 1e-6))`` is applied inside the update: ``.grad`` is not
        changed and no pass over it is made. A scalar fp64 tensor is returned.
        """
        if not max_norm >= 0.0:
            message = f"max_norm={max_norm} was given: it must not be negative."
            raise OptionError(message)
        total = 0.0
        for parameter in self._parameters():
            if parameter.grad is not None:
                options.check_gradient(parameter, parameter.grad, "a parameter")
                total += self._squared_norm(parameter.grad)
        norm = torch.tensor(total, dtype=torch.float64).sqrt()
        if error_if_nonfinite and not torch.isfinite(norm):
            message = f"The norm of the gradients is {norm.item()}: a gradient is not finite."
            raise RuntimeError(message)
        self._clip_factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0).item()
        return norm

    def _squared_norm(self, gradient: torch.Tensor) -> float:
        if gradient.device.type != "cpu":
            return float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2
        flat = gradient.contiguous()
        name = str(flat.dtype).removeprefix("torch.")
        return _native.squared_norm(flat.data_ptr(), flat.numel(), name, self._isa)

    def synchronize(self) -> None:
        """Wait until every write of states has landed; raise what failed behind ``step()``."""
        self._states().settle()

    def memory(self) -> StateMemory:
        """Return the bytes of states and buffers, by place."""
        return self._states().memory()

    def traffic(self) -> Traffic:
        """Return the bytes of states moved so far."""
        return self._states().pipeline.traffic()

    def start_trace(self) -> None:
        """Begin the event log that ``trace()`` returns."""
        self._states().pipeline.start_trace()

    def trace(self) -> list[TraceEvent]:
        """Return what each lane (read, update, write, wait) did since ``start_trace()``."""
        return self._states().pipeline.trace()

    def close(self) -> None:
        """Drop states, buffers and files now rather than with the object. Idempotent."""
        self._kept().close()
        self.state.clear()

    # --- inside ---

    def _takes(self, parameter: torch.Tensor) -> bool:
        """Return whether the states of ``parameter`` are ours to keep."""
        del parameter
        return True

    def _kept(self) -> Members:
        if self._members is None:
            message = "The optimizer is not made yet."
            raise StowError(message)
        return self._members

    def _states(self) -> StateStore:
        return self._kept().store

    def _parameters(self) -> Iterable[torch.Tensor]:
        return (p for group in self.param_groups for p in group["params"])

    def _attach(self, parameters: Iterable[torch.Tensor]) -> None:
        """Give states to ``parameters`` that have none yet."""
        self._kept().attach((p for p in parameters if self._takes(p)), self._amsgrad())

    def _amsgrad(self) -> dict[int, bool]:
        return {id(p): bool(g["amsgrad"]) for g in self.param_groups for p in g["params"]}

    # Not private to torch.optim: every optimizer of torch's is kept out of compiled graphs so.
    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    @torch.no_grad()
    def _update(self, divisor: float) -> None:
        """Update by the gradients divided by ``divisor``, by a GradScaler's scale, and clipped."""
        found_inf = getattr(self, "found_inf", None)
        scale = getattr(self, "grad_scale", None)
        factor = self._clip_factor / (divisor * (1.0 if scale is None else float(scale)))
        self._clip_factor = 1.0
        if found_inf is not None and found_inf.item():
            return
        due = self._due()
        if due:
            self._apply(due, factor)
        self._update_elsewhere(factor)

    def _update_elsewhere(self, factor: float) -> None:
        """Update the parameters that are not ours, by their gradients times ``factor``."""

    def _due(self) -> list[tuple[dict[str, Any], torch.Tensor, torch.Tensor]]:
        """Return (group, parameter, gradient) of this step, checked; nothing is changed before."""
        due = []
        strangers = []
        kept = self._kept()
        for group in self.param_groups:
            options.check_hyper(group)
            options.refuse_torch_keywords(group)
            for index, parameter in enumerate(group["params"]):
                gradient = parameter.grad
                member = kept.find(parameter)
                if gradient is None or (member is None and not self._takes(parameter)):
                    continue
                if not options.fits(parameter, gradient) or (
                    member is not None and not member.fits(parameter, amsgrad=group["amsgrad"])
                ):
                    name = _name(self.param_groups, group, index)
                    options.check_parameter(parameter, name)
                    options.check_gradient(parameter, gradient, name)
                    if member is not None:
                        options.refuse_change(parameter, group, member.family, name)
                if member is None:
                    strangers.append(parameter)
                due.append((group, parameter, gradient.contiguous()))
        # Parameters unfrozen, or exchanged for others, after the optimizer was made.
        if strangers:
            self._attach(strangers)
        return due

    def _apply(
        self, due: list[tuple[dict[str, Any], torch.Tensor, torch.Tensor]], factor: float
    ) -> None:
        kept = self._kept()
        members = [kept.get(parameter) for _, parameter, _ in due]
        steps = [self._step_of(member) for member in members]
        rows = [_NO_STEP] * len(kept)
        table: dict[tuple[int, float], int] = {}
        hypers: list[tuple[float, ...]] = []
        for (group, parameter, gradient), member, step in zip(due, members, steps, strict=True):
            key = (id(group), step.item() + 1.0)
            if key not in table:
                table[key] = len(hypers)
                hypers.append(_hyper_row(group, int(key[1]), factor))
            rows[member.number] = StepRow(
                parameter.data_ptr(),
                gradient.data_ptr(),
                _DTYPE_CODES[gradient.dtype],
                member.written_by_others,
                table[key],
            )
        kept.store.pipeline.step(rows, np.array(hypers, dtype=np.float32))
        torch._foreach_add_(steps, 1.0)
        # Native code wrote to them: autograd must know, or a stale graph would use new weights.
        torch.autograd.graph.increment_version([parameter for _, parameter, _ in due])
        for member in members:
            member.remember()

    def _step_of(self, member: Member) -> torch.Tensor:
        """Return the parameter's step count, and see to it that its states are what users see.

        A user may have emptied the state (a reset), or put other tensors in (a transplant).
        """
        state = self.state[member.parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            if member.begun:
                self._states().put({member.number: {}})
        member.begun = True
        placed = {k: v for k, v in state.items() if k in member.family.streams}
        if any(placed.get(name) is not view for name, view in member.views.items()) or (
            placed and not member.views
        ):
            if placed:
                self._states().put({member.number: placed})
            for name in placed:
                del state[name]
            state.update(member.views)
        step: torch.Tensor = state["step"]
        return step

    def _load_states(self, loaded: dict[torch.Tensor, dict[str, torch.Tensor]]) -> None:
        kept = self._kept()
        if kept.differ(self._amsgrad()):
            kept.renew()  # the saved groups say otherwise: other states exist
        self._attach(p for p in self._parameters() if p.requires_grad or p in loaded)
        members = [(kept.get(parameter), entry) for parameter, entry in loaded.items()]
        states: dict[int, dict[str, torch.Tensor]] = {m.number: {} for m in kept.all()}
        for member, entry in members:
            states[member.number] = {k: v for k, v in entry.items() if k != "step"}
        kept.store.put(states)
        kept.forget_versions()
        for member, entry in members:
            member.begun = False
            self.state[member.parameter] = {"step": _as_step(entry["step"]), **member.views}
            self._step_of(member)


def _complete_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Add the states that live on disk to what torch gathered."""
    if not isinstance(optimizer, StowedAdam):
        message = f"The hook of StowedAdam was called for a {type(optimizer).__name__}."
        raise TypeError(message)
    parameters = list(optimizer._parameters())  # noqa: SLF001
    kept = optimizer._kept()  # noqa: SLF001
    kept.store.settle()
    missing = {
        member.number: (i, member.parameter)
        for i, entry in state_dict["state"].items()
        if (member := kept.find(parameters[i])) is not None and "exp_avg" not in entry
    }
    for number, tensors in kept.store.read(missing).items():
        index, parameter = missing[number]
        entry = state_dict["state"][index]
        shaped = {name: t.view(parameter.shape) for name, t in tensors.items()}
        # The moments are copies, so the step count is one too: all of the same moment.
        state_dict["state"][index] = {**entry, "step": entry["step"].clone(), **shaped}
    return state_dict


def _as_step(step: torch.Tensor | float) -> torch.Tensor:
    return torch.tensor(float(step), dtype=torch.float32, device="cpu")


def _name(groups: list[dict[str, Any]], group: dict[str, Any], index: int) -> str:
    if group.get("param_names"):
        return f"Parameter {group['param_names'][index]!r}"
    number = next(i for i, other in enumerate(groups) if other is group)
    return f"Parameter {index} of group {number}"


def _hyper_row(group: dict[str, Any], step: int, factor: float) -> tuple[float, ...]:
    return adam_scalars(
        lr=float(group["lr"]),
        betas=(float(group["betas"][0]), float(group["betas"][1])),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        step=step,
        decoupled=bool(group["decoupled_weight_decay"]),
        bias_correction=bool(group.get("bias_correction", True)),
        grad_factor=-factor if group["maximize"] else factor,
    ).as_tuple()
