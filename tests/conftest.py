"""Our log reaches pytest's capture whatever ran before."""

import logging

import pytest


@pytest.fixture(autouse=True)
def heard():
    from ds_adacc.log import get_logger

    get_logger().propagate = True
    yield
    logging.getLogger("ds_adacc").handlers.clear()
