"""Strings as bytes and offsets."""

import random

import numpy as np

from tracestore.store.format.ragged import decode_strings, encode_strings


def test_strings_equal_those_that_are_encoded_one_by_one():
    rng = random.Random(0)
    for _ in range(1000):
        characters = rng.choice(["a\0", "aé\ud800\udfff😀\0"])  # halves of a pair may meet
        texts = ["".join(rng.choices(characters, k=rng.randrange(5))) for _ in range(rng.randrange(6))]
        encoded = [text.encode("utf-8", "surrogatepass") for text in texts]

        data, offsets = encode_strings(iter(texts))

        assert data.tobytes() == b"".join(encoded)
        assert offsets.tolist() == np.cumsum([0, *map(len, encoded)]).tolist()
        assert decode_strings(data, offsets) == texts
