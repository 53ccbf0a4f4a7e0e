"""Checkpoints of an engine in DeepSpeed's universal layout.

DeepSpeed 0.19.6 itself loaded such, and went on with the same losses; here the reader of its own
universal checkpoints stands for it.
"""

import runpy
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from ranks.driven import closing
from ranks.pool import Ranks
from ranks.zero_read import engine_for, loaded_from, saved_by_engine
from tensorstow.base.errors import OptionError, StoreFormatError
from tensorstow.deepspeed.checkpoint import ds_to_universal
from tensorstow.deepspeed.checkpoint.ds_to_universal import main

ENTRIES = [("module", ""), ("optimizer", ".exp_avg")]


@pytest.mark.parametrize(("world", "stage", "dtype"), [(1, 2, "bf16"), (2, 3, "fp32")])
def test_it_comes_back_with_all_bits(
    ranks: "Ranks", tmp_path: Path, world: int, stage: int, dtype: str
) -> None:
    want = ranks(world).run(saved_by_engine, str(tmp_path / "own"), stage, dtype)[0]
    main(Namespace(input_folder=tmp_path / "own" / "one", output_folder=tmp_path / "saved"))
    assert (tmp_path / "latest_universal").read_text() == "saved"
    held = loaded_from(str(tmp_path), 0, dtype)
    for name, kept in want.items():
        for key, values in kept.items():
            assert torch.equal(held.trained[name][key], values), (name, key)
    assert held.counts == (2, 0, 2 * world)
    assert held.client == {"epoch": 7}
    assert held.scheduled == 1
    assert [g["weight_decay"] for g in held.groups] == [0.5, 0.5]


def test_files_have_upstreams_names_and_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(engine_for(2)) as engine:
        engine.backward(engine(torch.arange(7)))
        engine.step()
        engine.optimizer.param_groups[1]["weight_decay"] = 0.0
        engine.save_checkpoint(tmp_path / "own", "one")
    given = [f"--input_folder={tmp_path / 'own' / 'one'}", f"--output_folder={tmp_path / 'to'}"]
    monkeypatch.setattr(sys, "argv", ["ds_to_universal", *given, "--num_merge_workers=2"])
    runpy.run_path(ds_to_universal.__file__, run_name="__main__")
    parameter = tmp_path / "to" / "zero" / "out.weight"
    assert {f.name for f in parameter.iterdir()} == {
        *("fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "step.pt")
    }
    saved: dict[str, Any] = torch.load(parameter / "fp32.pt", weights_only=True)
    assert (saved["cat_dim"], saved["param"].shape) == (0, (5, 3))
    assert torch.equal(torch.load(parameter / "step.pt"), torch.tensor(1.0))
    common = torch.load(tmp_path / "to" / "zero" / "optimizer_state.pt", weights_only=True)
    assert [g["weight_decay"] for g in common["param_groups"]] == [0.5, 0.0]
    of_stage_3 = common["optimizer_state_dict"]
    assert of_stage_3["state"][0]["step"] == 1.0
    assert "weight_decay" not in of_stage_3["param_groups"][0]  # all groups would have it
    assert of_stage_3["param_groups"][0].keys() >= {"lr", "betas", "eps"}
    for name in ("mp_rank_00", "zero_pp_rank_0_mp_rank_00"):
        model = torch.load(tmp_path / "to" / f"{name}_model_states.pt", weights_only=True)
        assert model["shared_params"] == {"head.weight": "embedding.weight"}
        assert list(model["param_shapes"][1]) == ["hidden.bias", "out.bias"]
        assert model["buffer_names"] == ["table"]
        assert model["module"]["frozen.weight"].shape == (5, 5)
    with pytest.raises(OptionError, match="is not empty"):
        main(Namespace(input_folder=tmp_path / "own" / "one", output_folder=tmp_path / "to"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["../../../victim/planted", "/victim/planted"])
def test_a_name_that_leads_out_of_the_folder_is_an_error(tmp_path: Path, name: str) -> None:
    source, victim = tmp_path / "own" / "one", tmp_path / "victim"
    victim.mkdir()
    name = name.replace("/victim", str(victim), 1) if name.startswith("/") else name
    values = {f"{of}.{name}{end}": torch.ones(2) for of, end in ENTRIES}
    save(values, checkpoint_id=source, no_dist=True)
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": [name]}
    kept = {"groups": [group], "steps": {name: 1.0}, "numbers": {}, "frozen": [], "tied": {}}
    counts = dict.fromkeys(("global_steps", "global_samples", "skipped_steps", "micro_steps"), 1)
    more = {"class": None, "scale": None, "scheduler": None, "client_state": ({}, {})}
    torch.save(kept | counts | more, source / "engine.pt")
    with pytest.raises(StoreFormatError, match="which is no file in"):
        main(Namespace(input_folder=source, output_folder=tmp_path / "out" / "to"))
    assert list(victim.iterdir()) == []


def test_counts_of_updates_are_a_groups(tmp_path: Path) -> None:
    with closing(engine_for(0)) as engine:
        for number in range(3):
            engine.backward(engine(torch.arange(7)))
            if number:
                engine.module.out.weight.grad = None
            engine.module.out.bias.grad = None
            engine.step()
        engine.save_checkpoint(tmp_path, "one")
    with pytest.raises(OptionError, match=r"updated \[1.0, 3.0\] times"):
        main(Namespace(input_folder=tmp_path / "one", output_folder=tmp_path / "to"))


def test_what_has_no_states_of_adam_is_told(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with closing(engine_for(0, model=model, kind="SGD")) as engine:
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        engine.save_checkpoint(tmp_path, "one")
    with pytest.raises(OptionError, match="momentum_buffer"):
        main(Namespace(input_folder=tmp_path / "one", output_folder=tmp_path / "to"))
    with closing(engine_for(0, model=model, kind=None)) as engine:
        engine.save_checkpoint(tmp_path, "two")
    with pytest.raises(OptionError, match="saved without an optimizer"):
        main(Namespace(input_folder=tmp_path / "two", output_folder=tmp_path / "other"))
