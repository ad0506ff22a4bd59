"""The seeds of a run's samples."""

from orbit_verl.rollout.agent_loop import Repeats, sample_seed

ONE, OTHER = [{"role": "user", "content": "1+1="}], [{"role": "user", "content": "1+2="}]


def test_equal_prompts_of_a_step_are_numbered_however_they_are_submitted():
    together, apart = Repeats(), Repeats()
    prompts = [ONE, OTHER, ONE, ONE, OTHER]
    assert together.number(3, prompts) == [0, 0, 1, 2, 1]
    assert [number for prompt in prompts for number in apart.number(3, [prompt])] == [0, 0, 1, 2, 1]
    assert together.number(4, [ONE]) == [0]


def test_every_sample_has_a_seed_of_its_own_that_a_second_run_has_too():
    samples = [
        (run, step, prompt, repeat, session)
        for run in (0, 1)
        for step in (0, 1, 11)
        for prompt in (ONE, OTHER)
        for repeat in (0, 1)
        for session in (0, 1, 10)
    ]
    seeds = [sample_seed(*sample) for sample in samples]
    assert len(set(seeds)) == len(seeds) and seeds == [sample_seed(*sample) for sample in samples]
    assert all(0 <= seed < 2**31 for seed in seeds)
