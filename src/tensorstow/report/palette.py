"""The colours of spans and of plots, legible in print and to colour-blind readers."""

SPAN_COLORS = {
    "forward": "#a9c9e8",
    "backward": "#6d9fd0",
    "opt.step": "#1f4e86",
    "zero_grad": "#c9ced6",
    "last writes": "#b7a3cf",
    "read": "#3a9e8f",
    "update": "#e0a02f",
    "write": "#c4553f",
    "weights read": "#2b7d9c",
    "weights written": "#9c4a7d",
    "link down": "#7a6bc4",
    "link up": "#5b9a3f",
    "wait": "#a8afba",
    "weights being read": "#d9895b",
    "weights being written": "#d9895b",
    "a commit being made durable": "#d9895b",
}
SPAN_INKS = {"forward": "#1c2632", "backward": "#ffffff", "opt.step": "#ffffff"}
"""Colors of the text inside a bar; other bars are too short for text."""
INK = "#1d2733"
FAINT = "#8a919c"
GRID = "#e6e9ee"
PAPER = "#fefefe"
