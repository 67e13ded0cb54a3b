"""Properties of comparing results that hold for any rows."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from rewards.sql_compare import Segment, Tolerance, numbers_equal, results_match, rows_fit
from rewards.sql_text import extract_answer, single_query

cells = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-2, 2),
    st.floats(allow_nan=False),
    st.sampled_from([0.5, 1.0, 1.0000005, 2.0]),
    st.sampled_from(["", "1", "a", "A"]),
    st.binary(max_size=1),
)


@st.composite
def tables(draw, max_rows=6, max_columns=4):
    width = draw(st.integers(1, max_columns))
    return draw(st.lists(st.tuples(*[cells] * width), min_size=1, max_size=max_rows))


def match(pred, gold, segments=None, relaxed=False):
    tolerance = Tolerance(1e-6, (0.0,) * len(gold[0]))
    return results_match(pred, segments or [Segment(len(gold), gold)], tolerance, relaxed)


@given(tables(), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None, database=None)
def test_a_result_equals_itself_shuffled(rows, chance):
    assert match(rows, rows)
    shuffled = list(rows)
    chance.shuffle(shuffled)
    assert match(shuffled, rows)
    order = list(range(len(rows[0])))
    chance.shuffle(order)
    assert match([tuple(row[column] for column in order) for row in shuffled], rows, relaxed=True)


@given(tables())
@settings(max_examples=100, deadline=None, database=None)
def test_more_or_fewer_rows_differ(rows):
    assert not match([*rows, rows[0]], rows)
    if len(rows) > 1:
        assert not match(rows[1:], rows)


@given(tables(), st.data())
@settings(max_examples=150, deadline=None, database=None)
def test_a_row_more_or_less_than_once_differs(rows, data):
    """Same length, another bag: told apart unless the two rows are close."""
    first, second = data.draw(st.sampled_from(rows)), data.draw(st.sampled_from(rows))
    changed = list(rows)
    changed[changed.index(first)] = second
    assert match(changed, rows) == match([second], [first])


@given(
    st.lists(st.tuples(*[st.sampled_from([1.0, 1.1, 1.2, 1.3])] * 2), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
@settings(max_examples=150, deadline=None, database=None)
def test_pairing_finds_what_trying_all_orders_finds(pool, chance):
    """Closeness is not transitive here: 1.0 ~ 1.1 ~ 1.2, but 1.0 is not close to 1.2."""
    pred = [tuple(chance.choice([1.0, 1.1, 1.2, 1.3]) for _ in range(2)) for _ in pool]
    tolerance = Tolerance(0.0, (0.11, 0.11))
    tried = any(
        all(
            numbers_equal(one, other, 0.0, 0.11)
            for gold, row in zip(order, pred, strict=True)
            for one, other in zip(gold, row, strict=True)
        )
        for order in itertools.permutations(pool)
    )
    assert rows_fit(pred, pool, tolerance) == tried


@given(st.text(alphabet="ab`;'\"-/* \nsqlSELECTwith<think></>\x00", max_size=60))
@settings(max_examples=300, deadline=None, database=None)
def test_any_text_is_read_without_an_error(text):
    answer = extract_answer(text)
    assert (answer.sql is None) == bool(answer.problem)
    if answer.sql is not None:
        statement, problem = single_query(answer.sql)
        assert bool(statement) != bool(problem)


def test_ten_thousand_close_float_rows():
    chance = random.Random(5)
    gold = [(chance.random(), chance.random()) for _ in range(10_000)]
    pred = [(x * (1 + 1e-8), y * (1 - 1e-8)) for x, y in gold]
    chance.shuffle(pred)
    assert match(pred, gold)
    pred[0] = (pred[0][0] * 1.1, pred[0][1])
    assert not match(pred, gold)
