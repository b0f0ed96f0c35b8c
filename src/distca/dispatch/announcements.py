"""What a rank has announced to its peers, and their answers."""

from collections import deque
from threading import Condition

from distca.dispatch.transports.base import Records


class Announcement:
    """Records of this rank, mostly one, until all ranks have announced theirs.

    Like a future, but all of them share one condition: a layer makes four, on a host that must stay
    ahead of its device.
    """

    __slots__ = ("_answer", "_changed", "_record", "indices")

    def __init__(self, indices: range, last_record: str, changed: Condition) -> None:
        self.indices = indices
        self._record = last_record
        self._changed = changed
        self._answer: Records | Exception | None = None

    @property
    def is_answered(self) -> bool:
        return self._answer is not None

    def result(self, timeout_s: float | None = None) -> Records:
        """Waits for the records of all ranks: the first that differ, or the last one if none do."""
        if self._answer is None:
            with self._changed:
                if not self._changed.wait_for(lambda: self.is_answered, timeout_s):
                    raise TimeoutError
        assert self._answer is not None
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def answer(self, answer: Records | Exception | None = None) -> None:
        """Sets the result, unless it has one; None: all ranks have announced the same.

        The caller notifies those who wait.
        """
        if self._answer is None:
            self._answer = [self._record] if answer is None else answer


class Announcements:
    """Those of one rank that are under way, in their order; the caller holds the lock."""

    def __init__(self, changed: Condition) -> None:
        self._changed = changed
        self._waiting: deque[Announcement] = deque()
        self._num, self._num_compared = 0, 0
        self.unsent: list[str] = []
        self._first_noted: int | None = None  # of those that are not sent
        self._noted: list[Announcement] = []

    def add(self, record: str) -> Announcement:
        self._append(record)
        announcement = Announcement(range(self._num - 1, self._num), record, self._changed)
        self._waiting.append(announcement)
        return announcement

    def note(self, record: str) -> None:
        """Adds a record for which nobody waits alone: see ``take_noted``."""
        if self._first_noted is None:
            self._first_noted = self._num
        self._append(record)

    def _append(self, record: str) -> None:
        self._num += 1
        self.unsent.append(record)

    def answered(self, record: str, answer: Records | Exception) -> Announcement:
        """Returns one that needs no answer of the hub."""
        announcement = Announcement(range(0), record, self._changed)
        announcement.answer(answer)
        return announcement

    def take_unsent(self) -> tuple[list[str], list[int]]:
        """Returns the different records among those to send, and the number of each in them.

        Layers announce the same few records again and again.
        """
        unsent, self.unsent = self.unsent, []
        if self._first_noted is not None:
            indices, self._first_noted = range(self._first_noted, self._num), None
            self._noted.append(Announcement(indices, unsent[-1], self._changed))
            self._waiting.append(self._noted[-1])
        texts: dict[str, int] = {}
        numbers = [texts.setdefault(record, len(texts)) for record in unsent]
        return list(texts), numbers

    def take_noted(self) -> list[Announcement]:
        """Returns the records that were noted and sent since the last call, as many together."""
        noted, self._noted = self._noted, []
        return noted

    def answer(self, index: int, answer: Records | Exception) -> None:
        for announcement in self._waiting:
            if index in announcement.indices:
                announcement.answer(answer)
        self._changed.notify_all()

    def first_open(self, announcement: Announcement) -> int:
        """Returns the first index of its records that is not compared."""
        return max(announcement.indices[0], self._num_compared)

    def answer_through(self, last: int) -> None:
        """Notes that all ranks have announced the same, except where another answer has come."""
        self._num_compared = last + 1
        while self._waiting and self._waiting[0].indices[-1] <= last:
            self._waiting.popleft().answer()
        self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Ends all that are under way."""
        while self._waiting:
            self._waiting.popleft().answer(error)
        self._changed.notify_all()
