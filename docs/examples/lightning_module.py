"""Train a Lightning module on a store."""

import lightning
import torch

from tracestore.bridges.lightning import TraceDataModule


class Detector(lightning.LightningModule):
    def __init__(self, dim):
        super().__init__()
        self.layer = torch.nn.Linear(dim, 1)

    def training_step(self, batch, _):
        logit = self.layer(batch.sequences[:, -1]).squeeze(1)
        return torch.nn.functional.binary_cross_entropy_with_logits(logit, batch.y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


data = TraceDataModule("store.zarr", view="sequence", batch_size=16, dtype="float32")
data.setup()
trainer = lightning.Trainer(max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Detector(data.store.hidden_dim), datamodule=data)
