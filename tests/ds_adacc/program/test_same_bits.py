"""Tensors are compared bit by bit and piece by piece: no step takes memory of the size of the whole."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_adacc.profile import codec_costs, probe
from ds_adacc.profile.memory_trace import MemoryTrace
from ds_adacc.program.same_bits import DEVICE_PIECE, PIECE, all_same_bits, as_bytes, checksum, pieces, same_bits
from ds_adacc.record.replayable.uninitialised import PATTERNS, differs_only_where_unwritten

CPU = torch.device("cpu")
LARGE = 8 * PIECE + 3
DTYPES = (torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
DTYPES += (torch.complex128, torch.int64, torch.uint64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bit_makes_the_difference(dtype):
    a = torch.zeros(3, 5, dtype=dtype)
    b = a.clone()
    assert same_bits(a, b)
    as_bytes(b)[-1] = 1
    assert not same_bits(a, b)
    assert not same_bits(a.t(), a.clone().t().contiguous()), "the strides differ"


def test_nan_equals_nan_and_zeros_differ_in_their_sign():
    a = torch.tensor([math.nan, 0.0])
    assert same_bits(a, a.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.zeros(0), torch.zeros(0))


def test_all_pairs_must_be_alike_and_the_same():
    zeros, ones = torch.zeros(4, 4), torch.ones(4, 4)
    assert all_same_bits([])
    assert all_same_bits([(zeros, zeros.clone()), (ones, ones.clone())])
    assert not all_same_bits([(zeros, zeros), (ones, zeros)])
    assert not all_same_bits([(zeros, zeros[:2])])
    assert not all_same_bits([(zeros, zeros.half())])
    assert not all_same_bits([(zeros, zeros.t())])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device_the_host_waits_once():
    a = torch.randn(2 * DEVICE_PIECE + 3, device="cuda")
    b = a.clone()
    b[-1] += 1
    waits = 0

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal waits
            waits += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    with Counting():
        assert same_bits(a, a.clone())
        assert not same_bits(a, b)
    assert waits == 2


LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.t(),
    "with gaps": lambda t: t[:, ::2],
    "expanded": lambda t: t[:, :1].expand(-1, 50),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_difference_anywhere_is_found(layout):
    whole = torch.randn(3 * 1024, 1024)
    for place in (0, whole.numel() // 2, whole.numel() - 2):
        other = whole.clone()
        other.view(-1)[place] += 1
        a, b = LAYOUTS[layout](whole), LAYOUTS[layout](other)
        assert same_bits(a, LAYOUTS[layout](whole.clone()))
        assert same_bits(a, b) == torch.equal(a, b)


def test_pieces_are_parts_of_bounded_size_in_the_same_order():
    a, b = torch.arange(3 * PIECE).view(3, -1), torch.arange(3 * PIECE).view(3, -1).t().contiguous().t()
    parts = list(pieces(a, b))
    assert sum(one.numel() for one, _ in parts) == a.numel()
    assert max(one.numel() for one, _ in parts) <= PIECE
    assert all(torch.equal(one, other) for one, other in parts)


def peak(function, *args):
    with MemoryTrace(CPU) as trace:
        function(*args)
    return trace.peak


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_comparison_takes_memory_of_the_size_of_the_tensors(dtype):
    a = torch.randn(LARGE).to(dtype)
    b, most = a + 1, 4 * 8 * PIECE
    assert most < LARGE * 8
    assert peak(same_bits, a, a.clone()) <= a.nbytes, "the clone"
    assert peak(codec_costs._relative_error, a, b) <= most
    assert peak(probe._norm, a, b) <= most
    assert peak(probe.relative_error, [a, None], [b, b]) <= most
    assert peak(differs_only_where_unwritten, a, (a, a)) <= most


def test_norms_of_pieces_are_those_of_the_whole():
    a, b = torch.randn(LARGE).double(), torch.randn(LARGE).double()
    assert probe._norm(a) == pytest.approx(float(a.norm()), rel=1e-12)
    assert probe._norm(a, b) == pytest.approx(float((a - b).norm()), rel=1e-12)
    assert probe._norm(None) == probe._norm() == 0.0
    assert math.isnan(probe._norm(torch.tensor([math.nan]))) and probe._norm(torch.tensor([math.inf])) == math.inf


def test_unwritten_memory_is_told_in_every_piece():
    real = torch.randn(LARGE)
    replays = [real.clone() for _ in PATTERNS]
    for pattern, replay in zip(PATTERNS, replays, strict=True):
        as_bytes(replay[-2:]).fill_(pattern)
    assert differs_only_where_unwritten(real, tuple(replays))
    replays[0][5] += 1
    assert not differs_only_where_unwritten(real, tuple(replays))


def test_a_checksum_reads_what_lies_in_memory_once():
    x = torch.randn(3, 1)
    assert checksum(x.expand(3, 1 << 20)) == checksum(x)


def test_a_checksum_of_a_view_that_is_conjugate_or_negative_is_that_of_its_numbers():
    z = torch.tensor([1 + 2j, 3 - 4j, -5 + 6j, 7 + 8j])
    assert checksum(z.conj()) == checksum(z.conj().resolve_conj()) != checksum(z)
    assert checksum(torch._neg_view(z.real)) == checksum(-z.real.clone())


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.int64, torch.bool, torch.bfloat16])
def test_a_checksum_tells_one_element_from_another(dtype):
    x = torch.zeros(8192, dtype=dtype)
    found = [checksum(x)]
    for place in (0, 1, 8191):
        changed = x.clone()
        changed[place] = 1
        found.append(checksum(changed))
    found.append(checksum(torch.ones_like(x)))
    assert all(one != other for number, one in enumerate(found) for other in found[:number])
