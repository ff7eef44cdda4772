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
    items = group.items
    everything = [spec.name for spec in signature.outputs]
    if len(items) == 1 and items[0].sizes == group.sizes:
        yield items[0], {name: outputs[name] for name in requests[items[0].place].outputs or everything}
        return
    batch = signature.index(BATCH) if signature.is_batched else None
    for name, array in outputs.items() if batch is not None else ():
        if array.ndim == 0 or array.shape[0] != group.sizes[batch or 0]:
            raise RunError(
                f"output '{name}' has shape {list(array.shape)} for {group.sizes[batch or 0]} rows; "
                "set max_batch_size: 0 if its first axis is not the batch"
            )
    row = 0
    for item in items:
        rows = None
        if batch is not None:
            rows = slice(row, row + item.sizes[batch])
            row = rows.stop
        found = {}
        for name in requests[item.place].outputs or everything:
            axes = rules.axes.get(name)
            found[name] = outputs[name][rows] if rows and not axes else _slice(outputs[name], item, axes or {}, rows)
        yield item, found


def _slice(array: Array, item: Item, axes: Mapping[int, int], rows: slice | None) -> Array:
    index = [slice(item.sizes[axes[axis]]) if axis in axes else slice(None) for axis in range(array.ndim)]
    if rows is not None:
        index[0] = rows
    return np.ascontiguousarray(array[tuple(index)]) if array.ndim else array
