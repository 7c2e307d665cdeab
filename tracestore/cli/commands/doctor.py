"""tracestore doctor."""

import argparse
from dataclasses import asdict
from pathlib import Path

from tracestore.console import Output, Parser
from tracestore.doctor import examine


def add_arguments(parser: Parser) -> None:
    parser.epilog = "Example: tracestore doctor --folder /data"
    parser.add_argument("--folder", default=".", metavar="DIR", help="where stores are to lie (.)")


def run(args: argparse.Namespace, output: Output) -> int:
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
