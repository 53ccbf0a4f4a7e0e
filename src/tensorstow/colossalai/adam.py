"""ColossalAI's CPUAdam and HybridAdam by their own signatures, over the one implementation."""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.optim.adam import adam as torch_adam
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.optimizer import ParamsT

from tensorstow.base.directories import read_paths
from tensorstow.base.errors import DTypeError, OptionError
from tensorstow.base.fields import read_value
from tensorstow.base.update_on import Overlap, refuse_delayed
from tensorstow.doorkit.keyword_table import ADAM, checks_keywords
from tensorstow.fsdp.validation import KeepsOnDevice, TranslatesPlacement
from tensorstow.optim import options
from tensorstow.optim.adam import Adam
from tensorstow.optim.options import DirectoryOption, StatePlacement
from tensorstow.optim.step_runner import ParamFilter
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.states.kernels import prepare_kernels
from tensorstow.states.policy import PipelinePolicy
from tensorstow.step import validation
from tensorstow.step.step_plan import Groups, States
from tensorstow.tensors.dtensor import gradient_of, is_sharded, part_of, shard_of, sharded_like

logger = logging.getLogger("tensorstow")


@checks_keywords(ADAM)
class CPUAdam(Adam):
    """ColossalAI's CPUAdam: Adam or AdamW for parameters in host memory.

    Unlike upstream, ``amsgrad`` works, states can be saved and loaded, and bfloat16 is exact.

    Args:
        nvme_offload_fraction: The fraction of the states' bytes that is on disk, 0 to 1, exactly.
        nvme_offload_dir: The directory of scratch files, which is created if it is missing.
            Default: None, a real disk that is chosen and logged.
        simd_log: Whether the instruction set and the number of threads are logged.
        grad_dtype: The dtype of the gradients of fp32 parameters, if it is a 16-bit one.
        policy: Sizes, threads and the I/O backend; no value changes a result.
        states: Set by ``tensorstow.stow``: "host", or "disk", of which ``nvme_offload_fraction``
            is on disk if that is above 0. Default: None, by the fraction.
        dir: The directory of a run, whose commits outlive the process, as in ``AdamW``.
        ram_budget, overlap, module, accumulation_steps: As in ``AdamW``.

    Raises:
        OptionError: An argument that cannot be used.
        DTypeError: A parameter of a dtype, layout or device that no kernel takes.
        DirectoryError: A directory that is read-only, too full or in RAM.
    """

    def __init__(  # upstream's signature, then stow()'s keywords
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: DirectoryOption = None,
        *,
        amsgrad: bool = False,
        simd_log: bool = False,
        grad_dtype: torch.dtype | None = None,
        policy: PipelinePolicy | None = None,
        states: StatePlacement | None = None,
        dir: DirectoryOption = None,  # noqa: A002
        ram_budget: str | int | None = None,
        overlap: Overlap = "none",
        module: torch.nn.Module | None = None,
        accumulation_steps: int = 1,
    ) -> None:
        refuse_delayed(overlap, f"to {type(self).__name__}")
        fraction = _fraction_of(nvme_offload_fraction, states)
        scratch = read_paths(nvme_offload_dir, "nvme_offload_dir")
        if scratch and dir is not None:
            message = (
                f"nvme_offload_dir={nvme_offload_dir!r} and dir={dir!r} were given: the files of a"
                " run are all in dir. Leave nvme_offload_dir out."
            )
            raise OptionError(message)
        self._commits_states = dir is not None
        read_value(bool, bias_correction, "bias_correction")
        if read_value(bool, simd_log, "simd_log"):
            facts = prepare_kernels(policy)
            logger.warning("Adam runs on %s, %d threads", facts.isa, facts.threads)
        super().__init__(
            model_params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            decoupled_weight_decay=adamw_mode,
            states=fraction,
            dir=dir if dir is not None else (scratch if fraction else None) or None,
            durability="none" if dir is None else "commit",
            ram_budget=ram_budget,
            overlap=overlap,
            module=module,
            accumulation_steps=accumulation_steps,
            grad_dtype=grad_dtype,
            policy=policy,
        )
        self.defaults["bias_correction"] = bias_correction
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)

    @staticmethod
    def translate_placement(keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Translate a caller's keywords for the placement to those of a plan.

        Args:
            keywords: The constructor's keywords.

        Returns:
            The keywords; "states" is "disk" if ``nvme_offload_fraction`` is above 0.
        """
        asked = dict(keywords)
        if asked.get("nvme_offload_fraction"):
            asked.setdefault("states", "disk")
        return asked

    def _check(self, parameter: torch.Tensor, name: str) -> None:
        validation.refuse_accelerator(shard_of(parameter), name)
        super()._check(parameter, name)

    def step(  # type: ignore[override]  # upstream's signature
        self, closure: Callable[[], float] | None = None, div_scale: float = -1
    ) -> float | None:
        """Take one step.

        Args:
            closure: Computes the loss again and returns it.
            div_scale: The number that gradients are divided by. Default: -1, none.

        Returns:
            What ``closure`` returned; None without one.

        Raises:
            OptionError: ``div_scale`` is NaN.
            DTypeError: A gradient that cannot be used; nothing has changed.
            TransferError: The disk failed.
        """
        if math.isnan(div_scale):
            message = "div_scale is NaN: it must be the divisor of gradients, or -1 for none."
            raise OptionError(message)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_step(divisor=div_scale if div_scale > 0 else 1.0)
        return loss


class ParamsInHostMemory(ParamFilter):
    """Selects parameters in host memory; torch's fused Adam updates the others.

    ``also``: ids of parameters on an accelerator whose states are in host memory, or on disk.
    """

    def __init__(self, also: Collection[int] = ()) -> None:
        self._also = also

    def manages(self, parameter: torch.Tensor) -> bool:
        """Return whether the states of ``parameter`` are in host memory, or on disk."""
        return id(parameter) in self._also or shard_of(parameter).device.type == "cpu"

    def update_others(self, groups: Groups, states: States, factor: float) -> None:
        """Update the parameters on an accelerator, by their gradients times ``factor``."""
        for group in groups:
            elsewhere = [p for p in group["params"] if not self.manages(p)]
            update_on_accelerator(elsewhere, group, states, factor)


class HybridAdam(CPUAdam):
    """ColossalAI's HybridAdam: CPUAdam in host memory, torch's fused Adam on accelerators.

    The states of parameters on an accelerator stay on it; ``nvme_offload_fraction`` applies to the
    others. The arguments are those of ``CPUAdam``.
    """

    @staticmethod
    def stays_on_device(name: str) -> bool:
        """Return True: a parameter that is on the device is updated there.

        Args:
            name: The parameter's name.
        """
        del name
        return True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or ``torch.optim.Adam(W)``, without loss.

        Raises:
            OptionError: States that do not fit their parameter; nothing has changed.
        """
        super().load_state_dict(state_dict)
        states: dict[Any, Any] = self.state  # may have keys of the caller's own, which stay
        for parameter, entry in states.items():
            if not isinstance(parameter, torch.Tensor) or self._param_filter.manages(parameter):
                continue
            if isinstance(entry.get("step"), torch.Tensor):
                # The fused kernel needs the step count on the device.
                entry["step"] = entry["step"].to(parameter.device)
            if is_sharded(parameter):
                for key, value in entry.items():
                    if key != "step" and not is_sharded(value):
                        share = part_of(value, parameter, f"The saved {key!r}")
                        entry[key] = sharded_like(parameter, share)

    def _make_param_filter(self) -> ParamFilter:
        return ParamsInHostMemory()

    def _check(self, parameter: torch.Tensor, name: str) -> None:
        if self._param_filter.manages(parameter):
            StowedAdam._check(self, parameter, name)  # noqa: SLF001  # on an accelerator as well
            return
        check_elsewhere(parameter, name)
        if self._commits_states:
            message = (
                f"dir= was given, and {name} is on {parameter.device}, and so are its states:"
                " commits would lack them. Use tensorstow.AdamW, whose states are in host memory."
            )
            raise OptionError(message)


# The classes themselves are the factories that ``stow`` asks.
_TRANSLATES_PLACEMENT: TranslatesPlacement = CPUAdam
_KEEPS_ON_DEVICE: KeepsOnDevice = HybridAdam


def update_on_accelerator(
    parameters: Sequence[torch.Tensor], group: dict[str, Any], states: States, factor: float
) -> None:
    """Step ``parameters`` of ``group``, on an accelerator, with torch's fused Adam.

    Gradients are multiplied by ``factor`` inside that kernel.
    """
    due = [p for p in parameters if p.grad is not None]
    if not due:
        return
    for parameter in due:
        check_elsewhere(parameter, "A parameter")
    if not group.get("bias_correction", True):
        message = (
            "bias_correction=False was requested with parameters on an accelerator: torch's fused"
            " Adam always corrects. Keep these parameters in host memory, or leave it True."
        )
        raise OptionError(message)
    for parameter in due:
        if not states[parameter]:
            states[parameter].update(_zero_state(parameter, amsgrad=group["amsgrad"]))
    entries = [states[p] for p in due]
    run = torch_adamw if group["decoupled_weight_decay"] else torch_adam
    lr = group["lr"]
    run(
        [shard_of(p) for p in due],
        [g for p in due if (g := gradient_of(p)) is not None],
        [shard_of(s["exp_avg"]) for s in entries],
        [shard_of(s["exp_avg_sq"]) for s in entries],
        [shard_of(s["max_exp_avg_sq"]) for s in entries] if group["amsgrad"] else [],
        [s["step"] for s in entries],
        fused=True,
        # The fused kernel divides gradients by ``grad_scale``.
        grad_scale=None
        if factor == 1.0
        else torch.tensor(factor, dtype=torch.float32, device=due[0].device).reciprocal(),
        amsgrad=group["amsgrad"],
        beta1=float(group["betas"][0]),
        beta2=float(group["betas"][1]),
        lr=lr if isinstance(lr, torch.Tensor) else float(lr),
        weight_decay=float(group["weight_decay"]),
        eps=float(group["eps"]),
        maximize=group["maximize"],
    )


def check_elsewhere(parameter: torch.Tensor, name: str) -> None:
    """Raise DTypeError for a parameter that torch's fused Adam cannot update either."""
    if parameter.is_meta:
        message = (
            f"{name} is on {parameter.device} and has no values to update. Allocate it first:"
            " model.to_empty(device=...)."
        )
        raise DTypeError(message)


def _zero_state(parameter: torch.Tensor, *, amsgrad: bool) -> dict[str, torch.Tensor]:
    names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])]
    zeros = {n: torch.zeros_like(parameter, memory_format=torch.preserve_format) for n in names}
    return {"step": torch.zeros((), dtype=torch.float32, device=parameter.device), **zeros}


def _fraction_of(fraction_on_disk: object, states: StatePlacement | None) -> float:
    """Return the fraction of the states on disk; raises OptionError for a contradiction."""
    fraction = options.fraction_of(fraction_on_disk, "nvme_offload_fraction")
    if states is None:
        return fraction
    placed = options.placement(states, None, None).disk_fraction
    if fraction and placed not in {1.0, fraction}:
        message = (
            f"nvme_offload_fraction={fraction_on_disk} was given with states={states!r}: set the"
            " share on disk by only one of them."
        )
        raise OptionError(message)
    return fraction or placed
