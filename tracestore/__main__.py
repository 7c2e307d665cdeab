"""python -m tracestore: the same as the console script."""

import sys

from tracestore.cli import main

sys.exit(main())
