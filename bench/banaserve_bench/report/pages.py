"""Pages of a report: one HTML file that needs no other, and Markdown with plots beside it.

Both give the answer first, then the figures, then the facts behind them. A page of several sections
opens with the first sentences of each section.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import PurePath

from banaserve_bench.report import tables
from banaserve_bench.report.drawing import DARK, LIGHT, Theme, inline, style
from banaserve_bench.report.section import Section

_NUM_OPENING = 2
BEST = {"light": "#dcefe2", "dark": "#1d3a28"}
"""Background colours of a best value."""
FAINT = {"light": "#555555", "dark": "#aaaaaa"}


def _colours(theme: Theme, name: str) -> str:
    return (
        f"--back:{theme.background};--text:{theme.text};--edge:{theme.grid};"
        f"--faint:{FAINT[name]};--best:{BEST[name]}"
    )


_CSS = (
    f":root{{{_colours(LIGHT, 'light')}}}"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{_colours(DARK, 'dark')}}}}}"
    "body{font:15px/1.5 sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;"
    "color:var(--text);background:var(--back)}"
    "table{border-collapse:collapse;margin:1rem 0;font-size:13px;display:block;overflow-x:auto}"
    "td,th{border:1px solid var(--edge);padding:.2rem .5rem;text-align:left;white-space:nowrap}"
    ".number{text-align:right;font-variant-numeric:tabular-nums}"
    "td.best{font-weight:bold;background:var(--best)}"
    ".answer{font-size:17px}.facts,.note{color:var(--faint);font-size:13px}"
    "figure{margin:1rem 0}svg.plot{width:100%;height:auto}"
    "@media print{body{max-width:none;margin:0}figure,tr{break-inside:avoid}"
    "table{display:table;font-size:9px}.answer{font-size:12pt}"
    "td.best{print-color-adjust:exact}details{display:block}}"
)


def as_html(
    title: str, sections: Sequence[Section], drawn: Sequence[Sequence[str]], problem: str = ""
) -> str:
    """Return a page that needs no other file and no network.

    Args:
        drawn: Plots of each section as SVG documents.
        problem: Message about what the page lacks and what to do about it; empty if nothing.
    """
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" '
        'content="light dark">',
        f"<title>{escape(title)}</title><style>{_CSS}{style()}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
    ]
    if problem:
        parts.append(f'<p class="note">{escape(problem)}</p>')
    if len(sections) > 1:
        opening = [
            f'<li><a href="#section-{number}">{escape(one.name)}</a>: '
            f"{escape(' '.join(_opening(one)))}</li>"
            for number, one in enumerate(sections, start=1)
        ]
        parts.append(f"<ul>{''.join(opening)}</ul>")
    for number, (section, svgs) in enumerate(zip(sections, drawn, strict=True), start=1):
        parts += _html_section(section, svgs, number)
    parts.append("</body></html>\n")
    return "\n".join(parts)


def _html_section(section: Section, svgs: Sequence[str], number: int) -> list[str]:
    parts = [f'<section id="section-{number}"><h2>{escape(section.name)}</h2>']
    parts.append(_html_list(section.answer, "answer"))
    if section.details:
        parts += ["<h3>Figure by figure</h3>", _html_list(section.details)]
    if not tables.is_empty(section.table):
        parts.append(tables.as_html(section.table))
    if section.table_note:
        parts.append(f'<p class="note">{escape(section.table_note)}</p>')
    for grid, drawn in zip(section.plots, svgs, strict=False):
        parts.append(f"<h3>{escape(grid.title)}</h3><figure>{inline(drawn)}</figure>")
    for caption, table in section.more:
        parts.append(f"<h3>{escape(caption)}</h3>{tables.as_html(table)}")
    parts.append("<h3>What this rests on</h3>")
    parts.append(f'<p class="facts">{escape("; ".join(section.facts))}</p>')
    if section.notes:
        parts.append(_html_list(section.notes, "note"))
    parts.append("</section>")
    return parts


def _html_list(words: Sequence[str], kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f"<ul{named}>{''.join(f'<li>{escape(one)}</li>' for one in words)}</ul>"


def as_markdown(
    title: str,
    sections: Sequence[Section],
    plot_names: Sequence[Sequence[str]],
    problem: str = "",
) -> str:
    """Return the page as Markdown.

    Args:
        plot_names: Paths of each section's plot files, relative to the page's folder.
        problem: Message about what the page lacks and what to do about it; empty if nothing.
    """
    parts = [f"# {title}"]
    if problem:
        parts.append(problem)
    if len(sections) > 1:
        parts.append(_markdown_list([f"{one.name}: {' '.join(_opening(one))}" for one in sections]))
    for section, names in zip(sections, plot_names, strict=True):
        parts += _markdown_section(section, names)
    return "\n\n".join(parts) + "\n"


def _markdown_section(section: Section, names: Sequence[str]) -> list[str]:
    parts = [f"## {section.name}", _markdown_list(section.answer)]
    if section.details:
        parts += ["### Figure by figure", _markdown_list(section.details)]
    if not tables.is_empty(section.table):
        parts.append(tables.as_markdown(section.table))
    if section.table_note:
        parts.append(section.table_note)
    for grid, name in zip(section.plots, names, strict=False):
        parts += [f"### {grid.title}", f"![{grid.title}]({PurePath(name).as_posix()})"]
    for caption, table in section.more:
        parts += [f"### {caption}", tables.as_markdown(table)]
    parts += ["### What this rests on", "; ".join(section.facts)]
    if section.notes:
        parts.append(_markdown_list(section.notes))
    return parts


def _markdown_list(words: Sequence[str]) -> str:
    return "\n".join(f"- {one}" for one in words)


def _opening(section: Section) -> list[str]:
    return section.answer[:_NUM_OPENING]
