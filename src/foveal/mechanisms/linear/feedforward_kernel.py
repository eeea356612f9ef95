"""Linear attention whose feature map is a trained gated layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import elu, softplus

from foveal.engines.recurrence import Recur, Recurrence, Terms
from foveal.spec import Cost, Input, Limit, Paper


@dataclass(frozen=True)
class FeedforwardKernel(Recurrence, name="feedforward_kernel"):
    r"""Learn the feature map of linear attention as a small network with a positive output.

    .. math::
        o_t = \frac{\sum_j \phi(q_t)^\top \phi(k_j)\, v_j}{\sum_j \phi(q_t)^\top \phi(k_j)}, \qquad
        \phi(x) = \mathrm{act}\left((x W + b) \odot \sigma(x U)\right)

    One network per head serves q and k; without ``gate_weight`` U there is no gate.  With the identity as W and
    elu + 1 as activation it starts as the linear transformer.  ``scale`` cancels.  The paper compares several
    networks; its deeper ones, and its penalty that keeps W orthogonal, belong to the training around it.

    Args:
        features: M, columns of W; None for as many as q has channels.
        activation: act: ``"softplus"``, or ``"elu"`` for elu + 1.

    Raises:
        ValueError: if ``features`` is below 1 or ``activation`` is unknown.
    """

    aliases: ClassVar[tuple[str, ...]] = ("trainable_feedforward_kernel",)
    paper: ClassVar[Paper] = Paper(
        "2211.04076", "Linear Self-Attention Approximation via Trainable Feedforward Kernel", "Yorsh, Kovalenko", 2022
    )
    cost: ClassVar[Cost] = Cost(
        train="T * (features or K) * (V + 4 * K + 64)",
        decode="(features or K) * (V + 4 * K)",
        state="(features or K) * (V + 1)",
    )
    inputs: ClassVar[dict[str, Input]] = {
        "weight": Input("H K M", doc="W", optional=True, start="eye"),
        "bias": Input("H M", doc="b", optional=True, start=0.0),
        "gate_weight": Input("H K M", doc="U; absent, nothing is gated", optional=True),
    }
    causal_modes: ClassVar[tuple[bool, ...]] = (True, False)
    examples: ClassVar = ({}, {"features": 12, "activation": "elu"})
    limits: ClassVar = (Limit({"activation": "elu"}, "linear", why="the identity and no gate: features elu(x) + 1"),)

    features: int | None = None
    activation: str = "softplus"

    def __post_init__(self) -> None:
        if self.features is not None:
            self.require_int("features")
        self.require_choice("activation", ("elu", "softplus"))

    def widths(self, key_width: int) -> dict[str, int]:
        return {"M": self.features or key_width}

    def compute(self, recur: Recur, q: Tensor, k: Tensor, v: Tensor, **inputs: Tensor) -> Tensor:
        def phi(x: Tensor) -> Tensor:
            mapped = x @ inputs["weight"] + inputs["bias"][:, None]
            if "gate_weight" in inputs:
                mapped = mapped * (x @ inputs["gate_weight"]).sigmoid()
            return softplus(mapped) if self.activation == "softplus" else elu(mapped) + 1

        return recur(Terms(phi(q), phi(k), v, normalize=True))

    def definition(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        visible: Tensor,
        weight: Tensor,
        bias: Tensor,
        gate_weight: Tensor | None = None,
    ) -> Tensor:
        features = []
        for x in (q, k):
            y = torch.einsum("tk,km->tm", x, weight) + bias
            y = y if gate_weight is None else y / (1 + (-torch.einsum("tk,km->tm", x, gate_weight)).exp())
            features.append(
                torch.logaddexp(y, 0 * y) if self.activation == "softplus" else y.clamp(max=0).exp() + y.clamp(min=0)
            )
        score = features[0] @ features[1].mT * visible
        return score / score.sum(-1, keepdim=True) @ v
