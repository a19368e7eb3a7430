"""The benchmarks' statistics, file format, table and picture, on made-up times."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import cpu, plot, table
from benchmarks.case import OURS, Case, Rival
from benchmarks.race import Times
from benchmarks.ratios import EFFICIENCY, MEASURES, SPEEDUP, TIME_RATIO, Quartiles, paired, slowest
from benchmarks.records import Comparison, Machine, Record, merge, read, write
from benchmarks.suite import cpu_cases, records_of
from fused_tp.cli.main import main as command

pytestmark = pytest.mark.full

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"

RECORD = Record(
    case="op/fp32/M=16",
    contestant="rival",
    ms=Quartiles(2.0, 1.5, 2.5),
    rounds=9,
    calls=4,
    comparison=Comparison("time ratio", Quartiles(0.9, 0.85, 0.95), bar=0.97, aim=None),
    world_size=2,
    note="one_sided over shm",
    machine=Machine(cpu="a processor", isa="AVX2", cores=2),
    versions={"torch": "2.13.0"},
    date="2026-01-01T00:00:00+00:00",
)


def test_ratios_are_paired_by_round() -> None:
    # A machine that turns three times slower half way through: the medians' ratio would be 2/3 or worse.
    ours, rival = [1.0, 1.0, 3.0, 3.0, 3.0], [2.0, 2.0, 6.0, 6.0, 6.0]
    assert paired(ours, rival) == Quartiles(0.5, 0.5, 0.5)


def test_one_disturbed_round_does_not_move_the_median() -> None:
    assert paired([1.0, 50.0, 1.0], [1.0, 1.0, 1.0]).median == 1.0


def test_quartiles_interpolate_and_need_a_value() -> None:
    assert Quartiles.of([4.0, 1.0, 3.0, 2.0]) == Quartiles(2.5, 1.75, 3.25)
    assert Quartiles.of([7.0]) == Quartiles(7.0, 7.0, 7.0)
    with pytest.raises(ValueError, match="at least one round"):
        Quartiles.of([])


def test_a_round_takes_as_long_as_its_slowest_rank() -> None:
    assert slowest([[1.0, 5.0], [2.0, 4.0]]) == [2.0, 5.0]
    with pytest.raises(ValueError, match="shorter"):
        slowest([[1.0, 5.0], [2.0]])


@pytest.mark.parametrize(
    ("measure", "expected", "bar", "met"),
    [(TIME_RATIO, 0.25, 0.3, True), (SPEEDUP, 4.0, 5.0, False), (EFFICIENCY, 2.0, 1.9, True)],
)
def test_measures(measure: object, expected: float, bar: float, met: bool) -> None:
    assert measure in MEASURES.values()
    assert isinstance(measure, type(TIME_RATIO))
    value = measure.of([1.0, 2.0], [4.0, 8.0], 2).median
    assert value == expected
    assert measure.meets(value, bar) is met


def test_records_come_back_from_their_line() -> None:
    assert Record.from_json(RECORD.to_json()) == RECORD
    without = replace(RECORD, comparison=None)
    assert Record.from_json(without.to_json()) == without


@pytest.mark.parametrize("change", [{"schema": 0}, {"case": None}, {"unknown": 1}, {"ms": 3.0}])
def test_lines_that_are_no_records_are_refused(change: dict[str, object]) -> None:
    fields = {**json.loads(RECORD.to_json()), **change}
    fields = {key: value for key, value in fields.items() if value is not None}
    with pytest.raises(ValueError, match="not a benchmark record"):
        Record.from_json(json.dumps(fields))


def test_reading_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "cpu.jsonl"
    path.write_text(f"{RECORD.to_json()}\n\nnonsense\n")
    with pytest.raises(ValueError, match=r"cpu\.jsonl, line 3"):
        read(path)


def test_a_case_replaces_its_lines_of_the_same_machine_only(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "cpu.jsonl"
    elsewhere = replace(RECORD, machine=replace(RECORD.machine, cpu="another"))
    other_case = replace(RECORD, case="op/fp32/M=1")
    merge(path, [RECORD, elsewhere, other_case])
    newer = replace(RECORD, rounds=11)
    assert merge(path, [newer]) == [elsewhere, other_case, newer]
    assert read(path) == [elsewhere, other_case, newer]


def test_records_compare_with_ours_by_the_measure_of_the_case() -> None:
    case = Case("op/fp32/M=1", dict, {}, {"floor": Rival(TIME_RATIO, bar=1.1), "whole": Rival(EFFICIENCY)})

    def of_rank(ours: list[float]) -> Times:
        seconds = {OURS: ours, "floor": [1.0, 1.0], "whole": [4.0, 4.0], "unranked": [9.0, 9.0]}
        return Times(seconds, dict.fromkeys(seconds, 1), dict.fromkeys(seconds, ""), {})

    ours, floor, whole, unranked = records_of(case, [of_rank([1.0, 2.0]), of_rank([2.0, 1.0])], world_size=2)
    assert ours.comparison is None
    assert ours.ms.median == 2000.0
    assert floor.comparison == Comparison("time ratio", Quartiles(2.0, 2.0, 2.0), 1.1, None)
    assert whole.comparison is not None
    assert whole.comparison.value.median == 1.0
    assert unranked.comparison is None


def test_without_ours_there_is_nothing_to_compare() -> None:
    case = Case("op/fp32/M=1", dict, {}, {"floor": Rival(TIME_RATIO)})
    (floor,) = records_of(case, [Times({"floor": [1.0]}, {"floor": 1}, {"floor": ""}, {OURS: "absent"})], world_size=1)
    assert floor.comparison is None


def test_table_of_a_stored_file(tmp_path: Path) -> None:
    path = tmp_path / "cpu.jsonl"
    missed = replace(RECORD, contestant="other", comparison=Comparison("speedup", Quartiles(1.2, 1.1, 1.3), 1.3, 1.6))
    write(path, [replace(RECORD, contestant=OURS, comparison=None), RECORD, missed])
    text = table.render(read(path))
    assert text.count("op/fp32/M=16") == 1  # a case is named once
    assert "0.900 [0.850, 0.950] ok" in text
    assert "1.200 [1.100, 1.300] missed" in text
    assert "<= 0.97" in text
    assert ">= 1.6" in text
    assert "a processor, AVX2, 2 cores" in text


def test_picture_of_a_stored_file(tmp_path: Path) -> None:
    path = tmp_path / "cpu.jsonl"
    write(path, [RECORD])
    assert plot.main([str(path)]) == 0
    assert (tmp_path / "cpu.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing to draw"):
        plot.plot([replace(RECORD, comparison=None)], tmp_path / "empty.png")


def test_the_picture_of_all_that_was_measured_is_of_a_readable_size() -> None:
    figure = plot.drawn(read(RESULTS / "cpu.jsonl"))
    figure.canvas.draw()
    width, height = figure.get_size_inches() * plot.DPI
    assert width <= 1600 and height <= 1400
    titles = [axis._left_title for axis in figure.axes]
    boxes = [text.get_window_extent() for text in (figure._suptitle, *titles) if text.get_text()]
    assert len(boxes) > 2
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)
    for axis in figure.axes:  # every rival has a name, and every bar its figure
        if axis.patches:
            named = axis.get_legend().get_texts()
            assert len({patch.get_facecolor() for patch in axis.patches}) == len(named)
            assert len(axis.texts) == len(axis.patches)


def test_sizes_stand_in_order_whatever_was_measured_last() -> None:
    cases = ["op/fp32/M=16", "op/fp32/M=1", "op/fp32/M=128", "sum/bf16/1 MiB", "sum/bf16/64 KiB"]
    figure = plot.drawn([replace(RECORD, case=case) for case in cases])
    labels = [[tick.get_text() for tick in axis.get_xticklabels()] for axis in figure.axes]
    assert labels == [["M=1", "M=16", "M=128"], ["64 KiB", "1 MiB"]]


def test_case_names_are_unique_and_families_stand_together() -> None:
    names = [case.name for case in cpu_cases()]
    assert len(set(names)) == len(names)
    families = [case.family for case in cpu_cases()]
    assert len(list(itertools.groupby(families))) == len(set(families))  # ranks start once for each


@pytest.mark.parametrize(
    "arguments", [["--case", "["], ["--case", "no such case"], ["--rounds", "0"], ["--scale", "0"], ["--ranks", "3"]]
)
def test_arguments_that_do_not_fit_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = cpu.from_command_line(arguments)
    except SystemExit as refused:  # as argparse does it
        status = int(refused.code or 0)
    assert status == 2
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--table", "x"], ["--tune", "--case", "ring"], ["--tune", "--list"], ["--tune", "--scale", "2"]]
)
def test_the_command_refuses_options_that_do_not_go_together(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["bench", *arguments]) == 2
    assert "--tune" in capsys.readouterr().err


def test_the_command_lists_the_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["bench", "--list"]) == 0
    assert "matmul_all_reduce/bf16/M=1" in capsys.readouterr().out.splitlines()


def test_list_names_the_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert cpu.from_command_line(["--list", "--case", "ring"]) == 0
    assert "ring_attention/bf16/forward" in capsys.readouterr().out.splitlines()
