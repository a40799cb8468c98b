"""Random blocks under random policies: `pytest --fuzz 20000` runs more cases, `--fuzz-seed 7` one of them again."""

import logging
from collections import Counter

import pytest
from fuzz.cases import USES, check
from fuzz.operators import EXPRESSIONS, STATEMENTS
from fuzz.programs import generate

BATCH = 50
EVERY_BATCH = ("gradients", "retain", "recompute", "offload", "bits", "lossy", *USES)


def pytest_generate_tests(metafunc):
    if "seeds" in metafunc.fixturenames:
        one, count = (metafunc.config.getoption(name) for name in ("--fuzz-seed", "--fuzz"))
        starts = range(0, count, BATCH)
        batches = [[one]] if one is not None else [range(start, min(start + BATCH, count)) for start in starts]
        metafunc.parametrize("seeds", batches, ids=[f"{batch[0]}-{batch[-1]}" for batch in batches])


@pytest.fixture
def quiet(uncollected):
    """Without a line of log for each call that takes another course, and without the collector."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.filterwarnings("ignore")
def test_exact_or_bounded_and_to_the_byte(seeds, quiet):
    features, failures = Counter(), []
    for seed in seeds:
        try:
            features += check(seed)
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, "\n\n".join([f"{len(failures)} of {len(seeds)} cases fail", *failures])
    if len(seeds) == BATCH:
        assert not [name for name in EVERY_BATCH if not features[name]], features
        assert features["gradients"] >= 0.7 * BATCH
        assert features["not recorded"] <= 0.3 * BATCH


@pytest.mark.filterwarnings("ignore")
def test_every_operator_and_kind_of_argument_occurs():
    features = Counter()
    for seed in range(600):
        features.update(generate(seed).features.keys())
    others = ("tied", "frozen", "unused parameter", "leaf", "computed", "transposed", "part", "same")
    returns = [f"returns {form}" for form in ("one", "tuple", "dict", "others")]
    expected = (*EXPRESSIONS, *STATEMENTS, *others, *returns)
    assert not [name for name in expected if features[name] < 5], features
