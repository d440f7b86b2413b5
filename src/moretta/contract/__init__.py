"""The contract between roles and engines: messages, the interfaces of roles, and the bytes of messages.

    messages.py   `Stamp`, the kinds of fields, and `Message`
    roles.py      what a server asks and receives, and the interfaces `Server` and `Client`
    codec.py      a message <-> bytes, without pickle and without class names on the wire
    framing.py    parts of bytes behind their lengths
    settings.py   the base class of a section of settings, and rules between keys
    wording.py    how error sentences show wrong words, values and arguments

The package needs numpy; `codec` also needs safetensors, and `settings` needs pydantic.
"""
