"""``deepspeed.ops.sparse_attention``: not here; its names are refused with advice."""

from tensorstow.base.absent_names import refuse_names

__getattr__ = refuse_names(
    __name__,
    "use torch.nn.attention.flex_attention in the model",
)
