"""What one compressor of one layer remembers."""

import torch
from einops import rearrange
from torch import Tensor

from .buffers import new_buffer, read, slots_of, write
from .positions import Chunk, ring_slots, touchable_windows
from .sizes import CompressorSizes


class CompressorState:
    """What a compressor remembers: the source tokens of its open window (and of the one before), and its entries.

    Args:
        sizes: what it has room for.

    Attributes:
        source_kv, source_gate: `(batch, ring + 1, head_dim)`, twice as wide with overlap. A ring of source tokens.
        entries: `(batch, max_compressed_len + 1, head_dim)`, entry `w` in slot `w`.
    """

    def __init__(self, sizes: CompressorSizes):
        self.sizes = sizes
        self.source_kv: Tensor | None = None
        self.source_gate: Tensor | None = None
        self.entries: Tensor | None = None

    def allocate(self, batch_size: int, dtype: torch.dtype, device: torch.device) -> None:
        sizes = self.sizes
        self.source_kv = new_buffer(batch_size, sizes.ring_size, sizes.source_width, dtype, device)
        self.source_gate = new_buffer(batch_size, sizes.ring_size, sizes.source_width, dtype, device)
        self.entries = new_buffer(batch_size, sizes.max_compressed_len, sizes.head_dim, dtype, device)

    def update_source(self, kv: Tensor, gate: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Write a call's source tokens, and return those of the windows that it touches.

        Args:
            kv, gate: `(batch, seq, width)`, the projected tokens.

        Returns:
            Their `kv` and `gate` by window, `(batch, windows, rate, width)`; with overlap the window before the
            first touched one comes first. Tokens that have not arrived are arbitrary, but finite: only the open
            window has such, and nobody sees its entry.
        """
        rate, ring_size = self.sizes.rate, slots_of(self.source_kv)
        slots = ring_slots(chunk, ring_size)
        window_before = 1 if self.sizes.overlaps else 0
        first = chunk.held // rate - window_before
        windows = touchable_windows(kv.shape[1], rate) + window_before
        positions = (first * rate)[:, None] + torch.arange(windows * rate, device=kv.device)

        if kv.shape[1] == 1:  # the ring is long enough to hold every token of the touched window
            write(self.source_kv, slots, kv)
            write(self.source_gate, slots, gate)
            index, source_kv, source_gate = positions % ring_size, self.source_kv, self.source_gate
        else:  # read before writing: a chunk may overwrite tokens that its own first windows need
            column = (positions - chunk.held[:, None] + chunk.padding[:, None]).clamp(max=kv.shape[1] - 1)
            arrived_before = positions < chunk.held[:, None]
            index = torch.where(arrived_before, positions % ring_size, ring_size + 1 + column)
            source_kv = torch.cat([self.source_kv, kv.to(self.source_kv.dtype)], dim=1)
            source_gate = torch.cat([self.source_gate, gate.to(self.source_gate.dtype)], dim=1)
            write(self.source_kv, slots, kv)
            write(self.source_gate, slots, gate)
        by_window = "b (w m) d -> b w m d"
        source_kv, source_gate = read(source_kv, index), read(source_gate, index)
        return rearrange(source_kv, by_window, m=rate), rearrange(source_gate, by_window, m=rate)

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
        rate = self.sizes.rate
        last_closed = lengths[:, None] // rate - 1
        positions = last_closed * rate + torch.arange(rate, device=lengths.device)
        return read(source, positions % slots_of(source))[..., : self.sizes.head_dim]

    def tensors(self) -> dict[str, Tensor]:
        """The state by attribute name."""
        return {name: getattr(self, name) for name in ("source_kv", "source_gate", "entries")}
