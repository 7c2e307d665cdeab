"""Record a Hugging Face model while it generates."""

import tracestore
from tracestore.extract import Select, capture


def record(model, tokenizer, questions, path):
    """Answer questions with a Hugging Face model, and store the answers' tokens in two layers."""
    select = Select(layers=(8, -1), positions="answer", heads="none")
    with capture(model, select=select) as states, tracestore.create(path, attention="none") as writer:
        for question_id, question in questions:
            model.generate(**tokenizer(question, return_tensors="pt"), max_new_tokens=32)
            writer.append(states.trace() | {"question_id": question_id, "question": question})
