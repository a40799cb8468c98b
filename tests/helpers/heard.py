"""The lines of the package's log, in processes where pytest does not keep them."""

import logging

from ds_adacc.log import get_logger


def heard(level=logging.NOTSET):
    """A list to which each line of this level or above is added from now on, as soon as it is logged."""
    lines, handler = [], logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())
    get_logger().addHandler(handler)
    return lines
