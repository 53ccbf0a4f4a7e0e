"""``python -m tensorstow``: the command, where its script is not on the path."""

import sys

from tensorstow.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
