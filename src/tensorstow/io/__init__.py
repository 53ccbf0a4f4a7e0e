"""Memory and files: aligned and pinned memory, asynchronous I/O, the link to a device."""
