"""A hospital's half: it trains as any ClientApp does, and the mod sums what it returns."""

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from hospitals_app import task
from moretta.flower import secure_sum

app = ClientApp(mods=[secure_sum()])


def _asked(message: Message, context: Context):
    model = {name: array.numpy() for name, array in message.content["arrays"].items()}
    return model, *task.rows(int(context.node_config["partition-id"]))


@app.train()
def train(message: Message, context: Context) -> Message:
    model, x, y = _asked(message, context)
    model = task.train(model, x, y)
    metrics = MetricRecord({**task.scores(model, x, y), "num-examples": len(x)})
    arrays = ArrayRecord({name: Array(array) for name, array in model.items()})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    model, x, y = _asked(message, context)
    metrics = MetricRecord({**task.scores(model, x, y), "num-examples": len(x)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
