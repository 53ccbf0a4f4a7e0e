"""TensorNVMe's module of its writer: ``from tensornvme.async_file_io import AsyncFileWriter``."""

from tensorstow.tensornvme.writer import AsyncFileWriter

__all__ = ["AsyncFileWriter"]
