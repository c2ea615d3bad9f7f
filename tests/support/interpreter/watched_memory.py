"""Watches the memory that Triton's interpreter reads and writes: only tensors of the call, no address from two programs."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder, _get_np_dtype

GARBAGE = -12_345_678  # what memory that was not written holds: as a number of a tile it leads far away


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Inside, a kernel fails that touches memory outside of the tensors whose addresses were asked for, or where two programs
    of a launch write to the same address, except by atomic operations.
    """
    storages: dict[int, torch.UntypedStorage] = {}  # by address; they stay alive, so no address is used twice
    writers: dict[int, tuple[int, ...]] = {}
    empty, data_ptr = torch.empty, torch.Tensor.data_ptr
    builder = InterpreterBuilder
    store, load, begin = builder.create_masked_store, builder.create_masked_load, builder.set_grid_dim

    def garbage(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(GARBAGE) if tensor.dtype == torch.int32 else tensor

    def address(tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        return data_ptr(tensor)

    def check(pointers: Any, mask: Any, what: str) -> np.ndarray[Any, Any]:
        size = np.dtype(_get_np_dtype(pointers.get_element_ty())).itemsize
        touched = pointers.data[mask.data.astype(bool)].astype(np.int64)
        starts = np.sort(np.array([*storages], np.int64))
        ends = np.array([start + storages[start].nbytes() for start in starts.tolist()])
        at = np.searchsorted(starts, touched, "right") - 1
        outside = (at < 0) | (touched + size > ends[at])
        assert not outside.any(), f"{outside.sum()} {what} outside of the tensors"
        return touched

    def watched_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        program = tuple(map(int, self.grid_idx))
        others = {writers.setdefault(x, program) for x in check(pointers, mask, "writes").tolist()} - {program}
        assert not others, f"programs {others} and {program} write to the same address"
        return store(self, pointers, value, mask, *rest)

    def watched_load(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        check(pointers, mask, "reads")
        return load(self, pointers, mask, *rest, **named)

    def watched_begin(self: Any, *dimensions: int) -> Any:
        writers.clear()
        return begin(self, *dimensions)

    with (
        mock.patch.object(torch, "empty", garbage),
        mock.patch.object(torch.Tensor, "data_ptr", address),
        mock.patch.multiple(
            builder,
            create_masked_store=watched_store,
            create_masked_load=watched_load,
            set_grid_dim=watched_begin,
        ),
    ):
        yield
