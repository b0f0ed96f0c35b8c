"""What a rank has announced to its peers, and their answer."""

from threading import Condition

from distca.dispatch.transports.base import Records


class Announcement:
    """What this rank has announced, until all ranks have announced theirs.

    Like a future, but all of them share one condition: a layer makes four, on a host that must stay
    ahead of its device.
    """

    __slots__ = ("_answer", "_changed", "index", "record")

    def __init__(self, index: int, record: str, changed: Condition) -> None:
        self.index, self.record = index, record
        self._changed = changed
        self._answer: Records | Exception | None = None

    @property
    def is_answered(self) -> bool:
        return self._answer is not None

    def result(self, timeout_s: float | None = None) -> Records:
        """Waits for the records of all ranks: ``[record]`` if all are equal."""
        if self._answer is None:
            with self._changed:
                if not self._changed.wait_for(lambda: self.is_answered, timeout_s):
                    raise TimeoutError
        assert self._answer is not None
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def answer(self, answer: Records | Exception) -> None:
        """Sets the result; the caller notifies those who wait."""
        self._answer = answer
