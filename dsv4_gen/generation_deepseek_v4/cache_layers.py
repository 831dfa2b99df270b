"""The static cache layers: what one layer of DeepSeek-V4 keeps, in tensors that are allocated once.

    DeepseekV4SlidingStaticLayer        keys                                  a ring of tokens
    DeepseekV4HCAStaticLayer            keys, compressor                      one entry per `rate` tokens
    DeepseekV4CSAStaticLayer            keys, compressor, indexer             the indexer chooses among the entries

A layer does not know how many tokens it holds: the cache has the lengths, and hands each call's positions down as a
`Chunk`. See `positions.py` for where a position lives.
"""

from math import ceil

import torch
from einops import rearrange
from torch import Tensor
from torch.utils._pytree import register_pytree_node
from transformers.cache_utils import CacheLayerMixin
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from .positions import Chunk, ring_positions, ring_slots, touchable_windows

SLIDING = "sliding_attention"
HCA = "heavily_compressed_attention"
CSA = "compressed_sparse_attention"


def ring_size(tokens: int, max_rollback: int, max_cache_len: int) -> int:
    """Slots of a ring that must still hold `tokens` after `max_rollback` more were written and taken back."""
    return min(tokens + max_rollback, max_cache_len)


def compressed_len(max_cache_len: int, rate: int) -> int:
    """Entries that `max_cache_len` tokens can touch, the open window's candidate included."""
    return ceil(max_cache_len / rate)


def needs_indexer(config: DeepseekV4Config, max_compressed_len: int) -> bool:
    """Whether a query may have to choose: with `index_topk` entries or fewer, the choice is always all of them."""
    return max_compressed_len > config.index_topk


class CompressorState:
    """What a compressor remembers: the source tokens of its open window (and of the one before), and its entries.

    Args:
        rate: source tokens per window.
        head_dim: width of an entry.
        overlaps: whether an entry also pools the window before its own (CSA): source tokens are twice as wide, Ca
            and Cb side by side, and the ring holds two windows.
        max_compressed_len: entries that fit.
        max_cache_len, max_rollback: as in `DeepseekV4StaticCache`.

    Attributes:
        source_kv, source_gate: `(batch, ring + 1, head_dim)`, twice as wide with overlap. A ring of source tokens.
        entries: `(batch, max_compressed_len + 1, head_dim)`, entry `w` in slot `w`.
    """

    def __init__(
        self, rate: int, head_dim: int, overlaps: bool, max_compressed_len: int, max_cache_len: int, max_rollback: int
    ):
        self.rate, self.head_dim, self.overlaps = rate, head_dim, overlaps
        self.max_compressed_len = max_compressed_len
        self.ring_size = ring_size(2 * rate if overlaps else rate, max_rollback, max_cache_len)
        self.source_kv: Tensor | None = None
        self.source_gate: Tensor | None = None
        self.entries: Tensor | None = None

    def allocate(self, batch_size: int, dtype: torch.dtype, device: torch.device) -> None:
        width = 2 * self.head_dim if self.overlaps else self.head_dim
        self.source_kv = new_buffer(batch_size, self.ring_size, width, dtype, device)
        self.source_gate = new_buffer(batch_size, self.ring_size, width, dtype, device)
        self.entries = new_buffer(batch_size, self.max_compressed_len, self.head_dim, dtype, device)

    def update_source(self, kv: Tensor, gate: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Write a call's source tokens, and return those of the windows that it touches.

        Args:
            kv, gate: `(batch, seq, width)`, the projected tokens.

        Returns:
            Their `kv` and `gate` by window, `(batch, windows, rate, width)`; with overlap the window before the
            first touched one comes first. Tokens that have not arrived are arbitrary, but finite: only the open
            window has such, and nobody sees its entry.
        """
        slots = ring_slots(chunk, self.ring_size)
        window_before = 1 if self.overlaps else 0
        first = chunk.held // self.rate - window_before
        windows = touchable_windows(kv.shape[1], self.rate) + window_before
        positions = (first * self.rate)[:, None] + torch.arange(windows * self.rate, device=kv.device)

        if kv.shape[1] == 1:  # the ring is long enough to hold every token of the touched window
            write(self.source_kv, slots, kv)
            write(self.source_gate, slots, gate)
            index, source_kv, source_gate = positions % self.ring_size, self.source_kv, self.source_gate
        else:  # read before writing: a chunk may overwrite tokens that its own first windows need
            column = (positions - chunk.held[:, None] + chunk.padding[:, None]).clamp(max=kv.shape[1] - 1)
            arrived_before = positions < chunk.held[:, None]
            index = torch.where(arrived_before, positions % self.ring_size, self.ring_size + 1 + column)
            source_kv = torch.cat([self.source_kv, kv.to(self.source_kv.dtype)], dim=1)
            source_gate = torch.cat([self.source_gate, gate.to(self.source_gate.dtype)], dim=1)
            write(self.source_kv, slots, kv)
            write(self.source_gate, slots, gate)
        by_window = "b (w m) d -> b w m d"
        return (
            rearrange(read(source_kv, index), by_window, m=self.rate),
            rearrange(read(source_gate, index), by_window, m=self.rate),
        )

    def update_entries(self, entries: Tensor, windows: Tensor) -> None:
        """Write `entries`, `(batch, windows, head_dim)`, each in its window's slot (-1: to spare)."""
        write(self.entries, windows, entries)

    def overlap_kv(self, lengths: Tensor) -> Tensor:
        """`(batch, rate, head_dim)`, Ca of each row's last closed window: what upstream keeps as `overlap_kv`."""
        return self._overlap(self.source_kv, lengths)

    def overlap_gate(self, lengths: Tensor) -> Tensor:
        """`(batch, rate, head_dim)`, the gate of `overlap_kv`: what upstream keeps as `overlap_gate`, less its bias."""
        return self._overlap(self.source_gate, lengths)

    def _overlap(self, source: Tensor, lengths: Tensor) -> Tensor:
        last_closed = lengths[:, None] // self.rate - 1
        positions = last_closed * self.rate + torch.arange(self.rate, device=lengths.device)
        return read(source, positions % self.ring_size)[..., : self.head_dim]

    def tensors(self) -> dict[str, Tensor]:
        """The state by attribute name."""
        return {name: getattr(self, name) for name in ("source_kv", "source_gate", "entries")}


class DeepseekV4SlidingStaticLayer(CacheLayerMixin):
    """The last `sliding_window` tokens of a layer, in a ring. The other two kinds of layer build on it.

    Args:
        config: the model's config.
        max_cache_len: tokens that a row can hold.
        max_rollback: tokens that can be taken back: the ring is that much longer.

    Attributes:
        keys: `(batch, 1, ring + 1, head_dim)`. Keys are values in DeepSeek-V4, so `values` is this same tensor.
    """

    kind = SLIDING
    is_compileable = True
    is_sliding = True
    compressor: CompressorState | None = None
    indexer: CompressorState | None = None

    def __init__(self, config: DeepseekV4Config, max_cache_len: int, max_rollback: int = 0):
        super().__init__()
        self.sliding_window = config.sliding_window
        self.head_dim = config.head_dim
        self.max_cache_len = max_cache_len
        self.is_croppable = max_rollback > 0
        self.ring_size = ring_size(config.sliding_window, max_rollback, max_cache_len)

    def states(self) -> dict[str, CompressorState]:
        """The compressors of this layer by attribute name."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """All state of this layer by name, such as `keys` or `compressor.entries`."""
        tensors = {"keys": self.keys}
        for owner, state in self.states().items():
            tensors |= {f"{owner}.{name}": tensor for name, tensor in state.tensors().items()}
        return tensors

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate all state for the batch, dtype and device of `key_states`, `(batch, 1, any, head_dim)`."""
        self.batch_size, self.dtype, self.device = key_states.shape[0], key_states.dtype, key_states.device
        keys = new_buffer(self.batch_size, self.ring_size, self.head_dim, self.dtype, self.device)
        self.keys = self.values = mark_static(keys[:, None])
        for state in self.states().values():
            state.allocate(self.batch_size, self.dtype, self.device)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, chunk: Chunk | None = None, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Write a call's keys, and return the keys that its queries may see, with their positions.

        Args:
            key_states: `(batch, 1, seq, head_dim)`.
            value_states: the same tensor; here for upstream's signature, as is `kwargs`.
            chunk: the tokens' positions.

        Returns:
            `(batch, keys, head_dim)` and `(batch, keys)`: for a single token the ring; for a chunk, which may be
            longer than the ring, what the ring held before it and then the chunk itself.

        Raises:
            RuntimeError: the call does not come from this package's forward, which alone knows the positions.
        """
        if chunk is None:
            raise RuntimeError(
                "A DeepseekV4StaticCache works with dsv4_gen's forward only. Call `dsv4_gen.register()` to install it."
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        ring, new_keys = self.keys[:, 0], key_states[:, 0]
        slots = ring_slots(chunk, self.ring_size)
        if new_keys.shape[1] == 1:
            write(ring, slots, new_keys)
            return ring[:, :-1], ring_positions(chunk.last, self.ring_size)
        keys = torch.cat([ring[:, :-1], new_keys.to(ring.dtype)], dim=1)
        positions = torch.cat([ring_positions(chunk.held - 1, self.ring_size), chunk.positions], dim=1)
        write(ring, slots, new_keys)
        return keys, positions

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many window keys `update` returns for a call, and at which offset."""
        return self.ring_size + (query_length if query_length > 1 else 0), 0

    def get_seq_length(self) -> int:
        raise NotImplementedError(
            "A layer does not count tokens: ask `cache.get_seq_length()`, or see `cache.lengths`."
        )

    def get_max_length(self) -> int:
        """Tokens that a row can hold."""
        return self.max_cache_len

    def offload(self) -> None:
        raise NotImplementedError("The DeepSeek-V4 static cache stays on its device: it cannot be offloaded.")

    prefetch = offload

    def reset(self) -> None:
        """Zero all state, so that nothing left behind, a NaN say, can reach a sum through a weight of 0."""
        if self.is_initialized:
            for tensor in self.tensors().values():
                tensor.zero_()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Let row `i` take the state of row `beam_idx[i]`, in place."""
        if self.is_initialized:
            for tensor in self.tensors().values():
                tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))

    @torch.inference_mode(False)
    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`. The batch changes, so the state moves to new tensors."""
        if self.is_initialized:
            selected = {name: tensor[indices.to(self.device)] for name, tensor in self.tensors().items()}
            self.batch_size = selected["keys"].shape[0]
            self.keys = self.values = mark_static(selected["keys"])
            for owner, state in self.states().items():
                for name in state.tensors():
                    setattr(state, name, mark_static(selected[f"{owner}.{name}"]))


class DeepseekV4HCAStaticLayer(DeepseekV4SlidingStaticLayer):
    """A sliding window, and one entry for every `rate` tokens since the first (heavily compressed attention).

    Args:
        max_compressed_len: entries that fit; by default as many as `max_cache_len` tokens can touch.

    Attributes:
        compressor: the `CompressorState` of the entries that are attended to.
    """

    kind = HCA

    def __init__(
        self,
        config: DeepseekV4Config,
        max_cache_len: int,
        max_rollback: int = 0,
        max_compressed_len: int | None = None,
    ):
        super().__init__(config, max_cache_len, max_rollback)
        self.rate = config.compress_rates[self.kind]
        self.max_compressed_len = max_compressed_len or compressed_len(max_cache_len, self.rate)
        self.compressor = self._compressor(config.head_dim, max_rollback)

    def _compressor(self, head_dim: int, max_rollback: int) -> CompressorState:
        overlaps = self.kind == CSA
        return CompressorState(self.rate, head_dim, overlaps, self.max_compressed_len, self.max_cache_len, max_rollback)

    def states(self) -> dict[str, CompressorState]:
        return {"compressor": self.compressor}


class DeepseekV4CSAStaticLayer(DeepseekV4HCAStaticLayer):
    """A sliding window, and one entry for every `rate` tokens, each pooled from two windows that overlap.

    Every query attends to its best `index_topk` entries (compressed sparse attention).

    Attributes:
        indexer: the `CompressorState` of the narrower entries that choose, None where there is nothing to choose.
    """

    kind = CSA

    def __init__(
        self,
        config: DeepseekV4Config,
        max_cache_len: int,
        max_rollback: int = 0,
        max_compressed_len: int | None = None,
    ):
        super().__init__(config, max_cache_len, max_rollback, max_compressed_len)
        chooses = needs_indexer(config, self.max_compressed_len)
        self.indexer = self._compressor(config.index_head_dim, max_rollback) if chooses else None

    def states(self) -> dict[str, CompressorState]:
        return super().states() | ({} if self.indexer is None else {"indexer": self.indexer})


def new_buffer(batch_size: int, size: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`(batch_size, size + 1, width)` zeros: `size` slots, and the spare one at the end."""
    return static_zeros(batch_size, size + 1, width, dtype=dtype, device=device)


def static_zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that never move, and that can be written outside of `inference_mode` even if they were made in it."""
    with torch.inference_mode(False):
        return mark_static(torch.zeros(shape, dtype=dtype, device=device))


def mark_static(tensor: Tensor) -> Tensor:
    """Tell the compiler that `tensor` never moves, which CUDA graphs require. It cannot be told while it traces."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor)
    return tensor


def write(buffer: Tensor, slots: Tensor, values: Tensor) -> None:
    """Put `values`, `(batch, n, width)`, into the slots `(batch, n)` of `buffer`, `(batch, size + 1, width)`."""
    rows = torch.arange(buffer.shape[0], device=buffer.device)[:, None]
    buffer[rows, slots] = values.to(buffer.dtype)


def read(buffer: Tensor, slots: Tensor) -> Tensor:
    """The slots `(batch, n)` of `buffer`, `(batch, size + 1, width)`."""
    rows = torch.arange(buffer.shape[0], device=buffer.device)[:, None]
    return buffer[rows, slots]


def flatten(state) -> tuple[list, tuple]:
    """The tensors of a layer or of a compressor, and everything else by name."""
    children, sizes = {}, {}
    for name, value in vars(state).items():
        if isinstance(value, Tensor | CompressorState):
            children[name] = value
        else:
            sizes[name] = value
    return list(children.values()), (type(state), tuple(children), tuple(sizes.items()))


def unflatten(children: list, context: tuple):
    """The layer or the compressor that `flatten` took apart, around other tensors."""
    state_class, names, sizes = context
    state = state_class.__new__(state_class)
    vars(state).update(zip(names, children))
    vars(state).update(sizes)
    return state


# The compiler traces a layer once for all that are alike, if it can see what they are made of (see `run_layer`).
for state_class in (
    CompressorState,
    DeepseekV4SlidingStaticLayer,
    DeepseekV4HCAStaticLayer,
    DeepseekV4CSAStaticLayer,
):
    register_pytree_node(state_class, flatten, unflatten)
