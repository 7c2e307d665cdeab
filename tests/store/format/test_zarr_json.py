"""The zarr.json files equal those of zarr-python."""

import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, ZstdCodec

from tracestore.store.format import schema
from tracestore.store.format.zarr_json import array_metadata, group_metadata

ATTRIBUTES = {"tracestore": {"dtype": "bfloat16", "text": 'é " \n', "none": None, "some": [1, 2.5, True, {}]}}


def compressors(name, itemsize):
    if name == "none":
        return None
    if name == "zstd":
        return ZstdCodec(level=3)
    return BloscCodec(cname=name.removeprefix("blosc-"), clevel=5, shuffle="shuffle", blocksize=0, typesize=itemsize)


@pytest.mark.parametrize("codec", schema.CODECS)
@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", "<u2", "<u4", "<i4", "<i8", "|u1"])
def test_metadata_of_arrays_equals_that_of_zarr(dtype, codec):
    dtype = np.dtype(dtype)
    cases = [((0,), 7, {}), ((10,), 7, ATTRIBUTES), ((7,), 7, {}), ((1, 3), 1, {}), ((100, 3, 5), 9, ATTRIBUTES)]
    for shape, rows, attributes in cases:
        memory = {}
        zarr.create_array(
            zarr.storage.MemoryStore(memory),
            shape=shape,
            dtype=dtype,
            chunks=(rows, *shape[1:]),
            shards=(max(1, -(-shape[0] // rows)) * rows, *shape[1:]),
            compressors=compressors(codec, dtype.itemsize),
            filters=None,
            fill_value=0,
            attributes=attributes,
        )
        assert array_metadata(shape, rows, dtype, codec, attributes) == memory["zarr.json"].to_bytes()


@pytest.mark.parametrize("attributes", [{}, ATTRIBUTES])
def test_metadata_of_groups_equals_that_of_zarr(attributes):
    memory = {}
    zarr.create_group(zarr.storage.MemoryStore(memory), attributes=attributes)
    # Older releases of zarr write a null for missing consolidated metadata.
    expected = memory["zarr.json"].to_bytes().replace(b'  "consolidated_metadata": null,\n', b"")
    assert group_metadata(attributes) == expected


@pytest.mark.parametrize(("num_layers", "hidden_dim"), [(1 << 12, (1 << 12) + 1), (1 << 20, 17), (17, 1 << 20)])
def test_a_row_of_all_layers_is_bounded(num_layers, hidden_dim):
    options = {"attention": "mean", "dtype": "float16", "codec": "none"}
    data = schema.Attributes(options=options).to_json() | {"num_layers": num_layers, "hidden_dim": hidden_dim}
    with pytest.raises(ValueError, match=r"num_layers \* hidden_dim"):
        schema.Attributes.from_json(data)
