"""Dynamo's SGLang worker with SGLang's plug-ins loaded first: `python dynamo_sglang.py` in place of `-m dynamo.sglang`.

Dynamo 1.6.1 reads SGLang's options before SGLang has loaded its plug-ins, so it knows no backend of theirs.
"""

import runpy

from sglang.srt.plugins import load_plugins

if __name__ == "__main__":
    load_plugins()
    runpy.run_module("dynamo.sglang", run_name="__main__", alter_sys=True)
