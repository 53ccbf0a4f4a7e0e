"""The benchmarks run and judge rightly; how fast anything is, no test says."""

import importlib
import io
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import children
from tensorstow import _native
from tree import ROOT

RUN = subprocess.run


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.measure")


@pytest.fixture(scope="module", autouse=True)
def _pool_threads_put_back() -> Iterator[None]:
    before = _native.pool_threads()
    yield
    _native.set_pool_threads(before)


def run_forked(command: list[str], **how: Any) -> "subprocess.CompletedProcess[str]":  # noqa: ANN401  # subprocess's
    """Run what a benchmark starts: a module that reads nothing, in a fork that has torch."""
    if command[:2] != [sys.executable, "-m"] or how.get("input") is not None:
        return RUN(command, **how)
    given = {name: value for name, value in how["env"].items() if os.environ.get(name) != value}
    return children.run(*command[1:], environment=given)


def run_benchmarks(out: Path, *arguments: str) -> str:
    """Run benchmarks in this process; return what they print."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.syspath_prepend(str(ROOT))
        patch.chdir(ROOT)
        patch.setattr(subprocess, "run", run_forked)
        with warnings.catch_warnings(action="ignore"):
            main = importlib.import_module("benchmarks.run").main
            main([*arguments, "--quick", "--out", str(out)])
    return printed.getvalue()


def check_document(document: dict[str, Any], subject: str) -> None:
    assert document.keys() == {"schema", "subject", "pairs", "quick", "machine", "figures"}
    assert document["schema"] == 1
    assert document["subject"] == subject
    assert document["quick"] is True
    assert document["machine"].keys() >= {
        "cpu",
        "cores",
        "torch",
        "isa",
        "io_backend",
        "filesystem",
    }
    assert document["figures"]
    for figure in document["figures"]:
        assert figure.keys() == {"name", "limit", "measured", "unit", "detail", "verdict"}
        if figure["measured"] is None:
            assert figure["verdict"] == "not available"
            assert figure["detail"]["why"]
        elif figure["limit"] is None:
            assert figure["verdict"] == "information"
        else:
            assert figure["limit"].keys() == {"kind", "value"}
            assert figure["verdict"] in {"passed", "falls short"}


def test_quick_run_saves_and_prints_every_figure(tmp_path: Path) -> None:
    subjects = ("kernels", "optimizer", "offload", "trainer")
    printed = run_benchmarks(tmp_path, *subjects)
    for subject in subjects:
        saved = (tmp_path / f"{subject}.json").read_text()
        document = json.loads(saved)
        assert os.uname().nodename not in document["machine"].values()
        assert str(ROOT) not in saved
        check_document(document, subject)
        table = (tmp_path / "table.md").read_text()
        for figure in document["figures"]:
            assert figure["name"] in printed
            assert f"| {figure['name']} |" in table


def test_a_model_on_an_accelerator_runs_with_the_cpu_in_its_place(tmp_path: Path) -> None:
    run_benchmarks(tmp_path, "gpu", "--cpu-as-device")
    document = json.loads((tmp_path / "gpu.json").read_text())
    check_document(document, "gpu")
    assert document["machine"]["accelerator"] == "the CPU in its place"
    found = {figure["name"]: figure for figure in document["figures"]}
    asked = [figure for name, figure in found.items() if "link bytes" in name]
    assert [figure["measured"] for figure in asked] == [2.0] * 6
    assert found["ours: different loss curves"]["verdict"] == "passed"
    assert found["ours: loss after one update, apart from no offload's"]["verdict"] == "passed"
    bound = [figure for name, figure in found.items() if name.endswith("step / its bound")]
    assert len(bound) >= 11  # no offload, nine of ours, FSDP2
    for where in ("on the device", "on both sides", "on the faster side"):
        assert any(f"updated {where}: step" in figure["name"] for figure in bound)
    for figure in bound:
        alone = figure["detail"]["alone_seconds"]
        assert alone.keys() == {"compute", "link down", "link up", "host DRAM", "disk"}
        assert alone[figure["detail"]["bound_by"]] == max(alone.values())
    peers = [figure for name, figure in found.items() if name.startswith("the fastest of ours")]
    assert len(peers) == 3
    assert [p["measured"] is not None for p in peers if "FSDP2" in p["name"]] == [True]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_nothing_is_measured_on_one(tmp_path: Path) -> None:
    run_benchmarks(tmp_path, "gpu")
    (figure,) = json.loads((tmp_path / "gpu.json").read_text())["figures"]
    assert figure["verdict"] == "not available"
    assert "no device" in figure["detail"]["why"]


@pytest.mark.slow
@pytest.mark.timeout(600)  # the accelerator is built, where that was not done yet
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_every_plan_runs_on_the_simulated_accelerator(tmp_path: Path) -> None:
    run_benchmarks(tmp_path, "accelerator_model")
    document = json.loads((tmp_path / "accelerator_model.json").read_text())
    check_document(document, "accelerator_model")
    assert len(document["figures"]) == 6 + 6 + 3  # updates on the host, elsewhere, and clipped
    for figure in document["figures"]:
        alone = figure["detail"]["alone_seconds"]
        assert alone.keys() == {"compute", "link down", "link up", "host DRAM", "disk"}
        assert alone["compute"] > 0
        assert alone["link down"] > 0
        assert (alone["disk"] > 0) == ("DISK" in figure["name"])
        # Nothing is faster than what bounds it, but for what the timed steps leave to the next.
        assert figure["measured"] > 0.8


@pytest.mark.parametrize("quick", [True, False])
def test_the_model_says_how_much_compute_its_verdicts_need(
    measure: ModuleType, tmp_path: Path, *, quick: bool
) -> None:
    model = importlib.import_module("benchmarks.accelerator.accelerator_model")
    configs = [model._config(plan, quick=quick) for plan in model._plans(quick=quick)]
    names = {model._name_of(config): config for config in configs}
    assert len(names) == len(configs)
    update = "parameters HOST, states HOST, {}, compute {} x the update"
    times = {"backward": "1"} if quick else {"none": "1", "forward": "3", "backward": "1"}
    assert {update.format(*each) for each in times.items()} <= names.keys()
    for name, config in names.items():
        said = float(name.rpartition("compute ")[2].removesuffix(" x the update"))
        update_seconds = model._update_seconds(config)
        if "updated on" not in name:
            assert update_seconds == 26 * config.elements / config.dram
        assert config.compute / update_seconds == pytest.approx(said, rel=0.05)
    facts = {"torch": "2"}
    measure.save(tmp_path, "accelerator_model", measure.Settings(2, quick=quick), facts, [])
    for table in (measure.save_table(tmp_path), ROOT / "benchmarks" / "results" / "table.md"):
        assert "Verdicts hold at break-even alone" in table.read_text()


def numbers_of_picture(document: dict[str, Any]) -> set[str]:
    """Return the numbers that the lecture's picture has to show."""
    found = set()
    for figure in document["figures"]:
        if figure["unit"] == "s":
            found.add(f"{figure['measured']:.2f}")
        elif figure["unit"] == "MiB" and figure["measured"]:
            found.add(f"{figure['measured']:,.0f}")
    return found


def texts_of(svg: Path) -> list[str]:
    found = re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text(encoding="utf-8"))
    return [text.strip() for text in found]


def test_each_placement_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run_benchmarks(tmp_path, "placements", "--pairs", "1")
    document = json.loads((tmp_path / "placements.json").read_text())
    check_document(document, "placements")
    base, ours = document["figures"]
    assert base["measured"] == 1.0
    assert ours["name"] == "everything on disk, clipped: step / torch fused"
    for figure in (base, ours):
        assert figure["detail"]["faults"] >= 0
        assert figure["detail"]["rss_mib"] > 100


def test_the_lecture_s_comparison_is_run_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    run_benchmarks(tmp_path, "lecture", "--pairs", "1")
    document = json.loads((tmp_path / "lecture.json").read_text())
    check_document(document, "lecture")
    values = {figure["name"]: figure for figure in document["figures"]}
    assert values["the lecture's comparison: different loss curves"]["verdict"] == "passed"
    disk = {
        name.partition(":")[0]: figure["measured"]
        for name, figure in values.items()
        if name.endswith("disk")
    }
    assert disk["no offload"] == 0
    assert 0 < disk["naive offloading"] == disk["ZeRO-Offload"] < disk["ZeRO-Infinity"]
    assert values["ZeRO-Offload: seconds of a step"]["detail"]["command"]
    texts = texts_of(tmp_path / "lecture.svg")
    assert numbers_of_picture(document) | disk.keys() <= set(texts)


def test_the_lecture_s_picture_shows_what_was_measured() -> None:
    results = ROOT / "benchmarks/results"
    document = json.loads((results / "lecture.json").read_text())
    assert document["quick"] is False
    picture = ROOT / "docs/images/lecture.svg"
    assert picture.read_bytes() == (results / "lecture.svg").read_bytes()
    assert numbers_of_picture(document) <= set(texts_of(picture))


def test_loss_curves_of_delayed_updates_are_run_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    run_benchmarks(tmp_path, "delayed")
    document = json.loads((tmp_path / "delayed.json").read_text())
    check_document(document, "delayed")
    warmup, exact, delayed = document["figures"]
    assert warmup["verdict"] == "passed"
    assert exact["detail"]["losses"] != delayed["detail"]["losses"]
    assert {"exact", "delayed", "end of the warm-up"} <= set(texts_of(tmp_path / "delayed.svg"))


def test_the_page_of_delayed_updates_shows_what_was_measured() -> None:
    results = ROOT / "benchmarks/results"
    document = json.loads((results / "delayed.json").read_text())
    assert document["quick"] is False
    assert document["figures"][0]["verdict"] == "passed"
    picture = ROOT / "docs/images/delayed.svg"
    assert picture.read_bytes() == (results / "delayed.svg").read_bytes()
    page = (ROOT / "docs/how-it-works.md").read_text()
    for figure in document["figures"][1:]:
        assert f"{figure['measured']:.3f}" in page


def test_unknown_subject_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/run.py", "kernel", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "kernels" in done.stderr


def test_contenders_take_turns_and_warm_up_is_not_counted(measure: ModuleType) -> None:
    order: list[str] = []
    seconds = iter([100.0, 2.0, 4.0, 3.0])

    def ours() -> float:
        order.append("ours")
        return next(seconds)

    samples = measure.interleave({"ours": ours, "peer": lambda: order.append("peer")}, 3)
    assert order == ["ours", "peer", "peer", "ours"] * 2
    assert samples["ours"].seconds == (2.0, 4.0, 3.0)
    assert samples["ours"].summary() == {"min": 2.0, "median": 3.0, "max": 4.0, "count": 3}
    assert all(s > 0 for s in samples["peer"].seconds)


@pytest.mark.parametrize(
    ("ours", "verdict"), [(1.0, "passed"), (1.05, "passed"), (1.06, "falls short")]
)
def test_figure_beyond_its_limit_falls_short(
    measure: ModuleType, ours: float, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = measure.interleave({"ours": lambda: ours, "peer": lambda: 1.0}, 9)
    figure = measure.ratio("a step", measure.at_most(1.05), samples, "ours", "peer")
    assert figure.measured == ours
    assert figure.verdict == verdict
    assert figure.as_json()["verdict"] == verdict
    measure.print_table([figure])
    assert verdict in capsys.readouterr().out


def test_limits_know_their_direction(measure: ModuleType) -> None:
    assert measure.at_least(0.9).holds(0.9)
    assert not measure.at_least(0.9).holds(0.89)
    assert measure.exactly(1.0).holds(1)
    assert not measure.exactly(1.0).holds(1.001)


def test_figure_that_cannot_be_measured_says_why(measure: ModuleType) -> None:
    figure = measure.not_available("a peer", measure.at_most(1.0), "it is not installed")
    assert figure.verdict == "not available"
    assert figure.as_json()["detail"] == {"why": "it is not installed"}


def test_median_is_taken_before_the_ratio(measure: ModuleType) -> None:
    samples = {"a": measure.Sample((1.0, 2.0, 9.0)), "b": measure.Sample((1.0, 4.0, 4.5))}
    figure = measure.ratio("r", None, samples, "a", "b")
    assert figure.measured == 0.5
    assert figure.detail["median_of_pair_ratios"] == 1.0
    assert figure.verdict == "information"


def test_page_cache_probe_sees_buffered_pages(measure: ModuleType, tmp_path: Path) -> None:
    del measure
    seed_example = importlib.import_module("benchmarks.cpu.seed_example")
    with (tmp_path / "file").open("w+b") as file:
        file.write(bytes(1 << 20))
        file.flush()
        assert seed_example.page_cache_bytes(file.fileno()) == 1 << 20


def test_shapes_are_those_of_gpt2(measure: ModuleType) -> None:
    del measure
    optimizer = importlib.import_module("benchmarks.cpu.optimizer")
    sizes = [a * b for a, b in ((*shape, 1)[:2] for shape in optimizer.gpt2_shapes())]
    assert len(sizes) == 148
    assert sum(sizes) == 124_439_808


def test_crossings_are_counted_by_whoever_copies(measure: ModuleType) -> None:
    del measure
    crossings = importlib.import_module("benchmarks.accelerator.crossings")

    class Up(torch.autograd.Function):
        @staticmethod
        def forward(_: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(_: object, gradient: torch.Tensor) -> torch.Tensor:
            torch.ones(100).to("meta")
            return gradient

    with crossings.Crossings() as seen:
        torch.ones(10, dtype=torch.bfloat16).to("meta")
        torch.empty(10, dtype=torch.bfloat16, device="meta").copy_(torch.ones(10))
        Up.apply(torch.ones(4, requires_grad=True)).sum().backward()
        torch.ones(3).clone()
    assert (seen.down, seen.up) == (0, 20 + 20 + 400)


def test_the_slowest_alone_is_what_bounds(measure: ModuleType) -> None:
    del measure
    bounds = importlib.import_module("benchmarks.accelerator.bounds")
    ways = importlib.import_module("benchmarks.accelerator.ways")
    way = ways.Way("a way", make=None, dram_bytes=26)
    rates = {"link down": 10.0, "link up": 20.0, "host DRAM": 130.0, "disk": 5.0}

    def bound(moved: object, compute: float) -> tuple[str, float]:
        found = bounds.bound_of(way, moved, 100, compute, rates)
        return found.name, found.most

    moved = ways.Moved
    assert bound(moved(down=100, up=100), 21.0) == ("compute", 21.0)
    assert bound(moved(down=100, up=100), 19.0) == ("host DRAM", 20.0)
    assert bound(moved(down=300, up=300), 19.0) == ("link down", 30.0)
    assert bound(moved(down=100, up=800), 19.0) == ("link up", 40.0)
    assert bound(moved(read=100, written=150), 19.0) == ("disk", 50.0)


def test_batches_grow_until_they_compute_long_enough(
    measure: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    del measure
    gpu = importlib.import_module("benchmarks.accelerator.gpu")
    place = importlib.import_module("benchmarks.accelerator.place").Place(torch.device("cpu"))
    tried: list[int] = []

    def sequences(seconds: float, room: int = 64) -> int:
        def seconds_of(site: Any, *_: object) -> float | None:  # noqa: ANN401  # a benchmark's
            tried.append(site.sequences)
            return 1.0 + site.sequences if site.sequences <= room else None

        monkeypatch.setattr(gpu, "seconds_of", seconds_of)
        found: int = gpu.site_for(gpu.Site(place, Path(), 2), None, seconds, 64).sequences
        return found

    assert sequences(2.5) == 2
    assert sequences(9.0) == 8
    assert tried[1:] == [2, 6, 8]
    assert sequences(1e9) == 64
    assert sequences(1e9, room=40) == 32


# --- rounds on an accelerator, kept in a journal ---


HERE = {"accelerator": "H100", "torch": "2", "cpu": "Xeon", "cores": "8"}


class Taken:
    """Trainings that take no time, and who took them."""

    def __init__(self, tmp_path: Path) -> None:
        self.rounds = importlib.import_module("benchmarks.accelerator.rounds")
        self.ways = importlib.import_module("benchmarks.accelerator.ways")
        self.journals = importlib.import_module("benchmarks.accelerator.journal")
        place = importlib.import_module("benchmarks.accelerator.place").Place(torch.device("cpu"))
        transformer = importlib.import_module("benchmarks.accelerator.transformer")
        self.site = self.ways.Site(place, tmp_path, 2)
        self.first = transformer.Decoder(transformer.TINY)
        self.path = tmp_path / "journal.jsonl"
        self.order: list[str] = []

    def way(self, name: str, error: Exception | None = None, **facts: Any) -> Any:  # noqa: ANN401  # a benchmark's
        def make(*_: object) -> object:
            self.order.append(name)
            if error is not None:
                raise error
            step = lambda _: torch.ones(())  # noqa: E731
            return self.ways.Training(step, self.ways.nothing, self.ways.nothing)

        return self.ways.Way(name, make, **facts)

    def journal(self, **machine: str) -> Any:  # noqa: ANN401
        return self.journals.Journal(self.path, {**HERE, **machine})

    def take(self, ways: list[Any], rounds: int) -> list[Any]:
        journal = self.journal()
        taking = self.rounds.Rounds(ways, self.site, self.first, journal, None)
        taking.take(rounds, lambda: None)
        found: list[Any] = self.rounds.outcomes_of(ways, self.journal())
        return found


@pytest.fixture
def taken(measure: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Taken:
    del measure
    found = Taken(tmp_path)
    monkeypatch.setattr(found.rounds, "COMPUTE", found.way("compute"))
    return found


def test_rounds_go_on_where_an_earlier_process_ended(taken: Taken) -> None:
    a, b = taken.way("a"), taken.way("b")
    taken.take([taken.rounds.COMPUTE, a, b], 1)
    assert taken.order == ["compute", "compute", "a", "b"]
    taken.order.clear()
    lines = taken.path.read_text().splitlines()
    taken.path.write_text("\n".join([*lines[:-1], lines[-1][:20]]))  # a crash cut off b's end
    outcomes = taken.take([taken.rounds.COMPUTE, a, b], 2)
    assert taken.order == ["compute", "b", "b", "a", "compute"]
    assert [len(outcome.seconds) for outcome in outcomes] == [8, 4, 4]
    taken.order.clear()
    taken.take([taken.rounds.COMPUTE, a, b], 2)
    assert taken.order == []


def test_a_way_that_fails_says_why_and_the_others_go_on(taken: Taken) -> None:
    peer = taken.way("peer", ImportError("no such peer"), may_fail=True)
    ours = taken.way("ours", RuntimeError("illegal address\nand more"), is_ours=True)
    large = taken.way("large", host_bytes=1 << 50)
    good = taken.way("good")
    found = taken.take([taken.rounds.COMPUTE, peer, ours, large, good], 2)
    assert taken.order == ["compute", "compute", "peer", "ours", "good", "good", "compute"]
    whys = {outcome.way.name: outcome.why for outcome in found}
    assert whys["peer"] == "ImportError: no such peer"
    assert whys["ours"] == "RuntimeError: illegal address"
    assert "GiB of host memory are needed" in whys["large"]
    assert whys["good"] == ""
    assert {o.way.name for o in found if o.has_failed} == {"peer", "ours"}


def test_a_way_in_which_processes_end_is_given_up(taken: Taken) -> None:
    bad = taken.way("bad")
    for _ in range(2):
        taken.journal().add("begin", way="bad", turn=0)
    found = taken.take([taken.rounds.COMPUTE, bad], 1)
    assert "bad" not in taken.order
    assert found[1].why == "the process ended in it, 2 times"
    assert found[1].has_failed


def test_processes_are_compared_by_their_anchor(taken: Taken) -> None:
    for speed in (1.0, 3.0):
        add_seconds(taken.journal(), compute=2.0 * speed, a=5.0 * speed)
    compute, a = taken.rounds.outcomes_of([taken.rounds.COMPUTE, taken.way("a")], taken.journal())
    assert compute.seconds == [4.0, 4.0]
    assert a.seconds == [10.0, 10.0]


def test_lines_of_an_older_form_or_cut_off_are_left_out(taken: Taken) -> None:
    older = [{"kind": "end", "way": "a", "seconds": [1.0]}, {"kind": "end", "process": 7}, 3]
    taken.path.write_text("".join(f"{json.dumps(line)}\n" for line in older) + '{"kind": "e')
    add_seconds(taken.journal(), compute=2.0, a=5.0)
    for machine in (HERE, None):
        journal = taken.journals.Journal(taken.path, machine)
        assert journal.process == 2
        (a,) = taken.rounds.outcomes_of([taken.rounds.COMPUTE, taken.way("a")], journal)[1:]
        assert a.seconds == [5.0]


@pytest.mark.parametrize("fact", HERE)
def test_another_kind_of_machine_is_not_compared(taken: Taken, fact: str) -> None:
    ways = [taken.rounds.COMPUTE, taken.way("a")]
    add_seconds(taken.journal(), compute=2.0, a=5.0)
    add_seconds(taken.journal(**{fact: "other"}), compute=1.0, a=4.0)
    for machine, seconds in [({}, [5.0]), ({fact: "other"}, [4.0])]:
        journal = taken.journal(**machine)
        assert journal.process == 3  # of all that wrote
        assert taken.rounds.outcomes_of(ways, journal)[1].seconds == seconds
    # Another machine may judge: it has the figures, and the facts, of the one that measured last.
    judged = taken.journals.Journal(taken.path, None)
    assert judged.machine == {**HERE, fact: "other"}
    assert taken.rounds.outcomes_of(ways, judged)[1].seconds == [4.0]
    # And one that has not measured yet begins anew, though another has ended.
    taken.take(ways, 1)
    taken.order.clear()
    journal = taken.journal(**{fact: "third"})
    taken.rounds.Rounds(ways, taken.site, taken.first, journal, None).take(1, lambda: None)
    assert taken.order == ["compute", "compute", "a"]


def test_figures_are_said_of_the_machine_that_measured(measure: ModuleType, tmp_path: Path) -> None:
    gpu = importlib.import_module("benchmarks.accelerator.gpu")
    journals = importlib.import_module("benchmarks.accelerator.journal")
    judging = measure.Settings(2, quick=True, journal=tmp_path, judge_only=True)
    assert gpu.machine_of(judging) is None  # nothing is there
    journals.Journal(tmp_path / "gpu-tiny.jsonl", HERE).add("alone", seconds={}, nbytes={})
    assert gpu.machine_of(judging) == HERE
    assert gpu.machine_of(measure.Settings(2, quick=True, journal=tmp_path))["torch"] != "2"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_a_journal_without_an_accelerator_is_an_error(measure: ModuleType, tmp_path: Path) -> None:
    gpu = importlib.import_module("benchmarks.accelerator.gpu")
    settings = measure.Settings(2, quick=True, journal=tmp_path)
    with pytest.raises(RuntimeError, match="has no device here"):
        list(gpu.figures(settings))


def add_seconds(journal: Any, **seconds: float) -> None:  # noqa: ANN401
    facts = {"turn": 0, "why": "", "losses": [[1.0]], "moved": {}, "crossed": None}
    for way, each in seconds.items():
        journal.add("end", way=way, seconds=[each], device_bytes=0, **facts)


def test_a_turn_that_hangs_ends_the_process(tmp_path: Path) -> None:
    journal = tmp_path / "gpu-tiny.jsonl"
    command = [sys.executable, "benchmarks/run.py", "gpu", "--cpu-as-device", "--quick"]
    command += ["--journal", str(tmp_path), "--out", str(tmp_path), "--way-seconds", "0.001"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 75, done.stderr
    last = json.loads(journal.read_text().splitlines()[-1])
    assert last["why"] == "did not end in 0.001 s"
