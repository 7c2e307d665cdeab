"""Plans: the sources of a conversion, cut into tasks. A plan lies in its store until it is committed."""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Any

from tracestore.console import Output
from tracestore.convert.choosing import input_files, layout_of_options
from tracestore.convert.cutting import cut
from tracestore.convert.described import DescribedRun
from tracestore.convert.options import ConvertOptions
from tracestore.convert.runner import Conversion, read_provenances
from tracestore.errors import CorruptStoreError, InvalidInputError, UsageError
from tracestore.ingest.score_files import FoundFiles
from tracestore.ingest.sources import fingerprint
from tracestore.store.format import paths
from tracestore.store.format.provenance import Provenance
from tracestore.store.io.ownership import check_store_destination
from tracestore.store.write.plan_files import PlanFiles, open_plan_files
from tracestore.store.write.writer import StoreWriter
from tracestore.tasks.plan_parts import facts_of_exports, fingerprints_of, identity_of, part_from_json, part_to_json

_MAX_PLAN_BYTES, _DIGEST_BYTES = 1 << 30, 16
# Options of the process, not of the plan.
_OWN = ("layout", "field", "workers", "dask", "dry_run")


class Quiet(Output):
    """Print nothing."""

    def info(self, text: str) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Task:
    """Sources that one process reads and writes into segments of their own.

    Attributes
    ----------
    store : str
        Absolute path or URL of the store.
    plan : str
        Digest of its plan.
    number : int
        Position in the plan.
    sources : tuple of str
        Names of the sources, in their order.
    num_bytes : int
        Size of their files.
    hash : str
        Name of its receipt: a hash of its sources, and of the layouts, options and versions of the plan.
    """

    store: str
    plan: str
    number: int
    sources: tuple[str, ...]
    num_bytes: int
    hash: str

    def to_json(self) -> str:
        """Return the task as a line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Task":
        """Return the task of a line of JSON; UsageError if it is none."""
        try:
            found = json.loads(text)
            task = cls(**found | {"sources": tuple(map(str, found["sources"]))})
            digests = {len(bytes.fromhex(digest)) for digest in (task.plan, task.hash)}
            if type(task.number) is int and digests == {_DIGEST_BYTES} and task.store:
                return task
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        raise UsageError("not a task of tracestore")


def digest_of(data: bytes) -> str:
    """Return the digest of a plan or a task."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


class TaskPlan:
    """The document of a plan.

    Parameters
    ----------
    files : PlanFiles
        Those of the store.
    data : bytes
        The document, as JSON.
    """

    def __init__(self, files: PlanFiles, data: bytes) -> None:
        self.files, self.data, self.digest = files, data, digest_of(data)
        self.store = files.location
        self.facts: dict[str, Any] = json.loads(data)
        self._common = digest_of(json.dumps(self.facts | {"tasks": None, "known": None, "modified": None}).encode())
        self.options = ConvertOptions(**self.facts["options"], workers=1)
        self.arguments = [Path(argument) for argument in self.facts["arguments"]]

    @classmethod
    def read(cls, task: Task) -> "TaskPlan":
        """Return the plan of a task.

        Raises
        ------
        UsageError
            If the store does not keep it, or another version has made it.
        InvalidInputError
            If a scores file or an export has changed.
        CorruptStoreError
            If it is damaged.
        """
        store = task.store
        try:
            plan = cls.load(open_plan_files(store), paths.plan(task.plan))
        except (FileNotFoundError, NotADirectoryError):
            raise UsageError(
                f"{store}: has no such plan: it is committed, or was removed; plan again, or repeat convert"
            ) from None
        if plan.facts["versions"] != versions(plan.facts["store_options"]["codec"]):
            raise UsageError(f"{store}: other versions made the plan: {plan.facts['versions']}; plan again")
        if task not in plan.tasks():
            raise UsageError(f"{store}: the plan has no such task; plan again")
        plan.check_files()
        return plan

    @classmethod
    def load(cls, files: PlanFiles, path: str) -> "TaskPlan":
        """Return a plan that lies in a store."""
        data, store = files.files.read_small(path, _MAX_PLAN_BYTES), files.location
        if path != paths.plan(digest_of(data)):
            raise CorruptStoreError(f"{store}/{path}: damaged; remove it, and plan again")
        try:
            plan = cls(files, data)
            plan.tasks()
            return plan
        except (ValueError, TypeError, LookupError, RecursionError, UsageError):
            raise CorruptStoreError(f"{store}/{path}: not a plan; remove it, and plan again") from None

    def check_files(self) -> None:
        """Raise InvalidInputError if a scores file or the facts of an export have changed."""
        for name, expected in (*self.facts["scores"], *self.facts["exports"]):
            try:
                found = list(fingerprint(Path(name)))
            except FileNotFoundError:
                raise InvalidInputError("is gone since the plan; plan again", source=name) from None
            except OSError as error:
                raise InvalidInputError(f"cannot be opened: {error.strerror}", source=name) from None
            if found != expected:
                raise InvalidInputError("has changed since the plan; plan again", source=name)

    def is_current(self, options: ConvertOptions) -> bool:
        """Return whether the versions, scores files, provenances and options of the store are those of the plan."""
        stored = self.facts["store_options"]
        found = None if self.options.overwrite else _options_of(self.files)
        if self.facts["versions"] != versions(stored["codec"]) or found not in (None, stored):
            return False
        try:
            self.check_files()
        except InvalidInputError:
            return False
        scores = input_files(self.arguments, str(self.store), options)[1]
        if {str(path.absolute()) for path in scores} != {path for path, _ in self.facts["scores"]}:
            return False
        return self.provenances() == read_provenances(self.arguments, self.options, Quiet())

    def tasks(self) -> list[Task]:
        """Return the tasks in their order. A later plan of the same files has the receipts of tasks that are equal."""
        tasks = []
        for number, found in enumerate(self.facts["tasks"]):
            positions, names, sizes, _ = zip(*found, strict=True)
            # Fingerprints are samples. For another plan the sources must not have been written to, either.
            known = [self._common, found, [self.facts["modified"][k] for k in positions]]
            name = digest_of(json.dumps(known).encode())
            tasks.append(Task(str(self.store), self.digest, number, names, sum(sizes), name))
        return tasks

    def described(self) -> DescribedRun:
        """Return the sources with their layouts."""
        order = {Path(path): k for k, path in enumerate(self.facts["order"])}
        scores = FoundFiles([Path(path) for path, _ in self.facts["scores"]], [Path(p) for p in self.facts["unread"]])
        parts = list(map(part_from_json, self.facts["parts"]))
        return DescribedRun(parts, order, scores, finds_layouts=self.facts["finds_layouts"])

    def provenances(self) -> dict[Path, Provenance]:
        """Return the known provenances by source argument."""
        return {Path(path): Provenance.from_json(found) for path, found in self.facts["provenances"]}

    def known(self) -> dict[str, Any]:
        """Return the arguments of a Conversion that the plan knows."""
        return {"described": self.described(), "provenances": self.provenances()}

    def require_written(self, tasks: Sequence[Task] = ()) -> None:
        """Raise UsageError unless the store has the plan, and a receipt of each of these tasks."""
        found = self.files.times()
        if paths.plan(self.digest) not in found:
            raise UsageError(f"{self.store}: another process has committed or removed the plan; repeat the command")
        if missing := [task for task in tasks if paths.receipt(task.hash) not in found]:
            raise UsageError(
                f"{self.store}: {len(missing):,} of {len(self.facts['tasks']):,} tasks are not written, such as that of "
                f"{missing[0].sources[0]}; tracestore work writes them"
            )

    def with_receipts(self, kept: Iterable[Task] = ()) -> list[str]:
        """Return the paths of the plan, and of all receipts but those of other plans and of `kept`."""
        own, found = paths.plan(self.digest), self.files.times()
        return [own, *_unused_receipts(self.files, [path for path in found if path != own], kept)]

    def remove(self, kept: Iterable[Task] = ()) -> None:
        """Remove the plan with its receipts; see with_receipts()."""
        self.files.remove(self.with_receipts(kept))


def _unused_receipts(files: PlanFiles, found: Collection[str], kept: Iterable[Task]) -> list[str]:
    """Return those paths of receipts among some that are not of a plan among them, or of `kept`."""
    plans = map(TaskPlan.tasks, kept_plans(files, found))
    known = {paths.receipt(task.hash) for tasks in (kept, *plans) for task in tasks}
    return [path for path in found if path.endswith(".zip") and path not in known]


def kept_plans(files: PlanFiles, found: Iterable[str]) -> Iterator[TaskPlan]:
    """Yield the plans among paths that were found, without damaged ones, which no task can use."""
    for path in found:
        if path.endswith(".json"):
            with suppress(CorruptStoreError, FileNotFoundError):  # Another process may remove it.
                yield TaskPlan.load(files, path)


def _options_of(files: PlanFiles) -> dict[str, str] | None:
    """Return the options of a store, None if it has no generation."""
    for number in files.files.generations():
        with suppress(FileNotFoundError, CorruptStoreError):
            return dict(files.files.load_manifest(number).attributes.options)
    return None


def versions(codec: str) -> dict[str, str]:
    """Return the versions that decide the bytes of a segment."""
    names = ["tracestore"] + ([] if codec == "none" else ["numcodecs"])
    return {name: version(name) for name in names}


def plan_tasks(
    sources: str | PathLike[str] | Iterable[str | PathLike[str]],
    store: str | PathLike[str],
    options: ConvertOptions | None = None,
    *,
    output: Output | None = None,
) -> list[Task]:
    """Cut a conversion into tasks. The result depends on sources and options alone.

    Sources that the store has are left out. A plan is kept in the store until it is committed, and returned again for
    the same arguments. It is replaced if the version of tracestore, a scores file, an export, a provenance or the options
    of the store have changed.

    Parameters
    ----------
    sources : path or iterable of paths
        Trace files, and folders that are searched for them, where all machines find them.
    store : str or PathLike
        The store to create or to extend: a folder where all machines find it, or a URL.
    options : ConvertOptions, optional
    output : Output, optional
        Receives notes. By default none are printed.

    Returns
    -------
    list of Task
        None if the store has all sources.

    Raises
    ------
    UsageError
        If an option is wrong.
    InvalidInputError
        If files do not fit the layout.
    """
    options, output = options or ConvertOptions(), output or Quiet()
    if options.dry_run:
        raise UsageError("a dry run has no tasks")
    given = [sources] if isinstance(sources, str | PathLike) else list(sources)
    arguments = [Path(path).absolute() for path in given]
    check_store_destination(store, overwrite=options.overwrite)
    files = open_plan_files(store)
    plan = kept_plan(arguments, files, options, output)
    if plan is None:
        conversion = Conversion(arguments, str(files.location), options, output)
        plan = new_plan(conversion, arguments, files, options, output)
        conversion.described.release()
        if plan is None and (scores := conversion.scoring.scores_file) is not None:
            output.info(f"{scores}: changed scores are stored by tasks of new sources, or by convert without a plan")
    return [] if plan is None else plan.tasks()


def _given(arguments: Sequence[Path], options: ConvertOptions) -> dict[str, Any]:
    """Return the facts of a plan that its caller has given."""
    layout = layout_of_options(options.layout, options.field)
    scores, provenance = (
        None if path is None else str(Path(path).absolute()) for path in (options.scores, options.provenance)
    )
    options = replace(options, scores=scores, provenance=provenance)
    return {
        "arguments": [str(path.absolute()) for path in arguments],
        "options": {field.name: getattr(options, field.name) for field in fields(options) if field.name not in _OWN},
        "layout": None if layout is None else layout.to_toml(),
    }


def kept_plan(arguments: Sequence[Path], files: PlanFiles, options: ConvertOptions, output: Output) -> TaskPlan | None:
    """Return the plan of these sources and options that a store keeps; remove it if it is outdated, and return None."""
    given = _given(arguments, options)
    for plan in kept_plans(files, files.times()):
        if given.items() <= plan.facts.items():
            if plan.is_current(options):
                return plan
            output.info(f"the plan {plan.digest} is replaced: versions, inputs, provenance or the store have changed")
            plan.remove()
    return None


def new_plan(
    conversion: Conversion,
    arguments: Sequence[Path],
    files: PlanFiles,
    options: ConvertOptions,
    output: Output,
    *,
    min_tasks: int = 1,
) -> TaskPlan | None:
    """Cut a conversion into tasks, and keep the plan in the store; return None if it has fewer tasks than `min_tasks`."""
    described, attention = conversion.described, conversion.default_attention
    with conversion.open_writer(StoreWriter, can_resume=False) as writer:
        writer.check_provenance(conversion.known_provenances())
        stored = dict(writer.attributes.options)
        found = list(map(identity_of, conversion.sources))
        sources = [(k, source.name, *found[k][:2]) for k, source in enumerate(conversion.sources)]
        known = {source[0]: source[1:] for source in sources if conversion.is_known(writer, *source[1:])}
        sources = [source for source in sources if source[0] not in known]
        shared = [conversion.sources[k].shared for k, *_ in sources]
        sizes = [size for *_, size, _ in sources]
        runs = cut(sizes, shared, conversion.total_bytes)
        if len(runs) == 1 < (num_alone := len(cut(sizes, [None] * len(sizes), conversion.total_bytes))):
            output.info(described.shared_note(num_alone))
        if len(runs) < min_tasks:
            return None
        facts = _given(arguments, options) | {
            "versions": versions(stored["codec"]),
            "store_options": stored,
            "has_attention": conversion.has_attention(),
            "refuse_attention": attention.is_refused(stored["attention"]),
            "parts": list(map(part_to_json, described.parts)),
            "order": [str(path.absolute()) for path in described.order],
            "finds_layouts": described.finds_layouts,
            "scores": fingerprints_of(described.score_files.scores),
            "exports": fingerprints_of(facts_of_exports(conversion.sources)),
            "unread": [str(path.absolute()) for path in described.score_files.unread],
            "provenances": [[str(p.absolute()), found.to_json()] for p, found in conversion.provenances.items()],
            "tasks": [[sources[k] for k in run] for run in runs],
            "known": list(known.values()),
            "modified": [identity.modified_ns for identity in found],
        }
        for note in attention.notes(stored["attention"]):
            output.info(note)
        plan = TaskPlan(files, json.dumps(facts, sort_keys=True, indent=0).encode())
        files.remove(_unused_receipts(files, files.times(), plan.tasks()))
        writer.target.keep_file(paths.plan(plan.digest), plan.data)
    return plan
