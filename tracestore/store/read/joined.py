"""Several stores that are read as one: their traces follow each other, in the order of the stores."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import accumulate
from typing import Any, TypeVar

from tracestore.errors import UsageError
from tracestore.store.format import manifest as mf
from tracestore.store.format import schema
from tracestore.store.format.labels import ScoreField
from tracestore.store.format.provenance import require_compatible
from tracestore.store.io.files import Locations, ReadableFiles, is_same_location
from tracestore.store.read.generation import PinnedGeneration
from tracestore.store.read.index import StoreIndex
from tracestore.store.read.internals import StoreInternals
from tracestore.store.read.segment import SegmentReader, read_lens

T = TypeVar("T")

# Sizes that two stores must share where both know them.
_SIZES = ("num_layers", "hidden_dim", "num_heads", "hidden_dtype", "attention_dtype")


def require_same_options(stores: Sequence[StoreInternals]) -> None:
    """Raise UsageError unless the stores were made with the same form of attention and the same dtypes."""
    first = stores[0]
    for store in stores[1:]:
        for name in ("attention", "dtype"):
            found, expected = store.attributes.options[name], first.attributes.options[name]
            if found != expected:
                raise UsageError(
                    f"{store.files.location} was made with --{name} {found}, {first.files.location} with {expected}"
                )


def joined_score_fields(stores: Sequence[StoreInternals]) -> dict[str, ScoreField]:
    """Return the named scores of all stores, the default score of the first one first.

    UsageError if a name has two directions.
    """
    found: dict[str, ScoreField] = {}
    for store in stores:
        attributes = store.attributes
        for name in sorted(attributes.scores, key=lambda name: (name != attributes.default_score, name)):
            field = attributes.scores[name]
            if found.setdefault(name, field).direction != field.direction:
                raise UsageError(
                    f"{store.files.location}: a high score {name} marks {field.direction} answers, in the stores before "
                    f"{found[name].direction} ones; store one of them under another name (tracestore score --name)"
                )
    return found


def _joined_attributes(stores: Sequence[StoreInternals], allow_mixed_provenance: bool) -> schema.Attributes:
    """Return the attributes of all stores; UsageError unless `merge` would accept them, in this order."""
    require_same_options(stores)
    joined, first = stores[0].attributes, stores[0].files.location
    known = list(joined.provenance)
    for store in stores[1:]:
        where, added = store.files.location, store.attributes
        for name in _SIZES:
            found, expected = getattr(added, name), getattr(joined, name)
            if None not in (found, expected) and found != expected:
                raise UsageError(f"{where}: {name}: found {found}, expected {expected} as in {first}")
        layouts = {joined.attention_layout, added.attention_layout} - {None}
        if len(layouts) == 2 and "edges" in layouts:
            raise UsageError(f"{where}: {added.attention_layout} attention, expected {joined.attention_layout}")
        values = {name: getattr(joined, name) or getattr(added, name) for name in _SIZES}
        values["attention_layout"] = "square" if "square" in layouts else next(iter(layouts), None)
        joined = replace(joined, **values)
        for provenance in () if allow_mixed_provenance else added.provenance:
            require_compatible(known, [provenance], str(where))
        known += added.provenance
        for provenance in added.provenance:
            joined, _ = joined.with_provenance(provenance)
    codec = next((c for s in stores if (c := s.attributes.options["codec"]) != "none"), "none")
    scores = joined_score_fields(stores)
    options = joined.options | {"codec": codec}
    joined = replace(joined, options=options, scores=scores, default_score=next(iter(scores), None))
    return replace(joined, lens=_joined_lens(stores, joined), layouts=(), open_sources=())


def _joined_lens(stores: Sequence[StoreInternals], joined: schema.Attributes) -> Any:
    """Return the lens of the stores that have one, as an attribute of all; None if their values differ."""
    found, sums, holders = [], set[int](), []
    for store, first in zip(stores, _first_segments(stores), strict=False):
        if (lens := store.attributes.lens) is not None:
            rows = store.index.segment(lens.segment).rows
            provenance = None if lens.provenance is None else store.attributes.provenance[lens.provenance]
            number = None if provenance is None else joined.provenance.index(provenance)
            found.append(replace(lens, segment=lens.segment + first, provenance=number))
            # Its checksum is one of the matrix too: rows.zip lists the checksums of the other files.
            sums.add(rows.crc32c)
            holders.append(store)
    if len({replace(lens, segment=0, provenance=None) for lens in found}) != 1:
        return None
    if len(sums) > 1:  # perhaps by the codec alone
        lenses = [read_lens(store.files, store.index, store.attributes) for store in holders]
        if len({lens.arrays().digest() for lens in lenses if lens is not None}) > 1:
            return None
    return found[0]


def _first_segments(stores: Sequence[StoreInternals]) -> list[int]:
    """Return the number of the first segment of each store, and that of all segments."""
    return list(accumulate((store.manifest.num_segments for store in stores), initial=0))


def _joined_manifest(stores: Sequence[StoreInternals], attributes: schema.Attributes) -> mf.Manifest:
    """Return a manifest of the files of all stores, numbered one after another. Its generation is 0."""
    manifests = [store.manifest for store in stores]
    parts, columns, counts = [], [], dict.fromkeys(("trace", "segment", "source"), 0)
    for manifest in manifests:
        moved = {f"first_{kind}": count for kind, count in counts.items()}
        for part in manifest.parts:
            parts.append(replace(part, **{name: getattr(part, name) + by for name, by in moved.items()}))
        columns += [replace(c, first_trace=c.first_trace + counts["trace"]) for c in manifest.columns]
        for kind in counts:
            counts[kind] += getattr(manifest, f"num_{kind}s")
    sums = {
        f.name: sum(getattr(m, f.name) for m in manifests) for f in fields(mf.Manifest) if f.name.startswith("num_")
    }
    default = attributes.default_score
    sums["num_scored"] = sum(
        s.manifest.num_scored if s.attributes.default_score == default else s.columns.num_scored(default)
        for s in stores
    )
    stored = tuple(sorted({name for manifest in manifests for name in manifest.fields}))
    return mf.Manifest(0, attributes, tuple(parts), tuple(columns), fields=stored, **sums)


class _JoinedFiles(ReadableFiles):
    """Names the stores. Nothing is read through it: each store has files of its own."""

    def __init__(self, location: Locations) -> None:
        self.location = location


class JoinedInternals(StoreInternals):
    """The internals of several stores as those of one, for reading.

    Raises
    ------
    UsageError
        If `merge` would refuse one of the stores, a store is given twice, or none of them has the chosen score.
    """

    def __init__(
        self,
        members: Sequence[StoreInternals],
        cache_bytes: int,
        score: str | None = None,
        *,
        allow_mixed_provenance: bool = False,
    ) -> None:
        location = Locations(member.files.location for member in members)  # type: ignore[misc]
        for k, one in enumerate(location):
            if any(is_same_location(one, other) for other in location[:k]):
                raise UsageError(f"{one}: is given twice")
        manifest = _joined_manifest(members, _joined_attributes(members, allow_mixed_provenance))
        index = StoreIndex.joined(manifest, [member.index for member in members])
        columns = tuple(mapped for member in members for mapped in member.mapped_columns)
        files = _JoinedFiles(location)  # type: ignore[abstract]
        super().__init__(files, cache_bytes, PinnedGeneration(manifest, index, columns, None), score)
        self._members = tuple(members)
        # Files of local stores are never evicted.
        self._evicting = [member for member in members if member.files.keeps_generations]
        self._first_segment = _first_segments(members)
        for member in members:
            member.chunk_cache = self.chunk_cache

    @property
    def members(self) -> tuple[StoreInternals, ...]:
        """See StoreInternals."""
        return self._members

    def reopen(self, cache_bytes: int) -> StoreInternals:
        """See StoreInternals."""
        members = [member.reopen(cache_bytes) for member in self._members]
        return JoinedInternals(members, cache_bytes, self.score_name, allow_mixed_provenance=True)

    def close(self) -> None:
        """See StoreInternals."""
        super().close()
        for member in self._members:
            member.close()

    def _open_segment(self, number: int) -> SegmentReader:
        k = bisect_right(self._first_segment, number) - 1
        return self._members[k].segment(number - self._first_segment[k])

    def close_evicted(self) -> None:
        """See StoreInternals."""
        for member in self._evicting:
            before = member.num_evictions
            member.close_evicted()
            if member.num_evictions > before:
                self.num_evictions += member.num_evictions - before
                self._segments.clear()
