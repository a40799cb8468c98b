"""Which codecs may hold a value, and the making of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ds_adacc import planner
from ds_adacc.config import AdaccConfig, ConfigError, codecs_for
from ds_adacc.execute.bound_policy import compression
from ds_adacc.execute.course import flat
from ds_adacc.execute.holders import Compressed
from ds_adacc.execute.pinned_pool import pinned
from ds_adacc.kernels import Codec, choose_backend, make_codec, rank_outliers, separates_outliers, why_unusable
from ds_adacc.log import get_logger
from ds_adacc.profile.timer import Timer
from ds_adacc.program.recording import RecordedValue, Recording

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_LEAST_OFFLOADED = 1 << 20  # bytes of the value; a smaller copy takes as long as this one
_SAMPLE = 64 << 20  # bytes that are copied to time the link to the host


class CodecMaker:
    """Makes the codecs that the section asks for, of the backend that suits the device.

    Rule P3: stochastic rounding draws from a `generator` of its own, with the seed of torch's. What the program draws
    (its dropout masks, say) does not depend on what is compressed.
    """

    def __init__(self, config: AdaccConfig) -> None:
        self.generator = torch.Generator().manual_seed(torch.initial_seed())
        self._config = config
        self._offers: Mapping[str, tuple[str, ...]] = codecs_for(config)
        self._backends: dict[torch.device, str] = {}
        self._byte_seconds: dict[torch.device, tuple[float, float]] = {}

    def on_offer(self, value: RecordedValue, recording: Recording) -> tuple[str, ...]:
        """The names of the codecs that may hold `value`; `planner.OFFLOAD` if it, or their payloads, may be offloaded.

        A value that holds Inf or NaN, or that a mask may fill with Inf or a huge number, is never quantised. A small
        value, or one on the CPU, is never offloaded.
        """
        saved = value.index in recording.saved or value.origin == "input"
        if not saved or not value.owned or value.dynamic or value.overwritten or not value.geometry.is_dense:
            return ()
        if value.geometry.numel == 0:
            return ()
        names = self._offers[value.role]
        quantisable = value.geometry.dtype in _FLOATS and value.moderate
        offered = tuple(n for n in names if (value.two_valued if n == "bits" else quantisable))
        offloads = self._config.offload and value.device == "cuda" and value.nbytes >= _LEAST_OFFLOADED
        return (*offered, planner.OFFLOAD) if offloads else offered

    def make(self, name: str, device: torch.device, channels: torch.Tensor | None) -> Codec:
        """The codec `name`; `channels` are the outlier channels, for a codec that separates them."""
        return make_codec(
            name,
            backend=self._backend(device),
            group_size=self._config.group_size,
            channels=channels if separates_outliers(name) else None,
            scale=self._config.scale,
            rounding=self._config.rounding,
            generator=self.generator,
        )

    def outliers(self, root: torch.Tensor, value: RecordedValue) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `rank_outliers`. The scores are those of equation 1 in the Adacc paper."""
        return rank_outliers(flat(value).view(root), self._config.zscore_threshold, backend=self._backend(root.device))

    def byte_seconds(self, device: torch.device) -> tuple[float, float]:
        """Seconds for each byte of a copy to the host, and of one back. Timed once for each device."""
        if device not in self._byte_seconds:
            timer, here = Timer(device), torch.empty(_SAMPLE, dtype=torch.uint8, device=device)
            host = pinned(here.nbytes)
            out = timer(lambda: host.copy_(here, non_blocking=True))
            self._byte_seconds[device] = out / _SAMPLE, timer(lambda: here.copy_(host, non_blocking=True)) / _SAMPLE
        return self._byte_seconds[device]

    def _backend(self, device: torch.device) -> str:
        if device not in self._backends:
            backend, reason = choose_backend(device) if self._config.backend == "auto" else (self._config.backend, "")
            if reason and not (device.type == "cpu" and torch.accelerator.is_available()):  # few values are on the host
                get_logger().warning("codecs on %s run slower than they could: %s", device, reason)
            self._backends[device] = backend
        return self._backends[device]


def refuse_unusable(config: AdaccConfig) -> None:
    """Raises ConfigError if the codecs of the section's `backend` cannot run here."""
    if config.backend != "auto" and (reason := why_unusable(config.backend)):
        wrong = f"adacc.backend = {config.backend!r}: these codecs cannot run here"
        raise ConfigError(f"{wrong}: {reason}; or take 'auto'")


def empty_holder(name: str, value: RecordedValue, tensor: torch.Tensor, codecs: CodecMaker) -> Compressed:
    """A holder for `value` with the codec `name`. Outlier channels are those of `tensor`, the recorded value."""
    channels = None
    if separates_outliers(name):
        order, count, _ = codecs.outliers(tensor, value)
        channels = order[: int(count)]
    codec = codecs.make(name, tensor.device, channels)
    return Compressed(compression(value, codec, uses=1))
