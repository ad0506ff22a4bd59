"""A meter of temporary memory."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Peak of the bytes in storages that operations allocated while the mode was on."""

    def __init__(self):
        super().__init__()
        self.peak_bytes = self._now_bytes = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {_storage(tensor)._cdata for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and _storage(tensor)._cdata not in given | self._live.keys():
                self._add(_storage(tensor))
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        self._live[storage._cdata] = storage.nbytes()
        self._now_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self._now_bytes)
        weakref.finalize(storage, self._free, storage._cdata)

    def _free(self, key: int) -> None:
        self._now_bytes -= self._live.pop(key)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
