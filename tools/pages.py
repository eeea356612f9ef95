"""Turn specs and docstrings into Markdown: nothing that a reader sees about a method is written twice."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable
from typing import Any

import foveal
from foveal import registry
from foveal.spec import Spec

FOLDERS = registry.FOLDERS
SECTIONS = ("Args", "Returns", "Raises", "Shapes")


def markdown(text: str) -> str:
    """A docstring's text in Markdown: display formulas, inline formulas, roles and literals."""
    text = re.sub(
        r"\.\. math::\n((?:[ \t]*\n)*(?:[ \t]+\S.*(?:\n|$))+)",
        lambda m: f"$$\n{textwrap.dedent(m[1]).strip()}\n$$\n",
        text,
    )
    text = re.sub(r":math:`([^`]+)`", r"$\1$", text)
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    return re.sub(r"^(\S.*)\n(- )", r"\1\n\n\2", text, flags=re.MULTILINE)


def sections(doc: str) -> dict[str, str]:
    """The parts of a docstring under their headings, still as written; what stands outside them is ``""``."""
    parts, heading = {"": ""}, ""
    for line in inspect.cleandoc(doc).splitlines():
        if line.rstrip(":") in SECTIONS and line.endswith(":"):
            heading = line.rstrip(":")
            parts[heading] = ""
        elif heading and line and not line.startswith(" "):
            heading = ""
            parts[""] += f"{line}\n"
        else:
            parts[heading] += f"{line}\n"
    return {name: textwrap.dedent(text).strip() for name, text in parts.items()}


def entries(section: str) -> dict[str, str]:
    """``name: text`` entries of an Args or Raises section, each on one line."""
    joined = re.sub(r"\n[ \t]+", " ", section)
    return {name: " ".join(text.split()) for name, _, text in (line.partition(": ") for line in joined.splitlines())}


def summary(obj: Any) -> str:
    """The first sentence of a docstring, as Markdown on one line."""
    first = inspect.cleandoc(obj.__doc__ or "").split("\n\n")[0]
    return markdown(" ".join(first.split()))


def cell(text: Any) -> str:
    """Text that may stand in a table: pipes outside of code would end the cell."""
    return "".join(
        part if part.startswith("`") else part.replace("|", r"\|") for part in re.split(r"(`[^`]*`)", str(text))
    )


def table(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table."""
    head = list(header)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell(x) for x in line) + " |" for line in lines)


def settings(cls: type[Any]) -> str:
    described, defaults = entries(sections(cls.__doc__ or "").get("Args", "")), cls.settings()
    if not defaults:
        return "None."
    return table(
        ("Setting", "Default", "Meaning"),
        ((f"`{name}`", f"`{value!r}`", markdown(described.get(name, ""))) for name, value in defaults.items()),
    )


def interval(low: float, high: float) -> str:
    if (low, high) == (float("-inf"), float("inf")):
        return "any"
    if low == float("-inf"):
        return f"<= {high:g}"
    return f">= {low:g}" if high == float("inf") else f"{low:g} to {high:g}"


def call(cls: type[Any]) -> str:
    """A line of code that uses the class with its default settings."""
    if cls.kind == "policy":
        return f'with foveal.hf.use(model, cache="{cls.name}", budget=1024):\n    model.generate(**inputs)'
    extra = "".join(f", {name}={name}" for name, item in cls.inputs.items() if not item.optional)
    return f'out = foveal.attention(q, k, v, "{cls.name}"{extra})'


def limit(one: Any) -> str:
    """A declared special case in words."""
    own = ", ".join(f"{name}={value!r}" for name, value in one.settings.items()) or "default settings"
    other = ", ".join(f"{name}={value!r}" for name, value in one.other.items())
    gates = " and the right gates" if one.inputs else ""
    why = f": {one.why}" if one.why else ""
    return f"- `{own}`{gates} equals [`{one.equals}`]({one.equals}.md){f' with `{other}`' if other else ''}{why}."


def definition(cls: type[Any]) -> str:
    owner = next(base for base in cls.__mro__ if "definition" in vars(base))
    code = textwrap.dedent(inspect.getsource(owner.definition)).strip()
    inherited = "" if owner is cls else f"Inherited from `{owner.__name__}`.\n\n"
    return f"{inherited}```python\n{code}\n```"


def card(cls: type[Any]) -> str:
    rows = [
        ("Paper", f"[{cls.paper.title}]({cls.paper.link}), {cls.paper.authors}, {cls.paper.year}"),
        ("Key", f"`{cls.name}`"),
        ("Aliases", ", ".join(f"`{alias}`" for alias in cls.aliases) or "none"),
        ("Source", f"`src/{registry.path(cls)}`"),
    ]
    if cls.kind == "mechanism":
        modes = {(True,): "causal only", (False,): "not causal"}.get(cls.causal_modes, "causal or not")
        rows += [
            ("Engine", f"[{cls.engine}](../engines/{cls.engine}.md)"),
            ("Forms", ", ".join(f"`{form}`" for form in cls.forms)),
            ("Modes", modes + (", as many queries as keys" if cls.self_attention else "")),
        ]
    else:
        rows += [
            ("Engine", "[cache](../engines/cache.md)"),
            ("Frees memory", "yes" if cls.frees_memory else "no"),
        ]
    return table(rows[0], rows[1:])


def page(cls: type[Any]) -> str:
    """The page of one mechanism or policy."""
    parts = sections(cls.__doc__ or "")
    text = [f"# {cls.__name__}", markdown(parts[""]), f"```python\n{call(cls)}\n```", card(cls)]
    text += ["## Settings", settings(cls)]
    if parts.get("Raises"):
        text += ["Raises " + markdown("; ".join(f"`{k}` {v}" for k, v in entries(parts["Raises"]).items()))]
    if cls.kind == "mechanism":
        text += ["## Tensors of its own", tensors(cls), "## Cost for each query head", cost(cls)]
        if cls.limits:
            text += ["## Limits", "Each of these is tested.", "\n".join(map(limit, cls.limits))]
    text += [
        "## Definition",
        "What every form and backend is compared with, in float64.",
        definition(cls),
    ]
    return "\n\n".join(text) + "\n"


def tensors(cls: type[Any]) -> str:
    if not cls.inputs:
        return "None beyond q, k and v."
    return table(
        ("Name", "Axes", "Range", "Required", "Meaning"),
        (
            (f"`{name}`", f"`[{', '.join(x.axes)}]`", interval(*x.legal), "no" if x.optional else "yes", x.doc)
            for name, x in cls.inputs.items()
        ),
    )


def cost(cls: type[Any]) -> str:
    rows = (
        ("Multiply-adds for T tokens", f"`{cls.cost.train}`"),
        ("Multiply-adds for one more token", f"`{cls.cost.decode}`"),
        ("Numbers kept for decoding", f"`{cls.cost.state}`"),
    )
    names = markdown(inspect.getdoc(cls.variables) or "").removeprefix("Adds ")
    own = f"\n\nBeside the settings: {names}" if cls.variables is not Spec.variables else ""
    return table(("", "Leading order"), rows) + own


def paper(cls: type[Any]) -> str:
    first = re.split(r",| et al\.", cls.paper.authors)[0]
    return f"[{first} {cls.paper.year}]({cls.paper.link})"


def overview(kind: str, prefix: str | None = "") -> str:
    """The table of all methods of a kind; links start at ``prefix``, None for no links."""
    classes: list[Any] = registry.classes(kind)
    names = [f"[`{cls.name}`]({prefix}{cls.name}.md)" if prefix is not None else f"`{cls.name}`" for cls in classes]
    if kind == "policy":
        return table(
            ("Policy", "What it does", "Frees memory", "Paper"),
            ((n, summary(c), "yes" if c.frees_memory else "no", paper(c)) for n, c in zip(names, classes, strict=True)),
        )
    return table(
        ("Mechanism", "What it does", "Engine", "Own tensors", "Decode state", "Paper"),
        (
            (n, summary(c), c.engine, ", ".join(f"`{i}`" for i in c.inputs) or "-", f"`{c.cost.state}`", paper(c))
            for n, c in zip(names, classes, strict=True)
        ),
    )


def index(kind: str) -> str:
    """The index page of a kind."""
    return f"# {FOLDERS[kind].title()}\n\n{overview(kind)}\n"


def reference() -> str:
    """The page of every public name of ``foveal``, from its signature and docstring."""
    named = [(name, getattr(foveal, name)) for name in foveal.__all__]
    text = ["# Reference", "Every public name of `foveal`, and of `foveal.hf`."]
    text += [described(name, obj) for name, obj in named]
    text += ["## foveal.hf", summary(foveal.hf)]
    text += [described(f"hf.{name}", getattr(foveal.hf, name)) for name in foveal.hf.__all__]
    return "\n\n".join(text) + "\n"


def described(name: str, obj: Any) -> str:
    parts = sections(inspect.getdoc(obj) or "")
    text = [f"### foveal.{name}", f"```python\n{signature(name, obj)}\n```", markdown(parts.pop(""))]
    for heading, body in parts.items():
        pairs = entries(body)
        listed = heading in ("Args", "Raises") and all(pairs.values())
        lines = "\n".join(f"- `{key}`: {markdown(value)}" for key, value in pairs.items()) if listed else markdown(body)
        text.append(f"**{heading}**\n\n{lines}")
    return "\n\n".join(text)


def signature(name: str, obj: Any) -> str:
    """How to call it, without annotations: the docstring says what each argument is."""
    try:
        found = inspect.signature(obj)
    except ValueError:
        return name
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
    text = str(inspect.Signature(bare))
    return (
        f"{name}{text}"
        if len(name + text) <= 100
        else f"{name}(\n    {text[1:-1].replace(', ', ',' + chr(10) + '    ')},\n)"
    )
