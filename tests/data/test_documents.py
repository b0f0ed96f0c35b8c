"""Labels are the next token of the same document, wherever it is cut."""

from hypothesis import given
from hypothesis import strategies as st

from distca.data.documents import IGNORE, Batch, Document

TOKENS = st.lists(st.integers(0, 9), max_size=20)


@given(TOKENS, st.integers(0, 25))
def test_labels_are_the_next_token_and_prompts_are_ignored(tokens: list[int], prompt: int) -> None:
    document = Document.from_tokens(tokens, num_prompt=prompt)
    assert document.tokens.tolist() == tokens
    for position, label in enumerate(document.labels.tolist()):
        learnt = prompt <= position + 1 < len(tokens)
        assert label == (tokens[position + 1] if learnt else IGNORE)


@given(TOKENS, st.integers(1, 8))
def test_pieces_keep_the_label_across_the_cut(tokens: list[int], longest: int) -> None:
    document = Document.from_tokens(tokens, source=2, index=5)
    pieces = [piece for (piece,) in document.pieces(longest)]
    assert [len(piece) for piece in pieces[:-1]] == [longest] * len(pieces[:-1])
    assert [token for piece in pieces for token in piece.tokens] == tokens
    assert [label for piece in pieces for label in piece.labels] == document.labels.tolist()
    for number, piece in enumerate(pieces):
        assert (piece.source, piece.index, piece.offset) == (2, 5, number * longest)


def test_a_piece_of_a_piece_knows_where_it_lies() -> None:
    piece = Document.from_tokens(range(10)).piece(3, 9).piece(2, 4)
    assert (piece.offset, piece.tokens.tolist(), piece.labels.tolist()) == (5, [5, 6], [6, 7])


def test_a_batch_counts_what_is_learnt() -> None:
    batch = Batch((Document.from_tokens([1, 2, 3]), Document.from_tokens([4, 5, 6], num_prompt=2)))
    assert batch.lengths.tolist() == [3, 3]
    assert (batch.num_tokens, batch.num_targets) == (6, 3)
    assert (Batch(()).num_tokens, Batch(()).num_targets) == (0, 0)
