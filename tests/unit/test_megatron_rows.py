"""Rows of fused tensors: spans against an independent construction of the fused order."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasync.adapters.megatron_rows import split_rows


def fused_qkv(heads: int, groups: int, head_dim: int) -> np.ndarray:
    """``[rows, 2]``: tensor (0 query, 1 key, 2 value) and its row, for every row of Megatron's fused QKV tensor."""
    rows = []
    for group in range(groups):
        per_group = heads // groups
        rows += [(0, (group * per_group + h) * head_dim + d) for h in range(per_group) for d in range(head_dim)]
        rows += [(1, group * head_dim + d) for d in range(head_dim)]
        rows += [(2, group * head_dim + d) for d in range(head_dim)]
    return np.array(rows)


@given(
    groups=st.integers(1, 5),
    per_group=st.integers(1, 4),
    head_dim=st.integers(1, 5),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_qkv_spans_of_any_range(groups: int, per_group: int, head_dim: int, cut: tuple[float, float]) -> None:
    heads = groups * per_group
    config = SimpleNamespace(num_attention_heads=heads, num_query_groups=groups, kv_channels=head_dim)
    expected = fused_qkv(heads, groups, head_dim)
    split = split_rows("qkv", len(expected), 3, config, None)
    assert split.totals == (heads * head_dim, groups * head_dim, groups * head_dim)
    start, stop = sorted(round(c * len(expected)) for c in cut)
    found = np.full((stop - start, 2), -1)
    for span in split.spans(start, stop - start):
        assert (found[span.local : span.local + span.count] == -1).all()
        found[span.local : span.local + span.count, 0] = span.part
        found[span.local : span.local + span.count, 1] = np.arange(span.start, span.start + span.count)
    assert np.array_equal(found, expected[start:stop])


@given(names=st.integers(1, 4), each=st.integers(1, 9), cut=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_gated_spans_of_any_range(names: int, each: int, cut: tuple[float, float]) -> None:
    split = split_rows("gated", names * each, names, None, None)
    start, stop = sorted(round(c * names * each) for c in cut)
    rows = [
        (s.part * each + s.start + i, s.local + i) for s in split.spans(start, stop - start) for i in range(s.count)
    ]
    assert rows == [(r, r - start) for r in range(start, stop)]


@given(padded=st.integers(1, 50), tp=st.integers(1, 5), data=st.data())
def test_vocabulary_padding_is_cut_off(padded: int, tp: int, data: st.DataObject) -> None:
    vocab = data.draw(st.integers(1, padded * tp))
    split = split_rows("vocab", padded * tp, 1, None, vocab)
    rows = [s.start + i for r in range(tp) for s in split.spans(r * padded, padded) for i in range(s.count)]
    assert rows == list(range(vocab))
    assert split.totals == (vocab,)


def test_rows_that_do_not_fit_are_refused() -> None:
    config = SimpleNamespace(num_attention_heads=4, num_query_groups=2, kv_channels=8)
    with pytest.raises(
        ValueError, match="65 fused QKV rows; 2 query groups of 16 query, 8 key and 8 value rows make 64"
    ):
        split_rows("qkv", 65, 3, config, None)
    with pytest.raises(ValueError, match="7 rows are not 2 equal parts"):
        split_rows("gated", 7, 2, config, None)
    with pytest.raises(ValueError, match=r"96 vocabulary rows, some of which may be padding: pass .* vocab_size"):
        split_rows("vocab", 96, 1, config, None)
    with pytest.raises(ValueError, match="vocab_size is 97, but the model has only 96 rows"):
        split_rows("vocab", 96, 1, config, 97)
