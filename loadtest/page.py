"""The report as one self-contained HTML page, readable in light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from loadtest import plots
from loadtest.percentiles import Latency
from loadtest.report import ENOUGH_BEYOND, milliseconds, notes
from loadtest.result import Result

_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --soft: #59636e; --line: #d8dce1; --page: #ffffff; --box: #f6f8fa;
  --bad: #c2221c; --good: #18794e; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e8eb; --soft: #9aa4af; --line: #3a4047; --page: #14171a;
  --box: #1d2126; --bad: #ff7b72; --good: #57c785; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 2rem 1.25rem 4rem; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
li { max-width: 75ch; } .soft { color: var(--soft); margin: .2rem 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .7rem; margin: 1.4rem 0; }
.tile { background: var(--box); border-radius: 8px; padding: .7rem .9rem; }
.tile b { display: block; font-size: 1.45rem; font-variant-numeric: tabular-nums; line-height: 1.25; }
.tile span { color: var(--soft); font-size: .85rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .5rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; } th:first-child, td:first-child { text-align: left; }
.wrap td:first-child { white-space: normal; overflow-wrap: anywhere; }
  .bad { color: var(--bad); } .good { color: var(--good); }
img { width: 100%; height: auto; display: block; }
code { font-size: .9em; overflow-wrap: anywhere; }
"""


def page(result: Result, *, search: Sequence[dict[str, Any]] = ()) -> str:
    """The whole page; `search` are the trials of a search for the highest rate."""
    title = f"Load test of {result.model}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(_what(result))}</p>',
        f'<p class="soft">{escape(_where(result))}</p>',
        _tiles(result),
        _gate(result),
        _search(search),
        *(_plot(name, draw, result) for name, draw in plots.plots(result).items()),
        "<h2>Stages</h2>",
        _stages(result),
        _server(result),
        _failures(result),
        _buckets(result),
        "<h2>How to read this</h2>",
        "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes(result)) + "</ul>",
        f'<p class="soft"><code>{escape(result.command)}</code></p>',
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _what(result: Result) -> str:
    return (
        f"{result.protocol}, {result.loop} loop, {result.shape}, {result.users} users, lengths {result.lengths}, "
        f"{result.measured_s:.0f} s measured, {result.date[:16].replace('T', ' ')} UTC"
    )


def _where(result: Result) -> str:
    hardware = result.hardware
    gpus = hardware["gpus"]
    machine = [f"{hardware['cores']} cores of {hardware['cpu']}", *(gpus if isinstance(gpus, list) else [])]
    versions = [f"{name} {version}" for name, version in result.versions.items()]
    return f"Load from {', '.join(machine)}; {', '.join(versions)}"


def _tiles(result: Result) -> str:
    latency, failed = result.latency, sum(result.failures.values())
    of = " of all steps" if result.shape == "steps" else ""
    tiles = [
        (milliseconds(latency.p50_ms), f"P50{of}, ms"),
        (milliseconds(latency.p99_ms), f"P99{of}, ms"),
        (milliseconds(latency.p99_9_ms), f"P99.9{of}, ms"),
        (f"{result.throughput_rps:.1f}", "right answers/s"),
        (f"{latency.count}", "right answers"),
        (f"{failed}", "failures"),
    ]
    cells = (
        f'<div class="tile"><b{" class=bad" if label == "failures" and failed else ""}>{value}</b>'
        f"<span>{label}</span></div>"
        for value, label in tiles
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def _gate(result: Result) -> str:
    lines = (
        f'<li class="{"good" if check.passed else "bad"}">{escape(check.text)}: '
        f"{'kept' if check.passed else 'not kept'}</li>"
        for check in result.gate
    )
    return f"<ul>{''.join(lines)}</ul>"


def _search(trials: Sequence[dict[str, Any]]) -> str:
    if not trials:
        return ""
    rows = (
        (
            f"{trial['rate']:.1f}",
            f"{trial['throughput_rps']:.1f}",
            milliseconds(trial["p99_ms"]),
            str(trial["failures"]),
            "held" if trial["held"] else "not held",
        )
        for trial in trials
    )
    heads = ("rate, requests/s", "right answers/s", "P99, ms", "failures", "")
    return "<h2>Search for the highest rate</h2>" + _table(heads, rows)


def _plot(name: str, draw: plots.Draw, result: Result) -> str:
    light, dark = (plots.svg_uri(draw, result, theme) for theme in (plots.LIGHT, plots.DARK))
    return (
        f'<h2>{escape(name)}</h2><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{escape(name)}"></picture>'
    )


def _stages(result: Result) -> str:
    unit = "offered/s" if result.loop.startswith("open") else "users"
    heads = ("stage", unit, "answers/s", "P50", "P90", "P95", "P99", "P99.9", "longest", "answers", "failed")
    rows = [
        (
            stage.name,
            f"{stage.offered:.4g}",
            f"{stage.throughput_rps:.1f}",
            *_latency(stage.latency),
            str(stage.latency.count),
            str(sum(stage.failures.values())),
        )
        for stage in result.stages
    ]
    if len(rows) > 1:
        total = (*_latency(result.latency), str(result.latency.count), str(sum(result.failures.values())))
        rows.append(("all", "", f"{result.throughput_rps:.1f}", *total))
    hint = (
        "Times in ms, of right answers. In brackets: how many of them lie beyond the percentile, where they are few. "
        "The failures of 'all' have those of the warm-up."
    )
    return _table(heads, rows) + f'<p class="soft">{hint}</p>'


def _latency(latency: Latency) -> Iterable[str]:
    """Percentiles; one that rests on few samples is marked with how many."""
    for percent, value_ms in (
        (50, latency.p50_ms),
        (90, latency.p90_ms),
        (95, latency.p95_ms),
        (99, latency.p99_ms),
        (99.9, latency.p99_9_ms),
    ):
        beyond = int(latency.count * (100 - percent) / 100)
        text = milliseconds(value_ms)
        is_weak = percent >= 99 and latency.count and beyond < ENOUGH_BEYOND
        yield f"{text} ({max(beyond, 1)})" if is_weak else text
    yield milliseconds(latency.max_ms)


def _server(result: Result) -> str:
    shown = [(stage, stage.server) for stage in result.stages if stage.server]
    if not shown:
        return "<h2>The server's split of the time</h2><p>Triton's metrics were not read.</p>"
    heads = ("stage", *plots.SPLIT, "requests", "executions")
    rows = (
        (
            stage.name,
            *(milliseconds(getattr(server, name)) for name in plots.SPLIT.values()),
            str(server.requests),
            str(server.executions),
        )
        for stage, server in shown
    )
    hint = "Mean ms of a request, as the server counts them; network and client is what is left of the service time."
    return "<h2>The server's split of the time</h2>" + _table(heads, rows) + f'<p class="soft">{hint}</p>'


def _failures(result: Result) -> str:
    if not result.failures:
        return ""
    rows = ((escape(kind), str(count)) for kind, count in result.failures.items())
    return "<h2>Failures</h2>" + _table(("kind", "requests"), rows, kind="wrap")


def _buckets(result: Result) -> str:
    if not result.bucket_hits:
        return ""
    total = sum(result.bucket_hits.values())
    rows = ((name, f"{count:.0f}", f"{100 * count / total:.1f} %") for name, count in result.bucket_hits.items())
    padding = ""
    if result.padding_share is not None:
        padding = f"<p>{100 * result.padding_share:.1f} % of the input elements that ran were padding.</p>"
    return "<h2>Buckets</h2>" + _table(("bucket", "groups", "share"), rows) + padding


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )
