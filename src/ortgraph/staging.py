"""Gather the requests of a group into a slot, padding what is shorter with each input's pad value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .batch import Fill, Request
from .buckets import Group
from .providers.base import Array, Slot
from .signature import Signature


def stage(
    slot: Slot, group: Group, requests: Sequence[Request], signature: Signature, fills: Mapping[str, Fill]
) -> dict[str, Array]:
    """Write every input of the group's requests into the slot; the arrays that the run will read, by input.

    Rows follow each other in the group's order. A single request that already has the run's shape is lent as it is.
    """
    first = requests[group.items[0].index]
    staged = {}
    for spec in signature.inputs:
        if spec.name not in first.inputs:
            continue
        if len(group.items) == 1 and group.items[0].sizes == group.sizes:
            staged[spec.name] = first.inputs[spec.name]
            slot.borrow(spec.name, spec.dtype, staged[spec.name])
            continue
        shape = signature.shape(spec, group.sizes)
        view = staged[spec.name] = slot.stage(spec.name, spec.dtype, shape)
        arrays = [requests[item.index].inputs[spec.name] for item in group.items]
        is_filled = signature.is_batched and sum(array.shape[0] for array in arrays) == shape[0]
        if not is_filled or any(array.shape[1:] != shape[1:] for array in arrays):
            view[...] = fills[spec.name].pad
        row = 0
        for array in arrays:
            if signature.is_batched:
                end = row + array.shape[0]
                view[(slice(row, end), *(slice(size) for size in array.shape[1:]))] = array
                row = end
            else:
                view[tuple(slice(size) for size in array.shape)] = array
    return staged
