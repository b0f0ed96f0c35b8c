"""What a rank has announced to its peers, and their answers."""

from collections import deque
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


class Announcements:
    """Those of one rank that are under way, in their order; the caller holds the lock."""

    def __init__(self, changed: Condition) -> None:
        self._changed = changed
        self._waiting: deque[Announcement] = deque()
        self._num, self.unsent = 0, list[str]()

    def add(self, record: str) -> Announcement:
        announcement = Announcement(self._num, record, self._changed)
        self._num += 1
        self._waiting.append(announcement)
        self.unsent.append(record)
        return announcement

    def answered(self, record: str, answer: Records | Exception) -> Announcement:
        """Returns one that needs no answer of the hub."""
        announcement = Announcement(self._num, record, self._changed)
        announcement.answer(answer)
        return announcement

    def take_unsent(self) -> tuple[list[str], list[int]]:
        """Returns the different records among those to send, and the number of each in them.

        Layers announce the same few records again and again.
        """
        unsent, self.unsent = self.unsent, []
        texts = list(dict.fromkeys(unsent))
        return texts, [texts.index(record) for record in unsent]

    def answer(self, index: int, answer: Records | Exception) -> None:
        for announcement in self._waiting:
            if announcement.index == index and not announcement.is_answered:
                announcement.answer(answer)
        self._changed.notify_all()

    def answer_through(self, last: int) -> None:
        """Notes that all ranks have announced the same, except where another answer has come."""
        while self._waiting and self._waiting[0].index <= last:
            announcement = self._waiting.popleft()
            if not announcement.is_answered:
                announcement.answer([announcement.record])
        self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Ends all that are under way."""
        while self._waiting:
            announcement = self._waiting.popleft()
            if not announcement.is_answered:
                announcement.answer(error)
        self._changed.notify_all()
