"""The benchmarks' statistics, file format, table and picture on made-up times; small cases from end to end."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import cpu, gpu, plot
from benchmarks.case import (
    EFFICIENCY,
    FUSED_TP,
    MEASURES,
    SPEEDUP,
    TIME_RATIO,
    BenchCase,
    Contestant,
    Makers,
    Quartiles,
    Rival,
    Unavailable,
    checked_contestant,
    ratio_quartiles,
    slowest_rank_seconds,
)
from benchmarks.ranks import RankContext, RankFailure, Ranks
from benchmarks.results import (
    MeasuredMachine,
    Record,
    RivalComparison,
    make_records,
    merge_records,
    read_records,
    write_atomically,
)
from benchmarks.runner import CaseTimes, take_turns
from benchmarks.table import markdown
from fused_tp.cli.main import main as command

pytestmark = pytest.mark.full

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"

MACHINE = MeasuredMachine(cpu="a processor", isa="AVX2", cores=2)
RECORD = Record(
    case="op/fp32/M=16",
    contestant="rival",
    ms=Quartiles(2.0, 1.5, 2.5),
    rounds=9,
    calls=4,
    comparison=RivalComparison("time ratio", Quartiles(0.9, 0.85, 0.95), bar=0.97, aim=None),
    world_size=2,
    note="one_sided over shm",
    machine=MACHINE,
    versions={"torch": "2.13.0"},
    date="2026-01-01T00:00:00+00:00",
)


def test_statistics() -> None:
    # A machine that becomes three times slower halfway through: the medians' ratio would be 2/3 or worse.
    ours, rival = [1.0, 1.0, 3.0, 3.0, 3.0], [2.0, 2.0, 6.0, 6.0, 6.0]
    assert ratio_quartiles(ours, rival) == Quartiles(0.5, 0.5, 0.5)
    assert ratio_quartiles([1.0, 50.0, 1.0], [1.0, 1.0, 1.0]).median == 1.0  # one disturbed round does not move it
    assert Quartiles.from_values([4.0, 1.0, 3.0, 2.0]) == Quartiles(2.5, 1.75, 3.25)
    assert Quartiles.from_values([7.0]) == Quartiles(7.0, 7.0, 7.0)
    with pytest.raises(ValueError, match="at least one round"):
        Quartiles.from_values([])
    assert slowest_rank_seconds([[1.0, 5.0], [2.0, 4.0]]) == [2.0, 5.0]
    with pytest.raises(ValueError, match="shorter"):
        slowest_rank_seconds([[1.0, 5.0], [2.0]])
    for measure, expected, bar, met in ((TIME_RATIO, 0.25, 0.3, True), (SPEEDUP, 4.0, 5.0, False)):
        assert measure is MEASURES[measure.name]
        assert measure.compare([1.0, 2.0], [4.0, 8.0], 2).median == expected and measure.meets(expected, bar) is met
    assert EFFICIENCY.compare([1.0, 2.0], [4.0, 8.0], 2).median == 2.0


def test_who_starts_changes_from_round_to_round() -> None:
    order: list[str] = []

    def timed(name: str) -> float:
        order.append(name)
        return float(len(order))

    seconds = take_turns({name: lambda name=name: timed(name) for name in "abc"}, 3)
    assert "".join(order) == "abcbcacab"
    assert seconds == {"a": [1.0, 6.0, 8.0], "b": [2.0, 4.0, 9.0], "c": [3.0, 5.0, 7.0]}
    assert len(take_turns({"a": lambda: 1.0}, 25, lambda done: done < 5)["a"]) == 5


def test_records_and_their_file(tmp_path: Path) -> None:
    for record in (RECORD, replace(RECORD, comparison=None)):
        assert Record.from_json(record.to_json()) == record
    for change in ({"schema": 0}, {"case": None}, {"unknown": 1}, {"ms": 3.0}):
        fields = {key: value for key, value in (json.loads(RECORD.to_json()) | change).items() if value is not None}
        with pytest.raises(ValueError, match="not a benchmark record"):
            Record.from_json(json.dumps(fields))
    path = tmp_path / "deep" / "cpu.jsonl"
    elsewhere = replace(RECORD, machine=replace(MACHINE, cpu="another"))
    other_case, newer = replace(RECORD, case="op/fp32/M=1"), replace(RECORD, rounds=11)
    merge_records(path, [RECORD, elsewhere, other_case])
    # A case replaces its lines of the same machine, and no others.
    assert merge_records(path, [newer]) == read_records(path) == [elsewhere, other_case, newer]
    path.write_text(f"{RECORD.to_json()}\n\nnonsense\n")
    with pytest.raises(ValueError, match=r"cpu\.jsonl, line 3"):
        read_records(path)


def test_a_file_is_written_whole_beside_other_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, plain, folder = tmp_path / "file", tmp_path / "plain", tmp_path / "folder"
    replace_by = Path.replace

    def late(part: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace_by)
        write_atomically(path, "of another writer")  # it writes between our two steps
        return replace_by(part, target)

    monkeypatch.setattr(Path, "replace", late)
    write_atomically(path, "ours")
    assert path.read_text() == "ours"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode
    folder.mkdir()
    with pytest.raises(OSError):
        write_atomically(folder, "text")
    assert sorted(tmp_path.iterdir()) == [path, folder, plain]


def test_records_compare_with_ours_by_the_measure_of_the_case() -> None:
    case = BenchCase(
        "op/fp32/M=1", dict, {}, {"floor": Rival(TIME_RATIO, bar=1.1), "whole": Rival(EFFICIENCY)}, flops=1e9
    )

    def of_rank(ours: list[float]) -> CaseTimes:
        seconds = {FUSED_TP: ours, "floor": [1.0, 1.0], "whole": [4.0, 4.0], "unranked": [9.0, 9.0]}
        return CaseTimes(seconds, dict.fromkeys(seconds, 1), dict.fromkeys(seconds, ""), {})

    times = [of_rank([1.0, 2.0]), of_rank([2.0, 1.0])]
    ours, floor, whole, unranked = make_records(case, times, 2, MACHINE, {})
    assert ours.comparison is None
    assert ours.ms.median == 2000.0 and ours.note == ""
    assert floor.comparison == RivalComparison("time ratio", Quartiles(2.0, 2.0, 2.0), 1.1, None)
    assert whole.comparison is not None and whole.comparison.value.median == 1.0
    assert unranked.comparison is None
    without_ours = CaseTimes({"floor": [1.0]}, {"floor": 1}, {"floor": ""}, {FUSED_TP: "absent"})
    assert make_records(case, [without_ours], 1, MACHINE, {})[0].comparison is None


def test_table() -> None:
    missed = replace(
        RECORD, contestant="other", comparison=RivalComparison("speedup", Quartiles(1.2, 1.1, 1.3), 1.3, 1.6)
    )
    text = markdown(
        [replace(RECORD, contestant=FUSED_TP, comparison=None), RECORD, missed], ["fp8: no time left."], 7.5
    )
    assert text.count("op/fp32/M=16") == 1  # a case is named once
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert len({len(row) for row in rows}) == 1
    assert rows[2][3:6] == ["time ratio 0.900 [0.850, 0.950]", "<= 0.97", "yes"]
    assert rows[3][3:6] == ["speedup 1.200 [1.100, 1.300]", ">= 1.3, aim >= 1.6", "**no**"]
    assert "a processor, AVX2, 2 cores." in text and "torch 2.13.0." in text and "in 7.5 minutes" in text
    assert text.endswith("Not measured:\n\n- fp8: no time left.\n")


def test_picture_of_a_stored_file(tmp_path: Path) -> None:
    path = tmp_path / "cpu.jsonl"
    merge_records(path, [RECORD])
    assert plot.main([str(path)]) == 0
    assert (tmp_path / "cpu.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing to draw"):
        plot.plot([replace(RECORD, comparison=None)], tmp_path / "empty.png")
    cases = ["op/fp32/M=16", "op/fp32/M=1", "op/fp32/M=128", "sum/bf16/1 MiB", "sum/bf16/64 KiB"]
    figure = plot.draw_figure([replace(RECORD, case=case) for case in cases])
    labels = [[tick.get_text() for tick in axis.get_xticklabels()] for axis in figure.axes]
    assert labels == [["M=1", "M=16", "M=128"], ["64 KiB", "1 MiB"]]  # in any order of measurement


def test_the_picture_of_the_stored_results_is_readable() -> None:
    figure = plot.draw_figure(read_records(RESULTS / "cpu.jsonl"))
    figure.canvas.draw()
    width, height = figure.get_size_inches() * plot.DPI
    assert width <= 1600 and height <= 1400
    titles = [figure._suptitle, *(axis._left_title for axis in figure.axes)]
    boxes = [text.get_window_extent() for text in titles if text.get_text()]
    assert len(boxes) > 2 and not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    for axis in filter(lambda axis: axis.patches, figure.axes):  # every rival has a name, and every bar its figure
        assert len({patch.get_facecolor() for patch in axis.patches}) == len(axis.get_legend().get_texts())
        assert len(axis.texts) == len(axis.patches)


def test_case_names(capsys: pytest.CaptureFixture[str]) -> None:
    """Names include those of the stored results; cases of a family, whose ranks start once, are adjacent."""
    names = [case.name for case in cpu.cpu_cases()]
    assert len(set(names)) == len(names)
    assert {record.case for record in read_records(RESULTS / "cpu.jsonl")} <= set(names)
    families = [case.family for case in cpu.cpu_cases()]
    assert len(list(itertools.groupby(families))) == len(set(families))
    assert command(["bench", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == names
    assert cpu.from_command_line(["--list", "--case", "ring"]) == 0
    assert capsys.readouterr().out.splitlines() == [name for name in names if "ring" in name]


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (cpu.from_command_line, ["--case", "["]),
        (cpu.from_command_line, ["--case", "no such case"]),
        (cpu.from_command_line, ["--rounds", "0"]),
        (cpu.from_command_line, ["--scale", "0"]),
        (cpu.from_command_line, ["--ranks", "3"]),
        (gpu.from_command_line, ["--only", "("]),
        (gpu.from_command_line, ["--only", "nothing like it"]),
        (command, ["bench", "--out", f"{__file__}/new"]),
        (command, ["bench", "--table", "x"]),
        (command, ["bench", "--tune", "--case", "ring"]),
        (command, ["bench", "--tune", "--list"]),
        (command, ["bench", "--tune", "--scale", "2"]),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    main: Callable[[list[str]], int], arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(arguments)
    except SystemExit as refused:  # argparse exits
        status = int(refused.code or 0)
    assert status == 2
    assert arguments["bench" in arguments] in capsys.readouterr().err


# ---- end to end, in separate ranks, and ranks that fail ----


def small_case(context: RankContext, elements: int) -> Makers:
    ones = torch.ones(elements)

    def summed() -> torch.Tensor:
        total = ones.clone()
        dist.all_reduce(total)
        return total

    def late() -> None:
        time.sleep(0.003 * (1 + context.rank))  # the slowest rank takes 6 ms

    def absent() -> Contestant:
        if context.rank == 1:  # missing on one rank, so that no rank may run it
            raise Unavailable("Rank 1 lacks it.")
        return checked_contestant(summed, ones)

    def broken() -> Contestant:
        raise RuntimeError("no config fits\nsecond line")

    return {
        "broken": broken,
        FUSED_TP: lambda: checked_contestant(summed, ones * context.world_size, note="as noted"),
        "late": lambda: Contestant(late),
        "absent": absent,
        "wrong": lambda: checked_contestant(lambda: ones * (1 + context.rank), ones),
    }


def wrong_case(context: RankContext) -> Makers:
    return {FUSED_TP: lambda: checked_contestant(lambda: torch.zeros(3) + context.rank, torch.ones(3))}


def cores_of_rank(context: RankContext) -> list[int]:
    return sorted(os.sched_getaffinity(0))


def raise_on_one(context: RankContext) -> None:
    if context.rank == 1:
        raise LookupError("only here")
    context.meet()


def die_on_one(context: RankContext) -> None:
    if context.rank == 0:
        os._exit(7)
    context.meet()


def test_a_case_from_end_to_end() -> None:
    case = BenchCase("small/fp32", small_case, {"elements": 64}, {"late": Rival(TIME_RATIO, bar=1.0)})
    wrong = BenchCase("small/wrong", wrong_case, {})
    said: list[str] = []
    (ran, records), (failed, none) = cpu.run_cases([case, wrong], rounds=3, print_line=said.append)
    assert (ran, failed) == (case, wrong)
    ours, late = records
    assert (ours.contestant, late.contestant) == (FUSED_TP, "late")
    assert ours.note == "as noted"
    assert ours.rounds == late.rounds == 3
    assert late.ms.q1 >= 6.0
    assert late.comparison is not None
    assert late.comparison.value.median > 0
    assert none == []
    assert said[:2] == [
        "small/fp32: broken failed. RuntimeError: no config fits",
        "small/fp32: absent is left out: Rank 1 lacks it.",
    ]
    assert said[2].startswith("small/fp32: wrong failed. AssertionError: small/fp32: wrong computes a wrong result")
    assert len(said) == 4 and "small/wrong: fused_tp computes a wrong result: the result is off by up to 1" in said[3]


def test_ranks_are_pinned_and_a_failing_one_ends_all() -> None:
    usable = sorted(os.sched_getaffinity(0))
    with Ranks(2) as ranks:
        assert ranks.call(cores_of_rank, seconds=60) == [[usable[0]], [usable[1 % len(usable)]]]
        start = time.monotonic()
        with pytest.raises(RankFailure, match="only here"):
            ranks.call(raise_on_one, seconds=60)
        assert time.monotonic() - start < 30  # rank 0, in the barrier, is not waited for
    with Ranks(2) as ranks, pytest.raises(RankFailure, match="exit status 7"):
        ranks.call(die_on_one, seconds=60)
