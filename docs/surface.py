"""The pages of commands and of public names, from the code; `docs/reference.py` has the keys of files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from inspect import Parameter, cleandoc, isroutine, signature
from typing import Any

import typer.main
from pydantic import BaseModel
from reference import default, descriptions, item, opening, split, values

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
        f"`{' '.join(usage.split())}`",
        "",
    ]
    return "\n".join([*lines, *(_parameter(path, name, *record) for name, record in records if record)])


def _parameter(path: Sequence[str], name: str, usage: str, text: str) -> str:
    mark = "-".join([*path[1:], name.replace("_", "-")])
    said = re.sub(r"(?<!\\)([*\[])", r"\\\1", re.sub(r"  +", " ", text)).replace("\\[required]", "Must be given.")
    return item(mark, usage, said or "as its name says")


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
        *(_described(name, one) for name, one in names if not _is_settings(one)),
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


def _described(name: str, one: Any) -> str:
    """Return a class or a function by its signature and docstring, and the methods of a class."""
    lines = [f"### {name}", f"`moretta.{name}{_signature(one)}`", _text(one)]
    for own, member in vars(one).items() if isinstance(one, type) else ():
        if not own.startswith("_") and own not in WITHIN.get(name, "").split(", "):
            function = getattr(member, "__func__", member)
            if isinstance(member, property):
                lines += [f"**`.{own}`**", _text(member.fget)]
            elif isroutine(function):
                lines += [f"**`.{own}{_signature(function)}`**", _text(function)]
    return "\n\n".join(lines)


def _signature(one: Any) -> str:
    try:
        taken = signature(one)
    except (TypeError, ValueError):
        return ""
    bare = [
        p.replace(annotation=Parameter.empty, default=p.default if _is_plain(p.default) else None)
        for p in taken.parameters.values()
        if p.name not in ("self", "cls")
    ]
    return str(taken.replace(parameters=bare, return_annotation=taken.empty))


def _is_plain(given: Any) -> bool:
    return given is Parameter.empty or isinstance(given, str | int | float | tuple | None)


def _text(one: Any) -> str:
    """Return a docstring as a page has it: what it says of each argument as a list."""
    try:
        names = list(signature(one).parameters)
    except (TypeError, ValueError):
        names = []
    rest, said = split(cleandoc(one.__doc__ or ""), names)
    found = [_paragraph(one) for one in re.split(r"\n\s*\n", rest)]
    return "\n\n".join([*found, *(["\n".join(f"- `{n}`: {said[n]}" for n in names if n in said)] if said else [])])


def _paragraph(text: str) -> str:
    """Return a docstring's paragraph; a section with a title, such as Args, as a list."""
    title, _, rest = text.partition("\n")
    if title not in ("Args:", "Raises:", "Returns:", "Source:") or not rest:
        return " ".join(text.split()).replace("*", "\\*") if ">>>" not in text else text
    entries = [" ".join(one.split()).partition(": ") for one in re.split(r"\n(?=    \S)", rest)]
    return f"{title}\n\n" + "\n".join(f"- `{name}`: {said}" if said else f"- {name}" for name, _, said in entries)


def _settings(name: str, kind: type[BaseModel]) -> str:
    said, shared = descriptions(kind), Training.model_fields if issubclass(kind, Training) else {}
    own = {field: known for field, known in kind.model_fields.items() if field in said and field not in shared}
    others = "takes, by keyword, the [keys of every protocol](run-file.md#keys-of-every-protocol)"
    takes = (f"{others}, with underscores" + (", and:" if own else ".")) if shared else "takes, by keyword:"
    lines = [f"### {name}", "", opening(kind), "", f"`moretta.{name}(...)` {takes}", ""]
    for field, known in own.items():
        taken = values(known.annotation, known.metadata).replace("](#", "](run-file.md#")  # sections are told there
        facts = f"{taken} · default: {default(known).replace('left out', '`None`')}"
        text = said[field].replace("*", "\\*")
        lines.append(item(f"api-{name.lower()}-{field}", field, facts, text))
    return "\n".join(lines)


def _errors() -> str:
    from moretta import errors

    found = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.MorettaError)]
    lines = ["All stand in `moretta.errors`, and all are a `MorettaError`.", ""]
    for one in found:
        above = one.__bases__[0].__name__
        text = " ".join(cleandoc(one.__doc__ or "").split("\n\n")[0].split())
        lines.append(item(f"api-{one.__name__.lower()}", one.__name__, f"is a `{above}`", text))
    return "\n".join(lines)
