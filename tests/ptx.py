"""What the fused kernel is compiled to for CUDA: its operations on floating-point numbers.

Compiling needs no device: Triton's wheel brings ptxas. As a program it prints them, by family.
"""

import json
import re
import sys
from collections import Counter

import torch

from tensorstow.states.layout import STREAMS, Family

FLOATS = re.compile(
    r"^\s+(?:@%?\S+ )?([a-z][a-z0-9_.:]*\.(?:b?f16(?:x2)?|f32(?:x2)?|f64)\b[a-z0-9_.]*)",
    re.MULTILINE,
)
EXACT = re.compile(
    r"(add|sub|mul)\.rn\.(f32(x2)?|f64)|(div|sqrt)\.rn\.f32|(abs|neg|min|max)\.f(32|64)"
    r"|(setp|set|selp)\.[a-z.]*f(32|64)|cvt\.f64\.f32|cvt\.rn\.f32\.f64|(ld|st|mov)\..*"
    r"|cvt\.rn\.f32\.[su](8|16|32)|cvt\.rzi\.s32\.f32|cvt\.f32\.f16|cvt\.rn\.f16\.f32"
)
"""One rounding to the nearest each, or none."""


def operations(ptx: str) -> Counter[str]:
    """Return how often each is in the text."""
    return Counter(FLOATS.findall(ptx))


def inexact(found: Counter[str]) -> list[str]:
    """Return those that are not known to round as the host does: `fma`, `approx`, `ftz`."""
    return sorted(name for name in found if not EXACT.fullmatch(name))


def compiled(family: Family, capability: int) -> str:
    """Return the PTX of one family, which ptxas has taken."""
    import triton  # noqa: PLC0415  # other tests import this file for the functions above
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    from tensorstow.step import fused_kernel  # noqa: PLC0415

    kernel = fused_kernel.update_chunk
    streams = {
        spec.name: "i16" if spec.dtype == torch.bfloat16 else _WORDS[spec.dtype]
        for spec in family.specs
    }
    kinds = ["*i64", "*fp32", "i32"]
    kinds += ["*" + streams.get(name, "i64") for name in STREAMS]
    names = kernel.arg_names
    signature = dict(zip(names, [*kinds, *["constexpr"] * 4], strict=True))
    constants = {
        "DTYPE": str(family.dtype),
        "FORMAT": str(family.format),
        "AMSGRAD": family.amsgrad,
        "EMA": family.ema,
    }
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    target = GPUTarget("cuda", capability, 32)
    made = triton.compile(source, target=target, options=dict(fused_kernel.OPTIONS))
    assert made.asm["cubin"]
    ptx: str = made.asm["ptx"]
    return ptx


_WORDS = {
    torch.float32: "fp32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
}


def main() -> None:
    """Print the operations of the families and capabilities that are given, as JSON."""
    from fused_cases import FAMILIES  # noqa: PLC0415

    found = {}
    for number, capability in json.loads(sys.argv[1]):
        family = FAMILIES[number]
        states = f"{' amsgrad' if family.amsgrad else ''}{' ema' if family.ema else ''}"
        name = f"{family.dtype} {family.format}{states} sm_{capability}"
        found[name] = operations(compiled(family, capability))
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
