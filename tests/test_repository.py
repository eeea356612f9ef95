"""The repository keeps its own rules."""

import ast
import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

import foveal.testing
from foveal import registry
from mutations import BUGS

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "foveal"
BASE = {"call", "checks", "constant", "counting", "native", "packing", "precision", "registry", "spec", "state"}
MAY_IMPORT = {
    "base": {"base"},
    "engines": {"base", "engines"},
    "mechanisms": {"base", "engines", "mechanisms"},
    "policies": {"base", "engines", "policies"},
    "api": {"base"},
    "layer": {"base", "api"},
    "testing": {"base", "engines", "api", "layer", "testing"},
    "hf": {"base", "engines", "api", "hf"},
    "compare": {"base", "engines", "api", "hf", "compare"},
    "train": {"base", "api", "layer", "train"},
    "cli": {"base", "engines", "api", "layer", "testing", "hf", "compare", "train", "cli"},
}


def room(module):
    """The part of the package that a module such as foveal.engines.cache belongs to."""
    parts = module.split(".")
    if len(parts) == 1:
        return "api"  # `import foveal` is the public interface
    return "base" if parts[1] in BASE else parts[1]


def imports(path):
    """Modules of the package that a file imports when it runs, at the top or in a function."""
    tree = ast.parse(path.read_text())
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "foveal")
        elif isinstance(node, ast.ImportFrom) and node.module == "foveal":
            for alias in node.names:
                inside = (PACKAGE / alias.name).is_dir() or (PACKAGE / f"{alias.name}.py").is_file()
                yield f"foveal.{alias.name}" if inside else "foveal"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("foveal."):
            yield node.module
        assert not getattr(node, "level", 0), f"{path}: a relative import hides where it points"


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    module = ".".join(("foveal", *path.relative_to(PACKAGE).with_suffix("").parts))
    allowed = MAY_IMPORT[room(module)]
    wrong = [other for other in imports(path) if room(other) not in allowed]
    assert not wrong, f"{room(module)} may import {sorted(allowed)} only"


def test_engines_name_no_method():
    methods = {cls.__name__ for kind in registry.FOLDERS for cls in registry.classes(kind)}
    for path in (PACKAGE / "engines").rglob("*.py"):
        names = {n.id if isinstance(n, ast.Name) else n.attr for n in ast.walk(ast.parse(path.read_text()))
                 if isinstance(n, ast.Name | ast.Attribute)}  # fmt: skip
        assert not names & methods, f"{path.name} names a method"


@pytest.mark.parametrize("kind", registry.FOLDERS)
def test_file_name_is_key(kind):
    for file in (PACKAGE / registry.FOLDERS[kind]).glob("*/[!_]*.py"):
        cls = registry.get(file.stem, kind=kind)
        assert cls.name == file.stem
        assert pathlib.Path(registry.path(cls)) == file.relative_to(ROOT / "src")
    keys = [key for cls in registry.classes(kind) for key in (cls.name, *cls.aliases)]
    assert len(keys) == len(set(keys)), "a key or alias names two classes"


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_import_is_light_and_offline():
    heavy = ["transformers", "rich", "typer", "matplotlib", "jinja2", "accelerate", "huggingface_hub", "triton"]
    code = f"""
import socket, sys
def refuse(*args, **kwargs):
    raise SystemExit("import foveal opened a socket")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
import torch
before = set(sys.modules)
import foveal
foveal.attention, foveal.AttentionLayer, foveal.list_mechanisms(), foveal.MoBA
print([name for name in {heavy} if name in set(sys.modules) - before])
"""
    assert python(code).strip() == "[]"


def test_listing_imports_no_mechanism():
    code = """
import sys, foveal
foveal.list_mechanisms(), foveal.list_policies()
print([name for name in sys.modules if name.startswith(("foveal.mechanisms.", "foveal.policies."))])
"""
    assert python(code).strip() == "[]"


def test_generated_files_are_fresh():
    command = [sys.executable, "tools/generate.py", "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stdout


def test_lazy_names_are_the_classes():
    assert foveal.MoBA is foveal.get("moba")
    assert foveal.mechanisms.GatedDeltaRule is foveal.get("gated_delta_rule")
    assert foveal.policies.SnapKV is foveal.get("snapkv")
    for missing in (foveal, foveal.mechanisms, foveal.policies):
        with pytest.raises(AttributeError, match="Nonsense"):
            missing.Nonsense  # noqa: B018


@pytest.mark.slow
def test_editors_and_type_checkers_know_the_names(tmp_path):
    file = tmp_path / "user.py"
    file.write_text(
        "import foveal\n"
        "from foveal.policies import SnapKV\n"
        "reveal_type(foveal.MoBA(top_k=3).top_k)\n"
        "reveal_type(SnapKV(window=8).window)\n"
        "foveal.MoBA(topk=3)\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.stdout.count('Revealed type is "int"') + result.stdout.count('Revealed type is "builtins.int"') == 2
    assert 'Unexpected keyword argument "topk"' in result.stdout


PAGES = sorted(
    path for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"))
    if "```python" in path.read_text()
)  # fmt: skip


@pytest.fixture
def own_registry(monkeypatch):
    """What a test registers is forgotten after it."""
    for kind in registry.FOLDERS:
        registry.classes(kind)  # a module registers once: what the test imports first must not be forgotten
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_code_on_pages_runs(page, own_registry, monkeypatch):
    monkeypatch.chdir(ROOT)
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        exec(compile(block, page.name, "exec"), names)


@pytest.mark.parametrize("example", ["my_mechanism", "my_policy"])
def test_example_is_certified(example, own_registry):
    broken = {case: error for case, error in foveal.testing.certify(ROOT / "examples" / f"{example}.py") if error}
    assert not broken


def test_no_page_names_a_machine_or_a_mirror():
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "Makefile", ROOT / "constraints.txt"):
        found = re.search(r"(?<![\w/.])/(?:work|root|home|tmp|opt)/", path.read_text())
        assert found is None, f"{path.name}: {found}"


def tool(name):
    spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestDuplication:
    """Windows of 8 lines, worked out by hand."""

    lines = [f"x{i} = {i}" for i in range(12)]

    def measure(self, **sources):
        return tool("duplication").duplicated({name: "\n".join(text) for name, text in sources.items()})

    def test_eight_equal_lines_count_in_both_files(self):
        found, total = self.measure(a=["head", *self.lines[:8]], b=[*self.lines[:8], "tail"])
        assert found == {"a": set(range(2, 10)), "b": set(range(1, 9))}
        assert total == 18

    def test_seven_equal_lines_do_not(self):
        assert self.measure(a=self.lines[:7], b=self.lines[:7])[0] == {}

    def test_blank_lines_neither_hide_a_copy_nor_count(self):
        spaced = [line for pair in zip(self.lines[:8], [""] * 8) for line in pair]
        found, total = self.measure(a=spaced, b=self.lines[:8])
        assert found == {"a": {1, 3, 5, 7, 9, 11, 13, 15}, "b": set(range(1, 9))}
        assert total == 16

    def test_a_copy_in_the_same_file_counts_but_a_run_of_equal_lines_does_not(self):
        assert len(self.measure(a=self.lines[:8] * 2)[0]["a"]) == 16
        assert self.measure(a=["pass"] * 15)[0] == {}

    def test_the_gate_fails_above_its_limit(self, tmp_path, monkeypatch, capsys):
        for name in "ab":
            (tmp_path / f"{name}.py").write_text("\n".join(self.lines))
        duplication = tool("duplication")
        monkeypatch.setattr("sys.argv", ["duplication.py", str(tmp_path)])
        assert duplication.main() == 1
        assert "100.00% of 24 lines in 2 files" in capsys.readouterr().out
        (tmp_path / "b.py").unlink()
        assert duplication.main() == 0


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.file}: {bug.why}")
def test_planted_bugs_still_apply(bug, tmp_path):
    """They are planted and hunted by ``make mutants``; here only that no entry has become stale."""
    copy = tmp_path / bug.file
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text((PACKAGE / bug.file).read_text())
    bug.plant(tmp_path)
    if copy.suffix == ".py":
        compile(copy.read_text(), bug.file, "exec")
