"""Prediction of the sources that begin a segment."""

from tracestore.ingest.forecast import SegmentPredictor


def test_a_source_begins_a_segment_only_if_those_before_it_certainly_fill_one():
    pending = 0
    predictor = SegmentPredictor(100, lambda: pending)
    one, two, three, four = (predictor.add() for _ in range(4))
    for source, size in ((one, 1000), (two, 2000), (three, 300), (four, 1000)):
        source.file_bytes = size
    assert predictor.begins_segment(one)
    assert not predictor.begins_segment(two)  # the size of the first one is unknown
    one.packed_bytes = 99
    assert not predictor.begins_segment(two)
    one.packed_bytes = 100
    assert predictor.begins_segment(two) and not predictor.begins_segment(three)
    one.packed_bytes = 200
    predictor.end(one, is_refused=False)
    # The ratio is one fifth: 2,000 bytes come to more than 100, 300 do not.
    assert predictor.begins_segment(two) and predictor.begins_segment(three) and not predictor.begins_segment(four)
    two.packed_bytes = 300
    predictor.end(two, is_refused=True)
    assert predictor.begins_segment(three)  # a refused one adds nothing, but the one before it was enough
    three.packed_bytes = 40
    predictor.end(three, is_refused=False)
    assert not predictor.begins_segment(four)
    pending = 70
    predictor.begin(four)
    assert not predictor.begins_segment(four)
    pending = 0
    predictor.begin(four)
    assert predictor.begins_segment(four)
