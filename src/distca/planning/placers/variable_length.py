"""Variable-length packing (WLB-LLM): bins of documents with equal work and unequal tokens."""

import numpy as np

from distca.planning.placement import Placement
from distca.planning.placers.head_tail import deal_each_document, group_size
from distca.planning.problem import Problem

BREAK_EVEN_TOKENS = 131072  # attention costs as much as linear layers there (8B, published)
TOKEN_LIMIT = 1.25  # most tokens of a bin, relative to the mean


def variable_length_packing(problem: Problem) -> Placement:
    """Places documents, longest first, into the bin with the least work so far.

    A bin is a group of ``cp`` workers, over which each of its documents is dealt head-tail.
    """
    cp = group_size(problem)
    lengths, workers = problem.placement.lengths, problem.placement.num_workers
    bins = workers // cp
    limit = TOKEN_LIMIT * lengths.sum() / bins
    work, tokens = np.zeros(bins), np.zeros(bins)
    choice = np.zeros(len(lengths), np.int64)
    for document in np.argsort(-lengths, kind="stable"):
        length = float(lengths[document])
        fits = tokens + length <= limit
        least = np.argmin(np.where(fits, work, np.inf)) if fits.any() else np.argmin(tokens)
        choice[document] = least
        tokens[least] += length
        work[least] += (length / BREAK_EVEN_TOKENS) ** 2 + length / BREAK_EVEN_TOKENS
    order = np.argsort(choice, kind="stable")
    packed = Placement(
        lengths,
        order,
        np.zeros_like(order),
        lengths[order],
        choice[order] * cp,
        workers,
        two_way=problem.placement.two_way,
    )
    return packed if cp == 1 else deal_each_document(packed, cp)
