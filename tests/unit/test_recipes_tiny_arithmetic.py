import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.tiny_arithmetic.data import Problem, TaskConfig, forget_carries, split_problems, write_parquet
from recipes.tiny_arithmetic.pretrain import CONTEXT_TOKENS, PretrainConfig, greedy_accuracy, pretrain
from recipes.tiny_arithmetic.reward import compute_score
from recipes.tiny_arithmetic.tokenizer import CHARACTERS, build_tokenizer


def test_split_holds_out_problems_and_their_mirror_images():
    train, held_out = split_problems(TaskConfig())
    assert len(held_out) == 400
    operands = {frozenset(problem.question.rstrip("=").split("+")) for problem in train}
    assert not any(frozenset(problem.question.rstrip("=").split("+")) in operands for problem in held_out)
    assert all(eval(problem.question.rstrip("=")) == int(problem.answer) for problem in train + held_out)


def test_split_is_determined_by_its_seed():
    assert split_problems(TaskConfig(seed=3)) == split_problems(TaskConfig(seed=3))
    assert split_problems(TaskConfig(seed=3)) != split_problems(TaskConfig(seed=4))


@pytest.mark.parametrize("fields", [{"num_digits": 0}, {"num_digits": 4}, {"num_held_out": 0}, {"num_held_out": 8100}])
def test_task_out_of_range_is_refused(fields):
    with pytest.raises(ValueError, match=str(next(iter(fields.values())))):
        TaskConfig(**fields)


@pytest.mark.parametrize(
    ("question", "answer", "careless"),
    [("57+68=", "125", "115"), ("12+34=", "46", "46"), ("57+62=", "119", "119"), ("9+8=", "17", "17")],
)
def test_careless_sums_forget_carries_between_columns(question, answer, careless):
    assert forget_carries(Problem(question, answer)) == Problem(question, careless)


def test_parquet_is_as_verl_reads_it(tmp_path):
    problem, example = Problem("1+2=", "3"), Problem("2+2=", "4")
    write_parquet([problem], tmp_path / "a.parquet", split="train", examples=[example])
    row = pd.read_parquet(tmp_path / "a.parquet").iloc[0]
    assert list(row["prompt"]) == [
        {"role": "user", "content": "2+2="},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "1+2="},
    ]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "3"}
    assert row["extra_info"] == {"index": 0, "split": "train"}


def test_tokeniser_is_one_token_a_character_and_survives_saving(tmp_path):
    build_tokenizer(CONTEXT_TOKENS).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(CHARACTERS, add_special_tokens=False).input_ids
    assert len(set(ids)) == len(CHARACTERS) == len(ids)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == CHARACTERS
    assert tokenizer("é", add_special_tokens=False).input_ids == [tokenizer.unk_token_id]
    assert len(tokenizer) == 32


def test_chat_template_ends_an_assistant_turn_and_leaves_a_prompt_open():
    tokenizer = build_tokenizer(CONTEXT_TOKENS)
    user = {"role": "user", "content": "1+2="}
    prompt = tokenizer.apply_chat_template([user], add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template([user, {"role": "assistant", "content": "3"}], tokenize=False)
    assert prompt == "<bos>1+2="
    assert whole == "<bos>1+2=3<eos>"


@pytest.mark.parametrize(
    ("response", "score"), [("46", 1.0), (" 46\n", 1.0), ("47", 0.0), ("46 apples", 0.0), ("046", 0.0), ("", 0.0)]
)
def test_reward_is_for_the_bare_number_only(response, score):
    result = compute_score("tiny_arithmetic", response, "46", extra_info={"index": 0}, unknown=1)
    assert result == {"score": score, "acc": score}


def test_base_config_out_of_range_is_refused():
    with pytest.raises(ValueError, match="hidden_size 96"):
        PretrainConfig(hidden_size=96)
    with pytest.raises(ValueError, match=r"forgotten_carry_rate 1\.5"):
        PretrainConfig(forgotten_carry_rate=1.5)


def test_pretraining_learns_and_is_determined_by_its_seed(tmp_path):
    train, _ = split_problems(TaskConfig(num_digits=1, num_held_out=10))
    config = PretrainConfig(
        hidden_size=64, num_layers=1, num_right_steps=250, num_careless_steps=50, learning_rate=3e-3
    )
    pretrain(config, train, tmp_path / "a")
    pretrain(config, train, tmp_path / "b")
    a, b = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in "ab")
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
    assert a.dtype == torch.bfloat16
    assert a.config.eos_token_id == AutoTokenizer.from_pretrained(tmp_path / "a").eos_token_id
    assert greedy_accuracy(a.float(), AutoTokenizer.from_pretrained(tmp_path / "a"), train) > 0.15
