"""The tests of equal bits with the kernels of other processors, in `make soak`.

Torch's libraries choose kernels by the processor, and these variables let them choose as on another
one. MKL obeys MKL_ENABLE_INSTRUCTIONS on processors of Intel alone; MKL_CBWR=COMPATIBLE takes
kernels that all processors have. What is equal with some kernels only is no promise, but a bound.
"""

import os
import subprocess
import sys
from collections.abc import Mapping

VALUES: Mapping[str, tuple[str, ...]] = {
    "ONEDNN_MAX_CPU_ISA": ("SSE41", "AVX2", "AVX512_CORE"),
    "ATEN_CPU_CAPABILITY": ("default", "avx2", "avx512"),
    "MKL_ENABLE_INSTRUCTIONS": ("SSE4_2", "AVX2", "AVX512"),
    "MKL_CBWR": ("COMPATIBLE",),
}
OLDEST = {name: values[0] for name, values in VALUES.items()}
PROCESSORS = [OLDEST, *({name: value} for name, values in VALUES.items() for value in values)]
TESTS = (
    *(f"tests/properties/test_{name}.py" for name in ("stow", "stow_architectures")),
    *(f"tests/properties/test_{name}.py" for name in ("parity_torch", "stowed_optimizer_parity")),
    *(f"tests/properties/test_{name}.py" for name in ("formats_train", "memory_formats")),
    *(f"tests/unit/{room}" for room in ("nn", "losses", "optim", "formats")),
    *(f"tests/unit/fsdp/test_{name}.py" for name in ("read_only", "generation", "unit_backward")),
    *(f"tests/unit/fsdp/test_stow_{name}.py" for name in ("compositions", "transformers")),
    "tests/unit/fsdp/test_vertical_order.py",
    "tests/unit/checkpoint/test_pretrained.py",
)


def main() -> None:
    """Run them with each; exit by whether one failed."""
    failed = []
    for processor in PROCESSORS:
        name = " ".join(f"{variable}={value}" for variable, value in processor.items())
        print(name, flush=True)  # noqa: T201
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", *TESTS]
        if subprocess.run(command, env=os.environ | processor, check=False).returncode:
            failed.append(name)
    if failed:
        sys.exit("Tests failed with " + ", ".join(failed))


if __name__ == "__main__":
    main()
