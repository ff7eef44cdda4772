"""Split a group's outputs into each request's own: its rows, without the padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .batch import Request
from .buckets import Group, Item
from .errors import RunError
from .providers.base import Array, HostArrays
from .signature import BATCH, Signature


@dataclass(frozen=True)
class OutputRules:
    """Which axis of each output follows which dimension: `axes[output][axis]` is a place in `Signature.dims`.

    Axis 0 follows the batch when the model is batched; the other rules are measured (preflight.py).
    """

    axes: Mapping[str, Mapping[int, int]]


def split(
    group: Group, outputs: HostArrays, requests: Sequence[Request], signature: Signature, rules: OutputRules
) -> Iterator[tuple[Item, HostArrays]]:
    """Each item's outputs, C-contiguous, in the group's order.

    Raises:
        RunError: an output has no row for each input row, so it cannot be split.
    """
    whole = len(group.items) == 1 and group.items[0].sizes == group.sizes
    batch = signature.index(BATCH) if signature.is_batched else None
    row = 0
    for item in group.items:
        wanted = requests[item.index].outputs or [spec.name for spec in signature.outputs]
        if whole:
            yield item, {name: outputs[name] for name in wanted}
            return
        end = row + (item.sizes[batch] if batch is not None else 0)
        found = {}
        for name in wanted:
            array = outputs[name]
            if batch is not None and (array.ndim == 0 or array.shape[0] != group.sizes[batch]):
                raise RunError(
                    f"output '{name}' has shape {list(array.shape)} for {group.sizes[batch]} rows; "
                    "set max_batch_size: 0 if its first axis is not the batch"
                )
            found[name] = _slice(array, item, rules.axes.get(name, {}), None if batch is None else slice(row, end))
        row = end
        yield item, found


def _slice(array: Array, item: Item, axes: Mapping[int, int], rows: slice | None) -> Array:
    index = [slice(item.sizes[axes[axis]]) if axis in axes else slice(None) for axis in range(array.ndim)]
    if rows is not None:
        index[0] = rows
    return np.ascontiguousarray(array[tuple(index)]) if array.ndim else array
