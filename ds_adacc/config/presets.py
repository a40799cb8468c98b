"""The roles of values, and the codecs that each preset of "codecs" offers for them."""

from collections.abc import Mapping

ROLES = (
    "block_input",
    "linear",
    "layernorm",
    "gelu",
    "query",
    "key",
    "value",
    "attention",
    "softmax",
    "score",
    "dropout_mask",
    "statistic",
    "other",
)

_WITHOUT_OUTLIERS = {
    **dict.fromkeys(("block_input", "linear", "layernorm", "gelu", "attention", "other"), ("group",)),
    **dict.fromkeys(("query", "key", "value"), ("channel",)),
    **dict.fromkeys(("softmax", "score"), ("asymmetric",)),
    "dropout_mask": ("bits",),
}

# For each codec, itself and the others that suit the same data.
_CANDIDATES = {
    "group": ("outlier", "group", "asymmetric", "outlier8", "group8", "asymmetric8"),
    "channel": ("channel", "group", "channel8", "group8"),
    "asymmetric": ("asymmetric", "group", "asymmetric8", "group8"),
    "bits": ("bits",),
}

# In this order: every codec that suits a role, chosen by its measured error; section 3.2 of the Adacc paper, its
# ablation, its baseline "Quantization"; and what loses nothing. A role that a preset does not name is never compressed.
PRESETS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "auto": {r: _CANDIDATES[c[0]] for r, c in _WITHOUT_OUTLIERS.items()},
    "paper": {r: ("outlier",) if c == ("group",) else c for r, c in _WITHOUT_OUTLIERS.items()},
    "paper-no-outliers": _WITHOUT_OUTLIERS,
    "quantization": dict.fromkeys(ROLES, ("token",)),
    "none": {"dropout_mask": ("bits",)},
}

# These are there to be compared with: what they do to the gradient is the point.
UNBOUNDED = ("paper-no-outliers", "quantization")
