import json
import os
from pathlib import Path

import pytest

from demo.gemini_worker import main


def test_a_run_says_its_result(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    reader, writer = os.pipe()
    given = ["--policy", "cpu", "--fraction", "1.0", "--small", "--directory", str(tmp_path)]
    main([*given, "--descriptor", str(writer)])
    with os.fdopen(reader, encoding="utf-8") as lines:
        (said,) = map(json.loads, lines)
    assert (said["policy"], said["fraction"], len(said["losses"])) == ("cpu", 1.0, 3)
    assert said["seconds"] > 0
