"""A client of OpenAI-compatible servers: chat completions from one or several endpoints, with retries.

Owns connections, waiting and what counts as worth another try. Never reads the environment, never writes the key
anywhere, follows no redirect and uses no proxy.
"""

from __future__ import annotations

import http.client
import json
import random
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from draftmill.errors import InputError

_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_LONGEST_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Reply:
    """A server's answer. finish_reason is the server's word: `stop` where the target ended it itself."""

    content: str
    reasoning: str | None
    tool_calls: list[Any] | None
    finish_reason: str
    num_tokens: int


class RequestFailed(Exception):
    """One prompt got no answer, after all tries. `unreachable`: no server could be talked to at all."""

    def __init__(self, reason: str, *, unreachable: bool = False) -> None:
        super().__init__(reason)
        self.unreachable = unreachable


class _Again(Exception):
    def __init__(self, reason: str, wait_s: float | None = None, *, unreachable: bool = False) -> None:
        super().__init__(reason)
        self.wait_s = wait_s
        self.unreachable = unreachable


class Endpoint:
    """One server: its base URL, requests in flight, and a connection for each thread."""

    def __init__(self, url: str) -> None:
        """`url` is the base, as in http://localhost:8000/v1; without a path, /v1 is meant. Raises InputError."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query or parts.fragment:
            raise InputError(f"--endpoint must be a URL such as http://localhost:8000/v1, got {url!r}")
        if parts.username or parts.password:
            raise InputError("--endpoint must not hold a password; give the key in OPENAI_API_KEY")
        self.url = url
        self.in_flight = 0
        self.resting_until_s = 0.0
        self._path = parts.path.rstrip("/").removesuffix("/chat/completions") or "/v1"
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, port
        self._local = threading.local()

    def request(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], timeout_s: float
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one request. A kept connection that the server has closed is opened anew.

        Raises:
            OSError, http.client.HTTPException: no connection, no answer in time, or a broken one.
        """
        for _ in range(2):
            kept: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
            connection = kept or self._connect(timeout_s)
            self._local.connection = None
            try:
                connection.request(method, self._path + path, body, headers)
                response = connection.getresponse()
                payload = response.read()
            except (ConnectionError, http.client.BadStatusLine):
                connection.close()
                if kept is None:
                    raise
                continue
            except BaseException:
                connection.close()
                raise
            if response.will_close:
                connection.close()
            else:
                self._local.connection = connection
            return response.status, {key.lower(): value for key, value in response.getheaders()}, payload
        raise AssertionError("unreachable: the second connection is never a kept one")

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._secure:
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=timeout_s, context=ssl.create_default_context()
            )
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)


class ChatClient:
    """Chat completions spread over endpoints; safe to use from many threads.

    A request goes to the endpoint with the fewest in flight. One that is busy, fails or does not answer in time is
    left alone for a while and the request is tried again, elsewhere if there is another, with waits that double
    from `backoff_s` to a minute and are shortened at random by up to a half; a server's Retry-After is obeyed.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        model: str,
        parameters: dict[str, Any],
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        retries: int = 6,
        backoff_s: float = 0.5,
    ) -> None:
        """`parameters` go into every request's body, as max_tokens and temperature do."""
        if not endpoints:
            raise InputError("name at least one --endpoint")
        self._endpoints = [Endpoint(url) for url in dict.fromkeys(endpoints)]
        self._body = {"model": model, "stream": False, **parameters}
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        self._retries = retries
        self._backoff_s = backoff_s
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._random = random.Random(0)

    def check(self) -> None:
        """See that every endpoint answers at all. Raises InputError naming the first that does not."""
        for endpoint in self._endpoints:
            try:
                status, _, payload = endpoint.request("GET", "/models", None, self._headers, min(30.0, self._timeout_s))
            except (OSError, http.client.HTTPException) as error:
                raise InputError(
                    f"no server answers at {endpoint.url}: {_short(error)}; start it, or correct --endpoint"
                ) from None
            if status in (401, 403):
                raise self._refusal(endpoint, status, payload)

    def stop(self) -> None:
        """End all waiting between tries: what is being asked fails soon."""
        self._stopped.set()

    def ask(self, messages: list[dict[str, Any]], *, tools: list[Any] | None = None, seed: int | None = None) -> Reply:
        """The answer to messages.

        Raises:
            RequestFailed: this prompt was refused, or got no answer in all its tries.
            InputError: the server refuses everybody: no such model or path, or the key is wrong.
        """
        extra = {name: value for name, value in (("tools", tools), ("seed", seed)) if value is not None}
        body = json.dumps({**self._body, **extra, "messages": [_as_sent(m) for m in messages]}).encode()
        avoided: Endpoint | None = None
        for attempt in range(self._retries + 1):
            endpoint = self._take(avoided)
            try:
                return self._try(endpoint, body)
            except _Again as again:
                problem = again
            finally:
                with self._lock:
                    endpoint.in_flight -= 1
            avoided = endpoint
            wait_s = min(self._backoff_s * 2**attempt, _LONGEST_WAIT_S)
            with self._lock:
                wait_s *= 1.0 - 0.5 * self._random.random()
                if problem.wait_s is not None:
                    wait_s = max(wait_s, min(problem.wait_s, _LONGEST_WAIT_S))
                endpoint.resting_until_s = time.monotonic() + wait_s
            if attempt < self._retries and self._stopped.wait(0.0 if self._has_rested() else wait_s):
                raise RequestFailed("stopped")
        raise RequestFailed(f"{problem} ({self._retries + 1} tries)", unreachable=problem.unreachable)

    def _take(self, avoided: Endpoint | None) -> Endpoint:
        with self._lock:
            now_s = time.monotonic()
            chosen = min(self._endpoints, key=lambda e: (e.resting_until_s > now_s, e is avoided, e.in_flight))
            chosen.in_flight += 1
            return chosen

    def _has_rested(self) -> bool:
        """Whether some endpoint can be asked at once."""
        with self._lock:
            now_s = time.monotonic()
            return any(endpoint.resting_until_s <= now_s for endpoint in self._endpoints)

    def _try(self, endpoint: Endpoint, body: bytes) -> Reply:
        try:
            status, headers, payload = endpoint.request(
                "POST", "/chat/completions", body, self._headers, self._timeout_s
            )
        except ssl.SSLCertVerificationError as error:
            raise InputError(f"{endpoint.url} shows a certificate that can't be trusted: {_short(error)}") from None
        except TimeoutError:
            raise _Again(f"no answer in {self._timeout_s:g} s from {endpoint.url}") from None
        except (OSError, http.client.HTTPException) as error:
            raise _Again(f"no connection to {endpoint.url}: {_short(error)}", unreachable=True) from None
        if status == 200:
            return _reply(payload, endpoint)
        if status in _RETRIED:
            raise _Again(f"{endpoint.url} answered {status}: {_message(payload)}", _seconds(headers.get("retry-after")))
        if status in (400, 413, 422):
            raise RequestFailed(f"refused ({status}): {_message(payload)}")
        raise self._refusal(endpoint, status, payload)

    def _refusal(self, endpoint: Endpoint, status: int, payload: bytes) -> InputError:
        what = {
            401: "check OPENAI_API_KEY",
            403: "check OPENAI_API_KEY",
            404: f"check the base URL and that it serves --model {self._body['model']}",
        }.get(status, "is this the base URL of an OpenAI-compatible server?")
        return InputError(f"{endpoint.url} answered {status}: {_message(payload)}; {what}")


def _as_sent(message: dict[str, Any]) -> dict[str, Any]:
    """A message as the interface wants it: arguments of tool calls are JSON text there, objects in templates."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for number, call in enumerate(message["tool_calls"]):
        function = call["function"]
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        calls.append({"id": f"call_{number}", **call, "function": {**function, "arguments": text}})
    return {**message, "tool_calls": calls}


def _reply(payload: bytes, endpoint: Endpoint) -> Reply:
    try:
        whole = json.loads(payload)
        choice = whole["choices"][0]
        message = choice["message"]
        content, reasoning = message.get("content") or "", message.get("reasoning_content") or message.get("reasoning")
        num_tokens = (whole.get("usage") or {}).get("completion_tokens") or 0
        calls = message.get("tool_calls") or None
        if not (isinstance(content, str) and isinstance(reasoning, str | None) and isinstance(calls, list | None)):
            raise TypeError("content is not text")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _Again(f"{endpoint.url} sent no chat completion: {_short(error)}") from None
    if not content.strip() and calls is None:
        raise RequestFailed("the answer is empty")
    return Reply(content, reasoning or None, calls, str(choice.get("finish_reason") or "stop"), int(num_tokens))


def _message(payload: bytes) -> str:
    """What a server says about an error, in one short line."""
    try:
        whole = json.loads(payload)
        error = whole.get("error", whole.get("detail", whole)) if isinstance(whole, dict) else whole
        text = error.get("message", error) if isinstance(error, dict) else error
    except ValueError:
        text = payload.decode(errors="replace")
    return " ".join(str(text).split())[:200] or "no message"


def _seconds(retry_after: str | None) -> float | None:
    try:
        return max(0.0, float(retry_after)) if retry_after else None
    except ValueError:
        return None  # a date: the doubling waits serve as well


def _short(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:160]
