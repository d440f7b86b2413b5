"""What roles and engines agree on: messages, what a role does with them, and their bytes.

    messages.py   `Stamp`, the kinds of fields, and `Message`
    roles.py      what a server asks and is told, and the faces of `Server` and `Client`
    codec.py      a message <-> bytes; no pickle, and no class names on the wire
    settings.py   what a section of settings is
    wording.py    how sentences about wrong words and values are put

Knows numpy, and in `settings` pydantic.
"""
