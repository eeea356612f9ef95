"""The laws that every mechanism and policy must obey, public so that anybody can certify a spec of their own.

>>> for case, error in foveal.testing.certify("my_mechanism.py"):
...     print(case, "holds" if error is None else error)
"""

from __future__ import annotations

from foveal.testing.certify import certify

__all__ = ["certify"]
