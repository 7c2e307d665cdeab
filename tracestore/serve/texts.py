"""The casefolded texts of a store, in one array of bytes that is searched without a loop over traces."""

import numpy as np

from tracestore.errors import CorruptStoreError
from tracestore.store.format import schema
from tracestore.store.format.ragged import is_offsets
from tracestore.store.read.batch_sources import primary_locations
from tracestore.store.read.index import grouped
from tracestore.store.read.segment import SegmentReader
from tracestore.store.read.store import TraceStore

# Bytes that are compared at once.
_BLOCK_BYTES = 16 << 20
# Ends each text. Texts that contain it are searched as if it were a space.
_END = b"\0"


class FoldedTexts:
    """Question ids, questions and answers of all traces, casefolded.

    They need as many bytes of memory as the texts have, and at most 39 for each trace.

    Parameters
    ----------
    store : TraceStore
        The store. All texts are read.

    Raises
    ------
    CorruptStoreError
        A text cannot be read.
    """

    def __init__(self, store: TraceStore) -> None:
        places = primary_locations(store.internals.index.locations(store.indices))
        blobs, owners = [], []
        for number, traces in grouped(places[:, 0]):
            blob, count = _segment_texts(store.internals.segment(number), places[traces, 1])
            blobs.append(np.frombuffer(blob, "u1"))
            owners.append(np.tile(traces.astype("i4"), count))
        self._num_traces = len(store)
        self._bytes = np.concatenate(blobs or [np.zeros(0, "u1")])
        self._ends = np.flatnonzero(self._bytes == 0)
        self._owners = np.concatenate(owners or [np.zeros(0, "i4")])
        self._frequency = np.bincount(self._bytes, minlength=256)

    def containing(self, words: str) -> np.ndarray:
        """Return which traces contain all words, bool (N,).

        Parameters
        ----------
        words : str
            Words that the question id, question or answer must contain, in any case.
        """
        mask = np.ones(self._num_traces, bool)
        for word in words.replace("\0", " ").casefold().split():
            positions = self._positions(word.encode("utf-8", "surrogatepass"))
            if len(positions) < len(self._ends):
                texts = np.searchsorted(self._ends, positions)
            else:
                texts = np.flatnonzero(np.diff(np.searchsorted(positions, self._ends), prepend=0))
            found = np.zeros(self._num_traces, bool)
            found[self._owners[texts]] = True
            mask &= found
        return mask

    def _positions(self, word: bytes) -> np.ndarray:
        """Return the positions of the rarest byte of a word where the word occurs."""
        place = min(range(len(word)), key=lambda k: self._frequency[word[k]])
        # The last byte is the end of a text, so that a word never begins there.
        begin, end = place, len(self._bytes) - (len(word) - 1 - place)
        found = []
        for first in range(begin, end, _BLOCK_BYTES):
            block = self._bytes[first : min(end, first + _BLOCK_BYTES)]
            positions = first + np.flatnonzero(block == word[place])
            for k, byte in enumerate(word):
                if k != place:
                    positions = positions[self._bytes[positions + (k - place)] == byte]
            found.append(positions)
        return np.concatenate(found or [np.zeros(0, np.int64)])


def _segment_texts(segment: SegmentReader, rows: np.ndarray) -> tuple[bytes, int]:
    """Return the folded texts of some rows, each with its end, and the number of texts of a row.

    The first text of all rows comes first, then the second text of all rows.
    """
    if len(rows) and rows.max() >= segment.num_rows:
        raise CorruptStoreError(f"{segment.rows_path}: row {rows.max()} of {segment.num_rows}")
    present = segment.values("fields")[rows]
    fields = [("question_id", np.ones(len(rows), bool))]
    fields.append(("question", (present & schema.FIELD_BITS["question"]) != 0))
    is_open = np.ones(len(rows), bool)
    for name in schema.ANSWER_FIELDS:
        is_there = (present & schema.FIELD_BITS[name]) != 0
        fields.append((name, is_there & is_open))
        is_open &= ~is_there
    blobs = [_joined(segment, name, rows, chosen) for name, chosen in fields if name == "question_id" or chosen.any()]
    try:
        return b"".join(map(_folded, blobs)), len(blobs)
    except UnicodeDecodeError as error:
        raise CorruptStoreError(f"{segment.rows_path}: {error}") from None


def _folded(texts: bytes) -> bytes:
    # The casefolded form of ASCII is its lower case, which is ten times as fast.
    if texts.isascii():
        return texts.lower()
    return texts.decode("utf-8", "surrogatepass").casefold().encode("utf-8", "surrogatepass")


def _joined(segment: SegmentReader, name: str, rows: np.ndarray, chosen: np.ndarray) -> bytes:
    """Return one text of each row, or nothing for a row that is not chosen, each with its end."""
    values, offsets = segment.values(name), segment.values(f"{name}_offsets")
    if not is_offsets(offsets, len(values)):
        raise CorruptStoreError(f"{segment.rows_path}: {name}_offsets: not offsets")
    data = values.tobytes().replace(_END, b" ")
    begins = offsets[rows].tolist()
    ends = np.where(chosen, offsets[rows + 1], offsets[rows]).tolist()
    return _END.join([*(data[begin:end] for begin, end in zip(begins, ends, strict=True)), b""])
