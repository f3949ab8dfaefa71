"""The report's page: styles and small builders of HTML. Every text passes :func:`text` before it meets markup."""

from __future__ import annotations

import html
from collections.abc import Sequence

STYLE = """
:root { --ink: #0f172a; --soft: #475569; --faint: #94a3b8; --line: #e2e8f0; --paper: #ffffff; --tint: #f8fafc;
  --accent: #2563eb; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--tint); color: var(--ink);
  font: 15px/1.55 -apple-system, "Segoe UI", Roboto, Helvetica, Arial, "Liberation Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 28px 80px; }
header h1 { margin: 0; font-size: 30px; letter-spacing: -0.02em; line-height: 1.2; }
header p { margin: 6px 0 0; color: var(--soft); overflow-wrap: anywhere; }
nav { margin: 18px 0 0; display: flex; flex-wrap: wrap; gap: 6px 18px; font-size: 14px; }
a { color: var(--accent); text-decoration: none; }
a:hover { text-decoration: underline; }
section { margin-top: 44px; }
h2 { font-size: 21px; letter-spacing: -0.01em; margin: 0 0 4px; }
h3 { font-size: 15px; margin: 26px 0 10px; color: var(--soft); font-weight: 600; }
.note { color: var(--soft); margin: 0 0 14px; max-width: 78ch; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 14px; margin-top: 28px; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; }
.card .label { color: var(--soft); font-size: 13px; }
.card .value { font-size: 21px; font-weight: 650; white-space: nowrap; letter-spacing: -0.02em; margin-top: 2px;
  font-variant-numeric: tabular-nums; }
.card .value small { font-size: 14px; font-weight: 400; color: var(--faint); letter-spacing: 0; }
.card .detail { color: var(--faint); font-size: 13px; min-height: 1.5em; }
.scroll { overflow-x: auto; background: var(--paper); border: 1px solid var(--line); border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 8px 16px; border-top: 1px solid var(--line); vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
thead th { border-top: 0; color: var(--soft); font-size: 13px; font-weight: 600; }
tbody tr:first-child td { border-top: 1px solid var(--line); }
td .interval { display: block; color: var(--faint); font-size: 12.5px; line-height: 1.3; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(330px, 1fr)); gap: 14px; }
figure { margin: 0; background: var(--paper); border: 1px solid var(--line); border-radius: 10px;
  padding: 12px 14px 8px; display: flex; flex-direction: column; }
figure.wide { grid-column: 1 / -1; }
figcaption { font-weight: 600; font-size: 14px; line-height: 1.4; margin-bottom: 6px; flex: 1; }
figcaption span { display: block; font-weight: 400; color: var(--faint); font-size: 12.5px; }
.bar { display: flex; gap: 2px; height: 34px; margin: 4px 0 10px; border-radius: 6px; overflow: hidden; }
.bar div { min-width: 2px; }
.key { display: flex; flex-wrap: wrap; gap: 4px 20px; font-size: 13px; color: var(--soft); margin-bottom: 4px; }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 7px; }
.gap { margin-top: 14px; }
figure img { width: 100%; height: auto; display: block; }
.sample { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; margin-bottom: 14px;
  overflow: hidden; }
.prompt { padding: 12px 16px; background: #f1f5f9; font-weight: 600; white-space: pre-wrap; overflow-wrap: anywhere; }
.answers { display: grid; grid-auto-flow: column; grid-auto-columns: minmax(230px, 1fr); overflow-x: auto; }
.answer { padding: 12px 16px 14px; border-left: 1px solid var(--line); }
.answer:first-child { border-left: 0; }
.answer .who { font-size: 13px; font-weight: 600; color: var(--accent); }
.answer .said { margin: 4px 0 10px; white-space: pre-wrap; overflow-wrap: anywhere; }
.answer .said em { color: var(--faint); }
.chip { display: inline-block; font-size: 12px; color: var(--soft); background: #f1f5f9; border-radius: 20px;
  padding: 1px 9px; margin: 0 5px 4px 0; white-space: nowrap; }
details { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; margin-bottom: 12px; }
details > summary { cursor: pointer; padding: 10px 16px; font-weight: 600; }
details > .inside { padding: 0 14px 2px; }
pre { margin: 0; padding: 4px 16px 16px; overflow-x: auto;
  font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; }
footer { margin-top: 56px; color: var(--faint); font-size: 13px; }
@media print { body { background: #fff; } section { break-inside: auto; } figure, .sample { break-inside: avoid; } }
"""


def text(value: object) -> str:
    """``value`` as text that is safe between tags and inside quoted attributes."""
    return html.escape(str(value), quote=True)


def page(title: str, subtitle: str, cards: str, sections: Sequence[tuple[str, str, str]], footer: str) -> str:
    """The whole document. ``sections`` are (anchor, title, inner HTML); empty ones are left out."""
    shown = [(anchor, heading, inner) for anchor, heading, inner in sections if inner]
    links = "".join(f'<a href="#{text(anchor)}">{text(heading)}</a>' for anchor, heading, _ in shown)
    body = "".join(
        f'<section id="{text(anchor)}"><h2>{text(heading)}</h2>{inner}</section>' for anchor, heading, inner in shown
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{STYLE}</style></head><body><main>"
        f"<header><h1>{text(title)}</h1><p>{text(subtitle)}</p><nav>{links}</nav></header>"
        f"{cards}{body}<footer>{text(footer)}</footer></main></body></html>\n"
    )


def note(words: str) -> str:
    """A paragraph of explanation under a heading."""
    return f'<p class="note">{text(words)}</p>'


def cards(items: Sequence[tuple[str, str, str, str]]) -> str:
    """Big numbers: (label, value before or "", value, detail)."""
    inner = "".join(
        f'<div class="card"><div class="label">{text(label)}</div><div class="value">'
        + (f"<small>{text(before)} → </small>" if before else "")
        + f'{text(value)}</div><div class="detail">{text(detail)}</div></div>'
        for label, before, value, detail in items
    )
    return f'<div class="cards">{inner}</div>' if items else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str | tuple[str, str]]]) -> str:
    """A table; a cell is a text, or (text, interval shown small below it)."""

    def cell(value: str | tuple[str, str]) -> str:
        if isinstance(value, str):
            return f"<td>{text(value)}</td>"
        main, below = value
        return f"<td>{text(main)}" + (f'<span class="interval">{text(below)}</span>' if below else "") + "</td>"

    top = "".join(f"<th>{text(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(cell(value) for value in row)}</tr>" for row in rows)
    return f'<div class="scroll gap"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def figure(title: str, caption: str, uri: str, wide: bool = False) -> str:
    """A chart with its title; ``uri`` is a data URI."""
    side = f" <span>{text(caption)}</span>" if caption else ""
    kind = ' class="wide"' if wide else ""
    picture = f'<img alt="{text(title)}" src="{text(uri)}">'
    return f"<figure{kind}><figcaption>{text(title)}{side}</figcaption>{picture}</figure>"


def parts_bar(title: str, parts: Sequence[tuple[str, float, str]], colors: Sequence[str]) -> str:
    """One bar of ``parts`` (name, size, size in words), with its key. ``colors`` repeat when there are more parts."""
    shades = [colors[index % len(colors)] for index in range(len(parts))]
    bar = "".join(
        f'<div style="flex:{size:.6g} 0 0;background:{shade}" title="{text(name)}: {text(words)}"></div>'
        for (name, size, words), shade in zip(parts, shades, strict=True)
    )
    key = "".join(
        f'<span><i style="background:{shade}"></i>{text(name)} {text(words)}</span>'
        for (name, _, words), shade in zip(parts, shades, strict=True)
    )
    return (
        f'<figure class="wide"><figcaption>{text(title)}</figcaption>'
        f'<div class="bar">{bar}</div><div class="key">{key}</div></figure>'
    )


def charts(figures: Sequence[str]) -> str:
    """A grid of figures."""
    return f'<div class="charts">{"".join(figures)}</div>' if figures else ""


def details(summary: str, inner: str, is_open: bool = False) -> str:
    """A foldable block; ``inner`` is HTML."""
    return f"<details{' open' if is_open else ''}><summary>{text(summary)}</summary>{inner}</details>"


def sample(prompt: str, answers: Sequence[tuple[str, str, Sequence[str]]]) -> str:
    """A prompt with answers side by side: (who, response, chips)."""
    inner = "".join(
        f'<div class="answer"><div class="who">{text(who)}</div><div class="said">'
        + (text(response) if response.strip() else "<em>(empty)</em>")
        + "</div>"
        + "".join(f'<span class="chip">{text(chip)}</span>' for chip in chips)
        + "</div>"
        for who, response, chips in answers
    )
    return f'<div class="sample"><div class="prompt">{text(prompt)}</div><div class="answers">{inner}</div></div>'
