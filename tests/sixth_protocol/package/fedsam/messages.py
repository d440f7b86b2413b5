"""The one arrow of FedSAM's figure that is its own; the answer is an upload of the secure sum."""

from collections.abc import Mapping

from moretta.contract.messages import Message, Tensors, message


@message("fedsam/train-on")
class TrainOn(Message):
    """The true model, and how the difference from it is to be encoded."""

    parameters: Tensors
    encoding: Mapping[str, int]


MESSAGES = (TrainOn,)
