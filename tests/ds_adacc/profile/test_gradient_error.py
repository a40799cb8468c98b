"""Estimates of single values guide the planner; what it proposes is measured with all of its choices together."""

import math

import pytest
import torch
import zoo

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.planner import HOPELESS
from ds_adacc.profile.gradient_error import CodecErrors, alone, measure_codecs, measure_policy
from ds_adacc.runtime.runtime import Runtime


def met(name="gpt", codecs="auto", sharp=0.0):
    """What a runtime knows of a zoo block after its first forward and backward."""
    block, args, kwargs = zoo.example(name)
    if sharp:
        with torch.no_grad():
            bias = block.qkv.bias[zoo.WIDTH : 2 * zoo.WIDTH].view(-1, zoo.WIDTH // 4)
            bias[:, 0] += sharp
            bias[:, 1] -= sharp
    runtime = Runtime(load({"adacc": {"codecs": codecs, "memory_budget": 1.0}}), has_engine=True)
    zoo.loss_of(runtime.checkpoint(block, *args, **kwargs)).backward()
    (known,) = runtime.agreement.known_types.values()
    return known


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_each_value_is_measured_under_its_coarsest_codec(name):
    known = met(name)
    for index, costs in enumerate(known.profile.codecs):
        lossy = [cost for cost in costs if cost.error]
        assert (index in known.errors.coarsest) == bool(lossy)
        if lossy:
            codec, error, gradient_error = known.errors.coarsest[index]
            assert (codec, error) == max(((cost.codec, cost.error) for cost in lossy), key=lambda pair: pair[1])
            assert 0 < gradient_error < 1


def test_finer_codecs_err_less_in_proportion_and_lossless_ones_not_at_all():
    known = met("gpt")
    profile = known.errors.applied_to(known.profile)
    for index, costs in enumerate(profile.codecs):
        assert [cost.codec for cost in costs] == [cost.codec for cost in known.profile.codecs[index]]
        for cost in costs:
            if not cost.error:
                assert cost.gradient_error == 0
                continue
            _, error, gradient_error = known.errors.coarsest[index]
            assert cost.gradient_error == pytest.approx(gradient_error * cost.error / error)


def test_a_value_without_a_measured_error_is_offered_no_lossy_codec():
    known = met("gpt")
    index, (codec, error, _) = next(iter(known.errors.coarsest.items()))
    hopeless = CodecErrors({index: (codec, error, HOPELESS)})
    for errors in (CodecErrors(), hopeless):
        left = {cost.codec for costs in errors.applied_to(known.profile).codecs for cost in costs}
        assert left == {"bits"}


def test_a_value_that_several_operators_read_is_measured_once_without_replays(monkeypatch):
    known, asked = met("gpt"), []
    together = dict.fromkeys(range(3), ((0,), ()))
    monkeypatch.setitem(vars(known.profile.graph), "read_together", together)
    found = measure_codecs(lambda policy: asked.append(policy) or len(asked), known.profile, lambda policy: policy)
    lossy = [i for i, costs in enumerate(known.profile.codecs) if not all(cost.lossless for cost in costs)]
    assert 0 in lossy and len(asked) == len(lossy) + 1
    assert found.stale == dict.fromkeys(together, 2)


def test_so_it_is_where_a_policy_is_above_the_bound(monkeypatch):
    known, asked = met("gpt"), []
    profile = known.errors.applied_to(known.profile)
    lossy = next(cost.codec for cost in profile.codecs[0] if not cost.lossless)
    together = dict.fromkeys(range(3), ((0,), ()))
    monkeypatch.setitem(vars(profile.graph), "read_together", together)
    monkeypatch.setattr(planner, "stale_ops", lambda profile, policy: tuple(together))
    policy = alone(known.profile, 0, lossy)
    found = measure_policy(lambda policy: asked.append(policy) or 0.5, profile, policy, lambda policy: policy, 0.1)
    assert found.error == 0.5 and len(asked) == 3, "all together, the value alone, and without replays"


def test_attention_is_fragile_where_it_is_sharp():
    even, sharp = (max(met("gpt", sharp=sharp).errors.stale.values()) for sharp in (0.0, 40.0))
    assert even < 0.1 < 1e6 < sharp


def test_alone_replays_the_readers_on_the_lossy_value():
    known = met("gpt")
    profile, values = known.profile, known.recording.values
    (qkv,) = [value.index for value in values if value.role == "query"]
    consistent, stale = (alone(profile, qkv, "channel", replays=replays) for replays in (True, False))
    for policy in (consistent, stale):
        policy.check(profile)
        assert [policy.stores[value.index] for value in values if value.role == "query"] == ["channel"]
    assert planner.stale_ops(profile, consistent) == ()
    assert len(planner.stale_ops(profile, stale)) == 1


class Scripted:
    """A measurement that tells the error of a policy by what it compresses."""

    def __init__(self, together, alone):
        self.together, self.alone, self.asked = together, alone, []

    def __call__(self, policy):
        self.asked.append(policy)
        compressed = [v for v, store in enumerate(policy.stores) if store not in (None, planner.RETAIN)]
        return self.together if len(compressed) > 1 else self.alone[compressed[0]]


def test_a_policy_within_the_bound_is_measured_once():
    known = met("gpt")
    profile = known.errors.applied_to(known.profile)
    policy = planner.compress_policy(profile)
    measure = Scripted(0.05, {})
    found = measure_policy(measure, profile, policy, lambda chosen: chosen, max_error=0.1)
    assert (found.error, found.strictness, measure.asked) == (0.05, None, [policy])


def test_above_the_bound_each_value_is_measured_alone_and_what_is_not_explained_is_laid_on_all():
    known = met("gpt", codecs={"gelu": "group", "linear": "group"})
    profile = known.errors.applied_to(known.profile)
    policy = planner.compress_policy(profile)
    lossy = policy.lossy_values(profile)
    assert len(lossy) == 2
    estimates = {v: profile.codec(v, "group").gradient_error for v in lossy}
    single = {lossy[0]: 3 * estimates[lossy[0]], lossy[1]: estimates[lossy[1]] / 2}
    together = 2 * math.hypot(*single.values())
    found = measure_policy(Scripted(together, single), profile, policy, lambda chosen: chosen, max_error=together / 2)
    assert found.error == together
    factors = found.strictness.factors
    assert factors[lossy[0]] == pytest.approx(6) and factors[lossy[1]] == pytest.approx(1)
    assert planner.gradient_error(found.strictness.applied_to(profile), policy) == pytest.approx(together, rel=1e-6)


def test_nan_is_never_approved():
    known = met("gpt", codecs={"gelu": "group", "linear": "group"})
    profile = known.errors.applied_to(known.profile)
    policy = planner.compress_policy(profile)
    lossy = policy.lossy_values(profile)
    found = measure_policy(
        Scripted(HOPELESS, dict.fromkeys(lossy, HOPELESS)), profile, policy, lambda chosen: chosen, max_error=1e9
    )
    assert found.error == HOPELESS
    assert not any(cost.error for costs in found.strictness.applied_to(profile).codecs for cost in costs)
