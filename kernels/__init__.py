"""Codecs that shrink activations. This package knows nothing of blocks, plans or DeepSpeed."""

import difflib

from torch import Tensor

from . import reference
from .codec import Codec, Payload
from .reference import channel_scores, is_two_valued, rank_outliers

__all__ = [
    "BACKENDS",
    "CODECS",
    "Codec",
    "Payload",
    "channel_scores",
    "is_two_valued",
    "make_codec",
    "rank_outliers",
]

CODECS = ("group", "token", "channel", "asymmetric", "outlier", "bits")
BACKENDS = ("reference",)


def make_codec(name: str, *, backend: str, group_size: int, channels: Tensor | None = None) -> Codec:
    """Return the codec `name` of `backend`.

    `group_size`: elements (for "channel": rows) that share a scale; even; "token" and "bits" have no use for it.
    `channels`: the outlier channels, int64 (capacity,), for "outlier" and for no other codec.

    Raises ValueError for a name or backend that does not exist, an odd group size, or channels that are missing
    or out of place.
    """
    _check_choice("codec", name, CODECS)
    _check_choice("backend", backend, BACKENDS)
    if (name == "outlier") != (channels is not None):
        raise ValueError(f"channels are for the codec 'outlier', which needs them; got {channels} for {name!r}")
    return reference.make(name, group_size, channels)


def _check_choice(kind: str, value: str, valid: tuple[str, ...]) -> None:
    if value in valid:
        return
    nearest = difflib.get_close_matches(value, valid, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"unknown {kind} {value!r}{hint} (valid: {', '.join(map(repr, valid))})")
