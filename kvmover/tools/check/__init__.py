"""`kvmover check` asks a prefill and a decode one prompt, and says whether its KV came over, or what is at fault."""
