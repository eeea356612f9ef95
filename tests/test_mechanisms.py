"""Every law holds for every mechanism."""

import pytest

from foveal.testing.mechanism import cases, compiles

COMPILED = ("softmax", "moba", "gated_delta_rule", "hgrn", "performer")  # one per engine, and one with random features


def marks(law, spec):
    """Tracing takes seconds: the quick loop traces one mechanism per engine, the whole run all of them."""
    return [pytest.mark.slow] if law is compiles and spec.name not in COMPILED else []


@pytest.mark.parametrize(
    ("law", "spec"), [pytest.param(law, spec, id=name, marks=marks(law, spec)) for name, law, spec in cases()]
)
def test_law(law, spec):
    law(spec)
