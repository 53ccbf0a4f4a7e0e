"""``chunk_loss``: a causal language model of transformers computes its loss in chunks."""

import inspect
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.nn import functional

from tensorstow.base.errors import OptionError
from tensorstow.base.sizes import parse_size
from tensorstow.losses.cross_entropy import chunked_cross_entropy
from tensorstow.tensors.placeholder import Placeholder

_LOSS = "ForCausalLMLoss"
"""transformers' function for these models."""


def chunk_loss(model: nn.Module, *, chunk_bytes: str | int = "256MiB") -> "ChunkedLoss":
    """Let ``model(input_ids, labels=...)`` compute its loss with ``chunked_cross_entropy``.

    For causal language models of transformers. With ``labels`` the output has ``logits=None``, in
    evaluation too; without them nothing changes. Works by hooks on the model and on its output
    layer, and by ``model.loss_function``, which transformers lets be set. Before ``stow`` or after.

    Args:
        model: The model, or a module round it.
        chunk_bytes: Memory for the fp32 logits of a chunk, in bytes or as "256MiB".

    Returns:
        What takes the hooks off again by ``close()``, or at the end of a ``with`` block.

    Raises:
        OptionError: It is no such model, or its output layer is no ``nn.Linear``; in forward: it
            changes logits between its output layer and its loss (Gemma caps them), or is one graph.
    """
    return ChunkedLoss(model, parse_size(chunk_bytes, "chunk_bytes"))


class ChunkedLoss:
    """Hooks on a model and its output layer; ``chunk_loss`` has the arguments."""

    def __init__(self, model: nn.Module, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._model, self._head = _model_and_head(model)
        self._signature = inspect.signature(self._model.forward)
        self._has_labels = False
        self._before: Callable[..., torch.Tensor] = self._model.loss_function
        self._model.loss_function = self._loss
        self._handles = [
            self._model.register_forward_pre_hook(self._note_labels, with_kwargs=True),
            self._model.register_forward_hook(self._drop_logits, prepend=True, always_call=True),
            self._head.register_forward_pre_hook(self._skip_product),
            self._head.register_forward_hook(self._stand_in, prepend=True),
        ]
        self._hidden: torch.Tensor | None = None

    def close(self) -> None:
        """Give the model its own loss again. Idempotent."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            self._model.loss_function = self._before
        self._handles = []

    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def _note_labels(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            message = (
                "chunk_loss is for a model that runs eagerly: a graph has no place for it. Compile"
                " the model's blocks instead (model.model.layers, say)."
            )
            raise OptionError(message)
        given = self._signature.bind_partial(*args, **kwargs).arguments
        self._has_labels = given.get("labels") is not None

    def _skip_product(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[torch.Tensor] | None:
        """Keep what the output layer is given, and give it none of the rows."""
        self._hidden = args[0] if self._has_labels else None
        return None if self._hidden is None else (self._hidden[:0],)

    def _stand_in(self, *_: object) -> "HiddenStates | None":
        hidden, self._hidden = self._hidden, None
        return None if hidden is None else HiddenStates.of(hidden, len(self._head.weight))

    def _drop_logits(self, _: nn.Module, __: object, output: Any) -> Any:  # noqa: ANN401
        self._has_labels, self._hidden = False, None  # also where forward has failed
        if isinstance(output, Mapping):
            kept = {k: None if isinstance(v, HiddenStates) else v for k, v in output.items()}
            return type(output)(**kept)
        if isinstance(output, tuple):
            return tuple(None if isinstance(part, HiddenStates) else part for part in output)
        return output

    def _loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **others: Any,  # noqa: ANN401
    ) -> torch.Tensor:
        """Compute what transformers' function of this signature does."""
        if not isinstance(logits, HiddenStates):
            others |= {"num_items_in_batch": num_items_in_batch, "shift_labels": shift_labels}
            return self._before(logits, labels, vocab_size, ignore_index=ignore_index, **others)
        if shift_labels is None:
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        hidden = logits.hidden
        loss = chunked_cross_entropy(
            hidden,
            self._head.weight,
            shift_labels.to(hidden.device).view(hidden.shape[:-1]),
            bias=self._head.bias,
            chunk_bytes=self._chunk_bytes,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss if num_items_in_batch is None else loss / num_items_in_batch


def _refuse(operation: str) -> NoReturn:
    message = (
        f"{operation} was asked of logits that chunk_loss does not compute: this model changes its"
        " logits before the loss, or has a loss of its own. Use chunked_cross_entropy in a loss of"
        " yours (logit_softcap= is Gemma's)."
    )
    raise OptionError(message)


class HiddenStates(Placeholder):
    """Stands for logits of some shape, with the hidden states that they would be made of."""

    hidden: torch.Tensor

    refuse = staticmethod(_refuse)

    @classmethod
    def of(cls, hidden: torch.Tensor, classes: int) -> Self:
        """Stand for the logits of ``hidden``, of which each row would have ``classes``."""
        made = cls(hidden.detach()[..., :1].expand(*hidden.shape[:-1], classes))
        made.hidden = hidden
        return made


def _model_and_head(model: nn.Module) -> tuple[Any, nn.Linear]:
    """Return the model inside of its wrappers that has a loss function, and its output layer."""
    for module in model.modules():
        if not isinstance(getattr(type(module), "loss_function", None), property):
            continue
        found: Any = module
        head = found.get_output_embeddings()
        if getattr(found.loss_function, "__name__", "") != _LOSS or head is None:
            continue
        if type(head) is not nn.Linear:
            message = (
                f"chunk_loss was given a model whose output layer is a {type(head).__name__}: it"
                " takes the weight of an nn.Linear."
            )
            raise OptionError(message)
        return found, head
    message = (
        f"chunk_loss was given a {type(model).__name__}: it takes a causal language model of"
        f" transformers, whose loss_function is {_LOSS} and was not replaced."
    )
    raise OptionError(message)
