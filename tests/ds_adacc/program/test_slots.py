"""What a slot says of a tensor that was written to after it was saved."""

import pytest
import torch

from ds_adacc.program.slots import Retained, keep


@pytest.mark.parametrize(
    ("slot_of", "what"), [(keep, "a saved tensor"), (lambda tensor: Retained.of("gelu0", tensor), "value gelu0")]
)
def test_a_write_after_the_forward_names_the_tensor_if_it_has_a_name(slot_of, what):
    tensor = torch.zeros(2, 3)
    slot = slot_of(tensor)
    tensor.add_(1)
    with pytest.raises(RuntimeError, match=rf"^{what} of shape \(2, 3\), needed for gradient computation, has been "):
        slot.unpack()
