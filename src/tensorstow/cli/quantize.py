"""`tensorstow quantize`: write a copy of a model's folder in 8 or 4 bits."""

import argparse
from dataclasses import asdict

from tensorstow.base.directories import expand_path
from tensorstow.base.sizes import format_bytes
from tensorstow.checkpoint.quantized_folder import quantize_folder
from tensorstow.checkpoint.weight_encoders import ENCODERS
from tensorstow.cli.output import make_console, print_json, print_line
from tensorstow.measure.models import build_model


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    source, target = (expand_path(path).absolute() for path in (options.source, options.target))
    encoder = ENCODERS[options.encoder]
    model = build_model(str(source)).module
    written = quantize_folder(source, target, model, encoder, experts=options.experts)
    if options.json:
        print_json(asdict(written))
    else:
        sizes = (format_bytes(n) for n in (written.source_bytes, written.nbytes))
        line = f"{written.path}: {written.matrices:,} matrices in {encoder.name}"
        console = make_console()
        print_line(console, f"{line}, {' -> '.join(sizes)}")
        if written.other_experts:
            left = f"{written.other_experts:,} matrices of experts stayed as they are"
            print_line(console, f"{left}: --experts includes them")
    return 0
