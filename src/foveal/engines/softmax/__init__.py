"""Softmax attention over all visible keys, exact, with score and mask functions as terms.

.. math::
    o_t = \\sum_{j \\in V_t} \\frac{\\exp(s_{tj})}{\\sum_{i \\in V_t} \\exp(s_{ti}) + \\exp(z_h)} v_j,
    \\qquad s_{tj} = f(\\mathrm{scale}\\; q_t^\\top k_j) + b_{tj}

The derivation of the tiled form stands in the README beside this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from foveal.call import Backend, Call, Positions
from foveal.engines.softmax import backends
from foveal.spec import Mechanism
from foveal.state import ChainedState, KeyValueState, State

ScoreMod = Callable[[Tensor, Positions], Tensor]
MaskMod = Callable[[Positions], Tensor]


class SoftmaxAttention(Mechanism):
    """Base of mechanisms that weigh every visible key by a softmax.  Override the terms that differ from plain."""

    engine: ClassVar[str] = "softmax"
    forms: ClassVar[tuple[str, ...]] = ("parallel", "chunked")
    causal_modes: ClassVar[tuple[bool, ...]] = (True, False)

    @property
    def shift_invariant(self) -> bool:
        """Whether scores do not depend on distances, so that keys that nobody sees may be cut out between others."""
        return self.score_mod() is None

    def score_mod(self, **inputs: Tensor) -> ScoreMod | None:
        """Change of the scaled scores [B, H, T, S], or None for none."""
        return None

    def score_terms(self, heads: int) -> tuple[float, list[float] | None] | None:
        """The score function as a soft cap (0: none) and a slope of the distance per head (None: none), which compiled
        kernels know; None if it is something else.
        """
        return (0.0, None) if type(self).score_mod is SoftmaxAttention.score_mod else None

    def mask_mod(self, **inputs: Tensor) -> MaskMod | None:
        """Which keys may be seen beside causality, :meth:`reach` and the user's mask, or None for all."""
        return None

    def sink_logits(self, **inputs: Tensor) -> Tensor | None:
        """The logit z [H] that takes part in every row's sum without a value, or None."""
        return None

    def reach(self) -> tuple[int | None, int | None]:
        """How many positions before and after its own a query can see at most; None is no limit."""
        return None, None

    def always_visible(self) -> int:
        """How many of the first keys stay visible beyond the reach."""
        return 0

    def variables(self) -> dict[str, Any]:
        """Adds ``seen``: how many keys a causal query can see at most."""
        before, always = self.reach()[0], self.always_visible()
        if before is None or (always and not self.shift_invariant):
            return super().variables() | {"seen": float("inf")}
        return super().variables() | {"seen": before + 1 + always}

    def backends(self, call: Call) -> list[Backend]:
        """The compiled kernel, torch's SDPA and our tiled form in torch operations."""
        return backends.backends(self, call)

    def check_state(self, state: State, call: Call, rows: int) -> None:
        """Refuse a state of another engine or of other shapes."""
        if self.carried:
            if not isinstance(state, ChainedState) or len(state.parts) != 2:
                raise self.fail("initial_state", type(state).__name__, "a state of the same mechanism")
            state, tags = state.parts
            if not isinstance(tags, KeyValueState) or tags.k.shape[-1] != len(self.carried):
                raise self.fail("initial_state", type(tags).__name__, "a state of the same mechanism")
        if not isinstance(state, KeyValueState):
            raise self.fail("initial_state", type(state).__name__, "KeyValueState")
        for name, mine, new in (("keys", state.k, call.k), ("values", state.v, call.v)):
            have, want = (mine.shape[0], mine.shape[1], mine.shape[3]), (rows, new.shape[1], new.shape[3])
            if have != want:
                raise self.fail("initial_state", f"{name} with (B, G, width) = {have}", want)
