"""What the host counts along, so that it need not ask the device."""


class HostCount:
    """The host's own book-keeping of a cache. It changes from call to call: no graph and no exported program reads it.

    Attributes:
        longest: tokens of the longest row as far as the host knows, an upper bound; None when only the device knows.
        unfinished: whether a call has begun to write and has not come to its end.
    """

    def __init__(self):
        self.longest: int | None = 0
        self.unfinished = False

    def lose_count(self) -> None:
        """To be called by whoever changes the lengths unseen: the host asks the device at the next call."""
        self.longest = None

    def attended_len(self, smallest: int, max_cache_len: int) -> int:
        """The first of `smallest`, twice that, and so on, that holds the longest row."""
        length = smallest
        while length < self.longest:
            length *= 2
        return min(length, max_cache_len)
