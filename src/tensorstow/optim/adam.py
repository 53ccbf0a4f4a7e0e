"""``Adam`` and ``AdamW``: torch's signatures, with states in RAM or on disk."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from tensorstow.base.keywords import names_keywords
from tensorstow.base.signals import StopSignals
from tensorstow.base.update_on import AccumulationSteps, DelayedUpdate, OverlapOption, UpdateOn
from tensorstow.checkpoint.run import DEFAULT_EVERY, Checkpoints, Extra
from tensorstow.optim import options
from tensorstow.optim.options import DirectoryOption, Durability, StatePlacement
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.states.policy import PipelinePolicy


@names_keywords
class Adam(StowedAdam):
    """``torch.optim.Adam`` with its states in RAM, on disk, or split between the two.

    Every placement of the states gives bitwise the same parameters. Source: Kingma and Ba, "Adam: A
    Method for Stochastic Optimization", 2015.

    Args:
        params: Parameters, named parameters, or parameter groups, as for torch's class.
        lr: The learning rate. Default: 1e-3.
        betas: The decay rates of the first and the second moment. Default: (0.9, 0.999).
        eps: Term added to the root of the second moment. Default: 1e-8.
        weight_decay: An L2 penalty. Default: 0.
        amsgrad: Whether the running maximum of the second moment is used.
        ema: As in ``AdamW``.
        maximize: Whether parameters move along the gradient instead of against it.
        foreach: None or False; True raises an error.
        capturable: False; True raises an error.
        differentiable: False; True raises an error.
        fused: Accepted, and changes nothing.
        decoupled_weight_decay: True makes it AdamW, as in torch.
        states: As in ``AdamW``.
        dir: As in ``AdamW``.
        ram_budget: As in ``AdamW``.
        state_format: As in ``AdamW``.
        update_on: As in ``AdamW``.
        overlap: As in ``AdamW``.
        module: As in ``AdamW``.
        accumulation_steps: As in ``AdamW``.
        durability: As in ``AdamW``.
        commit_every: As in ``AdamW``.
        extra: As in ``AdamW``.
        stop_signals: As in ``AdamW``.
        checkpoints: As in ``AdamW``.
        defer_untouched: As in ``AdamW``.
        grad_dtype: As in ``AdamW``.
        policy: As in ``AdamW``.

    Raises:
        OptionError: An argument is invalid.
        DTypeError: No kernel supports a parameter's dtype, layout or device.
        DirectoryError: A directory is missing, read-only, too full or in RAM.
    """

    def __init__(  # noqa: PLR0913  # torch's own signature, then ours
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,  # noqa: FBT001, FBT002
        *,
        ema: float | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        states: StatePlacement = "host",
        dir: DirectoryOption = None,  # noqa: A002
        ram_budget: str | int | None = None,
        state_format: str | None = None,
        update_on: UpdateOn | None = None,
        overlap: OverlapOption | DelayedUpdate = "auto",
        module: torch.nn.Module | None = None,
        accumulation_steps: AccumulationSteps = 1,
        durability: Durability = None,
        commit_every: str | int | None = DEFAULT_EVERY,
        extra: Callable[[], Extra] | None = None,
        stop_signals: StopSignals = None,
        checkpoints: Checkpoints = "full",
        defer_untouched: bool = False,
        grad_dtype: torch.dtype | None = None,
        policy: PipelinePolicy | None = None,
    ) -> None:
        """Create the optimizer; the class documents the arguments."""
        placement = options.placement(states, dir, ram_budget, durability)
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                "maximize": maximize,
                "foreach": foreach,
                "capturable": capturable,
                "differentiable": differentiable,
                "fused": fused,
                "decoupled_weight_decay": decoupled_weight_decay,
                **({} if ema is None else {"ema": ema}),
            },
            options.offload_policy(
                placement,
                policy=policy,
                overlap=overlap,
                state_format=state_format,
                amsgrad=amsgrad,
                update_on=update_on,
            ),
            run=options.run_options(
                module,
                accumulation_steps=accumulation_steps,
                commit_every=commit_every,
                extra=extra,
                stop_signals=stop_signals,
                checkpoints=checkpoints,
                defer_untouched=defer_untouched,
                durable=placement.durable,
            ),
            grad_dtype=grad_dtype,
        )


@names_keywords
class AdamW(Adam):
    """``torch.optim.AdamW`` with its states in RAM, on disk, or split between the two.

    Every placement of the states gives bitwise the same parameters. Source: Loshchilov and Hutter,
    "Decoupled Weight Decay Regularization", 2019; ``amsgrad``: Reddi, Kale and Kumar, "On the
    Convergence of Adam and Beyond", 2018.

    Args:
        params: Parameters, named parameters, or parameter groups, as for torch's class.
        lr: The learning rate. Default: 1e-3.
        betas: The decay rates of the first and the second moment. Default: (0.9, 0.999).
        eps: Term added to the root of the second moment. Default: 1e-8.
        weight_decay: The decoupled weight decay. Default: 1e-2.
        amsgrad: Whether the running maximum of the second moment is used.
        ema: The decay of an exponential moving average of the weights, from 0 to 1, such as 0.9999,
            which the update keeps as one more fp32 state, ``"ema"``: of masters, if parameters are
            16-bit. The bits are those of torch's ``AveragedModel(multi_avg_fn=
            get_ema_multi_avg_fn(ema))`` on a CPU with FMA; a parameter without a gradient in a step
            keeps its average. It is an option of groups: set ``group["ema"]`` between steps for a
            schedule. ``averaged(model)`` puts the averages in the place of the weights. Default:
            None, no average.
        maximize: Whether parameters move along the gradient instead of against it.
        foreach: None or False; True raises an error.
        capturable: False; True raises an error.
        differentiable: False; True raises an error.
        fused: Accepted, and changes nothing.
        states: "host" (or "cpu", "ram"), "disk" (or "nvme"), or the fraction of the states' bytes
            that is on disk, 0 to 1. Default: "host".
        dir: The directory of a run, or several to stripe over, whose commits outlive the process;
            with ``durability="none"``, of scratch files. It is created if it is missing; the
            directory that it is in must exist. Default: None, scratch files on a real disk that is
            chosen and logged.
        ram_budget: Bytes, or text such as "512MiB", for states on disk: 48 MiB are the ring buffer
            that they pass through, the rest holds states that stay in RAM. Default: None, the ring
            buffer.
        state_format: "fp32"; "split", which is exact and the default for bfloat16 parameters whose
            states are on disk; "bf16" or "int8", which are inexact.
        update_on: Where updates run, with the same bits. "host"; "device", on the accelerator that
            has the parameters; "hybrid", on both at once, or a number between 0 and 1, the device's
            share; "auto", the faster of "host" and "device". "hybrid" and "auto" measure the first
            steps. All but "host" need every parameter on the device, ``overlap`` "none" or
            "backward", and device memory for three chunks. Default: None, as a resumed run did,
            else "host".
        overlap: When updates run. "none": in ``step()``. "forward": during the next forward of
            ``module``. "backward": during the backward that computes the gradients, without
            clipping or GradScaler. "speculative": the same with both, as updates are undone where
            the gradients change, from a second copy of the states on disk and of the weights, in
            memory or on disk. ``DelayedUpdate()``, which is inexact: during the next forward and
            backward, which use the earlier weights. Default: "auto", "forward" with ``module`` if
            one process has the weights in host memory, and states on disk that are much larger than
            the ring buffer; else "none". The log says which, and why, for states on disk.
        module: The model that owns the parameters: for names, buffers, and hooks that wait for
            updates.
        accumulation_steps: Backward passes per step, or a function that returns whether the one
            under way is the last; used by ``overlap`` "backward" and "speculative" only.
        durability: "commit" or "none". Default: None, "commit" with ``dir``, else "none".
        commit_every: A time ("10min"), a number of steps, or None for ``commit()`` by hand.
        extra: A function that returns a dict to save with each commit: numbers, text, bytes, lists,
            tuples, sets, dicts, tensors and NumPy arrays. It is called at the end of each
            ``step()``, so what the loop does after that is not in a scheduled commit: repeat
            ``scheduler.step()`` or the update of an average after ``resume()``.
        stop_signals: The name of a signal ("SIGTERM"), or a dict of exit statuses by names, such as
            ``{"SIGTERM": 0, "SIGUSR1": 75}``. After one, the next ``step()`` commits on all ranks
            and raises SystemExit with its status; a name alone has status 0. Needs ``dir``.
            Default: None.
        checkpoints: "full", or "reference" with ``dir``: ``state_dict()`` then refers to a snapshot
            in the run's directory and holds no states, and ``load_state_dict()`` resumes from it.
        defer_untouched: Whether rows of embeddings, and stacked experts of transformers, whose
            gradient is zero in a step are left out of it, and their updates made when the rows are
            next read, with the same bits. For states on disk, which are then read and written in
            proportion to what was touched. It needs ``module``. Default: False.
        grad_dtype: The dtype of the gradients of fp32 parameters, if it is a 16-bit one.
        policy: Sizes, threads and the I/O backend of the pipeline; no value changes a result.

    Raises:
        OptionError: An argument is invalid.
        DTypeError: No kernel supports a parameter's dtype, layout or device.
        DirectoryError: A directory is missing, read-only, too full or in RAM.
    """

    def __init__(  # noqa: PLR0913  # torch's own signature, then ours
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,  # noqa: FBT001, FBT002
        *,
        ema: float | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        states: StatePlacement = "host",
        dir: DirectoryOption = None,  # noqa: A002
        ram_budget: str | int | None = None,
        state_format: str | None = None,
        update_on: UpdateOn | None = None,
        overlap: OverlapOption | DelayedUpdate = "auto",
        module: torch.nn.Module | None = None,
        accumulation_steps: AccumulationSteps = 1,
        durability: Durability = None,
        commit_every: str | int | None = DEFAULT_EVERY,
        extra: Callable[[], Extra] | None = None,
        stop_signals: StopSignals = None,
        checkpoints: Checkpoints = "full",
        defer_untouched: bool = False,
        grad_dtype: torch.dtype | None = None,
        policy: PipelinePolicy | None = None,
    ) -> None:
        """Create the optimizer; the class documents the arguments."""
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            ema=ema,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
            states=states,
            dir=dir,
            ram_budget=ram_budget,
            state_format=state_format,
            update_on=update_on,
            overlap=overlap,
            module=module,
            accumulation_steps=accumulation_steps,
            durability=durability,
            commit_every=commit_every,
            extra=extra,
            stop_signals=stop_signals,
            checkpoints=checkpoints,
            defer_untouched=defer_untouched,
            grad_dtype=grad_dtype,
            policy=policy,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Remain AdamW after loading, as torch's does: groups of an Adam have other flags."""
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True
