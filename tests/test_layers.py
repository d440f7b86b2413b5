"""The rules of the house, read from the syntax trees: who imports whom, and who may name a protocol.

``python tests/test_layers.py`` prints what breaks a rule now.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "moretta"
# Imports run to the left. Top of all are `edge` and `__main__`, which are `python -m` of them and nothing else.
ROOMS = (
    *("errors", "contract", "secure_aggregation", "data", "models", "engines", "protocols"),
    *("config", "report", "audit", "run", "deployment", "flare", "commands", "client", "edge", "flower"),
    "__main__",
)
MOST_ENTRIES = 15
BY_NAME = ("client.py", "flare.py", "flower.py")
ROLES = {"Server", "Client"}  # every protocol has them
FAMILIES = {
    "fedsgd": ("fedsgd", "fedavg", "fedprox", "local", "centralised"),
    "pbpfl": ("pbpfl",),
    "cgd": ("cgd",),
    "baffle": ("baffle",),
}
PROTOCOLS = tuple(name for names in FAMILIES.values() for name in names)
# A plain word, too: it names a protocol where a string is nothing else.
PLAIN_WORDS = {"local"}
ASKED_BY = {"get", "pop", "setdefault", "startswith", "endswith", "removeprefix", "removesuffix"}
# The public names, which are `moretta`'s and the command `python -m moretta.edge`, and the one list of protocols.
MAY_NAME_ALL = {"moretta", "moretta.edge", "moretta.protocols.registry"}
# A class of another framework, and ours after it.
MAY_NAME_ALL |= {"moretta.flare", "moretta.deployment.recipe.server"}
MAY_NAME_ALL |= {"moretta.flower", "moretta.deployment.flower.server"}

# -- What is read ------------------------------------------------------------------------------------------------------


@cache
def modules() -> Mapping[str, Path]:
    """Return all modules of the package by their dotted names."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text())


@cache
def nodes(module: str) -> Sequence[ast.AST]:
    return tuple(ast.walk(tree(module)))


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def folder(module: str) -> str:
    return str(modules()[module].parent.relative_to(ROOT))


def imported(module: str, node: ast.AST) -> Iterator[str]:
    """Yield what a node names of the package: by an import, or by a string that is wholly a module or "module:name"."""
    match node:
        case ast.Import():
            yield from (alias.name for alias in node.names)
        case ast.ImportFrom():
            package = module.split(".") if modules()[module].name == "__init__.py" else module.split(".")[:-1]
            start = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        case ast.Constant() | ast.JoinedStr():
            text = whole_string(module, node)
            if re.fullmatch(r"moretta(\.\w+)+(:\w+)?", text):
                yield from {text.partition(":")[0]} & modules().keys()


def whole_string(module: str, node: ast.AST) -> str:
    """Return a string as it is; an f"{HERE}.name" with what the module's constant HERE holds; else nothing."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr():
            return "".join(whole_string(module, part) for part in node.values)
        case ast.FormattedValue(value=ast.Name(id=name)):
            return constants(module).get(name, "")
    return ""


@cache
def constants(module: str) -> Mapping[str, str]:
    """Return the strings that a module gives a name, at its top."""
    found = {}
    for node in tree(module).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                found[name] = text
    return found


@cache
def imports(module: str) -> frozenset[str]:
    """Return the modules of the package that one depends on. The package itself may be imported for its version."""
    found = set()
    for node in nodes(module):
        for name in imported(module, node):
            if name in ("moretta", "moretta.__version__") or name.split(".")[0] != "moretta":
                continue
            while name not in modules():
                name = name.rpartition(".")[0]
            found.add(name)
    return frozenset(found - {module})


# -- The rules: each yields what breaks it -----------------------------------------------------------------------------


def upward() -> Iterator[str]:
    """Yield imports that run up: to a room above, or from a room to the package's public names."""
    for module in modules():
        for other in imports(module) if module != "moretta" else ():
            if other == "moretta" or ROOMS.index(room(other)) > ROOMS.index(room(module)):
                yield f"{module} -> {other}"


def circles() -> Iterator[str]:
    """Yield the modules that depend on themselves, over others."""
    yield from (module for module in modules() if module in reach(module))


def reach(module: str) -> set[str]:
    """Return the modules that one depends on, directly and over others. Public names lead nowhere."""
    seen: set[str] = set()
    left = [] if module == "moretta" else [module]
    while left:
        new = imports(left.pop()) - seen - {"moretta"}
        seen |= new
        left += new
    return seen


def folders_both_ways() -> Iterator[str]:
    """Yield pairs of folders of which each imports the other; the top has only the public names and errors."""
    arrows = defaultdict(set)
    for module in modules():
        for other in imports(module):
            arrows[folder(module)].add(folder(other))
    for one in sorted(set(arrows) - {"."}):
        yield from (f"{one} <-> {other}" for other in sorted(arrows[one]) if one < other and one in arrows[other])


def talking_packages() -> Iterator[str]:
    """Yield packages whose __init__ holds more than a docstring; the public names' may."""
    for module, path in modules().items():
        only_a_docstring = len(tree(module).body) == 1 and ast.get_docstring(tree(module))
        if path.name == "__init__.py" and module != "moretta" and not only_a_docstring:
            yield module


def crowded_top() -> Iterator[str]:
    """Yield the entries at the top of the package beyond those that one takes in at a glance.

    Without `__main__.py`, which is three lines and which Python looks for nowhere else, and what users of other
    frameworks import by its name.
    """
    entries = sorted(path.name for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists())
    yield from [name for name in entries if name not in ("__main__.py", *BY_NAME)][MOST_ENTRIES:]


def protocols_named() -> Iterator[str]:
    """Yield who names a protocol that is not its own."""
    for module in modules():
        yield from (f"{module}: {name}" for name in sorted(named(module) - allowed(module)))


def allowed(module: str) -> set[str]:
    """Return the protocols that a module may name: those of its folder under protocols/ or audit/attacks/."""
    if module in MAY_NAME_ALL:
        return set(PROTOCOLS)
    parts = module.split(".")
    places = (parts[2:3] if parts[1] == "protocols" else []) + (
        parts[3:4] if parts[1:3] == ["audit", "attacks"] else []
    )
    return {name for place in places for name in FAMILIES.get(place, ())}


@cache
def named(module: str) -> frozenset[str]:
    """Return the protocols that a module names: in imports, identifiers, and strings that decide something."""
    found = set[str]()
    for node in nodes(module):
        for text in (*identifiers(node), *imported(module, node)):
            low = text.lower()
            found |= {name for name in PROTOCOLS if name in low and name not in PLAIN_WORDS}
        for text in map(str.lower, deciding_strings(node)):
            words = set(re.split(r"[^a-z]+", text))
            found |= {name for name in PROTOCOLS if (text == name if name in PLAIN_WORDS else name in words)}
    return frozenset(found)


def identifiers(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.keyword(arg=str(name)) | ast.alias(asname=str(name)):
            yield name


def deciding_strings(node: ast.AST) -> Iterator[str]:
    """Yield strings that are compared, matched or used as keys in a node."""
    match node:
        case ast.Compare():
            yield from strings([node.left, *node.comparators])
        case ast.MatchValue():
            yield from strings([node.value])
        case ast.Dict():
            yield from strings(key for key in node.keys if key is not None)
        case ast.Subscript():  # Literal["..."] too
            yield from strings([node.slice])
        case ast.Call(func=ast.Attribute(attr=name)) if name in ASKED_BY:
            yield from strings(node.args[:1])
        case ast.Constant(value=str(text)) if text in PROTOCOLS and text not in PLAIN_WORDS:
            yield text  # whatever it is for: a name alone is no prose


def strings(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield strings, also those of a tuple, list or set written out."""
    for node in nodes:
        match node:
            case ast.Constant(value=str(text)):
                yield text
            case ast.Tuple() | ast.List() | ast.Set():
                yield from strings(node.elts)


def shared_class_names() -> Iterator[str]:
    """Yield names of public classes that different rooms have."""
    homes = defaultdict(set)
    for module in modules():
        for node in tree(module).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in ROLES:
                homes[node.name].add(room(module))
    yield from (f"{name}: {' '.join(sorted(rooms))}" for name, rooms in sorted(homes.items()) if len(rooms) > 1)


RULES: Mapping[str, Callable[[], Iterator[str]]] = {
    rule.__name__: rule
    for rule in (
        *(upward, circles, folders_both_ways, talking_packages, crowded_top),
        *(protocols_named, shared_class_names),
    )
}


@pytest.mark.parametrize("rule", RULES)
def test_the_house_keeps_its_rules(rule: str) -> None:
    assert sorted(set(RULES[rule]())) == []


def test_every_room_has_its_place() -> None:
    assert {room(module) for module in modules()} - {""} == set(ROOMS)


if __name__ == "__main__":
    print({title: sorted(broken()) for title, broken in RULES.items()})
