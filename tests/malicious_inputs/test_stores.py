"""Every operation on malicious stores; `make malicious-stores` runs the full number of stores."""

import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.long


def test_every_operation_on_malicious_stores(tmp_path):
    pytest.importorskip("torch")
    # These seeds have each of the eleven changes, and each of the eleven stores three times.
    words = [sys.executable, "-m", "tests.malicious_inputs.store_campaign", tmp_path, "82", "33"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", done.stdout
