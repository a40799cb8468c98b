"""The functions of torch that are collectives."""

_MODULE = "torch.distributed.distributed_c10d"
_NAMES = frozenset(
    {"all_reduce", "all_gather", "all_to_all", "broadcast", "reduce", "reduce_scatter", "gather", "scatter", "barrier"}
    | {"all_gather_into_tensor", "_all_gather_base", "all_to_all_single", "reduce_scatter_tensor"}
    | {"_reduce_scatter_base", "all_reduce_coalesced", "all_gather_coalesced", "all_gather_object", "gather_object"}
    | {"broadcast_object_list", "scatter_object_list", "monitored_barrier", "send", "recv", "isend", "irecv"}
)


def is_collective(module: str, name: str) -> bool:
    """Whether a function of this name, of this Python module, is one. Sends and receives count: they wait as well."""
    return module == _MODULE and name in _NAMES
