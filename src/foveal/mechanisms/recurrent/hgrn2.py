"""HGRN2: a gated linear recurrence whose state is an outer product, with the forget gate in the place of the key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from foveal.engines.recurrence import Recurrence, Terms
from foveal.spec import Cost, Paper


@dataclass(frozen=True)
class HGRN2(Recurrence, name="hgrn2"):
    r"""Write into each channel exactly as much as it forgets.

    .. math::
        S_t = \mathrm{Diag}(f_t)\, S_{t-1} + (1 - f_t)\, v_t^\top, \qquad o_t = S_t^\top q_t / \sqrt{K}, \qquad
        f_t = \gamma + (1 - \gamma)\, \sigma(k_t)

    k is the pre-activation of the forget gate f, whose complement takes the place of the key; v is the paper's input i
    and q its output gate.  A lower bound :math:`\gamma` on the gate keeps memory long; the paper lets it rise with
    depth and learns it over all layers together, here it is a number per layer.  The paper has no scale, so pass
    ``scale=1.0`` for its models.

    Args:
        lower_bound: gamma, from 0 up to but not including 1.

    Raises:
        ValueError: if ``lower_bound`` is out of range.
    """

    paper: ClassVar[Paper] = Paper(
        "2404.07904", "HGRN2: Gated Linear RNNs with State Expansion", "Qin, Yang, Sun, Shen, Li, Sun, Zhong", 2024
    )
    cost: ClassVar[Cost] = Cost(train="T * (K * V + 64 * (K + V))", decode="K * V", state="K * V")
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"lower_bound": 0.6})

    lower_bound: float = 0.0

    def __post_init__(self) -> None:
        self.require_number("lower_bound", -1, 1, "a number from 0 up to but not including 1")
        if not 0 <= self.lower_bound < 1:
            raise self.fail("lower_bound", repr(self.lower_bound), "a number from 0 up to but not including 1")

    def terms(self, q: Tensor, k: Tensor, v: Tensor) -> Terms:
        # below -80 the sigmoid nears the smallest fp32 numbers, where its logarithm has no gradient
        forget = self.lower_bound + (1 - self.lower_bound) * k.clamp(min=-80).sigmoid()
        write = (1 - self.lower_bound) * (-k).sigmoid()
        return Terms(read=q, write=write, value=v, log_decay=forget.log())

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        f = self.lower_bound + (1 - self.lower_bound) / (1 + torch.exp(-k))
        S = v.new_zeros(k.shape[-1], v.shape[-1])
        o = []
        for t in range(len(q)):
            S = torch.diag(f[t]) @ S + torch.outer(1 - f[t], v[t])
            o.append(scale * S.T @ q[t])
        return torch.stack(o)
