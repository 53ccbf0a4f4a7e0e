from tensorstow.cli.verify.rows import runs_of


def test_every_exact_format_and_overlap_is_on_disk() -> None:
    runs = runs_of(["fp32", "bf16"])
    assert len(set(runs)) == len(runs)
    on_disk = {(r.dtype, r.state_format, r.overlap) for r in runs if r.states == "disk"}
    formats = {("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "split")}
    assert on_disk == {(d, f, o) for d, f in formats for o in ("none", "forward", "backward")}
    assert [(r.dtype, r.state_format) for r in runs if r.is_killed] == [
        ("fp32", "fp32"),
        ("bf16", "split"),
    ]


def test_the_reference_of_a_dtype_comes_first_and_again() -> None:
    first, second, *_ = runs_of(["bf16"])
    assert (first.states, first.is_repeat, second.is_repeat) == ("host", False, True)
    assert first.title == "bf16, states in RAM as fp32"
    assert second.cells == ("bf16", "RAM, again", "fp32", "none")
