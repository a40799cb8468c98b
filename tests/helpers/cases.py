"""Which cases of a test run: some are much like others, and run with `--all` only."""

import pytest


def further(*values, id=None):
    """A case that runs with `--all` only, for `pytest.mark.parametrize`."""
    return pytest.param(*values, id=id, marks=pytest.mark.further)


def parameters_that_run(request):
    """The parameters of each test of the fixture's file that runs, if it has any."""
    of_file = (item for item in request.session.items if item.path == request.path)
    return [item.callspec.params for item in of_file if hasattr(item, "callspec")]


def cases_that_run(request, parameter):
    """The values of this parameter in the tests of the fixture's file that run, each once: ranks need try no others."""
    return list(dict.fromkeys(each[parameter] for each in parameters_that_run(request) if parameter in each))
