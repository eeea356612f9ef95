r"""Local linear regression of values on keys around each query, weighted by a softmax.

.. math::
    o_t = \bar v_t + \mathrm{Cov}_t(v, k)\, (\mathrm{Cov}_t(k, k) + \lambda I)^{-1} (q_t - \bar k_t)

with means and covariances under the softmax weights of row t.  Scores, masks, positions and the cache of keys and
values are those of the softmax engine.  The derivation stands in the README beside this file.
"""

from __future__ import annotations

import functools
from typing import ClassVar

from torch import Tensor

from foveal.call import Backend, Call
from foveal.engines.regression import eager
from foveal.engines.softmax import SoftmaxAttention


class LocalRegression(SoftmaxAttention):
    """Base of mechanisms that fit a line through the weighted keys.  Implement :meth:`ridge` and ``definition``."""

    engine: ClassVar[str] = "regression"

    def ridge(self, **inputs: Tensor) -> Tensor:
        """The penalty of the slope beside weights that sum to 1, broadcastable to [B, H, T, 1], above 0."""
        raise NotImplementedError

    def solver(self, key_width: int, eps: float) -> tuple[int, float]:
        """Most iterations of conjugate gradients, and the relative residual that ends them."""
        return 2 * key_width, eps

    def backends(self, call: Call) -> list[Backend]:
        """The torch forms, which run every call without a log-sum-exp."""
        why = "a regression has no log-sum-exp: its weights depend on all keys of a row" if call.want_lse else None
        return [Backend("torch", functools.partial(eager.run, self), why)]
