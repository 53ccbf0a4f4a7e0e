"""Another user of a directory plants symbolic links where files are written: none is followed."""

from pathlib import Path

import pytest

import tensorstow
from doors import DOORS, files
from tensorstow.base.errors import OptionError
from tensorstow.colossalai.logging import get_dist_logger


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
@pytest.mark.parametrize("name", [*DOORS, "no door"])
def test_no_writer_follows_a_link(tmp_path: Path, name: str) -> None:
    saved, victim = tmp_path / "saved", tmp_path / "victim"
    victim.write_text("precious")
    saved.mkdir()
    with (DOORS | {"no door": files})[name]() as door:
        door.save(saved)
        written = [path for path in saved.rglob("*") if path.is_file()]
        assert len(written) > 2
        for path in written:
            path.unlink()
            for own in ("{}", "{}.new", ".{}.new", "{}.tmp", ".{}.tmp"):
                path.with_name(own.format(path.name)).symlink_to(victim)
        door.save(saved)
        assert victim.read_text() == "precious"
        assert not [path for path in written if path.is_symlink()]
        door.load(saved)


def test_no_configuration_is_written_through_a_link(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 8, "n_positions": 8}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    saved, victim = tmp_path / "saved", tmp_path / "victim"
    saved.mkdir()
    victim.write_text("precious")
    names = ("config.json", "generation_config.json")
    for name in names:
        (saved / name).symlink_to(victim)
    tensorstow.save_safetensors(model, saved)
    assert victim.read_text() == "precious"
    assert not [name for name in names if (saved / name).is_symlink()]
    assert not list(saved.glob(".tensorstow-*"))
    transformers.GPT2LMHeadModel.from_pretrained(saved)


def test_no_log_is_appended_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "rank_0.log").symlink_to(victim)
    with pytest.raises(OptionError, match="is a symbolic link"):
        get_dist_logger("test_planted_links").log_to_file(str(tmp_path))
    assert victim.read_text() == "precious"
