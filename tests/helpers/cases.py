"""Which cases of a test run: some are much like others, and run with `--all` only."""

import pytest


def further(*values, id=None):
    """A case that runs with `--all` only, for `pytest.mark.parametrize`."""
    return pytest.param(*values, id=id, marks=pytest.mark.further)


def cases_that_run(request, parameter):
    """The values of this parameter in the tests of the fixture's file that run, each once: ranks need try no others."""
    of_file = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    found = [item.callspec.params[parameter] for item in of_file if parameter in item.callspec.params]
    return list(dict.fromkeys(found))
