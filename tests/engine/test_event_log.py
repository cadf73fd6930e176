"""The event log of a real engine: whole without ``close``, free of prompt text, and it replays."""

import json
from pathlib import Path

from jaxpaged.cli import main
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from tests.kit.engines import add, check_rest, finish, fresh_engine, greedy
from tests.kit.tiny import write_tiny


def test_the_log_is_whole_as_soon_as_nothing_is_left_to_do(tmp_path: Path, capsys):
    """The ends of the last requests are in the file though no further step writes them; all pages are accounted for."""
    log = tmp_path / "log.jsonl"
    engine = fresh_engine(write_tiny(tmp_path), num_pages=12, event_log=str(log), preemption_mode="swap", swap_space=0.001)
    for round_ in range(2):
        add(engine, [5, 6, 7, 8, 9, 10], SamplingParams(n=3, seed=1, max_tokens=9, ignore_eos=True))
        add(engine, [5, 6, 7, 8, 9], BeamSearchParams(beam_width=2, max_tokens=6))
        add(engine, [11, 12], greedy(12))
        finish(engine)
        check_rest(engine)
        events = [json.loads(line) for line in log.read_text().splitlines()]
        ended = {event["request"] for event in events if event["kind"] == "finish"}
        assert len(ended) == 3 * (round_ + 1)
        assert main(["events", "check", str(log)]) == 0
        assert " 0 owned at the end" in capsys.readouterr().out
    leaver = add(engine, [5, 6, 7], greedy(8))
    engine.step()
    engine.abort_request(leaver)
    while engine.has_unfinished_requests():
        engine.step()
    assert main(["events", "check", str(log)]) == 0
    assert " 0 owned at the end" in capsys.readouterr().out
    engine.close()
