"""A mechanism of your own, complete in one file: ``foveal check examples/my_mechanism.py`` certifies it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveal import Cost, Input, Limit, Paper
from foveal.engines.recurrence import Recurrence, Terms


@dataclass(frozen=True)
class MyMechanism(Recurrence, name="my_mechanism"):
    r"""Forget the past at a rate that every token sets for the whole head.

    .. math::
        S_t = \gamma_t S_{t-1} + k_t v_t^\top, \qquad o_t = S_t^\top q_t / \sqrt{K}

    with :math:`\gamma_t = \exp(\texttt{log\_decay}_t / \tau)`.  Gates of 1 are linear attention without normaliser.

    Args:
        temperature: tau; the higher, the longer the memory.

    Raises:
        ValueError: if ``temperature`` is not above 0.
    """

    paper: ClassVar[Paper] = Paper(
        "2405.05254", "You Only Cache Once: Decoder-Decoder Architectures for Language Models", "Sun et al.", 2024
    )
    cost: ClassVar[Cost] = Cost(train="T * (K * V + 64 * (K + V))", decode="K * V", state="K * V")
    inputs: ClassVar[dict[str, Input]] = {"log_decay": Input("B H T", high=0.0, doc="natural log of the forget gate")}
    limits: ClassVar = (
        Limit(
            {},
            "linear",
            {"feature_map": "identity", "normalize": False},
            inputs=lambda x: ({"log_decay": torch.zeros_like(x["log_decay"])}, {}),
            why="gates of 1 forget nothing",
        ),
    )

    temperature: float = 16.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise self.fail("temperature", self.temperature, "a number above 0")

    def terms(self, q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor) -> Terms:
        return Terms(read=q, write=k, value=v, log_decay=log_decay[..., None] / self.temperature)

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, log_decay: Tensor) -> Tensor:
        S = v.new_zeros(k.shape[-1], v.shape[-1])
        o = []
        for t in range(len(q)):
            S = (log_decay[t] / self.temperature).exp() * S + torch.outer(k[t], v[t])
            o.append(scale * S.T @ q[t])
        return torch.stack(o)
