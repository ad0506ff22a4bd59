"""This module reads the tokens of a training batch from verl's TransferQueue, with the version that sampled each.

Suffixes: T trained tokens of the batch, in row order; R tokens of one row's response.
"""

import dataclasses
from collections.abc import Sequence

import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.workers.utils.padding import response_from_nested

from orbit_kernels.contract.keys import VERSIONS_KEY
from orbit_kernels.contract.versions import version_of

UNKNOWN_VERSION = -1
"""This is the version of a token whose row mixes versions in a way that its spans do not tell (several turns)."""

TRAINING_PARTITION, VALIDATION_PARTITION = "train", "val"
"""These are verl's names in the TransferQueue for the samples of the training and of a validation."""

REWARD_FIELD = "rm_scores"


@dataclasses.dataclass(frozen=True)
class SampledTokens:
    """A `SampledTokens` has one entry for each token that the loss sees.

    Attributes:
        sampled_T: log-prob reported by the server.
        trained_T: log-prob computed by the trainer.
        versions_T: adapter version that sampled the token.
        version_of_row: for rows sampled by one version, row index in the batch -> version.
    """

    sampled_T: torch.Tensor
    trained_T: torch.Tensor
    versions_T: torch.Tensor
    version_of_row: dict[int, int]

    @classmethod
    def read(cls, batch: KVBatchMeta, trained_field: str = "old_log_probs") -> "SampledTokens":
        """Fetches a batch from the TransferQueue; padding rows are left out."""
        fields = ["rollout_log_probs", trained_field, "response_mask", "extra_fields"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        if trained_field == "log_probs":
            data[trained_field] = response_from_nested(data[trained_field], data["response_mask"])
        sampled, trained, versions, version_of_row = [], [], [], {}
        # Unbound once: indexing a nested tensor row by row costs time quadratic in the number of rows.
        columns = (data[field].unbind() for field in ("response_mask", "rollout_log_probs", trained_field))
        for row, (mask_R, sampled_R, trained_R, extra_fields) in enumerate(
            zip(*columns, data["extra_fields"], strict=True)
        ):
            if batch.tags[row].get("is_padding", False):
                continue
            mask_R = mask_R.bool()
            sampled.append(sampled_R[mask_R])
            trained.append(trained_R[mask_R])
            row_versions = token_versions(extra_fields, int(mask_R.sum()))
            versions.append(row_versions)
            if len(set(row_versions)) == 1 and row_versions[0] != UNKNOWN_VERSION:
                version_of_row[row] = row_versions[0]
        flat_versions = [version for row_versions in versions for version in row_versions]
        return cls(torch.cat(sampled), torch.cat(trained), torch.tensor(flat_versions), version_of_row)


def group_of(key: str) -> str:
    """Returns the prompt's key of a sample's."""
    return key.rsplit("_", 2)[0]


def read_rewards(keys: Sequence[str]) -> list[float | None]:
    """Returns the rewards of training samples by their keys; None for a sample without one."""
    if not keys:
        return []
    data = tq.kv_batch_get(keys=keys, partition_id=TRAINING_PARTITION, select_fields=["response_mask", REWARD_FIELD])
    if REWARD_FIELD in data:
        return [reward_R.sum().item() for reward_R in data[REWARD_FIELD].unbind()]
    # A batch has no field that one of its rows lacks.
    return [None] if len(keys) == 1 else [reward for key in keys for reward in read_rewards([key])]


def sampled_versions(batch: KVBatchMeta) -> set[int]:
    """Returns the adapter versions that sampled the tokens of a batch."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
    return {version for extra_fields in data["extra_fields"] for version, _, _ in extra_fields[VERSIONS_KEY]}


def token_versions(extra_fields: dict, num_tokens: int) -> list[int]:
    """Returns the version of each trained token of a sample.

    Args:
        extra_fields: the sample's, as ``OrbitHttpServer.generate`` fills them.
        num_tokens: trained tokens, at most as many as were generated (verl cuts a response to its limit).
    """
    spans = extra_fields[VERSIONS_KEY]
    versions = [version for version, _, count in spans for _ in range(count)]
    if len(versions) >= num_tokens:
        return versions[:num_tokens]
    oldest, newest = (version_of(extra_fields[f"{end}_global_steps"]) for end in ("min", "max"))
    return [oldest if oldest == newest else UNKNOWN_VERSION] * num_tokens
