"""Parameters on an accelerator: the link, weights in host memory, gradients' way down."""
