"""Tables that notebooks show in place of `repr`."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A caption and a table as HTML. All texts are escaped; numbers have separators and are aligned to the right."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><caption>{html.escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    if isinstance(value, int):
        return f'<td style="text-align: right">{value:,}</td>'
    return f"<td>{html.escape(str(value))}</td>"
