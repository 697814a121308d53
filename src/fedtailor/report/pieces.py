"""What every page is made of: one style sheet (light, dark and for paper), the shell, sections, tables, figures, lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
h1{font-size:1.7rem;line-height:1.2}h2{font-size:1.2rem;margin-top:2.2rem;border-bottom:1px solid #ccc}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.88rem}.wide{width:100%}
th,td{padding:.3rem .5rem;text-align:right;border-bottom:1px solid #ddd;vertical-align:top}td{white-space:nowrap}
th{vertical-align:bottom}th:first-child,td:first-child{text-align:left}td:first-child{white-space:normal;
overflow-wrap:anywhere;min-width:9rem}td small{display:block;color:#555}
tr.best td{font-weight:700;background:#eef5fb}tr.best td:first-child::before{content:"★ "}
.words td,.words th{text-align:left;white-space:normal}
svg{width:100%;min-width:44rem;height:auto;font:13px system-ui,sans-serif;display:block}svg text{fill:#222}
figure{margin:1rem 0}figcaption{color:#444;font-size:.92rem}
figcaption p{margin:.3rem 0}code,pre{font:.88rem/1.4 ui-monospace,monospace}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:#f5f5f5;padding:.6rem}code{overflow-wrap:anywhere}
dt{font-weight:600}dd{margin:0 0 .4rem 1rem}summary{cursor:pointer}
@media print{body{max-width:none;margin:0;font-size:10pt}svg{min-width:0}.scroll{overflow:visible}
table{font-size:8pt}figcaption{font-size:8.5pt}h2{font-size:13pt}
th,td{padding:.15rem .25rem}
figure,tr{break-inside:avoid}h2{break-after:avoid}details::details-content{content-visibility:visible;height:auto}}
@media screen and (prefers-color-scheme:dark){body{color:#ddd;background:#16181b}h2{border-color:#444}th,td{border-color:#33373c}
td small,figcaption{color:#a5abb3}tr.best td{background:#1c2b38}pre{background:#202429}svg text{fill:#ddd}
svg [stroke="#333"],svg [stroke="#000"],svg [stroke="#000000"]{stroke:#c8ccd2}svg [fill="#000000"],svg [fill="#333"]{fill:#c8ccd2}
svg [stroke="#e4e4e4"]{stroke:#33373c}svg [fill="#e4e4e4"]{fill:#b8bcc2}svg [stroke="#b8b8b8"],svg [stroke="#999"]{stroke:#666c74}
svg [stroke="#fff"]{stroke:#16181b}svg [fill="#fff"]{fill:#16181b}
svg [stroke="#0072B2"]{stroke:#4aa8e0}svg [fill="#0072B2"]{fill:#4aa8e0}svg [stroke="#D55E00"]{stroke:#f08a45}
svg [fill="#D55E00"]{fill:#f08a45}svg [stroke="#009E73"]{stroke:#2fbf95}svg [fill="#009E73"]{fill:#2fbf95}}
"""


def document(title: str, inside: str, style: str = "") -> str:
    """Return a page that needs nothing from elsewhere."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style></head><body><main>{inside}</main></body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    inside = "".join(parts)
    return f"<section>{f'<h2>{escape(title)}</h2>' if title else ''}{inside}</section>" if inside else ""


def table(titles: Sequence[str], rows: Sequence[str], kind: str = "plain") -> str:
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    return f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def figure(svg: str, *texts: str) -> str:
    """Return a picture and what to look for in it, a paragraph each."""
    words = f"<p>{'</p><p>'.join(map(escape, texts))}</p>" if len(texts) > 1 else escape("".join(texts))
    return f'<figure><div class="scroll">{svg}</div><figcaption>{words}</figcaption></figure>' if svg else ""


def listed(lines: Iterable[str]) -> str:
    inside = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{inside}</ul>" if inside else ""
