"""Another user of a directory plants symbolic links where files are written: none is followed."""

from pathlib import Path

import pytest

from doors import DOORS, files


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
