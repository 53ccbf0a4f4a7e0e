"""TensorNVMe's interface: only the import line changes.

``from tensornvme import DiskOffloader`` becomes
``from tensorstow.tensornvme import DiskOffloader``, and
``from tensornvme.async_file_io import AsyncFileWriter`` becomes
``from tensorstow.tensornvme.async_file_io import AsyncFileWriter``.
"""

from tensorstow.tensornvme.offloader import DiskOffloader
from tensorstow.tensornvme.writer import AsyncFileWriter

__all__ = ["AsyncFileWriter", "DiskOffloader"]
