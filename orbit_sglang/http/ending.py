"""This module ends a server that is told to end, also while requests run for longer than anybody waits."""

import asyncio
import logging
import os
from collections.abc import Callable

from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)

DRAIN_S = 10.0
"""A SIGTERM gives running requests this long; SGLang looks every five seconds, before and after."""

_POLL_S = 0.5
_FORCE_VARIABLE = "SGL_FORCE_SHUTDOWN"


async def around_watchdog(original: Callable, tokenizer_manager: TokenizerManager) -> None:
    """Ends the wait for running requests after ``DRAIN_S``; runs around ``TokenizerManager.sigterm_watchdog``."""
    if not tokenizer_manager.server_args.enable_orbit_slots:
        await original(tokenizer_manager)
        return
    forcing = asyncio.create_task(_force_end(tokenizer_manager))
    try:
        await original(tokenizer_manager)
    finally:
        forcing.cancel()


async def _force_end(tokenizer_manager: TokenizerManager) -> None:
    while not tokenizer_manager.gracefully_exit:
        await asyncio.sleep(_POLL_S)
    await asyncio.sleep(DRAIN_S)
    logger.warning(
        "orbit: %d requests still run %.0f s after SIGTERM: ending", len(tokenizer_manager.rid_to_state), DRAIN_S
    )
    os.environ[_FORCE_VARIABLE] = "1"
