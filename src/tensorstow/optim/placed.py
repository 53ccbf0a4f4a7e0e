"""``PlacedOptimizer``: the interface of every optimizer whose states are placed.

[Note: One facade] ``StowedAdam`` updates by the native pipeline and can commit; ``StowedOptimizer``
steps a class of torch's, a piece at a time. Users, ``stow`` and adapters see one interface: this
class documents and validates its calls, and leaves what differs to methods with an underscore.
"""

import os
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from tensorstow.base.errors import OptionError, StowError, abbreviated
from tensorstow.base.keywords import warn_renamed
from tensorstow.io.allocator import cache_large_blocks, empty_cache
from tensorstow.memory.released_part import ReleasedPart
from tensorstow.optim.recording import RecordedPart, Recording, RecordingResult, totals
from tensorstow.report.run_page import write_report
from tensorstow.states.memory import StateMemory
from tensorstow.states.offload_policy import OffloadPolicy
from tensorstow.states.traffic import Traffic, TrafficCounters
from tensorstow.step.validation import list_params

PlacedOptimizerT = TypeVar("PlacedOptimizerT", bound="PlacedOptimizer")


class PlacedOptimizer(Optimizer):
    """Base of Adam, AdamW and ``StowedOptimizer``; not created by users."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        """Create the groups; nothing is placed yet."""
        self._real = weakref.ref(self)
        """The optimizer itself, if ``self`` is a wrapper ([Note: One end] in runtime)."""
        self._recorded_results: list[RecordingResult] = []
        """That of the last recording, if there was one; wrappers share it."""
        self._recorded_parts: list[Callable[[], RecordedPart]] = []
        """Factories of further parts to record: the weights of a model that ``stow`` placed."""
        self._after_updates: list[Callable[[], None]] = []
        self._around_rewrites: list[Callable[[bool], None]] = []
        self._at_close: list[Callable[[], None]] = []
        self._has_exact_norm = False
        """Whether the norm of gradients is to have the same bits on any number of ranks."""
        cache_large_blocks()
        super().__init__(params, defaults)
        # First, so that users' hooks see whole states.
        self.register_state_dict_post_hook(_complete_state_dict, prepend=True)

    # --- torch.optim.Optimizer ---

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step. Writes of states continue after it, and so do updates if they overlap.

        Args:
            closure: Computes the loss again and returns it. It is called once, with gradients
                enabled.

        Returns:
            What ``closure`` returned; None without one.

        Raises:
            DTypeError: A gradient that cannot be used; nothing has changed.
            TransferError: The disk failed. Every later step raises PoisonedError.
            CommitError: The step is done, and the commit that was due with it did not happen.
        """
        if closure is None:
            self._take_step()
            return None
        with torch.enable_grad():
            loss = closure()
        self._take_step(lambda: loss)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, or of torch's class of the same states, without loss.

        Torch casts states to the parameter's dtype while it loads; here they keep their own. Adam
        and AdamW ignore the options ``foreach``, ``fused``, ``capturable`` and ``differentiable``
        of saved groups. Their snapshot references (``checkpoints="reference"``) go on from a
        snapshot as ``resume()`` does, weights included, and with the reference's groups.

        Args:
            state_dict: What ``state_dict()`` returned.

        Raises:
            OptionError: States that do not fit their parameter, or a reference to a snapshot that
                does not exist; nothing has changed.
        """
        real = self._itself()
        if real is not self:
            real.load_state_dict(state_dict)  # torch would give a wrapper groups of its own
            if "param_groups" in vars(self):
                # A wrapper with attributes of its own gets the groups and states that were loaded.
                vars(self).update(param_groups=real.param_groups, state=real.state)
        else:
            self._load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group as torch does; its states are placed like the others.

        Args:
            param_group: A dict with "params" and any of the options of the constructor's groups.

        Raises:
            OptionError: An option that cannot be used, or a parameter that is in a group already.
            DTypeError: A parameter of a dtype, layout or device that cannot be updated.
        """
        self._add_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse pickle and copy: files, threads and buffers cannot be carried."""
        message = (
            f"{type(self).__name__} cannot be pickled or copied: its states are on disk and its"
            " threads in this process. Save state_dict() instead."
        )
        raise StowError(message)

    # --- gradients ---

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, *, error_if_nonfinite: bool = False, loss_scale: float = 1.0
    ) -> torch.Tensor:
        """Clip the gradients of the next ``step()`` by their global 2-norm, over all ranks.

        The norm is the root of binary64 sums per parameter, added in parameter order; with
        ``Plan(ordered_reduce=)`` of sums per row, whose sum is rounded once. The factor is
        ``min(1, max_norm / (norm + 1e-6))``. Adam and AdamW apply it inside the update: ``.grad``
        is not changed, and the norm is the only pass over it. ``StowedOptimizer`` multiplies
        ``.grad`` by it, as ``torch.nn.utils`` does.

        Args:
            max_norm: The largest norm, at least 0.
            error_if_nonfinite: Whether a norm that is not finite is an error.
            loss_scale: What the loss was multiplied by: the norm is that of the gradients divided
                by it.

        Returns:
            The norm before clipping, as a scalar fp64 tensor.

        Raises:
            OptionError: A negative ``max_norm``, or ``overlap="backward"``.
            RuntimeError: The norm is not finite, and ``error_if_nonfinite`` is set.
        """
        value: object = max_norm
        if not isinstance(value, Real | torch.Tensor) or not max_norm >= 0.0:
            message = (
                f"max_norm={abbreviated(max_norm)} was given: it must be a number, and must not"
                " be negative."
            )
            raise OptionError(message)

        def factor_of(norm: torch.Tensor) -> float:
            if error_if_nonfinite and not torch.isfinite(norm):
                message = f"The norm of the gradients is {norm.item()}: a gradient is not finite."
                raise RuntimeError(message)
            return torch.clamp(max_norm / (norm + 1e-6), max=1.0).item()

        return self._clip(factor_of, loss_scale)

    @torch.no_grad()
    def grad_norm(self) -> torch.Tensor:
        """Return the global 2-norm of the gradients of the next ``step()``; nothing is clipped.

        The bits are those of ``clip_grad_norm_``.

        Returns:
            A scalar fp64 tensor.

        Raises:
            OptionError: ``overlap="backward"``.
        """
        return self._grad_norm()

    def accumulate(self) -> AbstractContextManager[None]:
        """Return a context for all micro-batches of a step but the last.

        With ``overlap="backward"`` no update begins inside; with another overlap it changes
        nothing.

        Returns:
            The context manager.
        """
        return self._accumulate()

    # --- updates under way ---

    def wait(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Wait until parameters are updated, for readers outside of the forward of ``module``.

        Without an overlap they are updated when ``step()`` returns, and so does this call.

        Args:
            parameters: The parameters to wait for. Default: None, all.
        """
        self._wait(parameters)

    def updated(self) -> AbstractContextManager[None]:
        """Wait for all updates, and return a context inside of which all weights are current.

        For readers that are no torch operation: NumPy arrays, extensions, captured graphs. Also for
        a stream of an accelerator that reads weights outside of a module's forward, which must call
        it inside: ``with stream, optimizer.updated():``. The weights stay current until the next
        ``step()``, and the stream that calls that must wait for such readers.

        Returns:
            The context manager.
        """
        self.wait()
        return nullcontext()

    def synchronize(self) -> None:
        """Wait until updates and writes are done; raises the errors of work after ``step()``."""
        self._synchronize()

    def states_of(self, parameter: torch.Tensor) -> dict[str, Any] | None:
        """Return copies of a parameter's states: of this rank's elements, if it is sharded.

        Args:
            parameter: A parameter.

        Returns:
            States by name; none before its first step. None if no group has it, or it is frozen.
        """
        return self._states_of(parameter)

    # --- figures ---

    @property
    def offload_policy(self) -> OffloadPolicy:
        """Where states are kept, in which format, and when updates run."""
        raise NotImplementedError

    @property
    def _stowed_class(self) -> str:
        """The name of torch's class whose states these are; Adam's and AdamW's are the same."""
        raise NotImplementedError

    @property
    def placement_of_states(self) -> str:
        """Where states are kept: "host", "disk", or "shared" between the two."""
        fraction = self.offload_policy.placement.disk_fraction
        return {0.0: "host", 1.0: "disk"}.get(fraction, "shared")

    def memory(self) -> StateMemory:
        """Return ``tensorstow.usage(optimizer=optimizer).states``, which it is the old name of."""
        warn_renamed("optimizer.memory()", "tensorstow.usage(optimizer=optimizer).states")
        return self._memory()

    def traffic(self) -> Traffic:
        """Return ``tensorstow.usage(optimizer=optimizer).traffic``, which it is the old name of."""
        warn_renamed("optimizer.traffic()", "tensorstow.usage(optimizer=optimizer).traffic")
        return self._traffic()

    def recording(self, module: torch.nn.Module | None = None) -> Recording:
        """Return a context that records what the run does inside, for ``report()``.

        It logs forward, backward and steps, and the memory of the process 20 times a second. Adam
        and AdamW add reads, updates, writes, copies over links and waits. Logs are bounded: what
        comes when one is full is counted, and not kept.

        Args:
            module: The model, whose forward is recorded. Default: None, ``module`` of the
                constructor; without any, steps alone.

        Returns:
            The context manager.
        """
        real = self._itself()
        module, log = self._recorded(module)
        recording = Recording(real, module=module, log=log, parts=real._parts())  # noqa: SLF001  # its own
        self._recorded_results[:] = [recording.result]
        return recording

    def report(self, directory: str | os.PathLike[str]) -> dict[str, Path]:
        """Write a report of the run: of the last ``recording()``, or totals without one.

        ``report.html`` is a page that needs no other file, ``trace.json`` a trace for
        ui.perfetto.dev, ``report.json`` has the figures.

        Args:
            directory: It is made if it does not exist; files of an earlier report are replaced.

        Returns:
            The paths of the files, by "page", "trace" and "figures".

        Raises:
            OptionError: The recording has not ended yet.
            StowError: The files cannot be written.
        """
        real, results = self._itself(), self._recorded_results
        record = results[0].record if results else totals(real, real._parts())  # noqa: SLF001
        if record is None:
            message = (
                "report() was called during a recording: call it after the block of"
                " `with optimizer.recording():`."
            )
            raise OptionError(message)
        return write_report(record, Path(directory))

    def release(self, *, host: bool = False) -> None:
        """Give back the memory that only training needs, until ``wake()``; for AdamW and Adam.

        For a server that generates in the same memory. Updates and writes are finished first, and
        no bit changes. On an accelerator it gives back gathered weights, copies of weights that
        were made ahead or that stay, buffers of states, and what torch's allocator keeps. Weights
        may be read until ``wake()``, by ``tensorstow.named_weights()`` too. A forward, ``step()``,
        ``commit()`` and all else that computes or saves raises an error. Repeated calls do no harm.

        Args:
            host: Whether to give back CPU memory too: buffers of weights and states on disk, and
                freed memory that tensorstow keeps. Default: False.

        Raises:
            OptionError: During backward, or with gradients in ``.grad``; weights live on the
                accelerator, which are not moved; with ``host``, weights or states live in CPU
                memory, or the model computes on an accelerator. Nothing was given back.
        """
        del host
        message = (
            f"release() was called on a {type(self).__name__}, whose states stay in CPU memory:"
            " tensorstow.AdamW and Adam give memory back. close() ends this optimizer."
        )
        raise OptionError(message)

    def wake(self) -> None:
        """Take the memory again that ``release()`` gave back; no-op if nothing is released."""

    def close(self) -> None:
        """Drop states, buffers and files now rather than with the object. Idempotent.

        It waits for updates and a commit. If the run has ``dir=``, steps that are not committed yet
        are committed, on every rank, as by ``commit()``. With ``commit_every=None`` their number is
        logged instead, unless they are saved. While an exception is handled, the commit is of the
        end of the last step, as without ``close()``. A failure is raised after all is closed.
        """
        try:
            self._close()
        finally:
            empty_cache()

    # --- hooks of the engine ---

    def _register_update_hook(self, hook: Callable[[], None]) -> None:
        """Have each step call ``hook`` after its updates, or after their start.

        If it raises, weights are left half updated: later steps raise PoisonedError.
        """
        self._after_updates.append(hook)

    def _register_rewrite_hook(self, hook: Callable[[bool], None]) -> None:
        """Have ``hook`` called before ``resume()`` or ``averaged()`` writes weights, and after it.

        So that copies of weights can be dropped, also those that another thread makes meanwhile. It
        is called with whether gradients go too: those from before a ``resume()`` do, with what is
        known to be wrong with them. ``StowedOptimizer`` has neither and never calls it.
        """
        self._around_rewrites.append(hook)

    def _register_released_part(self, part: ReleasedPart) -> None:
        """Have ``part`` give memory back at ``release()``, if the class has that."""

    def _register_close_hook(self, hook: Callable[[], None]) -> None:
        """Have ``hook`` called when the optimizer has been closed; perhaps more than once.

        It is not called where the optimizer is dropped without ``close()``: the model may be in the
        middle of a forward then.
        """
        self._at_close.append(hook)

    # --- what differs ---

    def _itself(self) -> "PlacedOptimizer":
        real = self._real()
        return self if real is None else real

    def _parameters(self) -> Iterable[torch.Tensor]:
        return (p for group in self.param_groups for p in group["params"])

    def _parts(self) -> list[RecordedPart]:
        return [make() for make in self._recorded_parts]

    def _recorded(
        self, module: torch.nn.Module | None
    ) -> tuple[torch.nn.Module | None, TrafficCounters | None]:
        """Return the module that a recording follows, and the log of single transfers, if any."""
        return module, None

    def _drop_states(self) -> None:
        """Forget the states, and report to those who wait for the end."""
        self.state.clear()
        for hook in self._at_close:
            hook()

    def _accumulate(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _wait(self, parameters: Iterable[torch.Tensor] | None) -> None:
        """Return at once: without an overlap nothing is under way after ``step()``."""

    def _add_group(self, param_group: dict[str, Any]) -> None:
        list_params(param_group)
        super().add_param_group(param_group)
        try:
            self._take_group(self.param_groups[-1])
        except BaseException:
            self.param_groups.pop()
            raise

    def _complete(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return torch's state dict with the states that are not in ``state``."""
        raise NotImplementedError

    def _take_group(self, group: dict[str, Any]) -> None:
        """Check a group that torch has added, and create its states."""
        raise NotImplementedError

    def _load_by_torch(
        self,
        state_dict: dict[str, Any],
        keep_states_back: Callable[[Optimizer, dict[str, Any]], dict[str, Any]],
        put_states_in_place: Callable[[Optimizer], None],
    ) -> None:
        """Load by torch's method, which would cast states: they are kept back from it."""
        # Ours is the last before and the first after, so users' hooks see whole state dicts.
        before = self.register_load_state_dict_pre_hook(keep_states_back)
        after = self.register_load_state_dict_post_hook(put_states_in_place, prepend=True)
        try:
            Optimizer.load_state_dict(self, state_dict)  # not the one that calls this
        finally:
            before.remove()
            after.remove()

    def _take_step(self, loss: Callable[[], float] | None = None) -> None:
        """Update the parameters; ``loss`` returns what the closure has returned."""
        raise NotImplementedError

    def _keep_norms(self) -> None:
        """Let ``grad_norm`` return the norm with ``overlap="backward"`` too, from now on.

        The norm of each gradient is then computed when it is final. Without an overlap with
        backward this changes nothing.
        """

    def _step_scaled(self, loss_scale: float, *, overflowed: bool = False) -> None:
        """Take a step by the gradients of a loss that the caller has multiplied by ``loss_scale``.

        They are divided by it: inside the update by Adam and AdamW, which do not change ``.grad``;
        in place by ``StowedOptimizer``. ``overflowed``: a gradient of some rank is not finite, and
        nothing is updated; every rank gives the same. Adam and AdamW count the step. Raises
        OptionError if updates by the scaled gradients have begun (``overlap="backward"``).
        """
        raise NotImplementedError

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError

    def _clip(self, factor_of: Callable[[torch.Tensor], float], loss_scale: float) -> torch.Tensor:
        """Multiply the gradients by the factor of their norm, and return the norm."""
        raise NotImplementedError

    def _grad_norm(self) -> torch.Tensor:
        raise NotImplementedError

    def _states_of(self, parameter: torch.Tensor) -> dict[str, Any] | None:
        raise NotImplementedError

    def _memory(self) -> StateMemory:
        """Return the bytes of states and buffers, by place."""
        raise NotImplementedError

    def _traffic(self) -> Traffic:
        """Return the bytes of states moved since the optimizer was created."""
        raise NotImplementedError

    def _synchronize(self) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError


def _complete_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(optimizer, PlacedOptimizer):
        message = f"The hook of PlacedOptimizer was called for a {type(optimizer).__name__}."
        raise TypeError(message)
    return optimizer._complete(state_dict)  # noqa: SLF001  # its own
