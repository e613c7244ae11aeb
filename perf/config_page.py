"""docs/configuration.md, written from the settings. `python -m perf.config_page` updates the page."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from kvmover.config import SettingKey, keys
from kvmover.config.load import toml
from perf.command_line import options

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"

HEAD = """\
# Configuration

Every setting has a default, a key in a TOML file, and an environment variable. The environment goes over the file,
and an engine's own options ([vLLM](vllm.md), [SGLang](sglang.md), [transformers](transformers.md)) go over
both. An adapter may have other defaults;
the text of a setting names them. `kvmover config` prints all settings as TOML. A default is a comment;
behind any other value stands where it was set. The output can be used as a file again.

```console
$ kvmover config > kvmover.toml
$ KVMOVER_MOVER_DEADLINE_S=5 kvmover config --config kvmover.toml
```

Without `--config` the file is the one that `$KVMOVER_CONFIG` names, if it is set. A key or a variable that does not
exist is an error that names the nearest one; a value that its part of kvmover refuses is an error too. Sizes in bytes
may have a unit (`"64MiB"`). `"none"` means no value, where the type allows it. In the environment, paths of a list
are separated by `:`, and other texts by commas. Variables with a single word after `KVMOVER_` (`KVMOVER_CONFIG`) are no
settings.

```python
from kvmover.config import load

settings = load().settings  # or load(Path("kvmover.toml"))
config = settings.mover_config()  # for Mover(..., config=config): with the keys, which are read here
policy = settings.store  # for PageStore.open(..., policy=policy)
```

`Observers` starts the logs, the metrics endpoint, the run log and the spans that the configuration asks for, and ends
them:

```python
from kvmover.cache.ledger import Ledger, LedgerCollector
from kvmover.observe.observers import Observers

with Observers(settings, engine="decode", rank=0) as observers:
    ledger = Ledger(sink=observers.account)
    observers.serve(LedgerCollector(ledger))  # in one call with MoverCollector([mover]), if there is a mover
    # observers.watch(mover), before it goes to a Progress
```

`kvmover top URL` shows a metrics endpoint as it changes. Metrics listen on 127.0.0.1 by default: for a Prometheus or
a `top` on another machine set `metrics.address` to an address of this one, or to an empty string for all.
`kvmover report RUN.jsonl...` sums up run logs, of one rank or of many: the slowest and the failed requests, and where
the time went. `--trace out.json` also writes a trace for [Perfetto](https://ui.perfetto.dev).
`kvmover doctor` reads the configuration, too.

## A shared key

With `security.shared_key_file`, control messages and cards are sealed with HMAC-SHA256, and what is not sealed is
dropped and counted (`kvmover_unopened_messages_total`). A file of 16 bytes or more will do, for example from
`openssl rand -hex 32`; white space at either end does not count. Keys are never printed. To change a key while
requests run: name the new file in `accepted_key_files` everywhere; then make it `shared_key_file` everywhere, with the
old one in `accepted_key_files`; then drop the old one. `Mover.configure` changes keys of a running mover. Memory itself
is written and read by the network, which is not sealed.

This page is written by `python -m perf.config_page`.
"""


def page() -> str:
    lines = [HEAD]
    for section, members in groupby(keys(), key=lambda key: key.path[:-1]):
        lines += [f"## `[{'.'.join(section)}]`", "", *table(list(members)), ""]
    return "\n".join(lines)


def table(members: list[SettingKey]) -> list[str]:
    """Rows of a Markdown table, a setting each."""
    rows = ["| key | variable | type | default | what it says |", "|---|---|---|---|---|"]
    for key in members:
        cells = f"`{key.path[-1]}`", f"`{key.variable}`", key.kind, f"`{toml(key.default)}`", key.text
        rows.append(f"| {' | '.join(cells)} |")
    return rows


if __name__ == "__main__":
    options(__doc__).parse_args()
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(PAGE.parent.parent)}")
