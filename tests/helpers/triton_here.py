"""Triton on this machine: its kernels run compiled on a CUDA device, and in Triton's own interpreter without one."""

import importlib.util
import os

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_TRITON = importlib.util.find_spec("triton") is not None
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton asks for it when it is imported

needs_triton = pytest.mark.skipif(
    not (HAS_TRITON and (DEVICE == "cuda" or IS_INTERPRETED)),
    reason="needs Triton, and a CUDA device or TRITON_INTERPRET=1",
)


@pytest.fixture(scope="session", autouse=True)
def interpreter():
    """The interpreter lacks two things that compiled kernels have: floats with methods, and CUDA's libdevice."""
    if not (HAS_TRITON and IS_INTERPRETED):
        yield
        return
    from triton import language
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    def converted(arg):
        if isinstance(arg, float):
            handle = interpreter.TensorHandle(np.array([arg], np.float32), language.float32)
            return language.tensor(handle, language.float32)
        return convert(arg)

    convert = interpreter._implicit_cvt
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_implicit_cvt", converted)
        # Looked up as late as this: the interpreter exchanges it while a kernel runs.
        patch.setattr(libdevice, "rsqrt", lambda x: language.math.rsqrt(x))
        yield
