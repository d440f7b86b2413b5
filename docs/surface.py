"""The pages of commands and of public names, from the code; `docs/reference.py` has the keys of files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from inspect import cleandoc
from typing import Any

import typer.main
from pydantic import BaseModel
from reference import default, descriptions, opening, values

from moretta.commands import main as cli
from moretta.protocols.common.training import Training


def commands() -> str:
    """Return the reference of the shell's commands."""
    root = typer.main.get_command(cli.app)
    return "\n\n".join(_command(path, command) for path, command in leaves(root, ("moretta",)))


def leaves(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the commands of a group, and of the groups in it, each with its words."""
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name, one in command.commands.items():
        yield from leaves(one, (*path, name))


def _command(path: Sequence[str], command: Any) -> str:
    context = command.make_context(" ".join(path), [], resilient_parsing=True)
    usage = command.get_usage(context).removeprefix("Usage: ")
    records = [(one.name, one.get_help_record(context)) for one in command.params if one.name != "help"]
    lines = [
        f"## {' '.join(path)}",
        "",
        cleandoc(command.help or ""),
        "",
        f"```text\n{' '.join(usage.split())}\n```",
        "",
    ]
    return "\n".join([*lines, *(_parameter(path, name, *record) for name, record in records if record)])


def _parameter(path: Sequence[str], name: str, usage: str, text: str) -> str:
    mark = "-".join([*path[1:], name.replace("_", "-")])
    said = re.sub(r"(?<!\\)([*\[])", r"\\\1", re.sub(r"  +", " ", text)).replace("\\[required]", "Must be given.")
    return f"[`{usage}`]{{#{mark}}}\n: {said or 'as its name says'}\n"


# -- the public names --------------------------------------------------------------------------------------------------

# Public methods of classes that rooms below the surface call.
WITHIN = {
    "Federation": "of, without_edge_processes, client, players, rehearse, summing, digest",
    "Schema": "features, name_of, target, dropped, classes, digest, told, only, model_config, model_post_init",
    "IdRules": "of, read, digest, normalised",
    "Silo": "aligned, columns, groups, held_out, ids, labelled, layout, name, raw_ids, remote, row, x, y",
    "Result": "folder, history, model, models, played, record, released",
}


def api() -> str:
    """Return what each public name is: settings by their keys, the rest by its docstring."""
    import moretta

    names = [(name, getattr(moretta, name)) for name in moretta.__all__]
    settings = [(name, one) for name, one in names if _is_settings(one)]
    protocols = [(name, one) for name, one in settings if issubclass(one, Training)]
    parts = [
        "## Training and data",
        *(_autodoc(name, one) for name, one in names if not _is_settings(one)),
        "## Protocols",
        *(_settings(name, one) for name, one in protocols),
        "## Other settings",
        *(_settings(name, one) for name, one in settings if (name, one) not in protocols),
        "## Errors",
        _errors(),
    ]
    return "\n\n".join(parts)


def _is_settings(one: Any) -> bool:
    return isinstance(one, type) and issubclass(one, BaseModel) and one.__module__.endswith(("params", "settings"))


def _autodoc(name: str, one: Any) -> str:
    kind = "autoclass" if isinstance(one, type) else "autofunction"
    options = f"   :members:\n   :exclude-members: {WITHIN.get(name, '')}\n" if isinstance(one, type) else ""
    return f"### {name}\n\n```{{eval-rst}}\n.. {kind}:: moretta.{name}\n{options}```"


def _settings(name: str, kind: type[BaseModel]) -> str:
    said, shared = descriptions(kind), Training.model_fields if issubclass(kind, Training) else {}
    own = {field: known for field, known in kind.model_fields.items() if field in said and field not in shared}
    others = "takes, by keyword, the [keys of every protocol](run-file.md#keys-of-every-protocol)"
    takes = (f"{others}, with underscores" + (", and:" if own else ".")) if shared else "takes, by keyword:"
    lines = [f"### {name}", "", opening(kind), "", f"`moretta.{name}(...)` {takes}", ""]
    for field, known in own.items():
        facts = f"{values(known.annotation, known.metadata)} · default: {default(known).replace('left out', '`None`')}"
        text = said[field].replace("*", "\\*")
        lines.append(f"[`{field}`]{{#api-{name.lower()}-{field}}}\n: {facts}\n\n  {text}\n")
    return "\n".join(lines)


def _errors() -> str:
    from moretta import errors

    found = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.MorettaError)]
    lines = ["All stand in `moretta.errors`, and all are a `MorettaError`.", ""]
    for one in found:
        above = one.__bases__[0].__name__
        text = " ".join(cleandoc(one.__doc__ or "").split("\n\n")[0].split())
        lines.append(f"`{one.__name__}`\n: is a `{above}`\n\n  {text}\n")
    return "\n".join(lines)
