"""Moretta's messages inside Flower's, and the digest of a question to an app."""

import hashlib

from flwr.app import Array, ArrayRecord, RecordDict

from moretta.contract.messages import Message
from moretta.deployment.flower.messages import CODEC
from moretta.secure_aggregation.keystream import encode_parts

RECORD = "moretta"  # the record of a Flower message that holds ours
SERIALISED = "moretta.message"  # how an array of it is to be read: by `CODEC`


def packed(*messages: Message) -> ArrayRecord:
    """Return messages as a record of Flower's, which carries each as the bytes of an array."""
    coded = {str(place): CODEC.encode(message) for place, message in enumerate(messages)}
    return ArrayRecord({key: Array("uint8", (len(data),), SERIALISED, data) for key, data in coded.items()})


def unpacked(content: RecordDict) -> list[Message]:
    """Return the messages of a Flower message, none if it holds none. Raises `moretta.errors.CodecError`."""
    record = content.get(RECORD)
    if not isinstance(record, ArrayRecord):
        return []
    return [CODEC.decode(memoryview(record[key].data)) for key in sorted(record)]  # arrays stay in the record's memory


def question_digest(kind: str, content: RecordDict) -> bytes:
    """Return SHA-256 of a question to an app, without our own record: each array's bytes, and all other values.

    kind: "train" or "evaluate".
    """
    digest = hashlib.sha256(encode_parts("question", kind))
    for key in sorted(content.keys() - {RECORD}):
        record = content[key]
        digest.update(encode_parts(key, type(record).__name__))
        for name in sorted(record):
            value = record[name]
            if isinstance(value, Array):
                about = value.dtype, str(tuple(value.shape)), value.stype, len(value.data)
                digest.update(encode_parts(name, *about))
                digest.update(value.data)
            else:
                digest.update(encode_parts(name, repr(value)))
    return digest.digest()
