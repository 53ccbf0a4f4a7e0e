"""One colour per thing, the same in every picture: legible in print and to colour-blind eyes."""

SPAN_COLORS = {
    "forward": "#a9c9e8",
    "backward": "#6d9fd0",
    "opt.step": "#1f4e86",
    "zero_grad": "#c9ced6",
    "last writes": "#c9ced6",
    "read": "#3a9e8f",
    "update": "#e0a02f",
    "write": "#c4553f",
}
SPAN_INKS = {"forward": "#1d2733", "backward": "#ffffff", "opt.step": "#ffffff"}
"""Of the text inside a bar; the others are too short to hold any."""

ROW_COLORS = {
    "torch": "#8a919c",
    "ram": "#4a5361",
    "naive": "#a2699c",
    "half": "#6a8f3c",
    "full": "#2f6f9f",
}
INK = "#1d2733"
FAINT = "#8a919c"
GRID = "#e6e9ee"
