"""This module names the methods of verl and SGLang that are replaced on instances while a run goes on."""

from orbit_kernels.upstream.ledger import Method

_BUFFER = "verl.trainer.ppo.v1.replay_buffer.ReplayBuffer."

WAIT_FOR_NEXT_POLL = Method(_BUFFER + "_wait_for_next_poll", ("self", "partition_id", "last_debug_time"))
SYNC_METADATA = Method(_BUFFER + "_sync_metadata_from_transfer_queue", ("self",))
SAMPLE = Method(_BUFFER + "sample", ("self", "global_steps", "partition_id", "batch_size"))
GENERATE_REQUEST = Method(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request", ("self", "obj", "request")
)
