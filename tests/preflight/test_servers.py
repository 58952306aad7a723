"""`hrl check` asks engines that somebody else started before a run begins, and changes nothing there."""

from __future__ import annotations

from hrl import cli
from hrl.cluster.precision import fastest_dtype
from tests.preflight.small_run import CONFIG, small_run
from tests.workers.rollout.test_server_engine import Stub, html, running

NAMES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
FITS = {"config": {name: CONFIG[name] for name in NAMES}, "dtype": fastest_dtype("cpu"), "max_model_len": 4096}


def test_what_is_there_is_shown_and_what_does_not_fit_is_a_problem(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setenv("COLUMNS", "400")
    line = [*small_run(tmp_path), "actor_rollout_ref.rollout.name=server", "trainer.device=cpu"]
    urls = "actor_rollout_ref.rollout.server.urls"
    good, other, page = Stub(changed=FITS), Stub(changed=FITS | {"config": {"vocab_size": 7}}), Stub()
    page.instead["/v1/models"] = html
    with running(good, other, page):
        dead = "http://127.0.0.1:9"
        assert cli.main(["check", *line, f"{urls}=[{good.url},{dead}]"]) == 0
        said = capsys.readouterr().out
        assert f"{good.url}: model policy, {FITS['dtype']}, longest 4096 tokens" in said
        assert f"{dead}/health can't be reached" in said and "the run samples from the others" in said
        assert not any(call.startswith("hrl_") and call != "hrl_look" for call in good.calls)
        assert cli.main(["check", *line, f"{urls}=[{good.url},{other.url},{page.url}]"]) == 2
        problems = capsys.readouterr().err
        assert f"{urls} can't be used: {other.url} does not fit this run: its model m has vocab_size=7" in problems
        assert f"{urls} can't be used: {page.url}/v1/models answered with something that is no JSON" in problems
        assert cli.main(["check", *line, f"{urls}=[{dead}]"]) == 2
        assert f"{dead}/health can't be reached" in capsys.readouterr().err
        key = "actor_rollout_ref.rollout.server.api_key=env:NO_SUCH_KEY"
        assert cli.main(["check", *line, f"{urls}=[{good.url}]", key]) == 2
        assert "the environment variable NO_SUCH_KEY" in capsys.readouterr().err
