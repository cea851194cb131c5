"""A tiny chat target on disk, and a server that fails on purpose: what the tests of generation and answers share."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable ASCII character, so that every text comes back as it was."""
    characters = ["\n", *map(chr, range(32, 127))]
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[2],
        unk_token=SPECIAL[0],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    return fast


def tiny_config(**changes: Any) -> LlamaConfig:
    """A Llama of two small layers over the tiny tokenizer's vocabulary."""
    settings: dict[str, Any] = dict(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return LlamaConfig(**{**settings, **changes})


def tiny_model(config: Any = None, seed: int = 0, end_bias: float = 0.35) -> Any:
    """A random model in float32 whose next token depends on all of the prompt, and that comes to an end at times."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config or tiny_config(), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.3)
        model.lm_head.weight[2] += end_bias * model.lm_head.weight[40]
        model.lm_head.weight[:2] = 0.0  # the other special tokens are practically never written
    return model


def save_tiny_target(folder: Path, **changes: Any) -> Path:
    """A target folder, as a user would give with --target."""
    tiny_model(**changes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


Answer = Callable[[int, dict[str, Any]], tuple[int, dict[str, str], Any]]
"""(number of the request, its body) -> status, headers and body of the reply; a float as body waits that long."""


class FaultyServer:
    """An OpenAI-compatible server on loopback that answers as it is told and remembers what it was asked."""

    def __init__(self, answer: Answer) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times_s: list[float] = []
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._send(200, {}, {"data": []})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    number = len(outer.bodies)
                    outer.bodies.append(body)
                    outer.headers.append(dict(self.headers))
                    outer.times_s.append(time.monotonic())
                self._send(*answer(number, body))

            def _send(self, status: int, headers: dict[str, str], reply: Any) -> None:
                if isinstance(reply, float):
                    outer.closing.wait(reply)
                    self.close_connection = True
                    return
                payload = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(payload)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *_: Any) -> None:
                pass

        self.closing = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @contextmanager
    def running(self) -> Iterator[FaultyServer]:
        """Serve inside the `with`."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.closing.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join()


def completion(text: str, finish_reason: str = "stop", **message: Any) -> dict[str, Any]:
    """The body of a chat completion."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text, **message},
        "finish_reason": finish_reason,
    }
    return {"choices": [choice], "usage": {"completion_tokens": len(text)}}


def echo(_: int, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
    """Answer with the last message in capitals."""
    return 200, {}, completion(body["messages"][-1]["content"].upper())
