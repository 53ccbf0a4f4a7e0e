"""A pytest plugin (``-p mutations.plugin``): our code with one mutation, of the number in MUTATION.

The source is changed as it is imported, in this process alone. (A changed copy on PYTHONPATH would
not be found: an editable install comes before it.)
"""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType

from mutations.source import mutated
from mutations.table import MUTATIONS


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Compile the mutated source; what is cached is the true one's."""
        path = self.get_filename(fullname)
        code: CodeType = compile(mutated(_MUTATION), path, "exec", dont_inherit=True)
        return code


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _NAME:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.origin is not None:
                spec.loader = _Loader(fullname, spec.origin)
                return spec
        return None


_MUTATION = MUTATIONS[int(os.environ["MUTATION"])]
_NAME = "tensorstow." + _MUTATION.path.removesuffix(".py").replace("/", ".")
assert _NAME not in sys.modules, "the mutation comes too late"
sys.meta_path.insert(0, _Finder())
