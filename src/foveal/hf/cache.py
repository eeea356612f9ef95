"""transformers' cache with layers that evict or select by a policy of ours."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin

from foveal.engines.cache import Eviction, PageSummary, Policy, Selection, take
from foveal.hf.models import move

Rotation = Callable[[], tuple[Tensor, bool]]  # asked at each move: some models change frequencies with the length

ROOM = 32  # entries


class PolicyLayer(CacheLayerMixin):  # type: ignore[misc]
    """The keys and values of one layer under a policy.

    ``update`` appends, as transformers expects; the attention function then calls :meth:`settle`, which knows the
    queries and the padding that ``update`` is not told.
    """

    is_sliding = False
    is_compileable = False

    def __init__(self, policy: Policy, number: int, rotation: Rotation | None, notify: Callable[..., None]):
        super().__init__()
        self.policy, self.number, self.rotation, self.notify = policy, number, rotation, notify
        self.real: Tensor | None = None  # bool [B, n]
        self.positions: Tensor | None = None  # true positions, [B, G, n]
        self.past: Tensor | None = None  # running scores, [B, G, n]
        self.tokens: Tensor | None = None  # real tokens seen, [B]
        self.summary = PageSummary(policy.page) if isinstance(policy, Selection) else None
        self.memory: tuple[Tensor, Tensor] | None = None  # what keys and values lie in, where it has room for more
        self.seen = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Start empty, with the batch, heads and widths of the first keys."""
        self.device, self.dtype = key_states.device, key_states.dtype
        B, G = key_states.shape[:2]
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.real = torch.zeros(B, 0, dtype=torch.bool, device=self.device)
        self.positions = torch.zeros(B, G, 0, dtype=torch.long, device=self.device)
        self.tokens = torch.zeros(B, dtype=torch.long, device=self.device)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the keys and values of a call and return all that are held."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._append(key_states, value_states)
        self.seen += key_states.shape[2]
        self.notify(self)
        return self.keys, self.values

    def _append(self, keys: Tensor, values: Tensor) -> None:
        """Put new entries behind the others; where tokens add up one by one, memory grows by ROOM of them at a time."""
        n, count = self.keys.shape[2], keys.shape[2]
        drops = isinstance(self.policy, Eviction) and self.policy.while_decoding
        if count > 1 or drops or torch.is_grad_enabled():
            self.keys, self.values = torch.cat((self.keys, keys), 2), torch.cat((self.values, values), 2)
            self.memory = None
            return
        if self.memory is None or self.memory[0].shape[2] == n or not _writable(self.memory[0]):
            space = (0, 0, 0, ROOM)
            self.memory = pad(self.keys, space), pad(self.values, space)
        for memory, new in zip(self.memory, (keys, values), strict=True):
            memory[:, :, n : n + 1] = new
        self.keys, self.values = (memory[:, :, : n + 1] for memory in self.memory)

    def admit(self, padding: Tensor | None, count: int) -> Tensor:
        """Take note of which of the ``count`` newest tokens exist; returns which of all slots do, bool [B, n]."""
        assert self.real is not None
        assert self.positions is not None
        assert self.tokens is not None
        B, G = self.keys.shape[:2]
        new = torch.ones(B, count, dtype=torch.bool, device=self.device) if padding is None else padding[:, -count:]
        place = self.tokens[:, None] + new.cumsum(1) - 1
        self.real = torch.cat((self.real, new), 1)
        self.positions = torch.cat((self.positions, place[:, None].expand(B, G, count)), 2)
        self.tokens = self.tokens + new.sum(1)
        if self.summary is not None:
            self.summary.append(self.keys[:, :, self.keys.shape[2] - count :], place, new)
        return self.real

    def settle(self, queries: Tensor, scale: float) -> None:
        """Evict down to the budget, after attention has read everything."""
        policy = self.policy
        if not isinstance(policy, Eviction):
            return
        assert self.real is not None
        assert self.tokens is not None
        assert self.positions is not None
        limit = policy.limit(self.tokens)
        full = bool((self.real.sum(1) > limit).any())
        accumulates = policy.observes() is None
        if (queries.shape[2] == 1 and not policy.while_decoding) or not (full or accumulates):
            return
        queries = self._observed(policy, queries)
        past = None
        if accumulates and self.past is not None:
            past = pad(self.past, (0, self.keys.shape[2] - self.past.shape[2]))
        scores = policy.score(self.keys, self.values, queries, real=self.real, scale=scale, past=past)
        self.past = scores if accumulates else None
        if not full:
            return
        kept = policy.keep(scores, self.real, limit)
        gap = (self.real.sum(1) - limit).clamp(min=0)
        self.keys, self.values, self.memory = kept.take(self.keys), kept.take(self.values), None
        self.positions = kept.take(self.positions)
        self.past = kept.take(scores) if accumulates else None
        self.real = kept.real
        if policy.slots:
            self._close_gap(gap, policy.guarded(limit)[0])

    def _observed(self, policy: Eviction, queries: Tensor) -> Tensor:
        """The latest queries that the policy looks at."""
        assert self.real is not None
        wanted = policy.observes()
        if wanted is None:
            return queries
        if wanted and not bool(self.real[:, -1].all()):
            row = int((~self.real[:, -1]).nonzero()[0])
            raise ValueError(
                f"attention_mask: row {row} ends in padding, expected padding in front: {policy.name} looks at the "
                "last queries (or pass use_cache=False)"
            )
        return queries[:, :, max(queries.shape[2] - wanted, 0) :]

    def _close_gap(self, gap: Tensor, sinks: Tensor) -> None:
        """Rotate the sinks forward by the number of tokens dropped behind them, so that slots are positions."""
        assert self.rotation is not None
        assert self.real is not None
        sink = (self.real.cumsum(1) <= sinks[:, None]) & self.real
        far = int(sink.any(0).sum() + (~self.real).any(0).sum())  # padding comes first
        first = self.keys[:, :, :far]
        moved = move(first, gap, *self.rotation())
        self.keys[:, :, :far] = moved.where(sink[:, None, :far, None], first)

    def pages(self, queries: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """What a decode step reads under a selecting policy: slots [B, G, n], and which exist if not all do.

        None is everything.
        """
        policy = self.policy
        if self.summary is None or not isinstance(policy, Selection) or queries.shape[2] != 1:
            return None
        assert self.tokens is not None
        assert self.real is not None
        assert self.summary.low is not None
        assert self.summary.high is not None
        p, S = policy.page, self.keys.shape[2]
        limit = policy.limit(self.tokens)
        count = (limit + p - 1) // p
        if self.number < policy.dense_layers() or int(count.max()) * p >= S:
            return None
        most = int(count.max())
        chosen = policy.select(queries[:, :, 0], self.summary.low, self.summary.high, count=most)
        if int(count.min()) < most:  # rows with a smaller share read fewer pages
            chosen = self._fewer(policy, queries, chosen, count)
        place = (chosen[..., None] * p + torch.arange(p, device=chosen.device)).flatten(-2)
        exists = (place >= 0) & (place < self.tokens[:, None, None])
        slot = place.clamp(0, S - 1)
        if not bool(self.real.all()):  # real tokens first, in their order
            order = torch.argsort((~self.real).to(torch.int8), dim=1, stable=True)
            slot = order[:, None].expand(-1, slot.shape[1], -1).gather(2, slot)
        held = int(exists.sum(-1).max())
        if bool(exists[..., :held].all()):  # tokens that do not exist yet come last: the newest page's
            return slot[..., :held], None
        return slot, exists

    def read(self, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values in the slots [B, G, n], and of no others."""
        keys, values = (self.keys, self.values) if self.memory is None else self.memory
        return take(keys, slot), take(values, slot)

    def _fewer(self, policy: Selection, queries: Tensor, chosen: Tensor, count: Tensor) -> Tensor:
        assert self.summary is not None
        assert self.summary.low is not None
        assert self.summary.high is not None
        rows = []
        for b, n in enumerate(count.tolist()):
            low, high = self.summary.low[b : b + 1], self.summary.high[b : b + 1]
            own = policy.select(queries[b : b + 1, :, 0], low, high, count=n)
            rows.append(pad(own, (chosen.shape[-1] - own.shape[-1], 0), value=-1))
        return torch.cat(rows)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask that transformers would build."""
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens seen, not entries kept: rotary positions and attention masks go on from it."""
        return self.seen

    def get_max_length(self) -> int:
        """There is no maximum."""
        return -1

    def __deepcopy__(self, memo: dict[int, Any]) -> PolicyLayer:
        """A copy that reports to the same session, so that one compressed prompt can be asked many questions."""
        twin = PolicyLayer(self.policy, self.number, self.rotation, self.notify)
        shared = {"policy", "rotation", "notify"}
        twin.__dict__.update({n: copy.deepcopy(x, memo) for n, x in vars(self).items() if n not in shared})
        return twin

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        self.memory = None
        for name in ("keys", "values", "real", "positions", "past", "tokens"):
            x = getattr(self, name)
            if x is not None:
                setattr(self, name, change(x))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows ``beam_idx`` of the batch in that order."""
        if self.is_initialized:
            self.batch_select_indices(beam_idx.to(self.device))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices`` of the batch in that order."""
        self._each(lambda x: x[indices])
        if self.summary is not None:
            self.summary.index_select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        if self.is_initialized:
            self.batch_select_indices(torch.arange(len(self.keys), device=self.device).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget everything."""
        self.__init__(self.policy, self.number, self.rotation, self.notify)  # type: ignore[misc]

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: evicted entries cannot come back."""
        if tokens_to_remove:
            raise NotImplementedError(f"{self.policy.name}: a compressed cache cannot be cut back to an earlier token")

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that keys, values and page summaries hold."""
        pages = [] if self.summary is None else [self.summary.low, self.summary.high]
        return storage([self.keys, self.values, *pages])


def _writable(x: Tensor) -> bool:
    """Whether a tensor may be written to here: one made in inference mode not outside of it."""
    return torch.is_inference_mode_enabled() or not x.is_inference()


def storage(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the distinct memory behind tensors: a view of a larger tensor counts as all of it."""
    memory = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if x is not None}
    return sum(memory.values())


def layer_nbytes(layer: CacheLayerMixin) -> int:
    """Bytes that the keys and values of one layer really hold."""
    if not layer.is_initialized:
        return 0
    return layer.nbytes if isinstance(layer, PolicyLayer) else storage([layer.keys, layer.values])


def nbytes(cache: Cache) -> int:
    """Bytes that the keys and values of any transformers cache really hold."""
    return sum(map(layer_nbytes, cache.layers))


class PolicyCache(Cache):  # type: ignore[misc]
    """A cache whose full-attention layers follow a policy; sliding layers keep transformers' own.

    Args:
        layers: one cache layer per decoder layer.
    """

    def __init__(self, layers: list[CacheLayerMixin]) -> None:
        super().__init__(layers=layers)
        self.peak_nbytes = 0
        self._held = [0] * len(layers)  # bytes of each layer when last looked at
        self._latest = 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Append the keys and values of a call and return all that are held."""
        result = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        begins = layer_idx <= self._latest
        # since the last update only the layer of that update has changed, unless a new call begins
        for n in range(len(self.layers)) if begins else (self._latest, layer_idx):
            self._held[n] = layer_nbytes(self.layers[n])
        self._latest = layer_idx
        self.peak_nbytes = max(self.peak_nbytes, sum(self._held))
        return result

    @property
    def nbytes(self) -> int:
        """Bytes that keys, values and summaries hold now."""
        return nbytes(self)

    @property
    def lengths(self) -> list[Tensor]:
        """Entries that each row and key head holds, one [B, G] per layer."""
        found = []
        for layer in self.layers:
            if isinstance(layer, PolicyLayer) and layer.real is not None:
                found.append(layer.real.sum(1, keepdim=True).expand(-1, layer.keys.shape[1]))
            elif layer.is_initialized:
                B, G, n, _ = layer.keys.shape
                found.append(torch.full((B, G), n))
            else:
                found.append(torch.zeros(0, 0, dtype=torch.long))
        return found
