"""Cases of the fan-out benchmark, and rows and figures of their outcomes; the runs are integration tests."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from benchmarks.fanout import messages
from benchmarks.fanout.__main__ import all_cases, parse, quick_cases
from benchmarks.fanout.cases import FanoutCase, FanoutOutcome, doubling
from benchmarks.fanout.messages import FanoutCommand, FanoutResponse
from benchmarks.fanout.node import module_of
from benchmarks.fanout.results import figures, limit_row, rows_of, warnings
from benchmarks.netlab import Traffic
from rfork.errors import SettingsError
from rfork.image.capture import capture
from rfork.image.memory import image_sha256

SIZE = 1000
UNIT_S = 2.0
GO = 50.0


def outcome(ends: Mapping[str, tuple[float, float]], sent: int = SIZE, busy: float = 0.5) -> FanoutOutcome:
    """Return a run whose targets began and ended these seconds after the start."""
    responses = {host: FanoutResponse(began=GO + began, ended=GO + end) for host, (began, end) in ends.items()}
    traffic = {"seed0": Traffic(sent, 10), **dict.fromkeys(ends, Traffic(SIZE // 2, SIZE))}
    return FanoutOutcome(GO, responses, traffic, busy, busy / 2)


def test_doubling_serves_in_waves_of_one_two_and_four() -> None:
    """In each wave every complete instance serves the one that is as far on as the wave is wide."""
    expected = {0: [1, 2, 4], 1: [3, 5], 2: [6], 3: [7], 4: [], 5: [], 6: [], 7: []}
    assert expected == doubling(7)


@pytest.mark.parametrize("targets", [1, 2, 6, 15, 20])
def test_doubling_serves_every_target_once(targets: int) -> None:
    """This is also true if the last wave is not full."""
    assert list(range(1, targets + 1)) == sorted(
        receiver for receivers in doubling(targets).values() for receiver in receivers
    )


def test_the_last_targets_are_late_and_the_middle_ones_slow() -> None:
    """The last targets are late, those in the middle are slow."""
    case = FanoutCase("rfork", 5, late=2, slow=1)
    assert ("t03", "t04") == case.late_hosts
    assert ("t02",) == case.slow_hosts


@pytest.mark.parametrize(
    ("case", "bound"),
    [
        (FanoutCase("rfork", 7), 1.0),
        (FanoutCase("rfork", 7, slow=1), 4.0),
        (FanoutCase("rfork", 1, seeds=2, seed_rate=0.5), 1.0),
        (FanoutCase("rfork", 1, seeds=2, seed_rate=0.25), 2.0),
    ],
)
def test_the_minimum_time_follows_the_slowest_links(case: FanoutCase, bound: float) -> None:
    """The slowest link is the target's own, or those of all its seeds together."""
    assert bound == case.min_time


def test_cases_have_unique_names() -> None:
    """Two cases with one name would be one contender."""
    cases = all_cases((1, 3, 7, 15))
    assert len(cases) == len({case.name for case in cases})


def test_all_cases_cover_every_mode_and_disturbance() -> None:
    """Three modes at every size, two seeds, late joiners, a slow link, and stripes."""
    expected = [
        "rfork 3", "rfork 7", "star 3", "star 7", "doubling 3", "doubling 7",
        "rfork 3, 2 seeds", "rfork 3, 1 late", "rfork 3, 1 slow",
        "rfork 1, 2 seeds at 0.5", "rfork 1, 4 seeds at 0.25",
    ]  # fmt: skip
    assert expected == [case.name for case in all_cases((3, 7))]


def test_figures_are_medians_in_units_of_one_transfer() -> None:
    """Medians of the rounds over S/B; the maximum that any host sent; the worst of the stripes."""
    runs = {
        FanoutCase("rfork", 3): [
            outcome({"t00": (0, end)}, sent) for end, sent in ((2.2, 1000), (3, 1020), (2.4, 990))
        ],
        FanoutCase("star", 3): [outcome({"t00": (0, 6)}, 3000)],
        FanoutCase("rfork", 2, late=1): [outcome({"t00": (0, 2), "t01": (0.5, 2.7)})],
        FanoutCase("rfork", 3, slow=1): [outcome({"t00": (0, 2.4), "t01": (0, 9), "t02": (0, 2.5)})],
        FanoutCase("rfork", 1, seeds=2, seed_rate=0.5): [outcome({"t00": (0, 2.2)}, 500)],
        FanoutCase("rfork", 1, seeds=2, seed_rate=0.25): [outcome({"t00": (0, 4.2)}, 500)],
    }  # fmt: skip
    expected = {
        "fanout_n3": 1.2,
        "fanout_star_n3": 3.0,
        "fanout_late": 1.35,
        "fanout_late_joiner": 1.1,
        "fanout_slow": 4.5,
        "fanout_slow_rest": 1.25,
        "stripe_2_vs_bound": 1.05,
        "fanout_max_egress": 1.0,
        "stripe_vs_bound": 1.1,
    }
    assert pytest.approx(expected) == figures(runs, SIZE, UNIT_S)


def test_a_row_has_efficiency_and_maximum_traffic() -> None:
    """They are multiples of S/B and S."""
    (row,) = rows_of(FanoutCase("rfork", 1), [outcome({"t00": (0, 2.5)}, sent=1100)], SIZE, UNIT_S)
    assert 1.25 == row["T in S/B"]
    assert 0.8 == row["eta"]
    assert 1.1 == row["sent"]
    assert 1.0 == row["received"]


@pytest.mark.parametrize(("busy", "lines"), [(0.89, 0), (0.95, 1)])
def test_busy_cpus_are_a_warning(busy: float, lines: int) -> None:
    """If the CPUs are busy, the run did not measure the links alone."""
    assert lines == len(warnings({FanoutCase("rfork", 1): [outcome({"t00": (0, 2)}, busy=busy)]}))


def test_the_quick_form_is_small() -> None:
    """It has a smaller image, few cases and one round, unless other options are passed."""
    options, links, cases = parse(["--quick", "--rate", "100"])
    assert 1 == options.rounds
    assert 64 << 20 == links.size
    assert 100e6 == links.rate
    assert quick_cases() == cases


def test_cases_can_be_selected_by_name() -> None:
    """The pattern is a regular expression."""
    _, _, cases = parse(["--targets", "3", "7", "--only", " 7$"])
    assert [FanoutCase("rfork", 7), FanoutCase("star", 7), FanoutCase("doubling", 7)] == cases


def test_a_pattern_that_selects_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Also one that is no regular expression; nothing is measured."""
    with pytest.raises(SettingsError, match="no case matches --only sixteen"):
        parse(["--only", "sixteen"])
    with pytest.raises(SystemExit):
        parse(["--only", "("])
    assert "'(' is not a regular expression" in capsys.readouterr().err


def test_the_help_lists_common_and_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    """Each option once."""
    with pytest.raises(SystemExit):
        parse(["--help"])
    shown = capsys.readouterr().out.partition("options:")[2]
    options = ("--quick", "--rounds", "--json", "--only", "--image-mib", "--rate", "--targets")
    assert [1] * len(options) == [shown.count(f"  {option} ") for option in options]


@pytest.mark.parametrize("size", [1, 4096, (9 << 20) + 5])
def test_a_module_has_the_requested_size(size: int) -> None:
    """The size is exact to the byte, so that the number of chunks is as intended."""
    assert size == capture(module_of(size, filled=False)).layout.image_bytes


def test_seeds_have_equal_bytes_and_targets_none() -> None:
    """Filled modules are equal, empty ones differ from them; all have the same layout."""
    one, two, empty = (capture(module_of(5 << 20, filled=filled)) for filled in (True, True, False))
    assert image_sha256(one) == image_sha256(two)
    assert one.layout == empty.layout
    assert image_sha256(one) != image_sha256(empty)


def test_messages_survive_encoding() -> None:
    """Commands and responses decode to the same values."""
    command, response = FanoutCommand("fork", "model"), FanoutResponse(ended=2.0, points=((1.0, 5), (2.0, 9)))
    assert command == messages.parse_command(messages.encode_line(command))
    assert response == messages.parse_response(messages.encode_line(response))


def test_the_physical_limit_has_a_row() -> None:
    """The row has S/B, and its value in seconds."""
    assert {"case": "limit: TCP, 2 s", "T in S/B": 1.0} == limit_row(FanoutCase("limit", 1), UNIT_S)
