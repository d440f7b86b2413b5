"""Moretta's messages inside Flower's, and the digest of a question to an app."""

import hashlib

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict

from moretta.contract.messages import Message as OwnMessage
from moretta.deployment.flower.messages import CODEC
from moretta.secure_aggregation.keystream import encode_parts

RECORD = "moretta"  # the record of a Flower message that holds ours
SERIALISED = "moretta.message"  # the encoding of its arrays: by `CODEC`


def packed(*messages: OwnMessage) -> ArrayRecord:
    """Return messages as a record of Flower's, which carries each as the bytes of an array."""
    coded = {str(place): CODEC.encode(message) for place, message in enumerate(messages)}
    return ArrayRecord({key: Array("uint8", (len(data),), SERIALISED, data) for key, data in coded.items()})


def unpacked(content: RecordDict) -> list[OwnMessage]:
    """Return the messages of a Flower message, may be none. Raises `moretta.errors.CodecError`."""
    record = content.get(RECORD)
    if not isinstance(record, ArrayRecord):
        return []
    return [CODEC.decode(memoryview(record[key].data)) for key in sorted(record)]  # arrays stay in the record's memory


def question_digest(message: Message, context: Context) -> bytes:
    """Return SHA-256 of all that the server chooses and an app's answer may follow from, without our own record.

    It contains the function that the message calls, the run's configuration, and all records in their order: an app may
    read arrays without their names.
    """
    where, config = message.metadata, sorted(context.run_config.items())
    digest = hashlib.sha256(encode_parts("question", where.message_type, where.group_id, repr(config)))
    for key, record in message.content.items():
        if key == RECORD:
            continue
        digest.update(encode_parts(key, type(record).__name__))
        for name, value in record.items():
            if isinstance(value, Array):
                about = value.dtype, str(tuple(value.shape)), value.stype, len(value.data)
                digest.update(encode_parts(name, *about))
                digest.update(value.data)
            else:
                digest.update(encode_parts(name, repr(value)))
    return digest.digest()
