"""The colour of each configuration of the demo."""

ROW_COLORS = {
    "torch": "#8a919c",
    "ram": "#6c7fa6",
    "naive": "#a9659f",
    "half": "#6f953c",
    "full": "#2f7fb5",
    "forward": "#cf8a1d",
    "backward": "#1f9484",
    "stow": "#c4553f",
}
