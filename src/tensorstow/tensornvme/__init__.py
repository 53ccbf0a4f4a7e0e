"""TensorNVMe's interface: only the import line changes.

``from tensornvme import DiskOffloader`` becomes
``from tensorstow.tensornvme import DiskOffloader``, and
``from tensornvme.async_file_io import AsyncFileWriter`` becomes
``from tensorstow.tensornvme.async_file_io import AsyncFileWriter``.
"""

from tensorstow.base.absent_names import add_absent_modules, refuse_names, refuse_other_modules
from tensorstow.tensornvme.async_file_io import AsyncFileWriter
from tensorstow.tensornvme.offloader import DiskOffloader

__all__ = ["AsyncFileWriter", "DiskOffloader"]

_ABSENT = {
    "_C": "the extension is not needed. DiskOffloader chooses the places in its files, its"
    " `backend` says which backend serves, and `tensorstow doctor` lists those that work",
}
add_absent_modules(__name__, _ABSENT)
refuse_other_modules(__name__, "docs/guides/colossalai.md")
__getattr__ = refuse_names(__name__, _ABSENT)
