"""``StowedAdam``: torch's optimizer interface over stowed states; base of Adam and AdamW."""

import math
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, overload

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from tensorstow.base.errors import OptionError, StowError, UnlinkedError
from tensorstow.checkpoint import agreement, optimizer_export, ticket
from tensorstow.checkpoint.commit_to import commit_to
from tensorstow.checkpoint.commits import storage_of
from tensorstow.checkpoint.full_state import complete_state_dict
from tensorstow.checkpoint.ranks import Ranks
from tensorstow.checkpoint.resume import resume
from tensorstow.checkpoint.run import Extra, RunOptions
from tensorstow.checkpoint.serialize import check_extra, is_checked
from tensorstow.optim import options
from tensorstow.optim.group_keys import check_keys
from tensorstow.optim.loading import StateLoad
from tensorstow.optim.recording import CommitPart, LinkPart, RecordedPart, Recording, totals
from tensorstow.optim.runtime import OptimizerRuntime
from tensorstow.optim.step_runner import ParamFilter
from tensorstow.optim.tickets import load_ticket, make_ticket
from tensorstow.states.memory import StateMemory
from tensorstow.states.native_pipeline import poisoning
from tensorstow.states.offload_policy import OffloadPolicy
from tensorstow.states.state_store import StateStore
from tensorstow.states.traffic import TraceEvent, Traffic
from tensorstow.step import validation
from tensorstow.step.call_lock import CallLock, exclusive_call
from tensorstow.step.legal_calls import PublicCall
from tensorstow.step.norms import KeptNorms, squared_norms
from tensorstow.step.param_table import ParamTable
from tensorstow.step.step_plan import name_of
from tensorstow.store.records import Generation, Summary
from tensorstow.tensors.dtensor import gradient_of, in_order, order_of, shard_of, sum_over_shards
from tensorstow.tensors.placeholder import ConsumedGradient


class StowedAdam(Optimizer):
    """Base of Adam, AdamW and the frontends' optimizers; not created by users.

    Every placement of the states gives bitwise the same parameters ([Note: The Adam rule] in
    csrc/kernels/kernels.h; ``formats.reference`` is the same rule in plain torch).
    """

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        offload_policy: OffloadPolicy,
        *,
        run: RunOptions | None = None,
        grad_dtype: torch.dtype | None = None,
    ) -> None:
        """Check everything, then reserve memory and disk for the states of ``params``."""
        validation.check_hyper(defaults)
        validation.refuse_torch_keywords(defaults)
        run = run or RunOptions()
        self._call_lock = CallLock()
        validation.check_overlap(offload_policy.overlap, run.module, run.accumulation_steps)
        extra_checked = is_checked(run.extra)
        self._isa = offload_policy.policy.isa
        self._update_on = offload_policy.update_on
        self._param_filter = self._make_param_filter()
        self._is_made = False  # the groups are not known yet
        self.recorded_parts: list[Callable[[], RecordedPart]] = []
        """Factories of further parts to record: the weights of a model that ``stow`` placed."""
        self._around_resume: list[Callable[[], None]] = []
        self._at_close: list[Callable[[], None]] = []
        # torch.amp.GradScaler then hands its scale over instead of making a pass over the
        # gradients; beside backward there are no gradients left to scale.
        self._step_supports_amp_scaling = offload_policy.overlap != "backward"
        super().__init__(params, defaults)
        validation.refuse_foreign(run.module, list(self._parameters()))
        if grad_dtype is not None:
            validation.accept_grad_dtype(self._parameters(), grad_dtype)
        self.register_state_dict_pre_hook(_wait_for_all)
        self.register_state_dict_post_hook(_complete_state_dict, prepend=True)
        ranks = Ranks.of(self._parameters(), offload_policy)
        self._runtime = OptimizerRuntime(
            offload_policy,
            run,
            self._call_lock,
            ranks,
            self._param_filter,
            extra_checked=extra_checked,
        )
        self._is_made = True
        self._runtime.steps.contents.optimizer = weakref.ref(self)
        self._runtime.steps.contents.set(self.param_groups, self.state)
        if offload_policy.overlap == "backward":
            validation.refuse_ranks(run.module, self._parameters())
        self._runtime.steps.attach(filter(validation.is_to_be_trained, self._parameters()))

    # --- torch.optim.Optimizer ---

    @exclusive_call("add_param_group")
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group as torch does; its states are placed like the others.

        Args:
            param_group: A dict with "params" and any of the options of the constructor's groups.

        Raises:
            OptionError: An option that cannot be used, or a parameter that is in a group already.
            DTypeError: A parameter of a dtype, layout or device that no kernel takes.
        """
        check_keys(param_group, self.defaults)
        validation.list_params(param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            validation.check_hyper(group)
            validation.refuse_torch_keywords(group)
            for index, parameter in enumerate(group["params"]):
                if validation.is_to_be_trained(parameter):
                    self._check(parameter, name_of(self.param_groups, group, index))
            if self._is_made:
                self._runtime.steps.attach(filter(validation.is_to_be_trained, group["params"]))
        except BaseException:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step; writes of states, and with ``overlap="forward"`` updates, run on after it.

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
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update(1.0)
        return loss

    def step_scaled(self, loss_scale: float, *, overflowed: bool = False) -> None:
        """Take a step by the gradients of a loss that the caller has scaled.

        They are divided inside the update: ``.grad`` is not changed.

        Args:
            loss_scale: What the loss was multiplied by.
            overflowed: Whether a gradient of some rank is not finite; every rank gives the same.
                The step is counted then, and updates nothing.

        Raises:
            OptionError: Updates by the scaled gradients have begun (``overlap="backward"``).
        """
        with self._runtime.steps.scaled.by(loss_scale, overflowed=overflowed):
            self.step()

    @exclusive_call("zero_grad")
    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002  # torch's
        """Drop the gradients, and the clip factor that was computed from them.

        Args:
            set_to_none: Whether ``.grad`` becomes None rather than zeros.
        """
        self._runtime.steps.require(PublicCall.ZERO_GRAD)
        self._drop_gradients(set_to_none=set_to_none)

    def _drop_gradients(self, *, set_to_none: bool = True) -> None:
        self._runtime.schedule.drop_gradients(self._parameters(), to_zero=not set_to_none)
        if not set_to_none:
            # Updates may still read the gradients that are about to be zeroed.
            self._runtime.steps.wait()
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # gradients, and no weights
            super().zero_grad(set_to_none)
        self._runtime.steps.clip.clear()

    @exclusive_call("state_dict")
    def state_dict(self) -> dict[str, Any]:
        """Return a state dict like torch's optimizer, including states on disk.

        Returns:
            A dict with "state" and "param_groups". States on disk are tensors in a memory-mapped
                file; see docs/guides/checkpoints.md. With ``checkpoints="ticket"`` it has no
                states, and names a snapshot that holds them.

        Raises:
            OptionError: A ticket is asked for by one of several ranks before ``snapshot()``.
        """
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or ``torch.optim.Adam(W)``, without loss.

        Torch casts states to the parameter's dtype while it loads; here they stay fp32. The options
        ``foreach``, ``fused``, ``capturable`` and ``differentiable`` of saved groups are ignored.

        A ticket (``checkpoints="ticket"``) goes on from its snapshot as ``resume()`` does, weights
        included, and with the options of the groups that it has.

        Args:
            state_dict: What ``state_dict()`` returned.

        Raises:
            OptionError: States that do not fit their parameter, or a ticket of a snapshot that is
                not there; nothing has changed.
        """
        real = self._itself()
        if real is not self:
            real.load_state_dict(state_dict)  # a wrapper would be given groups of its own
            if "param_groups" in vars(self):
                vars(self).update(param_groups=real.param_groups, state=real.state)
        else:
            self._load_state_dict(state_dict)

    @exclusive_call("load_state_dict")
    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if ticket.is_ticket(state_dict):
            load_ticket(self._runtime, state_dict, self._resume)
            return
        self._runtime.steps.wait_idle()
        self._runtime.is_half_loaded = False
        load = StateLoad(self._runtime, self._param_filter)
        # Ours is the last before and the first after, so users' hooks see whole state dicts.
        before = self.register_load_state_dict_pre_hook(load.keep_tensors_back)
        after = self.register_load_state_dict_post_hook(load.put_tensors_in_place, prepend=True)
        try:
            self._call_lock.allows_reads = True  # for users' hooks
            super().load_state_dict(state_dict)
        except BaseException as error:
            # An interrupt: step counts of one run, moments of another.
            if self._runtime.is_half_loaded:
                self._states().pipeline.poison(error)
            raise
        finally:
            self._call_lock.allows_reads = False
            before.remove()
            after.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore groups saved by another version or by torch; missing keys get our defaults."""
        self._runtime.is_half_loaded, self._call_lock.allows_reads = True, False
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        self._runtime.steps.contents.set(self.param_groups, self.state)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse pickle and copy: files, threads and buffers cannot be carried."""
        message = (
            f"{type(self).__name__} cannot be pickled or copied: its states are on disk and its"
            " threads in this process. Save state_dict() instead."
        )
        raise StowError(message)

    # --- beyond torch ---

    @exclusive_call("clip_grad_norm_")
    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, *, error_if_nonfinite: bool = False, loss_scale: float = 1.0
    ) -> torch.Tensor:
        """Clip the gradients of the next ``step()`` by their global 2-norm.

        The norm is the root of binary64 sums per parameter, added in parameter order. The factor
        ``min(1, max_norm / (norm + 1e-6))`` is applied inside the update: ``.grad`` is not changed,
        and there is no pass over it but the one for the norm.

        Args:
            max_norm: The largest norm, at least 0.
            error_if_nonfinite: Whether a norm that is not finite is an error.
            loss_scale: What the loss was multiplied by, as for ``step_scaled``: the norm is that of
                the gradients divided by it.

        Returns:
            The norm before clipping: a scalar fp64 tensor.

        Raises:
            OptionError: A negative ``max_norm``, or ``overlap="backward"``.
            RuntimeError: The norm is not finite, and ``error_if_nonfinite`` is set.
        """
        if not max_norm >= 0.0:
            message = f"max_norm={max_norm} was given: it must not be negative."
            raise OptionError(message)
        self._runtime.schedule.check_clipping()
        norm = self._grad_norm() / loss_scale
        if error_if_nonfinite and not torch.isfinite(norm):
            message = f"The norm of the gradients is {norm.item()}: a gradient is not finite."
            raise RuntimeError(message)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0).item()
        clipped = [(p, p.grad) for p in self._parameters() if p.grad is not None]
        self._runtime.steps.clip.set(factor, clipped)
        return norm

    def keep_norms(self) -> None:
        """Let ``grad_norm`` tell the norm with ``overlap="backward"`` too, from now on.

        The norm of each gradient is then computed when it is final. Other overlaps need not know.
        """
        self._runtime.schedule.norms = KeptNorms(self._isa)

    @exclusive_call("grad_norm")
    @torch.no_grad()
    def grad_norm(self) -> torch.Tensor:
        """Return the global 2-norm of the gradients of the next ``step()``; nothing is clipped.

        The bits are those of ``clip_grad_norm_``.

        Returns:
            A scalar fp64 tensor.

        Raises:
            OptionError: ``overlap="backward"``, and ``keep_norms`` was not called.
        """
        return self._grad_norm()

    def _grad_norm(self) -> torch.Tensor:
        parameters = list(self._parameters())
        norms = self._runtime.schedule.norms
        kept = {} if norms is None else norms.all()
        used: dict[int, float] = {}
        gradients = []
        for index, parameter in enumerate(parameters):
            gradient = gradient_of(parameter)
            if isinstance(gradient, ConsumedGradient):
                number = self._params().get(parameter).number
                if number not in kept:
                    message = (
                        'grad_norm() was called, and with overlap="backward" gradients have been'
                        " used by then. Call keep_norms() before backward."
                    )
                    raise OptionError(message)
                used[index], gradient = kept[number], None
            if gradient is not None:
                validation.check_gradient(shard_of(parameter), gradient, "a parameter")
            gradients.append(gradient)
        found = squared_norms(gradients, self._isa)
        squares = sum_over_shards(parameters, [used.get(i, n) for i, n in enumerate(found)])
        # math's root is rounded right everywhere; torch's is an ulp off on some machines.
        return torch.tensor(math.sqrt(sum(squares)), dtype=torch.float64)

    def accumulate(self) -> AbstractContextManager[None]:
        """Return a context for all micro-batches of a step but the last.

        With ``overlap="backward"`` no update begins inside; with another overlap it changes
        nothing.

        Returns:
            The context manager.
        """
        return self._runtime.schedule.accumulate()

    def wait(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Wait until parameters are updated, for readers outside of the forward of ``module``.

        Args:
            parameters: The parameters to wait for. Default: None, all.
        """
        self._runtime.steps.wait(None if parameters is None else [id(p) for p in parameters])

    def updated(self) -> AbstractContextManager[None]:
        """Wait for all updates, and return a context inside of which all weights are current.

        For readers that are no torch operation: NumPy arrays, extensions, captured graphs. The
        weights stay current until the next ``step()``.

        Returns:
            The context manager.
        """
        self.wait()
        return nullcontext()

    @property
    def offload_policy(self) -> OffloadPolicy:
        """Where states are kept, in which format, and when updates run."""
        return self._params().offload_policy

    @property
    def placement_of_states(self) -> str:
        """Where states are kept: "host", "disk", or "shared" between the two."""
        fraction = self._params().offload_policy.placement.disk_fraction
        return {0.0: "host", 1.0: "disk"}.get(fraction, "shared")

    @exclusive_call("synchronize")
    def synchronize(self) -> None:
        """Wait until updates and writes are done; raises the errors of work after ``step()``."""
        self._runtime.steps.wait_idle()
        self._states().pipeline.wait_idle()

    @exclusive_call("resume")
    def resume(self, which: str | int | None = None) -> int | None:
        """Load the newest commit, a snapshot by name, or a generation by number.

        Weights, buffers (with ``module``), hyper-parameters, step counts and ``extra`` are
        restored; states stay on disk until they are needed. Several ranks load the newest commit
        that all of them have. It may be called after a failure and after a backward that raised:
        unfinished updates and gradients are dropped.

        Args:
            which: The name of a snapshot or the number of a generation. Default: None, the newest
                commit.

        Returns:
            The number of steps taken before the commit; None if nothing was committed yet.

        Raises:
            OptionError: The stored run has other parameters, or there is no such snapshot.
            RankError: The ranks have no commit in common.
        """
        return self._resume(which)

    def _resume(self, which: str | int | None) -> int | None:
        storage = storage_of(self._params(), "resume()")
        self._runtime.steps.wait_idle_or_abandon()
        self._call_resume_hooks()
        generation = agreement.choose(storage.store, which, self._runtime.ranks)
        if generation is None:
            return None
        self._runtime.ranks.run_on_all("resume()", partial(self._go_on_from, generation))
        self._call_resume_hooks()
        return generation.step

    @property
    def extra(self) -> dict[str, Any]:
        """The ``extra`` that was saved with the commit that ``resume()`` loaded."""
        return self._runtime.extra

    def register_resume_hook(self, hook: Callable[[], None]) -> None:
        """Register a function that is called before ``resume()`` writes weights, and after it.

        So that copies of weights can be dropped, also those that another thread makes meanwhile.

        Args:
            hook: Takes no arguments; its result is ignored.
        """
        self._around_resume.append(hook)

    def register_update_hook(self, hook: Callable[[], None]) -> None:
        """Register a function that is called in each step, behind its updates or their start.

        An exception of it leaves weights half updated: later steps raise PoisonedError.

        Args:
            hook: Takes no arguments; its result is ignored.
        """
        self._runtime.steps.behind_updates.append(hook)

    def register_close_hook(self, hook: Callable[[], None]) -> None:
        """Register a function that is called when the optimizer has been closed.

        It is not called where the optimizer is dropped without ``close()``: the model may be in the
        middle of a forward then.

        Args:
            hook: Takes no arguments; its result is ignored. It may be called more than once.
        """
        self._at_close.append(hook)

    def _call_close_hooks(self) -> None:
        for hook in self._at_close:
            hook()

    def _call_resume_hooks(self) -> None:
        for hook in self._around_resume:
            hook()

    @property
    def alone(self) -> Callable[[], AbstractContextManager[object]]:
        """Return a function that makes a context in which other threads' calls wait.

        For code that shares the weights with the optimizer. Inside a call it is part of that call.
        """
        return self._call_lock.alone

    def wait_for_gradient(self) -> bool:
        """Wait until one gradient has arrived in host memory, and begin updates that it completes.

        Returns:
            False where none is on its way; then nothing was waited for.
        """
        with self.alone():
            return self._runtime.steps.wait_for_gradient()

    @exclusive_call("commit")
    def commit(self, extra: Mapping[str, Any] | None = None) -> int:
        """Make the current state of the run durable.

        Args:
            extra: What ``resume()`` shall restore: numbers, text, bytes, lists, tuples, sets,
                dicts, tensors and NumPy arrays. Default: None, what the constructor's ``extra``
                returns.

        Returns:
            The number of steps taken.

        Raises:
            TypeError: A value in ``extra`` of another type; nothing was done.
            CommitError: The commit did not happen, or it was called inside another call of the same
                thread, as from a signal handler: use ``request_commit()`` there.
            UnlinkedError: The run's files were deleted or moved; see ``commit_to()``.
        """
        storage_of(self._params(), "commit()")
        if extra is not None:
            check_extra(extra)
        return self._runtime.steps.commit(extra)

    def request_commit(self) -> None:
        """Request a commit at the end of the current step, or of the next one.

        It sets a flag, so signal handlers may call it. The commit is durable when that ``step()``
        returns. With several ranks, a step that all of them take commits, whichever rank asked.
        """
        storage_of(self._params(), "request_commit()")
        self._runtime.commits.requested = True

    @exclusive_call("commit_to")
    def commit_to(self, dir: options.DirectoryOption, extra: Extra | None = None) -> int:  # noqa: A002
        """Commit the run in another directory, and continue there.

        Call it between steps, on every rank. Snapshots are not moved. After an UnlinkedError it
        saves the run: the states are still in the open files.

        Args:
            dir: An empty directory, or several to stripe over.
            extra: As in ``commit()``.

        Returns:
            The number of steps taken.
        """
        params, before = self._params(), self._states()
        storage_of(params, "commit_to()")
        with suppress(UnlinkedError):  # which is why it is called
            self._runtime.steps.wait_idle()
        self._runtime.commits.refuse_strange(self._params())
        self._runtime.refuse_lack_of_extra("commit_to()", extra)
        try:
            where = options.directories(dir)
            commit_to(where, params, self._runtime.commits, self.param_groups, self.state, extra)
        finally:
            if params.store is not before:
                self._runtime.schedule.abort()
        return self._runtime.commits.step

    @exclusive_call("snapshot")
    def snapshot(self, name: str, extra: Mapping[str, Any] | None = None) -> None:
        """Keep the current state of the run under a name until ``drop()``; commits if needed.

        A snapshot copies nothing. Each may take as much disk space as the states.

        Args:
            name: The name; one that exists is refused.
            extra: As in ``commit()``.
        """
        self._snapshot(name, extra)

    def _snapshot(self, name: str, extra: Mapping[str, Any] | None) -> None:
        storage = storage_of(self._params(), "snapshot()")
        self._runtime.steps.wait_idle()
        self._runtime.commits.refuse_strange(self._params())
        if extra is not None or self._runtime.commits.committed != self._runtime.commits.step:
            self._runtime.steps.commit(extra)
        agreement.add_snapshot(
            storage.store, name, self._runtime.commits.generation, self._runtime.ranks
        )

    @exclusive_call("snapshots")
    def snapshots(self) -> Sequence[Summary]:
        """Return the snapshots that all ranks have.

        Returns:
            A summary of each, oldest first.
        """
        storage = storage_of(self._params(), "snapshots()")
        if not self._runtime.ranks.alone:
            self._runtime.commits.join(self._params())  # one meeting at a time
        return agreement.snapshots(storage.store, self._runtime.ranks)

    @exclusive_call("drop")
    def drop(self, name: str) -> None:
        """Remove a snapshot; its disk space is free then, unless it is the newest commit.

        Args:
            name: The name of the snapshot.
        """
        storage = storage_of(self._params(), "drop()")
        self._runtime.commits.join(self._params())
        agreement.drop_snapshot(storage.store, name, self._runtime.ranks)

    @exclusive_call("save_safetensors")
    def save_safetensors(self, path: str | os.PathLike[str]) -> None:
        """Write all states and hyper-parameters to one file, durably and in bounded memory.

        Tensors are named ``<parameter>.<state>``. Names come from ``module`` or the parameter
        groups, else positions are used. The weights are not written.

        Args:
            path: The file; one that exists is replaced when the new one is durable.
        """
        self._runtime.steps.wait_idle()
        groups, module = self.param_groups, self._runtime.commits.module
        optimizer_export.save(Path(path), self._params(), groups, self.state, module)

    def load_safetensors(self, path: str | os.PathLike[str]) -> None:
        """Load a file of ``save_safetensors`` into any placement or format, in bounded memory.

        Args:
            path: The file.
        """
        module = self._runtime.commits.module
        self.load_state_dict(optimizer_export.state_dict_of(Path(path), self.param_groups, module))

    def memory(self) -> StateMemory:
        """Return the bytes of states and buffers, by place.

        Returns:
            Bytes in RAM, on disk, in the ring buffer, pinned, and on the device.
        """
        held = self._runtime.schedule.most_held_bytes
        return replace(self._params().memory(), gradient_bytes=held)

    def traffic(self) -> Traffic:
        """Return the bytes of states moved since the optimizer was created.

        Returns:
            Bytes read, written and not read again, and the device's share of the updates.
        """
        return self._params().traffic()

    def start_trace(self) -> None:
        """Begin the event log that ``trace()`` returns."""
        self._states().pipeline.counters.start_trace()

    def trace(self) -> list[TraceEvent]:
        """Return the events of each lane (read, update, write, wait) since ``start_trace()``.

        Returns:
            One event per interval, with its lane, chunk, bytes and times in seconds.
        """
        return self._states().pipeline.counters.trace()

    def recording(self, module: torch.nn.Module | None = None) -> Recording:
        """Return a context that records what the run does inside, for ``report()``.

        It logs forward, backward and steps; reads, updates and writes; copies over links; waits;
        and the memory of the process 20 times a second. Logs are bounded: what finds one full is
        counted, and not kept.

        Args:
            module: The model, whose forward is recorded. Default: None, ``module`` of the
                constructor; without any, steps alone.

        Returns:
            The context manager.
        """
        module = self._runtime.commits.module if module is None else module
        parts = self._recorded_parts()
        log = self._states().pipeline.counters
        real = self._itself()
        recording = Recording(real, real, module=module, log=log, parts=parts)
        return self._runtime.last_recording.set(recording)

    def report(self, directory: str | os.PathLike[str]) -> dict[str, Path]:
        """Write a report of the run: of the last ``recording()``, or totals without one.

        ``report.html`` is a page that needs no other file, ``trace.json`` a trace for
        ui.perfetto.dev, ``report.json`` has the figures.

        Args:
            directory: Is made if it is not there; files of an earlier report are replaced.

        Returns:
            The paths of the files: "page", "trace" and "figures".

        Raises:
            OptionError: The recording has not ended yet.
            StowError: The files cannot be written.
        """
        real = self._itself()
        return self._runtime.last_recording.write(
            Path(directory), lambda: totals(real, real, self._recorded_parts())
        )

    @exclusive_call("close")
    def close(self) -> None:
        """Drop states, buffers and files now rather than with the object. Idempotent.

        It waits for updates and a commit. If the run has ``dir=``, steps that are not committed yet
        are committed, on every rank, as by ``commit()``; with ``commit_every=None`` their number is
        logged instead. A failure is raised after everything is closed.
        """
        try:
            self._runtime.finish()
        finally:
            self.state.clear()
            self._call_close_hooks()

    def __enter__(self) -> Self:
        """Return the optimizer, which the end of the block closes."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; after an exception, commit if this is the only rank, and log errors."""
        if kind is None:
            self.close()
            return
        self._runtime.finish_and_log()
        self.state.clear()
        self._call_close_hooks()

    # --- inside ---

    def _itself(self) -> "StowedAdam":
        """Return the optimizer where this is a wrapper ([Note: One end] in runtime)."""
        real = self._runtime.steps.contents.optimizer()
        return real if isinstance(real, StowedAdam) else self

    def _recorded_parts(self) -> list[RecordedPart]:
        link = self._params().links.weights
        return [
            LinkPart(link),
            CommitPart(self._runtime.commits),
            *(make() for make in self.recorded_parts),
        ]

    def _go_on_from(self, generation: Generation) -> None:
        params, module = self._params(), self._runtime.commits.module
        before = params.store
        try:
            self._runtime.extra = resume(generation, params, self.param_groups, self.state, module)
        finally:
            if params.store is not before:
                self._runtime.schedule.abort()
        with poisoning(params.store.pipeline):
            self._runtime.commits.resumed(generation, params)
            self._drop_gradients()

    def _make_param_filter(self) -> ParamFilter:
        """Return the test for parameters of ours; it must not refer to the optimizer."""
        return ParamFilter()

    def _check(self, parameter: torch.Tensor, name: str) -> None:
        """Raise unless this optimizer can update ``parameter``."""
        shard = shard_of(parameter)
        validation.check_parameter(in_order(shard, order_of(shard)), name)
        validation.refuse_host(shard_of(parameter), name, self._update_on)

    def _params(self) -> ParamTable:
        if not self._is_made:
            message = "The optimizer is not made yet."
            raise StowError(message)
        return self._runtime.params

    def _states(self) -> StateStore:
        return self._params().store

    def _parameters(self) -> Iterable[torch.Tensor]:
        return (p for group in self.param_groups for p in group["params"])

    # Not private to torch.optim: every optimizer of torch's is kept out of compiled graphs so.
    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    def _update(self, divisor: float) -> None:
        """Update by the gradients divided by ``divisor``, unscaled, and clipped."""
        # Attributes that torch.amp.GradScaler sets, of the optimizer it is given.
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        self._runtime.steps.update(divisor, found_inf, scale)


def _wait_for_all(optimizer: Optimizer) -> None:
    if isinstance(optimizer, StowedAdam):
        optimizer._runtime.steps.require(PublicCall.WHOLE)  # noqa: SLF001  # its own
        optimizer.wait()


def _complete_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(optimizer, StowedAdam):
        message = f"The hook of StowedAdam was called for a {type(optimizer).__name__}."
        raise TypeError(message)
    if optimizer._runtime.tickets:  # noqa: SLF001  # its own
        snapshot = partial(optimizer._snapshot, extra=None)  # noqa: SLF001
        made = make_ticket(optimizer._runtime, snapshot)  # noqa: SLF001
        return {**state_dict, "state": {}, ticket.KEY: made}
    complete_state_dict(state_dict["state"], list(optimizer._parameters()), optimizer._params())  # noqa: SLF001
    return state_dict
