"""``StowedAdam``: torch's optimizer interface over stowed states; base of Adam and AdamW."""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, Self

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from tensorstow.base.directories import expand_path, read_paths
from tensorstow.base.errors import OptionError, UnlinkedError
from tensorstow.checkpoint import agreement, optimizer_export, snapshot_reference
from tensorstow.checkpoint.commit_to import commit_to
from tensorstow.checkpoint.commits import storage_of
from tensorstow.checkpoint.full_state import (
    complete_state_dict,
    lacks_states,
    without_placeholders,
)
from tensorstow.checkpoint.ranks import Ranks
from tensorstow.checkpoint.reshard import move_rows
from tensorstow.checkpoint.resume import resume
from tensorstow.checkpoint.run import Extra, RunOptions
from tensorstow.checkpoint.serialize import check_extra, is_checked
from tensorstow.checkpoint.uploads import noted
from tensorstow.checkpoint.worlds import remove_stores, survey
from tensorstow.memory.released_part import ReleasedPart
from tensorstow.optim import one_optimizer, options
from tensorstow.optim.averaged_weights import AveragedWeights
from tensorstow.optim.placed import PlacedOptimizer
from tensorstow.optim.recording import CommitPart, LinkPart, RecordedPart
from tensorstow.optim.runtime import OptimizerRuntime
from tensorstow.optim.state_dicts import StateLoad, load_reference, make_reference
from tensorstow.optim.step_runner import ParamFilter
from tensorstow.states.memory import StateMemory
from tensorstow.states.native_pipeline import poisoning
from tensorstow.states.offload_policy import OffloadPolicy
from tensorstow.states.state_store import StateStore
from tensorstow.states.traffic import TraceEvent, Traffic, TrafficCounters
from tensorstow.step import validation
from tensorstow.step.call_lock import CallLock, exclusive_call
from tensorstow.step.legal_calls import PublicCall
from tensorstow.step.managed_param import in_shape_of
from tensorstow.step.norms import KeptNorms, exact_total_norm, total_norm
from tensorstow.step.param_table import ParamTable
from tensorstow.step.step_plan import name_of
from tensorstow.store.records import Generation, Summary
from tensorstow.store.remote import Remote
from tensorstow.store.remote_snapshots import check_name
from tensorstow.store.upload_notes import remove_note
from tensorstow.tensors.dtensor import gradient_of, in_order, order_of, shard_of
from tensorstow.tensors.placeholder import ConsumedGradient


class StowedAdam(PlacedOptimizer):
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
        # Before torch's constructor, which adds the groups by exclusive calls.
        self._call_lock = CallLock()
        validation.check_overlap(offload_policy.timing, run.module, run.accumulation_steps)
        options.check_delayed(offload_policy, run)
        options.check_deferred(offload_policy, run)
        extra_checked = is_checked(run.extra)
        self._isa = offload_policy.policy.isa
        self._update_on = offload_policy.update_on
        self._param_filter = self._make_param_filter()
        # torch.amp.GradScaler then hands its scale over instead of making a pass over the
        # gradients; with overlap="backward" there are no gradients left to scale.
        self._step_supports_amp_scaling = offload_policy.timing.allows_clipping
        super().__init__(params, defaults)
        validation.refuse_foreign(run.module, list(self._parameters()))
        trained = list(filter(validation.is_to_be_trained, self._parameters()))
        offload_policy = options.settled(offload_policy, run, trained)
        if grad_dtype is not None:
            validation.accept_grad_dtype(self._parameters(), grad_dtype)
        self.register_state_dict_pre_hook(_wait_for_all)
        ranks = Ranks.of(self._parameters(), offload_policy)
        self._runtime = OptimizerRuntime(
            offload_policy,
            run,
            self._call_lock,
            ranks,
            self._param_filter,
            extra_checked=extra_checked,
        )
        self._after_updates = self._runtime.steps.after_updates
        self._runtime.steps.contents.optimizer = self._real
        self._runtime.steps.contents.set(self.param_groups, self.state)
        one_optimizer.register(self, self._runtime.steps.is_alive)
        if offload_policy.timing.begins_early:
            validation.refuse_ranks(run.module, self._parameters())
        self._runtime.steps.attach(filter(validation.is_to_be_trained, self._parameters()))

    # --- torch.optim.Optimizer ---

    @exclusive_call("add_param_group")
    def _add_group(self, param_group: dict[str, Any]) -> None:
        options.check_keys(param_group, self.defaults)
        super()._add_group(param_group)

    def _take_group(self, group: dict[str, Any]) -> None:
        validation.check_hyper(group)
        validation.refuse_torch_keywords(group)
        for index, parameter in enumerate(group["params"]):
            if validation.is_to_be_trained(parameter):
                self._check(parameter, name_of(self.param_groups, group, index))
        if hasattr(self, "_runtime"):  # else all groups are attached at once
            self._runtime.steps.attach(filter(validation.is_to_be_trained, group["params"]))

    # Not private to torch.optim: every optimizer of torch's is kept out of compiled graphs so.
    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    def _take_step(self, loss: Callable[[], float] | None = None, *, divisor: float = 1.0) -> None:
        """Update by the gradients divided by ``divisor``, unscaled, and clipped."""
        del loss  # Adam's rule has no use for it
        # torch.amp.GradScaler sets these attributes of its optimizer.
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        self._runtime.steps.update(divisor, found_inf, scale)
        if self._runtime.commits.stop is not None:
            self._runtime.commits.stop.end()

    def _step_scaled(self, loss_scale: float, *, overflowed: bool = False) -> None:
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
        # The schedule comes first: updates may still read gradients that become zeros.
        self._runtime.schedule.drop_gradients(self._parameters(), to_zero=not set_to_none)
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # gradients, and no weights
            super().zero_grad(set_to_none)
        self._runtime.steps.clip.clear()

    @exclusive_call("state_dict")
    def state_dict(self) -> dict[str, Any]:
        """Return a state dict like torch's optimizer, including states on disk.

        Returns:
            A dict with "state" and "param_groups". States on disk are tensors in a memory-mapped
                file. With ``checkpoints="reference"`` it has no states, and names a snapshot that
                holds them.

        Raises:
            OptionError: A reference is asked for by one of several ranks before ``snapshot()``.
        """
        return super().state_dict()

    @exclusive_call("load_state_dict")
    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if snapshot_reference.is_reference(state_dict):
            load_reference(self._runtime, state_dict, self._resume)
            return
        options.check_state_dict(state_dict)
        self._runtime.steps.wait_idle()
        self._runtime.commits.step_end.forget("states were loaded after the last step")
        self._runtime.is_half_loaded = False
        load = StateLoad(self._runtime, self._param_filter)
        try:
            self._call_lock.allows_reads = True  # for users' hooks
            self._load_by_torch(state_dict, load.keep_tensors_back, load.put_tensors_in_place)
        except BaseException as error:
            # An interrupt: step counts of one run, moments of another.
            if self._runtime.is_half_loaded:
                self._states().pipeline.handle.poison(error)
            raise
        finally:
            self._call_lock.allows_reads = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore groups saved by another version or by torch; missing keys get our defaults."""
        self._runtime.is_half_loaded, self._call_lock.allows_reads = True, False
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        # Other objects have taken their place.
        self._runtime.steps.contents.set(self.param_groups, self.state)

    # --- beyond torch ---

    @exclusive_call("clip_grad_norm_")
    def _clip(self, factor_of: Callable[[torch.Tensor], float], loss_scale: float) -> torch.Tensor:
        self._runtime.schedule.check_clipping()
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # gradients, and no weights
            norm = self._norm_of_gradients() / loss_scale
        clipped = [(p, p.grad) for p in self._parameters() if p.grad is not None]
        self._runtime.steps.clip.set(factor_of(norm), clipped)
        return norm

    def _keep_norms(self) -> None:
        """Let ``grad_norm`` return the norm with ``overlap="backward"`` too, from now on."""
        self._runtime.schedule.norms = KeptNorms(self._isa)

    @exclusive_call("grad_norm")
    def _grad_norm(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # gradients, and no weights
            return self._norm_of_gradients()

    def _norm_of_gradients(self) -> torch.Tensor:
        parameters = list(self._parameters())
        norms = self._runtime.schedule.norms
        kept_squares = {} if norms is None else norms.all()
        used: dict[int, float] = {}
        gradients = []
        for index, parameter in enumerate(parameters):
            gradient = gradient_of(parameter)
            if isinstance(gradient, ConsumedGradient):
                number = self._params().get(parameter).number
                if number not in kept_squares:
                    message = (
                        'grad_norm() was called, and with overlap="backward" gradients have been'
                        ' used by then. Use overlap="forward" or "none".'
                    )
                    raise OptionError(message)
                used[index], gradient = kept_squares[number], None
            if gradient is not None:
                validation.check_gradient(shard_of(parameter), gradient, "a parameter")
            gradients.append(gradient)
        # Norms that were kept are of whole gradients, and the exact norm adds rows.
        if self._has_exact_norm and not used:
            return exact_total_norm(parameters, gradients, self._isa)
        return total_norm(parameters, gradients, self._isa, used)

    def averaged(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the weights of ``model`` are their averages (``ema=``).

        Use it for evaluation or export: ``tensorstow.save_safetensors(model, directory)`` inside
        writes the averages. Weights and averages exchange places on their tiers, a part of a chunk
        at a time; when the block ends, also by an error, the weights are back, bit for bit. A
        parameter without a step, as a frozen one, stays as it is. With several ranks, enter and
        leave it on each. Inside, calls such as ``step()``, ``commit()`` and ``state_dict()`` raise
        an error.

        Args:
            model: The model that the optimizer trains.

        Returns:
            The context manager.

        Raises:
            OptionError: There are no averages, or parameters that have some are not the model's.
        """
        return AveragedWeights(self._runtime, model, self._around_rewrites)

    def _accumulate(self) -> AbstractContextManager[None]:
        return self._runtime.schedule.accumulate()

    def _wait(self, parameters: Iterable[torch.Tensor] | None) -> None:
        self._runtime.steps.wait(None if parameters is None else [id(p) for p in parameters])

    @property
    def offload_policy(self) -> OffloadPolicy:
        """Where states are kept, in which format, and when updates run."""
        return self._params().offload_policy

    @property
    def _stowed_class(self) -> str:
        """Adam, whose states AdamW has too."""
        return "Adam"

    @exclusive_call("synchronize")
    def _synchronize(self) -> None:
        self._runtime.steps.wait_idle()
        self._states().pipeline.wait_idle()

    @exclusive_call("resume")
    def resume(self, which: str | int | None = None) -> int | None:
        """Load the newest commit, a snapshot by name, or a generation by number.

        Weights, buffers (with ``module``), hyper-parameters, step counts and ``extra`` are
        restored; states stay on disk until they are needed. Several ranks load the newest commit
        that all of them have. If that is of another number of ranks, all rows are moved to the
        stores of these, and the old stores are removed unless they have snapshots; going back to a
        snapshot of another number of ranks makes it the newest commit. It may be called after a
        failure and after a backward that raised: unfinished updates and gradients are dropped.

        Args:
            which: The name of a snapshot or the number of a generation. Default: None, the newest
                commit.

        Returns:
            The number of steps taken before the commit; None if nothing was committed yet.

        Raises:
            OptionError: The stored run has other parameters, or there is no such snapshot.
            RankError: The ranks have no commit in common, or stores are missing.
        """
        return self._resume(which)

    def _resume(self, which: str | int | None) -> int | None:
        storage = storage_of(self._params(), "resume()")
        self._runtime.steps.wait_idle_or_abandon()
        self._call_resume_hooks()
        store, ranks, commits = storage.store, self._runtime.ranks, self._runtime.commits
        worlds = survey(store, ranks, which)
        if worlds is not None:
            commits.era = worlds.next_era
            if worlds.moves:
                module = commits.module
                move_rows(worlds, self._params(), self.param_groups, module, store, ranks)
                # The rows that were moved are the newest commit now.
                which = None
        generation = agreement.choose(store, which, ranks)
        if generation is None:
            commits.begin_anew(store)
            self._drop_gradients()
            self._runtime.go_on_uploading(worlds)
            return None
        ranks.run_on_all("resume()", partial(self._go_on_from, generation))
        self._call_resume_hooks()
        if worlds is not None:
            remove_stores(worlds, ranks)
        self._runtime.go_on_uploading(worlds)
        return generation.step

    @property
    def extra(self) -> dict[str, Any]:
        """The ``extra`` that was saved with the commit that ``resume()`` loaded."""
        return self._runtime.extra

    def _call_resume_hooks(self) -> None:
        for hook in self._around_rewrites:
            hook(True)  # noqa: FBT003  # gradients go too

    @property
    def _alone(self) -> Callable[[], AbstractContextManager[object]]:
        """Return a function that makes a context in which other threads' calls wait.

        For code that shares the weights with the optimizer. Inside a call it is part of that call.
        """
        return self._call_lock.alone

    def _let_steps_go_on(self) -> None:
        """Let steps that begin in backward go on in the next forward, which waits by module."""
        self._runtime.schedule.may_go_on = True

    def _expect_units_of(self, nbytes: int) -> None:
        """Learn that a device copies ``nbytes`` of gradients to host memory together."""
        self._runtime.schedule.unit_bytes = nbytes

    def _wait_for_gradient(self) -> bool:
        """Wait until one gradient has arrived in host memory, and begin updates that it completes.

        Return False if none is under way; then nothing was waited for.
        """
        with self._alone():
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
        self._runtime.wait_uploaded()
        self._runtime.commits.refuse_strange(self._params())
        self._runtime.refuse_lack_of_extra("commit_to()", extra)
        try:
            target = read_paths(dir, "dir")
            commit_to(target, params, self._runtime.commits, self.param_groups, self.state, extra)
        finally:
            if params.store is not before:
                # What was under way belongs to the store that is gone.
                self._runtime.schedule.abort()
        return self._runtime.commits.step

    @exclusive_call("snapshot")
    def snapshot(
        self, name: str, extra: Mapping[str, Any] | None = None, to: str | None = None
    ) -> None:
        """Keep the current state of the run under a name until ``drop()``; commits if needed.

        A snapshot copies nothing on its disk. Each may take as much disk space as the states.

        Args:
            name: The name; it must not exist yet.
            extra: As in ``commit()``.
            to: A folder, or an address that fsspec reaches, such as "s3://bucket/run": the snapshot
                is copied there while the run goes on. ``tensorstow run pull`` copies it back. The
                next such call, ``drop()`` and ``close()`` wait for the copy and raise its error.
                ``resume()`` goes on with a copy that was not complete when a process ended.
                Default: None, it stays in the run's directory alone.

        Raises:
            RemoteError: An earlier copy failed, in spite of repeats.
        """
        if to is None:
            self._snapshot(name, extra)
            return
        check_name(name)
        remote, store = Remote(to), storage_of(self._params(), "snapshot()").store
        self._runtime.wait_uploaded()
        with noted(name, remote, store, self._runtime.ranks):
            self._snapshot(name, extra)
        self._runtime.upload(name, remote)

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
        self._runtime.wait_uploaded()
        self._runtime.commits.join(self._params())
        agreement.drop_snapshot(storage.store, name, self._runtime.ranks)
        remove_note(storage.store.directories[0], name)

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
        optimizer_export.save(expand_path(path), self._params(), groups, self.state, module)
        self._runtime.note_saved()

    def load_safetensors(self, path: str | os.PathLike[str]) -> None:
        """Load a file of ``save_safetensors`` into any placement or format, in bounded memory.

        Args:
            path: The file.
        """
        module = self._runtime.commits.module
        self.load_state_dict(optimizer_export.state_dict_of(path, self.param_groups, module))

    def _states_of(self, parameter: torch.Tensor) -> dict[str, Any] | None:
        param = self._params().find(parameter)
        if param is None or parameter not in self.state:
            return None if param is None else {}
        self.wait()
        entry = self.state[parameter]
        states = {name: shard_of(v).clone() for name, v in without_placeholders(entry).items()}
        if lacks_states(entry, param):
            read = self._states().read([param.number])[param.number]
            states = {**in_shape_of(param.shard, read), **states}
        return states

    def _memory(self) -> StateMemory:
        return self._runtime.schedule.counted_in(self._params().memory())

    def _traffic(self) -> Traffic:
        return self._params().traffic()

    @exclusive_call("release")
    def release(self, *, host: bool = False) -> None:
        """Give back the memory that only training needs, until ``wake()``; see PlacedOptimizer.

        Args:
            host: Whether to give back CPU memory too. Default: False.

        Raises:
            OptionError: Something is in use, or cannot be given back; nothing was.
        """
        self._runtime.memory.release(host=host)

    @exclusive_call("wake")
    def wake(self) -> None:
        """Take the memory again that ``release()`` gave back; no-op if nothing is released."""
        self._runtime.memory.wake()

    def _register_released_part(self, part: ReleasedPart) -> None:
        self._runtime.memory.parts.append(part)

    def start_trace(self) -> None:
        """Begin the event log that ``trace()`` returns."""
        self._states().pipeline.counters.start_trace()

    def trace(self) -> list[TraceEvent]:
        """Return the events of each lane (read, update, write, wait) since ``start_trace()``.

        Returns:
            One event per interval, with its lane, chunk, bytes and times in seconds.
        """
        return self._states().pipeline.counters.trace()

    def _recorded(
        self, module: torch.nn.Module | None
    ) -> tuple[torch.nn.Module | None, TrafficCounters | None]:
        module = self._runtime.commits.module if module is None else module
        return module, self._states().pipeline.counters

    @exclusive_call("close")
    def _close(self) -> None:
        self._runtime.memory.wake()  # the model may go on without its optimizer
        try:
            self._runtime.finish(asked=sys.exception() is None)
        finally:
            self._drop_states()

    def __enter__(self) -> Self:
        """Return the optimizer, which the end of the block closes."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; after an exception, commit the end of the last step if alone, and log errors."""
        if kind is not None:
            self._runtime.finish_and_log()
        self.close()

    # --- inside ---

    def _parts(self) -> list[RecordedPart]:
        link = self._params().links.weights
        return [LinkPart(link), CommitPart(self._runtime.commits), *super()._parts()]

    def _go_on_from(self, generation: Generation) -> None:
        params, module = self._params(), self._runtime.commits.module
        before = params.store
        try:
            self._runtime.extra = resume(generation, params, self.param_groups, self.state, module)
        finally:
            if params.store is not before:
                # What was under way belongs to the store that is gone.
                self._runtime.schedule.abort()
        with poisoning(params.store.pipeline):
            self._runtime.commits.resumed(generation, params)
            self._drop_gradients()

    def _complete(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        if self._runtime.saves_references:
            snapshot = partial(self._snapshot, extra=None)
            fields = make_reference(self._runtime, snapshot, state_dict["param_groups"])
            return {**state_dict, "state": {}, snapshot_reference.KEY: fields}
        complete_state_dict(state_dict["state"], list(self._parameters()), self._params())
        self._runtime.note_saved()
        return state_dict

    def _make_param_filter(self) -> ParamFilter:
        """Return the test for parameters of ours; it must not refer to the optimizer."""
        return ParamFilter()

    def _check(self, parameter: torch.Tensor, name: str) -> None:
        """Raise unless this optimizer can update ``parameter``."""
        shard = shard_of(parameter)
        validation.check_parameter(in_order(shard, order_of(shard)), name)
        validation.refuse_host(shard_of(parameter), name, self._update_on)

    def _params(self) -> ParamTable:
        return self._runtime.params

    def _states(self) -> StateStore:
        return self._params().store


def _wait_for_all(optimizer: Optimizer) -> None:
    if isinstance(optimizer, StowedAdam):
        optimizer._runtime.steps.require(PublicCall.WHOLE)  # noqa: SLF001  # its own
        optimizer.wait()
