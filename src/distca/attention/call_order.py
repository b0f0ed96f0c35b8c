"""In which order the layers of a model run backward, as ranks compare it.

Two layers under one plan send messages of the same sizes. If ranks ran their backward passes in
different orders, gradients of one layer would be computed from what was saved in another one.
"""


class CallOrder:
    """Numbers the forward passes of one rank, and compares their backward passes with the usual.

    Backward passes usually run from the newest forward pass to the oldest. Ranks need to tell each
    other only where they do not, so that most messages are announced in the same words.
    """

    def __init__(self) -> None:
        self.newest = -1
        self._due = -1  # the forward pass whose backward pass usually comes next

    def forward(self) -> int:
        """Returns the number of a forward pass that begins."""
        self.newest += 1
        self._due = self.newest
        return self.newest

    def backward(self, number: int) -> int:
        """Returns how far the backward pass of a forward pass is from the usual one; mostly 0."""
        distance = self._due - number
        self._due = number - 1
        return distance
