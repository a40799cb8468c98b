"""Functions and operators of DeepSpeed's own, on two ranks: replayed or refused, and gradients as without."""

import pytest
from launch import told_by

pytestmark = pytest.mark.ranks


ranks = told_by("functions_worker")


@pytest.mark.parametrize(
    ("name", "replayed", "refused"),
    [
        ("ZeroLinear", {"LinearFunctionForZeroStage3"}, None),
        ("TiledMlp", {"mm", "relu", "cat"}, None),
        ("TiledCompute", {"mm", "relu", "cat"}, None),
        ("UlyssesAttention", {"_scaled_dot_product_flash_attention_for_cpu"}, "alltoall_base_"),
        ("Exchanged", set(), "dim_zero_all_to_all"),
        ("Experts", set(), "alltoall_base_"),
        ("VocabularyLoss", {"ne", "clamp"}, "allreduce_"),
        ("DroppedTokens", {"topk", "gelu"}, "alltoall_base_"),
        ("Unnamed", set(), "mean_of_ranks"),
    ],
)
def test_replayed_or_refused_and_never_wrong(ranks, name, replayed, refused):
    for rank in ranks:
        seen = rank[name]
        assert seen["same"] and not seen["diverged"]
        assert replayed | {"tanh"} <= set(seen["replayed"])
        assert seen["collectives"][0] == seen["collectives"][1]
        if refused is None:
            assert not seen["refused"]
        else:
            assert seen["refused"][refused] == "a collective"


def test_what_takes_objects_is_told(ranks):
    for name, remark in {
        "TiledMlp": "TiledMLP: it takes a TiledMlp, so its operators are recorded one by one",
        "Experts": "_AllToAll: it takes a ProcessGroup, so its operators are recorded one by one",
    }.items():
        assert ranks[0][name]["remarks"] == [remark]
