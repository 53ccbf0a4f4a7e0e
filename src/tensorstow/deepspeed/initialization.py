"""``deepspeed.initialize``: makes an engine of a model and a configuration."""

from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from os import PathLike
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset

from tensorstow.base import notices
from tensorstow.base.errors import BudgetError, OptionError
from tensorstow.base.keywords import names_keywords
from tensorstow.base.launch import launched
from tensorstow.base.signals import StopSignals
from tensorstow.base.update_on import Overlap
from tensorstow.deepspeed.checkpointing import configure
from tensorstow.deepspeed.comm import init_distributed, refuse_model_parallel
from tensorstow.deepspeed.config.json_text import load
from tensorstow.deepspeed.config.reading import read_settings
from tensorstow.deepspeed.config.settings import Settings
from tensorstow.deepspeed.evaluation import place_for_evaluation
from tensorstow.deepspeed.external_parameters import blocks_to_gather
from tensorstow.deepspeed.loss_scale import LossScale
from tensorstow.deepspeed.optimizers import OtherMaker, maker_of
from tensorstow.deepspeed.plans import (
    directory_of,
    dtype_of,
    placement_keywords,
    plan_of,
    weight_ram_budget,
)
from tensorstow.deepspeed.registry import PlacedParameters
from tensorstow.deepspeed.runtime.dataloader import make_dataloader
from tensorstow.deepspeed.runtime.engine import DeepSpeedEngine
from tensorstow.deepspeed.runtime.lr_schedules import make_scheduler
from tensorstow.deepspeed.states import MasterWeights
from tensorstow.deepspeed.utils.logging import set_log_level_from_string
from tensorstow.doorkit.stop_point import StopPoint, stop_point
from tensorstow.fsdp.optimizer_factory import Make, move_schedule
from tensorstow.fsdp.sharding import current_device, rank_here, world_size
from tensorstow.fsdp.stow import stow
from tensorstow.optim.placed import PlacedOptimizer

Config = str | PathLike[str] | Mapping[str, Any] | None
Started = tuple[DeepSpeedEngine, PlacedOptimizer | None, DataLoader[Any] | None, Any]


@names_keywords
def initialize(
    args: object = None,
    model: nn.Module | None = None,
    optimizer: object = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: object = None,
    distributed_port: int = 29500,
    mpu: object = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Config = None,
    mesh_param: tuple[int, ...] | None = None,
    config_params: Config = None,
    *,
    fill: Mapping[str, Any] | None = None,
    overlap: Overlap | None = None,
    stop_signals: StopSignals = None,
    on_stop: Callable[[], object] | None = None,
) -> Started:
    """Place a model by a DeepSpeed configuration.

    The model is changed in place: it is cast under bf16 and fp16, and sharded. The process group is
    joined if a launcher started several ranks.

    Args:
        args: An object that may have ``deepspeed_config`` (or ``deepscale_config``), as a script's
            arguments have.
        model: The model.
        optimizer: An optimizer over the model, torch's or tensorstow's, whose class and groups are
            used; a function of ``model_parameters`` that returns one; or what ``tensorstow.stow``
            takes. Classes other than Adam and AdamW step fp32 parameters in host memory.
            Default: None, the configuration's; without any the engine evaluates and generates.
        model_parameters: The parameters, or parameter groups. Default: None, all that require
            gradients.
        training_data: A dataset, for a dataloader of micro-batches.
        lr_scheduler: A scheduler, or a function of the optimizer. Default: None, the
            configuration's.
        distributed_port: See ``init_distributed``.
        mpu: An object of model parallelism; refused unless its size is 1.
        dist_init_required: False: the process group is not joined; several ranks must have one.
        collate_fn: Makes a batch of a list of samples, for the dataloader.
        config: The configuration: a JSON file or a dict.
        mesh_param: The sizes of a mesh; refused unless all but the first are 1.
        config_params: Another name of ``config``.
        fill: Values for "auto" that no other value decides, by path: ``{"optimizer.params.lr":
            1e-4}``.
        overlap: When updates run: "none", "forward" or "backward", as in ``tensorstow.AdamW``; the
            results are the same. Default: None, by the configuration, which is logged
            (docs/guides/deepspeed.md). "none" and "forward" let gradients be read after
            ``backward`` and skip steps that are not finite, "backward" does not.
        stop_signals: The name of a signal ("SIGTERM"), or a dict of exit statuses by names. After
            one, to any rank, the run ends before the forward that follows a step: all ranks call
            ``on_stop`` and raise SystemExit with that status, 0 for a name alone. Python handles
            signals in the main thread alone. Default: None, no signals are handled.
        on_stop: Saves the checkpoint of such a run: ``lambda: engine.save_checkpoint(folder)``.

    Returns:
        The engine, its optimizer or None, the dataloader or None, and the scheduler or None.

    Raises:
        OptionError: An argument is not supported; the model was not changed.
        BudgetError: ``max_in_cpu`` is too small for the parameters that must be in memory at a
            time.
    """
    if not isinstance(model, nn.Module):
        message = f"model={model!r} was given: initialize() places a torch.nn.Module."
        raise OptionError(message)
    meshed = mesh_param is not None and any(n > 1 for n in mesh_param[1:])
    refuse_model_parallel(mpu, meshed=meshed, mpu=mpu, mesh_param=mesh_param)
    source = _source(args, config, config_params)
    if dist_init_required is not False or launched().world > 1:
        init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    written = load(source)
    settings = read_settings(written, world_size(), fill=fill)
    if settings.log_level is not None:
        set_log_level_from_string(settings.log_level)
    make = maker_of(settings.optimizer, optimizer, model, model_parameters)
    # Before the model is changed, as all checks of arguments.
    stops = _stop_point(make, stop_signals, on_stop)
    with _named_as_configured(settings):
        placed, placed_optimizer = _placed(model, make, settings, overlap)
    configure(checkpoint_in_cpu=settings.activation_checkpointing.cpu_checkpointing)
    engine = DeepSpeedEngine(
        placed,
        placed_optimizer,
        settings,
        lr_scheduler=_schedule(lr_scheduler, settings, placed_optimizer),
        scale=None if settings.fp16 is None else LossScale(settings.fp16),
        config=written,
    )
    engine.stop_point = stops
    engine.collate_fn = collate_fn
    if training_data is not None:
        engine.training_dataloader = make_dataloader(training_data, settings, collate_fn)
    return engine, placed_optimizer, engine.training_dataloader, engine.lr_scheduler


def _placed(
    model: nn.Module, make: Make | None, settings: Settings, overlap: Overlap | None
) -> tuple[nn.Module, PlacedOptimizer | None]:
    if make is None:
        return place_for_evaluation(model, settings), None
    if isinstance(make, OtherMaker):
        # Checks the user's overlap: classes other than Adam step in ``step()`` alone.
        make = make.for_settings(settings, world_size(), overlap, current_device())
        overlap = "none"
    plan = plan_of(settings, device_is_host=current_device().type == "cpu", overlap=overlap)
    if rank_here() == 0:
        notices.show(
            f"the DeepSpeed configuration means parameters={plan.parameters}, states={plan.states},"
            f' stage={plan.stage}, overlap="{plan.optimizer_overlap}"'
        )

    def make_placed(named: Any, **placement: Any) -> PlacedOptimizer:
        return make(named, **placement_keywords(settings, placement))

    # The directory is for parameters on disk only, so the states are scratch.
    make_scratch = partial(make_placed, durability="none")
    # Both are made before ``stow``, which replaces the parameters.
    before = PlacedParameters(model)
    master_weights = MasterWeights(model, dtype_of(settings))
    blocks = blocks_to_gather(model) if plan.stage == 3 else None
    directory = directory_of(settings)
    placed, optimizer = stow(model, make_scratch, plan=plan, dir=directory, units=blocks)
    master_weights.assign(placed, optimizer)
    before.note(placed)
    return placed, optimizer


@contextmanager
def _named_as_configured(settings: Settings) -> Iterator[None]:
    """Call ``weight_ram_budget`` in an error by the key that it comes from."""
    try:
        yield
    except BudgetError as error:
        if weight_ram_budget(settings) is None:
            raise
        message = (
            f"zero_optimization.offload_param.max_in_cpu={settings.zero.offload_param.max_in_cpu}"
            f" was given, and {error} (0: the minimum.)"
        )
        raise BudgetError(message) from error


def _source(args: object, config: Config, config_params: Config) -> Any:
    """Return the configuration; raises OptionError unless exactly one was given."""
    of_args = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    sources = [c for c in (config, config_params, of_args) if c is not None]
    if len(sources) != 1:
        message = (
            f"{len(sources)} configurations were given among config=, config_params= and"
            " args.deepspeed_config: pass exactly one."
        )
        raise OptionError(message)
    return sources[0]


def _stop_point(
    make: Make | None, stop_signals: StopSignals, on_stop: Callable[[], object] | None
) -> StopPoint:
    """Return where the run ends at a signal; raises OptionError for one without an optimizer."""
    if make is None and stop_signals is not None:
        message = (
            f"stop_signals={stop_signals!r} was given to an engine without an optimizer, which"
            ' takes no steps. Leave it out, or write a section "optimizer" in the configuration.'
        )
        raise OptionError(message)
    return stop_point(stop_signals, on_stop)


def _schedule(scheduler: Any, settings: Settings, optimizer: PlacedOptimizer | None) -> Any:
    """Return the scheduler: the user's, else the configuration's; None without an optimizer."""
    if optimizer is None:
        return None
    if scheduler is None:
        named = settings.scheduler
        return None if named is None else make_scheduler(named, optimizer)
    if isinstance(scheduler, type) or (callable(scheduler) and not hasattr(scheduler, "step")):
        return scheduler(optimizer)
    move_schedule(scheduler, optimizer)
    return scheduler


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config`` to a parser.

    The older ``--deepscale`` and ``--deepscale_config`` are accepted as well.

    Args:
        parser: The parser.

    Returns:
        The same parser.
    """
    group = parser.add_argument_group("DeepSpeed", "where to find the configuration")
    group.add_argument(
        "--deepspeed",
        "--deepscale",
        action="store_true",
        help="for the script's own use: says that initialize() is to be called",
    )
    group.add_argument(
        "--deepspeed_config",
        "--deepscale_config",
        metavar="FILE",
        help="the configuration, a JSON file",
    )
    return parser
