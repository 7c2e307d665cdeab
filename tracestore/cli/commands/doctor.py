"""tracestore doctor."""

import argparse
from dataclasses import asdict
from pathlib import Path

from tracestore.console import Output, Parser
from tracestore.doctor import run_checks


def add_arguments(parser: Parser) -> None:
    parser.epilog = "Example: tracestore doctor --folder /data"
    parser.add_argument("--folder", default=".", metavar="DIR", help="where stores are to lie (.)")


def run(args: argparse.Namespace, output: Output) -> int:
    findings = list(run_checks(Path(args.folder)))
    output.print_json([asdict(finding) for finding in findings])
    if args.json:
        return 0
    topic = None
    for finding in findings:
        if finding.topic != topic:
            topic = finding.topic
            output.info(topic)
        output.info(f"  {finding.name:18} {finding.value}")
        if finding.advice:
            output.info(f"  {'':18} advice: {finding.advice}")
    return 0
