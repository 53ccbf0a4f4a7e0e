"""`tensorstow plan`: a placement, its bytes beside the budget, what is short."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import tensorstow
import tensorstow.deepspeed as deepspeed
from tensorstow.base.profile import (
    ComputeRates,
    DirectoryRates,
    Profile,
    identify_machine,
    write_profile,
)
from tensorstow.cli import plan_machine
from tensorstow.cli.main import main
from tensorstow.planner.headroom import usual_headroom
from tree import ROOT

MODEL = f"{__name__}:build"
PLAN = ["plan", MODEL, "--headroom", "0"]
"""The models here are smaller than any headroom."""
GIB = 1 << 30


def build() -> nn.Module:
    """Return 20 blocks of 4 MiB, one of which is frozen."""
    blocks = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(20)))
    blocks[0].weight.requires_grad = False
    return blocks


PROFILE = Profile(
    machine=identify_machine(),
    memory_read=20e9,
    memory_write=10e9,
    memory_copy=15e9,
    checksums=10e9,
    update={"float32/fp32": 1e9},
    compute={"cpu": ComputeRates({"float32": 1e11}, 5e9, 1e-5, 1e9)},
    directories={"/nvme": DirectoryRates(2e9, 1e9, 1e9, 1 << 20, 32)},
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def small(tmp_path: Path) -> str:
    """Return a configuration of a small GPT-2."""
    given = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 100}
    path = tmp_path / "small.json"
    path.write_text(json.dumps(given))
    return str(path)


def planned(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, object]:
    assert main([*PLAN, "--json", *options]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_the_table_says_what_is_held(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--device", "0", "--host", "1GiB", "--disk", "1GiB"]) == 0
    printed = capsys.readouterr().out
    assert (
        "20,971,520 parameters in float32, 1,048,576 frozen, 20 units of up to 4.0 MiB" in printed
    )
    assert "parameters on HOST, states on HOST" in printed
    for item in ("80.0 MiB", "76.0 MiB", "152.0 MiB", "308.0 MiB"):  # with gradients, states, all
        assert item in printed


def test_rejected_placements_say_what_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--host", "250MiB")
    assert found["plan"] == {"parameters": "host", "states": "disk"}
    tried = found["tried"]
    assert isinstance(tried, list)
    assert tried[0] == {
        "plan": {"parameters": "host", "states": "host"},
        "state_format": None,
        "short": {"host": (308 - 250) << 20},
        "seconds": None,
        "reason": "58.0 MiB of HOST short",
    }


def test_the_smallest_budget_that_is_named_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--host", "1MiB", "--disk", "1MiB"]) == 2
    said = capsys.readouterr().err
    assert re.search(r"does not fit: the budget lacks [\d.]+ MiB of HOST", said)
    named = said.split("in bytes: ")[1].split(";")[0].split(" and ")
    least = {f"--{tier}": n.split()[0] for tier, n in (each.split("=") for each in named)}
    budget = {"--host": "1MiB", "--disk": "1MiB"} | least
    planned(capsys, *(word for pair in budget.items() for word in pair))
    for short, nbytes in least.items():
        less = {**budget, short: str(int(nbytes) - 1)}
        assert main([*PLAN, *(word for pair in less.items() for word in pair)]) == 2
        capsys.readouterr()


def test_the_lines_that_are_printed_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--host", "250MiB")
    names: dict[str, object] = {"model": build()}
    code = found["code"]
    assert isinstance(code, list)
    exec("\n".join(code), names)  # noqa: S102  # it is what users copy
    optimizer = names["optimizer"]
    assert isinstance(optimizer, tensorstow.AdamW)
    optimizer.close()


BUDGETS = {
    "states in RAM": ["--host", "1GiB"],
    "states on disk": ["--host", "250MiB"],
    "all on disk": ["--host", "160MiB"],
    "on an accelerator": ["--device", "1GiB", "--host", "1GiB"],
    "micro-batches": ["--host", "250MiB", "--accumulation-steps", "2"],
}


@pytest.mark.parametrize("options", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("commits", [False, True])
def test_the_lines_run_where_they_were_asked_to(
    options: list[str],
    commits: bool,  # noqa: FBT001
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = tmp_path / "run"
    place.mkdir()
    more = ["--disk", "2GiB", "--directory", str(place), *(["--commits"] if commits else [])]
    found = planned(capsys, *options, *more)
    names: dict[str, object] = {"model": build()}
    code = found["code"]
    assert isinstance(code, list)
    assert len(code) == 3
    exec("\n".join(code), names)  # noqa: S102  # it is what users copy
    model, optimizer = names["model"], names["optimizer"]
    assert isinstance(model, nn.Module)
    assert isinstance(optimizer, tensorstow.AdamW)
    micro_batches = 2 if "--accumulation-steps" in options else 1
    for _ in range(micro_batches):
        trained_by(model).backward()
    optimizer.step()
    where = optimizer.offload_policy.placement
    on_disk = found["plan"]["states"] == "disk"  # type: ignore[index]
    assert where.directories == ((place,) if on_disk or commits else ())
    assert where.durable == commits
    plan = tensorstow.plan_of(model)
    assert plan.accumulation_steps == micro_batches
    told = found["plan"]
    assert isinstance(told, dict)
    asked = tensorstow.Plan(**told)
    assert all(getattr(plan, name) == getattr(asked, name) for name in told)
    assert (found["gemini"] is None) == (commits or told["parameters"] == "disk")
    optimizer.close()


def test_ranks_share_what_is_held(capsys: pytest.CaptureFixture[str]) -> None:
    whole, half = (planned(capsys, "--world-size", n) for n in ("1", "2"))
    assert half["model"]["ranks"] == 2  # type: ignore[index]
    bytes_of = [
        {item["what"]: item["bytes"] for item in found["held"]}  # type: ignore[attr-defined]
        for found in (whole, half)
    ]
    for what in ("parameters", "gradients", "states"):
        assert bytes_of[1][what] == bytes_of[0][what] // 2 > 0


def test_averages_are_counted_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    plain, averaged = planned(capsys), planned(capsys, "--ema", "0.999")
    states = [
        next(item["bytes"] for item in facts["held"] if item["what"] == "states")  # type: ignore[attr-defined]
        for facts in (plain, averaged)
    ]
    assert states[1] == states[0] * 3 // 2
    assert "lr=1e-05, plan=plan, ema=0.999)" in averaged["code"][-1]  # type: ignore[index]
    assert averaged["deepspeed_lacks"]["ema"] is None  # type: ignore[index]
    assert averaged["gemini_lacks"]["ema"] is None  # type: ignore[index]


def test_the_network_between_machines_is_counted(
    small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_profile(PROFILE)
    options = ["--world-size", "4", "--machines", "2", "--network", "8KBIT/s", "--seq", "32"]
    assert main(["plan", small, "--batch", "2", "--json", *options]) == 0
    facts = json.loads(capsys.readouterr().out)
    sent = facts["network"]["sent_bytes"]
    assert (facts["network"]["machines"], facts["network"]["bytes_per_second"]) == (2, 1000.0)
    # 4 bytes for each parameter, padded: gathered twice, and reduced twice by gloo.
    weights = 4 * facts["model"]["parameters"]
    assert sent["all-gather"] == pytest.approx(2 * 3 / 4 * weights, rel=0.02)
    assert sent["reduce-scatter"] == pytest.approx(2 * 3 / 4 * weights, rel=0.02)
    assert facts["step"]["busy"]["network"] == pytest.approx(sum(sent.values()) / 1000)
    assert facts["step"]["binding"] == "network"
    assert main(["plan", small, "--batch", "2", *options]) == 0
    assert re.search(
        r"each of 2 machines sends [\d.]+ GB per step \(all-gather \S+, reduce-scatter \S+\):"
        r"\s+\S+ s at 1 kB/s",
        capsys.readouterr().out,
    )
    assert planned(capsys)["network"] is None


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ("--world-size 4 --machines 3 --network 1GB", "--machines 3 was given with --world-size 4"),
        ("--world-size 4 --machines 2", "--machines and --network go together"),
        ("--network 1GB", "--machines and --network go together"),
        ("--world-size 2 --machines 2 --network fast", "--network='fast' is not a size"),
        ("--world-size 2 --machines 2 --network 100Gb", "may be bits or bytes: write 100Gbit"),
        ("--world-size 2 --machines 2 --network 0Gbit", "--network 0Gbit was given"),
        ("--world-size 2 --machines 0 --network 1GB", "--machines 0 was given"),
    ],
)
def test_machines_and_their_network_are_checked(
    options: str, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PLAN, *options.split()]) == 2
    assert wanted in capsys.readouterr().err


def test_each_budget_is_of_its_tier(capsys: pytest.CaptureFixture[str]) -> None:
    tiers = planned(capsys, "--device", "1GiB", "--host", "2GiB", "--disk", "3GiB")["tiers"]
    assert isinstance(tiers, dict)
    budgets = {tier: each["budget"] for tier, each in tiers.items()}
    assert budgets == {"device": 1 << 30, "host": 2 << 30, "disk": 3 << 30}
    assert tiers["device"]["bytes"] > 80 << 20
    less = planned(capsys, "--device", "130MiB", "--host", "2GiB")
    assert less["plan"]["parameters"] == "host"  # type: ignore[index]
    assert less["tried"][0]["short"].keys() == {"device"}  # type: ignore[index]


def test_states_that_round_are_taken_only_where_that_is_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = ["--host", "220MiB", "--disk", "1MiB", "--directory", str(tmp_path)]
    assert main([*PLAN, *budget]) == 2
    capsys.readouterr()
    found = planned(capsys, *budget, "--allow-inexact")
    assert (found["plan"], found["state_format"]) == (
        {"parameters": "host", "states": "host"},
        "int8",
    )
    assert found["deepspeed_lacks"] == {"overlap": "forward", "state_format": None}
    assert found["gemini_lacks"] == {"state_format": None}
    names: dict[str, object] = {"model": build()}
    exec("\n".join(found["code"]), names)  # type: ignore[arg-type]  # noqa: S102
    model, optimizer = names["model"], names["optimizer"]
    assert isinstance(model, nn.Module)
    assert isinstance(optimizer, tensorstow.AdamW)
    trained_by(model).backward()
    optimizer.step()
    held = {item["what"]: item["bytes"] for item in found["held"]}  # type: ignore[attr-defined]
    assert optimizer._memory().ram_bytes == held["states"]
    optimizer.close()
    assert main([*PLAN, *budget, "--allow-inexact", "--deepspeed"]) == 0
    printed = capsys.readouterr().out
    assert "states on HOST in int8" in printed
    assert "differs from the plan in overlap ('forward' here), state_format" in printed


def test_units_are_on_two_tiers_where_one_is_too_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = ["--host", "190MiB", "--directory", str(tmp_path)]
    found = planned(capsys, *budget)
    told = found["plan"]
    assert isinstance(told, dict)
    plan = tensorstow.Plan(**told)
    tiers = [plan.tier_of(str(number)) for number in range(20)]
    assert 0 < tiers.count(tensorstow.Tier.HOST) < 20
    assert found["gemini"] is None
    assert "parameter_units" in found["deepspeed_lacks"]  # type: ignore[operator]
    assert main([*PLAN, *budget]) == 0
    assert f"{len(plan.parameter_units)} units of them on" in capsys.readouterr().out


def test_a_batch_is_cut_into_micro_batches(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_profile(PROFILE)
    size = ["--batch", "8", "--seq", "64", "--json"]
    assert main(["plan", small, "--headroom", "0", *size]) == 0
    whole = json.loads(capsys.readouterr().out)
    tight = whole["tiers"]["host"]["bytes"] - whole["activations"]["bytes"] // 2
    budget = ["--host", str(tight), "--disk", "1KiB"]
    assert main(["plan", small, "--headroom", "0", *size, *budget]) == 2
    capsys.readouterr()
    assert (
        main(["plan", small, "--headroom", "0", *size, *budget, "--accumulation-steps", "auto"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    times = found["plan"]["accumulation_steps"]
    assert times * found["activations"]["batch"] == 8
    assert times > 1
    assert found["tiers"]["host"]["bytes"] <= tight
    assert found["step"]["tokens"] == whole["step"]["tokens"] == 8 * 64
    config = found["deepspeed"]
    assert config["train_micro_batch_size_per_gpu"] == 8 // times
    assert (config["gradient_accumulation_steps"], config["train_batch_size"]) == (times, 8)
    assert main(["plan", small, "--accumulation-steps", "auto"]) == 2
    assert "without --batch, which it cuts: say both" in capsys.readouterr().err


def test_commits_take_room_on_the_disk(capsys: pytest.CaptureFixture[str]) -> None:
    held = planned(capsys, "--commits")["held"]
    two = [item for item in held if item["what"] == "two commits"]  # type: ignore[attr-defined]
    assert [item["tier"] for item in two] == ["disk"]


def test_parameters_are_of_the_dtype_that_is_asked(
    small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for dtype, name in (("bf16", "bfloat16"), ("fp16", "float16")):
        assert main(["plan", small, "--dtype", dtype, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["model"]["dtypes"] == [name]
        assert (found["gemini"] is None) == (dtype == "fp16")


@pytest.mark.parametrize("states", ["host", "disk"])
def test_a_real_run_holds_what_was_printed(states: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--host", "1GiB" if states == "host" else "250MiB")
    held = {item["what"]: item["bytes"] for item in found["held"]}  # type: ignore[attr-defined]
    model = build()
    plan = tensorstow.Plan(**found["plan"])  # type: ignore[arg-type]
    model, optimizer = tensorstow.stow(model, partial(tensorstow.AdamW, lr=1e-3), plan=plan)
    model(torch.randn(2, 1024)).square().mean().backward()
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    optimizer.step()
    memory = optimizer._memory()
    optimizer.close()
    assert plan.states == states
    assert held["parameters"] == sum(p.nbytes for p in model.parameters())
    assert held["gradients"] == gradients
    assert held["states"] == memory.ram_bytes + memory.file_bytes
    assert held.get("ring of states", 0) == memory.ring_bytes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--world-size", "0"], "at least 1"),
        (["--accumulation-steps", "0"], "--accumulation-steps 0 was given: it is a number"),
        (["--batch", "2"], "go together"),
        (["--ema", "1.5"], "--ema 1.5 was given: it is the decay"),
        (["--batch", "2", "--seq", "8"], "inputs are not known"),
        (["--host", "12 parsecs"], "--host='12 parsecs' has the unit 'parsecs'"),
        (["--device", "-5GiB"], "--device='-5GiB' is negative"),
        (["--host", "-1"], "--host='-1' is negative"),
        (["--disk=-1.5TiB"], "--disk='-1.5TiB' is negative"),
        (["--disk", "much"], "--disk='much' is not a size. Give"),
        (["--tbw", "-600TB"], "--tbw='-600TB' is negative"),
        (["--tbw", "0"], "--tbw 0 was given: it is the bytes that a drive may be written"),
        (["--host", "0"], "does not fit"),
        (["--host", "48"], "--host='48' has no unit"),
        (["--directory", "/nowhere"], "--directory /nowhere was given"),
        (["--directory", "/nowhere", "--card", "4090"], "--directory /nowhere was given"),
        (["--headroom", "much"], "--headroom='much' is not a size"),
        (["--device", "9090"], "Or name a card: 3090, 4090"),
        (["--card", "a100"], "Did you mean a100-"),
        (["--card", "4090", "--device", "0"], "with --device 0, where the CPU computes"),
    ],
)
def test_what_makes_no_sense_is_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PLAN, *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "with_what"),
    [
        ({"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1}, "--batch and --seq"),
        ({"model_type": "vit", "num_hidden_layers": 1, "hidden_size": 12}, "a module:function"),
        ({"model_type": "t5", "num_layers": 1, "d_model": 8}, "a module:function"),
    ],
)
def test_what_traces_a_model_is_said_by_its_kind(
    config: dict[str, object], with_what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert main(["plan", str(path)]) == 0
    assert f"not counted: give {with_what}" in capsys.readouterr().out


def test_micro_batches_are_a_number_or_auto(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*PLAN, "--accumulation-steps", "many"])
    assert caught.value.code == 2
    assert "'many' was given: it is a number, at least 1, or auto" in capsys.readouterr().err


def test_without_a_profile_it_says_what_makes_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(PLAN) == 0
    printed = capsys.readouterr().out
    assert "not predicted: no profile of this machine: `tensorstow calibrate`" in printed


def test_the_cached_profile_gives_seconds(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_profile(PROFILE)
    size = ["--batch", "2", "--seq", "32", "--host", "50MiB"]
    assert main(["plan", small, "--headroom", "0", *size, "--tbw", "600TB"]) == 0
    printed = capsys.readouterr().out
    assert "nominal" not in printed
    assert "about" not in printed
    for part in ("forward ", "bound by      cores", "64 per step", "tokens/s", "break-even"):
        assert part in printed
    assert main(["plan", small, "--headroom", "0", *size, "--json"]) == 0
    step = json.loads(capsys.readouterr().out)["step"]
    assert step["seconds"] == pytest.approx(sum(each["seconds"] for each in step["phases"]))
    assert step["tokens_per_second"] == pytest.approx(64 / step["seconds"])
    assert step["binding"] in step["busy"]
    more = ["--world-size", "2", "--accumulation-steps", "3"]
    assert main(["plan", small, "--headroom", "0", *size, *more, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"]["tokens"] == 2 * 32 * 2 * 3
    assert found["activations"]["bytes"] > 0
    assert main([*PLAN, "--json"]) == 0  # no batch: no seconds, but break-even
    assert json.loads(capsys.readouterr().out)["step"] is None


def test_headroom_is_a_line_of_each_tier_and_can_be_changed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["plan", MODEL, "--device", "2GiB", "--host", "3GiB"]
    assert main(asked) == 0
    rows = re.findall(
        r"^ (device|host) +headroom, left free ", capsys.readouterr().out, re.MULTILINE
    )
    assert rows == ["device", "host"]
    assert main([*asked, "--json"]) == 0
    usual = json.loads(capsys.readouterr().out)
    less = planned(capsys, *asked[2:])
    for tier, headroom in usual_headroom(device_is_host=False).items():
        held = less["tiers"][tier]["bytes"]  # type: ignore[index]
        assert usual["tiers"][tier]["bytes"] == held + headroom.beside(held)
    assert main([*asked, "--headroom", "700MiB", "--json"]) == 0
    given = json.loads(capsys.readouterr().out)
    left = {i["tier"]: i["bytes"] for i in given["held"] if i["what"] == "headroom, left free"}
    assert left == {"device": 700 << 20, "host": 700 << 20}
    assert main(["plan", MODEL, "--host", "700MiB"]) == 0  # 308 MiB are held
    assert main(["plan", MODEL, "--host", "400MiB", "--disk", "0"]) == 2
    assert "of HOST, headroom included" in capsys.readouterr().err
    assert main([*PLAN, "--host", "1MiB", "--disk", "0"]) == 2
    assert "headroom" not in capsys.readouterr().err


def test_host_memory_that_is_not_given_is_the_machines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan_machine, "total_host_bytes", lambda: 8 * GIB)
    assert planned(capsys)["tiers"]["host"]["budget"] == 8 * GIB  # type: ignore[index]
    shared = planned(capsys, "--world-size", "4")
    assert shared["tiers"]["host"]["budget"] == 2 * GIB  # type: ignore[index]
    assert main(PLAN) == 0
    assert "8.0 GiB (this machine)" in capsys.readouterr().out
    assert planned(capsys, "--host", "none")["tiers"]["host"]["budget"] is None  # type: ignore[index]
    assert main([*PLAN, "--host", "4GiB"]) == 0
    assert "(this machine)" not in capsys.readouterr().out


def test_a_card_has_nominal_rates_that_are_marked(
    small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", small, "--batch", "2", "--seq", "32"]
    assert main([*asked, "--device", "24GiB"]) == 0
    told = capsys.readouterr().out
    assert "no profile of this machine: `tensorstow calibrate` makes one; or --card plans" in told
    found = {}
    for words in (["--card", "4090"], ["--device", "RTX 4090"]):
        assert main([*asked, *words, "--json"]) == 0
        found[words[0]] = json.loads(capsys.readouterr().out)
    assert found["--card"] == found["--device"]
    assert found["--card"]["nominal"] == ["accelerator", "host memory", "disk"]
    assert found["--card"]["card"] == "GeForce RTX 4090"
    assert found["--card"]["tiers"]["device"]["budget"] == int(23.5 * GIB)
    assert main([*asked, "--card", "4090"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^step +about [\d.]+ m?s: ", printed, re.MULTILINE)
    assert re.search(
        r"^rates +nominal, from data sheets: GeForce RTX 4090, DDR4", printed, re.MULTILINE
    )
    assert "no GPU was measured" in printed
    assert main([*asked, "--card", "4090", "--device", "20GiB", "--json"]) == 0
    less = json.loads(capsys.readouterr().out)
    assert less["tiers"]["device"]["budget"] == 20 * GIB
    assert less["step"] == found["--card"]["step"]


def test_what_was_measured_goes_before_a_cards_nominal_rates(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = PROFILE.but(directories={str(tmp_path): PROFILE.directories["/nvme"]})
    write_profile(measured)
    asked = ["plan", small, "--batch", "2", "--seq", "32", "--card", "4090", "--json"]
    assert main(asked) == 0
    assert json.loads(capsys.readouterr().out)["nominal"] == ["accelerator"]
    assert main([*asked, "--directory", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main([*asked, "--directory", "/dev/shm"]) == 2
    assert "was not measured" in capsys.readouterr().err


def test_what_does_not_fit_is_counted_and_listed_with_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = [*PLAN, "--device", "130MiB", "--host", "2GiB"]
    assert main(asked) == 0
    few = capsys.readouterr().out
    assert "short" not in few
    (count,) = re.findall(r"(\d+) more: they do not fit; --all lists them", few)
    assert main([*asked, "--all"]) == 0
    everything = capsys.readouterr().out
    assert len(re.findall(r" short$", everything, re.MULTILINE)) == int(count) > 0
    assert "--all" not in everything


def test_why_the_first_is_chosen_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--device", "1GiB", "--host", "2GiB"]) == 0
    printed = capsys.readouterr().out
    assert printed.count(": it fits too") > 1
    assert printed.count("without rates: the first that fits is chosen") == 1
    write_profile(PROFILE)
    assert main(PLAN) == 0
    assert "without rates" not in capsys.readouterr().out


def test_other_projects_lines_are_printed_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    headings = {
        "--deepspeed": "as a DeepSpeed configuration",
        "--gemini": "with Gemini's arguments",
    }
    for words in ([], ["--deepspeed"], ["--gemini"], ["--deepspeed", "--gemini"]):
        assert main([*PLAN, *words]) == 0
        printed = capsys.readouterr().out
        assert [h in printed for h in headings.values()] == [flag in words for flag in headings]


def test_units_are_told_as_ranges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    budget = ["--host", "190MiB", "--directory", str(tmp_path)]
    found = planned(capsys, *budget)
    told = found["plan"]
    assert isinstance(told, dict)
    assert main([*PLAN, *budget]) == 0
    printed = capsys.readouterr().out
    (line,) = re.findall(r"^units +(.*)$", printed, re.MULTILINE)
    (units,) = told["parameter_units"].items()
    assert line == f"{units[0]} on {units[1].upper()}"
    assert "-" in line
    code = found["code"]
    assert isinstance(code, list)
    plan = next(text for text in code if text.startswith("plan ="))
    assert len(plan) < 150
    namespace: dict[str, object] = {}
    exec(f"import tensorstow; {plan}", namespace)  # noqa: S102  # it is what users copy
    assert namespace["plan"] == tensorstow.Plan(**told)


def test_adapters_are_trained_alone(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", small, "--dtype", "bf16", "--json"]
    assert main(asked) == 0
    full = json.loads(capsys.readouterr().out)
    assert main([*asked, "--lora", "r=4"]) == 0
    found = json.loads(capsys.readouterr().out)
    model, base = found["model"], full["model"]["parameters"]
    assert model["parameters"] - model["trained"] == base
    assert 0 < model["trained"] < base
    held = {item["what"]: item["bytes"] for item in found["held"]}
    assert held["gradients"] == 4 * model["trained"]
    assert held["states"] == 8 * model["trained"]
    assert found["code"][:2] == [
        "import peft, tensorstow",
        'model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))',
    ]
    assert "lr=0.0001" in found["code"][-1]
    assert "lr=1e-05" in full["code"][-1]
    assert found["deepspeed"]["bf16"] == {"enabled": True}


def test_codes_of_a_quantized_base_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  # seconds

    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12}
    config = LlamaConfig(vocab_size=512, num_attention_heads=8, **sizes)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    assert main(["quantize", str(tmp_path / "base"), str(tmp_path / "nf4"), "--nf4"]) == 0
    capsys.readouterr()
    held = {}
    for folder in ("base", "nf4"):
        words = ["--lora", "r=4", "--device", "0", "--host", "48MiB", "--headroom", "0", "--json"]
        assert main(["plan", str(tmp_path / folder), *words]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["plan"]["parameters"] == ("disk" if folder == "base" else "host")
        held[folder] = sum(i["bytes"] for i in found["held"] if i["what"] == "parameters")
    assert held["nf4"] < 0.4 * held["base"]


def broken() -> nn.Module:
    message = "boom"
    raise RuntimeError(message)


def test_an_error_of_the_users_function_is_shown_as_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", f"{__name__}:broken"]) == 1
    told = capsys.readouterr().err
    assert re.search(r'  File ".*test_cli_plan\.py", line \d+, in broken\n    raise Runtime', told)
    assert told.endswith("RuntimeError: boom\n")
    assert main(["plan", f"{__name__}:broken", "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["type"] == "RuntimeError"
    assert "boom" in error["message"]


def test_states_on_disk_wear_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(PROFILE.as_dict()))
    options = ("--host", "250MiB", "--profile", str(file), "--tbw", "1TB")
    found = planned(capsys, *options)
    trained = 19 << 20
    disk = found["disk"]
    assert isinstance(disk, dict)
    assert 0 < disk["written_bytes"] < 8 * trained  # the budget leaves room for some
    assert disk["steps_until_worn"] == 10**12 // disk["written_bytes"]
    plan = found["plan"]
    assert isinstance(plan, dict)
    assert plan.pop("ram_budget") > 48 << 20
    assert plan == {"parameters": "host", "states": "disk", "overlap": "forward"}
    even = found["break_even"]
    assert isinstance(even, dict)
    moved = (disk["written_bytes"] + disk["read_bytes"]) / 1e9
    operations = 6 * (20 << 20) / 1e11
    assert even["tokens"] == pytest.approx(moved / operations, rel=0.02)
    assert main([*PLAN, *options]) == 0
    printed = capsys.readouterr().out
    assert f"a drive for 1 TB lasts {disk['steps_until_worn']:,} steps" in printed
    assert f"{even['tokens']:,} tokens per step" in printed
    assert "overlap backward" in printed
    assert "if you need no clipping and loss scaling" in printed
    left_out = found["left_out"]
    assert isinstance(left_out, int)
    assert left_out > 0
    assert f"{left_out} more: variants of these that gain less than 2%" in printed


def test_rates_that_are_lacking_are_said_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_profile(PROFILE.but(directories={}))
    found = planned(capsys, "--host", "250MiB")
    assert "tensorstow calibrate DIR" in str(found["seconds_unknown"])
    write_profile(PROFILE.but(update={}))
    assert "float32/fp32" in str(planned(capsys)["seconds_unknown"])
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(PROFILE.but(update={}).as_dict()))
    assert main([*PLAN, "--profile", str(file)]) == 2
    assert "float32/fp32" in capsys.readouterr().err
    assert main([*PLAN, "--profile", "/nowhere"]) == 2
    assert "no such file" in capsys.readouterr().err
    write_profile(PROFILE)
    assert main([*PLAN, "--directory", "/dev/shm"]) == 2
    assert "was not measured" in capsys.readouterr().err


def trained_by(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(2, 1024)).square().mean()
    return loss


@pytest.mark.parametrize("host", ["1GiB", "250MiB", "160MiB"])
def test_the_deepspeed_configuration_runs(
    host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(capsys, "--host", host, "--directory", str(tmp_path))
    engine, *_ = deepspeed.initialize(model=build(), config=found["deepspeed"])
    engine.backward(trained_by(engine))
    engine.step()
    states = found["plan"]["states"]  # type: ignore[index]
    assert engine.optimizer._memory().file_bytes > 0 if states == "disk" else True
    engine.destroy()


@pytest.mark.parametrize("host", ["1GiB", "250MiB"])
def test_the_lines_of_gemini_run(
    host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(capsys, "--host", host, "--directory", str(tmp_path))
    names: dict[str, object] = {"model": build()}
    lines = found["gemini"]
    assert isinstance(lines, list)
    exec("\n".join(lines), names)  # noqa: S102  # it is what users copy
    model, optimizer = names["model"], names["optimizer"]
    optimizer.backward(trained_by(model))  # type: ignore[attr-defined, arg-type]
    optimizer.step()  # type: ignore[attr-defined]
    optimizer.close()  # type: ignore[attr-defined]


def test_gemini_has_no_parameters_on_disk(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--host", "160MiB")
    assert found["plan"]["parameters"] == "disk"  # type: ignore[index]
    assert found["gemini"] is None


def test_activations_that_do_not_fit_are_placed_elsewhere(
    small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_profile(PROFILE)
    asked = ["plan", small, "--headroom", "0", "--batch", "16", "--seq", "256"]
    assert main([*asked, "--json"]) == 0
    kept = json.loads(capsys.readouterr().out)
    assert "activations" not in kept["plan"]
    assert all("activations" not in each["plan"] for each in kept["tried"])
    budget = kept["tiers"]["host"]["bytes"] * 7 // 10
    limits = ["--host", str(budget), "--directory", "/nvme"]
    assert main([*asked, *limits, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["activations"] in {"recompute", "disk"}
    assert found["tiers"]["host"]["bytes"] <= budget
    assert found["deepspeed_lacks"]["activations"] == "keep"
    assert {e["plan"].get("activations") for e in found["tried"]} == {None, "recompute", "disk"}
    assert main([*asked, *limits]) == 0
    printed = capsys.readouterr().out
    assert f"activations {found['plan']['activations']}" in printed
    namespace: dict[str, object] = {}
    plan = next(line for line in found["code"] if line.startswith("plan ="))
    exec(f"import tensorstow; {plan}", namespace)  # noqa: S102  # what it tells people to run
    assert namespace["plan"].activations == found["plan"]["activations"]


FITS = {
    "Llama 3.2 1B": "llama-3.2-1b",
    "Llama 3 8B": "llama-3-8b",
    "Llama 2 13B": "llama-2-13b",
    "Llama 2 70B": "llama-2-70b",
}
"""The rows of the README's table of what fits where, and their names here."""


@pytest.mark.parametrize(
    "row", [*list(FITS)[:2], *(pytest.param(row, marks=pytest.mark.soak) for row in [*FITS][2:])]
)
def test_the_readme_s_table_of_what_fits_where_is_what_is_printed(
    row: str, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| (Llama .+B) \| (.+) \| (.+) \| (.+) \| (.+) \|$", readme, re.MULTILINE)
    table = {name: cells for name, *cells in rows}
    assert [*table] == [*FITS]
    options = ["--device", "24GiB", "--host", "64GiB", "--disk", "2TiB"]
    options += ["--batch", "1", "--seq", "2048", "--json"]
    assert main(["plan", FITS[row], *options]) == 0
    found = json.loads(capsys.readouterr().out)
    held = [found["tiers"][tier]["bytes"] for tier in ("device", "host", "disk")]
    for told, held_bytes in zip(
        table[row], [16 * found["model"]["parameters"], *held], strict=True
    ):
        (amount,) = re.findall(r"([\d,]+) GiB", told.replace("nothing", "0 GiB"))
        assert int(amount.replace(",", "")) == round(held_bytes / GIB), told


def test_the_plan_of_8b_on_a_4090_is_what_pages_show(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no profile of this machine
    guide = (ROOT / "docs/guides/planning.md").read_text()
    sample = re.findall(r"^ {4}(.+)$", guide[: guide.index("* **placement**")], re.MULTILINE)
    command, *shown = [line.strip() for line in sample]
    assert command.startswith("tensorstow plan llama-3-8b --card 4090 ")
    assert main(command.split()[1:]) == 0
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in shown:
        head, *rest = " ".join(line.split()).split("...")
        if head or rest != [""]:  # a line that is cut has its beginning and its end
            assert any(p.startswith(head) and p.endswith("".join(rest)) for p in printed), line
    seconds = next(re.search(r"about ([\d.]+) s:", p) for p in printed if p.startswith("step "))
    assert seconds is not None
    readme = (ROOT / "README.md").read_text()
    assert f"8B on a 4090 is predicted to take about {float(seconds[1]):.0f} s" in readme


def test_the_plan_of_gpt_3_is_what_the_guide_shows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no profile of this machine
    guide = (ROOT / "docs/guides/planning.md").read_text()
    section = guide[guide.index("## GPT-3 on one node") : guide.index("## In the process")]
    (command,) = re.findall(r"^ {4}(.*)$", section, re.MULTILINE)
    asked = command.removeprefix("tensorstow ").split()
    assert main([*asked, "--json"]) == 0
    tiers = json.loads(capsys.readouterr().out)["tiers"]
    ranks = int(asked[asked.index("--world-size") + 1])
    held = [ranks * tiers[tier]["bytes"] for tier in ("device", "host", "disk")]
    cells = re.findall(r"\| ([\d.]+) ([GT])B \|$", section, re.MULTILINE)
    assert len(cells) == 4
    for (amount, unit), nbytes in zip(cells, [*held, sum(held)], strict=True):
        assert float(amount) == round(nbytes / {"G": 1e9, "T": 1e12}[unit], 2 * (unit == "T"))
