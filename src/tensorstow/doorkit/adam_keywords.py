"""The keywords that Adam has in both projects' signatures."""

from tensorstow.doorkit.keyword_table import Table, honoured, refused

ADAM: Table = {
    "model_params": honoured("Parameters, named parameters, or parameter groups."),
    "lr": honoured("The learning rate."),
    "bias_correction": honoured("Whether the moments are corrected for their start at zero."),
    "betas": honoured("The decay rates of the first and the second moment."),
    "eps": honoured("Is added to the root of the second moment."),
    "weight_decay": honoured("The weight decay."),
    "amsgrad": honoured("Whether the running maximum of the second moment is used."),
    "adamw_mode": honoured("Whether the decay is decoupled (AdamW) instead of an L2 penalty."),
}
FP32_STATES = refused(
    'states are fp32; those of Adam have other sizes by state_format="bf16"',
    "fp32_optimizer_states",
)
"""The keyword by which DeepSpeed's optimizers keep smaller states."""
