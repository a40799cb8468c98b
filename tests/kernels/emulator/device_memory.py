"""The memory that emulated kernels may touch: each tensor on its own, to the byte."""

import ctypes
import math

import torch
from emulation import runtime
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

GUARD = 4096  # bytes around a tensor that belong to nobody
ALIGNMENT = 256  # bytes; what a CUDA allocation has at least
POISON = 0xFF  # NaN in every float dtype
_EMPTY = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided"}


class DeviceMemory(TorchDispatchMode):
    """While open, tensors that torch makes are known to the emulator, and nothing else is.

    What torch.empty returns is poisoned, and uninitialised until somebody writes it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, Tensor] = {}  # by the first byte of their storage, which so is not used twice
        self._regions: list[int] = []

    def __exit__(self, *failure: object) -> None:
        super().__exit__(*failure)
        for address in self._regions:
            runtime().emulator_remove_tensor(ctypes.c_void_p(address))
        self._regions.clear()
        self._alive.clear()

    def place(self, x: Tensor, offset: int = 0, name: str = "the input") -> Tensor:
        """Return a contiguous copy of `x` that begins `offset` elements past an aligned address.

        It is a view of a larger storage, of which nothing else may be touched.
        """
        return self._allocate(x.shape, x.dtype, name, offset).copy_(x)

    def uninitialised(self, x: Tensor) -> int:
        """Return how many bytes of a contiguous tensor nobody has written."""
        if not x.nbytes:
            return 0
        return runtime().emulator_uninitialised(ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(x.nbytes))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        schema = function._schema
        if schema.name in _EMPTY:
            return self._allocate(result.shape, result.dtype, f"{schema.name} {tuple(result.shape)} {result.dtype}")
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._written(args[position] if position < len(args) else kwargs[argument.name])
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self._know(tensor, f"{schema.name} {tuple(tensor.shape)} {tensor.dtype}")
        return result

    def _allocate(self, shape: torch.Size, dtype: torch.dtype, name: str, offset: int = 0) -> Tensor:
        """Return poisoned, uninitialised memory amid guards."""
        count = math.prod(shape)
        if not count:
            return torch.frombuffer(bytearray(8), dtype=dtype, count=1)[:0].view(shape)
        buffer = bytearray([POISON]) * (2 * GUARD + ALIGNMENT + (offset + count) * dtype.itemsize)
        first = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) + GUARD
        storage = torch.frombuffer(buffer, dtype=dtype, count=offset + count, offset=GUARD + -first % ALIGNMENT)
        self._alive[storage.data_ptr()] = storage
        x = storage[offset:].view(shape)
        self._add(x.data_ptr(), x.nbytes, name, initialised=False)
        return x

    def _know(self, x: Tensor, name: str) -> None:
        storage = x.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in self._alive:
            self._alive[storage.data_ptr()] = x
            self._add(storage.data_ptr(), storage.nbytes(), name, initialised=True)

    def _add(self, address: int, nbytes: int, name: str, initialised: bool) -> None:
        self._regions.append(address)
        begin, length = ctypes.c_void_p(address), ctypes.c_size_t(nbytes)
        runtime().emulator_add_tensor(begin, length, name.encode(), ctypes.c_bool(initialised))

    def _written(self, x: Tensor) -> None:
        if not isinstance(x, Tensor) or not x.numel():
            return
        storage = x if x.is_contiguous() else x.untyped_storage()
        runtime().emulator_initialise(ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(_nbytes(storage)))


def _nbytes(x: Tensor | torch.UntypedStorage) -> int:
    return x.nbytes if isinstance(x, Tensor) else x.nbytes()
