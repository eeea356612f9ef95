"""Measure how much of a folder is written twice: lines inside an 8-line window that occurs verbatim elsewhere."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections import defaultdict

WINDOW = 8


def code_lines(text: str) -> list[tuple[int, str]]:
    """Numbered lines that are neither blank nor imports, without indentation at their ends."""
    lines = [(number, line.rstrip()) for number, line in enumerate(text.splitlines(), 1)]
    return [(n, line) for n, line in lines if line and not line.lstrip().startswith(("import ", "from "))]


def duplicated(sources: dict[str, str], window: int = WINDOW) -> tuple[dict[str, set[int]], int]:
    """The duplicated line numbers of each source, and the number of lines that were looked at.

    Two windows in one file count when they do not overlap: a run of equal lines is no copy of itself.
    """
    files = {name: code_lines(text) for name, text in sources.items()}
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for name, lines in files.items():
        for start in range(len(lines) - window + 1):
            places[tuple(line for _, line in lines[start : start + window])].append((name, start))
    found: dict[str, set[int]] = defaultdict(set)
    for spots in places.values():
        for name, start in spots:
            if any(other != name or abs(begin - start) >= window for other, begin in spots):
                found[name].update(number for number, _ in files[name][start : start + window])
    return dict(found), sum(map(len, files.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--limit", type=float, default=3.0, help="largest share in percent that passes")
    args = parser.parse_args()
    sources = {str(path): path.read_text() for path in sorted(args.folder.rglob("*.py"))}
    found, total = duplicated(sources)
    for name, numbers in sorted(found.items()):
        print(f"{name}: lines {', '.join(map(str, sorted(numbers)))}")
    share = 100 * sum(map(len, found.values())) / max(total, 1)
    print(f"{share:.2f}% of {total} lines in {len(sources)} files are duplicated; the limit is {args.limit:g}%")
    return int(share >= args.limit)


if __name__ == "__main__":
    sys.exit(main())
