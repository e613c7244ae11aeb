"""A model of transformers behind OpenAI's completions, a request at a time: prefill or decode of any engine.

    python transformers_server.py Qwen/Qwen3-0.6B 8300 '{"port": 14700}'

The third word has kvmover's options. A request says its half by vLLM's `kv_transfer_params`, as router.py does.
"""

import json
import sys
from copy import copy
from http.server import BaseHTTPRequestHandler, HTTPServer

from transformers import AutoModelForCausalLM, AutoTokenizer

from kvmover.engines.common import Remote, Serve, asked
from kvmover.engines.transformers import TransformersEngine
from kvmover.errors import KvmoverError

folder, port, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3] if len(sys.argv) > 3 else "{}")
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype="auto"), AutoTokenizer.from_pretrained(folder)


def complete(engine: TransformersEngine, body: dict) -> dict:
    said, config = body["prompt"], copy(model.generation_config)
    prompt = tokenizer.encode(said) if isinstance(said, str) else said
    config.do_sample, config.temperature = body.get("temperature", 1.0) > 0, body.get("temperature") or 1.0
    config.eos_token_id = None if body.get("ignore_eos") else config.eos_token_id
    half = asked(body.get("kv_transfer_params"), "the request").whole
    if isinstance(half, Serve):
        first = engine.serve(prompt, half.transfer, top_logprobs=body.get("logprobs") or 0, generation_config=config)
        tokens, likely = [first.token], [first.logprob]
    else:
        config.max_new_tokens, config.output_logits, config.return_dict_in_generate = body["max_tokens"], True, True
        found = engine.generate(prompt, half if isinstance(half, Remote) else None, generation_config=config)
        tokens = found.sequences[0, len(prompt) :].tolist()
        steps = zip(found.logits, tokens, strict=True)
        likely = [float(step[0].float().log_softmax(-1)[token]) for step, token in steps]
    choice = {"index": 0, "text": tokenizer.decode(tokens), "token_ids": tokens, "finish_reason": "length"}
    return {"object": "text_completion", "choices": [{**choice, "logprobs": {"token_logprobs": likely}}]}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer(200, {"status": "ready"})

    def do_POST(self) -> None:
        try:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(200, complete(engine, body))
        except (KvmoverError, ValueError, KeyError) as error:
            self.answer(400, {"error": {"message": str(error)}})

    def answer(self, status: int, body: dict) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


with TransformersEngine(model, options) as engine, HTTPServer(("127.0.0.1", port), Handler) as server:
    server.serve_forever()
