import itertools

import pytest
import torch

from ds_adacc.kernels.reference.quantized import pack, to_codes, unpack
from ds_adacc.kernels.reference.tiles import Block, blocks, tiles
from ds_adacc.kernels.width import INT4, INT8


def test_two_codes_share_a_byte_the_first_in_the_low_nibble():
    out = torch.empty(3, dtype=torch.uint8)
    pack(torch.tensor([-8, 7, 0, -1, 3], dtype=torch.int8), out, INT4)
    assert [f"{byte:02x}" for byte in out.tolist()] == ["f0", "78", "0b"]


def test_every_pair_of_codes_survives():
    codes = torch.tensor(list(itertools.product(range(-8, 8), repeat=2)), dtype=torch.int8).view(-1)
    packed = torch.empty(256, dtype=torch.uint8)
    pack(codes, packed, INT4)
    assert packed.unique().numel() == 256
    assert torch.equal(unpack(packed, 512, INT4), codes)
    assert torch.equal(unpack(packed, 511, INT4), codes[:-1])


def test_a_wide_code_is_a_byte():
    codes, packed = torch.arange(-128, 128, dtype=torch.int8), torch.empty(256, dtype=torch.uint8)
    pack(codes, packed, INT8)
    assert packed.tolist() == list(range(256))
    assert torch.equal(unpack(packed, 256, INT8), codes)


def test_rounding_is_to_the_nearest_with_halves_to_even():
    values = torch.tensor([-9.0, -8.5, -7.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 6.5, 7.49, 7.5, 8.0])
    assert to_codes(values, INT4).tolist() == [-8, -8, -8, -2, -2, 0, 0, 2, 2, 6, 7, 7, 7]
    values = torch.tensor([-129.0, -128.5, -127.5, -0.5, 1.5, 126.5, 127.49, 127.5, 128.0])
    assert to_codes(values, INT8).tolist() == [-128, -128, -128, 0, 2, 126, 127, 127, 127]


def test_blocks_end_with_a_shorter_run():
    assert blocks(10, 4, 3) == [Block(2, 4, 3), Block(1, 2, 3)]
    assert blocks(8, 4, 3) == [Block(2, 4, 3)]
    assert blocks(3, 4, 1) == [Block(1, 3, 1)]
    assert blocks(0, 4, 1) == blocks(5, 4, 0) == []


@pytest.mark.parametrize("chunk", [1, 10, 100, 1 << 18])
@pytest.mark.parametrize(("rows", "length", "channels"), [(1, 2, 1), (1000, 6, 1), (77, 7, 1), (50, 4, 3), (9, 4, 101)])
@pytest.mark.parametrize("width", [INT4, INT8])
def test_pieces_cover_everything_once_at_whole_bytes(rows, length, channels, chunk, width, monkeypatch):
    monkeypatch.setattr("ds_adacc.kernels.reference.tiles.CHUNK", chunk)
    element = byte = group = 0
    for tile in tiles(blocks(rows, length, channels)):
        codes = width.code_slice(tile.elements)
        assert (tile.elements.start, codes.start, tile.groups.start) == (element, byte, group)
        runs, size, lanes = tile.shape
        assert tile.elements.stop - element == runs * size * lanes
        assert runs * size * lanes <= max(chunk, 2 * length * channels) + length * channels
        element, byte, group = tile.elements.stop, codes.stop, tile.groups.stop
        assert byte == -(-element * width.bits // 8) == width.code_bytes(element)
    assert element == rows * channels
    assert group == -(-rows // length) * channels
