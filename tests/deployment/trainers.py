"""Loops of Lightning's and Hugging Face's Trainer, as the pages have them; sites import this file beside silo.toml."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

RATE, EPOCHS, ROWS = 0.2, 2, 16


def with_lightning(model: nn.Module, x: Tensor, y: Tensor, number: int) -> Any:
    """Train by lightning.Trainer, in batches as they stand."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Tensor:
            inputs, targets = batch
            return nn.functional.cross_entropy(self.model(inputs), targets)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), RATE)

    rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), ROWS)
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = lightning.Trainer(max_epochs=EPOCHS, accelerator="cpu", devices=1, **quiet)
    trainer.fit(Module(), rows)
    return model, len(x)


def with_hugging_face(model: nn.Module, x: Tensor, y: Tensor, number: int) -> Any:
    """Train by transformers.Trainer, in the same batches."""
    import tempfile

    import transformers

    class InOrder(transformers.Trainer):  # type: ignore[misc, name-defined, unused-ignore]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
            outputs = model(inputs["x"])
            loss = nn.functional.cross_entropy(outputs, inputs["labels"])
            return (loss, {"logits": outputs}) if return_outputs else loss

        def _get_train_sampler(self, *given: Any) -> Any:
            return torch.utils.data.SequentialSampler(y)  # type: ignore[arg-type]

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=ROWS,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0.0,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        rows = [{"x": one, "labels": label} for one, label in zip(x, y, strict=True)]
        InOrder(model=model, args=arguments, train_dataset=rows).train()
    return model, len(x)


def by_hand(model: nn.Module, x: Tensor, y: Tensor, number: int) -> Any:
    """Take the same steps."""
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for rows in torch.arange(len(x)).split(ROWS) * EPOCHS:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return model, len(x)
