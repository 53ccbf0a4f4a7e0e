"""``python -m mutations.run [WORDS]``: run the table, or what has one of the words in its row.

Exits with 1 where a mutation survives, which is one whose test passes.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mutations.table import MUTATIONS, Mutation

_TESTS = Path(__file__).parents[1]
_MOST_SECONDS = 300


_CRASHES = {-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT}


def main(words: Sequence[str]) -> int:
    """Run; return how the process is to exit."""
    asked = [
        (number, mutation)
        for number, mutation in enumerate(MUTATIONS)
        if not words or any(word in _row(mutation) for word in words)
    ]
    tests = sorted({mutation.test for _, mutation in asked})
    if _run(tests) != 0:
        _say("These tests fail without a mutation:\n  " + "\n  ".join(tests))
        return 1
    survivors = 0
    for number, mutation in asked:
        answer = _run([mutation.test], number)
        # Memory that is freed under a copy may end the process (a signal's number, negative).
        is_caught = answer == 1 or answer in _CRASHES
        said = {0: "SURVIVES"}.get(answer, f"pytest ended with {answer}")
        said = "caught" if is_caught else said
        survivors += not is_caught
        _say(f"{said:8}  {_row(mutation)}")
    _say(f"{len(asked)} mutations, {len(asked) - survivors} caught")
    return int(survivors > 0)


def _row(mutation: Mutation) -> str:
    was, now = " ".join(mutation.code.split()), " ".join(mutation.instead.split())
    return f"{mutation.path}: {was} -> {now or 'nothing'}  [{mutation.test}]"


def _run(tests: Sequence[str], number: int | None = None) -> int:
    """Return how pytest ends; a test that hangs is one that fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "simulated.plugin"]
    paths = os.pathsep.join(map(str, (_TESTS, _TESTS.parent)))  # the parent has benchmarks
    environment = {**os.environ, "PYTHONPATH": paths}
    if number is not None:
        command += ["-p", "mutations.plugin"]
        environment["MUTATION"] = str(number)
    try:
        done = subprocess.run(
            [*command, *tests], cwd=_TESTS, env=environment, timeout=_MOST_SECONDS, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 1
    if done.returncode not in {0, 1} or (number is None and done.returncode):
        _say(done.stdout[-4000:])
    return done.returncode


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
