"""Inputs written by other versions of NumPy, and their expected values.

The values involve no random numbers, so that every version makes the same ones. To add the
files of a version, run this in an environment with that version of NumPy only. Versions
that write the same bytes share a file: 1.26 writes the same as 1.23, and 2.4 as 2.0.

    python tests/golden/library_inputs.py tests/golden/libraries
"""

import gzip
import pickle
import sys
from pathlib import Path

import numpy as np

LAYERS, HEADS, DIM = 2, 2, 4


def values(shape, dtype, start):
    """Return multiples of 1/16, which are exact in float16."""
    count = int(np.prod(shape))
    return ((np.arange(start, start + count) % 97 - 48) / 16).astype(dtype).reshape(shape)


def expected_traces():
    """Return three traces of one to three tokens, in float16, float32 and Fortran order."""
    traces = []
    for k, dtype in enumerate(("<f2", "<f4", "<f2")):
        tokens = 3 - k
        hidden = [values((tokens, DIM), dtype, 10 * k + layer) for layer in range(LAYERS)]
        attention = [np.tril(values((HEADS, tokens, tokens), dtype, 5 * k + layer)) for layer in range(LAYERS)]
        traces.append(
            {
                "hidden_states": [np.asfortranarray(h) for h in hidden] if k == 2 else hidden,
                "attentions": attention,
                "tokens": np.arange(tokens) + 7 * k,
                "tokens_decoded": [f"t{i}\u00e9\n" for i in range(tokens)],
                "generated_answer_clean": f"answer {k} \u2713 \U0001f40d",
                "question_id": f"q{k}",
                "logit": np.float32(0.5 + k),
                "rank": np.int64(k),
                "word": np.str_(f"w{k}"),
                "mask": np.array([True, False]),
                "words": np.array(["a", "b\u00e9"]),
                "codes": np.array([b"a", b"bc"]),
                "mixed": np.array(["a", 1, 2.5], dtype=object),
                "nothing": np.empty((0, 3), "<f4"),
                "big_endian": np.arange(3, dtype=">i4"),
            }
        )
    return traces


def main(folder):
    out = Path(folder)
    out.mkdir(exist_ok=True)
    existing = [path.read_bytes() for path in out.iterdir()]
    for protocol in range(6):
        data = pickle.dumps(expected_traces(), protocol)
        if data not in existing:
            (out / f"numpy-{np.__version__}-protocol{protocol}.pkl").write_bytes(data)
    packed = gzip.compress(pickle.dumps(expected_traces()[0], 4), mtime=0)
    if packed not in existing:
        (out / (f"numpy-{np.__version__}-bare.pkl.gz")).write_bytes(packed)


if __name__ == "__main__":
    main(sys.argv[1])
