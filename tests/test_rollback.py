"""Taking tokens back: afterwards the cache is as if it had never seen them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_exact import dynamic_logits, static_logits
from tiny import random_ids, tiny_model

from dsv4_gen import DeepseekV4StaticCache

MODEL = tiny_model()
CAPACITY, MAX_ROLLBACK = 120, 9


def new_cache():
    return DeepseekV4StaticCache(MODEL.config, max_cache_len=CAPACITY, max_rollback=MAX_ROLLBACK)


step = st.one_of(
    st.tuples(st.just("tokens"), st.integers(1, 40)),
    st.tuples(st.just("tokens"), st.just(1)),
    st.tuples(st.just("crop"), st.integers(0, MAX_ROLLBACK)),
    st.tuples(st.just("reorder"), st.permutations(range(2))),
    st.tuples(st.just("reset"), st.none()),
)


@settings(max_examples=300)
@given(st.lists(step, min_size=3, max_size=12), st.lists(st.integers(0, 5), min_size=13, max_size=13))
def test_any_program_ends_where_a_fresh_cache_ends_that_saw_the_surviving_tokens(program, paddings):
    source = [random_ids(1000, seed=s) for s in range(2)]
    cache, rows, longest = new_cache(), [torch.empty(0, dtype=torch.long)] * 2, [0, 0]
    for (action, argument), padding in zip([("tokens", 5), *program], paddings):
        if action == "tokens":
            counts = [argument, max(argument - padding, 0)]
            if max(len(row) + count for row, count in zip(rows, counts)) > CAPACITY - 2:
                continue
            new = [row[:count] for row, count in zip(source, counts)]
            source = [row[40:] for row in source]
            static_logits(MODEL, new, [counts], cache)
            rows = [torch.cat([row, tokens]) for row, tokens in zip(rows, new)]
            longest = [max(most, len(row)) for most, row in zip(longest, rows)]
        elif action == "crop":
            behind = max(most - len(row) for most, row in zip(longest, rows)) + argument
            if argument > min(len(row) for row in rows) or behind > MAX_ROLLBACK:
                with pytest.raises(ValueError, match="Cannot take back"):
                    cache.crop(-argument)
                continue
            cache.crop(-argument)
            rows = [row[: len(row) - argument] for row in rows]
        elif action == "reorder":
            cache.reorder_cache(torch.tensor(argument))
            rows, longest = [rows[i] for i in argument], [longest[i] for i in argument]
        else:
            cache.reset()
            rows, longest = [row[:0] for row in rows], [0, 0]

    assert cache.lengths.tolist() == [len(row) for row in rows]
    probe, fresh = [random_ids(2, seed=9)] * 2, new_cache()
    if any(len(row) for row in rows):
        static_logits(MODEL, rows, [[len(row) for row in rows]], fresh)
    for ours, expected in zip(*(static_logits(MODEL, probe, [[1, 1], [1, 1]], kept) for kept in (cache, fresh))):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("held", range(1, 50))
def test_a_rollback_at_every_phase_of_every_window_matches_the_dynamic_model(held):
    row, cache = random_ids(held + 6), new_cache()
    static_logits(MODEL, [row], [[held]], cache)
    for drafted in (1, MAX_ROLLBACK, 5):  # again and again
        static_logits(MODEL, [random_ids(drafted, seed=5)], [[drafted]], cache)
        cache.crop(-drafted)
    (logits,) = static_logits(MODEL, [row[held:]], [[1], [5]], cache)
    torch.testing.assert_close(logits, dynamic_logits(MODEL, row)[held:], atol=2e-5, rtol=0)


def test_more_than_the_room_for_it_is_refused_and_changes_nothing():
    cache, row = new_cache(), random_ids(60)
    static_logits(MODEL, [row], [[50]], cache)
    cache.crop(-5)
    for too_many, message in ((-5, "10 behind the longest"), (-46, "shortest row holds 45"), (3, "a negative number")):
        with pytest.raises(ValueError, match=message):
            cache.crop(too_many)
    assert cache.lengths.tolist() == [45] and cache.get_seq_length() == 45
    (logits,) = static_logits(MODEL, [row[45:]], [[15]], cache)
    torch.testing.assert_close(logits, dynamic_logits(MODEL, row)[45:], atol=2e-5, rtol=0)


def test_only_a_cache_that_pays_for_it_can_go_back():
    without = DeepseekV4StaticCache(MODEL.config, max_cache_len=100)
    assert new_cache().is_croppable and not without.is_croppable
    assert [layer.sizes.ring_size for layer in without.layers] == [32] * 4
    assert [layer.sizes.ring_size for layer in new_cache().layers] == [32 + MAX_ROLLBACK] * 4
    assert [without.layers[i].compressor.sizes.ring_size for i in (1, 2)] == [2 * 4, 16]
    static_logits(MODEL, [random_ids(5)], [[5]], without)
    with pytest.raises(ValueError, match="`max_rollback=0`"):
        without.crop(-1)
    without.crop(0)
