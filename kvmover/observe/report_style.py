"""The style sheet of a report serves light and dark."""

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1f2328;--soft:#59636e;--grid:#e4e8ed;--card:#f6f8fa;
--device:#0072b2;--host:#e69f00;--storage:#009e73;--lost:#cc79a7;--send:#e69f00;--receive:#0072b2;
--direct:#56b4e9;--packed:#e69f00;--mapped:#009e73;--both:#7a4ea3;--none:#9aa4af;--failed:#b3261e;--p50:#0072b2;--p99:#e69f00}
@media(prefers-color-scheme:dark){:root{--paper:#0d1117;--ink:#e6edf3;--soft:#9aa4af;--grid:#2a313a;--card:#161b22}}
body{margin:2rem auto;max-width:60rem;padding:0 1rem;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1{font-size:1.4rem;margin:0}h2{font-size:1.1rem;margin:2.2rem 0 .2rem}p{margin:.2rem 0 .6rem;color:var(--soft)}
.tiles{display:flex;flex-wrap:wrap;gap:.8rem;margin:1.2rem 0}
.tiles div{background:var(--card);border:1px solid var(--grid);border-radius:8px;padding:.6rem 1rem}
.tiles b,.tiles span{display:block}.tiles b{font-size:1.15rem}
.tiles span,.legend,details{color:var(--soft);font-size:.85rem}
.legend span{margin-right:1rem}
.legend i{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.35em}
svg{width:100%;height:auto;display:block}svg text{font-size:11px}.ink{fill:var(--ink)}.soft{fill:var(--soft)}
.grid{stroke:var(--grid)}.mark{stroke:var(--ink);stroke-width:1.5}.line{fill:none!important;stroke-width:2}
path.send{stroke-width:6;opacity:.7}.hover{fill:transparent}g:hover>.hover{fill:var(--grid);opacity:.5}
table{border-collapse:collapse;margin:.4rem 0;font-variant-numeric:tabular-nums}
rect.failed{stroke:var(--ink);stroke-width:1.5}i.failed{outline:1.5px solid var(--ink)}
th,td{text-align:left;padding:.15rem 1rem .15rem 0;border-bottom:1px solid var(--grid);overflow-wrap:anywhere}
""" + "".join(
    f".{name}{{fill:var(--{name})}}i.{name}{{background:var(--{name})}}path.{name}{{stroke:var(--{name})}}\n"
    for name in (
        "device",
        "host",
        "storage",
        "lost",
        "send",
        "receive",
        "direct",
        "packed",
        "mapped",
        "both",
        "none",
        "failed",
        "p50",
        "p99",
    )
)
