"""Test the tree of JSON, JSON Lines, CSV, TSV and text files."""

import bz2
import gzip
import json
import lzma

import pytest

from tests.ingest.readers.trees import check_mutations, check_time, plain, read_tree, refusal, refusal_in_child
from tracestore.errors import InvalidInputError
from tracestore.ingest.readers.opening import open_tree
from tracestore.ingest.readers.tree import Group, Items, StreamItems, as_array

PACK = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
ROWS = [{"id": "q1", "h": [[1.5, 2], [3, 4]], "n": None, "b": True}, {"id": "q2", "h": [], "n": 3, "b": False}]


@pytest.mark.parametrize("suffix", PACK)
def test_json_is_a_value_and_lines_are_items(tmp_path, suffix):
    lines = tmp_path / f"a.jsonl{suffix}"
    lines.write_bytes(PACK[suffix]("\n\n".join(map(json.dumps, ROWS)).encode()))
    whole = tmp_path / f"a.json{suffix}"
    whole.write_bytes(PACK[suffix](b"\xef\xbb\xbf" + json.dumps({"rows": ROWS}).encode()))
    assert read_tree(lines) == ROWS and read_tree(whole) == {"rows": ROWS}
    with open_tree(lines) as root:
        assert isinstance(root, StreamItems) and root.length is None
        first = next(iter(root))
        assert isinstance(first, Group) and isinstance(first["h"], Items)
        assert as_array(first["h"]).read().tolist() == [[1.5, 2], [3, 4]]


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize(("name", "mark"), [("a.csv", ","), ("a.tsv", "\t")])
def test_rows_of_a_table_are_groups_of_texts(tmp_path, suffix, name, mark):
    path = tmp_path / (name + suffix)
    text = f'id{mark}text{mark}label\nq1{mark}"a\n""b{mark}"{mark}1\n007{mark}{mark}0.5\n\n'
    path.write_bytes(PACK[suffix](text.encode()))
    assert read_tree(path) == [
        {"id": "q1", "text": f'a\n"b{mark}', "label": "1"},
        {"id": "007", "text": None, "label": "0.5"},
    ]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz"])
@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
def test_the_first_row_shows_what_separates_cells(tmp_path, name, mark):
    path = tmp_path / name
    data = f'id{mark}score{mark}text\nq1{mark}0.5{mark}"a, b; c"\n'.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    with open_tree(path) as root:
        assert plain(root) == [{"id": "q1", "score": "0.5", "text": "a, b; c"}]


def test_a_first_row_with_two_separators(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a;b|c\n1;2|3\n")
    with pytest.raises(InvalidInputError, match="may be separated by ';' or"), open_tree(path) as root:
        list(root)
    path.write_text("a;b,c\n1;2,3\n")
    with open_tree(path) as root:
        assert plain(root) == [{"a;b": "1;2", "c": "3"}]


def test_a_table_without_header_is_arrays(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("1.5,-2\n3,4e-1\n")
    assert [row.tolist() for row in read_tree(path)] == [[1.5, -2], [3, 0.4]]
    path.write_text("1.5,-2\n3,x\n")
    assert "no header" in refusal(path)


def test_numbers_may_be_names_of_columns_only_in_order(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("0,1,2\n4,5,6\n")
    assert read_tree(path) == [{"0": "4", "1": "5", "2": "6"}]
    path.write_text("17,4,2\n4,5,6\n")
    assert "first row of integers" in refusal(path)


def test_lines_of_text_are_items(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"q1\r\nq2")
    assert read_tree(path) == ["q1", "q2"]


@pytest.mark.parametrize(
    ("name", "data", "word"),
    [
        ("a.json", b'{"a": 1, "a": 2}', "appears twice"),
        ("a.json", b"{", "not JSON"),
        ("a.json", b"[" * 100_000, "nested deeper"),
        ("a.json", b"\xff\xfe\xff", "not JSON"),
        ("a.json", b"1" * 5_000, "not JSON"),
        ("a.jsonl", b'{"a": 1}\n{"a": 1', "row 1"),
        ("a.csv", b"a,a\n1,2\n", "different names"),
        ("a.csv", b"a,b\n1\n", "row 1 has 1 values"),
        ("a.csv", b'a,b\n"1\n', "not a table"),
        ("a.csv", b"a,b\n\xff,1\n", "not UTF-8"),
        ("a.csv.gz", gzip.compress(b"a,b\n1,2\n", mtime=0)[:-3], "truncated"),
    ],
)
def test_damaged_files_are_refused(tmp_path, name, data, word):
    path = tmp_path / name
    path.write_bytes(data)
    assert word in refusal(path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.json", b"[" + b"[]," * 10_000_000 + b"[]]"),
        ("a.json", b"[" + b"{}," * 10_000_000 + b"{}]"),
        ("a.json", b"[" + b"0," * 20_000_000 + b"0]"),
        ("a.jsonl", b'["' + b'a","' * 10_000_000 + b'a"]'),
        ("a.csv", b"," * 20_000_000),
        ("a.csv", b"a,b\n" + b"1,2\n" * 200_000),
        ("a.tsv", b'"' + b"a\n" * 40_000_000),
    ],
    ids=["lists", "objects", "numbers", "texts", "columns", "rows", "quote"],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_amplified_files_end(tmp_path, name, data, suffix):
    path = tmp_path / (name + suffix)
    path.write_bytes(gzip.compress(data, 1) if suffix else data)
    assert bool(refusal_in_child(path)) == (b"1,2\n" not in data)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv", "a.tsv", "a.jsonl.gz"])
def test_changed_files_are_read_or_refused(tmp_path, name):
    data = b"\n".join(json.dumps(row).encode() for row in ROWS) if ".jsonl" in name else json.dumps(ROWS).encode()
    if name in ("a.csv", "a.tsv"):
        data = b'id,text\nq1,"a\nb"\nq2,x\n'.replace(b",", b"\t" if name == "a.tsv" else b",")
    assert check_mutations(gzip.compress(data) if name.endswith(".gz") else data, tmp_path / name, 150) > 10


@pytest.mark.long
@pytest.mark.parametrize("kind", ["json", "jsonl", "jsonl.gz", "csv"])
def test_four_times_the_input_takes_four_times_as_long(tmp_path, kind):
    paths = []
    for count in (2_000, 8_000):
        rows = [{"id": f"q{k}", "h": [k / 7] * 40, "t": list(range(20))} for k in range(count)]
        path = tmp_path / f"{count}.{kind}"
        if kind == "csv":
            path.write_text("id,a,b\n" + "".join(f"q{k},{k / 7},text\n" for k in range(10 * count)))
        elif kind == "json":
            path.write_text(json.dumps(rows))
        else:
            data = "\n".join(map(json.dumps, rows)).encode()
            path.write_bytes(gzip.compress(data, 1) if kind.endswith("gz") else data)
        paths.append(path)
    check_time(*paths)


def test_a_stream_keeps_no_row(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("id\nq1\nq2\n")
    with open_tree(path) as root:
        assert [plain(row)["id"] for row in root] == ["q1", "q2"] and list(root) == []


@pytest.mark.parametrize(
    "text",
    [
        "# 1 = yes, 0 = no, -1 = unknown\nqid,label\nq1,1\n",
        "\n# one\n\n# two\nqid,label\nq1,1\n",
        "#id,label\nq1,1\n",
        "# a comment\nlabel\n1\n",
        "# a,b\n0.5,1.5\n",
        "#,name\n#1,x\n2,y\n",
        "# only\n",
        "#" + "x" * 70_000 + "\na\n",
    ],
)
def test_a_first_row_that_may_be_a_comment_is_refused(tmp_path, text):
    """Neither the comment nor the row behind it becomes the names of the columns."""
    for suffix, separator in ((".csv", ","), (".tsv", "\t")):
        path = tmp_path / f"a{suffix}"
        path.write_text(text.replace(",", separator))
        with pytest.raises(InvalidInputError, match="remove comments"), open_tree(path) as root:
            list(root)


@pytest.mark.parametrize("value", ["0.022", "-1.5", ".5", "1e-3", "2.E+05", " 3.0"])
@pytest.mark.parametrize("other", ["bio/franklin", "q1", "7"])
def test_a_first_row_of_values_is_no_header(tmp_path, value, other):
    for suffix, separator in ((".csv", ","), (".tsv", "\t")):
        path = tmp_path / f"a{suffix}"
        path.write_text(f"{other}{separator}{value}{separator}x\nq2{separator}0.5{separator}y\n")
        with pytest.raises(InvalidInputError, match=r"the first row names the columns"), open_tree(path) as root:
            list(root)


@pytest.mark.parametrize("name", ["2024", "-1", "nan", "inf", "v1.5", "1.5.2", "e5", "1e", "p@0.5"])
def test_names_of_columns_that_are_no_decimal_numbers(tmp_path, name):
    (tmp_path / "a.csv").write_text(f"id,{name}\nq1,0.5\n")
    with open_tree(tmp_path / "a.csv") as root:
        assert [plain(row) for row in root] == [{"id": "q1", name: "0.5"}]


@pytest.mark.parametrize(
    ("name", "rows", "is_refused"),
    [
        ("a.tsv", ['q1\t"The end\t0', "q2\tx\t1", 'q3\tof it"\t1'], True),
        ("a.tsv", ['"q1\tThe', 'q2"\tit'], True),
        ("a.csv", ['q1,"The end,0', "q2,x,1", 'q3,of it",1'], True),
        ("a.csv", ['q1,0,"The end', "q2,1,x", 'q3,1,of it"'], True),
        ("a.csv", ['7,"The end', '11,of it"'], True),
        ("a.tsv", ['q1\t"The end', "of", 'it"\t1'], False),
        ("a.csv", ['q1,"The end,', 'of it, too",1'], False),
        ("a.csv", ['"Well, yes', 'no, no",1'], False),
        ("a.csv", ['q1,"a, b, c",0', 'q2,"d', 'e",1'], False),
        ("a.csv", ['"one column', 'one column"'], False),
        ("a.tsv", ['"one column', 'of texts"'], False),
    ],
)
def test_a_quote_without_its_pair_makes_several_rows_one(tmp_path, name, rows, is_refused):
    mark = "\t" if name.endswith(".tsv") else ","
    width = 1 if "one" in rows[0] else 2 if rows[0][0] in '"7' else 3
    path = tmp_path / name
    path.write_text("\n".join([mark.join("abc"[:width]), *rows]) + "\n")
    if is_refused:
        assert "a quote without its pair?" in refusal(path)
    else:
        assert read_tree(path)
