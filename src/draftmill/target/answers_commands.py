"""What `draftmill regenerate` and `draftmill synthesize` do with their options, and what they print.

Owns which options go together. Never reads the environment: the server's key is handed in.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftmill.errors import InputError
from draftmill.target.answers import Request, regenerate_from_servers, regenerate_locally
from draftmill.target.generate_sampling import Sampling


def regenerate_command(
    request_target: str,
    inputs: Sequence[str],
    output: str,
    sampling: Sampling,
    *,
    turns: str,
    endpoints: Sequence[str],
    model: str | None,
    api_key: str | None,
    concurrency: int | None,
    timeout_s: float | None,
    retries: int | None,
    device: str | None,
    dtype: str | None,
    batch_size: int | None,
    trust_remote_code: bool,
) -> int:
    """Answer prompts and print the summary; gives the exit code: 1 where some got no answer. Raises InputError."""
    if turns not in ("all", "last"):
        raise InputError(f"--turns must be all or last, got {turns}")
    request = Request(request_target, inputs, output, sampling, "all" if turns == "all" else "last")
    for_servers = {"--model": model, "--concurrency": concurrency, "--timeout-s": timeout_s, "--retries": retries}
    for_local = {"--device": device, "--dtype": dtype, "--batch-size": batch_size}
    for_local |= {"--trust-remote-code": trust_remote_code or None}
    stray = [name for name, value in (for_local if endpoints else for_servers).items() if value is not None]
    if stray:
        needs = "a local model, and --endpoint names a server" if endpoints else "servers, and no --endpoint is given"
        raise InputError(f"{', '.join(stray)} is for {needs}; leave one of them out")
    if endpoints:
        summary = regenerate_from_servers(
            request,
            endpoints,
            model=model,
            api_key=api_key,
            concurrency=64 if concurrency is None else concurrency,
            timeout_s=600.0 if timeout_s is None else timeout_s,
            retries=6 if retries is None else retries,
        )
    else:
        summary = regenerate_locally(
            request,
            device=device,
            dtype=dtype or "bfloat16",
            batch_size=batch_size,
            trust_remote_code=trust_remote_code,
        )
    print(*summary.lines(), sep="\n")
    return 1 if summary.failures else 0


def synthesize_command(
    target: str,
    num: int,
    output: str,
    sampling: Sampling,
    *,
    answer_temperature: float | None,
    exclude: Sequence[str],
    device: str | None,
    dtype: str,
    batch_size: int | None,
    trust_remote_code: bool,
) -> None:
    """Sample chats and print the summary. Raises InputError."""
    from draftmill.target.answers_synthetic import synthesize

    made = synthesize(
        target,
        num,
        output,
        sampling,
        answer_temperature=answer_temperature,
        exclude=exclude,
        device=device,
        dtype=dtype,
        batch_size=batch_size,
        trust_remote_code=trust_remote_code,
    )
    print(*made.lines(), sep="\n")
