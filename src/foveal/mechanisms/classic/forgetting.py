"""Forgetting attention: softmax attention with a forget gate per token."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from foveal.call import Backend, Call, Result
from foveal.engines.softmax import SoftmaxAttention, eager, native
from foveal.engines.softmax.backends import run_native
from foveal.spec import Cost, Input, Limit, Paper
from foveal.state import ChainedState, KeyValueState, State

LEAST = -1e3  # exp of it is 0 beside 1, however the scores differ; sums of it keep digits for the tokens after


@dataclass(frozen=True)
class Forgetting(SoftmaxAttention, name="forgetting"):
    r"""Lower each score by how much was forgotten since its key.

    .. math::
        o_t = \sum_{j \le t} \mathrm{softmax}_j\left(q_t^\top k_j / \sqrt{K} + \sum_{l=j+1}^{t} \log f_l\right) v_j

    with :math:`\log f_t = \texttt{log\_decay}_t`, which the paper takes as logsigmoid of a projection.  Gates of 1 are
    softmax attention, a constant gate is ALiBi with a slope of its own; no positions are needed.  The sum up to t is
    the same for a whole row and cancels, so only a bias per key is left.  It is summed in float64 and kept in fp32,
    which leaves scores an error of a ten-millionth of the sum since the call began; for its sake gates below
    :math:`e^{-1000}` count as :math:`e^{-1000}`.  Keys that stand before the first query came without gates and among
    themselves count as not forgotten.  The paper's optional output gate, norms and token shift belong to the layer.
    """

    aliases: ClassVar[tuple[str, ...]] = ("fox", "forgetting_transformer", "forgetting_attention")
    paper: ClassVar[Paper] = Paper(
        "2503.02130",
        "Forgetting Transformer: Softmax Attention with a Forget Gate",
        "Lin, Nikishin, He, Courville",
        2025,
    )
    cost: ClassVar[Cost] = Cost(train="T * T / 2 * (K + V)", decode="T * (K + V)", state="T * (K + V + 1)")
    inputs: ClassVar[dict[str, Input]] = {"log_decay": Input("B H T", high=0.0, doc="natural log of the forget gate")}
    causal_modes: ClassVar[tuple[bool, ...]] = (True,)
    limits: ClassVar[tuple[Limit, ...]] = (
        Limit(
            {},
            "softmax",
            inputs=lambda x: ({"log_decay": torch.zeros_like(x["log_decay"])}, {}),
            why="gates of 1 forget nothing",
        ),
    )

    def backends(self, call: Call) -> list[Backend]:
        why = "in half precision it would round the sums of the gates"
        return [
            Backend("native", functools.partial(run_native, self), native.why_not(self, call)),
            Backend("torch", functools.partial(eager.run, self)),
            Backend("sdpa", functools.partial(eager.sdpa, self), why),
        ]

    def check_state(self, state: State, call: Call, rows: int) -> None:
        if not isinstance(state, ChainedState) or len(state.parts) != 2:
            raise self.fail("initial_state", type(state).__name__, "a state of the same mechanism")
        super().check_state(state.parts[0], call, rows)

    def run(self, call: Call) -> Result:
        if call.top_left:
            raise self.fail("causal", "'top-left'", "True: the gates belong to the last keys")
        T, S = call.q.shape[2], call.k.shape[2]
        both = min(T, S)  # the last queries stand beside the last keys
        gates = call.inputs["log_decay"].double().clamp(min=LEAST)[..., T - both :]
        forgotten = pad(gates.cumsum(-1), (S - both, 0))  # since the call began, [B, H, S]
        cache, lost = call.state.parts if isinstance(call.state, ChainedState) else (None, None)
        bias = -forgotten
        if isinstance(lost, KeyValueState):
            bias = torch.cat((lost.k[..., 0].double(), bias), -1)
        dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
        added = bias.to(dtype)[:, :, None] if call.bias is None else bias.to(dtype)[:, :, None] + call.bias
        result = super().run(call.replace(state=cache, bias=added if bias.shape[-1] else None, inputs={}))
        state, lse = result.state, result.lse
        if isinstance(state, KeyValueState):
            # what each key will have lost when the next call begins, as a cache of keys without values
            after = (bias + forgotten[..., -1:] if S else bias).to(dtype)[..., None]
            state = ChainedState((state, KeyValueState(after, after[..., :0], state.padding)))
        if lse is not None:
            lse = lse + pad(forgotten[..., S - both :], (T - both, 0)).to(lse.dtype)
        return Result(result.output, state, lse)

    def definition(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, visible: Tensor, log_decay: Tensor
    ) -> Tensor:
        T, S = len(q), len(k)
        o = []
        for t in range(T):
            keys = [j for j in range(S) if visible[t, j]]
            if not keys:
                o.append(torch.zeros_like(v[:1].sum(0)))
                continue
            here = S - T + t  # the query's place among the keys; the gate of key j is that of query j - (S - T)
            F = torch.stack([log_decay[max(j + 1 - S + T, 0) : here + 1 - S + T].sum() for j in keys])
            o.append((scale * k[keys] @ q[t] + F).softmax(0) @ v[keys])
        return torch.stack(o)
