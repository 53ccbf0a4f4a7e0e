"""What goes over the network, in closed form; tests/faults/test_hosts.py counts it on a cable."""

import re
from dataclasses import dataclass, replace

import pytest
import torch

from machines import BATCH, CPU, HERE, SIZES, G
from tensorstow import Plan
from tensorstow.planner.network import Network, traffic_of
from tensorstow.planner.seconds import time_of
from tensorstow.planner.sizes import Sizes, UnitSizes
from tree import ROOT

W = 16 * G
"""Bytes of the weights, and of their gradients."""
PAGE = ROOT / "docs/guides/several-gpus.md"


def sizes_of(ranks: int, nbytes: int = W) -> Sizes:
    """Return a model of two units in bf16."""
    unit = nbytes // 2
    trained = ((torch.bfloat16, unit // 2 // ranks),)
    units = tuple(UnitSizes(name, unit, unit // ranks, trained) for name in "ab")
    return Sizes(units, ranks)


@pytest.mark.parametrize("machines", [2, 8, 125])
@pytest.mark.parametrize(
    ("plan", "is_gloo", "wanted"),
    [
        (Plan(stage=0), False, 2),
        (Plan(stage=0, accumulation_steps=3), False, 12),  # waiting gradients are fp32
        (Plan(stage=1), False, 2),
        (Plan(stage=1, accumulation_steps=3), False, 3),
        (Plan(stage=2, accumulation_steps=3), False, 4),
        (Plan(), False, 3),
        (Plan(accumulation_steps=3), False, 9),
        (Plan(unsharded=["a"]), False, 2.5),
        (Plan(), True, 4),
        (Plan(stage=1), True, 3),
    ],
    ids=str,
)
def test_each_machine_sends_so_many_times_the_weights(
    machines: int,
    plan: Plan,
    is_gloo: bool,  # noqa: FBT001
    wanted: float,
) -> None:
    ranks = 8 * machines
    traffic = traffic_of(plan, sizes_of(ranks), Network(machines, 1e9, is_gloo=is_gloo))
    assert traffic.bytes == pytest.approx(wanted * W * (ranks - 1) / ranks, rel=1e-6)


@pytest.mark.parametrize(
    ("replicas", "machines", "wanted"),
    [
        (2, 2, 2 * 1 / 2),  # a replica on each machine: gradients are averaged, nothing else
        (4, 2, 2 * 3 / 4),  # two on each
        (2, 4, 3 * 15 / 16 + 2 * 1 / 2 / 2),  # one on two machines, each of which has half of it
    ],
)
def test_replicas_average_over_the_network(replicas: int, machines: int, wanted: float) -> None:
    sizes = sizes_of(8 * machines)
    traffic = traffic_of(Plan(replicas=replicas), sizes, Network(machines, 1e9))
    assert traffic.bytes == pytest.approx(wanted * W, rel=1e-6)


@pytest.mark.parametrize(
    ("ranks", "replicas", "machines", "rings", "averages"),
    [
        (6, 3, 2, 1, 2),  # the ring of ranks 2 and 3 crosses
        (24, 2, 3, 2, 8),  # the machine in the middle has ranks of both groups
        (16, 4, 2, 0, 4),
        (16, 1, 2, 1, 0),
    ],
)
def test_rings_of_the_busiest_machine(
    ranks: int, replicas: int, machines: int, rings: int, averages: int
) -> None:
    plan, network = Plan(replicas=replicas), Network(machines, 1e9)
    traffic, group = traffic_of(plan, sizes_of(ranks), network).by_collective, ranks // replicas
    assert traffic["all-gather"] == pytest.approx(rings * 2 * W * (group - 1) / group, rel=1e-6)
    averaged = averages * 2 * (replicas - 1) / replicas * W / group
    assert traffic.get("all-reduce", 0) == pytest.approx(averaged, rel=1e-6)


def test_frozen_weights_are_not_gathered_after_an_update() -> None:
    sizes = sizes_of(8)
    units = (sizes.units[0], UnitSizes("b", W // 2, W // 2 // 8, ()))
    network = Network(2, 1e9)
    traffic = traffic_of(Plan(stage=1), replace(sizes, units=units), network)
    assert traffic.bytes == pytest.approx(2 * W / 2 * 7 / 8, rel=1e-6)
    # Under stage 3 they are, and padding is gathered and reduced alike.
    experts = torch.nn.Module()
    experts.weight = torch.nn.Parameter(torch.zeros(2, 64))
    (unit,) = [UnitSizes.of(Held({"weight": experts.weight}), 8)]
    padded = traffic_of(Plan(), Sizes((unit,), 8), network).by_collective
    assert padded["all-gather"] == 2 * padded["reduce-scatter"] > 2 * 2 * 64 * 4 * 7 / 8


@dataclass
class Held:
    """A unit of the planner."""

    parameters: dict[str, torch.nn.Parameter]
    name: str = ""


@pytest.mark.parametrize(("stage", "weights"), [(1, 1), (2, 1), (3, 6)])
def test_ordered_rows_go_to_every_rank_of_other_machines(stage: int, weights: int) -> None:
    plan = Plan(stage=stage, ordered_reduce="sum", accumulation_steps=3)
    traffic = traffic_of(plan, sizes_of(32), Network(4, 1e9)).by_collective
    assert traffic == {"all-to-all": 3 * 8 * 24 * W // 32, "all-gather": weights * W * 31 // 32}


def test_one_machine_sends_nothing() -> None:
    assert traffic_of(Plan(stage=0), sizes_of(8), Network(1, 1e9)).bytes == 0


def test_a_slow_network_takes_the_time_of_a_step() -> None:
    sizes = replace(SIZES, ranks=2)
    network = Network(2, G / 4)
    machine = replace(CPU, network=network)
    alone = time_of(Plan(), sizes, HERE, BATCH, CPU)
    both = time_of(Plan(), sizes, HERE, BATCH, machine)
    traffic = traffic_of(Plan(), sizes, network)
    assert both.busy["network"] == pytest.approx(traffic.bytes / network.bytes_per_second)
    assert both.binding == "network"
    forward = sum(traffic.forward.values()) / network.bytes_per_second
    assert both.phases[0].seconds == pytest.approx(forward)
    assert both.seconds > alone.seconds
    # Weights are gathered behind the update under stage 1.
    staged = time_of(Plan(stage=1), sizes, HERE, BATCH, machine)
    assert staged.phases[-1].loads["network"] > 0
    assert staged.phases[0].loads["network"] == 0


def test_the_page_has_these_figures() -> None:
    """The table of the guide: machines with 8 ranks each, 16.06 GB of weights."""
    text = PAGE.read_text(encoding="utf-8")
    (machines,) = re.findall(r"^\| machines of 8 GPUs \|(.*)\|$", text, re.MULTILINE)
    for stage in (1, 3):
        (row,) = re.findall(rf"^\| GB per step, stage {stage} \|(.*)\|$", text, re.MULTILINE)
        for count, written in zip(machines.split("|"), row.split("|"), strict=True):
            ranks = 8 * int(count)
            sizes = sizes_of(ranks, 16_060_522_496 // (4 * ranks) * 4 * ranks)
            traffic = traffic_of(Plan(stage=stage), sizes, Network(int(count), 1e9))
            assert f"{traffic.bytes / 1e9:.1f}" == written.strip()
