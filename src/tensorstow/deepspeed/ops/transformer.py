"""``deepspeed.ops.transformer``: not here; its names are refused with advice."""

from tensorstow.base.absent_names import refuse_names

__getattr__ = refuse_names(
    __name__,
    "use torch's scaled_dot_product_attention and torch.compile in the model",
)
