"""Gather the requests of a group into a slot, padding what is shorter with each input's pad value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .batch import Fill, Request
from .buckets import Group
from .providers.base import Array, DeviceArray, DeviceSlot, Slot
from .signature import Signature


def stage(
    slot: Slot, group: Group, requests: Sequence[Request], signature: Signature, fills: Mapping[str, Fill]
) -> dict[str, Array]:
    """Write every input of the group's requests into the slot; the arrays that the run will read, by input.

    Rows follow each other in the group's order. A single request that already has the run's shape is lent as it is.
    """
    items = group.items
    first = requests[items[0].place].inputs
    is_exact = len(items) == 1 and items[0].sizes == group.sizes
    has_device_arrays = any(requests[item.place].has_device_arrays for item in items)
    staged = {}
    for spec in signature.inputs:
        name = spec.name
        if name not in first:
            continue
        if has_device_arrays:
            arrays = [requests[item.place].inputs[name] for item in items]
            if any(isinstance(array, DeviceArray) for array in arrays):
                shape = arrays[0].shape if is_exact else signature.shape(spec, group.sizes)
                view = staged[name] = slot.stage(name, spec.dtype, shape)
                _place(slot, name, view, arrays, fills[name].pad, is_batched=signature.is_batched)
                continue
        if is_exact and first[name].flags.aligned:
            slot.borrow(name, spec.dtype, first[name])
            staged[name] = first[name]
            continue
        # A request that runs exact keeps its own shapes: its axes may not agree on the sizes.
        shape = first[name].shape if is_exact else signature.shape(spec, group.sizes)
        view = staged[name] = slot.stage(name, spec.dtype, shape)
        if is_exact:
            view[...] = first[name]
            continue
        arrays = [requests[item.place].inputs[name] for item in items]
        if signature.is_batched:
            _gather_rows(view, arrays, fills[name].pad)
        else:
            view[...] = fills[name].pad
            view[tuple(map(slice, arrays[0].shape))] = arrays[0]
    return staged


def _place(
    slot: Slot, name: str, view: Array, arrays: Sequence[Array], pad: float | bytes, *, is_batched: bool
) -> None:
    """An input that some requests brought on the GPU: padding and host rows are staged, the others copied over them."""
    assert isinstance(slot, DeviceSlot)
    if len(arrays) == 1 and arrays[0].shape == view.shape:
        assert isinstance(arrays[0], DeviceArray)
        slot.place(name, arrays[0], 0, is_whole=True)
        return
    view[...] = pad
    row = 0
    for array in arrays:
        if isinstance(array, DeviceArray):
            slot.place(name, array, row, is_whole=False)
        else:
            view[(slice(row, row + array.shape[0]), *map(slice, array.shape[1:]))] = array
        row += array.shape[0] if is_batched else 0


def _gather_rows(view: Array, arrays: Sequence[Array], pad: float | bytes) -> None:
    """The arrays' rows behind each other from row 0, everything else the pad value."""
    shape = view.shape[1:]
    rows = sum(array.shape[0] for array in arrays)
    if all(array.shape[1:] == shape for array in arrays):
        view[rows:] = pad
        np.concatenate(arrays, out=view[:rows])
        return
    view[...] = pad
    row = 0
    for array in arrays:
        end = row + array.shape[0]
        view[(slice(row, end), *map(slice, array.shape[1:]))] = array
        row = end
