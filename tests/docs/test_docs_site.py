"""The recipes of all pages are fit for a site: own ports, engines with names, and no NIC that all ranks would share."""

from __future__ import annotations

import json
import re
from pathlib import Path

from kvmover.exposition import FIRST_METRICS_PORT

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: Pages and what stands beside them, to be applied as it is.
APPLIED = [path for folder in ("docs", "deploy") for path in (ROOT / folder).rglob("*")]
TEXTS = [*PAGES, *sorted(path for path in APPLIED if path.suffix in {".json", ".yml", ".yaml", ".service"})]


def transfer_configs(text: str) -> list[dict[str, object]]:
    """Of command lines and of JSON by itself; what a diff takes away is left out."""
    plain = re.sub(r"^\+", "", re.sub(r"^-(?!-).*\n", "", text, flags=re.M), flags=re.M)
    found = [match.start() for match in re.finditer(r'\{\s*"kv_connector":', plain)]
    return [json.JSONDecoder().raw_decode(plain[start:])[0] for start in found]


def test_every_vllm_of_a_recipe_has_a_name_so_that_no_dashboard_shows_a_uuid() -> None:
    configs = {str(page.relative_to(ROOT)): transfer_configs(page.read_text()) for page in TEXTS}
    pages = ("README.md", *(f"docs/{name}.md" for name in ("comparison", "cross-engine", "multi-node", "vllm")))
    assert {*pages} <= {name for name, found in configs.items() if found}
    assert not [(name, each) for name, found in configs.items() for each in found if not each.get("engine_id")]


def test_a_recipe_has_metrics_at_ports_that_nothing_else_has_by_default() -> None:
    """9400 is that of dcgm-exporter, with the network of the host."""
    for page in TEXTS:
        text = page.read_text()
        for port in re.findall(r"KVMOVER_METRICS_PORT(?:=|, value: )\"?(\d+)", text):
            assert port == "0" or 0 <= int(port) - FIRST_METRICS_PORT < 100, (page.name, port)
        assert not re.search(r":94\d\d\b", text), page.name


def test_no_recipe_gives_all_ranks_of_a_server_one_nic() -> None:
    """A variable of a server is one for all of its ranks; rows of tables explain it."""
    assert not [
        page.name for page in TEXTS if re.search(r"^(?!\|).*UCX_NET_DEVICES(=|, value)", page.read_text(), re.M)
    ]
