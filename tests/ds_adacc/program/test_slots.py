"""What a slot says of a tensor that was written to after it was saved, and where a packed call runs."""

import pytest
import torch

from ds_adacc.program.slots import Retained, keep, run_packed


@pytest.mark.parametrize(
    ("slot_of", "what"), [(keep, "a saved tensor"), (lambda tensor: Retained.of("gelu0", tensor), "value gelu0")]
)
def test_a_write_after_the_forward_names_the_tensor_if_it_has_a_name(slot_of, what):
    tensor = torch.zeros(2, 3)
    slot = slot_of(tensor)
    tensor.add_(1)
    with pytest.raises(RuntimeError, match=rf"^{what} of shape \(2, 3\), needed for gradient computation, has been "):
        slot.unpack()


@pytest.mark.parametrize("were_on", [True, False])
def test_a_backward_within_a_packed_call_stays_on_its_thread(were_on):
    """On a GPU it would run on another one."""
    seen = []

    def run(error=None):
        seen.append(torch._C._is_multithreading_enabled())
        if error is not None:
            raise error
        return "done"

    with torch.autograd.set_multithreading_enabled(were_on):
        assert run_packed(keep, run) == "done"
        assert torch._C._is_multithreading_enabled() is were_on
        with pytest.raises(KeyboardInterrupt):
            run_packed(keep, lambda: run(KeyboardInterrupt()))
        assert torch._C._is_multithreading_enabled() is were_on
    assert seen == [False, False]
