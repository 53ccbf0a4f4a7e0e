"""``StowedOptimizer``: any torch optimizer class, its states in RAM, on disk, or both."""

import math
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, overload

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from tensorstow.base.errors import OptionError, StowError
from tensorstow.optim import options
from tensorstow.optim.generic import validation
from tensorstow.optim.generic.known_classes import (
    ELEMENTWISE,
    keeps_nothing_over_all,
    refuse_class,
    refuse_unknown,
)
from tensorstow.optim.generic.leaves import (
    leaf_of,
    leaf_with_gradient,
    own_states,
    refuse_rows,
    sharded_states,
)
from tensorstow.optim.generic.packing import cloned, tensors_in
from tensorstow.optim.generic.piece_step import Job
from tensorstow.optim.generic.pieces import ParameterPlan, PartitionedParam, plan_of
from tensorstow.optim.generic.probe import probe
from tensorstow.optim.generic.state_manager import StateManager
from tensorstow.optim.generic.stepper import MODES, Stepper, listed, name_in
from tensorstow.optim.options import DirectoryOption, StatePlacement
from tensorstow.optim.recording import LastRecording, RecordedPart, Recording, totals
from tensorstow.states.memory import StateMemory
from tensorstow.states.offload_policy import OffloadPolicy
from tensorstow.states.policy import PipelinePolicy
from tensorstow.states.traffic import Traffic
from tensorstow.step.norms import squared_norms
from tensorstow.step.validation import is_to_be_trained, list_params
from tensorstow.tensors.dtensor import gradient_of, sum_over_shards


class StowedOptimizer(Optimizer):
    """Any torch optimizer class with its states in RAM, on disk, or split between the two.

    ``StowedOptimizer(torch.optim.Muon, params, lr=0.02, states="disk", dir="/nvme/run")`` steps
    Muon itself, one parameter after the other; the results are bitwise equal to those of Muon with
    ``foreach=False, fused=False``. ``train()`` and ``eval()`` exist if the class has them
    (schedule-free ones).

    SGD, Adagrad, Adadelta, Adam, AdamW, Adamax, ASGD, NAdam, RAdam, RMSprop and Rprop are known to
    be elementwise: large parameters are stepped in chunks. Adafactor and Muon are stepped by whole
    parameters, and so are the classes of schedulefree, optimi, bitsandbytes and pytorch_optimizer
    that are known to step each parameter by itself. Classes that are not torch's are tried out on
    small tensors first. Of sharded parameters (DTensors) a rank steps its own elements, which an
    elementwise class alone allows; others are refused by name. Counters in the groups or in the
    optimizer are handed on from piece to piece. Values made of several parameters' gradients cannot
    be: LBFGS, SparseAdam, and classes that clip or skip over all parameters are refused.

    Args:
        optimizer_class: The class.
        params: Parameters, named parameters, or parameter groups, as for the class.
        states: "disk", "host" (or "ram"), or the fraction of the elements whose states are on disk,
            0 to 1, by whole parameters: the first ones stay in RAM. Tensors below 16 KiB and
            numbers stay in RAM. Default: "disk".
        dir: A directory for scratch files, or several. Default: None, a real disk that is chosen
            and logged.
        ram_budget: Bytes, or text such as "512MiB", of the ring buffer for states on disk; the
            largest piece must fit. Default: None, 64 MiB, or the largest piece if that is more.
        elementwise: Declares that an element's update depends on no other element, so that large
            parameters are stepped in chunks of ``policy.chunk_elements``.
        per_parameter: Declares that a parameter's update depends on no other parameter.
        policy: Sizes, threads and the I/O backend; no value changes a result.
        class_options: The options of the class.

    Raises:
        OptionError: A class or an argument that cannot be used.
        DTypeError: A parameter that the class cannot take here.
        DirectoryError: A directory that is missing, read-only, too full or in RAM.
    """

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        params: ParamsT,
        *,
        states: StatePlacement = "disk",
        dir: DirectoryOption = None,  # noqa: A002
        ram_budget: str | int | None = None,
        elementwise: bool = False,
        per_parameter: bool = False,
        policy: PipelinePolicy | None = None,
        **class_options: Any,  # noqa: ANN401
    ) -> None:
        """Create the optimizer; the class documents the arguments."""
        refuse_class(optimizer_class)
        validation.refuse_keywords(class_options)
        validation.refuse_adams_keywords(optimizer_class, class_options)
        placement = options.placement(states, dir, ram_budget)
        given, groups = listed(params)
        refuse_unknown(optimizer_class, declared=per_parameter or elementwise)
        self._stepper = Stepper(optimizer_class, groups, class_options)
        known = optimizer_class in ELEMENTWISE
        self._by_rows = known or elementwise
        if not known and (elementwise or not keeps_nothing_over_all(optimizer_class)):
            probe(optimizer_class, groups, class_options, elementwise=elementwise)
        self._manager: StateManager | None = None  # until the groups are known
        self._real = weakref.ref(self)
        """The optimizer itself, where ``self`` is a wrapper ([Note: One end] in runtime)."""
        self._last_recording = LastRecording()
        self.recorded_parts: list[Callable[[], RecordedPart]] = []
        """Make what a recording has beside the states, as weights on their way."""
        self._behind_updates: list[Callable[[], None]] = []
        self._at_close: list[Callable[[], None]] = []
        super().__init__(given, self._stepper.defaults)
        for group, made in zip(self.param_groups, self._stepper.group_options, strict=True):
            group.update(made)
        self.state.update(self._stepper.first_state)
        self.register_state_dict_post_hook(_complete_state_dict, prepend=True)
        policy = validation.check_policy(policy)
        self._offload_policy = OffloadPolicy(placement, policy)
        self._manager = StateManager(self._stepper, placement, policy, elementwise=self._by_rows)
        everyone = self._stepper.begins_with_states
        self._manager.attach([(g, p) for g, p in self._all() if everyone or is_to_be_trained(p)])
        if everyone:
            for group, parameter in self._all():
                name = name_in(group, parameter)
                self._put(parameter, self._stepper.first_entry(group, parameter, name))

    # --- torch.optim.Optimizer ---

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group as torch does; its states are placed like the others.

        Args:
            param_group: A dict with "params" and any of the options of the class's groups.

        Raises:
            OptionError: An option that cannot be used, or a parameter that is in a group already.
        """
        list_params(param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            validation.refuse_keywords(group)
            for index, parameter in enumerate(group["params"]):
                if is_to_be_trained(parameter) or self._stepper.begins_with_states:
                    validation.check_parameter(parameter, self._name(group, index))
                    if not self._by_rows:
                        kind = self._stepper.optimizer_class
                        refuse_rows(kind, parameter, self._name(group, index))
            if self._manager is not None:
                group.update(self._stepper.add_group(group))
                self._manager.attach([(group, p) for p in group["params"] if is_to_be_trained(p)])
        except BaseException:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step of the class; return when all parameters are updated. Writes continue.

        Args:
            closure: Computes the loss again and returns it. It is called once, with gradients
                enabled; classes that are not torch's may read the loss.

        Returns:
            What ``closure`` returned; None without one.

        Raises:
            DTypeError: A gradient that cannot be used; nothing has changed.
            TransferError: The disk failed. Every later step raises PoisonedError.
        """
        if closure is None:
            self._update()
            return None
        with torch.enable_grad():
            loss = closure()
        self._update(lambda: loss)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or the stowed class.

        States keep the dtypes that the class uses; torch would cast them to the parameter's dtype.

        Args:
            state_dict: What ``state_dict()`` returned.

        Raises:
            OptionError: States that do not fit; nothing has changed.
        """
        real = self._itself()
        if real is not self:
            real.load_state_dict(state_dict)  # a wrapper would be given groups of its own
            if "param_groups" in vars(self):
                vars(self).update(param_groups=real.param_groups, state=real.state)
        else:
            self._load_state_dict(state_dict)

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        loaded: list[tuple[torch.Tensor, dict[str, Any]]] = []

        def keep_states_back(_: Optimizer, full: dict[str, Any]) -> dict[str, Any]:
            keys = (key for group in full["param_groups"] for key in group["params"])
            owner = dict(zip(keys, (p for _, p in self._all()), strict=False))
            for key, entry in full["state"].items():
                if key in owner:
                    own = own_states(entry, owner[key], f"Parameter {key}")
                    self._check_saved(own, owner[key], f"Parameter {key}")
                    loaded.append((owner[key], own))
            others = {k: v for k, v in full["state"].items() if k not in owner}
            groups = options.with_own_flags(full["param_groups"], self.param_groups)
            return {**full, "state": others, "param_groups": groups}

        def put_states_in_place(_: Optimizer) -> None:
            self._load(loaded)

        # Ours is the last before and the first after, so users' hooks see whole state dicts.
        before = self.register_load_state_dict_pre_hook(keep_states_back)
        after = self.register_load_state_dict_post_hook(put_states_in_place, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def __getstate__(self) -> dict[str, Any]:
        """Refuse pickle and copy: files, threads and buffers cannot be carried."""
        message = (
            f"{type(self).__name__} cannot be pickled or copied: its states are on disk and its"
            " threads in this process. Save state_dict() instead."
        )
        raise StowError(message)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Return ``train`` and ``eval`` if the class has them: trainers look for them."""
        stepper: Stepper | None = self.__dict__.get("_stepper")
        if name in MODES and stepper is not None and stepper.has_mode(name):
            return partial(self._change_mode, name)
        message = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(message, name=name, obj=self)

    def __repr__(self) -> str:
        """Name the class that is stowed."""
        return f"{self._stepper.optimizer_class.__name__}, stowed: {super().__repr__()}"

    # --- beyond torch ---

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, *, error_if_nonfinite: bool = False, loss_scale: float = 1.0
    ) -> torch.Tensor:
        """Clip the gradients by their global 2-norm, in place; the norm is that of all ranks.

        The norm is the root of binary64 sums per parameter, added in parameter order. Gradients are
        multiplied by ``min(1, max_norm / (norm + 1e-6))``, as by ``torch.nn.utils``.

        Args:
            max_norm: The largest norm, at least 0.
            error_if_nonfinite: Whether a norm that is not finite is an error.
            loss_scale: What the loss was multiplied by, as for ``step_scaled``: the norm is that of
                the gradients divided by it.

        Returns:
            The norm before clipping: a scalar fp64 tensor.

        Raises:
            OptionError: A negative ``max_norm``.
            RuntimeError: The norm is not finite, and ``error_if_nonfinite`` is set.
        """
        if not max_norm >= 0.0:
            message = f"max_norm={max_norm} was given: it must not be negative."
            raise OptionError(message)
        norm = self.grad_norm() / loss_scale
        if error_if_nonfinite and not torch.isfinite(norm):
            message = f"The norm of the gradients is {norm.item()}: a gradient is not finite."
            raise RuntimeError(message)
        self._multiply_gradients(torch.clamp(max_norm / (norm + 1e-6), max=1.0).item())
        return norm

    @torch.no_grad()
    def grad_norm(self) -> torch.Tensor:
        """Return the global 2-norm of the gradients, over all ranks.

        Returns:
            A scalar fp64 tensor.
        """
        parameters = [p for _, p in self._all()]
        squares = squared_norms([gradient_of(p) for p in parameters], None)
        total = sum(sum_over_shards(parameters, squares))
        return torch.tensor(math.sqrt(total), dtype=torch.float64)  # torch's may be an ulp off

    def step_scaled(self, loss_scale: float, *, overflowed: bool = False) -> None:
        """Take a step by the gradients of a loss that the caller has scaled; they are divided.

        Args:
            loss_scale: What the loss was multiplied by.
            overflowed: Whether a gradient of some rank is not finite; every rank gives the same.
                Nothing is updated then.
        """
        if not overflowed:
            self._multiply_gradients(1.0 / loss_scale)
            self.step()

    def accumulate(self) -> AbstractContextManager[None]:
        """Return a context for all micro-batches of a step but the last; it changes nothing.

        Returns:
            The context manager.
        """
        return nullcontext()

    def wait(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Return at once: parameters are updated when ``step()`` returns.

        Args:
            parameters: Not used.
        """

    @property
    def offload_policy(self) -> OffloadPolicy:
        """Where states are kept; updates run in ``step()``."""
        return self._offload_policy

    @property
    def placement_of_states(self) -> str:
        """Where states are kept: "host", "disk", or "shared" between the two."""
        fraction = self._offload_policy.placement.disk_fraction
        return {0.0: "host", 1.0: "disk"}.get(fraction, "shared")

    def register_update_hook(self, hook: Callable[[], None]) -> None:
        """Register a function that is called in each step, behind its updates.

        An exception of it leaves weights half updated: later steps raise PoisonedError.

        Args:
            hook: Takes no arguments; its result is ignored.
        """
        self._behind_updates.append(hook)

    def register_resume_hook(self, hook: Callable[[], None]) -> None:
        """Take a function that ``resume()`` would call, which is refused: it is never called.

        Args:
            hook: Not used.
        """

    def register_close_hook(self, hook: Callable[[], None]) -> None:
        """Register a function that is called when the optimizer has been closed.

        Args:
            hook: Takes no arguments; its result is ignored. It may be called more than once.
        """
        self._at_close.append(hook)

    def states_of(self, parameter: torch.Tensor) -> dict[str, Any] | None:
        """Return copies of a parameter's states: of this rank's elements, where it is sharded.

        Args:
            parameter: A parameter.

        Returns:
            States by name; none before its first step. None: no group has it, or it is frozen.
        """
        manager = self._live()
        param = manager.find(parameter)
        if param is None:
            return None
        with manager.lock:
            kept = cloned(dict(self.state.get(parameter, {})))
            return {**manager.read(param), **kept} if param.stows else kept

    def synchronize(self) -> None:
        """Wait until all writes of states are done; raises their errors."""
        self._live().wait_written()

    def memory(self) -> StateMemory:
        """Return the bytes of states and buffers, by place.

        Returns:
            Bytes in RAM, on disk and in the ring buffer.
        """
        entries = (entry for entry in self.state.values() if isinstance(entry, dict))
        return self._live().memory(sum(t.nbytes for e in entries for t in tensors_in(e)))

    def predict(self) -> StateMemory:
        """Return what ``memory()`` will return once every parameter has been stepped.

        On disk each tensor of a piece takes whole blocks of 4 KiB. The ring buffer is the sum of
        the pieces or the budget, whichever is less, and at least the largest piece. The first step
        allocates the states of one piece in addition. A class whose states cannot
        be predicted counts as having none.

        Returns:
            Bytes in RAM, on disk and in the ring buffer.
        """
        return self._live().predict()

    def plan(self) -> list[ParameterPlan]:
        """Return how the states of each parameter are kept.

        Returns:
            One entry per parameter, in the order of the groups.
        """
        params = (self._live().find(p) for _, p in self._all())
        return [plan_of(param) for param in params if param is not None]

    def traffic(self) -> Traffic:
        """Return the bytes of states moved since the optimizer was created.

        Returns:
            Bytes read and written.
        """
        return self._live().traffic()

    def recording(self, module: torch.nn.Module | None = None) -> Recording:
        """Return a context that records what the run does inside, for ``report()``.

        It logs forward, backward and steps, and the memory of the process 20 times a second; there
        is no log of single reads and writes.

        Args:
            module: The model, whose forward is recorded. Default: None, steps alone.

        Returns:
            The context manager.
        """
        self._live()
        real = self._itself()
        parts = [make() for make in real.recorded_parts]
        recording = Recording(real, real, module=module, log=None, parts=parts)
        return self._last_recording.set(recording)

    def report(self, directory: str | os.PathLike[str]) -> dict[str, Path]:
        """Write a report of the run: of the last ``recording()``, or totals without one.

        Args:
            directory: Is made if it is not there; files of an earlier report are replaced.

        Returns:
            The paths of the files: "page", "trace" and "figures".

        Raises:
            OptionError: The recording has not ended yet.
            StowError: The files cannot be written.
        """
        real = self._itself()
        return self._last_recording.write(
            Path(directory), lambda: totals(real, real, [make() for make in real.recorded_parts])
        )

    def close(self) -> None:
        """Drop states, memory and files now rather than with the object. Idempotent."""
        self._live().close()
        self.state.clear()
        for hook in self._at_close:
            hook()

    # --- what AdamW and Adam have, and scratch files cannot ---

    def commit(self, extra: object = None) -> NoReturn:
        """Raise OptionError: the states are in scratch files.

        Args:
            extra: Not used.
        """
        del extra
        validation.refuse_commits("commit()")

    def request_commit(self) -> NoReturn:
        """Raise OptionError: the states are in scratch files."""
        validation.refuse_commits("request_commit()")

    def resume(self, which: object = None) -> NoReturn:
        """Raise OptionError: the states are in scratch files.

        Args:
            which: Not used.
        """
        del which
        validation.refuse_commits("resume()")

    def snapshot(self, name: object = None, extra: object = None) -> NoReturn:
        """Raise OptionError: the states are in scratch files.

        Args:
            name: Not used.
            extra: Not used.
        """
        del name, extra
        validation.refuse_commits("snapshot()")

    def snapshots(self) -> NoReturn:
        """Raise OptionError: the states are in scratch files."""
        validation.refuse_commits("snapshots()")

    def drop(self, name: object = None) -> NoReturn:
        """Raise OptionError: the states are in scratch files.

        Args:
            name: Not used.
        """
        del name
        validation.refuse_commits("drop()")

    # --- inside ---

    def _live(self) -> StateManager:
        if self._manager is None:
            message = "The optimizer is not made yet."
            raise StowError(message)
        return self._manager

    def _itself(self) -> "StowedOptimizer":
        real = self._real()
        return self if real is None else real

    def _all(self) -> Iterable[tuple[dict[str, Any], torch.Tensor]]:
        return ((group, p) for group in self.param_groups for p in group["params"])

    # Not private to torch.optim: every optimizer of torch's is kept out of compiled graphs so.
    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    def _update(self, closure: Callable[[], float] | None = None) -> None:
        manager = self._live()
        manager.live()
        with manager.lock:
            self._step("step", self._due(), closure)

    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    def _change_mode(self, mode: str) -> None:
        """Call the class's ``mode`` over all parameters that have states."""
        manager = self._live()
        manager.live()
        with manager.lock:
            if self._stepper.changes_mode(self.param_groups, self.state, mode):
                due = [(g, p, leaf_of(p)) for g, p in self._all() if p in self.state]
                self._step(mode, due)

    def _step(
        self,
        method: str,
        due: Sequence[tuple[dict[str, Any], torch.Tensor, torch.Tensor]],
        closure: Callable[[], float] | None = None,
    ) -> None:
        manager = self._live()
        manager.attach([(group, parameter) for group, parameter, _ in due])
        names = {
            id(parameter): name
            for group in self.param_groups
            for name, parameter in zip(group.get("param_names", ()), group["params"], strict=False)
        }
        jobs = []
        for group, parameter, leaf in due:
            if (param := manager.find(parameter)) is not None:
                self._take_edits(param)
                name = names.get(id(parameter))
                jobs.append(Job(group, param, self.state.get(parameter, {}), leaf, name))
        if jobs or not keeps_nothing_over_all(self._stepper.optimizer_class):
            manager.step(jobs, self.param_groups, self.state, method, closure)
        for job in jobs:
            if job.resident or job.param.stows:  # SGD without momentum keeps nothing at all
                self.state[job.param.parameter] = job.resident
        with manager.failing(BaseException):
            for hook in self._behind_updates:
                hook()

    @torch.no_grad()
    def _multiply_gradients(self, factor: float) -> None:
        if factor != 1.0:
            for _, parameter in self._all():
                gradient = gradient_of(parameter)
                if gradient is not None:
                    gradient.mul_(factor)

    def _due(self) -> list[tuple[dict[str, Any], torch.Tensor, torch.Tensor]]:
        """Return (group, parameter, leaf) of this step, checked; nothing is changed before."""
        due = []
        for group in self.param_groups:
            validation.refuse_keywords(group)
            for index, parameter in enumerate(group["params"]):
                leaf = leaf_with_gradient(parameter)
                if leaf is None:
                    continue
                param = self._live().find(parameter)
                if param is None and not self._by_rows:  # unfrozen since
                    kind = self._stepper.optimizer_class
                    refuse_rows(kind, parameter, self._name(group, index))
                validation.check_gradient(leaf, param, self._name(group, index))
                due.append((group, parameter, leaf))
        return due

    def _take_edits(self, param: PartitionedParam) -> None:
        """Apply the user's edits of ``state``: emptied entries (a reset), or replaced ones."""
        parameter = param.parameter
        if parameter not in self.state:
            if param.stows:
                self._live().forget(param)
        elif param.how == "chunks":
            seen = self.state[parameter]
            if any(tensor.dim() for tensor in tensors_in(seen)):
                self._check_saved(seen, parameter, "A parameter")
                self._put(parameter, {**self._live().read(param), **seen})

    def _put(self, parameter: torch.Tensor, entry: Mapping[str, Any]) -> None:
        param = self._live().find(parameter)
        if param is not None:
            self.state[parameter] = self._live().put(param, entry)

    def _check_saved(self, entry: Mapping[str, Any], parameter: torch.Tensor, name: str) -> None:
        param = self._live().find(parameter)
        expected = {} if param is None else param.expected.entry
        chunked = param is not None and param.how == "chunks"
        validation.check_saved(entry, expected, parameter, name, chunked=chunked)

    def _load(self, loaded: list[tuple[torch.Tensor, dict[str, Any]]]) -> None:
        manager = self._live()
        self._stepper.repair(self.param_groups, dict(loaded))
        group_of = {id(p): group for group, p in self._all()}
        manager.attach([(group_of[id(p)], p) for p, _ in loaded])
        for each in manager.params():
            manager.forget(each)
        for parameter, entry in loaded:
            param = manager.find(parameter)
            expected = {} if param is None else param.expected.entry
            self._put(parameter, validation.cast_as_kept(entry, expected))

    def _name(self, group: Mapping[str, Any], index: int) -> str:
        if group.get("param_names"):
            return f"Parameter {group['param_names'][index]!r}"
        number = next(i for i, other in enumerate(self.param_groups) if other is group)
        return f"Parameter {index} of group {number}"


def _complete_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Add states on disk to torch's state dict."""
    if not isinstance(optimizer, StowedOptimizer):
        message = f"The hook of StowedOptimizer was called for a {type(optimizer).__name__}."
        raise TypeError(message)
    manager = optimizer._live()  # noqa: SLF001
    with manager.lock:
        manager.wait_written()
        for index, (_, parameter) in enumerate(optimizer._all()):  # noqa: SLF001
            entry = state_dict["state"].get(index)
            param = manager.find(parameter)
            if isinstance(entry, dict) and param is not None and param.stows:
                # What is read is a copy, so the numbers are one too: all of the same moment.
                entry = {**cloned(entry), **manager.read(param)}
            if isinstance(entry, dict):
                state_dict["state"][index] = sharded_states(entry, parameter)
    return state_dict
