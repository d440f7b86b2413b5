"""A script by Hugging Face's Trainer, patched by FLARE: two steps a round on all rows, as `net.train` takes them."""

import tempfile

import nvflare.client.hf as flare
import transformers
from net import Net, rows
from torch import nn


class Trainer(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **others):
        outputs = model(inputs["x"])
        loss = nn.functional.cross_entropy(outputs, inputs["labels"])
        return (loss, {"logits": outputs}) if return_outputs else loss


if __name__ == "__main__":
    flare.init()
    x, y = rows(flare.get_site_name())
    model = Net()
    model.__fl_meta__ = {"NUM_STEPS_CURRENT_ROUND": len(x)}  # type: ignore[assignment]
    plain = {"optim": "sgd", "lr_scheduler_type": "constant", "learning_rate": 0.1, "max_grad_norm": 0.0}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "remove_unused_columns": False}
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, num_train_epochs=2, per_device_train_batch_size=len(x), **plain, **quiet
        )
        data = [{"x": one, "labels": label} for one, label in zip(x, y, strict=True)]
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        flare.patch(trainer)
        while flare.is_running():
            trainer.train()
