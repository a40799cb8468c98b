"""Which modules of a model are its blocks."""

import pytest
import torch
import transformers
import zoo
from torch import nn
from translator import Translator

from ds_adacc.config import ConfigError
from ds_adacc.runtime.find_blocks import find_blocks


def test_auto_finds_the_outermost_repeated_layers():
    found = find_blocks(Translator(), "auto")
    assert list(found) == ["encoder.0", "encoder.1", "decoder.layers.0", "decoder.layers.1", "decoder.layers.2"]


class Stage(nn.Module):
    """Layers of one width, after a layer that changes it from that of the stage before."""

    def __init__(self, width, depth=3):
        super().__init__()
        self.widen = nn.Linear(width // 2, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)) for _ in range(depth)
        )

    def forward(self, x):
        x = self.widen(x)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("stages", "found"),
    [
        ([Stage(4), Stage(8)], ["0.layers.0", "0.layers.1", "0.layers.2", "1.layers.0", "1.layers.1", "1.layers.2"]),
        ([Stage(4), Stage(8), Stage(8)], ["0", "1", "2"]),  # two are alike, as layers with experts are
        ([Stage(4, depth=1), Stage(8, depth=1)], ["0", "1"]),  # no repeated layers inside
        ([Stage(4), Stage(8, depth=1)], ["0", "1"]),  # as a layer with experts beside one without
        (
            [Stage(4, depth=1), Stage(8, depth=2), Stage(16, depth=2)],
            ["0", "1.layers.0", "1.layers.1", "2.layers.0", "2.layers.1"],
        ),
        ([Stage(4).layers, Stage(8).layers], ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]),  # lists have no forward
    ],
)
def test_auto_takes_the_layers_of_stages_that_differ_in_width(stages, found):
    assert list(find_blocks(nn.ModuleList(stages), "auto")) == found


@pytest.mark.parametrize(
    ("model", "layer", "count"),
    [
        ("swin", "SwinLayer", 12),
        ("convnext", "ConvNextLayer", 18),
        ("poolformer", "PoolFormerLayer", 12),  # in lists of lists
        ("mobilevit", "MobileViTLayer", 3),  # which are half transformer, half convolutions
        ("mixtral", "MixtralDecoderLayer", 32),
    ],
)
def test_auto_finds_the_layers_of_models_of_transformers(model, layer, count):
    with torch.device("meta"):
        found = find_blocks(transformers.AutoModel.from_config(transformers.AutoConfig.for_model(model)), "auto")
    assert [type(module).__name__ for module in found.values()].count(layer) == count


def test_auto_finds_layers_that_are_lists_of_their_parts():
    """As in x-transformers and vit-pytorch, where the model's forward takes each layer apart."""
    layers = nn.ModuleList(nn.ModuleList([zoo.BertBlock(), zoo.GPTBlock(), nn.LayerNorm(4)]) for _ in range(2))
    assert list(find_blocks(nn.ModuleDict({"layers": layers}), "auto")) == [
        *("layers.0.0", "layers.0.1"),
        *("layers.1.0", "layers.1.1"),
    ]


def test_auto_takes_modules_whose_forward_is_their_own_attribute():
    compiled = [torch.compile(zoo.BertBlock()) for _ in range(2)]
    scripted = [torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) for _ in range(2)]
    model = nn.Sequential(*compiled, *scripted, torch.jit.script(nn.GELU()), torch.jit.script(nn.GELU()))
    assert list(find_blocks(model, "auto")) == ["0", "1", "2", "3"]


def test_compiled_modules_are_of_the_classes_that_were_compiled():
    model = nn.Sequential(zoo.BertBlock(), torch.compile(zoo.BertBlock()), torch.compile(zoo.GPTBlock()))
    assert list(find_blocks(model, "auto")) == ["0", "1"]


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])
def test_a_convolution_under_weight_norm_has_one_matrix(norm):
    """As in EnCodec and HiFi-GAN."""
    layers = [nn.Sequential(norm(nn.Conv1d(4, 4, 3)), nn.ELU(), norm(nn.Conv1d(4, 4, 1))) for _ in range(2)]
    model = nn.Sequential(*layers, norm(nn.Conv1d(4, 4, 3)), norm(nn.Conv1d(4, 4, 3)))
    assert list(find_blocks(model, "auto")) == ["0", "1"]


def test_a_matrix_in_one_column_is_one():
    """As the weights of 4 bits of bitsandbytes, and those of a layer that begins with one feature."""
    packed = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8)) for _ in range(2)])
    for linear in (each for layer in packed for each in layer):
        linear.weight = nn.Parameter(torch.zeros(32, 1, dtype=torch.uint8), requires_grad=False)
    assert list(find_blocks(packed, "auto")) == ["0", "1"]
    narrow = nn.Sequential(*[nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 1)) for _ in range(2)])
    assert list(find_blocks(narrow, "auto")) == ["0", "1"]


def test_auto_takes_a_layer_that_is_an_attribute_too():
    model = nn.Module()
    model.first = zoo.BertBlock()
    model.layers = nn.ModuleList([model.first, zoo.BertBlock()])
    assert list(find_blocks(model, "auto")) == ["layers.0", "layers.1"]


def test_a_layer_in_two_containers_is_one_block():
    layers = [zoo.BertBlock(), zoo.BertBlock()]
    model = nn.Module()
    model.first, model.layers, model.encoder = layers[0], nn.ModuleList(layers), nn.Sequential(*layers)
    assert list(find_blocks(model, "auto")) == ["layers.0", "layers.1"]
    stages = [Stage(4, depth=2), Stage(8, depth=2)]
    model.stages, model.pyramid = nn.ModuleList(stages), nn.Sequential(*stages)
    assert list(find_blocks(model, "auto")) == [
        *("layers.0", "layers.1"),
        *("stages.0.layers.0", "stages.0.layers.1", "stages.1.layers.0", "stages.1.layers.1"),
    ]


def test_auto_finds_blocks_in_the_order_of_the_model():
    model = nn.Sequential(zoo.BertBlock(), zoo.GPTBlock(), zoo.BertBlock(), zoo.GPTBlock())
    assert list(find_blocks(model, "auto")) == ["0", "1", "2", "3"]


def test_classes_are_found_by_name():
    assert list(find_blocks(Translator(), ["LayerNorm"]))[-1] == "encoder.2"
    assert list(find_blocks(Translator(), ["Experts"])) == [f"decoder.layers.{i}" for i in range(3)]


def test_a_container_is_no_block_as_nothing_calls_it():
    with pytest.raises(ConfigError) as error:
        find_blocks(nn.ModuleList(zoo.BertBlock() for _ in range(2)), ["ModuleList"])
    assert str(error.value) == (
        "adacc.blocks = ['ModuleList']: modules of class 'ModuleList' have no forward, so nothing calls them; \"auto\" "
        "takes its repeated layers, BertBlock"
    )
