"""The chunked cross entropy against torch's: values, gradients, memory, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tensorstow.base.errors import DTypeError, OptionError, StowError
from tensorstow.losses import chunked_cross_entropy

CLASSES, WIDTH = 301, 24
ROW_BYTES = 4 * CLASSES
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
SUMS = 2.0**-18
"""What fp32 sums of this length may lose, of the largest element."""


def tensors(dtype: torch.dtype = torch.float32, rows: int = 37) -> Tensors:
    generator = torch.Generator().manual_seed(rows)
    shapes = ((rows, WIDTH), (CLASSES, WIDTH), (CLASSES,))
    made = [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]
    return made[0], made[1], made[2]


def labels_of(rows: int = 37, *, ignored: slice = slice(3, 9)) -> torch.Tensor:
    labels = torch.randint(CLASSES, (rows,), generator=torch.Generator().manual_seed(5))
    labels[ignored] = -100
    return labels


def exact(given: Tensors, labels: torch.Tensor, gradient: torch.Tensor, **options: Any) -> Any:  # noqa: ANN401
    """Return torch's loss and gradients in float64, from the same values."""
    cap = options.pop("logit_softcap", None)
    hidden, weight, bias = (t.detach().double().requires_grad_() for t in given)
    logits = hidden @ weight.T + bias
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    loss = functional.cross_entropy(logits, labels, **options)
    loss.backward(gradient.double())
    return [loss.detach(), hidden.grad, weight.grad, bias.grad]


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element."""
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("dtype", ULP, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"label_smoothing": 0.1},
        {"logit_softcap": 3.0},
        {"logit_softcap": 3.0, "label_smoothing": 1.0, "reduction": "none"},
        {"ignore_index": 7},
    ],
    ids=str,
)
def test_loss_and_gradients_are_rounded_once(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Each is the float64 result, but for fp32 sums and one rounding to its dtype."""
    given, labels = tensors(dtype), labels_of()
    labels = labels.clamp(min=0) if "ignore_index" in options else labels
    loss = chunked_cross_entropy(
        *given[:2], labels, bias=given[2], chunk_bytes=10 * ROW_BYTES, **options
    )
    gradient = torch.rand_like(loss) + 0.5
    loss.backward(gradient)
    assert loss.dtype == torch.float32
    wanted = exact(given, labels, gradient, **options)
    assert difference(loss.detach(), wanted[0]) <= SUMS
    for tensor, truth in zip(given, wanted[1:], strict=True):
        assert tensor.grad.dtype == dtype
        assert difference(tensor.grad, truth) <= ULP[dtype] / 2 + SUMS


@pytest.mark.parametrize("dtype", ULP, ids=str)
def test_it_is_no_less_exact_than_torchs(dtype: torch.dtype) -> None:
    given, labels = tensors(dtype), labels_of()
    wanted = exact(given, labels, torch.ones(()))

    def differences(loss: torch.Tensor) -> list[float]:
        found = [loss.detach(), *torch.autograd.grad(loss, given)]
        return [difference(f, w) for f, w in zip(found, wanted, strict=True)]

    ours = differences(chunked_cross_entropy(*given[:2], labels, bias=given[2]))
    theirs = differences(functional.cross_entropy(given[0] @ given[1].T + given[2], labels))
    assert all(a <= b + SUMS for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("options", [{}, {"reduction": "none", "label_smoothing": 0.2}], ids=str)
@pytest.mark.parametrize("cap", [None, 2.0])
def test_gradcheck(options: dict[str, Any], cap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    given = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((5, 3), (7, 3), (7,))
    ]
    labels = torch.tensor([0, 6, -100, 3, 3])

    def loss(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return chunked_cross_entropy(
            hidden, weight, labels, bias=bias, chunk_bytes="120B", logit_softcap=cap, **options
        )

    assert torch.autograd.gradcheck(loss, given)


def test_batches_of_sequences() -> None:
    hidden, weight, _ = tensors(rows=36)
    labels = labels_of(36)
    flat = chunked_cross_entropy(hidden, weight, labels, reduction="none")
    both = chunked_cross_entropy(
        hidden.view(3, 12, WIDTH), weight, labels.view(3, 12), reduction="none"
    )
    assert both.shape == (3, 12)
    assert torch.equal(both.view(-1), flat)
    mean = chunked_cross_entropy(hidden.view(3, 12, WIDTH), weight, labels.view(3, 12))
    assert torch.equal(mean, chunked_cross_entropy(hidden, weight, labels))
    assert torch.equal(mean, flat.sum() / (labels >= 0).sum())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("rows", [0, 5])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_no_row_counts(reduction: Any, rows: int, smoothing: float) -> None:  # noqa: ANN401
    """Torch's result: nan as a mean, and gradients of zeros."""
    given, labels = tensors(rows=rows), torch.full((rows,), -100)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    ours = chunked_cross_entropy(*given[:2], labels, bias=given[2], **options)
    logits = given[0] @ given[1].T + given[2]
    theirs = functional.cross_entropy(logits, labels, **options)
    assert torch.equal(ours, theirs) or (ours.isnan().all() and theirs.isnan().all())
    for gradient in torch.autograd.grad(ours.sum(), given):
        assert not gradient.any()


def test_only_what_requires_a_gradient_gets_one() -> None:
    hidden, weight, bias = tensors()
    loss = chunked_cross_entropy(hidden, weight.detach(), labels_of(), bias=bias.detach())
    (alone,) = torch.autograd.grad(loss, hidden)
    loss = chunked_cross_entropy(hidden, weight, labels_of(), bias=bias)
    assert torch.equal(alone, torch.autograd.grad(loss, hidden)[0])
    loss = chunked_cross_entropy(hidden.detach(), weight.detach(), labels_of())
    assert not loss.requires_grad


class _Products(TorchDispatchMode):
    """Counts products of matrices, and notes the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.most_bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        del types
        self.count += "mm" in str(func)
        out = func(*args, **(kwargs or {}))
        sizes = [t.nbytes for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.most_bytes = max(self.most_bytes, *sizes, 0)
        return out


@pytest.mark.parametrize(
    ("reduction", "products"), [("mean", (3, 0)), ("sum", (3, 0)), ("none", (1, 3))]
)
def test_logits_are_never_whole(reduction: Any, products: tuple[int, int]) -> None:  # noqa: ANN401
    """And each chunk has three products, or four where rows have gradients of their own."""
    hidden, weight, bias = tensors(rows=200)
    size = 40 * ROW_BYTES
    with _Products() as forward:
        loss = chunked_cross_entropy(
            hidden, weight, labels_of(200), bias=bias, chunk_bytes=size, reduction=reduction
        )
    with _Products() as backward:
        loss.backward(torch.ones_like(loss))
    assert (forward.count / 5, backward.count / 5) == products
    assert max(forward.most_bytes, backward.most_bytes) == size


def test_without_gradients_there_is_one_product() -> None:
    hidden, weight, _ = tensors()
    with torch.no_grad(), _Products() as evaluation:
        loss = chunked_cross_entropy(hidden, weight, labels_of())
    assert evaluation.count == 1
    assert torch.equal(loss, chunked_cross_entropy(hidden, weight, labels_of()).detach())


def test_blocks_of_16_bit_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    given, labels = tensors(torch.bfloat16), labels_of()
    whole = torch.autograd.grad(chunked_cross_entropy(*given[:2], labels, bias=given[2]), given)
    monkeypatch.setattr("tensorstow.losses.cross_entropy._BLOCK_BYTES", 4 * WIDTH * 50)
    with _Products() as counted:
        loss = chunked_cross_entropy(*given[:2], labels, bias=given[2])
    assert counted.count == 3 * 7  # 301 classes in blocks of 50
    for a, b in zip(torch.autograd.grad(loss, given), whole, strict=True):
        assert difference(a, b.double()) <= 2.0**-8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kernels_that_multiply_into_fp32(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's, for which a product of converted operands stands in: the same numbers."""
    product = torch.mm

    def mm(a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype) -> torch.Tensor:
        assert (a.dtype, b.dtype, out_dtype) == (dtype, dtype, torch.float32)
        return product(a.float(), b.float())

    monkeypatch.setattr("tensorstow.losses.cross_entropy._multiplies_into_fp32", lambda _: True)
    monkeypatch.setattr(torch, "mm", mm)
    given, labels = tensors(dtype), labels_of()
    loss = chunked_cross_entropy(*given[:2], labels, bias=given[2], chunk_bytes=10 * ROW_BYTES)
    found = [loss.detach(), *torch.autograd.grad(loss, given)]
    wanted = exact(given, labels, torch.ones(()))
    assert difference(found[0], wanted[0]) <= SUMS
    for gradient, truth in zip(found[1:], wanted[1:], strict=True):
        assert (
            difference(gradient, truth) <= 2 * ULP[dtype]
        )  # the gradient of logits is rounded too


def test_the_result_is_the_same_again() -> None:
    given, labels = tensors(), labels_of()

    def run() -> list[torch.Tensor]:
        loss = chunked_cross_entropy(*given[:2], labels, bias=given[2], chunk_bytes=5 * ROW_BYTES)
        return [loss.detach(), *torch.autograd.grad(loss, given)]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_a_graph_that_is_kept_runs_again() -> None:
    given, labels = tensors(), labels_of()
    loss = chunked_cross_entropy(*given[:2], labels, bias=given[2])
    first = torch.autograd.grad(3 * loss, given, retain_graph=True)
    second = torch.autograd.grad(3 * loss, given)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, given)


def test_hooks_are_given_no_gradient_as_if_it_were_saved() -> None:
    # Backward writes to them: a hook's copy would be read while it does.
    given, labels = tensors(), labels_of()
    packed: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        loss = chunked_cross_entropy(*given[:2], labels)
    assert not packed
    loss.backward()


def test_a_tied_weight_gets_the_sum() -> None:
    table = nn.Parameter(tensors()[1].detach().clone())
    tokens, labels = torch.arange(37), labels_of()

    def gradient(loss: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        table.grad = None
        loss(torch.tanh(functional.embedding(tokens, table))).backward()
        return table.grad

    ours = gradient(lambda hidden: chunked_cross_entropy(hidden, table, labels))
    theirs = gradient(lambda hidden: functional.cross_entropy(hidden @ table.T, labels))
    assert difference(ours, theirs.double()) <= SUMS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype: torch.dtype) -> None:
    """Operands are rounded as autocast rounds them; gradients have all bits of their sums."""
    given, labels = tensors(), labels_of()
    with torch.autocast("cpu", dtype=dtype):
        loss = chunked_cross_entropy(*given[:2], labels, bias=given[2])
        assert functional.cross_entropy(functional.linear(*given), labels).dtype == loss.dtype
    gradients = torch.autograd.grad(loss, given)
    rounded = tuple(t.detach().to(dtype) for t in given)
    wanted = exact(rounded, labels, torch.ones(()))
    for found, truth in zip([loss.detach(), *gradients], wanted, strict=True):
        assert found.dtype == torch.float32
        assert difference(found, truth) <= SUMS


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_inside_of_a_checkpoint(reduction: Any) -> None:  # noqa: ANN401
    given, labels = tensors(), labels_of()

    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        found = chunked_cross_entropy(torch.tanh(hidden), weight, labels, reduction=reduction)
        return found.sum()

    plain = torch.autograd.grad(loss(*given[:2]), given[:2])
    again = torch.autograd.grad(checkpoint(loss, *given[:2], use_reentrant=False), given[:2])
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_a_scaled_fp16_loss_keeps_small_gradients() -> None:
    """GradScaler's factor comes after the gradients were computed, in fp32."""
    given, labels = tensors(torch.float16), labels_of()
    small = 2.0**-26
    loss = chunked_cross_entropy(*given[:2], labels, bias=given[2]) * small
    found = torch.autograd.grad(loss * (1 / small), given)
    wanted = exact(given, labels, torch.ones(()))
    for gradient, truth in zip(found, wanted[1:], strict=True):
        assert difference(gradient, truth) <= 2.0**-11 + SUMS


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler asks for it
def test_a_compiled_model_calls_it_between_two_graphs() -> None:
    given, labels = tensors(), labels_of()

    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return chunked_cross_entropy(torch.tanh(hidden), weight, labels) * 2

    plain = torch.autograd.grad(loss(*given[:2]), given[:2])
    compiled = torch.compile(loss, backend="eager")(*given[:2])
    again = torch.autograd.grad(compiled, given[:2])
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="chunked_cross_entropy"):
        torch.compile(loss, backend="eager", fullgraph=True)(*given[:2])


def test_on_the_meta_device() -> None:
    hidden, weight, bias = (t.detach().to("meta").requires_grad_() for t in tensors())
    loss = chunked_cross_entropy(hidden, weight, labels_of().to("meta"), bias=bias)
    loss.backward()
    assert weight.grad.is_meta


# --- what is refused ---


def test_a_second_derivative_is_refused() -> None:
    given = tensors()
    loss = chunked_cross_entropy(*given[:2], labels_of())
    with pytest.raises(OptionError, match="create_graph"):
        torch.autograd.grad(loss, given[:2], create_graph=True)


def test_a_sharded_weight_is_refused(tmp_path: Any) -> None:  # noqa: ANN401
    hidden, weight, _ = tensors()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/at", rank=0, world_size=1
    )
    try:
        sharded = distribute_tensor(weight.detach(), init_device_mesh("cpu", (1,)))
        with pytest.raises(OptionError, match=r"weight is a DTensor.*forward of the unit"):
            chunked_cross_entropy(hidden, sharded, labels_of())
    finally:
        torch.distributed.destroy_process_group()


def test_a_weight_without_memory_is_refused() -> None:
    hidden, weight, _ = tensors()
    weight.untyped_storage().resize_(0)
    with pytest.raises(OptionError, match="weight has no memory"):
        chunked_cross_entropy(hidden, weight, labels_of())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduction": "max"}, "reduction"),
        ({"reduction": []}, "reduction"),
        ({"label_smoothing": 1.5}, "label_smoothing"),
        ({"label_smoothing": "x"}, "label_smoothing"),
        ({"label_smoothing": float("nan")}, "label_smoothing"),
        ({"logit_softcap": 0.0}, "logit_softcap"),
        ({"logit_softcap": float("inf")}, "logit_softcap"),
        ({"logit_softcap": "x"}, "logit_softcap"),
        ({"ignore_index": 0.5}, "ignore_index"),
        ({"ignore_index": float("nan")}, "ignore_index"),
        ({"ignore_index": None}, "ignore_index"),
        ({"chunk_bytes": "4 rows"}, "chunk_bytes"),
        ({"labels": torch.full((37,), CLASSES)}, "Label 301"),
        ({"labels": torch.full((37,), -1)}, "Label -1"),
        ({"labels": torch.zeros(36, dtype=torch.int64)}, "labels are"),
        ({"labels": torch.zeros(37, CLASSES)}, "labels are"),
        ({"weight": torch.zeros(CLASSES, WIDTH + 1)}, "weight"),
        ({"bias": torch.zeros(WIDTH)}, "bias"),
        ({"bias": 1}, "bias"),
        ({"weight": torch.zeros(CLASSES, WIDTH, dtype=torch.bfloat16)}, "Cast one"),
        ({"bias": torch.zeros(CLASSES, dtype=torch.int64)}, "floating point"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    hidden, weight, _ = tensors()
    given = {"hidden": hidden, "weight": weight, "labels": labels_of(), **change}
    with pytest.raises(StowError, match=message) as found:
        chunked_cross_entropy(**given)
    assert isinstance(found.value, OptionError | DTypeError)
