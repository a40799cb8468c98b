"""The profile of a block: what an earlier run has measured, or else measured now and kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch.autograd import _profiler_enabled

from ds_adacc import planner
from ds_adacc.config import AdaccConfig
from ds_adacc.profile.block_graph import block_graph
from ds_adacc.profile.cache import ProfileCache, describe, profile_key
from ds_adacc.profile.codec_maker import CodecMaker
from ds_adacc.profile.function_code import digest_of
from ds_adacc.profile.measure import measure
from ds_adacc.program.recording import Recording
from ds_adacc.record.capture import Capture


class Profiler:
    """Measures a block with `codecs`, unless the resumed run or the `cache` has its profile.

    `measured`: how often it had to measure. `remembered`: the profiles, by digest, of the run that this one resumes.
    """

    def __init__(self, config: AdaccConfig, codecs: CodecMaker, cache: ProfileCache | None) -> None:
        self.measured = 0
        self.remembered: Mapping[str, planner.Profile] = {}
        self._config = config
        self._codecs = codecs
        self._cache = cache

    def profile(self, recording: Recording, captured: Capture) -> planner.Profile:
        """The block's profile. The tensors of the captured call must still be alive."""
        remembered = self.remembered.get(recording.digest)
        if remembered is not None and _is_of(remembered, recording):
            return remembered
        if self._cache is None or recording.graphs:  # nothing on disk tells how a graph was compiled
            return self._measure(recording, captured)
        device = captured.tensors.device
        offers = [self._codecs.on_offer(value, recording) for value in recording.values]
        code = digest_of(op.func.cls for op in recording.ops if op.is_function)
        key = profile_key(recording.digest, code, offers, device, self._config)
        profile = self._cache.load(key)
        if profile is None or not _is_of(profile, recording):
            profile = self._measure(recording, captured)
            if not _profiler_enabled():  # Rule P6
                self._cache.save(key, profile, describe(device))
        return profile

    def _measure(self, recording: Recording, captured: Capture) -> planner.Profile:
        self.measured += 1
        return measure(recording, captured, self._codecs)


def _is_of(profile: planner.Profile, recording: Recording) -> bool:
    """Whether the profile is this block's, with its sizes and roles, which data may have decided (Rule P7)."""
    graph = block_graph(recording)
    ops = [(op.inputs, op.outputs, op.replayable) for op in profile.graph.ops]
    values = tuple(replace(value, lent=False) for value in profile.graph.values)  # which no recording tells
    return values == graph.values and ops == [(op.inputs, op.outputs, op.replayable) for op in graph.ops]
