"""Every law holds for every cache policy."""

import pytest

from foveal.testing.policy import cases

CASES = list(cases())


@pytest.mark.parametrize(("law", "spec"), [(law, spec) for _, law, spec in CASES], ids=[name for name, _, _ in CASES])
def test_law(law, spec):
    law(spec)
