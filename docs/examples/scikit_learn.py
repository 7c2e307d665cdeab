"""Use a store with pandas and scikit-learn."""

from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score

import tracestore

with tracestore.open("store.zarr") as store:
    table = store.to_pandas(texts=True)  # one row per trace: id, sample, score, label, group, tokens, source, texts
    print(table.groupby("score")["num_tokens"].mean())

    known = store.filter(y=[0, 1])  # with a label or a score; y is 1 for a hallucination, as in training
    model = LogisticRegression(max_iter=500)
    print(cross_val_score(model, known.features(layer=-1).astype("f4"), known.y, scoring="roc_auc"))

    train, test = known.train_test_split(0.2)  # by question
    model.fit(train.features(), train.y)
    print(model.score(test.features(), test.y))
