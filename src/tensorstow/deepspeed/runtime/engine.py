"""``deepspeed.runtime.engine``: a module that runs backward and steps its optimizer."""

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from tensorstow.base.errors import BackwardError, OptionError
from tensorstow.deepspeed.checkpoint.saved_module import SavedModule
from tensorstow.deepspeed.comm import get_local_rank
from tensorstow.deepspeed.config.settings import Settings
from tensorstow.deepspeed.external_parameters import uses_outside_of_blocks_named
from tensorstow.deepspeed.loss_scale import LossScale
from tensorstow.deepspeed.monitor import Monitor
from tensorstow.deepspeed.registry import RegisteredModel, register
from tensorstow.deepspeed.runtime.dataloader import make_dataloader
from tensorstow.deepspeed.states import refuse_states_that_stay, watch_loads
from tensorstow.deepspeed.step import DirectBackward, OptimizerStep
from tensorstow.deepspeed.timer import StepTimer, ThroughputTimer
from tensorstow.doorkit.stop_point import StopPoint
from tensorstow.fsdp.full_tensors import resharded
from tensorstow.fsdp.sharding import current_device, rank_here
from tensorstow.fsdp.unshard import micro_batches_of, not_reduced
from tensorstow.optim.placed import PlacedOptimizer

_NESTED = (
    "no_sync() or coalesce_grad_reduction() was called inside of one of them: one context is"
    " enough. Leave one out."
)
_UNREDUCED = (
    "step() was called inside no_sync() or coalesce_grad_reduction(), whose gradients need not be"
    " reduced yet: call it after the context exits."
)


class EnginePhase(Enum):
    """The call or context that an engine is in; each begins in ``ACCUMULATING`` alone."""

    ACCUMULATING = 1
    NO_SYNC = 2
    COALESCING = 3
    STEPPING = 4


class DeepSpeedEngine(SavedModule):
    """A placed model with its optimizer and scheduler: ``engine(...)``, ``backward``, ``step``.

    Attributes that the engine lacks are the module's. ``initialize`` creates it. What trains raises
    OptionError in an engine without an optimizer.

    Args:
        module: The model that ``stow`` returned.
        optimizer: Its optimizer; None: the engine evaluates.
        settings: The configuration.
        lr_scheduler: A scheduler with ``step()`` and a state dict. Default: None.
        scale: The loss scale. Default: None, without fp16.
        config: The configuration as it was written, for scripts that read it. Default: None, {}.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: PlacedOptimizer | None,
        settings: Settings,
        *,
        lr_scheduler: Any = None,
        scale: LossScale | None = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(settings, {} if config is None else config)
        self.module = module
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.training_dataloader: Any = None
        self.collate_fn: Callable[[list[Any]], Any] | None = None
        self.stop_point = StopPoint()
        self.device = current_device()
        self.global_rank, self.local_rank = rank_here(), get_local_rank()
        self.global_steps = self.micro_steps = self.skipped_steps = self.global_samples = 0
        self._scale = scale
        self._update = None
        if optimizer is not None:
            self._update = OptimizerStep(optimizer, settings.gradient_clipping, scale)
        self._times = self.world_size if settings.gradient_allreduce_op == "sum" else 1
        """Factor of the losses: reductions take a mean over the ranks."""
        self._direct = DirectBackward(
            1 if optimizer is None else settings.batch.accumulation,
            needs_scale=optimizer is not None and scale is not None,
            beside_backward=optimizer is not None and optimizer.offload_policy.timing.begins_early,
            times=self._times,
        )
        self._boundary: bool | None = None
        self._phase, self._applied = EnginePhase.ACCUMULATING, False
        self._backwards = 0
        """Number of the engine's backwards since the last step."""
        self._micro_batches = micro_batches_of(module)
        if self._micro_batches is not None:
            self._micro_batches.ask(self._ends_step)
        self._timer = StepTimer(
            settings.steps_per_print,
            timed=settings.wall_clock_breakdown,
            logs=self.global_rank == 0,
        )
        self.tput_timer = ThroughputTimer(settings.batch.train)
        self.monitor = Monitor(settings, writes=self.global_rank == 0)
        self._loss = 0.0
        if optimizer is not None:
            zero = settings.zero
            # Held here, because the registry refers to it weakly.
            self._placed = register(
                RegisteredModel(module, optimizer, zero.stage, zero.enable_sanity_checks)
            )
            watch_loads(module, optimizer)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Not set yet: asking ``self.module`` for it would recur without end.
            if name == "module":
                raise
            return getattr(self.module, name)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the sharded parameters; reshard those that the last forward left unsharded."""
        resharded(self.module)
        yield from super().named_parameters(*args, **kwargs)

    @property
    def dp_world_size(self) -> int:
        """The number of data-parallel ranks."""
        return self.world_size

    def destroy(self) -> None:
        """Close the optimizer and free its states, buffers and files; the weights stay."""
        self.monitor.close()
        self.stop_point.close()
        if self.optimizer is not None:
            self.optimizer.close()

    def _trained(self, call: str) -> tuple[PlacedOptimizer, OptimizerStep]:
        """Return the optimizer and its step; raises OptionError if the engine has none."""
        if self.optimizer is None or self._update is None:
            message = (
                f"{call} was called on an engine without an optimizer, which evaluates: pass"
                ' optimizer= to initialize(), or write a section "optimizer" in its configuration.'
            )
            raise OptionError(message)
        return self.optimizer, self._update

    # --- a step ---

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; after a step and a signal of ``stop_signals``, save and end instead.

        Raises:
            SystemExit: Such a signal came to any rank.
            OptionError: The module uses a weight outside of its block, under stage 3, and
                ``zero.register_external_parameter`` was not called for it.
        """
        if torch.is_grad_enabled():
            self.stop_point.reach()
        is_cast = self.settings.torch_autocast.enabled
        casts = torch.autocast(self.device.type, torch.bfloat16) if is_cast else nullcontext()
        if self.module.training:
            self.tput_timer.start()
        with self._timer.measure("forward"), casts, uses_outside_of_blocks_named():
            output = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            if self.optimizer is not None:
                self._direct.micro_batches = self.gradient_accumulation_steps()
            self._direct.watch(output)
        return output

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Compute the gradients of a loss, multiplied by the loss scale, and accumulate them.

        Args:
            loss: A scalar tensor.
            retain_graph: As of ``torch.Tensor.backward``.
            scale_wrt_gas: Whether the loss is divided by the number of micro-batches here.

        Returns:
            The loss, divided by the number of micro-batches unless ``scale_wrt_gas`` is False.
        """
        optimizer, update = self._trained("backward()")
        self.stop_point.reach()  # of a module that was called directly
        if scale_wrt_gas:
            loss = loss / self.gradient_accumulation_steps()
        factor = update.factor * self._times
        scaled = loss if factor == 1.0 else loss.float() * factor
        # With overlap="backward" gradients are used when they are final: the engine knows when.
        last = self._ends_step()
        more = nullcontext() if last else optimizer.accumulate()
        if self._micro_batches is not None:
            self._micro_batches.tell()
        with self._timer.measure("backward"), self._direct.engines_own(), more:
            scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        # Only if it is written: reading a loss waits for the device.
        if self.monitor.enabled:
            self._loss += float(loss.detach())
        self._backwards += 1
        return loss

    def _backward_epilogue(self) -> None:
        """End your own ``backward()`` of a loss of several engines; the name is upstream's.

        With fp16 the gradients are not multiplied by the loss scale, unless you called ``scale``;
        ``step()`` takes this into account.
        """
        _, update = self._trained("_backward_epilogue()")
        update.unscaled += not self._direct.is_scaled
        self._direct.is_scaled = False
        self._backwards += 1

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a loss multiplied by the loss scale, for a ``backward()`` of your own.

        Args:
            loss: A scalar tensor.

        Returns:
            A tensor; call its ``backward()`` before the next forward. That backward divides by the
            number of micro-batches.

        Raises:
            OptionError: The loss is not a scalar.
        """
        if loss.numel() != 1:
            message = (
                f"scale() was given a tensor of shape {tuple(loss.shape)}: a loss is a scalar. Take"
                " its mean or sum."
            )
            raise OptionError(message)
        self._direct.is_scaled = True
        factor = self.loss_scale
        return loss if factor == 1.0 else loss.float() * factor

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Count a micro-batch; with the last one of a step, update and step the scheduler.

        A step whose gradients are not finite is skipped on every rank, and so is the scheduler.

        Args:
            lr_kwargs: Keywords for the scheduler's ``step()``.

        Raises:
            BackwardError: Some losses of this step were multiplied by the loss scale.
            OptionError: The gradients are not finite, and updates by them run during backward; or
                it was called inside ``no_sync()`` or ``coalesce_grad_reduction()``.
        """
        _, update = self._trained("step()")
        with self._enter(EnginePhase.STEPPING, _UNREDUCED):
            self._applied = False
            ends_step = self.is_gradient_accumulation_boundary()
            if ends_step:
                self._step(update, lr_kwargs)
        self.micro_steps += 1
        self.tput_timer.stop(global_step=ends_step)
        if ends_step:
            self.stop_point.note_step()

    @contextmanager
    def _enter(self, phase: EnginePhase, refusal: str) -> Iterator[None]:
        """Be in a phase inside the context; raises OptionError inside of another one."""
        if self._phase is not EnginePhase.ACCUMULATING:
            raise OptionError(refusal)
        self._phase = phase
        try:
            yield
        finally:
            self._phase = EnginePhase.ACCUMULATING

    def _step(self, update: OptimizerStep, lr_kwargs: dict[str, Any] | None) -> None:
        """Update and step the scheduler; raises BackwardError."""
        if self._scale is not None and 0 < update.unscaled < self._backwards:
            message = (
                f"{update.unscaled} of {self._backwards} losses of this step were not multiplied by"
                " the loss scale: use engine.backward(loss) for all of them, or for none."
            )
            raise BackwardError(message)
        with self._timer.measure("step"):
            self._applied = taken = update.run()
        if not taken:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self.global_steps += 1
        train, micro, _ = self.get_batch_info()
        managed = self.managed_gradient_accumulation()
        self.global_samples += train if managed else micro * self.world_size * self._backwards
        self._backwards = 0
        facts = {"skipped": self.skipped_steps, "lr": self.get_lr(), "scale": self.loss_scale}
        self._timer.log_step(self.global_steps, facts)
        self._monitor_step()

    def _monitor_step(self) -> None:
        """Write the scalars of a step, with upstream's names."""
        if not self.monitor.enabled:
            return
        scalars = {"train_loss": self._loss, "lr": self.get_lr()[0]}
        if self._scale is not None:
            scalars["loss_scale"] = self.loss_scale
        samples = self.global_samples
        self.monitor.write_events([(f"Train/Samples/{k}", v, samples) for k, v in scalars.items()])
        self._loss = 0.0

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether this micro-batch is the last one of a step.

        Returns:
            What ``set_gradient_accumulation_boundary`` set, else by counting; without
            ``managed_gradient_accumulation`` whether ``step()`` runs.
        """
        if not self.managed_gradient_accumulation():
            return self._phase is EnginePhase.STEPPING
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def _ends_step(self) -> bool:
        """Return whether the next backward reduces the gradients."""
        counts = self.managed_gradient_accumulation() and self._phase is not EnginePhase.COALESCING
        return not counts or self.is_gradient_accumulation_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether this micro-batch, and those after it, end a step.

        Args:
            is_boundary: Whether the next ``step()`` updates.

        Raises:
            OptionError: Every ``step()`` does, without ``managed_gradient_accumulation``.
        """
        if not self.managed_gradient_accumulation():
            message = (
                "set_gradient_accumulation_boundary() was called with"
                " managed_gradient_accumulation=false: each call of step() is one. Leave it out."
            )
            raise OptionError(message)
        self._boundary = is_boundary

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the current step."""
        if self.optimizer is None:
            self.module.zero_grad(set_to_none)
        else:
            self.optimizer.zero_grad(set_to_none)

    def _begin_step_again(self) -> None:
        """Drop the gradients that wait for ``step()``: the next backward is the first of a step."""
        if self._update is not None:
            self._update.drop_gradients()
        self._backwards, self._loss = 0, 0.0
        self.micro_steps -= self.micro_steps % self.gradient_accumulation_steps()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which gradients are not reduced, in stages 0 and 1 as upstream.

        Raises:
            OptionError: The stage is 2 or 3, or the context is inside of another one.
        """
        stage = self.zero_optimization_stage()
        if stage > 1:
            message = (
                f"no_sync() was called in ZeRO stage {stage}, which shards gradients once they are"
                " computed: full gradients cannot be accumulated. Use stage 1 or 0."
            )
            raise OptionError(message)
        # Stage 1 always reduces with the last micro-batch only.
        unreduced = nullcontext() if stage else not_reduced(self.module)
        with self._enter(EnginePhase.NO_SYNC, _NESTED), unreduced:
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Return a context of several backwards that belong to one step; call ``step()`` after it.

        Each backward reduces its gradients by itself, and upstream reduces their sum: the results
        are the same but for rounding.

        Raises:
            OptionError: The stage is 0, updates run during backward, ``step()`` is the only
                boundary already, or the context is inside of another one.
        """
        optimizer, _ = self._trained("coalesce_grad_reduction()")
        timing = optimizer.offload_policy.timing
        without = {
            "ZeRO stage 0": not self.zero_optimization(),
            "managed_gradient_accumulation=false": not self.managed_gradient_accumulation(),
            timing.keyword: timing.begins_early,
        }
        for reason, applies in without.items():
            if applies:
                message = (
                    f"coalesce_grad_reduction() was called with {reason}. Use gradient_accumulation"
                    "_steps, or leave one of both out."
                )
                raise OptionError(message)
        with self._enter(EnginePhase.COALESCING, _NESTED):
            yield

    # --- data, and the place of states ---

    def deepspeed_io(  # upstream's
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Sampler[Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """Return a dataloader of micro-batches, different ones on each rank.

        Args:
            dataset: The data set; an iterable one selects its rank's samples itself.
            batch_size: Samples of a batch. Default: None, those of a micro-batch.
            route: "train": samples are shuffled; else they come in their order.
            pin_memory: Whether batches for an accelerator are in pinned memory.
            data_sampler: Selects samples. Default: None, a share of them for each rank.
            collate_fn: Makes a batch of samples. Default: None, that of ``initialize``.
            num_local_io_workers: Processes that load. Default: None, this one does.
        """
        return make_dataloader(
            dataset,
            self.settings,
            collate_fn or self.collate_fn,
            batch_size=batch_size,
            sampler=data_sampler,
            shuffled=route == "train",
            workers=num_local_io_workers or 0,
            pinned=pin_memory and self.device.type != "cpu",
        )

    def offload_states(
        self,
        include: Container[str] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Free the accelerator of optimizer states and master weights, which are never on it.

        Args:
            include: What is to go, of ``OffloadStateTypeEnum``. Default: None, all; weights and
                gradients on an accelerator stay there, which is logged.
            device: "cpu".
            pin_memory, non_blocking: Not used.

        Raises:
            OptionError: ``device`` is another, or weights or gradients are asked for that are on an
                accelerator.
        """
        del pin_memory, non_blocking
        self._trained("offload_states()")
        refuse_states_that_stay(self.module, include, device)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Undo ``offload_states``, which moved nothing.

        Args:
            non_blocking: Not used.
        """
        del non_blocking
        self._trained("reload_states()")

    def empty_partition_cache(self) -> None:
        """Free the whole weights that the last forward left on this rank, under stage 3."""
        resharded(self.module)

    # --- results ---

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [float(group["lr"]) for group in self._groups]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every parameter group.

        Args:
            lr: The learning rate.
        """
        optimizer, _ = self._trained("set_lr()")
        for group in optimizer.param_groups:
            group["lr"] = lr

    def get_mom(self) -> list[tuple[float, float] | float]:
        """Return the betas of each group, or its momentum: 0 without any."""
        return [
            (float(g["betas"][0]), float(g["betas"][1]))
            if "betas" in g
            else float(g.get("momentum", 0.0))
            for g in self._groups
        ]

    @property
    def _groups(self) -> list[dict[str, Any]]:
        """The parameter groups; none without an optimizer."""
        return [] if self.optimizer is None else self.optimizer.param_groups

    def get_global_grad_norm(self) -> float | None:
        """Return the 2-norm of the last step's gradients of all ranks, before clipping, or None."""
        norm = None if self._update is None else self._update.norm
        return None if norm is None else norm.item()

    def was_step_applied(self) -> bool:
        """Return whether the last ``step()`` changed the weights; False if it was skipped."""
        return self._applied

    @property
    def loss_scale(self) -> float:
        """The number that losses are multiplied by; 1 without fp16."""
        return 1.0 if self._update is None else self._update.factor

    cur_scale = loss_scale
