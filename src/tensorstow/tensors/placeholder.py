"""Tensors without memory, of some shape and dtype, whose values cannot be read.

They stand for consumed gradients in ``.grad``, and for states on disk in ``optimizer.state``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, Protocol, Self

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tensorstow.base.errors import OptionError

ALIASES = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})
"""Operations that only pass a tensor on."""


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:  # noqa: ANN401
    """Return what an operation writes: its first argument, ``out=``, or tensors in lists."""
    asked = func._schema.arguments  # noqa: SLF001  # no public way
    places = [kwargs.get(a.name, args[i] if i < len(args) else None) for i, a in enumerate(asked)]
    changes = [a.alias_info is not None and a.alias_info.is_write for a in asked]
    return tree_leaves([place for place, c in zip(places, changes, strict=True) if c])


class Placeholder(torch.Tensor):
    """A tensor of some shape and dtype without readable values.

    Every operation that would read them raises OptionError with the class's ``reason``.
    """

    reason: ClassVar[str] = "was called on a placeholder, which has no values."
    """Why an operation cannot read values, and what to do; after the operation's name."""

    @staticmethod
    def __new__(
        cls: type[Self],
        like: torch.Tensor,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> Self:
        """Stand in for ``like``; None: with its dtype, on its device."""
        return torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, like.shape, dtype=dtype or like.dtype, device=device or like.device
        )

    def __repr__(self) -> str:  # type: ignore[override]
        """Name the class, shape and dtype: the default would read the values."""
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def refuse(cls, operation: str) -> NoReturn:
        """Raise OptionError: ``operation`` needs values that the placeholder does not have."""
        message = f"{operation} {cls.reason}"
        raise OptionError(message)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is typed as an instance's
        cls,
        func: Any,  # noqa: ANN401  # torch's own signature
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> "Placeholder":
        """Refuse every operation except those that only pass the tensor on."""
        del kwargs
        if func not in ALIASES:
            cls.refuse(str(func))
        return cls(args[0])


ABORT_ADVICE = (
    "resume() drops the step and goes back to the last commit of a run that has dir=; without"
    " one, close() this optimizer and load a checkpoint into the model and a new one"
)
"""How to abandon a step during backward."""
RECOVERY_ADVICE = (
    "After a backward that has ended call step(), then zero_grad(). If it did not end,"
    f" {ABORT_ADVICE}."
)
"""What to do about consumed gradients, if the optimizer's phase is not known."""


def refuse_used(name: str) -> NoReturn:
    """Raise OptionError: another optimizer has used the gradient of ``name`` already."""
    message = (
        f"{name} is in two optimizers, and the gradient is used up: the other one has"
        ' overlap="backward" and has begun its update. Give each parameter to one optimizer; or'
        ' create both with overlap="none", and close() the one that you do not need.'
    )
    raise OptionError(message)


class GradientKeeper(Protocol):
    """Holds the gradients of a step that may be undone."""

    @property
    def open_number(self) -> int:
        """The number of the last step that began in backward."""

    @property
    def returned(self) -> Mapping[int, torch.Tensor]:
        """Gradients that were given back to ``.grad``, by the numbers of their parameters."""

    def give_back(self) -> None:
        """Undo the open step, if it can be undone now, and give its gradients back."""

    def are_finite(self) -> bool:
        """Return whether no gradient of the open step has an inf or NaN."""


_CHECK_FINITE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


class ConsumedGradient(Placeholder):
    """A tensor without memory, of the gradient's shape: its update has begun.

    Clipping, unscaling and accumulation, which would silently skip a ``None``, raise OptionError;
    or they get the gradient back, if the update may be undone.
    """

    number = -1
    """The number of its parameter."""
    step_number = -1
    """The number of its step, by its keeper's count."""
    keeper_reference: Callable[[], GradientKeeper | None] | None = None
    """A weak reference to what holds the gradients of the step; None: nothing did."""

    reason = (
        "was called on a gradient that its update has used already: with"
        ' overlap="backward" a gradient is gone as soon as it is final, with "speculative" after'
        " step(). A second backward before step() needs accumulation_steps= or `with"
        " optimizer.accumulate():`."
        ' What clips, scales or reads gradients needs overlap="none", "forward" or "speculative".'
        f" {RECOVERY_ADVICE}"
    )

    @property
    def keeper(self) -> GradientKeeper | None:
        """What holds the gradient; None: it is gone, as another step has begun since."""
        keeper = None if self.keeper_reference is None else self.keeper_reference()
        is_of_now = keeper is not None and keeper.open_number == self.step_number
        return keeper if is_of_now else None

    @property
    def returned(self) -> torch.Tensor | None:
        """The gradient, if it was given back."""
        keeper = self.keeper
        return None if keeper is None else keeper.returned.get(self.number)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as above
        cls,
        func: Any,  # noqa: ANN401  # torch's own signature
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run on the gradients where they can be given back, and refuse the rest."""
        named = kwargs or {}
        used = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, cls)]
        if func in ALIASES:
            alias = cls(used[0])
            alias.number, alias.step_number = used[0].number, used[0].step_number
            alias.keeper_reference = used[0].keeper_reference
            return alias
        keepers = {id(keeper): keeper for u in used if (keeper := u.keeper) is not None}
        if func is _CHECK_FINITE and _is_check(used, args[2]):
            # GradScaler looks for inf and NaN, and scales by one: the norms tell. What it has found
            # in gradients of another dtype stays.
            if not all(keeper.are_finite() for keeper in keepers.values()):
                args[1].fill_(1.0)
            rest = [g for g in args[0] if not isinstance(g, cls)]
            return func(rest, *args[1:]) if rest else None
        for keeper in keepers.values():
            keeper.give_back()
        if any(u.returned is None for u in used):
            cls.refuse(str(func))

        def now(value: Any) -> Any:  # noqa: ANN401
            return value.returned if isinstance(value, cls) else value

        return func(*tree_map(now, args), **tree_map(now, named))


def _is_check(used: Sequence[ConsumedGradient], inverse_scale: torch.Tensor) -> bool:
    """Return whether gradients of an open step are only looked at: they are not scaled."""
    is_held = all(u.returned is None and u.keeper is not None for u in used)
    return is_held and float(inverse_scale) == 1.0


class StateOnDisk(Placeholder):
    """A tensor without memory, of the state's shape.

    Its name and shape can be read (``torch.distributed.checkpoint`` does); reading values raises an
    error that names ``state_dict()``.
    """

    @staticmethod
    def __new__(cls: type[Self], parameter: torch.Tensor) -> Self:
        """Stand in for the states of ``parameter``: fp32, in host memory."""
        return Placeholder.__new__(cls, parameter, torch.float32, torch.device("cpu"))

    reason = (
        "was called on a state that is on disk. optimizer.state_dict() returns the values; to set"
        " them, assign a tensor or call load_state_dict()."
    )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as above
        cls,
        func: Any,  # noqa: ANN401  # torch's own signature
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Placeholder:
        """Ignore moves to a device, because trainers move all of an optimizer's state.

        The update uses states on disk; a copy to another dtype would need the values.
        """
        dtype = (kwargs or {}).get("dtype")
        if func is torch.ops.aten._to_copy.default and dtype in {None, args[0].dtype}:  # noqa: SLF001
            itself: Placeholder = args[0]
            return itself
        return super().__torch_dispatch__(func, types, args, kwargs)


class AbsentWeight(Placeholder):
    """A tensor without memory, of the weight's shape and dtype, while its unit is not used."""

    reason = (
        "was called on a weight of a model that is only read: it is in memory while the module that"
        " has it, or the unit around that module, runs its forward, and cannot be changed. Name the"
        " module that uses it by units= of stow(); read values from the files that weights= names;"
        " change them before stow()."
    )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise OptionError for a save or a copy, which would have no values."""
        del protocol
        self.refuse("A copy (by torch.save, pickle or copy)")


def swap_parameter(parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
    """Replace the contents of ``parameter`` by ``values``, for all references to it."""
    exchange: Callable[[torch.Tensor, torch.Tensor], None] = torch.utils.swap_tensors
    exchange(parameter, torch.nn.Parameter(values, parameter.requires_grad))
