"""What ranks announce is compared as soon as all have announced it, in any order of arrival."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distca.dispatch.comparison import Comparison


@given(
    records=st.lists(st.lists(st.sampled_from("ab"), max_size=12), min_size=1, max_size=4),
    data=st.data(),
)
def test_equals_a_comparison_one_by_one(records: list[list[str]], data: st.DataObject) -> None:
    comparison, sent = Comparison(len(records)), [0] * len(records)
    found: dict[int, list[str]] = {}
    while any(n < len(one) for n, one in zip(sent, records, strict=True)):
        rank = data.draw(st.sampled_from([r for r, n in enumerate(sent) if n < len(records[r])]))
        end = data.draw(st.integers(sent[rank] + 1, len(records[rank])))
        comparison.add(rank, records[rank][sent[rank] : end])
        sent[rank] = end
        found |= comparison.compare()
        assert comparison.num_compared == min(sent)
        assert comparison.incomplete == range(min(sent), max(sent))
        for index in range(max(sent)):
            assert comparison.at(index) == [
                one[index] if min(sent) <= index < n else None
                for n, one in zip(sent, records, strict=True)
            ]
    complete = enumerate(zip(*records, strict=False))
    assert found == {index: list(at) for index, at in complete if len(set(at)) > 1}
