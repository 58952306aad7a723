"""The rewards of a run as plain data, from the configuration and from objects."""

import asyncio
import json
from dataclasses import replace

import pytest

from hrl.config.compose import compose_cli
from hrl.errors import ConfigError
from hrl.reward.function import BuiltIn, LibraryFunction, PickledFunction, RewardFunctionError, UserFile
from hrl.reward.library.answer import Answer, wrong_answer
from hrl.reward.pool import RewardPool, RewardRow
from hrl.reward.score import find_scorer
from hrl.reward.spec import RewardSpec, SeveralFunctions
from tests.reward.test_pool import SLOW


def verls(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


def test_a_spec_goes_to_another_process_and_back():
    spec = RewardSpec(UserFile("a.py", "f"), {"a": (1, [10**5000]), "key": "env:MY_KEY"})
    for source in (spec.source, BuiltIn(("a", "b")), PickledFunction.of(verls)):
        sent = json.loads(json.dumps(replace(spec, source=source).to_plain()))
        assert RewardSpec.from_plain(sent) == replace(spec, source=source)
    assert spec.env == {"key": "MY_KEY"}
    assert spec.resolve({"MY_KEY": "k"}).kwargs["key"] == "k"


def spec_of(*arguments, given=None, columns=(), data_sources=()):
    return RewardSpec.of_config(compose_cli(list(arguments)).reward, data_sources, given, columns)


def score_by(spec, response, answer="12", data_source="s", timeout_s=30, **columns):
    with RewardPool(spec, compose_cli([f"reward.timeout_s={timeout_s}"]).reward) as pool:
        return pool.submit(RewardRow(0, data_source, answer, {}, columns), response, "sample").result(60)


BRIEF = "def brief(response, *, words=5):\n    return float(len(response.split()) <= words)\n"


def test_one_path_leads_from_yaml_a_command_line_and_python_to_the_same_sum(tmp_path):
    file = tmp_path / "my.py"
    file.write_text(BRIEF)
    shell = spec_of(f'reward.functions=[numeric, {{path: "{file}:brief", weight: 0.2, kwargs: {{words: 3}}}}]')
    python = spec_of(given=["numeric", {"path": f"{file}:brief", "weight": 0.2, "words": 3}])
    pair = spec_of(given=[("numeric", 1.0), ({"path": f"{file}:brief", "kwargs": {"words": 3}}, 0.2)])
    assert shell == python == pair
    sent = RewardSpec.from_plain(json.loads(json.dumps(shell.to_plain())))
    assert sent == shell
    outcome = score_by(sent, "7 + 5 = 12")
    assert outcome.score == 1.0 and dict(outcome.parts) == {"numeric": 1.0, "pred": "12", "brief": 0.0, "acc": 1.0}
    assert score_by(sent, "It's 12").score == pytest.approx(1.2)


def test_names_and_objects_mix():
    spec = spec_of(given=["numeric", (lambda response, level: 0.5 * level, 2.0)], columns=("level",))
    outcome = score_by(spec, "12", level=3)
    assert outcome.score == 4.0 and dict(outcome.parts) == {"numeric": 1.0, "pred": "12", "lambda": 1.5, "acc": 1.0}


def test_a_single_function_of_weight_one_is_the_reward_itself_and_verls_key_is_such_an_entry(tmp_path):
    file = tmp_path / "my.py"
    file.write_text(BRIEF)
    verl = spec_of(f"custom_reward_function.path={file}", "custom_reward_function.name=brief")
    assert verl == spec_of(f'reward.functions=["{file}:brief"]') == RewardSpec(UserFile(str(file), "brief"))
    assert spec_of().source == spec_of("reward.functions=[data_source]").source == BuiltIn()
    half = spec_of("reward.functions=[{name: numeric, weight: 0.5}]")
    assert isinstance(half.source, SeveralFunctions)
    outcome = score_by(half, "12")
    assert outcome.score == 0.5 and dict(outcome.parts) == {"numeric": 1.0, "pred": "12", "acc": 1.0}


def test_the_earlier_weight_of_the_function_is_an_entry_of_the_list():
    model = ["reward.reward_model.enable=true", "reward.reward_model.model_path=m"]
    assert compose_cli(["reward.function_weight=0", *model]).reward.entries == ()
    (entry,) = compose_cli(["reward.function_weight=0.5"]).reward.entries
    assert (entry.name, entry.weight) == ("data_source", 0.5)
    (entry,) = compose_cli(["reward.function_weight=2", "custom_reward_function.path=a.py"]).reward.entries
    assert (entry.file_and_function, entry.weight) == (("a.py", "compute_score"), 2.0)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["reward.functions=[numerik]"], "names 'numerik'.* Did you mean numeric"),
        (["reward.functions=[numeric, numeric]"], "two functions called numeric.*label"),
        (["reward.functions=[numeric, {name: length, label: score}]"], "has a function called score.*Give it a label"),
        (["reward.functions=[numeric, 'my.py:acc']"], "function called acc .*counts right responses. Give it a label"),
        (["reward.functions=[{weight: 1}]"], "neither a name nor a path"),
        (["reward.functions=[{name: numeric, path: a.py}]"], "a name and a path"),
        (["reward.functions=[numeric]", "custom_reward_function.path=a.py"], "Add a.py:compute_score to the list"),
        (["reward.functions=[{name: numeric, weight: 0}]"], "no weight but 0 and there is no reward model"),
        (["reward.functions=[]"], "is empty and there is no reward model"),
    ],
)
def test_what_cannot_be_a_list_of_rewards_is_refused_before_anything_starts(arguments, message):
    with pytest.raises(ConfigError, match=message):
        compose_cli(arguments)


def test_a_key_that_is_written_out_is_refused_and_not_repeated():
    judge = "{name: judge, model: m, base_url: 'http://localhost/v1', api_key: sk-verysecret}"
    with pytest.raises(ConfigError, match="env:ITS_NAME") as refused:
        compose_cli([f"reward.functions=[{judge}]"])
    assert "sk-verysecret" not in str(refused.value)
    with pytest.raises(RewardFunctionError, match="env:ITS_NAME") as refused:
        spec_of(given=[({"name": "judge", "model": "m", "base_url": "http://l/v1", "api_key": "sk-verysecret"}, 1.0)])
    assert "sk-verysecret" not in str(refused.value)


@pytest.mark.parametrize("variable", ["MY_TOKEN=verysecret", "FEED=https://me:verysecret@feed/x"])
def test_a_secret_that_is_written_into_reward_env_is_refused_and_not_repeated(variable):
    with pytest.raises(ConfigError, match=r"reward.env has the value of \w+ written") as refused:
        compose_cli([f"reward.env=['{variable}']"])
    assert "verysecret" not in str(refused.value)
    assert compose_cli(["reward.env=[MY_TOKEN,'MODE=fast','MY_KEY=']"]).reward.env == [
        "MY_TOKEN",
        "MODE=fast",
        "MY_KEY=",
    ]


@pytest.mark.parametrize("given", [["numeric", verls], [verls], "numeric"])
def test_arguments_of_a_single_function_are_refused_beside_a_list(given):
    kwargs = "reward.custom_reward_function.reward_kwargs={words: 3}"
    with pytest.raises(RewardFunctionError, match=r"reward_kwargs has words, which is for a single .*partial\(f, key"):
        spec_of(kwargs, given=given)

    def alone(response, words):
        return float(len(response.split()) <= words)

    assert score_by(spec_of(kwargs, given=alone), "a b c").score == 1.0


def test_environment_variables_are_filled_in_for_each_function_apart():
    spec = spec_of(
        "reward.functions=[{path: a.py, api_key: env:ONE}, {name: regex, pattern: env:TWO}]",
    )
    assert spec.env == {"compute_score.api_key": "ONE", "regex.pattern": "TWO"}
    one, two = spec.resolve({"ONE": "1", "TWO": "2"}).source.summands
    assert one.spec.kwargs == {"api_key": "1"} and two.spec.source == LibraryFunction("regex", {"pattern": "2"})


def test_a_response_that_a_function_of_the_library_fails_on_loses_that_part_alone():
    spec = spec_of("reward.functions=[math_verify, {name: length, most: 3, weight: 0.5}]")
    outcome = score_by(spec, r"\boxed{10^{10^{10}}}")
    assert outcome.status == "unscorable" and outcome.score == 0.5
    assert outcome.parts["math_verify"] == 0.0 and "too complex" in outcome.parts["math_verify/unscorable"]


@pytest.mark.parametrize("beside", [None, "plain", "async", "programs"])
def test_a_response_breaks_a_scorer_in_the_same_way_whatever_stands_beside_it(beside):
    def plain(response):
        return 1.0

    async def waits(response):
        await asyncio.sleep(0)
        return 1.0

    given = ["data_source", *({"plain": [plain], "async": [waits]}.get(beside, []))]
    outcome = score_by(
        spec_of(given=given, data_sources=("math_verify", *(["apps"] if beside == "programs" else []))),
        r"\boxed{10^{10^{10}}}",
        data_source="math_verify",
    )
    assert (outcome.status, outcome.score) == ("unscorable", 0.0 if beside in (None, "programs") else 1.0)
    assert outcome.parts["pred"] is None and outcome.error is None


def test_a_deadline_beside_an_async_function_is_the_responses_fault_too():
    async def waits(response):
        return 1.0

    both = spec_of(given=["data_source", waits], data_sources=("math_verify",))
    outcome = score_by(both, SLOW, "x^2+z", data_source="math_verify", timeout_s=1.5)
    assert (outcome.status, outcome.score) == ("unscorable", 0.0)
    assert outcome.parts["pred"] is None and "was killed" in outcome.parts["unscorable"]


@pytest.mark.parametrize(
    "data_source, truth, response, answer",
    [
        ("numeric", "12", "The answer is 12.0", "12"),
        ("numeric", "12", "11 or 12", None),
        ("bundled/addition", "12", "7 + 5 = 11", "11"),
        ("openai/gsm8k", "1200", "#### 1,200", "1200"),
        ("gsm8k_flexible", "12", "so 1.5e1", "15"),
        ("lighteval/MATH", "12", r"\boxed{1/2}", r"\frac{1}{2}"),
        ("math_verify", "12", r"\boxed{13}", "13"),
        ("math_dapo", "12", "Answer: 13", "13"),
        ("numina_cn_k12", "12", r"\boxed{11}\boxed{12}", None),
        ("hiyouga/geometry3k", "12", r"\boxed{12}", "12"),
        ("multiple_choice", "B", "The answer is (c).", "C"),
        ("searchR1_nq", {"target": ["x"]}, "<answer>The Tower!</answer>", "tower"),
    ],
)
def test_every_built_in_function_says_what_it_read_as_the_answer_so_that_votes_can_be_counted(
    data_source, truth, response, answer
):
    said = Answer()(response, truth, data_source)
    assert said["pred"] == answer
    assert "pred" in wrong_answer(find_scorer(data_source))


@pytest.mark.parametrize(
    "entry, message",
    [
        ("{name: regex}", "reward function regex needs an argument more: pattern"),
        ("{name: regex, pattern: '('}", r"pattern '\(' is not a regular expression"),
        ("{name: regex, pattern: a, mots: 2}", "does not take mots. Did you mean most"),
        ("{name: language, language: xx}", "language 'xx' is not known; there are a"),
        ("{name: json_schema, schema: {type: 3}}", "schema is not a JSON Schema"),
        ("{name: length, least: many}", "can't be made with least"),
    ],
)
def test_arguments_are_checked_when_the_run_is(entry, message):
    with pytest.raises(RewardFunctionError, match=message):
        RewardPool(spec_of(f"reward.functions=[{entry}]"), compose_cli([]).reward).start()
