"""Kernel density attention: keys that hash with the query are read, the others estimated from samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from foveal.constant import constant
from foveal.engines.gather import Gather, Keys
from foveal.spec import Cost, Limit, Paper


@constant
def planes(seed: int, tables: int, bits: int, width: int) -> Tensor:
    """Normal vectors of random hyperplanes, [tables, bits, K] in float64."""
    return torch.randn(tables, bits, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uniform(seed: int, n: Tensor, i: Tensor) -> Tensor:
    """Numbers in [0, 1) that depend on three whole numbers alone, so that a token draws the same ones in any call."""
    x = (n * 0x9E3779B1 + i * 0x85EBCA77 + seed * 0xC2B2AE3D) & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x.double() / 2**32


@dataclass(frozen=True)
class KDE(Gather, name="kde"):
    r"""Read the keys that hash with the query, and let samples of all keys stand for the others.

    .. math::
        o_t = \frac{y_t(v)}{y_t(1)}, \qquad y_t(x) = \sum_{j \in H_t} e^{s_{tj}} x_j
        + \frac{n}{m} \sum_{j \in R_t \setminus H_t} e^{s_{tj}} x_j, \qquad s_{tj} = q_t^\top k_j / \sqrt{K}

    H are the latest keys on the query's side of all planes of a hash table; R has one key from each of m equal parts of
    the n keys in sight.  Whatever H is, y is an unbiased estimate of the sum over all keys, and its variance is that of
    the light keys alone; m >= n gives softmax exactly.  Softmax is a Gaussian kernel product, since factors that depend
    on one of q and k move into x and out of the sum; that its entries sum to O(n) is what makes few keys heavy.  The
    paper proves o(n^2) time by other data structures; this is its scheme with hyperplanes for hashes and at most
    ``candidates`` keys from a bucket, in O(n (m + tables * candidates)).

    Args:
        samples: m.
        candidates: most keys that a query reads from its bucket of a table.
        tables: hash tables.
        bits: hyperplanes of a table.
        seed: of hyperplanes and samples, the same for every head.

    Raises:
        ValueError: if a setting is no int or too small, or ``bits`` is above 32.
    """

    aliases: ClassVar[tuple[str, ...]] = ("kernel_density",)
    paper: ClassVar[Paper] = Paper(
        "2507.23539",
        "Improved Algorithms for Kernel Matrix-Vector Multiplication Under Sparsity Assumptions",
        "Indyk, Kapralov, Sheth, Wagner",
        2025,
    )
    cost: ClassVar[Cost] = Cost(
        train="T * ((min(samples, T) + tables * candidates) * (K + V) + 2 * tables * bits * K)",
        decode="(min(samples, T) + tables * candidates) * (K + V) + T * tables * bits * K",
        state="T * (K + V)",
    )
    causal_modes: ClassVar[tuple[bool, ...]] = (True, False)
    examples: ClassVar = (
        {"samples": 5, "candidates": 3, "tables": 2, "bits": 2},
        {"samples": 200, "candidates": 2, "tables": 1, "bits": 1},
    )
    limits: ClassVar = (Limit({"samples": 64}, "softmax", why="samples of everything are everything"),)

    samples: int = 64
    candidates: int = 16
    tables: int = 4
    bits: int = 6
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("samples", "candidates", "tables", "bits"):
            self.require_int(name)
        self.require_number("bits", 0, 32, "an int from 1 to 32")
        self.require_int("seed", least=0)

    def hashed(self, x: Tensor) -> Tensor:
        """The bucket of each vector in each table, [B, H, tables, T]."""
        normal = planes(self.seed, self.tables, self.bits, x.shape[-1]).to(x)
        side = (x @ normal.flatten(0, 1).mT).view(*x.shape[:-1], self.tables, self.bits) > 0
        bucket: Tensor = (side * 2 ** torch.arange(self.bits, device=x.device)).sum(-1)
        return bucket.mT.contiguous()

    def prepare(self, keys: Keys) -> tuple[Tensor, Tensor]:
        """Keys in the order of their buckets, and of their positions within each."""
        S = keys.k.shape[2]
        position = keys.position[:, None, None]
        place = self.hashed(keys.k) * (S + 1) + position
        found = place.masked_fill(position == S, 2**self.bits * (S + 1)).sort(-1)  # what does not exist comes last
        return found.values, found.indices

    def choose(
        self, q: Tensor, seen: Tensor, keys: Keys, prepared: tuple[Tensor, Tensor], **inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        B, H, S, _ = keys.k.shape
        T = q.shape[2]
        place, slot = prepared
        # heavy keys: the last ones before the query in its bucket
        bucket = self.hashed(q)
        after = torch.searchsorted(place, bucket * (S + 1) + seen[..., 0][:, :, None])
        near = after[..., None] - 1 - torch.arange(self.candidates, device=q.device)
        near, missing = near.clamp(min=0).flatten(-2), near.flatten(-2) < 0
        same = place.gather(-1, near) // (S + 1) == bucket.repeat_interleave(self.candidates, -1)
        heavy = slot.gather(-1, near).masked_fill(missing | ~same, S)
        heavy = heavy.view(B, H, self.tables, T, -1).transpose(2, 3).flatten(-2).contiguous().sort(-1).values
        again = heavy == pad(heavy, (1, 0), value=-1)[..., :-1]
        # samples: one from each part of the keys in sight, all of them if they are few
        m = self.samples
        i = torch.arange(min(m, S), device=q.device)
        drawn = ((i + uniform(self.seed, seen, i)) * seen / m).long().clamp(max=S - 1)
        every = seen <= m
        light = keys.slot[:, None, None].expand(B, 1, T, S).gather(-1, torch.where(every, i, drawn)).expand(B, H, T, -1)
        at = torch.searchsorted(heavy, light.contiguous()).clamp(max=heavy.shape[-1] - 1)
        stands_for = torch.where(every, (i < seen).double(), seen.double() / m).expand(B, H, T, -1)
        weight = torch.cat(((heavy < S) & ~again, stands_for * (heavy.gather(-1, at) != light)), -1)
        return torch.cat((heavy.clamp(max=S - 1), light), -1), weight

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, visible: Tensor) -> Tensor:
        sides = planes(self.seed, self.tables, self.bits, q.shape[-1]).to(q.dtype)
        o = []
        for t in range(len(q)):
            n, m = int(visible[t].sum()), self.samples
            H = set()
            for table in sides:
                bucket = [j for j in range(n) if ((table @ k[j] > 0) == (table @ q[t] > 0)).all()]
                H |= set(bucket[-self.candidates :])
            share = dict.fromkeys(H, 1.0)
            for i in range(min(m, n)):
                x = (n * 2654435761 + i * 2246822519 + self.seed * 3266489917) % 2**32
                x = (x ^ x >> 16) * 2146121005 % 2**32
                x = (x ^ x >> 15) * 2221713035 % 2**32
                u = (x ^ x >> 16) / 2**32
                j = i if n <= m else int((i + u) * n / m)
                if j not in H:
                    share[j] = share.get(j, 0.0) + max(n / m, 1.0)
            J = sorted(share)
            weight = (scale * k[J] @ q[t] + torch.tensor([share[j] for j in J], dtype=q.dtype).log()).softmax(-1)
            o.append(weight @ v[J])
        return torch.stack(o)
