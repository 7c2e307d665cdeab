"""HDF5 files: groups per question, stacks over traces, and ragged arrays."""

import numpy as np

from tests.ingest.corpus.registry import kind
from tests.ingest.corpus.samples import pad, pad_attention


def texts(values):
    """Return strings as h5py stores them."""
    return np.array(list(values), dtype=object)


def create(path):
    """Open a new HDF5 file."""
    import h5py

    path.parent.mkdir(parents=True, exist_ok=True)
    return h5py.File(path, "w")


@kind("h5py", ids="tqa_{}", expect="id attention tokens question answer")
def h5_group_per_question(folder, samples):
    """Write a group per question id: hidden_states, attentions, tokens; question and answer as attributes."""
    with create(folder / "traces.h5") as file:
        for s in samples:
            group = file.create_group(s.question_id)
            group.create_dataset("hidden_states", data=s.hidden.astype("f2"), compression="gzip")
            group.create_dataset("attentions", data=s.attention.astype("f2"), compression="gzip")
            group.create_dataset("tokens", data=s.tokens)
            group.attrs["question"], group.attrs["answer"] = s.question, s.answer


@kind("h5py", expect="id tokens")
def h5_samples_with_id_attribute(folder, samples):
    """Write sample_0, sample_1: hidden_states and token_ids, the id as an attribute."""
    with create(folder / "states.hdf5") as file:
        for i, s in enumerate(samples):
            group = file.create_group(f"sample_{i}")
            group.create_dataset("hidden_states", data=s.hidden)
            group.create_dataset("token_ids", data=s.tokens)
            group.attrs["id"] = s.question_id


@kind("h5py", expect="id")
def h5_layers_below_question(folder, samples):
    """Write question/layer_0 ... (S, D)."""
    with create(folder / "acts.h5") as file:
        for s in samples:
            for k, h in enumerate(s.hidden):
                file[f"{s.question_id}/layer_{k}"] = h


@kind("h5py", expect="id")
def h5_questions_below_layer(folder, samples):
    """Write layer_0/q0 ... (S, D): the other way round."""
    with create(folder / "acts.h5") as file:
        for k in range(3):
            for s in samples:
                file[f"layer_{k}/{s.question_id}"] = s.hidden[k]


@kind("h5py", expect="id")
def h5_dataset_per_question(folder, samples):
    """Write a dataset (L, S, D) per question id in the root."""
    with create(folder / "hidden.h5") as file:
        for s in samples:
            file.create_dataset(s.question_id, data=s.hidden, chunks=True, compression="lzf")


@kind("h5py", count=4, expect="id label")
def h5_stacked_with_lengths(folder, samples):
    """Write hidden_states (N, L, S, D) padded, lengths, question_ids as strings, labels."""
    hidden, mask = pad([s.hidden for s in samples], axis=1)
    with create(folder / "all.h5") as file:
        file["hidden_states"], file["lengths"] = hidden, mask.sum(1)
        file["question_ids"] = texts(s.question_id for s in samples)
        file["labels"] = np.array([int(s.score < 0.5) for s in samples])


@kind("h5py", expect="attention tokens")
def h5_stacked_with_mask_and_heads(folder, samples):
    """Write hidden_states, attentions (N, L, H, S, S), attention_mask, input_ids, all padded on the left."""
    hidden, mask = pad([s.hidden for s in samples], axis=1, side="left")
    with create(folder / "batch.h5") as file:
        file["hidden_states"], file["attention_mask"] = hidden, mask
        file["attentions"] = pad_attention([s.attention for s in samples], side="left")
        file["input_ids"] = pad([s.tokens for s in samples], side="left")[0]


@kind("h5py", count=4, expect="id tokens")
def h5_flat_with_offsets(folder, samples):
    """Write hidden_states (sum of S, L, D), tokens (sum of S,), offsets (N + 1,), ids; resizable datasets."""
    values = np.concatenate([s.hidden.transpose(1, 0, 2) for s in samples])
    with create(folder / "ragged.h5") as file:
        file.create_dataset("hidden_states", data=values, maxshape=(None, 3, 12), chunks=(4, 3, 12))
        file["tokens"] = np.concatenate([s.tokens for s in samples])
        file["offsets"] = np.cumsum([0, *[len(s.tokens) for s in samples]])
        file["question_id"] = texts(s.question_id for s in samples)


@kind("h5py", count=4, expect="id")
def h5_flat_with_lengths(folder, samples):
    """Write hidden_states (L, sum of S, D) and seq_lens (N,), ids as fixed-length bytes."""
    with create(folder / "ragged.h5") as file:
        file["hidden_states"] = np.concatenate([s.hidden for s in samples], 1)
        file["seq_lens"] = np.array([len(s.tokens) for s in samples])
        file["ids"] = np.array([s.question_id.encode() for s in samples])


@kind("h5py", count=6, expect_last="label")
def h5_data_set_groups(folder, samples):
    """Write a group per data set with hidden_states (N, L, D) of last tokens and labels; sizes as attributes."""
    with create(folder / "states.h5") as file:
        for name, part in (("triviaqa", samples[:3]), ("nq_open", samples[3:])):
            group = file.require_group(name)
            last = np.stack([s.hidden[:, -1] for s in part])
            group.create_dataset("hidden_states", data=last, compression="gzip", compression_opts=4)
            group.create_dataset("labels", data=np.array([int(s.score < 0.5) for s in part]))
            group.attrs["n_samples"], group.attrs["num_layers"], group.attrs["hidden_dim"] = 3, 3, 12


@kind("h5py", count=5)
def h5_layer_groups_of_last_tokens(folder, samples):
    """Write layer_8/activations (N, D) with the layers as an attribute of the file."""
    with create(folder / "store.h5") as file:
        file.attrs["n_tokens"], file.attrs["layers"] = 5, [8, 16, 24]
        for k, layer in enumerate((8, 16, 24)):
            last = np.stack([s.hidden[k, -1] for s in samples])
            file.create_dataset(f"layer_{layer}/activations", data=last, compression="gzip")
    return [s.expect_last(layers=[8, 16, 24]) for s in samples]


@kind("h5py", expect="id")
def h5_variable_length_rows(folder, samples):
    """Write rows of variable length: each trace flattened, with its shape next to it."""
    import h5py

    with create(folder / "vlen.h5") as file:
        rows = file.create_dataset("hidden_states", (3,), dtype=h5py.vlen_dtype(np.float32))
        for i, s in enumerate(samples):
            rows[i] = s.hidden.ravel()
        file["shapes"] = np.array([s.hidden.shape for s in samples])
        file["question_ids"] = texts(s.question_id for s in samples)


@kind("h5py", expect="id score")
def h5_file_per_sample(folder, samples):
    """Write a file per sample in sub-folders, question_id as a scalar dataset, score as an attribute."""
    for i, s in enumerate(samples):
        with create(folder / f"part_{i % 2}" / f"{i}.h5") as file:
            file["hidden_states"], file["question_id"] = s.hidden, s.question_id
            file.attrs["score"] = s.score


@kind("h5py", expect="id attention")
def h5_traces_group_with_batch_of_one(folder, samples):
    """Write traces/0 ... with hidden_states (L, 1, S, D) and attention (L, 1, H, S, S)."""
    with create(folder / "run.hdf5") as file:
        for i, s in enumerate(samples):
            group = file.create_group(f"traces/{i}")
            group["hidden_states"], group["attention"] = s.hidden[:, None], s.attention[:, None]
            group["question_id"] = s.question_id
