from __future__ import annotations

import contextlib
import sys
import time
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from analysis.cli import bench
from analysis.cli.main import main
from analysis.experiments.ablations.stamp import current_stamp
from analysis.experiments.benchmark import contenders, language, measure, recorded
from analysis.experiments.benchmark import device as device_benchmark
from analysis.experiments.benchmark.contenders import Contender, Crew
from analysis.experiments.benchmark.counting import generated_tokens, member_update
from analysis.experiments.benchmark.journal import Journal
from analysis.experiments.benchmark.machine import measure_rates
from analysis.experiments.benchmark.measure import Benchmark, BenchmarkConfig
from analysis.experiments.benchmark.plain import PlainTrainer
from analysis.experiments.benchmark.worker import phase_shares, population
from analysis.experiments.language_models.presets import SHORT
from analysis.training.config import StartConfig, TrainConfig
from analysis.training.policy import PolicyConfig
from analysis.training.rollout import completion_inputs
from analysis.training.start import make_policy
from analysis.training.tasks import SortTask

TABLE = pd.DataFrame({"ms": [1.0]})


def tiny() -> TrainConfig:
    return TrainConfig(
        task=SortTask(num_digits=3, end_token=True, reward="graded"),
        policy=PolicyConfig(width=12, num_layers=2, num_heads=3),
        start=StartConfig(updates=0),
        num_prompts=2,
        group_size=3,
        learning_rate=1e-2,
    )


def timings(seconds: dict[str, list[float]]) -> Benchmark:
    rounds = [
        {
            "round": number,
            "width": 64,
            "contender": name,
            "kind": "trl" if name.startswith("TRL") else "population",
            "members": 12 if "2 processes" in name else 24,
            "processes": 2 if "2 processes" in name else 1,
            "threads": 1,
            "seconds": value,
        }
        for name, values in seconds.items()
        for number, value in enumerate(values)
    ]
    machine = [
        {
            "round": number,
            "width": 64,
            "processes": processes,
            "flops_per_second": 1e11 * processes,
            "bytes_per_second": 1e10,
        }
        for processes in (1, 2)
        for number in range(3)
    ]
    phases = pd.DataFrame({"width": [64], "members": [24], "phase": ["rollout"], "share": [1.0]})
    tables = (pd.DataFrame(rounds), pd.DataFrame(machine), phases)
    return Benchmark(BenchmarkConfig(), *tables, current_stamp(contenders.LARGEST))


@pytest.fixture
def three_rounds() -> Benchmark:
    return timings(
        {
            "population of 24": [0.010, 0.020, 0.012],
            measure.ENGINE: [0.005, 0.010, 0.006],
            "TRL": [0.050, 0.120, 0.054],
        }
    )


def test_the_plain_model_is_the_policy_of_the_population():
    config = tiny()
    trainer, policy = PlainTrainer(config, seed=0), make_policy(config)
    model = trainer.model
    weights = {
        "token_embedding": model.tokens.weight,
        "position_embedding": model.positions.weight,
        "head": model.head.weight.T,
    }
    for layer, block in enumerate(model.blocks):
        for name in ("attention_in", "attention_out", "mlp_in", "mlp_out"):
            weights[f"block{layer}.{name}"] = getattr(block, name).weight.T
    assert sum(part.numel() for part in weights.values()) == policy.num_parameters
    stacked = {name: part.detach().unsqueeze(0) for name, part in weights.items()}
    prompts = torch.randint(10, (1, 2, 3))
    inputs = completion_inputs(torch.randint(10, (1, 2, 3, 4)), config.task.opening)
    together = policy.logits(stacked, prompts, inputs)
    rows = torch.cat([prompts[0].repeat_interleave(3, dim=0), inputs[0].flatten(0, 1)], dim=1)
    alone = model(rows)[0][:, 3:].view(together.shape)
    assert torch.allclose(together, alone, rtol=0, atol=1e-5)


def test_the_plain_trainer_samples_with_its_cache_and_learns():
    trainer = PlainTrainer(tiny(), seed=0)
    prompts = torch.randint(10, (4, 3))
    completions, kept = trainer.sample(prompts)
    full = trainer.logp(trainer.model, prompts, completions)
    assert torch.allclose(kept, full, rtol=0, atol=1e-5)
    before = trainer.model.head.weight.clone()
    for _ in range(10):  # a group of equal rewards has no gradient
        trainer.update()
    assert (trainer.model.head.weight - before).abs().max() > 1e-4


def test_the_arithmetic_is_that_of_the_products_counted_one_by_one():
    config = tiny()
    length, steps, groups, width, inner, vocab_size = 3, 4, 3, 12, 24, 16
    flops = 0
    for row in [*range(length), *(length + t for t in range(steps) for _ in range(groups))]:
        flops += 2 * 2 * (width * 3 * width + width * width + 2 * width * inner)
        flops += 2 * 2 * 2 * width * (row + 1)  # two layers, scores and mixture
        flops += 2 * width * vocab_size * (row >= length)
    assert member_update(config).flops == 4 * 2 * flops  # passes, prompts
    assert generated_tokens(config) == 2 * 3 * 4


def test_rates_are_positive():
    rates = measure_rates(seconds=0.002)
    assert rates.flops_per_second > 1e8
    assert rates.bytes_per_second > 1e7


def test_every_phase_of_an_update_is_timed():
    trainer = population(Contender(kind="population", width=32, members=2))
    while trainer.done % trainer.config.log_every:
        trainer.advance()
    shares = phase_shares(trainer, 2)  # the first of them measures the policy
    assert set(shares) == {
        *("rollout", "reference", "forward", "backward", "optimizer", "metrics", "other")
    }
    # A function that is renamed would leave its phase at zero and its time in "other".
    assert all(share > 0 for share in shares.values())
    assert shares["other"] < 0.5


def test_a_crew_trains_when_told_to():
    crew = Crew(Contender(kind="population", width=32, members=2, processes=2, updates=1))
    try:
        crew.wait_until_ready()
        turn = crew.turn()
    finally:
        crew.end()
    assert len(turn.said) == 2
    assert turn.seconds * 4 >= max(said["seconds"] for said in turn.said)


@pytest.fixture
def said(monkeypatch):
    """Let every process of a crew be this Python code instead."""

    def be(code: str) -> Crew:
        monkeypatch.setattr(contenders, "command", lambda contender: [sys.executable, "-c", code])
        return Crew(Contender(kind="plain", width=32))

    return be


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit('no such model')", "plain ended: no such model"),
        ("pass", "plain ended: it said nothing"),
        ("print('hello')", "plain should be ready and says 'hello'"),
    ],
)
def test_a_process_that_does_not_start_says_why(said, code, message):
    crew = said(code)
    try:
        with pytest.raises(ValueError, match=f"^{message}$"):
            crew.wait_until_ready()
    finally:
        crew.end()


@pytest.mark.parametrize("when", ["input()", "pass"])
def test_a_process_that_ends_in_its_turn_says_why(said, when):
    crew = said(f"print('ready', flush=True); {when}; raise SystemExit('out of memory')")
    try:
        crew.wait_until_ready()
        time.sleep(0.0 if when == "input()" else 0.2)
        with pytest.raises(ValueError, match=r"^plain ended: out of memory$"):
            crew.turn()
    finally:
        crew.end()


def test_a_talkative_process_is_not_held_up(said):
    crew = said(
        "import sys; print('ready', flush=True); input()\n"
        "sys.stderr.write('a warning\\n' * 100_000); print('{\"seconds\": 1}', flush=True)"
    )
    try:
        crew.wait_until_ready()
        assert crew.turn().said == [{"seconds": 1}]
    finally:
        crew.end()


def test_a_python_without_trl_is_left_out_and_one_that_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(contenders.sys, "executable", str(tmp_path / "no_trl"))
    (tmp_path / "no_trl").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "no_trl").chmod(0o755)
    assert contenders.trl_version() is None
    monkeypatch.setenv(contenders.TRL_PYTHON, str(tmp_path / "python"))
    with pytest.raises(ValueError, match=r"KL_TERM_TRL_PYTHON=.* does not run"):
        contenders.trl_version()


def test_ratios_are_taken_within_a_round(three_rounds):
    table = measure.ratios(three_rounds).set_index("contender")
    assert table.loc["population of 24", "ratio"] == pytest.approx(2.0)
    assert table.loc["population of 24", ["low", "high"]].tolist() == pytest.approx([2.0, 2.0])
    assert table.loc["TRL", "ratio"] == pytest.approx(10.0)
    assert measure.best(table.reset_index(), "trl", 64)["ratio"] == pytest.approx(10.0)
    with pytest.raises(ValueError, match="no contender of kind 'plain'"):
        measure.best(table.reset_index(), "plain", 64)
    with pytest.raises(ValueError, match="was not timed"):
        measure.ratios(three_rounds, engine="population of 7")


def test_the_floor_is_the_arithmetic_at_the_measured_rate(three_rounds):
    table = measure.floors(three_rounds).set_index("processes")
    flops = member_update(contenders.LARGEST).flops
    assert table.loc[1, "flops_ms"] == pytest.approx(1e3 * flops / 1e11)
    assert table.loc[2, "flops_ms"] == pytest.approx(1e3 * flops / 2e11)
    assert table.loc[1, "ratio"] == pytest.approx(12.0 / table.loc[1, "flops_ms"])


def test_the_median_and_its_interval():
    low, middle, high = measure.median_interval(np.arange(101.0))
    assert middle == 50.0
    assert 30 < low < 48 and 52 < high < 70


def test_tokens_per_second_count_what_is_sampled(three_rounds):
    row = measure.best(measure.medians(three_rounds), "trl", 64)
    assert row["ms"] == pytest.approx(54.0)
    assert row["tokens"] == pytest.approx(12 * 6 * 9 / 0.054)


def test_a_recorded_benchmark_reads_back(three_rounds, tmp_path):
    recorded.save(three_rounds._replace(config=BenchmarkConfig(with_trl=False)), tmp_path / "bench")
    back = recorded.load(tmp_path / "bench")
    pd.testing.assert_frame_equal(back.benchmark.rounds, three_rounds.rounds)
    assert not back.benchmark.config.with_trl
    assert back.benchmark.stamp == three_rounds.stamp
    assert back.manifest["preset"] == "benchmark"
    recorded.save(three_rounds._replace(trl="1.16.0"), tmp_path / "bench")
    back = recorded.load(tmp_path / "bench")
    assert back.benchmark.trl == back.manifest["versions"]["trl"] == "1.16.0"
    assert back.benchmark.stamp == three_rounds.stamp


def test_a_device_is_timed_phase_by_phase(tmp_path, monkeypatch):
    monkeypatch.setattr(device_benchmark, "machine_rates", lambda device: pd.DataFrame({"a": [1]}))
    loads = device_benchmark.tiny_loads(members=(2,), widths=(8,), updates=2)
    result = device_benchmark.run(loads, torch.device("cpu"))
    (row,) = result.populations.to_dict("records")
    assert row["ms"] > 0 and row["members"] == 2
    config = loads[0].config
    assert row["tokens"] == pytest.approx(1e3 * generated_tokens(config) / row["ms"])
    phases = result.phases.set_index("phase")["ms"]
    assert list(phases.index) == ["rollout", "reference", "forward", "backward", "optimizer"]
    assert (phases > 0).all()
    recorded.save_device(result, tmp_path / "device")
    assert {path.name for path in (tmp_path / "device").iterdir()} == {
        "populations.csv",
        "phases.csv",
        "machine.csv",
        "manifest.json",
    }


def test_rates_of_a_device_are_those_of_its_products():
    table = device_benchmark.machine_rates(torch.device("cpu"), size=128, copied=2**22)
    assert list(table["precision"]) == ["float32", "bfloat16"]
    assert (table["flops_per_second"] > 1e8).all() and (table["bytes_per_second"] > 1e8).all()


def test_a_language_model_is_compared_round_by_round_and_read_back(tmp_path):
    seconds = {(language.PLAIN, 1): [6.0, 12.0, 9.0], ("population", 4): [2.0, 3.0, 6.0]}
    rounds = pd.DataFrame(
        [
            {"round": number, "contender": name, "members": count, "seconds": value}
            for (name, count), values in seconds.items()
            for number, value in enumerate(values)
        ]
    )
    stamp = current_stamp(contenders.LARGEST)
    benchmark = language.LanguageBenchmark(SHORT.config, rounds, stamp, "5.0")
    recorded.save_language(benchmark, tmp_path / "b")
    again = recorded.load_language(tmp_path / "b")
    assert again.config == SHORT.config and again.stamp == stamp and again.transformers == "5.0"
    table = language.summary(again).set_index(["contender", "members"])
    assert table.loc[(language.PLAIN, 1), "ratio"] == 1.0
    row = table.loc[("population", 4)]
    assert [row["seconds"], row["ratio"], row["low"], row["high"]] == [3.0, 3.0, 1.5, 4.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--weights", "hub"], "--weights are of --language-model"),
        (["--widths", "32", "--language-model"], "--widths are of the tiny policy"),
        (["--rounds", "3", "--device", "cuda"], "on a GPU only --language-model takes turns"),
        (["--rounds", "0"], "--rounds must be at least 1, not 0"),
        (["--widths", "32", "32"], "--widths: a width is given twice: [32, 32]"),
        (["--widths", "33"], "--widths: width 33: Input should be a multiple of 4"),
        (["--widths", "0"], "--widths: width 0: Input should be greater than or equal to 4"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(options, message, capsys):
    assert main(["bench", *options]) != 0
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], [("cpu", "benchmark_cpu", (32, 64), 15)]),
        (["--widths", "32", "--rounds", "2"], [("cpu", "benchmark_cpu", (32,), 2)]),
        (["--language-model"], [("text", "benchmark_smollm2_cpu", (1, 4), 15)]),
        (["--device", "cuda"], [("cuda", "benchmark_cuda", (32, 64), False)]),
        (
            ["--device", "cuda", "--language-model"],
            [
                ("cuda", "benchmark_cuda", (32, 64), True),
                ("text", "benchmark_smollm2_cuda", (24,), 5),
            ],
        ),
        (
            ["--device", "cuda", "--language-model", "--directory", "a/b", "--rounds", "7"],
            [("cuda", "b", (32, 64), True), ("text", "b_smollm2", (24,), 7)],
        ),
    ],
)
def test_options_reach_what_is_timed(options, expected, monkeypatch):
    found = []

    def of_cpu(config, say, journal):
        found.append(("cpu", config.widths, config.rounds))
        raise KeyboardInterrupt

    def of_device(loads, device, say, journal):
        widths = tuple(dict.fromkeys(load.config.policy.width for load in loads[:6]))
        found.append(("cuda", widths, len(loads) > 6))
        return SimpleNamespace(populations=TABLE, phases=TABLE, machine=TABLE)

    def of_text(config, device, members, rounds, say, journal):
        assert config.cosine_every == 0
        found.append(("text", members, rounds))
        raise KeyboardInterrupt

    folders = []

    class Named(Journal):
        def __init__(self, directory):
            folders.append(directory.name)

        def end(self):
            pass

    monkeypatch.setattr(bench, "Journal", Named)
    monkeypatch.setattr(bench, "run", of_cpu)
    monkeypatch.setattr(device_benchmark, "run", of_device)
    monkeypatch.setattr(language, "run", of_text)
    monkeypatch.setattr(recorded, "save_device", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    with contextlib.suppress(KeyboardInterrupt):
        main(["bench", *options])
    assert [
        (kind, folder, *rest) for (kind, *rest), folder in zip(found, folders, strict=True)
    ] == expected


def test_a_language_model_needs_its_packages(capsys, monkeypatch):
    def missing(module, extra):
        raise ValueError(f"{module} is not installed: pip install 'kl-term[{extra}]'")

    monkeypatch.setattr(language, "needed", missing)
    assert main(["bench", "--language-model"]) != 0
    assert "transformers is not installed: pip install 'kl-term[lm]'" in capsys.readouterr().err


def test_two_processors_side_by_side_by_hand():
    both = {
        "first": recorded.load().benchmark,
        "second": recorded.load(recorded.RECORDED_SECOND).benchmark,
    }
    table = recorded.by_processor(both).set_index(["width", "processor"])
    assert list(table.index) == [(w, name) for w in (32, 64) for name in both]
    for name, benchmark in both.items():
        rounds = benchmark.rounds.query("width == 64")
        wide = rounds.pivot(index="round", columns="contender", values="seconds")
        over = wide.div(wide[measure.ENGINE], axis=0).median()
        row = table.loc[(64, name)]
        assert row["ms"] == pytest.approx(1e3 * wide[measure.ENGINE].median())
        for kind in ("plain", "trl"):
            of_kind = rounds.loc[rounds["kind"] == kind, "contender"].unique()
            assert row[kind] == pytest.approx(over[of_kind].min())
        rate = benchmark.machine.query("width == 64 and processes == 1")["flops_per_second"]
        assert row["gflops"] == pytest.approx(rate.median() / 1e9)
        least = measure.floors(benchmark).set_index(["width", "processes"])
        assert row["floor"] == least.loc[(64, 1), "ratio"]
