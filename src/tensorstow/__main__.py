"""``python -m tensorstow``: the command, where its script is not on the path."""

from tensorstow.cli.main import run_and_exit

if __name__ == "__main__":
    run_and_exit()
