"""The static cache layers: what one layer of DeepSeek-V4 keeps, in tensors that are allocated once.

    DeepseekV4SlidingStaticLayer        keys                                  a ring of tokens
    DeepseekV4HCAStaticLayer            keys, compressor                      one entry per `rate` tokens
    DeepseekV4CSAStaticLayer            keys, compressor, indexer             the indexer chooses among the entries

A layer does not know how many tokens it holds: the cache has the lengths, and hands each call's positions down as a
`Chunk`. See `positions.py` for where a position lives.
"""

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from .buffers import mark_static, new_buffer, slots_of, write
from .compressor_state import CompressorState
from .positions import Chunk, last_positions, ring_positions, ring_slots
from .sizes import CSA, HCA, SLIDING, CacheSizes, CompressorSizes, LayerSizes, needs_indexer


class DeepseekV4SlidingStaticLayer(CacheLayerMixin):
    """The last `sliding_window` tokens of a layer, in a ring. The other two kinds of layer build on it.

    Args:
        config: the model's config.
        sizes: of the whole cache.

    Attributes:
        keys: `(batch, ring + 1, head_dim)`. Keys are values in DeepSeek-V4, so `values` stays None.
        sizes: the `LayerSizes`.
    """

    kind = SLIDING
    is_compileable = True
    is_sliding = True
    compressor: CompressorState | None = None
    indexer: CompressorState | None = None

    def __init__(self, config: DeepseekV4Config, sizes: CacheSizes):
        super().__init__()
        self.sizes = LayerSizes(config.head_dim, config.sliding_window, sizes)

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken back."""
        return self.sizes.cache.max_rollback > 0

    def states(self) -> dict[str, CompressorState]:
        """The compressors of this layer by attribute name."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """All state of this layer by name, such as `keys` or `compressor.entries`."""
        tensors = {"keys": self.keys}
        for owner, state in self.states().items():
            tensors |= {f"{owner}.{name}": tensor for name, tensor in state.tensors().items()}
        return tensors

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Allocate all state for the batch, dtype and device of `key_states`, `(batch, ...)`."""
        self.allocate(key_states.shape[0], key_states.dtype, key_states.device)

    def allocate(self, batch_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate all state, empty."""
        self.keys = new_buffer(batch_size, self.sizes.ring_size, self.sizes.head_dim, dtype, device)
        for state in self.states().values():
            state.allocate(batch_size, dtype, device)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor | None = None, chunk: Chunk | None = None, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Write a call's keys, and return the keys that its queries may see, with their positions.

        Args:
            key_states: `(batch, seq, head_dim)`.
            value_states: not needed, since keys are values; here for upstream's signature, as is `kwargs`.
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
        size = slots_of(self.keys)
        slots = ring_slots(chunk, size)
        if key_states.shape[1] == 1:
            write(self.keys, slots, key_states)
            return self.keys[:, :-1], ring_positions(last_positions(chunk), size)
        keys = torch.cat([self.keys[:, :-1], key_states.to(self.keys.dtype)], dim=1)
        positions = torch.cat([ring_positions(chunk.held - 1, size), chunk.positions], dim=1)
        write(self.keys, slots, key_states)
        return keys, positions

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many window keys `update` returns for a call, and at which offset."""
        return self.sizes.ring_size + (query_length if query_length > 1 else 0), 0

    def get_seq_length(self) -> int:
        raise NotImplementedError(
            "A layer does not count tokens: ask `cache.get_seq_length()`, or see `cache.lengths`."
        )

    def get_max_length(self) -> int:
        """Tokens that a row can hold."""
        return self.sizes.cache.max_cache_len

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
            beam_idx = beam_idx.to(self.keys.device)
            for tensor in self.tensors().values():
                tensor.copy_(tensor.index_select(0, beam_idx))

    @torch.inference_mode(False)
    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`. The batch changes, so the state moves to new tensors."""
        if self.is_initialized:
            indices = indices.to(self.keys.device)
            for state in (self, *self.states().values()):
                names = ["keys"] if state is self else state.tensors()
                for name in names:
                    setattr(state, name, mark_static(getattr(state, name)[indices]))


class DeepseekV4HCAStaticLayer(DeepseekV4SlidingStaticLayer):
    """A sliding window, and one entry for every `rate` tokens since the first (heavily compressed attention).

    Attributes:
        compressor: the `CompressorState` of the entries that are attended to.
    """

    kind = HCA

    def __init__(self, config: DeepseekV4Config, sizes: CacheSizes):
        super().__init__(config, sizes)
        self.compressor = self._compressor(config.head_dim, config, sizes)

    def _compressor(self, head_dim: int, config: DeepseekV4Config, sizes: CacheSizes) -> CompressorState:
        rate, entries = config.compress_rates[self.kind], sizes.max_compressed_len[self.kind]
        return CompressorState(CompressorSizes(rate, head_dim, self.kind == CSA, entries, cache=sizes))

    def states(self) -> dict[str, CompressorState]:
        return {"compressor": self.compressor}


class DeepseekV4CSAStaticLayer(DeepseekV4HCAStaticLayer):
    """A sliding window, and one entry for every `rate` tokens, each pooled from two windows that overlap.

    Every query attends to its best `index_topk` entries (compressed sparse attention).

    Attributes:
        indexer: the `CompressorState` of the narrower entries that choose, None where there is nothing to choose.
    """

    kind = CSA

    def __init__(self, config: DeepseekV4Config, sizes: CacheSizes):
        super().__init__(config, sizes)
        chooses = needs_indexer(config, sizes.max_compressed_len[CSA])
        self.indexer = self._compressor(config.index_head_dim, config, sizes) if chooses else None

    def states(self) -> dict[str, CompressorState]:
        return super().states() | ({} if self.indexer is None else {"indexer": self.indexer})
