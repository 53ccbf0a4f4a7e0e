"""``chunked_cross_entropy``: the cross entropy of ``hidden @ weight.T + bias``, in chunks of rows.

[Note: Gradients in forward] With reduction "mean" or "sum" backward gets one number, and the
gradients are that number times those of the sum of the rows' losses. So forward computes the latter
while it has the logits of a chunk, and backward multiplies: three products, as many as without
chunks. Computing logits again in backward would take a fourth. The price is the gradient of
``weight`` in fp32 from forward to backward. It is not a saved tensor, which hooks would move or
copy: backward writes to it. With "none" each row has its own number, which forward does not know,
so backward computes logits again.

[Note: Sums] Products have fp32 results and gradients are added up in fp32 (float64 for float64),
chunk after chunk in the order of rows; each gradient is rounded to its dtype once, at the end. On
CUDA kernels multiply 16-bit operands into fp32; the gradient of logits is such an operand, rounded
as torch rounds it. On other devices blocks of operands are converted to fp32.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tensorstow.base.errors import DTypeError, OptionError
from tensorstow.base.fields import PositiveFloat, Share, read_value
from tensorstow.base.sizes import parse_size
from tensorstow.tensors.dtensor import OffloadedWeight, is_sharded

_BLOCK_BYTES = 32 << 20
"""Bytes of fp32 that 16-bit weights are converted to at a time."""
_SCALE_OF_FP16 = 2.0**12
"""Factor for gradients of logits in fp16, which are at most 1: small ones do not vanish. Exact."""

Reduction = Literal["mean", "sum", "none"]
_Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


@torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001  # a graph would unroll it
def chunked_cross_entropy(  # noqa: PLR0913  # torch's keywords, and the layer's tensors
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    chunk_bytes: str | int = "256MiB",
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    logit_softcap: float | None = None,
) -> torch.Tensor:
    """Return ``cross_entropy(hidden @ weight.T + bias, labels)`` with a bounded memory for logits.

    Logits are computed in chunks of rows (tokens) and freed after each chunk. If gradients are
    required, forward computes them too, and holds that of ``weight`` in fp32 until backward, so
    leave the loss out of ``torch.utils.checkpoint``. Sums are fp32, and each gradient is rounded to
    its dtype once: on the CPU it differs from the exact one by half a unit in the last place of its
    largest element and the rounding of fp32 sums. The result does not depend on the placement; it
    is the same in every run with equal ``chunk_bytes`` and threads.

    A causal shift is the caller's: ``hidden[:, :-1]`` with ``labels[:, 1:]``.

    Args:
        hidden: The output layer's input, (tokens, width) or (batch, sequence, width).
        weight: The layer's weight, (vocabulary, width), whole in memory: under ``stow`` or FSDP2
            inside the forward of the unit that has it.
        labels: Classes as int64, of the shape of ``hidden`` without its last dimension.
        bias: The layer's bias, (vocabulary,). Default: None.
        chunk_bytes: Memory for the fp32 logits of a chunk, in bytes or as "256MiB". A chunk has at
            least one row.
        ignore_index: The label of rows that do not count.
        reduction: "mean" over the rows that count, "sum", or "none": one loss per row, at the
            price of computing logits again in backward.
        label_smoothing: The share of the target, 0 to 1, that is spread over all classes.
        logit_softcap: Logits are ``cap * tanh(logits / cap)``, as in Gemma. It takes a second
            buffer, and chunks are half as long. Default: None, no cap.

    Returns:
        The loss, in float64 for float64 and in fp32 for all other dtypes.

    Raises:
        OptionError: Shapes or options are invalid, a label is no class, ``weight`` is a DTensor or
            is not in memory; in backward: ``create_graph=True``.
        DTypeError: Tensors have different dtypes without autocast, or are not floating point.
    """
    reduction = read_value(Reduction, reduction, "reduction")
    label_smoothing = read_value(Share, label_smoothing, "label_smoothing")
    logit_softcap = read_value(PositiveFloat | None, logit_softcap, "logit_softcap")
    ignore_index = read_value(int, ignore_index, "ignore_index")
    _check_tensors(hidden, weight, labels, bias)
    rows = labels.reshape(-1)
    if labels.is_cpu:
        _check_labels(rows, len(weight), ignore_index)
    kind = _Kind(
        dtype=_computing_dtype(hidden, weight, bias),
        chunk_bytes=parse_size(chunk_bytes, "chunk_bytes"),
        ignore_index=ignore_index,
        reduction=reduction,
        smoothing=label_smoothing,
        softcap=logit_softcap,
    )
    if not torch.is_grad_enabled():  # a Function's needs_input_grad ignores no_grad
        hidden, weight = hidden.detach(), weight.detach()
        bias = None if bias is None else bias.detach()
    flat = hidden.reshape(-1, hidden.shape[-1])
    loss: torch.Tensor = _CrossEntropyFunction.apply(flat, weight, bias, rows, kind)  # type: ignore[no-untyped-call]
    return loss.view_as(labels) if reduction == "none" else loss


@dataclass(frozen=True, slots=True)
class _Kind:
    """The arguments of a loss other than its tensors."""

    dtype: torch.dtype
    """The dtype of the operands of products."""
    chunk_bytes: int
    ignore_index: int
    reduction: Reduction
    smoothing: float
    softcap: float | None

    @property
    def sum_dtype(self) -> torch.dtype:
        """Return the dtype of logits and of sums."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def chunk_rows(self, classes: int) -> int:
        """Return how many rows a chunk has."""
        buffers = 1 if self.softcap is None else 2
        return max(1, self.chunk_bytes // max(1, classes * self.sum_dtype.itemsize * buffers))


class _OutputLayer:
    """The layer's tensors and the three products with them, whole or by blocks of classes."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kind: _Kind) -> None:
        self._weight, self._kind = weight, kind
        self._bias = None if bias is None else bias.to(kind.dtype).to(kind.sum_dtype)
        self._has_kernels = kind.dtype.itemsize == 2 and _multiplies_into_fp32(weight.device)
        is_scaled = self._has_kernels and kind.dtype == torch.float16
        self.scale = _SCALE_OF_FP16 if is_scaled else 1.0
        width = max(1, weight.shape[1] * kind.sum_dtype.itemsize)
        is_whole = weight.dtype == kind.dtype == kind.sum_dtype
        block = max(1, len(weight) if is_whole else _BLOCK_BYTES // width)
        self._blocks = [slice(i, i + block) for i in range(0, len(weight), block)]

    def operand(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor as an operand, rounded to the dtype of products."""
        rounded = tensor.to(self._kind.dtype)
        return rounded if self._has_kernels else rounded.to(self._kind.sum_dtype)

    def gradient_operand(self, d_logits: torch.Tensor) -> torch.Tensor:
        """Return the gradient of logits as an operand; in 16 bits it is multiplied by ``scale``."""
        if not self._has_kernels:
            return d_logits
        return d_logits.mul_(self.scale).to(self._kind.dtype)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the logits of some rows to ``out``; ``hidden`` is an operand."""
        for block in self._blocks:
            weight = self.operand(self._weight[block]).t()
            if self._has_kernels:
                out[:, block] = torch.mm(hidden, weight, out_dtype=torch.float32)
            else:
                torch.mm(hidden, weight, out=out[:, block])
        if self._bias is not None:
            out += self._bias
        return out

    def hidden_gradient(self, d_logits: torch.Tensor, out: torch.Tensor) -> None:
        """Add the gradient of some rows to ``out``, which is 0."""
        for block in self._blocks:
            self._add_product(out, d_logits[:, block], self.operand(self._weight[block]))

    def add_weight_gradient(
        self, total: torch.Tensor, d_logits: torch.Tensor, hidden: torch.Tensor
    ) -> None:
        """Add the contribution of some rows to the gradient of the weight."""
        for block in self._blocks:
            self._add_product(total[block], d_logits[:, block].t(), hidden)

    def _add_product(self, total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        if self._has_kernels:
            total += torch.mm(a, b, out_dtype=torch.float32)
        else:
            total.addmm_(a, b)


def _multiplies_into_fp32(device: torch.device) -> bool:
    """Return whether the device has kernels that multiply 16-bit matrices with an fp32 result."""
    return device.type == "cuda"


class _Pass:
    """One pass over all rows: their losses, and gradients if they are wanted."""

    def __init__(
        self,
        hidden: torch.Tensor,
        layer: tuple[torch.Tensor, torch.Tensor | None],
        labels: torch.Tensor,
        kind: _Kind,
    ) -> None:
        self._hidden, self._kind = hidden, kind
        self._weight, self._bias = layer
        self._layer = _OutputLayer(*layer, kind)
        self.counts = labels != kind.ignore_index
        # Rows that do not count get any valid class: ``gather`` takes no ``ignore_index``.
        self._labels = labels.where(self.counts, 0)
        self.losses = hidden.new_empty(len(hidden), dtype=kind.sum_dtype)

    def run(
        self, wanted: tuple[bool, bool, bool], row_gradients: torch.Tensor | None = None
    ) -> _Gradients:
        """Compute losses and return the wanted gradients of hidden, weight and bias.

        They are gradients of the sum of the losses, each times its ``row_gradients`` (None: 1).
        """
        kind, hidden, classes = self._kind, self._hidden, len(self._weight)
        layer = self._layer
        d_hidden, d_weight, d_bias = self._zeros(wanted)
        size = kind.chunk_rows(classes)
        buffer = hidden.new_empty((min(size, len(hidden)), classes), dtype=kind.sum_dtype)
        slopes = None if kind.softcap is None else torch.empty_like(buffer)
        for start in range(0, len(hidden), size):
            rows = slice(start, min(start + size, len(hidden)))
            length = rows.stop - start
            operand = layer.operand(hidden[rows])
            logits = layer.logits(operand, buffer[:length])
            slope = None if slopes is None else slopes[:length]
            self._cap(logits, slope)
            totals = self._losses_of(rows, logits)
            if not any(wanted):
                continue
            factor = self.counts[rows].to(logits.dtype)
            if row_gradients is not None:
                factor *= row_gradients[rows]
            d_logits = self._logits_gradient(rows, logits, totals, factor)
            if slope is not None:
                d_logits *= slope
            if d_bias is not None:
                # Before ``gradient_operand``, which scales ``d_logits`` in place.
                d_bias += d_logits.sum(0)
            d_operand = layer.gradient_operand(d_logits)
            if d_hidden is not None:
                layer.hidden_gradient(d_operand, d_hidden[rows])
            if d_weight is not None:
                layer.add_weight_gradient(d_weight, d_operand, operand)
        for total in (d_hidden, d_weight):
            if total is not None and layer.scale != 1:
                total.div_(layer.scale)
        return d_hidden, d_weight, d_bias

    def _zeros(self, wanted: tuple[bool, bool, bool]) -> _Gradients:
        tensors = (self._hidden, self._weight, self._bias)
        d_hidden, d_weight, d_bias = (
            torch.zeros_like(t, dtype=self._kind.sum_dtype, memory_format=torch.contiguous_format)
            if is_wanted and t is not None
            else None
            for t, is_wanted in zip(tensors, wanted, strict=True)
        )
        return d_hidden, d_weight, d_bias

    def _cap(self, logits: torch.Tensor, slope: torch.Tensor | None) -> None:
        """Cap the logits, and write the derivative of the cap to ``slope``."""
        if slope is None or self._kind.softcap is None:
            return
        logits.div_(self._kind.softcap).tanh_()
        # The derivative of tanh is one minus its square; the factors of the cap cancel.
        torch.mul(logits, logits, out=slope).neg_().add_(1)
        logits.mul_(self._kind.softcap)

    def _losses_of(self, rows: slice, logits: torch.Tensor) -> torch.Tensor:
        """Store the losses of some rows; leave exp(logits - max) and return its sum per row."""
        logits -= logits.amax(1, keepdim=True)  # no exponential overflows
        # Before the exponentials, which are written over the logits.
        chosen = logits.gather(1, self._labels[rows, None])
        smoothing = self._kind.smoothing
        if smoothing:
            chosen = torch.lerp(chosen, logits.mean(1, keepdim=True), smoothing)
        totals = logits.exp_().sum(1, keepdim=True)
        losses = (totals.log() - chosen).squeeze(1)
        self.losses[rows] = losses.masked_fill(~self.counts[rows], 0)
        return totals

    def _logits_gradient(
        self, rows: slice, exponentials: torch.Tensor, totals: torch.Tensor, factor: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradient of the rows' losses times ``factor``, in place."""
        smoothing, labels = self._kind.smoothing, self._labels[rows, None]
        factor = factor[:, None]
        d_logits = exponentials.mul_(factor / totals)
        if smoothing:
            d_logits -= factor * (smoothing / exponentials.shape[1])
        # The buffer of logits becomes their gradient: softmax, less the target at each label.
        at_label = d_logits.gather(1, labels) - factor * (1 - smoothing)
        return d_logits.scatter_(1, labels, at_label)


class _CrossEntropyFunction(torch.autograd.Function):
    """See [Note: Gradients in forward]."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # torch's own
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        kind: _Kind,
    ) -> torch.Tensor:
        ctx.kind = kind
        is_later = kind.reduction == "none"
        wanted = (False,) * 3 if is_later else tuple(ctx.needs_input_grad[:3])
        with _without_autocast(hidden.device.type):
            whole = _Pass(hidden, (weight, bias), labels, kind)
            gradients = whole.run(wanted)
            if is_later:
                ctx.save_for_backward(hidden, weight, bias, labels)
                return whole.losses
            ctx.dtypes = [None if t is None else t.dtype for t in (hidden, weight, bias)]
            count = whole.counts.sum() if kind.reduction == "mean" else None
            ctx.gradients = gradients, count
            total = whole.losses.sum()
            return total if count is None else total / count

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # noqa: ANN401
        if torch.is_grad_enabled():
            message = (
                "create_graph=True was used with chunked_cross_entropy, which computes first"
                " derivatives only. Use torch.nn.functional.cross_entropy for second ones."
            )
            raise OptionError(message)
        if ctx.kind.reduction == "none":
            hidden, weight, bias, labels = ctx.saved_tensors
            with _without_autocast(hidden.device.type):
                again = _Pass(hidden, (weight, bias), labels, ctx.kind)
                gradients = again.run(tuple(ctx.needs_input_grad[:3]), gradient)
            dtypes = [None if t is None else t.dtype for t in (hidden, weight, bias)]
            return *_rounded(gradients, dtypes), None, None
        if ctx.gradients is None:
            message = (
                "Trying to backward through the graph a second time: the gradients that forward"
                " computed are gone. Use retain_graph=True for the first backward."
            )
            raise RuntimeError(message)
        gradients, count = ctx.gradients
        # If no row counts, gradients are 0 and only the loss is nan, as in torch.
        scale = gradient if count is None else gradient / count.clamp(min=1)
        # With ``retain_graph`` a second backward needs the gradients as forward left them.
        is_kept = torch._C._autograd._get_current_graph_task_keep_graph()  # noqa: SLF001
        if not is_kept:
            ctx.gradients = None
        scaled = [
            None if g is None else (g * scale if is_kept else g.mul_(scale)) for g in gradients
        ]
        return *_rounded(scaled, ctx.dtypes), None, None


def _without_autocast(kind: str) -> AbstractContextManager[object]:
    if not torch.amp.is_autocast_available(kind):  # the meta device
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def _rounded(
    gradients: Any,  # noqa: ANN401  # a tuple or list of tensors and None
    dtypes: list[torch.dtype | None],
) -> list[torch.Tensor | None]:
    return [
        None if g is None or dtype is None else g.to(dtype)
        for g, dtype in zip(gradients, dtypes, strict=True)
    ]


def _computing_dtype(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.dtype:
    """Return the dtype of operands: autocast's, or the common dtype of all tensors."""
    dtypes = {t.dtype for t in (hidden, weight, bias) if t is not None}
    if not all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in dtypes):
        message = f"chunked_cross_entropy was given {dtypes}: it takes floating point tensors."
        raise DTypeError(message)
    kind = hidden.device.type
    is_available = torch.amp.is_autocast_available(kind)
    if is_available and torch.is_autocast_enabled(kind) and torch.float64 not in dtypes:
        return torch.get_autocast_dtype(kind)
    if len(dtypes) > 1:
        message = (
            f"chunked_cross_entropy was given hidden states of {hidden.dtype} and a layer of"
            f" {dtypes - {hidden.dtype}}. Cast one of them, or use torch.autocast."
        )
        raise DTypeError(message)
    return hidden.dtype


def _check_tensors(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None
) -> None:
    for name, tensor in {"hidden": hidden, "weight": weight, "bias": bias}.items():
        if tensor is not None:
            read_value(torch.Tensor, tensor, name)
            _check_whole(name, tensor)
    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:]:
        message = (
            f"hidden has shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}: the layer's"
            " weight is (classes, width), and hidden (..., width)."
        )
        raise OptionError(message)
    if bias is not None and bias.shape != weight.shape[:1]:
        message = f"bias has shape {tuple(bias.shape)}; weight has {len(weight)} rows."
        raise OptionError(message)
    if labels.dtype != torch.int64 or labels.shape != hidden.shape[:-1]:
        message = (
            f"labels are {labels.dtype} of shape {tuple(labels.shape)}; int64 of shape"
            f" {tuple(hidden.shape[:-1])} goes with these hidden states."
        )
        raise OptionError(message)


def _check_whole(name: str, tensor: torch.Tensor) -> None:
    is_part = is_sharded(tensor) or isinstance(tensor, OffloadedWeight)
    has_bytes = not is_part and tensor.numel() and not tensor.is_meta
    is_freed = has_bytes and not tensor.untyped_storage().nbytes()
    if is_part or is_freed:
        problem = "has no memory now" if is_freed else f"is a {type(tensor).__name__}"
        message = (
            f"{name} {problem}: chunked_cross_entropy takes whole tensors. Under stow or FSDP2 call"
            " it inside the forward of the unit that has the parameter, where it is gathered."
        )
        raise OptionError(message)


def _check_labels(labels: torch.Tensor, classes: int, ignore_index: int) -> None:
    wrong = (labels != ignore_index) & ((labels < 0) | (labels >= classes))
    if bool(wrong.any()):
        message = (
            f"Label {int(labels[wrong][0])} was given; classes are 0 to {classes - 1}, and rows of"
            f" ignore_index={ignore_index} do not count."
        )
        raise OptionError(message)
