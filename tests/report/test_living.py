"""What a page that follows a run is told of its folder."""

import json
import os

import pytest

from moretta.engines.journal import CHUNK, GrowingFile, Rewritten
from moretta.engines.run_folder import RunFolder
from moretta.errors import ParameterError, RunFailed
from moretta.report import living
from moretta.report.living import Follower, Status, check_run_folder, round_of

HERE = Status(has_command=True)


def line(number, **more):
    told = {"round": number, "attempt": 0, "loss": 1 / number, "seconds": {"update": 0.5}, "seconds_total": 2.0}
    return told | {"bytes": {"up": 10.0, "down": 20.0}, "dropped": []} | more


def result(rounds, **more):
    told = {"format": 1, "name": "mine", "rounds": rounds, "test": {"loss": 0.1, "accuracy": 0.9, "metrics": {}}}
    return told | {"warnings": ["two partners"], "facts": {"epsilon": 1.5, "delta": 1e-5, "step": 3.0}} | more


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.begin('[run]\nname = "mine"\nrounds = 5\n\n[protocol]\nname = "a protocol"\n')
    return folder


def kinds(events):
    return [event.kind for event in events]


def of(events, kind):
    return [event.data for event in events if event.kind == kind]


def rounds(events):
    return [one["round"] for data in of(events, "rounds") for one in data["rounds"]]


def state(folder, said=HERE):
    found = living.state_of(folder.path, said)
    return found["state"], found["sentence"]


def test_news_come_in_order_and_once(run):
    follower = Follower(run.path)
    first = list(follower.news(HERE))
    assert kinds(first) == ["begin", "plan", "result", "state"]
    (plan,) = of(first, "plan")
    assert (plan["name"], plan["rounds"], plan["protocol"], plan["insecure"]) == ("mine", 5, "a protocol", False)
    assert of(first, "state")[0]["state"] == "waiting"
    run.append(line(1))
    run.append(line(2))
    second = list(follower.news(HERE))
    assert kinds(second) == ["rounds", "state"]
    assert rounds(second) == [1, 2]
    assert list(follower.news(HERE)) == []
    with run.logging():
        run.append(line(3, dropped=[{"round": 3, "silo": "north", "reason": "late"}]))
        assert [one["missing"] for one in of(list(follower.news(HERE)), "rounds")[0]["rounds"]] == [
            [{"round": 3, "silo": "north", "reason": "late"}]
        ]
    run.write_json("result.json", result(3))
    last = list(follower.news(HERE))
    assert kinds(last) == ["result", "state"]
    assert of(last, "result")[0]["facts"] == {"epsilon": 1.5, "delta": 1e-5}
    assert of(last, "state")[0]["state"] == "ended"


def test_whoever_names_the_last_event_goes_on_after_it(run):
    for number in range(1, 4):
        run.append(line(number))
    first = list(Follower(run.path).news(HERE))
    run.append(line(4))
    again = list(Follower(run.path, first[-1].id).news(HERE))
    assert "begin" not in kinds(again)
    assert rounds(again) == [4]
    assert {"plan", "result", "state"} <= set(kinds(again))  # each is whole, and may come twice


@pytest.mark.parametrize("after", ["", "x", "3-0123456789abcdef_0-0123456789abcdef", "9" * 40, "_", "1-2_3", "0_0"])
def test_an_id_of_nothing_begins_anew(run, after):
    run.append(line(1))
    follower = Follower(run.path, after)
    found = [*follower.news(HERE), *follower.news(HERE)]
    assert [kind for kind in kinds(found) if kind != "plan"][:2] == ["begin", "rounds"]
    assert rounds(found) == [1]


def test_a_resumed_run_is_read_anew_and_an_older_id_with_it(run):
    for number in range(1, 5):
        run.append(line(number))
    follower = Follower(run.path)
    before = list(follower.news(HERE))[-1].id
    run.history(up_to=2)
    run.append(line(3, loss=0.25))
    run.append(line(4, loss=0.125))
    for one in (follower, Follower(run.path, before)):
        found = [*one.news(HERE), *one.news(HERE)]
        assert [kind for kind in kinds(found) if kind != "plan"][:2] == ["begin", "rounds"]
        assert rounds(found) == [1, 2, 3, 4]
        assert of(found, "rounds")[0]["rounds"][-1]["figures"] == {"loss": 0.125}


def test_what_was_kept_of_a_resumed_run_is_not_told_again(run):
    run.append(line(1))
    follower = Follower(run.path)
    list(follower.news(HERE))
    run.append(line(2))
    run.history(up_to=1)
    run.append(line(2, loss=0.75))
    found = list(follower.news(HERE))
    assert kinds(found) == ["rounds", "state"][: len(found)]
    assert rounds(found) == [2]


def test_a_half_written_line_waits_for_its_end(run):
    history, follower = run.path / "history.jsonl", Follower(run.path)
    list(follower.news(HERE))
    text = json.dumps(line(1)).encode()
    history.write_bytes(text[:40])
    assert rounds(follower.news(HERE)) == []
    with history.open("ab") as stream:
        stream.write(text[40:] + b"\n")
    assert rounds(follower.news(HERE)) == [1]


@pytest.mark.parametrize(
    "text",
    [
        *(b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"round": "1"}', b'{"round": true}', b'{"round": -1}'),
        *(b'{"round": 1.5}', b'{"loss": 1}', b'{"round": ' + b"9" * 5000 + b"}"),
    ],
)
def test_a_malformed_line_is_counted_and_passed_over(run, text):
    run.append(line(1))
    with (run.path / "history.jsonl").open("ab") as stream:
        stream.write(text + b"\n")
    run.append(line(2))
    found = list(Follower(run.path).news(HERE))
    assert rounds(found) == [1, 2]
    assert sum(data["malformed"] for data in of(found, "rounds")) == 1
    assert state(run)[0] == "running"


def test_odd_values_are_left_out():
    told = round_of(
        b'{"round": 1, "loss": NaN, "test_loss": 1e999, "test_top5": 1'
        + b"0" * 400
        + b', "test_mse": "x", "test_accuracy": 0.5, "secret": 7,'
        b' "bytes": [], "seconds": {"update": null, "delivery": 1}, "dropped":'
        b' [3, {"silo": "n"}, {"round": 1, "silo": ["<b>"]}]}'
    )
    assert told is not None
    assert told["figures"] == {"test_accuracy": 0.5}
    assert told["no_numbers"] == []
    assert told["seconds"] == {"delivery": 1}
    assert told["bytes"] == {}
    assert told["missing"] == [{"round": 1, "silo": "['<b>']", "reason": ""}]
    json.dumps(told, allow_nan=False)


def test_what_is_infinite_or_no_number_is_told_as_that(run):
    run.append(line(1, loss=float("nan"), epsilon=float("inf")))
    run.write_json("result.json", result(1, facts={"epsilon": float("inf")}))
    found = list(Follower(run.path).news(HERE))
    (told,) = of(found, "rounds")[0]["rounds"]
    assert (told["figures"], told["no_numbers"]) == ({}, ["loss", "epsilon"])
    assert of(found, "result")[0]["unbounded"] is True
    run.write_json("result.json", result(1, facts={"epsilon": "unbounded"}))  # as the accountant has it
    assert living.result_of(run.path)["unbounded"] is True
    spent = living.round_of(json.dumps(line(1, epsilon="unbounded")).encode())
    assert spent is not None
    assert spent["no_numbers"] == ["epsilon"]
    run.write_json("result.json", result(1))
    assert living.result_of(run.path)["unbounded"] is False


def test_a_line_without_an_end_is_skipped_and_a_long_file_comes_in_parts(tmp_path):
    path = tmp_path / "log.txt"
    path.write_bytes(b"a\n" + b"x" * (2 * CHUNK) + b"\nb\n")
    file = GrowingFile(path)
    parts = list(file.read())
    assert (parts[0], parts[-1][-1]) == ([b"a"], b"b")
    assert max(len(part) for some in parts for part in some) == CHUNK
    assert list(file.read()) == []
    path.write_bytes(b"b\n")
    with pytest.raises(Rewritten):
        list(file.read())
    file.restart()
    assert list(file.read()) == [[b"b"]]
    path.unlink()
    with pytest.raises(Rewritten):
        list(file.read())


def test_of_the_log_warnings_are_told_and_no_more_than_a_page_can_take(run):
    lines = [f"2026-01-01 00:00:00,000 WARNING w{number} {'x' * 900}" for number in range(living.MOST_LINES + 7)]
    text = "\n".join(["2026-01-01 00:00:00,000 INFO nothing", "Traceback (most recent call last):", *lines])
    (run.path / "log.txt").write_text(text + "\n")
    (told,) = of(list(Follower(run.path).news(HERE)), "log")
    assert told["more"] == 7
    assert len(told["lines"]) == living.MOST_LINES
    assert told["lines"][0]["text"].startswith("w7 ")
    assert max(len(one["text"]) for one in told["lines"]) == living.LONGEST


def test_a_run_that_failed_says_why_until_it_goes_on(run):
    run.append(line(1))
    with pytest.raises(RunFailed), run.logging():
        raise RunFailed("round 2 cannot be completed\nby 1 of 3 silos")
    assert state(run) == ("failed", "round 2 cannot be completed by 1 of 3 silos")
    with run.logging():
        assert state(run) == ("running", "")
    with pytest.raises(KeyboardInterrupt), run.logging():
        raise KeyboardInterrupt
    assert state(run)[1].startswith("it was interrupted; --resume")
    with pytest.raises(ValueError, match="secret"), run.logging():
        raise ValueError("a secret number, 17")
    assert state(run) == ("failed", "ValueError")
    with pytest.raises(RunFailed, match="No space left on device; make room"), run.logging():
        raise OSError(28, "No space left on device", "x")
    assert state(run) == ("failed", "No space left on device")
    with pytest.raises(PermissionError), run.logging():
        raise PermissionError(13, "Permission denied", "x")
    assert state(run) == ("failed", "Permission denied")


def test_the_command_says_what_a_folder_cannot(tmp_path):
    nowhere = RunFolder(tmp_path / "nowhere")
    assert state(nowhere, Status(note="waiting for north", has_command=True)) == ("waiting", "waiting for north")
    assert state(nowhere, Status(failed="no such key", has_command=True)) == ("failed", "no such key")
    assert kinds(Follower(nowhere.path).news(HERE)) == ["begin", "plan", "result", "state"]


def test_a_round_that_many_silos_missed_counts(run):
    """A run of which hundreds of silos missed each round was "waiting" for ever, also when it had ended."""
    missing = [{"round": 2, "silo": f"silo-{number}", "reason": "disconnected: " + "x" * 100} for number in range(900)]
    run.append(line(1))
    run.append(line(2, dropped=missing))
    assert state(run) == ("running", "")
    run.write_json("result.json", result(2))
    assert state(run) == ("ended", "")


def test_a_result_from_before_a_resumption_does_not_end_the_run(run):
    for number in range(1, 4):
        run.append(line(number))
    run.write_json("result.json", result(3))
    assert state(run) == ("ended", "")
    run.history(up_to=1)
    assert state(run) == ("running", "")


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", '{"format": 1}', '{"format": 1, "rounds": "x", "test": 3}'),
        '{"format": 1, "rounds": "x", "dropped": [{"round": 1}]}',
        '{"format": 1, "rounds": 1%s}' % ("0" * 400),  # beyond any float
    ],
)
def test_a_damaged_result_is_none(run, content):
    run.append(line(1))
    (run.path / "result.json").write_text(content)
    assert state(run) == ("running", "")
    assert "state" in kinds(Follower(run.path).news(HERE))


def test_a_damaged_run_file_is_no_plan(run):
    (run.path / "run.toml").write_text("[run\n")
    assert living.plan_of(run.path)["rounds"] is None
    (run.path / "run.toml").write_text("run = 3\nprotocol = []\n")
    assert living.plan_of(run.path)["name"] == "run"


def test_a_folder_that_is_none_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(ParameterError, match="there is no such directory"):
        check_run_folder(tmp_path / "none")
    with pytest.raises(ParameterError, match=r"it has no run\.toml, history\.jsonl or result\.json"):
        check_run_folder(tmp_path)
    (tmp_path / "result.json").write_text('{"format": 7}')
    with pytest.raises(ParameterError, match="is of format 7, and this version reads 1"):
        check_run_folder(tmp_path)


def test_nothing_is_read_but_four_files(run, monkeypatch):
    """Checkpoints, models and views hold secrets: whoever follows a run never opens them."""
    for name in ("model.safetensors", "rows.json", "checkpoint", "views", "audit.json"):
        os.mkfifo(run.path / name)  # whoever opens it waits for ever
    run.append(line(1))
    assert rounds(Follower(run.path).news(HERE)) == [1]
