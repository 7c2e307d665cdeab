"""Read back what a training has written for a logger."""

import json
import struct
from collections import defaultdict

_BLOCK = 32 << 10


def tensorboard_steps(folder):
    """Return the steps of each key in the events of TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {key: [point.step for point in events.Scalars(key)] for key in events.Tags()["scalars"]}


def wandb_records(data):
    """Yield the records of a .wandb file: seven bytes, and blocks of 32 KiB of pieces (crc, length, kind)."""
    position, parts = 7, b""
    while position + 7 <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield parts
            parts = b""


def wandb_steps(folder):
    """Return the steps of each key in the files of the offline runs of Weights & Biases, which have one id."""
    from wandb.proto.wandb_internal_pb2 import Record

    found, ids = defaultdict(list), set()
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        ids.add(path.stem)
        for data in wandb_records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            values = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
            }
            for key in values.keys() - {"_step", "_runtime", "_timestamp"}:
                found[key].append(values["_step"])
    assert len(ids) == 1
    return {key: sorted(steps) for key, steps in found.items()}


def mlflow_steps(folder):
    """Return the steps of each key in the only run of MLflow in a folder."""
    from mlflow import MlflowClient

    client = MlflowClient((folder / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("tracestore").experiment_id])
    keys = run.data.metrics
    return {key: [metric.step for metric in client.get_metric_history(run.info.run_id, key)] for key in keys}


STEPS_OF = {"tensorboard": tensorboard_steps, "wandb": wandb_steps, "mlflow": mlflow_steps}
