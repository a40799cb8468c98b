import numpy as np
import pytest
import torch

from ds_adacc.kernels import make_codec


def oracle(rows, group_size, half):
    """Codes (rows, channels) and scales (runs, channels), each run of each channel by the formula."""
    codes = np.zeros(rows.shape, int)
    scales = []
    for start in range(0, len(rows), group_size):
        run = slice(start, start + group_size)
        scales.append([])
        for channel in range(rows.shape[1]):
            group = rows[run, channel]
            scale = (group.max() if group.max() > -group.min() else group.min()) / np.float32(-half)
            inverse = np.float32(1) / scale if scale else np.float32(0)
            codes[run, channel] = np.clip(np.rint(group * inverse), -half, half - 1)
            scales[-1].append(scale)
    return codes, np.array(scales, np.float32)


@pytest.mark.matrix
@pytest.mark.parametrize("group_size", [2, 6, 1000])
@pytest.mark.parametrize("name", ["channel", "channel8"])
def test_payload_and_result_are_the_formula_to_the_bit(kit, name, shape, dtype, group_size):
    x = kit.sample(name, shape, dtype)
    channels = shape[-1] if shape else 1
    codec = make_codec(name, backend="reference", group_size=group_size)
    codes, scales = oracle(x.float().view(-1, channels).numpy(), group_size, codec.width.half)
    payload = codec.compress(x)
    assert payload[0].tolist() == kit.stored(codes.reshape(-1).tolist(), codec.width)
    assert payload[1].numpy().tobytes() == scales.tobytes()
    expected = codes.astype(np.float32) * scales.repeat(group_size, 0)[: len(codes)]
    assert torch.equal(codec.decompress(payload, x.shape, dtype), torch.tensor(expected).to(dtype).view(shape))


def test_a_loud_channel_does_not_drown_the_others(kit):
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    x[:, 5] *= 1000
    quiet = torch.arange(64) != 5
    by_channel = kit.restore(kit.build("channel", x.shape, 128), x)
    by_group = kit.restore(kit.build("group", x.shape, 128), x)
    assert kit.relative_error(x[:, quiet], by_channel[:, quiet]) == pytest.approx(0.103, abs=0.003)
    assert kit.relative_error(x[:, quiet], by_group[:, quiet]) > 0.9
