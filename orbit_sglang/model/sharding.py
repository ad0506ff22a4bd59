"""This module says what one rank of a server holds of each linear, under SGLang's tensor parallelism."""

from sglang.srt.layers.linear import ColumnParallelLinear, LinearBase, QKVParallelLinear, RowParallelLinear

from orbit_kernels.linears.share import Share
from orbit_sglang.model.naming import part_names


def shares(module: str, layer: LinearBase) -> dict[str, Share]:
    """Returns this rank's share of each linear behind one of SGLang's.

    They are given by Hugging Face name, in the order of their rows.
    """
    parts = part_names(module)
    columns = range(layer.input_size)
    if isinstance(layer, RowParallelLinear):
        held = _piece(layer.input_size_per_partition, layer.tp_rank)
        return {parts[0]: Share(shape=(layer.output_size, len(columns)), rows=range(layer.output_size), columns=held)}
    if not isinstance(layer, ColumnParallelLinear):  # every rank has all of it
        rows = getattr(layer, "output_sizes", [layer.output_size])
        return {part: Share.whole(part_rows, len(columns)) for part, part_rows in zip(parts, rows, strict=True)}
    # Key and value heads that are fewer than the ranks are held by several of them.
    replicas = [1, *[layer.num_kv_head_replicas] * 2] if isinstance(layer, QKVParallelLinear) else [1] * len(parts)
    return {
        part: Share(
            shape=(rows * layer.tp_size // copies, len(columns)),
            rows=_piece(rows, layer.tp_rank // copies),
            columns=columns,
        )
        for part, rows, copies in zip(parts, _part_rows(layer, len(parts)), replicas, strict=True)
    }


def _part_rows(layer: ColumnParallelLinear, num_parts: int) -> list[int]:
    """Returns the rows of each part on one rank."""
    return list(layer.output_partition_sizes) if num_parts > 1 else [layer.output_size_per_partition]


def _piece(size: int, index: int) -> range:
    return range(index * size, (index + 1) * size)
