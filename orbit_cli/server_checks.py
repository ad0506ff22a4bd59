"""The checks of ``orbit doctor --server``: what a running server says of its slots. Imports neither verl nor SGLang."""

from typing import Any

import httpx

from orbit_cli.doctor import Check, State

TIMEOUT_S = 30.0
"""A status waits for the batch that is running."""

UNAUTHORIZED = 401


class _Unusable(Exception):
    """An answer after which there is nothing more to ask; its text is the finding."""


def server_checks(url: str, key: str | None) -> list[Check]:
    """Ask a server about its slots, version, requests and base; the last check has failed when it cannot say."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    checks: list[Check] = []
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S, trust_env=False) as server:
            checks += _status_checks(_answer(server, "/orbit/status").json())
            checks.append(_key_check(server))
            checks.append(_base_check(_answer(server, "/orbit/base").text))
    except _Unusable as problem:
        checks.append(Check("server", State.FAILED, str(problem)))
    except httpx.ConnectError as error:
        checks.append(Check("server", State.FAILED, f"cannot be reached: {error}; is it running, and is this its URL?"))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        # Not its text: httpx puts a header that it cannot send, and with it the key, into some of them.
        problem = f"does not answer as a server with slots does: {type(error).__name__}; is this its URL?"
        checks.append(Check("server", State.FAILED, problem))
    return checks


def _answer(server: httpx.Client, path: str) -> httpx.Response:
    response = server.get(path)
    if response.status_code == UNAUTHORIZED and "Authorization" in server.headers:
        raise _Unusable(f"refuses the key at {path}; pass the one of the server's --api-key")
    if response.status_code == UNAUTHORIZED:
        raise _Unusable("needs a key; pass the one of its --api-key as --api-key")
    if response.status_code == 404:
        raise _Unusable("answers, but has no slots; start it with --enable-orbit-slots")
    if not response.is_success:
        raise _Unusable(f"answers {path} with {response.status_code}: {response.text[:500]}")
    return response


def _status_checks(status: dict[str, Any]) -> list[Check]:
    staged = [slot for slot in status["slots"] if slot["state"] == "staged"]
    active = [slot for slot in status["slots"] if slot["state"] == "active"]
    pause_ms = status["last_activate_pause_ms"]
    requests = [f"{number} on version {version}" for version, number in status["requests"].items()]
    found = {
        "slots": ", ".join(f"{key} {value}" for key, value in status["adapter"].items()),
        "active version": _held(active) or "0, the base",
        "staged version": _held(staged) or "none",
        "requests in flight": ", ".join(requests) or "none",
        "last activation": "none yet" if pause_ms is None else f"held the scheduler for {pause_ms:.3g} ms",
    }
    if status["staging"] is not None:
        found["staged version"] += f"; {status['staging']} is being staged"
    return [Check(f"server, {subject}", State.OK, detail) for subject, detail in found.items()]


def _held(slots: list[dict[str, Any]]) -> str:
    return ", ".join(f"{slot['version']} ({slot['num_bytes']} bytes, digest {slot['digest'][:12]})" for slot in slots)


def _key_check(server: httpx.Client) -> Check:
    """Whether the key, or its absence, is accepted by the routes that change slots; asked without changing any."""
    has_key = "Authorization" in server.headers
    # The base has no payload: 404 from whoever may ask.
    if server.get("/orbit/adapter", params={"version": 0}).status_code != UNAUTHORIZED:
        return Check("server, key", State.OK, "accepted by every route" if has_key else "none needed")
    if not has_key:
        return Check("server, key", State.OK, "none given; the routes that change slots need one")
    keyless = server.build_request("GET", "/orbit/status")
    del keyless.headers["Authorization"]
    if server.send(keyless).is_success:
        return Check("server, key", State.FAILED, "refused by the routes that change slots; pass the server's")
    return Check("server, key", State.OK, "accepted; the routes that change slots need that of --admin-api-key")


def _base_check(text: str) -> Check:
    # Importing torch costs seconds.
    from orbit_kernels.checkpoint.manifest import BaseManifest

    manifest = BaseManifest.from_json(text)
    return Check("server, base", State.OK, f"{len(manifest.tensors)} tensors, digest {manifest.digest}")
