"""``StowedOptimizer``: any torch optimizer class, its states in RAM, on disk, or both."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from tensorstow.base.fields import read_value
from tensorstow.optim import one_optimizer, options
from tensorstow.optim.generic import validation
from tensorstow.optim.generic.exchange import spread
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
    sharded_states,
)
from tensorstow.optim.generic.masters import stand_ins
from tensorstow.optim.generic.owners import MatrixOwners, refuse_cut, whole_states
from tensorstow.optim.generic.packing import cloned, tensors_in
from tensorstow.optim.generic.piece_step import Job
from tensorstow.optim.generic.pieces import ParameterPlan, PartitionedParam, plan_of
from tensorstow.optim.generic.probe import probe
from tensorstow.optim.generic.state_manager import StateManager
from tensorstow.optim.generic.stepper import MODES, Stepper, listed, name_in
from tensorstow.optim.options import DirectoryOption, StatePlacement
from tensorstow.optim.placed import PlacedOptimizer
from tensorstow.states.memory import StateMemory
from tensorstow.states.offload_policy import OffloadPolicy
from tensorstow.states.policy import PipelinePolicy
from tensorstow.states.traffic import Traffic, TrafficCounters
from tensorstow.step.norms import exact_total_norm, total_norm
from tensorstow.step.step_plan import name_of
from tensorstow.step.validation import is_to_be_trained, refuse_unheld
from tensorstow.tensors.dtensor import gradient_of


class StowedOptimizer(PlacedOptimizer):
    """Any torch optimizer class with its states in RAM, on disk, or split between the two.

    ``StowedOptimizer(torch.optim.Muon, params, lr=0.02, states="disk", dir="/nvme/run")`` steps
    Muon itself, one parameter after the other; the results are bitwise equal to those of Muon with
    ``foreach=False, fused=False``. ``train()`` and ``eval()`` exist if the class has them
    (schedule-free ones).

    SGD, Adagrad, Adadelta, Adam, AdamW, Adamax, ASGD, NAdam, RAdam, RMSprop and Rprop are known to
    be elementwise: large parameters are stepped in chunks. Adafactor and Muon are stepped by whole
    parameters, and so are the classes of schedulefree, optimi, bitsandbytes and pytorch_optimizer
    that are known to step each parameter by itself. Classes that are not torch's are tried out on
    small tensors first. Counters in the groups or in the optimizer are handed on from piece to
    piece. Values made of several parameters' gradients cannot be: LBFGS, SparseAdam, and classes
    that clip or skip over all parameters are refused.

    Of sharded parameters (DTensors) a rank steps its own elements, if the class is elementwise. For
    other classes each parameter has an owner, balanced by bytes: in a step the owner gathers
    gradient and weight, steps them whole, and scatters the new weight. It alone keeps the states:
    ``state_dict()`` and ``load_state_dict()`` are then collective, and ``states_of()`` returns none
    on other ranks. The bits are those of one rank with the same gradients.

    Parameters on an accelerator are stepped there, with the bits that the class has there. Their
    states are in CPU memory or on disk, and one parameter's, or chunk's, on the device at a time.

    Args:
        optimizer_class: The class.
        params: Parameters, named parameters, or parameter groups, as for the class.
        states: "host" (or "cpu", "ram"), "disk" (or "nvme"), or the fraction of the elements whose
            states are on disk, 0 to 1, by whole parameters: the first ones stay in RAM. Tensors
            below 16 KiB and numbers stay in RAM. Default: "host".
        dir: A directory for scratch files, or several. Default: None, a real disk that is chosen
            and logged.
        ram_budget: Bytes, or text such as "512MiB", of the ring buffer for states on disk; the
            largest piece must fit. Default: None, 64 MiB, or the largest piece if that is more.
        state_format: "fp32" keeps fp32 masters of 16-bit parameters, as the state ``"master"``: the
            class steps them by fp32 gradients, and weights are rounded from them. Default: None,
            16-bit parameters are stepped as they are.
        module: The model, whose forward a ``recording()`` has. Default: None.
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

    def __init__(  # noqa: PLR0913  # those of the interface, and of a placement
        self,
        optimizer_class: type[Optimizer],
        params: ParamsT,
        *,
        states: StatePlacement = "host",
        dir: DirectoryOption = None,  # noqa: A002
        ram_budget: str | int | None = None,
        state_format: str | None = None,
        module: torch.nn.Module | None = None,
        elementwise: bool = False,
        per_parameter: bool = False,
        policy: PipelinePolicy | None = None,
        **class_options: Any,  # noqa: ANN401
    ) -> None:
        """Create the optimizer; the class documents the arguments."""
        refuse_class(optimizer_class)
        validation.refuse_keywords(class_options)
        validation.refuse_adams_keywords(optimizer_class, class_options)
        validation.refuse_misspelt(type(self), optimizer_class, class_options)
        placement = options.placement(states, dir, ram_budget)
        read_value(bool, elementwise, "elementwise")
        read_value(bool, per_parameter, "per_parameter")
        policy = validation.check_policy(policy)
        items, groups = listed(params)
        refuse_unknown(optimizer_class, declared=per_parameter or elementwise)
        self._masters = validation.read_masters(state_format)
        self._stepper = Stepper(optimizer_class, groups, class_options, masters=self._masters)
        is_listed = optimizer_class in ELEMENTWISE
        self._by_rows = is_listed or elementwise
        if not is_listed and (elementwise or not keeps_nothing_over_all(optimizer_class)):
            stepped = stand_ins(groups) if self._masters else groups
            probe(optimizer_class, stepped, class_options, elementwise=elementwise)
        super().__init__(items, self._stepper.defaults)
        for group, class_group in zip(self.param_groups, self._stepper.group_options, strict=True):
            group.update(class_group)
        self.state.update(self._stepper.first_state)
        module = read_value(torch.nn.Module | None, module, "module")
        self._module = None if module is None else weakref.ref(module)
        self._owners = MatrixOwners()
        self._offload_policy = OffloadPolicy(placement, policy)
        self._manager = StateManager(self._stepper, placement, policy, elementwise=self._by_rows)
        one_optimizer.register(self, self._manager.is_alive)
        everyone = self._stepper.begins_with_states
        self._attach([(g, p) for g, p in self._all() if everyone or is_to_be_trained(p)])
        if everyone:
            for group, parameter in self._all():
                name = name_in(group, parameter)
                self._put(parameter, self._stepper.first_entry(group, parameter, name))

    # --- torch.optim.Optimizer ---

    def _take_group(self, group: dict[str, Any]) -> None:
        validation.refuse_keywords(group)
        refuse_unheld(group)
        for index, parameter in enumerate(group["params"]):
            if is_to_be_trained(parameter) or self._stepper.begins_with_states:
                name = name_of(self.param_groups, group, index)
                validation.check_parameter(parameter, name)
                if not self._by_rows:
                    refuse_cut(self._stepper, parameter, name)
        if hasattr(self, "_manager"):  # else all groups are attached at once
            group.update(self._stepper.add_group(group))
            self._attach([(group, p) for p in group["params"] if is_to_be_trained(p)])

    # Not private to torch.optim: every optimizer of torch's is kept out of compiled graphs so.
    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    def _take_step(self, loss: Callable[[], float] | None = None) -> None:
        manager = self._manager
        manager.live()
        one_optimizer.begin(self._itself())
        with manager.lock:
            if not self._by_rows:  # unfrozen ones since
                self._owners.assign(filter(is_to_be_trained, self._parameters()))
            self._step("step", self._owners.agreed(self._due), loss)

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        options.check_state_dict(state_dict)
        loaded: list[tuple[torch.Tensor, dict[str, Any]]] = []

        def keep_states_back(_: Optimizer, full: dict[str, Any]) -> dict[str, Any]:
            keys = (key for group in full["param_groups"] for key in group["params"])
            owner = dict(zip(keys, self._parameters(), strict=False))
            for key in (key for key in owner if key in full["state"]):  # in one order on all ranks
                states = self._states_here(full["state"][key], owner[key], f"Parameter {key}")
                self._check_saved(states, owner[key], f"Parameter {key}")
                loaded.append((owner[key], states))
            rest = {k: v for k, v in full["state"].items() if k not in owner}
            groups = options.with_own_flags(full["param_groups"], self.param_groups)
            return {**full, "state": rest, "param_groups": groups}

        self._load_by_torch(state_dict, keep_states_back, lambda _: self._load(loaded))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Return ``train`` and ``eval`` if the class has them: trainers look for them."""
        # An attribute that does not exist yet would lead here again.
        stepper: Stepper | None = self.__dict__.get("_stepper")
        if name in MODES and stepper is not None and stepper.has_mode(name):
            return partial(self._change_mode, name)
        message = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(message, name=name, obj=self)

    def __repr__(self) -> str:
        """Name the class that is stowed."""
        return f"{self._stepper.optimizer_class.__name__}, stowed: {super().__repr__()}"

    # --- beyond torch ---

    def _clip(self, factor_of: Callable[[torch.Tensor], float], loss_scale: float) -> torch.Tensor:
        norm = self._grad_norm() / loss_scale
        self._multiply_gradients(factor_of(norm))
        return norm

    def _grad_norm(self) -> torch.Tensor:
        parameters = list(self._parameters())
        gradients = [gradient_of(p) for p in parameters]
        if self._has_exact_norm:
            return exact_total_norm(parameters, gradients, None)
        return total_norm(parameters, gradients, None, {})

    def _step_scaled(self, loss_scale: float, *, overflowed: bool = False) -> None:
        if not overflowed:
            self._multiply_gradients(1.0 / loss_scale)
            self.step()

    @property
    def offload_policy(self) -> OffloadPolicy:
        """Where states are kept; updates run in ``step()``."""
        return self._offload_policy

    @property
    def _stowed_class(self) -> str:
        """The name of the class."""
        return self._stepper.optimizer_class.__name__

    def _recorded(
        self, module: torch.nn.Module | None
    ) -> tuple[torch.nn.Module | None, TrafficCounters | None]:
        itself = None if self._module is None else self._module()
        return super()._recorded(itself if module is None else module)

    def _states_of(self, parameter: torch.Tensor) -> dict[str, Any] | None:
        manager = self._manager
        param = manager.find(parameter)
        if param is None:
            return {} if self._owners.is_elsewhere(parameter) else None
        with manager.lock:
            resident = cloned(dict(self.state.get(parameter, {})))
            return {**manager.read(param), **resident} if param.stows else resident

    def _synchronize(self) -> None:
        self._manager.wait_written()

    def _memory(self) -> StateMemory:
        entries = (entry for entry in self.state.values() if isinstance(entry, dict))
        return self._manager.memory(sum(t.nbytes for e in entries for t in tensors_in(e)))

    def predict(self) -> StateMemory:
        """Return what ``memory()`` will return once every parameter has been stepped.

        On disk each tensor of a piece takes whole blocks of 4 KiB. The ring buffer is the sum of
        the pieces or the budget, whichever is less, and at least the largest piece. The first step
        allocates the states of one piece in addition. A class whose states cannot
        be predicted counts as having none.

        Returns:
            Bytes in RAM, on disk and in the ring buffer.
        """
        return self._manager.predict()

    def plan(self) -> list[ParameterPlan]:
        """Return how the states of each parameter are kept.

        Returns:
            One entry per parameter, in the order of the groups.
        """
        params = map(self._manager.find, self._parameters())
        return [plan_of(param) for param in params if param is not None]

    def _traffic(self) -> Traffic:
        return self._manager.traffic()

    def _close(self) -> None:
        self._manager.close()
        self._drop_states()

    # --- what AdamW and Adam have, and scratch files cannot ---

    commit = validation.refused("commit()")
    request_commit = validation.refused("request_commit()")
    resume = validation.refused("resume()")
    snapshot = validation.refused("snapshot()")
    snapshots = validation.refused("snapshots()")
    drop = validation.refused("drop()")

    # --- inside ---

    def _attach(self, parameters: Sequence[tuple[dict[str, Any], torch.Tensor]]) -> None:
        """Keep states of parameters that this rank steps; the same parameters on every rank."""
        owners = self._owners
        if not self._by_rows:
            owners.assign(p for _, p in parameters)
        self._manager.attach([(g, p) for g, p in parameters if not owners.is_elsewhere(p)])

    def _states_here(self, entry: dict[str, Any], parameter: torch.Tensor, name: str) -> Any:  # noqa: ANN401
        """Return what this rank keeps of a saved entry."""
        if self._owners.find(parameter) is None:
            return own_states(entry, parameter, name)
        whole = whole_states(entry)
        return {} if self._owners.is_elsewhere(parameter) else whole

    def _all(self) -> Iterable[tuple[dict[str, Any], torch.Tensor]]:
        return ((group, p) for group in self.param_groups for p in group["params"])

    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    def _change_mode(self, mode: str) -> None:
        """Call the class's ``mode`` over all parameters that have states."""
        manager = self._manager
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
        manager, owners = self._manager, self._owners
        self._attach([(group, parameter) for group, parameter, _ in due])
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
        matrices = [m for _, p, _ in due if (m := owners.find(p)) is not None]
        gathered = {id(m.parameter) for m in matrices}
        alone = [job for job in jobs if id(job.param.parameter) not in gathered]
        rounds = owners.rounds(matrices, {id(job.param.parameter): job for job in jobs})
        if due or not keeps_nothing_over_all(self._stepper.optimizer_class):
            manager.step(alone, self.param_groups, self.state, method, closure, rounds)
        for matrix in matrices:  # on every rank, which tells torch's functions that there are some
            self.state[matrix.parameter] = {}
        for job in jobs:
            if job.resident or job.param.stows:  # SGD without momentum keeps nothing at all
                self.state[job.param.parameter] = job.resident
        with manager.failing(BaseException):
            for hook in self._after_updates:
                hook()

    @torch.no_grad()
    def _multiply_gradients(self, factor: float) -> None:
        if factor != 1.0:
            for gradient in map(gradient_of, self._parameters()):
                if gradient is not None:
                    gradient.mul_(factor)

    def _due(self) -> list[tuple[dict[str, Any], torch.Tensor, torch.Tensor]]:
        """Return (group, parameter, leaf) of this step, checked; nothing is changed before."""
        due = []
        for group in self.param_groups:
            validation.refuse_keywords(group)
            refuse_unheld(group)
            for index, parameter in enumerate(group["params"]):
                leaf = leaf_with_gradient(parameter)
                if leaf is None:
                    continue
                param = self._manager.find(parameter)
                name = name_of(self.param_groups, group, index)
                matrix = self._owners.find(parameter)
                if param is None and not self._by_rows:  # unfrozen since
                    refuse_cut(self._stepper, parameter, name)
                expected = param if matrix is None else None
                validation.check_gradient(leaf, expected, name, masters=self._masters)
                if matrix is not None:
                    matrix.check(name, self.state.get(parameter, {}))
                due.append((group, parameter, leaf))
        return due

    def _complete(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        manager = self._manager
        with manager.lock:
            manager.wait_written()
            for index, parameter in enumerate(self._parameters()):
                entry = state_dict["state"].get(index)
                param = manager.find(parameter)
                if isinstance(entry, dict) and param is not None and param.stows:
                    # States on disk are read to copies; copy the numbers too: all of one moment.
                    entry = {**cloned(entry), **manager.read(param)}
                matrix = self._owners.find(parameter)
                if isinstance(entry, dict) and matrix is not None:
                    state_dict["state"][index] = spread(matrix, entry)
                elif isinstance(entry, dict):
                    state_dict["state"][index] = sharded_states(entry, parameter)
        return state_dict

    def _take_edits(self, param: PartitionedParam) -> None:
        """Apply the user's edits of ``state``: emptied entries (a reset), or replaced ones."""
        parameter = param.parameter
        if parameter not in self.state:
            if param.stows:
                self._manager.forget(param)
        elif param.how == "chunks":
            seen = self.state[parameter]
            if any(tensor.dim() for tensor in tensors_in(seen)):
                self._check_saved(seen, parameter, "A parameter")
                self._put(parameter, {**self._manager.read(param), **seen})

    def _put(self, parameter: torch.Tensor, entry: Mapping[str, Any]) -> None:
        param = self._manager.find(parameter)
        if param is not None:
            self.state[parameter] = self._manager.put(param, entry)

    def _check_saved(self, entry: Mapping[str, Any], parameter: torch.Tensor, name: str) -> None:
        param = self._manager.find(parameter)
        expected = {} if param is None else param.expected.entry
        chunked = param is not None and param.how == "chunks"
        validation.check_saved(entry, expected, parameter, name, chunked=chunked)

    def _load(self, loaded: list[tuple[torch.Tensor, dict[str, Any]]]) -> None:
        manager = self._manager
        local = {p: entry for p, entry in loaded if not self._owners.is_elsewhere(p)}
        self._stepper.repair(self.param_groups, local)
        group_of = {id(p): group for group, p in self._all()}
        self._attach([(group_of[id(p)], p) for p, _ in loaded])
        # Parameters without a saved state begin anew.
        for param in manager.params():
            manager.forget(param)
        for parameter, entry in loaded:
            if self._owners.is_elsewhere(parameter):
                self.state[parameter] = {}
                continue
            managed = manager.find(parameter)
            expected = {} if managed is None else managed.expected.entry
            self._put(parameter, validation.cast_as_kept(entry, expected))
