"""Groups of training samples fail by their rewards: verl makes all of a group's advantages NaN with one that is."""

import logging
import math
from collections.abc import Callable

import transfer_queue as tq
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from orbit_verl.driver.samples import TRAINING_PARTITION, group_of, read_rewards

logger = logging.getLogger(__name__)


class RewardCheck:
    """A `RewardCheck` lets groups fail in which a reward is not a finite number; verl replaces them as all that failed.

    Args:
        buffer: verl's, of the training samples.
        step: what says which step it is, for messages.
    """

    def __init__(self, buffer: ReplayBuffer, step: Callable[[], int]):
        self._buffer = buffer
        self._step = step
        self._passed: set[str] = set()
        self._num_failed = 0

    def check_ended(self) -> None:
        """Reads the rewards of groups that have ended since the last call."""
        buffer = self._buffer
        ended = buffer.finished_keys[TRAINING_PARTITION] | buffer.failure_keys[TRAINING_PARTITION]
        self._passed &= ended
        new = ended - self._passed
        keys = [key for key in buffer.partitions[TRAINING_PARTITION] if group_of(key) in new]
        failed = {
            group_of(key): reward
            for key, reward in zip(keys, read_rewards(keys), strict=True)
            if reward is None or not math.isfinite(reward)
        }
        self._passed |= ended - failed.keys()
        for group, reward in failed.items():
            self._fail(group)
            logger.warning(
                "orbit: step %d: a reward is %s, must be a finite number: its group %s is left out and replaced; mend the "
                "reward function",
                self._step(),
                reward,
                group,
            )
        self._num_failed += len(failed)

    def take_count(self) -> int:
        """Returns how many groups failed since the last call."""
        count, self._num_failed = self._num_failed, 0
        return count

    def _fail(self, group: str) -> None:
        """Makes a group one that failed with no sample left, in the TransferQueue and for this poll."""
        samples = self._buffer.partitions[TRAINING_PARTITION]
        keys = [key for key in samples if group_of(key) == group]
        tq.kv_clear(keys=keys, partition_id=TRAINING_PARTITION)
        tq.kv_put(key=group, partition_id=TRAINING_PARTITION, tag={"status": "failure"})
        for key in keys:
            del samples[key]
        self._buffer.finished_keys[TRAINING_PARTITION].discard(group)
        self._buffer.failure_keys[TRAINING_PARTITION].add(group)
