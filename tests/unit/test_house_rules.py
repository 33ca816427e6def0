"""House rules that a machine can check: sizes, docstrings, handlers, and docs that keep up."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import flexslurm
from flexslurm import errors, messages
from flexslurm.cli.main import COMMANDS, load
from flexslurm.config.schema import Section
from flexslurm.config.schema_page import keys_of
from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.slurm.sandbox_config import SandboxConfig

PACKAGE = Path(flexslurm.__file__).parent
ROOT = PACKAGE.parent
FILES = sorted(PACKAGE.rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "site-configs/README.md"]

MOST_LINES = 400
MOST_LINES_OF_A_FUNCTION = 60

# Messages and keys of the service file whose other end is still to come: what is listed here may be
# unused, what is not must not.
UNSENT: set[str] = set()
UNREAD: set[str] = set()

Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path), str(path))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def nodes(*kinds: type[ast.AST]) -> list[tuple[str, ast.AST]]:
    """Every node of these kinds, with its place."""
    return [
        (f"{name_of(path)}:{getattr(node, 'lineno', 1)}", node)
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, kinds)
    ]


# ------------------------------------------------------------------------------------ the code


def test_no_file_is_too_long() -> None:
    lengths = {name_of(path): len(text_of(path).splitlines()) for path in FILES}
    assert len(lengths) > 100
    assert {n: k for n, k in lengths.items() if k > MOST_LINES} == {}


def test_no_function_is_too_long() -> None:
    lengths = {
        f"{where} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for where, node in nodes(ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, Function)
    }
    assert len(lengths) > 1000
    assert {n: k for n, k in lengths.items() if k > MOST_LINES_OF_A_FUNCTION} == {}


def test_a_class_name_has_one_meaning() -> None:
    """`PilotShape` is a section of the service file, and the same as the keeper's value."""
    names = Counter(node.name for _, node in nodes(ast.ClassDef) if isinstance(node, ast.ClassDef))
    assert len(names) > 300
    assert {n for n, k in names.items() if k > 1 and not n.startswith("_")} == {"PilotShape"}


def test_nothing_is_left_for_later() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX)\b")
    marked = [name_of(path) for path in FILES if marks.search(text_of(path))]
    unfinished = [
        where
        for where, node in nodes(ast.Raise)
        if isinstance(node, ast.Raise)
        and node.exc is not None
        and "NotImplementedError" in ast.unparse(node.exc)
    ]
    assert (marked, unfinished) == ([], [])


def test_every_module_says_what_it_is_for() -> None:
    silent = [name_of(path) for path in FILES if not ast.get_docstring(tree_of(path))]
    assert silent == []


def _is_blanket(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    return bool({"Exception", "BaseException"} & set(re.findall(r"\w+", ast.unparse(handler.type))))


def _ends_in_a_raise(handler: ast.ExceptHandler) -> bool:
    return isinstance(handler.body[-1], ast.Raise)


def test_a_handler_of_everything_raises_on_or_says_why() -> None:
    silent = []
    for path in FILES:
        lines = text_of(path).splitlines()
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ExceptHandler) and _is_blanket(node):
                reason = lines[node.lineno - 1].partition("#")[2].replace("noqa: BLE001", "")
                if not _ends_in_a_raise(node) and len(reason.strip(" -")) < 10:
                    silent.append(f"{name_of(path)}:{node.lineno}")
    assert silent == []


def test_no_rule_is_switched_off_as_a_whole() -> None:
    """`noqa` and `type: ignore` name what they let pass."""
    bare = re.compile(r"# noqa(?!: [A-Z]+[0-9])|# type: ignore(?!\[)")
    assert [name_of(path) for path in FILES if bare.search(text_of(path))] == []


# ---------------------------------------------------------------------------------- the errors

_DRAWN = re.compile(r"^(?P<indent>[│ ├└─]*)(?P<name>\w+) \[(?P<code>\d+)\]", re.MULTILINE)


def drawn_errors() -> dict[str, tuple[str | None, int]]:
    """Name to parent and code, from the tree in the docstring."""
    found: dict[str, tuple[str | None, int]] = {}
    above: list[str] = []
    for line in _DRAWN.finditer(errors.__doc__ or ""):
        assert len(line["indent"]) % 4 == 0, f"{line['name']} is drawn at an odd place"
        del above[len(line["indent"]) // 4 :]
        found[line["name"]] = (above[-1] if above else None, int(line["code"]))
        above.append(line["name"])
    return found


def real_errors(kind: type[errors.FlexslurmError]) -> Iterator[type[errors.FlexslurmError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from real_errors(below)


def test_the_tree_of_errors_is_the_one_that_is_drawn() -> None:
    real = {}
    for kind in real_errors(errors.FlexslurmError):
        parent = None if kind is errors.FlexslurmError else kind.__bases__[0].__name__
        asks = issubclass(kind, errors.RequestError)
        real[kind.__name__] = (parent, kind.http_status if asks else kind.exit_code)
    assert drawn_errors() == real
    assert all(kind.__doc__ for kind in real_errors(errors.FlexslurmError))


def test_every_error_is_raised_somewhere() -> None:
    used = "\n".join(text_of(path) for path in FILES if path.name != "errors.py")
    names = [kind.__name__ for kind in real_errors(errors.FlexslurmError)]
    assert [name for name in names if not re.search(rf"\b{name}\b", used)] == []


def test_the_readme_has_every_exit_code() -> None:
    codes = {kind.exit_code for kind in real_errors(errors.FlexslurmError)} - {1} | {2}
    listed = {int(cell) for cell in re.findall(r"\| (\d) (?=\|)", text_of(PAGES[0]))}
    assert listed == codes


# -------------------------------------------------------------------------------- the settings


@pytest.mark.parametrize("section", [Service, Site, SandboxConfig])
def test_every_key_says_what_it_means(section: type[Section]) -> None:
    keys = list(keys_of(section))
    assert len(keys) > 20
    assert [key.name for key in keys if len(key.words) < 5] == []


@pytest.mark.parametrize("section", [Service, Site])
def test_every_key_is_read_by_somebody(section: type[Section]) -> None:
    declared = {PACKAGE / "config/service.py", PACKAGE / "config/site.py"}
    readers = "\n".join(text_of(path) for path in FILES if path not in declared)
    # sections inside of sections count by their keys; `getattr(entry, "qos")` has no dot
    unread = {
        name
        for name in (key.name.rpartition(".")[2] for key in keys_of(section))
        if not re.search(rf"""\.{name}\b|["']{name}["']""", readers)
    }
    assert unread <= UNREAD


# -------------------------------------------------------------------------------- the messages


def test_every_message_is_sent_by_somebody() -> None:
    places = {path: tree_of(path) for path in FILES if path.parent.name != "messages"}
    made = {
        ast.unparse(node.func).rpartition(".")[2]
        for tree in places.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    }
    kinds = {
        name
        for name, kind in vars(messages).items()
        if isinstance(kind, type) and issubclass(kind, messages.Message)
    } - {"Message"}
    assert len(kinds) > 30
    assert kinds - made <= UNSENT


# ------------------------------------------------------------------------------------ the docs


def every_command() -> dict[str, click.Command]:
    found: dict[str, click.Command] = {}

    def walk(words: str, command: click.Command) -> None:
        found[words] = command
        if isinstance(command, click.Group):
            for name, below in command.commands.items():
                walk(f"{words} {name}", below)

    for name, (target, _) in COMMANDS.items():
        walk(name, load(target))
    return found


def test_every_command_is_in_the_docs() -> None:
    docs = "\n".join(text_of(page) for page in PAGES)
    missing = [
        words
        for words, command in every_command().items()
        if not isinstance(command, click.Group) and f"flexslurm {words}" not in docs
    ]
    assert missing == []


def quoted_commands(page: str) -> Iterator[str]:
    """What stands behind `flexslurm` in code: in a sentence, or as a line of a block."""
    prose, *rest = re.split(r"^ *```.*$", page, flags=re.MULTILINE)
    blocks, proses = rest[::2], [prose, *rest[1::2]]
    yield from re.findall(r"`flexslurm ([^`]+)`", "\n".join(proses))
    yield from re.findall(r"^[^#\n]*?\bflexslurm ([a-z][^#\n]*)", "\n".join(blocks), re.MULTILINE)


def test_the_docs_speak_of_commands_and_options_that_exist() -> None:
    commands = every_command()
    wrong, seen = [], 0
    for page in PAGES:
        for said in quoted_commands(text_of(page)):
            words = said.split()
            name = next((n for n in (" ".join(words[:2]), words[0]) if n in commands), None)
            if name is None:
                wrong += [] if words[0] == "COMMAND" else [f"{page.name}: {said}"]
                continue
            seen += 1
            legal = {o for p in commands[name].params for o in p.opts} | {"--help"}
            wrong += [
                f"{page.name}: {said}" for w in words if w.startswith("--") and w not in legal
            ]
    assert seen > 20
    assert wrong == []
