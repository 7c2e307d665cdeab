"""Test the rows of traces behind each other, where a table has another order than the states (rule 9)."""

import itertools

import numpy as np
import pytest

from tests.ingest.execute.folders import convert, dump, refuse, save, states, table

LENGTHS = (3, 5, 4)
BEGINS = (0, 3, 8)
ENDS = (3, 8, 12)
ORDERS = list(itertools.permutations(range(3)))
ROWS = {"hidden_states": "h.npy -> (N S) L D", "question_id": "t.csv : []/id"}


def write(tmp_path, order, **columns):
    """Write states of three traces, and a table with their rows in an order."""
    save(tmp_path / "in/h.npy", states(12, 2, 8))
    table(tmp_path / "in/t.csv", [{"id": "abc"[k], **{n: v[k] for n, v in columns.items()}} for k in order])


def check(traces):
    for k, name in enumerate("abc"):
        expected = states(12, 2, 8)[BEGINS[k] : ENDS[k]].swapaxes(0, 1)
        np.testing.assert_allclose(traces[name, 0].hidden_states, expected, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "fields", [("starts", "lengths"), ("starts", "ends"), ("ends", "lengths"), ("starts", "lengths", "ends")]
)
def test_two_of_starts_ends_and_lengths_give_the_rows(tmp_path, fields, order):
    columns = {"starts": BEGINS, "ends": ENDS, "lengths": LENGTHS}
    write(tmp_path, order, **{name: columns[name] for name in fields})

    check(convert(tmp_path, ROWS | {f"S.{name}": f"t.csv : []/{name}" for name in fields}))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("values", [BEGINS, ENDS])
@pytest.mark.parametrize(
    "name", ["offset", "Offset", "start", "row_start", "begin", "ptr", "end", "stop", "first_row", "at"]
)
def test_lengths_next_to_a_column_of_first_or_last_rows(tmp_path, order, values, name):
    """The values show it under any name."""
    write(tmp_path, order, n=LENGTHS, **{name: values})
    layout = ROWS | {"S.lengths": "t.csv : []/n"}

    if order == (0, 1, 2):
        check(convert(tmp_path, layout))
        return
    field = "S.starts" if values == BEGINS else "S.ends"
    refuse(
        tmp_path,
        layout,
        rf't.csv : \[\]/{name}: found .* {field} = "t.csv : \[\]/{name}" next to S.lengths .* ignore = ',
    )
    check(convert(tmp_path, layout | {field: f"t.csv : []/{name}"}))


@pytest.mark.parametrize("name", ["start", "offsets", "cu_seqlens", "end"])
@pytest.mark.parametrize("has_lengths", [True, False])
def test_a_column_of_other_rows_under_the_name_of_first_or_last_ones(tmp_path, name, has_lengths):
    """Without lengths in the table, too."""
    save(tmp_path / "in/n.npy", np.array(LENGTHS))
    write(tmp_path, (0, 1, 2), **{name: (0, 4, 8)}, **({"n": LENGTHS} if has_lengths else {}))
    layout = ROWS | ({"S.lengths": "t.csv : []/n", "ignore": "n.npy"} if has_lengths else {"S.lengths": "n.npy -> N"})

    refuse(tmp_path, layout, rf"t.csv : \[\]/{name}: found")
    ignored = [*([layout["ignore"]] if has_lengths else []), f"t.csv : []/{name}"]
    check(convert(tmp_path, layout | {"ignore": ignored}))


@pytest.mark.parametrize(
    "columns",
    [
        {"width": (3, 5, 4)},
        {"answer_start": (7, 0, 12)},
        {"start": (0.0, 4.5, 2.5)},
        {"start": ("", "", "")},
        {"rank": (1, 0, 2)},
        {"is_long": (True, False, True)},
    ],
)
def test_other_numbers_of_rows_say_nothing(tmp_path, columns):
    write(tmp_path, (0, 1, 2), n=LENGTHS, **columns)

    check(convert(tmp_path, ROWS | {"S.lengths": "t.csv : []/n"}))


def test_equal_lengths_in_another_order(tmp_path):
    write(tmp_path, (1, 0, 2), n=(4, 4, 4), offset=(0, 4, 8))

    refuse(tmp_path, ROWS | {"S.lengths": "t.csv : []/n"}, "offset: found 4 where S.lengths .* give the rows 0 to 4")


def test_a_table_in_a_file_of_its_own_for_each_stack(tmp_path):
    for number in range(2):
        save(tmp_path / f"in/h_{number}.npy", states(12, 2, 8, seed=number))
        rows = [
            {"id": f"{'abc'[k]}{number}", "n": LENGTHS[k], "offset": BEGINS[k]} for k in (0, 2, 1)[:: 1 - 2 * number]
        ]
        table(tmp_path / f"in/t_{number}.json", rows)
    layout = {"hidden_states": "h_{n}.npy -> (N S) L D", "question_id": "t_{n}.json : []/id"}
    layout |= {"S.lengths": "t_{n}.json : []/n"}

    refuse(tmp_path, layout, r"t_\{n\}.json : \[\]/offset: found")
    traces = convert(tmp_path, layout | {"S.starts": "t_{n}.json : []/offset"})
    for number, (k, name) in itertools.product(range(2), enumerate("abc")):
        expected = states(12, 2, 8, seed=number)[BEGINS[k] : ENDS[k]].swapaxes(0, 1)
        np.testing.assert_allclose(traces[f"{name}{number}", 0].hidden_states, expected, rtol=2e-3, atol=1e-3)


def test_columns_of_one_source_say_nothing_of_another(tmp_path):
    """Sources that only a wildcard tells apart, of which some have a column with their own first rows."""
    for number in range(12):
        lengths = [3 + number % 3, 5, 4]
        items = [{"id": f"q{number}_{k}", "n": size} for k, size in enumerate(lengths)]
        if number % 2:
            items = [item | {"ptr": sum(lengths[:k])} for k, item in enumerate(items)]
        value = {"hs": states(sum(lengths), 2, 8, seed=number), "rows": items}
        dump(tmp_path / f"in/part{number}.pkl", value)
    layout = {"hidden_states": "*.pkl : hs -> (N S) L D", "question_id": "*.pkl : rows/[]/id"}

    assert len(convert(tmp_path, layout | {"S.lengths": "*.pkl : rows/[]/n"})) == 36
