"""``chunk_loss``: a causal language model of transformers computes its loss in chunks."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Self

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

    The model is a causal language model of transformers. With ``labels`` the output has
    ``logits=None``, in evaluation too; without them nothing changes. ``chunk_loss`` adds hooks to
    the model and its output layer, and sets ``model.loss_function``. Call it before or after
    ``stow``.

    Args:
        model: The model, or a module that wraps it.
        chunk_bytes: Memory for the fp32 logits of a chunk, in bytes or as "256MiB".

    Returns:
        An object that removes the hooks by ``close()``, or at the end of a ``with`` block.

    Raises:
        OptionError: The model is of another kind, or its output layer is no ``nn.Linear``; in
            forward: the model changes logits between its output layer and its loss (Gemma caps
            them), or is compiled as one graph.
    """
    return ChunkedLoss(model, parse_size(chunk_bytes, "chunk_bytes"))


class ChunkedLoss:
    """Hooks on a model and its output layer; ``chunk_loss`` documents the arguments."""

    def __init__(self, model: nn.Module, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._model, self._head = _model_and_head(model)
        self._signature = inspect.signature(self._model.forward)
        self._has_labels = False
        self._before: Callable[..., torch.Tensor] = self._model.loss_function
        self._model.loss_function = self._loss
        self._handles = [
            self._model.register_forward_pre_hook(self._note_labels, with_kwargs=True),
            # First of all hooks: the others get the output without the placeholder.
            self._model.register_forward_hook(self._drop_logits, prepend=True, always_call=True),
            self._head.register_forward_pre_hook(self._skip_product),
            self._head.register_forward_hook(self._stand_in, prepend=True),
        ]
        self._hidden: torch.Tensor | None = None

    def close(self) -> None:
        """Restore the model's own loss. Idempotent."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            self._model.loss_function = self._before
        self._handles = []

    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _note_labels(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            message = (
                "chunk_loss is for a model that runs eagerly: a graph has no place for it. Compile"
                " the model's blocks instead (for example model.model.layers)."
            )
            raise OptionError(message)
        arguments = self._signature.bind_partial(*args, **kwargs).arguments
        self._has_labels = arguments.get("labels") is not None

    def _skip_product(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[torch.Tensor] | None:
        """Keep the output layer's input, and pass it an input without rows."""
        self._hidden = args[0] if self._has_labels else None
        return None if self._hidden is None else (self._hidden[:0],)

    def _stand_in(self, *_: object) -> "HiddenStates | None":
        hidden, self._hidden = self._hidden, None
        return None if hidden is None else HiddenStates.of(hidden, len(self._head.weight))

    def _drop_logits(self, _: nn.Module, __: object, output: Any) -> Any:  # noqa: ANN401
        self._has_labels, self._hidden = False, None  # also if forward raised an error
        if isinstance(output, Mapping):
            fields = {k: None if isinstance(v, HiddenStates) else v for k, v in output.items()}
            return type(output)(**fields)
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
        **keywords: Any,  # noqa: ANN401
    ) -> torch.Tensor:
        """Return the loss of transformers' function with this signature."""
        if not isinstance(logits, HiddenStates):
            keywords |= {"num_items_in_batch": num_items_in_batch, "shift_labels": shift_labels}
            return self._before(logits, labels, vocab_size, ignore_index=ignore_index, **keywords)
        if shift_labels is None:
            # As transformers does: each position predicts the next token, the last one none.
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


class HiddenStates(Placeholder):
    """A placeholder for logits, with the hidden states that they would be computed from."""

    hidden: torch.Tensor

    reason = (
        "was called on logits that chunk_loss does not compute: this model changes its logits"
        " before the loss, or has a loss of its own. Call chunked_cross_entropy in your own loss"
        " (logit_softcap= is Gemma's)."
    )

    @classmethod
    def of(cls, hidden: torch.Tensor, classes: int) -> Self:
        """Return a placeholder for the logits of ``hidden``, ``classes`` for each row."""
        logits = cls(hidden.detach()[..., :1].expand(*hidden.shape[:-1], classes))
        logits.hidden = hidden
        return logits


def _model_and_head(model: nn.Module) -> tuple[Any, nn.Linear]:
    """Return the first module that has a loss function, inside wrappers, and its output layer."""
    for module in model.modules():
        if not isinstance(getattr(type(module), "loss_function", None), property):
            continue
        unwrapped: Any = module
        head = unwrapped.get_output_embeddings()
        if getattr(unwrapped.loss_function, "__name__", "") != _LOSS or head is None:
            continue
        if type(head) is not nn.Linear:
            message = (
                f"chunk_loss was given a model whose output layer is a {type(head).__name__}: it"
                " takes the weight of an nn.Linear."
            )
            raise OptionError(message)
        return unwrapped, head
    message = (
        f"chunk_loss was given a {type(model).__name__}: it takes a causal language model of"
        f" transformers, whose loss_function is {_LOSS} and was not replaced."
    )
    raise OptionError(message)
