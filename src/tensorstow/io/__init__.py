"""Memory and files: aligned and pinned memory, asynchronous I/O, the link to a device."""

from tensorstow.base.first_calls import make_first_calls

make_first_calls()  # whatever computes next to torch imports this package
