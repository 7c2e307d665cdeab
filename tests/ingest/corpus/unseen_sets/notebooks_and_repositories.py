"""Kinds as notebooks and the repositories of papers write them."""

import functools
import io
import json
from types import SimpleNamespace

import numpy as np

from tests.ingest.corpus import registry
from tests.ingest.corpus.samples import (
    dump,
    expect_output,
    forward,
    generate,
    joined_states,
    make_samples,
    pad,
    prompts,
    save_pt,
    states_of,
    tensor,
    write_json,
    write_lines,
    write_table,
)

kind = functools.partial(registry.kind, register=registry.UNSEEN)
# Attributes of a sample by the names of columns that differ from them.
ATTRIBUTES = dict.fromkeys(("id", "qid", "example_id"), "question_id")
ATTRIBUTES |= dict.fromkeys(("generated_answer", "model_answer", "response"), "answer")


def wrong(sample):
    """Return 1 if the answer of a sample is a hallucination, else 0."""
    return int(sample.score < 0.5)


def correctness(sample):
    """Return 1.0 if the answer of a sample is correct, else 0.0."""
    return float(sample.score >= 0.5)


def record(sample, columns, **more):
    """Return a row with the named columns of id, question and answer, and `more` columns."""
    return {name: getattr(sample, ATTRIBUTES.get(name, name)) for name in columns.split()} | more


def row_ranges(samples):
    """Return (start, end) of each sample in an array with the tokens of all samples."""
    ends = np.cumsum([len(s.tokens) for s in samples]).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


@kind()
def inside_sampled_answers(folder):
    """Write a pickle of INSIDE: a question with K sampled answers, last tokens stacked over the answers (K, L, D)."""
    rows = []
    for i in range(2):
        samples = make_samples(4, seed=i + 10)
        answers = [f"Answer {k} to {i}" for k in range(4)]
        row = {"id": f"nq_{i}", "question": samples[0].question, "generations": answers, "perplexity": 1.5 + i}
        rows.append(row | {"last_token_embeddings": np.stack([s.hidden[:, -1] for s in samples]).astype("f2")})
        yield from [
            s.expect_last(question_id=f"nq_{i}", sample=k, question=samples[0].question, answer=answers[k])
            for k, s in enumerate(samples)
        ]
    dump(folder / "0.pkl", rows)


@kind("transformers")
def pt_hidden_and_attention_tuples(folder):
    """Write (outputs.hidden_states, outputs.attentions): a pair of nested tuples per question id, without names."""
    outputs = {f"q{i}": forward(ids) for i, ids in enumerate(prompts())}
    save_pt(folder / "outputs.pt", {name: (out.hidden_states, out.attentions) for name, out in outputs.items()})
    return [expect_output(out, question_id=name) for name, out in outputs.items()]


@kind("transformers")
def llm_check_columns(folder):
    """Write columns of LLM-Check: logits, hidden_acts, attns as lists of lists of layers, tok_lens of the answers."""
    data = {"logits": [], "hidden_acts": [], "attns": [], "tok_lens": [], "responses": []}
    for i, ids in enumerate(prompts(5, lengths=(6, 9, 5, 11, 7))):
        output = forward(ids)
        hidden, heads = ([layer[0] for layer in layers] for layers in (output.hidden_states, output.attentions))
        row = (output.logits[0], hidden, heads, [3, ids.shape[1]], f"Response {i}")
        for column, value in zip(data.values(), row, strict=True):
            column.append(value)
        yield expect_output(output, answer=f"Response {i}")
    dump(folder / "fava_llama.pkl", data)


@kind(count=5, ids="ex{}", expect="id question answer label")
def pkl_by_data_set_and_split(folder, samples):
    """Write one pickle for an experiment: data set to split to a list of traces."""
    rows = [record(s, "id question generated_answer", hidden_states=s.hidden, hallucination=wrong(s)) for s in samples]
    trivia = {"train": rows[:2], "validation": rows[2:3]}
    dump(folder / "results.pkl", {"triviaqa": trivia, "nq_open": {"validation": rows[3:]}})


@kind("transformers")
def pt_file_per_generation_step(folder):
    """Write a folder per question: step_0.pt with layers (1, P, D), step_1.pt ... step_11.pt (1, 1, D), meta.json."""
    for i, ids in enumerate(prompts()):
        output = generate(ids, new=12 + i, attentions=False)
        base = folder / f"tqa-{i}"
        for n, step in enumerate(output.hidden_states):
            save_pt(base / f"step_{n}.pt", [layer.clone() for layer in step])
        texts = {"question": f"Who is {i}?", "answer": f"Person {i}"}
        write_json(base / "meta.json", texts | {"num_generated_tokens": 12 + i})
        hidden = joined_states(output.hidden_states)
        yield {"question_id": base.name, "hidden_states": hidden, "has_embeddings": True} | texts


@kind(count=5, expect="id")
def pt_layer_lists_of_batches(folder, samples):
    """Write a loop over a DataLoader: layer number to a list of batches (B, S, D), masks per batch, ids of all rows."""
    value = {"activations": {8: [], 16: [], 24: []}, "attention_mask": []}
    for start in (0, 2, 4):
        hidden, mask = pad([s.hidden for s in samples[start : start + 2]], axis=1)
        for k, layer in enumerate(value["activations"]):
            value["activations"][layer].append(tensor(hidden[:, k], "float16"))
        value["attention_mask"].append(tensor(mask))
    save_pt(folder / "acts.pt", value | {"question_ids": [s.question_id for s in samples]})


@kind(count=4)
def pkl_namespaces(folder, samples):
    """Write a list of types.SimpleNamespace whose attributes are the fields; tensors per layer."""
    rows = [
        SimpleNamespace(
            **record(s, "question_id question response"),
            hidden_states=[tensor(h) for h in s.hidden],
            attentions=[tensor(a) for a in s.attention],
            is_correct=bool(correctness(s)),
        )
        for s in samples
    ]
    dump(folder / "records.pkl", rows)
    return [s.expect("id question answer attention", score=correctness(s)) for s in samples]


@kind(count=5, layers=4)
def iti_pickles_of_all_tokens(folder, samples):
    """Write NAME_layer_wise.pkl (list of (L + 1, S, D)), NAME_head_wise.pkl (list of (L, S, H d)), NAME_tokens.pkl."""
    heads = make_samples(5, layers=3, seed=7)
    base, name = folder / "activations", "llama_7B_tqa_gen"
    dump(base / f"{name}_layer_wise.pkl", [s.hidden for s in samples])
    dump(base / f"{name}_head_wise.pkl", [s.hidden for s in heads])
    dump(base / f"{name}_tokens.pkl", [s.words for s in samples])
    return [s.expect(has_embeddings=True) for s in samples]


@kind(count=4)
def npy_memory_map_with_row_ranges(folder, samples):
    """Write activations.npy (sum of S, L, D) through a memory map and index.csv with start and end per question."""
    shape = (sum(len(s.tokens) for s in samples), 3, 12)
    acts = np.lib.format.open_memmap(folder / "activations.npy", "w+", "f2", shape)
    rows = []
    for s, (start, end) in zip(samples, row_ranges(samples), strict=True):
        acts[start:end] = s.hidden.transpose(1, 0, 2)
        rows.append(record(s, "question_id question", start=start, end=end, correct=int(correctness(s))))
    acts.flush()
    write_table(folder / "index.csv", rows)
    return [s.expect("id question", score=correctness(s)) for s in samples]


@kind(ids="hotpot-{}", expect="id mean tokens question answer label")
def npz_with_manifest(folder, samples):
    """Write npz/00000.npz ... with hs (S, L, D), attn (L, S, S), token_ids, and manifest.tsv that names the files."""
    (folder / "npz").mkdir()
    rows = []
    for i, s in enumerate(samples):
        arrays = {"hs": s.hidden.transpose(1, 0, 2), "attn": s.attention.mean(1), "token_ids": s.tokens.astype("i4")}
        np.savez_compressed(folder / "npz" / f"{i:05d}.npz", **arrays)
        rows.append(record(s, "id question generated_answer", file=f"npz/{i:05d}.npz", hallucinated=wrong(s)))
    write_table(folder / "manifest.tsv", rows, delimiter="\t")


@kind(count=5)
def npy_last_tokens_per_layer(folder, samples):
    """Write acts/layer_8.npy, layer_16.npy, layer_24.npy (N, D) of last tokens and statements.csv in the same order."""
    (folder / "acts").mkdir()
    for k, layer in enumerate((8, 16, 24)):
        np.save(folder / "acts" / f"layer_{layer}.npy", np.stack([s.hidden[k, -1] for s in samples]))
    rows = [record(s, "id question answer", correct=int(correctness(s))) for s in samples]
    write_table(folder / "statements.csv", rows)
    return [s.expect_last("id question answer", score=correctness(s)) for s in samples]


@kind("h5py", count=4, expect="id label")
def h5_layers_with_compound_index(folder, samples):
    """Write hidden_states/layer_4 ... (sum of S, D) and index, a compound data set of id, start, length, label."""
    import h5py

    dtype = [("question_id", "S16"), ("start", "i8"), ("length", "i8"), ("hallucinated", "u1")]
    ends = zip(samples, row_ranges(samples), strict=True)
    index = [(s.question_id.encode(), start, end - start, wrong(s)) for s, (start, end) in ends]
    with h5py.File(folder / "activations.h5", "w") as file:
        for k, layer in enumerate((4, 12, 20)):
            data = np.concatenate([s.hidden[k] for s in samples]).astype("f2")
            file.create_dataset(f"hidden_states/layer_{layer}", data=data, compression="gzip")
        file["index"] = np.array(index, dtype=dtype)


@kind("h5py", count=4, expect="")
def elmo_hdf5(folder, samples):
    """Write HDF5 of ELMo and structural probes: "0", "1" ... (L, S, D) and sentence_to_index as JSON text."""
    import h5py

    with h5py.File(folder / "bert_layers.hdf5", "w") as file:
        for i, s in enumerate(samples):
            file.create_dataset(str(i), s.hidden.shape, dtype="float32", data=s.hidden)
        index = file.create_dataset("sentence_to_index", (1,), dtype=h5py.special_dtype(vlen=str))
        index[0] = json.dumps({s.question: str(i) for i, s in enumerate(samples)})


@kind("h5py", ids="sq-{}", expect="id question answer attention tokens")
def h5_layers_and_json_metadata(folder, samples):
    """Write traces/00000 with the groups layers (S, D) and attention (H, S, S), text as JSON in an attribute."""
    import h5py

    with h5py.File(folder / "run.h5", "w") as file:
        for i, s in enumerate(samples):
            group = file.create_group(f"traces/{i:05d}")
            for k in range(3):
                group[f"layers/{k:02d}"], group[f"attention/{k:02d}"] = s.hidden[k], s.attention[k]
            group["input_ids"] = s.tokens
            group.attrs["metadata"] = json.dumps(record(s, "question_id question answer"))


@kind("safetensors", "transformers")
def st_flattened_output(folder):
    """Write the tuples of an output object by number in a file per id: hidden_states.0, attentions.0, input_ids."""
    from safetensors.torch import save_file

    for i, ids in enumerate(prompts()):
        output = forward(ids, dtype="bfloat16")
        tensors = {f"{field}.{k}": h for field in ("hidden_states", "attentions") for k, h in enumerate(output[field])}
        save_file(tensors | {"input_ids": ids}, folder / f"popqa_{i}.safetensors")
        yield expect_output(output, question_id=f"popqa_{i}", tokens=ids[0].tolist())


@kind("safetensors", "huggingface_hub", count=4, expect="id attention")
def st_hub_shards(folder, samples):
    """Write huggingface_hub.save_torch_state_dict of "q0.hidden_states", "q0.attentions": shards and their index."""
    from huggingface_hub import save_torch_state_dict

    fields = {"hidden_states": "hidden", "attentions": "attention"}
    state = {f"{s.question_id}.{key}": tensor(getattr(s, name)) for s in samples for key, name in fields.items()}
    save_torch_state_dict(state, folder, filename_pattern="activations{suffix}.safetensors", max_shard_size=5000)


@kind("safetensors", count=5)
def st_batches_of_modules_with_table(folder, samples):
    """Write acts_0.safetensors ... with model.layers.8 (B, S, D) and attention_mask, samples.csv of shard and row."""
    from safetensors.torch import save_file

    rows = []
    for shard in range(3):
        part = samples[2 * shard : 2 * shard + 2]
        hidden, mask = pad([s.hidden for s in part], axis=1)
        tensors = {f"model.layers.{8 * k + 8}": tensor(hidden[:, k], "float16") for k in range(3)}
        save_file(tensors | {"attention_mask": tensor(mask)}, folder / f"acts_{shard}.safetensors")
        for row, s in enumerate(part):
            more = {"shard": shard, "row": row, "is_correct": bool(correctness(s))}
            rows.append(record(s, "question_id question", **more))
    write_table(folder / "samples.csv", rows)
    return [s.expect("id question", score=correctness(s)) for s in samples]


@kind("datasets", count=4, expect="id question tokens label")
def datasets_parquet_with_dynamic_axis(folder, samples):
    """Write data/train-00000-of-00001.parquet of a data set: Array3D (None, L, D), input_ids, label as ClassLabel."""
    from datasets import Array3D, ClassLabel, Dataset, Features, Sequence, Value

    columns = {
        "id": [s.question_id for s in samples],
        "question": [s.question for s in samples],
        "input_ids": [s.tokens for s in samples],
        "hidden_states": [s.hidden.transpose(1, 0, 2) for s in samples],
        "label": [wrong(s) for s in samples],
    }
    features = {"id": Value("string"), "question": Value("string"), "input_ids": Sequence(Value("int64"))}
    features["hidden_states"] = Array3D((None, 3, 12), "float32")
    features["label"] = ClassLabel(names=["correct", "hallucinated"])
    (folder / "data").mkdir()
    path = folder / "data" / "train-00000-of-00001.parquet"
    Dataset.from_dict(columns, Features(features)).to_parquet(path)


@kind("pyarrow", count=5)
def parquet_fixed_shape_tensors(folder, samples):
    """Write Parquet with the tensor type of Arrow: last_token of fixed shape (L, D), qid, is_correct."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "qid": pa.array([s.question_id for s in samples]),
        "last_token": pa.FixedShapeTensorArray.from_numpy_ndarray(np.stack([s.hidden[:, -1] for s in samples])),
        "is_correct": pa.array([bool(correctness(s)) for s in samples]),
    }
    pq.write_table(pa.table(columns), folder / "features.parquet")
    return [s.expect_last("id", score=correctness(s)) for s in samples]


@kind(count=5, layers=1, expect_last="id question label")
def embedding_projector(folder, samples):
    """Write files of the Embedding Projector: vectors.tsv without header (last token, one layer), metadata.tsv."""
    np.savetxt(folder / "vectors.tsv", np.stack([s.hidden[0, -1] for s in samples]), delimiter="\t")
    rows = [record(s, "id question", hallucinated=wrong(s)) for s in samples]
    write_table(folder / "metadata.tsv", rows, delimiter="\t")


@kind("pandas", "pyarrow")
def parquet_npy_blobs(folder, samples):
    """Write df.to_parquet with arrays as the bytes of npy files: hidden_states (L, S, D), attentions (L, H, S, S)."""
    import pandas as pd

    def blob(array):
        file = io.BytesIO()
        np.save(file, array.astype("f2"))
        return file.getvalue()

    names = "example_id question response"
    rows = [record(s, names, hidden_states=blob(s.hidden), attentions=blob(s.attention)) for s in samples]
    pd.DataFrame(rows).to_parquet(folder / "traces.parquet")
    return [s.expect("id question answer attention") for s in samples]


@kind(layers=1, ids="{}f3a9c0d2b7e", expect="id")
def sglang_responses(folder, samples):
    """Write responses of SGLang's server: meta_info.hidden_states is the prompt (P, D), then a vector per token."""
    rows = []
    for s in samples:
        steps = s.hidden[0, s.prompt_length :].tolist()
        meta = {"id": s.question_id, "finish_reason": {"type": "length", "length": len(steps) + 1}}
        meta |= {"prompt_tokens": s.prompt_length, "completion_tokens": len(steps) + 1, "cached_tokens": 0}
        meta["hidden_states"] = [s.hidden[0, : s.prompt_length].tolist(), *steps]
        ids = [*s.tokens[s.prompt_length :].tolist(), 2]
        rows.append({"text": s.answer, "output_ids": ids, "meta_info": meta})
    write_lines(folder / "responses.jsonl", rows)


@kind("pandas", count=4, expect="id question answer label")
def json_of_data_frame(folder, samples):
    """Write df.to_json(): each column is an object from row number to value, arrays as nested lists."""
    import pandas as pd

    names = "question_id question model_answer"
    rows = [record(s, names, hidden_states=s.hidden.tolist(), hallucinated=bool(wrong(s))) for s in samples]
    pd.DataFrame(rows).to_json(folder / "traces.json")


@kind("transformers")
def feature_extraction_pipeline(folder):
    """Write results of pipeline("feature-extraction"): text and features (1, S, D) of the last layer, a JSON list."""
    outputs = [forward(ids, "bert") for ids in prompts()]
    features = [output.hidden_states[-1].tolist() for output in outputs]
    write_json(folder / "features.json", [{"text": f"Statement {i}.", "features": f} for i, f in enumerate(features)])
    return [{"question_id": None, "hidden_states": states_of(output.hidden_states[-1:])} for output in outputs]
