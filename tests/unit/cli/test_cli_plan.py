"""`tensorstow plan`: a placement, its bytes beside the budget, what is short."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorstow
import tensorstow.deepspeed as deepspeed
from command_line import CommandLine
from tensorstow.base.profile import (
    ComputeRates,
    DirectoryRates,
    Profile,
    identify_machine,
    write_profile,
)
from tensorstow.cli import plan_machine
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


def planned(cli: CommandLine, *options: object) -> Any:  # noqa: ANN401  # JSON
    return cli.json(*PLAN, *options)


def run(code: list[str]) -> Any:  # noqa: ANN401  # the model and its optimizer
    """Run printed lines over a model; return the model and its optimizer."""
    names: dict[str, Any] = {"model": build()}
    exec("\n".join(code), names)  # noqa: S102  # it is what users copy
    return names["model"], names["optimizer"]


def test_the_table_says_what_is_held(cli: CommandLine) -> None:
    printed = cli(*PLAN, "--device", "0", "--host", "1GiB", "--disk", "1GiB")
    assert (
        "20,971,520 parameters in float32, 1,048,576 frozen, 20 units of up to 4.0 MiB" in printed
    )
    assert "parameters on HOST, states on HOST" in printed
    for item in ("80.0 MiB", "76.0 MiB", "152.0 MiB", "308.0 MiB"):  # with gradients, states, all
        assert item in printed


def test_rejected_placements_say_what_is_short(cli: CommandLine) -> None:
    found = planned(cli, "--host", "250MiB")
    assert found["plan"] == {"parameters": "host", "states": "disk"}
    tried = found["tried"]
    assert tried[0] == {
        "plan": {"parameters": "host", "states": "host"},
        "state_format": None,
        "short": {"host": (308 - 250) << 20},
        "seconds": None,
        "reason": "58.0 MiB of HOST short",
    }


def test_the_smallest_budget_that_is_named_fits(cli: CommandLine) -> None:
    said = cli(*PLAN, "--host", "1MiB", "--disk", "1MiB", status=2)
    assert re.search(r"does not fit: the budget lacks [\d.]+ MiB of HOST", said)
    named = said.split("in bytes: ")[1].split(";")[0].split(" and ")
    least = {f"--{tier}": n.split()[0] for tier, n in (each.split("=") for each in named)}
    budget = {"--host": "1MiB", "--disk": "1MiB"} | least
    planned(cli, *(word for pair in budget.items() for word in pair))
    for short, nbytes in least.items():
        less = {**budget, short: str(int(nbytes) - 1)}
        cli(*PLAN, *(word for pair in less.items() for word in pair), status=2)


def test_the_lines_that_are_printed_run(cli: CommandLine) -> None:
    found = planned(cli, "--host", "250MiB")
    _, optimizer = run(found["code"])
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
    cli: CommandLine,
) -> None:
    place = tmp_path / "run"
    place.mkdir()
    more = ["--disk", "2GiB", "--directory", str(place), *(["--commits"] if commits else [])]
    found = planned(cli, *options, *more)
    assert len(found["code"]) == 3
    model, optimizer = run(found["code"])
    assert isinstance(optimizer, tensorstow.AdamW)
    micro_batches = 2 if "--accumulation-steps" in options else 1
    for _ in range(micro_batches):
        trained_by(model).backward()
    optimizer.step()
    where = optimizer.offload_policy.placement
    on_disk = found["plan"]["states"] == "disk"
    assert where.directories == ((place,) if on_disk or commits else ())
    assert where.durable == commits
    plan = tensorstow.plan_of(model)
    assert plan.accumulation_steps == micro_batches
    told = found["plan"]
    asked = tensorstow.Plan(**told)
    assert all(getattr(plan, name) == getattr(asked, name) for name in told)
    assert (found["gemini"] is None) == (commits or told["parameters"] == "disk")
    optimizer.close()


def test_ranks_share_what_is_held(cli: CommandLine) -> None:
    whole, half = (planned(cli, "--world-size", n) for n in ("1", "2"))
    assert half["model"]["ranks"] == 2
    bytes_of = [{item["what"]: item["bytes"] for item in found["held"]} for found in (whole, half)]
    for what in ("parameters", "gradients", "states"):
        assert bytes_of[1][what] == bytes_of[0][what] // 2 > 0


def test_averages_are_counted_and_named(cli: CommandLine) -> None:
    plain, averaged = planned(cli), planned(cli, "--ema", "0.999")
    states = [
        next(item["bytes"] for item in facts["held"] if item["what"] == "states")
        for facts in (plain, averaged)
    ]
    assert states[1] == states[0] * 3 // 2
    assert "lr=1e-05, plan=plan, ema=0.999)" in averaged["code"][-1]
    assert averaged["deepspeed_lacks"]["ema"] is None
    assert averaged["gemini_lacks"]["ema"] is None


def test_the_network_between_machines_is_counted(small: Path, cli: CommandLine) -> None:
    write_profile(PROFILE)
    options = ["--world-size", "4", "--machines", "2", "--network", "8KBIT/s", "--seq", "32"]
    facts = cli.json("plan", small, "--batch", "2", *options)
    sent = facts["network"]["sent_bytes"]
    assert (facts["network"]["machines"], facts["network"]["bytes_per_second"]) == (2, 1000.0)
    # 4 bytes for each parameter, padded: gathered twice, and reduced twice by gloo.
    weights = 4 * facts["model"]["parameters"]
    assert sent["all-gather"] == pytest.approx(2 * 3 / 4 * weights, rel=0.02)
    assert sent["reduce-scatter"] == pytest.approx(2 * 3 / 4 * weights, rel=0.02)
    assert facts["step"]["busy"]["network"] == pytest.approx(sum(sent.values()) / 1000)
    assert facts["step"]["binding"] == "network"
    assert re.search(
        r"each of 2 machines sends [\d.]+ GB per step \(all-gather \S+, reduce-scatter \S+\):"
        r"\s+\S+ s at 1 kB/s",
        cli("plan", small, "--batch", "2", *options),
    )
    assert planned(cli)["network"] is None


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
    options: str, wanted: str, cli: CommandLine
) -> None:
    assert wanted in cli(*PLAN, *options.split(), status=2)


def test_each_budget_is_of_its_tier(cli: CommandLine) -> None:
    tiers = planned(cli, "--device", "1GiB", "--host", "2GiB", "--disk", "3GiB")["tiers"]
    budgets = {tier: each["budget"] for tier, each in tiers.items()}
    assert budgets == {"device": 1 << 30, "host": 2 << 30, "disk": 3 << 30}
    assert tiers["device"]["bytes"] > 80 << 20
    less = planned(cli, "--device", "130MiB", "--host", "2GiB")
    assert less["plan"]["parameters"] == "host"
    assert less["tried"][0]["short"].keys() == {"device"}


def test_states_that_round_are_taken_only_where_that_is_allowed(
    tmp_path: Path, cli: CommandLine
) -> None:
    budget = ["--host", "220MiB", "--disk", "1MiB", "--directory", str(tmp_path)]
    cli(*PLAN, *budget, status=2)
    found = planned(cli, *budget, "--allow-inexact")
    assert (found["plan"], found["state_format"]) == (
        {"parameters": "host", "states": "host"},
        "int8",
    )
    assert found["deepspeed_lacks"] == {"overlap": "forward", "state_format": None}
    assert found["gemini_lacks"] == {"state_format": None}
    model, optimizer = run(found["code"])
    assert isinstance(optimizer, tensorstow.AdamW)
    trained_by(model).backward()
    optimizer.step()
    held = {item["what"]: item["bytes"] for item in found["held"]}
    assert optimizer._memory().ram_bytes == held["states"]
    optimizer.close()
    printed = cli(*PLAN, *budget, "--allow-inexact", "--deepspeed")
    assert "states on HOST in int8" in printed
    assert "differs from the plan in overlap ('forward' here), state_format" in printed


def test_units_are_on_two_tiers_where_one_is_too_small(tmp_path: Path, cli: CommandLine) -> None:
    budget = ["--host", "190MiB", "--directory", str(tmp_path)]
    found = planned(cli, *budget)
    told = found["plan"]
    plan = tensorstow.Plan(**told)
    tiers = [plan.tier_of(str(number)) for number in range(20)]
    assert 0 < tiers.count(tensorstow.Tier.HOST) < 20
    assert found["gemini"] is None
    assert "parameter_units" in found["deepspeed_lacks"]
    assert f"{len(plan.parameter_units)} units of them on" in cli(*PLAN, *budget)


def test_a_batch_is_cut_into_micro_batches(small: Path, cli: CommandLine) -> None:
    write_profile(PROFILE)
    asked = ["plan", small, "--headroom", "0", "--batch", "8", "--seq", "64"]
    whole = cli.json(*asked)
    tight = whole["tiers"]["host"]["bytes"] - whole["activations"]["bytes"] // 2
    budget = ["--host", str(tight), "--disk", "1KiB"]
    cli(*asked, *budget, status=2)
    found = cli.json(*asked, *budget, "--accumulation-steps", "auto")
    times = found["plan"]["accumulation_steps"]
    assert times * found["activations"]["batch"] == 8
    assert times > 1
    assert found["tiers"]["host"]["bytes"] <= tight
    assert found["step"]["tokens"] == whole["step"]["tokens"] == 8 * 64
    config = found["deepspeed"]
    assert config["train_micro_batch_size_per_gpu"] == 8 // times
    assert (config["gradient_accumulation_steps"], config["train_batch_size"]) == (times, 8)
    assert "without --batch, which it cuts: say both" in cli(
        "plan", small, "--accumulation-steps", "auto", status=2
    )


def test_commits_take_room_on_the_disk(cli: CommandLine) -> None:
    held = planned(cli, "--commits")["held"]
    two = [item for item in held if item["what"] == "two commits"]
    assert [item["tier"] for item in two] == ["disk"]


def test_parameters_are_of_the_dtype_that_is_asked(small: Path, cli: CommandLine) -> None:
    for dtype, name in (("bf16", "bfloat16"), ("fp16", "float16")):
        found = cli.json("plan", small, "--dtype", dtype)
        assert found["model"]["dtypes"] == [name]
        assert (found["gemini"] is None) == (dtype == "fp16")


@pytest.mark.parametrize("states", ["host", "disk"])
def test_a_real_run_holds_what_was_printed(states: str, cli: CommandLine) -> None:
    found = planned(cli, "--host", "1GiB" if states == "host" else "250MiB")
    held = {item["what"]: item["bytes"] for item in found["held"]}
    model = build()
    plan = tensorstow.Plan(**found["plan"])
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
def test_what_makes_no_sense_is_refused(options: list[str], said: str, cli: CommandLine) -> None:
    assert said in cli(*PLAN, *options, status=2)


@pytest.mark.parametrize(
    ("config", "with_what"),
    [
        ({"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1}, "--batch and --seq"),
        ({"model_type": "vit", "num_hidden_layers": 1, "hidden_size": 12}, "a module:function"),
        ({"model_type": "t5", "num_layers": 1, "d_model": 8}, "a module:function"),
    ],
)
def test_what_traces_a_model_is_said_by_its_kind(
    config: dict[str, object], with_what: str, tmp_path: Path, cli: CommandLine
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert f"not counted: give {with_what}" in cli("plan", path)


def test_micro_batches_are_a_number_or_auto(cli: CommandLine) -> None:
    error = cli.exit(*PLAN, "--accumulation-steps", "many", status=2)
    assert "'many' was given: it is a number, at least 1, or auto" in error


def test_without_a_profile_it_says_what_makes_one(cli: CommandLine) -> None:
    printed = cli(*PLAN)
    assert "not predicted: no profile of this machine: `tensorstow calibrate`" in printed


def test_the_cached_profile_gives_seconds(small: Path, cli: CommandLine) -> None:
    write_profile(PROFILE)
    size = ["--batch", "2", "--seq", "32", "--host", "50MiB"]
    printed = cli("plan", small, "--headroom", "0", *size, "--tbw", "600TB")
    assert "nominal" not in printed
    assert "about" not in printed
    for part in ("forward ", "bound by      cores", "64 per step", "tokens/s", "break-even"):
        assert part in printed
    step = cli.json("plan", small, "--headroom", "0", *size)["step"]
    assert step["seconds"] == pytest.approx(sum(each["seconds"] for each in step["phases"]))
    assert step["tokens_per_second"] == pytest.approx(64 / step["seconds"])
    assert step["binding"] in step["busy"]
    more = ["--world-size", "2", "--accumulation-steps", "3"]
    found = cli.json("plan", small, "--headroom", "0", *size, *more)
    assert found["step"]["tokens"] == 2 * 32 * 2 * 3
    assert found["activations"]["bytes"] > 0
    assert cli.json(*PLAN)["step"] is None  # no batch: no seconds, but break-even


def test_headroom_is_a_line_of_each_tier_and_can_be_changed(
    cli: CommandLine,
) -> None:
    asked = ["plan", MODEL, "--device", "2GiB", "--host", "3GiB"]
    rows = re.findall(r"^ (device|host) +headroom, left free ", cli(*asked), re.MULTILINE)
    assert rows == ["device", "host"]
    usual = cli.json(*asked)
    less = planned(cli, *asked[2:])
    for tier, headroom in usual_headroom(device_is_host=False).items():
        held = less["tiers"][tier]["bytes"]
        assert usual["tiers"][tier]["bytes"] == held + headroom.beside(held)
    given = cli.json(*asked, "--headroom", "700MiB")
    left = {i["tier"]: i["bytes"] for i in given["held"] if i["what"] == "headroom, left free"}
    assert left == {"device": 700 << 20, "host": 700 << 20}
    cli("plan", MODEL, "--host", "700MiB")  # 308 MiB are held
    assert "of HOST, headroom included" in cli(
        "plan", MODEL, "--host", "400MiB", "--disk", "0", status=2
    )
    assert "headroom" not in cli(*PLAN, "--host", "1MiB", "--disk", "0", status=2)


def test_host_memory_that_is_not_given_is_the_machines(
    monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    monkeypatch.setattr(plan_machine, "total_host_bytes", lambda: 8 * GIB)
    assert planned(cli)["tiers"]["host"]["budget"] == 8 * GIB
    shared = planned(cli, "--world-size", "4")
    assert shared["tiers"]["host"]["budget"] == 2 * GIB
    assert "8.0 GiB (this machine)" in cli(*PLAN)
    assert planned(cli, "--host", "none")["tiers"]["host"]["budget"] is None
    assert "(this machine)" not in cli(*PLAN, "--host", "4GiB")


def test_a_card_has_nominal_rates_that_are_marked(small: Path, cli: CommandLine) -> None:
    asked = ["plan", small, "--batch", "2", "--seq", "32"]
    told = cli(*asked, "--device", "24GiB")
    assert "no profile of this machine: `tensorstow calibrate` makes one; or --card plans" in told
    found = {}
    for words in (["--card", "4090"], ["--device", "RTX 4090"]):
        found[words[0]] = cli.json(*asked, *words)
    assert found["--card"] == found["--device"]
    assert found["--card"]["nominal"] == ["accelerator", "host memory", "disk"]
    assert found["--card"]["card"] == "GeForce RTX 4090"
    assert found["--card"]["tiers"]["device"]["budget"] == int(23.5 * GIB)
    printed = cli(*asked, "--card", "4090")
    assert re.search(r"^step +about [\d.]+ m?s: ", printed, re.MULTILINE)
    assert re.search(
        r"^rates +nominal, from data sheets: GeForce RTX 4090, DDR4", printed, re.MULTILINE
    )
    assert "no GPU was measured" in printed
    less = cli.json(*asked, "--card", "4090", "--device", "20GiB")
    assert less["tiers"]["device"]["budget"] == 20 * GIB
    assert less["step"] == found["--card"]["step"]


def test_what_was_measured_goes_before_a_cards_nominal_rates(
    small: Path, tmp_path: Path, cli: CommandLine
) -> None:
    measured = PROFILE.but(directories={str(tmp_path): PROFILE.directories["/nvme"]})
    write_profile(measured)
    asked = ["plan", small, "--batch", "2", "--seq", "32", "--card", "4090"]
    assert cli.json(*asked)["nominal"] == ["accelerator"]
    cli(*asked, "--directory", tmp_path)
    assert "was not measured" in cli(*asked, "--directory", "/dev/shm", status=2)


def test_what_does_not_fit_is_counted_and_listed_with_all(
    cli: CommandLine,
) -> None:
    asked = [*PLAN, "--device", "130MiB", "--host", "2GiB"]
    few = cli(*asked)
    assert "short" not in few
    (count,) = re.findall(r"(\d+) more: they do not fit; --all lists them", few)
    everything = cli(*asked, "--all")
    assert len(re.findall(r" short$", everything, re.MULTILINE)) == int(count) > 0
    assert "--all" not in everything


def test_why_the_first_is_chosen_is_told_once(cli: CommandLine) -> None:
    printed = cli(*PLAN, "--device", "1GiB", "--host", "2GiB")
    assert printed.count(": it fits too") > 1
    assert printed.count("without rates: the first that fits is chosen") == 1
    write_profile(PROFILE)
    assert "without rates" not in cli(*PLAN)


def test_other_projects_lines_are_printed_on_request(cli: CommandLine) -> None:
    headings = {
        "--deepspeed": "as a DeepSpeed configuration",
        "--gemini": "with Gemini's arguments",
    }
    for words in ([], ["--deepspeed"], ["--gemini"], ["--deepspeed", "--gemini"]):
        printed = cli(*PLAN, *words)
        assert [h in printed for h in headings.values()] == [flag in words for flag in headings]


def test_units_are_told_as_ranges(tmp_path: Path, cli: CommandLine) -> None:
    budget = ["--host", "190MiB", "--directory", str(tmp_path)]
    found = planned(cli, *budget)
    told = found["plan"]
    printed = cli(*PLAN, *budget)
    (line,) = re.findall(r"^units +(.*)$", printed, re.MULTILINE)
    (units,) = told["parameter_units"].items()
    assert line == f"{units[0]} on {units[1].upper()}"
    assert "-" in line
    code = found["code"]
    plan = next(text for text in code if text.startswith("plan ="))
    assert len(plan) < 150
    namespace: dict[str, object] = {}
    exec(f"import tensorstow; {plan}", namespace)  # noqa: S102  # it is what users copy
    assert namespace["plan"] == tensorstow.Plan(**told)


def test_adapters_are_trained_alone(small: Path, cli: CommandLine) -> None:
    asked = ["plan", small, "--dtype", "bf16"]
    full, found = cli.json(*asked), cli.json(*asked, "--lora", "r=4")
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


def test_codes_of_a_quantized_base_are_counted(tmp_path: Path, cli: CommandLine) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  # seconds

    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12}
    config = LlamaConfig(vocab_size=512, num_attention_heads=8, **sizes)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    cli("quantize", tmp_path / "base", tmp_path / "nf4", "--nf4")
    held = {}
    for folder in ("base", "nf4"):
        words = ["--lora", "r=4", "--device", "0", "--host", "48MiB", "--headroom", "0"]
        found = cli.json("plan", tmp_path / folder, *words)
        assert found["plan"]["parameters"] == ("disk" if folder == "base" else "host")
        held[folder] = sum(i["bytes"] for i in found["held"] if i["what"] == "parameters")
    assert held["nf4"] < 0.4 * held["base"]


def broken() -> nn.Module:
    message = "boom"
    raise RuntimeError(message)


def test_an_error_of_the_users_function_is_shown_as_it_is(
    cli: CommandLine,
) -> None:
    told = cli("plan", f"{__name__}:broken", status=1)
    assert re.search(r'  File ".*test_cli_plan\.py", line \d+, in broken\n    raise Runtime', told)
    assert told.endswith("RuntimeError: boom\n")
    error = cli.json("plan", f"{__name__}:broken", status=1)["error"]
    assert error["type"] == "RuntimeError"
    assert "boom" in error["message"]


def test_states_on_disk_wear_it(tmp_path: Path, cli: CommandLine) -> None:
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(PROFILE.as_dict()))
    options = ("--host", "250MiB", "--profile", str(file), "--tbw", "1TB")
    found = planned(cli, *options)
    trained = 19 << 20
    disk = found["disk"]
    assert 0 < disk["written_bytes"] < 8 * trained  # the budget leaves room for some
    assert disk["steps_until_worn"] == 10**12 // disk["written_bytes"]
    plan = found["plan"]
    assert plan.pop("ram_budget") > 48 << 20
    assert plan == {"parameters": "host", "states": "disk", "overlap": "forward"}
    even = found["break_even"]
    moved = (disk["written_bytes"] + disk["read_bytes"]) / 1e9
    operations = 6 * (20 << 20) / 1e11
    assert even["tokens"] == pytest.approx(moved / operations, rel=0.02)
    printed = cli(*PLAN, *options)
    assert f"a drive for 1 TB lasts {disk['steps_until_worn']:,} steps" in printed
    assert f"{even['tokens']:,} tokens per step" in printed
    assert "overlap backward" in printed
    assert "if you need no clipping and loss scaling" in printed
    left_out = found["left_out"]
    assert left_out > 0
    assert f"{left_out} more: variants of these that gain less than 2%" in printed


def test_rates_that_are_lacking_are_said_or_refused(tmp_path: Path, cli: CommandLine) -> None:
    write_profile(PROFILE.but(directories={}))
    found = planned(cli, "--host", "250MiB")
    assert "tensorstow calibrate DIR" in str(found["seconds_unknown"])
    write_profile(PROFILE.but(update={}))
    assert "float32/fp32" in str(planned(cli)["seconds_unknown"])
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(PROFILE.but(update={}).as_dict()))
    assert "float32/fp32" in cli(*PLAN, "--profile", file, status=2)
    assert "no such file" in cli(*PLAN, "--profile", "/nowhere", status=2)
    write_profile(PROFILE)
    assert "was not measured" in cli(*PLAN, "--directory", "/dev/shm", status=2)


def trained_by(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(2, 1024)).square().mean()
    return loss


@pytest.mark.parametrize("host", ["1GiB", "250MiB", "160MiB"])
def test_the_deepspeed_configuration_runs(host: str, tmp_path: Path, cli: CommandLine) -> None:
    found = planned(cli, "--host", host, "--directory", str(tmp_path))
    engine, *_ = deepspeed.initialize(model=build(), config=found["deepspeed"])
    engine.backward(trained_by(engine))
    engine.step()
    states = found["plan"]["states"]
    assert engine.optimizer._memory().file_bytes > 0 if states == "disk" else True
    engine.destroy()


@pytest.mark.parametrize("host", ["1GiB", "250MiB"])
def test_the_lines_of_gemini_run(host: str, tmp_path: Path, cli: CommandLine) -> None:
    found = planned(cli, "--host", host, "--directory", str(tmp_path))
    model, optimizer = run(found["gemini"])
    optimizer.backward(trained_by(model))
    optimizer.step()
    optimizer.close()


def test_gemini_has_no_parameters_on_disk(cli: CommandLine) -> None:
    found = planned(cli, "--host", "160MiB")
    assert found["plan"]["parameters"] == "disk"
    assert found["gemini"] is None


def test_activations_that_do_not_fit_are_placed_elsewhere(small: Path, cli: CommandLine) -> None:
    write_profile(PROFILE)
    asked = ["plan", small, "--headroom", "0", "--batch", "16", "--seq", "256"]
    kept = cli.json(*asked)
    assert "activations" not in kept["plan"]
    assert all("activations" not in each["plan"] for each in kept["tried"])
    budget = kept["tiers"]["host"]["bytes"] * 7 // 10
    limits = ["--host", str(budget), "--directory", "/nvme"]
    found = cli.json(*asked, *limits)
    assert found["plan"]["activations"] in {"recompute", "disk"}
    assert found["tiers"]["host"]["bytes"] <= budget
    assert found["deepspeed_lacks"]["activations"] == "keep"
    assert {e["plan"].get("activations") for e in found["tried"]} == {None, "recompute", "disk"}
    printed = cli(*asked, *limits)
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
    row: str, cli: CommandLine
) -> None:
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| (Llama .+B) \| (.+) \| (.+) \| (.+) \| (.+) \|$", readme, re.MULTILINE)
    table = {name: cells for name, *cells in rows}
    assert [*table] == [*FITS]
    options = ["--device", "24GiB", "--host", "64GiB", "--disk", "2TiB"]
    options += ["--batch", "1", "--seq", "2048"]
    found = cli.json("plan", FITS[row], *options)
    held = [found["tiers"][tier]["bytes"] for tier in ("device", "host", "disk")]
    for told, held_bytes in zip(
        table[row], [16 * found["model"]["parameters"], *held], strict=True
    ):
        (amount,) = re.findall(r"([\d,]+) GiB", told.replace("nothing", "0 GiB"))
        assert int(amount.replace(",", "")) == round(held_bytes / GIB), told


def test_the_plan_of_8b_on_a_4090_is_what_pages_show(
    cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no profile of this machine
    guide = (ROOT / "docs/guides/planning.md").read_text()
    sample = re.findall(r"^ {4}(.+)$", guide[: guide.index("* **placement**")], re.MULTILINE)
    command, *shown = [line.strip() for line in sample]
    assert command.startswith("tensorstow plan llama-3-8b --card 4090 ")
    printed = [" ".join(line.split()) for line in cli(*command.split()[1:]).splitlines()]
    for line in shown:
        head, *rest = " ".join(line.split()).split("...")
        if head or rest != [""]:  # a line that is cut has its beginning and its end
            assert any(p.startswith(head) and p.endswith("".join(rest)) for p in printed), line
    seconds = next(re.search(r"about ([\d.]+) s:", p) for p in printed if p.startswith("step "))
    assert seconds is not None
    readme = (ROOT / "README.md").read_text()
    assert f"8B on a 4090 is predicted to take about {float(seconds[1]):.0f} s" in readme


def test_the_plan_of_gpt_3_is_what_the_guide_shows(
    cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no profile of this machine
    guide = (ROOT / "docs/guides/planning.md").read_text()
    section = guide[guide.index("## GPT-3 on one node") : guide.index("## In the process")]
    (command,) = re.findall(r"^ {4}(.*)$", section, re.MULTILINE)
    asked = command.removeprefix("tensorstow ").split()
    tiers = cli.json(*asked)["tiers"]
    ranks = int(asked[asked.index("--world-size") + 1])
    held = [ranks * tiers[tier]["bytes"] for tier in ("device", "host", "disk")]
    cells = re.findall(r"\| ([\d.]+) ([GT])B \|$", section, re.MULTILINE)
    assert len(cells) == 4
    for (amount, unit), nbytes in zip(cells, [*held, sum(held)], strict=True):
        assert float(amount) == round(nbytes / {"G": 1e9, "T": 1e12}[unit], 2 * (unit == "T"))
