"""Lists of optimizer classes: elementwise, per parameter, and refused."""

from torch import optim
from torch.optim import Optimizer

from tensorstow.base.errors import OptionError

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)
"""What becomes of an element depends on its own gradient and states, and on numbers that are the
same for all: large parameters may be stepped in pieces."""

WHOLE: frozenset[type[Optimizer]] = frozenset({optim.Adafactor, optim.Muon})
"""A parameter's elements depend on each other (norms, row and column sums, products)."""

PER_PARAMETER: dict[str, frozenset[str]] = {
    "bitsandbytes": frozenset(
        """
        AdEMAMix AdEMAMix8bit Adagrad Adagrad32bit Adagrad8bit Adam Adam32bit Adam8bit AdamW
        AdamW32bit AdamW8bit LAMB LAMB32bit LAMB8bit LARS LARS32bit LARS8bit Lion Lion32bit
        Lion8bit PagedAdEMAMix PagedAdEMAMix8bit PagedAdam PagedAdam32bit PagedAdam8bit
        PagedAdamW PagedAdamW32bit PagedAdamW8bit PagedLion PagedLion32bit PagedLion8bit RMSprop
        RMSprop32bit RMSprop8bit SGD SGD32bit SGD8bit
        """.split()  # noqa: SIM905  # a list takes a line per name
    ),
    "optimi": frozenset(
        """
        Adam AdamW Adan Lion RAdam Ranger SGD StableAdamW
        """.split()  # noqa: SIM905  # a list takes a line per name
    ),
    "pytorch_optimizer": frozenset(
        """
        A2Grad ADOPT APOLLO AccSGD AdEMAMix AdaBelief AdaBound AdaDelta AdaFactor AdaGO AdaMax
        AdaMod AdaMuon AdaNorm AdaPNM AdaShift AdaSmooth AdaTAM Adalite AdamC AdamG AdamP
        AdamWSN Adan AggMo Aida Amos Ano ApolloDQN BCOS CAME DiffGrad DualAdam EXAdam FAdam
        FOCUS FTRL Fira FlashAdamW Fromage GaLore Grams GrokFastAdamW Kate LARS LaProp Lamb Lion
        MADGRAD MARS MSVAG Muon Nero NorMuon NovoGrad PAdam PID PNM QHAdam QHM RACS RAdam ROSE
        Ranger SCION SCIONLight SGDP SGDSaI SGDW SM3 SOAP SPlus SRMM SWATS SaRA
        ScheduleFreeAdamW ScheduleFreeRAdam ScheduleFreeSGD SignSGD SimplifiedAdEMAMix
        StableAdamW TAM Tiger VSGD Yogi
        """.split()  # noqa: SIM905  # a list takes a line per name
    ),
    "schedulefree": frozenset(
        """
        AdamWScheduleFree AdamWScheduleFreePaper AdamWScheduleFreeReference RAdamScheduleFree
        SGDScheduleFree SGDScheduleFreeReference
        """.split()  # noqa: SIM905  # a list takes a line per name
    ),
}
"""Classes of other packages, each compared on disk and in RAM (test_peers.py).

They go by whole parameters, and are tried out with the user's options all the same: some have an
option that clips over all parameters, and packages change.
"""

_REFUSED = {
    optim.LBFGS: "it evaluates its closure several times and keeps one state for all"
    " parameters together",
    optim.SparseAdam: "it takes sparse gradients alone, and those are not taken here",
}


def refuse_class(optimizer_class: object) -> None:
    """Raise OptionError for a class that is not an optimizer, or cannot be stepped in pieces."""
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        message = (
            f"{optimizer_class!r} was given: the first argument is an optimizer class, such as"
            " torch.optim.SGD, and not an instance."
        )
        raise OptionError(message)
    if hasattr(optimizer_class, "offload_policy"):
        message = f"{optimizer_class.__name__} stows its states already: use it as it is."
        raise OptionError(message)
    for refused, reason in _REFUSED.items():
        if issubclass(optimizer_class, refused):
            message = (
                f"{optimizer_class.__name__} cannot be stowed: {reason}. Use it as it is, or"
                " another optimizer."
            )
            raise OptionError(message)


def refuse_unknown(optimizer_class: type[Optimizer], *, declared: bool) -> None:
    """Raise OptionError unless the class is known, or ``declared``, to be per parameter."""
    if not (declared or is_listed(optimizer_class) or keeps_nothing_over_all(optimizer_class)):
        message = (
            f"{optimizer_class.__module__}.{optimizer_class.__qualname__} is not known to update"
            " each parameter by itself, and is to be stepped one parameter after the other. If no"
            " parameter's update depends on another's gradient or state (no clipping or skipping"
            " over all of them, no estimate), pass per_parameter=True; else use it as it is,"
            " un-stowed."
        )
        raise OptionError(message)


def is_listed(optimizer_class: type[Optimizer]) -> bool:
    """Return whether the class is one of another package that is known to be per parameter."""
    package = optimizer_class.__module__.split(".")[0]
    return optimizer_class.__qualname__ in PER_PARAMETER.get(package, ())


def keeps_nothing_over_all(optimizer_class: type[Optimizer]) -> bool:
    """Return whether a step of the class changes only the parameters and states it is given."""
    return optimizer_class in ELEMENTWISE or optimizer_class in WHOLE
