"""docs/configuration.md, written from the settings. `python -m perf.config_page` updates the page."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from kvmover.config import SettingKey, keys
from kvmover.config.text import toml

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"

HEAD = """\
# Configuration

Every setting has a default, a key in a TOML file, and an environment variable, which wins. `kvmover config` prints all
of them as TOML, defaults as comments, and behind every other where it was given; what it prints is a file that can be
read again. An engine's own options go before all of it ([vLLM](vllm.md), [SGLang](sglang.md)), and an adapter may have
other defaults, which the text of a setting names.

```console
$ kvmover config > kvmover.toml
$ KVMOVER_MOVER_DEADLINE_S=5 kvmover config --config kvmover.toml
```

Without `--config` the file is the one that `$KVMOVER_CONFIG` names, if it is set. A key or a variable that does not
exist is an error that names the nearest one; a value that its part of kvmover refuses is an error too. Sizes in bytes
may have a unit (`"64MiB"`). `"none"` is the absence of a value, where the type allows it. In the environment, paths of
a list are separated by `:`. Variables with a single word after `KVMOVER_` are no settings.

```python
from kvmover.config import load

settings = load().settings  # or load(Path("kvmover.toml"))
config = settings.mover_config()  # for Mover(..., config=config): with the keys, which are read here
policy = settings.store  # for PageStore.open(..., policy=policy)
```

`Observers` begins what `[logging]`, `[metrics]` and `[record]` ask for, and ends it:

```python
from kvmover.cache.ledger import Ledger, LedgerCollector
from kvmover.observe.start import Observers

with Observers(settings, engine="decode", rank=0) as observers:
    ledger = Ledger(sink=observers.account)
    observers.serve(LedgerCollector(ledger))  # and MoverCollector([mover]), TierCollector(controller.snapshot)
    # observers.watch(mover), before it goes to a Progress
```

`kvmover top` shows the metrics endpoint as it changes. `kvmover report RUN.jsonl --html out.html` draws run logs, of
one rank or of many: a page that needs no network. `kvmover doctor` reads the configuration, too.

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
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(PAGE.parent.parent)}")
