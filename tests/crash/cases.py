"""The runs that are killed: every axis several times, in other company each time."""

from crash.world import Case

CASES = [
    Case("none", "split", commit_every=1),
    Case("none", "fp32", commit_every=3, ram_budget="1100KiB", pin_every=2),
    Case("none", "int8", commit_every="0.02s"),
    Case("forward", "split", commit_every=3, pin_every=3),
    Case("forward", "bf16", commit_every=1, ram_budget="1100KiB"),
    Case("forward", "fp32", commit_every="0.02s", states=0.5),
    Case("backward", "split", commit_every=1, ram_budget="1100KiB", pin_every=4),
    Case("backward", "int8", commit_every=3),
    Case("backward", "fp32", commit_every=None),
    Case("forward", "split", commit_every=None, pin_every=5),
    Case("speculative", "split", commit_every=1, pin_every=3, clips=True),
    Case("speculative", "int8", commit_every=2, ram_budget="1100KiB", clips=True),
    Case("speculative", "fp32", commit_every="0.02s", clips=True),
    Case("speculative", "split", commit_every=1, pin_every=3, clips=True, parameters="disk"),
    Case("speculative", "fp32", commit_every="0.02s", clips=True, parameters="disk"),
    Case("forward", "split", commit_every=2, clips=True, parameters="disk"),
]
