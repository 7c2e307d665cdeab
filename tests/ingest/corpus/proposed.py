"""Convert every folder of the corpus without a layout, and by each candidate that is proposed.

python -m tests.ingest.corpus.proposed [--part main|unseen|outside|all] [--only NAME ...] [--width N]
"""

import warnings

import tracestore
from tests.ingest.corpus.measure import Difference, check_store, main
from tests.ingest.propose.folders import check_outcome, propose_folder
from tracestore.errors import TracestoreError


def attempt(folder, store, layout, expected):
    """Convert by a layout; return (result, detail): equal, wrong or refused."""
    try:
        tracestore.convert_files(folder, store, layout=layout.to_entries())
    except TracestoreError as error:
        return "refused", str(error)
    try:
        check_store(store, expected)
    except Difference as error:
        return "wrong", str(error)
    return "equal", ""


def measure_kind(kind, folder):
    """Write a folder, and convert it by what is proposed.

    Returns
    -------
    (result, detail) : tuple of str
        Result is one of by itself, pasted, refused, refused as it should, WRONG, skipped, UNTRUE (a candidate gave
        other values than it printed).
    """
    if missing := kind.missing():
        return "skipped", f"{', '.join(missing)} is not installed"
    source = folder / kind.name
    source.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = kind.write(source)
        except ModuleNotFoundError as error:
            return "skipped", str(error)
    proposal = propose_folder([source])
    if proposal.layout is not None:
        if kind.refused:
            return "WRONG", f"not refused: {proposal.layout.to_toml()}"
        result, detail = attempt(source, folder / "s.zarr", proposal.layout, expected)
        return {"equal": "by itself", "wrong": "WRONG", "refused": "refused"}[result], detail
    results = []
    for number, candidate in enumerate(proposal.candidates):
        store = folder / f"c{number}.zarr"
        result, detail = attempt(source, store, candidate.layout, expected)
        if result != "refused":
            try:
                check_outcome(store, candidate)
            except AssertionError as error:
                return "UNTRUE", f"{candidate.gives()}: {error}"
        results.append((result, detail))
    if kind.refused:
        return "refused as it should", f"{len(results)} candidates"
    for number, (result, _) in enumerate(results, 1):
        if result == "equal":
            reasons = proposal.candidates[number - 1]
            return "pasted", f"{number} of {len(results)}: {'; '.join([*reasons.unproved, *reasons.left_out])}"
    if results:
        first = proposal.candidates[0].layout.to_toml().replace("\n", " | ")
        return "refused", f"no candidate is equal: {results[0][1]}: {first}"
    return "refused", "no candidate: " + ("; ".join(proposal.refusals[:2]) or "no draft")


if __name__ == "__main__":
    main(description=__doc__, measure_kind=measure_kind)
