"""The `tracestore` command."""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tracestore
from tracestore import convert
from tracestore.console import Output, Parser, Progress, format_size, natural, numbers, parse_size, port, positive, run
from tracestore.doctor import examine
from tracestore.errors import UsageError
from tracestore.export import FORMATS, SCORES_FILE, TRACES_PER_FILE, export_store
from tracestore.ingest.scores import read_scores
from tracestore.report import write_report
from tracestore.store.files import folder_of
from tracestore.store.fsio import translated_errors
from tracestore.store.lint import lint_store
from tracestore.store.merge import MergeReport, merge_stores, subset_store
from tracestore.store.schema import CODECS
from tracestore.store.selection import indices_of_ids, indices_of_segments, read_ids
from tracestore.store.verify import repair_store, verify_store
from tracestore.store.writer import StoreWriter
from tracestore.train.flags import add_flags, model_sizes, step_options
from tracestore.view import View, as_json, find_trace, save_picture, show


def _info(args: argparse.Namespace, output: Output) -> int:
    with tracestore.open(args.store) as store:
        info = store.info()
    if args.json:
        output.document(info)
        return 0
    for name, value in info.items():
        if name == "bytes":
            value = f"{value:,} ({format_size(value)})"
        elif isinstance(value, list):
            value = ", ".join(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            value = f"{value:,}"
        output.say(f"{name:17} {'unknown' if value is None else value}")
    return 0


def _verify(args: argparse.Namespace, output: Output) -> int:
    progress = Progress(output)
    if args.repair:
        report = repair_store(args.store)
    else:
        report = verify_store(
            args.store,
            quick=args.quick,
            progress=lambda done, total: progress.update(
                lambda s: f"{100 * done / max(1, total):.0f} % of {format_size(total)}, {done / s / 1e6:,.0f} MB/s"
            ),
        )
    progress.clear()
    output.document(asdict(report))
    for line in report.repaired:
        output.say(f"repaired: {line}")
    if report.damaged:
        for name, problem in sorted(report.damaged.items()):
            print(f"damaged: {name}: {problem}", file=sys.stderr)
        return 3
    if not args.json:
        depth = "sizes of" if args.quick else "every byte of"
        output.say(
            f"whole: generation {report.generation}, {depth} {report.num_files:,} files, {format_size(report.num_bytes)}"
        )
        for name in report.leftovers:
            output.say(f"leftover of an unfinished write, the next writer removes it: {name}")
    return 0


def _lint(args: argparse.Namespace, output: Output) -> int:
    progress = Progress(output)
    report = lint_store(
        args.store,
        score_threshold=args.score_threshold,
        progress=lambda done, total: progress.update(lambda s: f"{done:,} of {total:,} traces"),
    )
    progress.clear()
    output.document(asdict(report))
    if args.json:
        return 1 if report.counts else 0
    for kind, count in report.counts.items():
        listed = [f for f in report.findings if f.kind == kind]
        first, names = listed[0], [f"{f.index} ({f.question_id})" for f in listed[:3] if f.index is not None]
        where = f"trace {names[0]}" if count == 1 else f"{count:,} traces, the first {', '.join(names)}"
        where = f" {where}:" if names else ""
        output.say(f"{first.severity}: {kind}:{where} {first.found}. {first.advice[:1].upper()}{first.advice[1:]}.")
    if report.counts:
        return 1
    output.say(f"clean: {report.num_traces:,} traces")
    return 0


def _score(args: argparse.Namespace, output: Output) -> int:
    scores = read_scores(Path(args.scores), args.score_column, args.group_column)
    # Looked for first: a store that is not there is not made.
    tracestore.open(args.store).close()
    with StoreWriter(args.store) as writer:
        columns = writer.read_columns()
        updates, unknown = {}, 0
        by_id: dict[str, list[int]] = {}
        if not scores.has_samples:
            for index in range(len(columns)):
                by_id.setdefault(writer.index.question_id(index), []).append(index)
        for (question_id, sample), (score, group) in scores.values.items():
            found = writer.index.find(question_id, sample)
            indices = by_id.get(question_id, []) if not scores.has_samples else [found] if found >= 0 else []
            unknown += not indices
            for index in indices:
                if not (math.isnan(score) and not group):
                    updates[index] = (score, math.nan, group or None)
        writer.set_values(updates)
        writer.commit()
        result = {
            "store": str(args.store),
            "num_updated": len(updates),
            "num_scored": writer.manifest.num_scored,
            "num_traces": writer.manifest.num_traces,
            "num_scores_without_trace": unknown,
            "generation": writer.manifest.generation,
        }
    output.document(result)
    if not args.json:
        output.say(
            f"{result['num_updated']:,} traces updated, {result['num_scored']:,} of {result['num_traces']:,} "
            f"have a score; {unknown:,} scores belong to no trace"
        )
    return 0


def _copied(args: argparse.Namespace, output: Output, report: MergeReport) -> int:
    """Says what a merge or a subset did."""
    with tracestore.open(args.dst) as store:
        num_traces = len(store)
    output.document({"store": str(args.dst), "num_traces": num_traces, **asdict(report)})
    if not args.json:
        output.say(
            f"{args.dst}: {report.num_traces_new:,} traces added, {num_traces:,} in all; "
            f"{report.num_duplicates:,} were there already"
        )
        if report.num_scores_filled:
            output.say(f"{report.num_scores_filled:,} of those had no score and got one")
        if report.num_scores_differing:
            output.say(f"{report.num_scores_differing:,} of those have another score, which stays")
    return 0


def _traces_done(output: Output) -> tuple[Progress, Callable[[int, int], None]]:
    progress = Progress(output)
    return progress, lambda done, total: progress.update(lambda s: f"{done:,} of {total:,} traces")


def _merge(args: argparse.Namespace, output: Output) -> int:
    progress, on_traces = _traces_done(output)
    with translated_errors(folder_of(args.dst)):
        report = merge_stores(args.stores, args.dst, codec=args.codec, overwrite=args.overwrite, progress=on_traces)
    progress.clear()
    return _copied(args, output, report)


def _subset(args: argparse.Namespace, output: Output) -> int:
    with tracestore.open(args.store) as store:
        if args.ids is not None:
            indices = indices_of_ids(store, read_ids(Path(args.ids)))
        elif args.split is not None:
            from tracestore.train.split import make_split

            split = make_split(store, store.targets(args.score_threshold), args.seed)
            indices = split.indices[args.split]
        else:
            indices = indices_of_segments(store, args.segments)
    progress, on_traces = _traces_done(output)
    with translated_errors(folder_of(args.dst)):
        report = subset_store(
            args.store, args.dst, indices, codec=args.codec, overwrite=args.overwrite, progress=on_traces
        )
    progress.clear()
    return _copied(args, output, report)


def _export(args: argparse.Namespace, output: Output) -> int:
    progress, on_traces = _traces_done(output)
    with tracestore.open(args.store) as store:
        report = export_store(
            store, args.out_dir, format=args.format, traces_per_file=args.traces_per_file, progress=on_traces
        )
    progress.clear()
    output.document(asdict(report))
    if not args.json:
        scores = f", scores in {SCORES_FILE}" if report.scores_file else ""
        output.say(
            f"{report.out_dir}: {report.num_traces:,} traces in {report.num_files:,} files, "
            f"{format_size(report.bytes)}{scores}"
        )
        if report.num_labels_left_out:
            output.say(
                f"{report.num_labels_left_out:,} traces have a label of their own, for which pickles have no field: "
                "it is left out"
            )
    return 0


def _view(args: argparse.Namespace, output: Output) -> int:
    with tracestore.open(args.store) as store:
        view = View.of(store, find_trace(store, args.trace, args.sample), args.layer, args.head)
        if args.save is not None:
            save_picture(view, Path(args.save))
            output.say(f"{args.save}: attention and hidden states of trace {view.trace.index}")
        if args.json:
            output.document(as_json(view))
        elif args.save is None:
            for line in show(view):
                output.say(line)
    return 0


def _report(args: argparse.Namespace, output: Output) -> int:
    progress, on_traces = _traces_done(output)
    with tracestore.open(args.store) as store:
        write_report(
            store,
            Path(args.output),
            score_threshold=args.score_threshold,
            lint=not args.no_lint,
            progress=on_traces,
        )
    progress.clear()
    output.document({"store": str(args.store), "output": str(args.output)})
    if not args.json:
        output.say(f"{args.output}: open it in a browser")
    return 0


def _serve(args: argparse.Namespace, output: Output) -> int:
    from tracestore.serve import make_server

    with tracestore.open(args.store) as store:
        results = None if args.results is None else Path(args.results)
        server = make_server(store, results, port=args.port, score_threshold=args.score_threshold)
        output.document({"store": str(args.store), "url": server.url, "port": server.port})
        if not args.json:
            output.say(f"{args.store}: {len(store):,} traces at {server.url}")
            output.say("The address is for this machine and carries a secret; Ctrl-C ends.")
        try:
            server.run()
        except KeyboardInterrupt:
            output.say("ended")
    return 0


def _doctor(args: argparse.Namespace, output: Output) -> int:
    findings = list(examine(Path(args.folder)))
    output.document([asdict(finding) for finding in findings])
    if args.json:
        return 0
    topic = None
    for finding in findings:
        if finding.topic != topic:
            topic = finding.topic
            output.say(topic)
        output.say(f"  {finding.name:18} {finding.value}")
        if finding.advice:
            output.say(f"  {'':18} advice: {finding.advice}")
    return 0


def _plan(args: argparse.Namespace, output: Output) -> int:
    # Imported here: the other commands start without it.
    from tracestore.train.config import TrainConfig
    from tracestore.train.estimate import Estimator, covers
    from tracestore.train.model_config import MODEL_NAMES, VIEWS
    from tracestore.train.plan import TrainingPlan, detectors_for, training_part

    if args.model is not None and args.model not in MODEL_NAMES:
        raise UsageError(f"found --model {args.model}, expected one of {', '.join(MODEL_NAMES)}")
    if args.precision == "fp16":
        raise UsageError("found --precision fp16, which needs a GPU; plan is for the CPU")
    config, sizes = TrainConfig(**step_options(args)), model_sizes(args)
    plans = []
    with tracestore.open(args.store) as store:
        names = [args.model] if args.model else detectors_for(store)
        for name in names:
            store.require(VIEWS[name])
        training_part(store)
        planner: Callable[[str], TrainingPlan]
        if args.measure or not all(covers(name, store, config, sizes) for name in names):
            from tracestore.train.measure import Measurer  # imports torch, which takes seconds

            planner = Measurer(store, config, sizes, args.num_threads)
        else:
            planner = Estimator(store, config, sizes, args.num_threads)
        for name in names:
            plans.append(planner(name).as_json(args.memory))
            if not args.json:
                output.say(_plan_lines(plans[-1]))
    output.document({"store": str(args.store), "models": plans})
    return 0


def _plan_lines(plan: dict[str, Any]) -> str:
    lines = [
        f"{plan['model']}, {'measured' if plan['measured'] else 'estimated'}: batches of {plan['batch_size']} take "
        f"{format_size(plan['peak_memory_bytes'])} at the peak, libraries included, and "
        f"{plan['seconds_per_epoch']:,.1f} s an epoch",
        f"  and {format_size(plan['file_bytes'])} of mapped files, which the system may take back",
        f"  smallest --memory-budget: {format_size(plan['floor_bytes'])}",
    ]
    if "memory_bytes" in plan:
        fits = f"largest batch {plan['largest_batch']:,}" if plan["largest_batch"] else "not even a batch of one fits"
        fits += f", largest micro-batch of batches of {plan['batch_size']}: {plan['largest_micro_batch']:,}"
        lines.append(f"  in {format_size(plan['memory_bytes'])}: {fits}")
    return "\n".join(lines)


def _completion(args: argparse.Namespace, output: Output) -> int:
    import shtab

    output.say(shtab.complete(make_parser(), args.shell))
    return 0


def make_parser() -> Parser:
    parser = Parser(prog="tracestore", description="Stores of language-model traces.")
    parser.add_argument("--version", action="version", version=f"tracestore {tracestore.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    # Here for help and completion; `main` hands its words to convert itself.
    commands.add_parser("convert", help="files of traces into a store", parents=[convert.make_parser()], add_help=False)
    info = commands.add_parser("info", help="what a store holds", epilog="Example: tracestore info store.zarr --json")
    info.set_defaults(function=_info)
    verify = commands.add_parser(
        "verify",
        help="check every byte",
        description="Exit code 0: whole. 3: damaged, each damaged file named.",
        epilog="Example: tracestore verify store.zarr --quick",
    )
    verify.add_argument("--quick", action="store_true", help="sizes and manifest only")
    verify.add_argument("--repair", action="store_true", help="set a damaged newest manifest aside")
    verify.set_defaults(function=_verify)
    lint = commands.add_parser(
        "lint",
        help="look for values that training would stumble over",
        description="Exit code 0: clean. 1: findings. 3: a damaged store.",
        epilog="Example: tracestore lint store.zarr --json",
    )
    lint.add_argument("--score-threshold", type=float, default=0.5, metavar="T", help="of the class balance (0.5)")
    lint.set_defaults(function=_lint)
    score = commands.add_parser(
        "score",
        help="join or replace scores without touching a trace",
        description="Scores, labels and groups by question_id (and sample, where that is a column).",
        epilog="Example: tracestore score store.zarr --scores new_scores.csv",
    )
    score.add_argument("--scores", required=True, metavar="CSV", help="question_id and a score")
    score.add_argument("--score-column", metavar="NAME")
    score.add_argument("--group-column", metavar="NAME", help="what questions stay together by when split (group)")
    score.set_defaults(function=_score)
    view = commands.add_parser(
        "view",
        help="one trace: texts, attention, norms of hidden states",
        epilog="Example: tracestore view store.zarr tc_1234 --layer 12 --save trace.png",
    )
    view.add_argument("store", metavar="STORE")
    view.add_argument("trace", metavar="INDEX_OR_ID", help="a question id or, where none is called so, an index")
    view.add_argument("--sample", type=natural, default=0, metavar="N", help="which of several answers (0)")
    view.add_argument("--layer", type=int, metavar="N", help="of the attention (the middle one)")
    view.add_argument("--head", type=int, metavar="N", help="of the attention (the mean over the heads)")
    view.add_argument("--save", metavar="FILE", help="a picture: .png, .pdf or .svg")
    view.set_defaults(function=_view)
    report = commands.add_parser(
        "report",
        help="a store as one HTML page",
        description="Lengths, scores, classes, sizes, sources, samples and lint's findings; no network, no script.",
        epilog="Example: tracestore report store.zarr --output store.html",
    )
    report.add_argument("store", metavar="STORE")
    report.add_argument("--output", required=True, metavar="FILE", help="the page, .html")
    report.add_argument("--score-threshold", type=float, default=0.5, metavar="T", help="of the classes (0.5)")
    report.add_argument("--no-lint", action="store_true", help="do not read every value")
    report.set_defaults(function=_report)
    serve = commands.add_parser(
        "serve",
        help="a store in the browser of this machine",
        description="Search traces, look at attention and hidden states, and at what detectors say. Answers 127.0.0.1 only.",
        epilog="Example: tracestore serve store.zarr --results results",
    )
    serve.add_argument("store", metavar="STORE")
    serve.add_argument("--results", metavar="DIR", help="what tools/train.py wrote: predictions and curves")
    serve.add_argument("--port", type=port, default=0, metavar="N", help="default: any that is free")
    serve.add_argument("--score-threshold", type=float, default=0.5, metavar="T", help="of the labels (0.5)")
    serve.set_defaults(function=_serve)
    doctor = commands.add_parser(
        "doctor",
        help="versions, processor, memory, limits and disk, with advice",
        epilog="Example: tracestore doctor --folder /data",
    )
    doctor.add_argument("--folder", default=".", metavar="DIR", help="where stores are to lie (.)")
    doctor.set_defaults(function=_doctor)
    merge = commands.add_parser(
        "merge",
        help="traces of several stores into one",
        description="Traces that are there already are counted and left out; run again, it continues.",
        epilog="Example: tracestore merge one.zarr two.zarr all.zarr",
    )
    merge.add_argument("stores", nargs="+", metavar="STORE")
    merge.set_defaults(function=_merge)
    subset = commands.add_parser(
        "subset",
        help="some traces of a store into another one",
        epilog="Example: tracestore subset store.zarr train.zarr --split train",
    )
    subset.add_argument("store", metavar="STORE")
    chosen = subset.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--ids", metavar="FILE", help="one question id a line; every sample of it")
    chosen.add_argument("--split", choices=("train", "val", "test"), help="a part of tools/train.py's split")
    chosen.add_argument("--segments", type=numbers, metavar="RANGES", help="traces of these segments: 0-3,7")
    subset.add_argument("--score-threshold", type=float, default=0.5, metavar="T", help="of --split (0.5)")
    subset.add_argument("--seed", type=int, default=42, help="of --split (42)")
    subset.set_defaults(function=_subset)
    for command in (merge, subset):
        command.add_argument("dst", metavar="DST", help="the store to make or to add to")
        command.add_argument("--codec", choices=CODECS, help="compression of DST (none)")
        command.add_argument("--overwrite", action="store_true", help="replace DST")
    export = commands.add_parser(
        "export",
        help="a store into pickles or .pt files",
        description="Formats: pkl, lists of dicts; pt-lstm, last tokens; pt-gnn, PyG graphs. Scores go into scores.csv.",
        epilog="Example: tracestore export store.zarr traces_data/ --format pkl",
    )
    export.add_argument("store", metavar="STORE")
    export.add_argument("out_dir", metavar="OUT_DIR", help="a new or empty folder")
    export.add_argument("--format", choices=FORMATS, default="pkl", help="default: pkl")
    export.add_argument(
        "--traces-per-file",
        type=positive,
        default=TRACES_PER_FILE,
        metavar="N",
        help="at most (default: 500; files of graphs end at 1 GiB)",
    )
    export.set_defaults(function=_export)
    plan = commands.add_parser(
        "plan",
        help="what training takes: memory, time an epoch, the batch that fits",
        description="Estimates, in under a second; measures where there is no estimate, which takes seconds.",
        epilog="Example: tracestore plan store.zarr --model gnn_det_lstm --memory 8GiB",
    )
    plan.add_argument(
        "--model", metavar="NAME", help="lstm_solo, gnn_det_lstm or gvae_lstm (all that the store has the data for)"
    )
    plan.add_argument("--memory", type=parse_size, metavar="SIZE", help="what the process may take, e.g. 8GiB")
    plan.add_argument(
        "--measure", action="store_true", help="by real steps of training, which take some seconds a model"
    )
    add_flags(plan)
    plan.set_defaults(function=_plan)
    completion = commands.add_parser(
        "completion",
        help="what a shell needs to complete these words",
        epilog="Example: tracestore completion bash > ~/.local/share/bash-completion/completions/tracestore",
    )
    completion.add_argument("shell", choices=("bash", "zsh"))
    completion.set_defaults(function=_completion, json=False)
    for command in (info, verify, lint, score, plan):
        command.add_argument("store", metavar="STORE")
    for command in (info, verify, lint, score, view, report, serve, doctor, merge, subset, export, plan):
        command.add_argument("--json", action="store_true", help="one JSON document on standard output")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["convert"]:
        return convert.main(argv[1:])

    def command() -> int:
        args = make_parser().parse_args(argv)
        return int(args.function(args, Output(args.json)))

    return run("tracestore", command)


if __name__ == "__main__":
    sys.exit(main())
