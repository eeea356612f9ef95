"""The repository keeps its own rules."""

import importlib.util
import pathlib

ROOT = pathlib.Path(__file__).parents[1]


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
