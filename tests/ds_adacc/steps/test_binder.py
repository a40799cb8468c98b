"""A policy is tied to a block with codecs for the devices on which its values lie."""

from types import SimpleNamespace

import torch
import zoo
from recorded import profile_of, record

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.execute.variant import Variant
from ds_adacc.profile.codec_maker import CodecMaker
from ds_adacc.steps.binder import Binder


def test_a_value_on_the_host_gets_a_codec_for_the_host_in_a_model_on_an_accelerator(monkeypatch):
    block, args, kwargs = zoo.example("gpt")
    recording = record(block, args, kwargs)
    codecs = CodecMaker(load({"adacc": {"codecs": {"gelu": "group"}, "backend": "reference"}}))
    (index,) = [v.index for v in recording.values if codecs.on_offer(v, recording)]
    retained = planner.retain_policy(profile_of(recording)).stores
    policy = planner.Policy((*retained[:index], "group", *retained[index + 1 :]))
    binder, variant = Binder(codecs), Variant()
    variant.recording = recording
    binder.note_device(torch.device("cuda", 0))
    devices, make = [], codecs.make
    monkeypatch.setattr(
        codecs, "make", lambda name, device, channels: devices.append(device.type) or make(name, device, channels)
    )
    binder.bound_to_measure(variant, SimpleNamespace(capacity={}), policy)
    assert devices == ["cpu"]
