"""Small training runs inside the test process."""

from tracestore.experiment.train_options import TrainOptions
from tracestore.experiment.training_run import run_experiment

SMALL = {"gnn_hidden": 8, "latent_dim": 8, "lstm_hidden": 8}


def train_quietly(store, folder, models, config, model_options=SMALL, **options):
    """Train without a log, and without the probe unless options say otherwise. Return the results."""
    options = TrainOptions(tuple(models), config, model_options, **({"probe": False} | options))
    return run_experiment(store, folder, options, log=lambda _: None)
