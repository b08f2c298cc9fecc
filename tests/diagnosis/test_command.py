"""``kl-term diagnose``: pages, JSON, exit statuses, dumping, and a million tokens."""

from __future__ import annotations

import ast
import base64
import io
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from kl_term import style
from kl_term.cli.main import main
from kl_term.diagnosis.dumping import SNIPPETS, Dump, append_rollouts
from kl_term.diagnosis.generate import EXAMPLES, FOLDER, Run, simulate
from kl_term.diagnosis.names import NAMES
from kl_term.diagnosis.readers import read_rollouts
from kl_term.diagnosis.schema import Report
from kl_term.errors import UserError

STALE = str(FOLDER / "stale_samples.csv.gz")


def status(*arguments: str) -> int:
    try:
        return main(["diagnose", *arguments])
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((STALE,), 0),
        ((STALE, "--fail-on", "stale-samples"), 3),
        ((STALE, "--fail-on", "misaligned,heavy-tail"), 0),
        ((STALE, "--fail-on", "misaligned, error"), 3),
        ((STALE, "--fail-on", "errors"), 1),
        ((STALE, "--epsilon-low", "2"), 1),
        ((STALE, "--resamples", "3"), 1),
        ((STALE, "--seed", "-1"), 1),
        ((str(FOLDER / "healthy.csv.gz"), "--fail-on", "error,warning,note"), 0),
        (("missing.csv",), 1),
        ((), 1),
    ],
)
def test_exit_status(arguments, expected, capsys):
    assert status(*arguments) == expected
    captured = capsys.readouterr()
    if expected == 1:
        (line,) = captured.err.splitlines()
        assert line.startswith("kl-term: ") and not captured.out


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are made and not drawn: drawing is nine tenths of a page's second."""
    monkeypatch.setattr(style, "png", lambda figure: b"".join(b"axes" for _ in figure.axes))


@pytest.mark.parametrize("name", EXAMPLES)
def test_page_and_json(name, undrawn, tmp_path, capsys):
    page, document = tmp_path / "page.html", tmp_path / "report.json"
    path = str(FOLDER / f"{name}.csv.gz")
    assert status(path, "--page", str(page), "--json", str(document)) == 0
    found = Report.model_validate_json(document.read_text())
    assert json.loads(document.read_text())["tokens"] == found.tokens > 1000
    html = page.read_text()
    assert html.count("<img") >= 3 and "<script" not in html and 'src="http' not in html
    said = capsys.readouterr().out
    for code in found.codes():
        assert code in html and code in said
    assert ("nothing found" in said) == (name == "healthy")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_figures_of_a_page_are_drawn(name, tmp_path):
    """In the fast tests those of small and extreme dumps are, below."""
    page = tmp_path / "page.html"
    assert status(str(FOLDER / f"{name}.csv.gz"), "--page", str(page)) == 0
    images = re.findall(r'<img [^>]*src="data:image/png;base64,([^"]*)"', page.read_text())
    assert len(images) >= 3
    for image in images:
        drawn = np.asarray(Image.open(io.BytesIO(base64.b64decode(image))).convert("L"))
        assert drawn.std() > 1, "an empty picture"


@pytest.mark.parametrize(
    "rows",
    [
        "a,0,-1,-2,-1,1,0",
        "a,-3,-900,-0.1,-5,1,0\na,-2,-1,-1,-1,1,0\nb,1,-2,-1.5,-2,2,1",
        "a,0,-1,-1,-1,1,0\na,1,-1,-1,-1,1,0\na,2,-1,-1,-1,1,0\nb,0,-1,-1,-1,1,0",
        "a,5,-0.5,-800,-0.5,1,1\nb,7,-800,-0.5,-800,1,-1",
    ],
)
def test_tiny_and_extreme_dumps_still_give_a_page(rows, tmp_path):
    path, page = tmp_path / "dump.csv", tmp_path / "page.html"
    document = tmp_path / "report.json"
    path.write_text(f"sequence,position,logp,ref_logp,old_logp,step,advantage\n{rows}\n")
    assert status(str(path), "--page", str(page), "--json", str(document)) == 0
    codes = Report.model_validate_json(document.read_text()).codes()
    assert "few-sequences" in codes and "coarse-logprobs" not in codes
    assert page.read_text().count("<img") >= 3


def test_half_a_character_in_a_name_is_replaced(tmp_path):
    path, page, document = (tmp_path / name for name in ("dump.jsonl", "page.html", "report.json"))
    path.write_text('{"sequence": "\\ud800", "logp": -1, "ref_logp": -2, "\\udfff": 0}\n')
    assert status(str(path), "--page", str(page), "--json", str(document)) == 0
    report = Report.model_validate_json(document.read_text())
    assert [one.sequence for one in report.top_sequences] == ["?"]
    assert list(report.ignored_columns) == ["?"]


def test_snippet_for_trl_asks_our_trainer_for_a_dump(capsys):
    assert status("--how-to-dump", "trl") == 0
    calls = [n for n in ast.walk(ast.parse(capsys.readouterr().out)) if isinstance(n, ast.Call)]
    (call,) = [n for n in calls if getattr(n.func, "id", "") == "KLGRPOTrainer"]
    assert "dump_rollouts" in {keyword.arg for keyword in call.keywords}


@pytest.mark.parametrize("framework", ["verl", "verl-updates", "openrlhf"])
def test_snippets_are_python_and_name_columns_that_are_read(framework, capsys):
    assert status("--how-to-dump", framework) == 0
    tree = ast.parse(capsys.readouterr().out)
    (call,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "append_rollouts"
    ]
    columns = {keyword.arg for keyword in call.keywords if keyword.arg}
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict) and framework != "openrlhf":
            keyed = zip(node.keys, node.values, strict=True)
            columns |= {v.value for _, v in keyed if isinstance(v, ast.Constant)}
            columns |= {k.value for k in node.keys if framework == "verl-updates"} & set(NAMES)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            columns |= {node.slice.value} if isinstance(node.slice, ast.Constant) else set()
    assert columns <= set(NAMES)
    wanted = {"ref_logp", "old_logp", "mask", "step", "advantage"}
    of_rollouts, of_updates = {"group", "reward", "entropy"}, {"logp", "kl_term"}
    wanted |= {"verl": of_rollouts | {"lag"}, "verl-updates": of_updates}.get(
        framework, of_rollouts | of_updates
    )
    assert wanted <= columns


def test_the_snippet_for_openrlhf_dumps_each_update(tmp_path, monkeypatch):
    logp, mask = -torch.rand(3, 4), torch.ones(3, 4).bool()
    experience = SimpleNamespace(
        action_log_probs=logp - 0.1,
        base_action_log_probs=logp - 0.2,
        rollout_log_probs=None,
        action_mask=mask,
        advantages=logp,
        rewards=torch.tensor([1.0, 0.0, 1.0]),
        prompts=["a", "b", "a"],
    )
    args = SimpleNamespace(
        actor=SimpleNamespace(entropy_coef=None),
        algo=SimpleNamespace(kl=SimpleNamespace(use_loss=True)),
    )
    actor = SimpleNamespace(strategy=SimpleNamespace(get_rank=lambda: 0), args=args)
    names = {"self": actor, "step": 0, "experience": experience, "torch": torch, "output": None}
    names |= {"action_log_probs": logp, "kl": 0.2 * logp, "kl_ctl": 0.5}
    monkeypatch.chdir(tmp_path)
    exec(compile(SNIPPETS["openrlhf"], "snippet", "exec"), names)
    found = read_rollouts(tmp_path / "rollouts-0.jsonl")
    assert found.tokens == 12 and set(found.step) == {1}
    first, second, third = (set(found.group[found.sequence == row]) for row in range(3))
    assert first == third != second
    np.testing.assert_allclose(found.kl_term, (0.1 * logp).flatten().numpy(), atol=1e-6)


def test_the_snippet_for_verl_s_workers_dumps_the_update_itself(tmp_path, monkeypatch):
    logp = -torch.rand(2, 3)
    held = {"old_log_probs": logp - 0.1, "ref_log_prob": logp - 0.2, "advantages": logp}
    held |= {"response_mask": torch.ones(2, 3)}

    class Data(dict):
        def select(self, *names):
            return SimpleNamespace(to_padded_tensor=lambda: {n: self[n] for n in names})

    losses = SimpleNamespace(
        ppo_loss=lambda config, model_output, data, dp_group: "lost",
        no_padding_2_padding=lambda values, data: values,
        kl_penalty=lambda logprob, ref_logprob, kl_penalty: logprob - ref_logprob,
    )
    workers, distillation = SimpleNamespace(), SimpleNamespace()
    for name, module in {
        "verl.workers": SimpleNamespace(engine_workers=workers),
        "verl.workers.utils": SimpleNamespace(losses=losses),
        "verl.trainer.distillation": SimpleNamespace(losses=distillation),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.chdir(tmp_path)
    exec(compile(SNIPPETS["verl-updates"], "snippet", "exec"), {})
    assert losses.ppo_loss is workers.ppo_loss is distillation.ppo_loss
    config = SimpleNamespace(use_kl_loss=True, kl_loss_type="k1", kl_loss_coef=0.5)
    for _ in range(2):
        assert losses.ppo_loss(config, {"log_probs": logp}, Data(held), None) == "lost"
    assert losses.ppo_loss(SimpleNamespace(use_kl_loss=False), {}, Data(held)) == "lost"
    (path,) = tmp_path.iterdir()
    found = read_rollouts(path)
    assert found.tokens == 12 and set(found.step) == {1, 2} and found.has_old_logp
    np.testing.assert_allclose(found.kl_term, np.full(12, 0.1), atol=1e-6)
    np.testing.assert_allclose(found.logp - found.old_logp, np.full(12, 0.1), atol=1e-6)


@pytest.mark.peers
def test_the_snippet_for_verl_dumps_a_batch_of_its_trainer(tmp_path, monkeypatch):
    """On the names of its present trainer, whose file is read, with a queue that stands in."""
    try:
        package = metadata.distribution("verl")
    except metadata.PackageNotFoundError:
        pytest.skip("verl is not installed: make test-full")
    path = package.locate_file("verl/trainer/ppo/v1/trainer_base.py")
    source = Path(path).read_text()
    (method,) = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "_update_actor"
    ]
    assert [argument.arg for argument in method.args.args] == ["self", "batch", "metrics"]
    logp = -torch.rand(3, 4)
    table = dict.fromkeys(("old_log_probs", "ref_log_prob", "entropy", "advantages"), logp)
    table |= {"rm_scores": torch.ones(3, 4), "response_mask": torch.ones(3, 4)}

    def kv_batch_get(keys, partition_id, select_fields):
        assert all(f'"{name}"' in source for name in select_fields)
        chosen = {name: table[name] for name in select_fields}
        return SimpleNamespace(to_padded_tensor=lambda: chosen)

    class PPOTrainer:
        global_steps = 7

        def _update_actor(self, batch, metrics):
            return "updated"

    for name, module in {
        "transfer_queue": SimpleNamespace(kv_batch_get=kv_batch_get),
        "verl.trainer.ppo.v1": SimpleNamespace(PPOTrainer=PPOTrainer),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.chdir(tmp_path)
    exec(compile(SNIPPETS["verl"], "snippet", "exec"), {})
    keys = ["u1_0_0", "u1_1_0", "u2_0_0"]
    tags = [{"min_global_steps": sampled} for sampled in (7, 6, 5)]
    assert "{uid}_{session_id}_{index}" in source and 'tag["min_global_steps"]' in source
    batch = SimpleNamespace(keys=keys, tags=tags, partition_id="train")
    assert PPOTrainer()._update_actor(batch, {}) == "updated"
    found = read_rollouts(tmp_path / "rollouts.jsonl")
    assert found.tokens == 12 and set(found.step) == {7} and set(found.reward) == {4.0}
    assert found.entropy is not None and found.has_old_logp
    first, second, third = found.group[::4]
    assert first == second != third and found.lag[::4].tolist() == [0, 1, 2]


def test_dumped_batches_are_read_back(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    generator = torch.Generator().manual_seed(0)
    batches = [-torch.rand(3, 4, 5, generator=generator) for _ in range(2)]
    mask = torch.arange(5) < torch.tensor([[5], [3], [1], [2]])
    for step, (logp, old, ref) in enumerate(batches):
        logp = logp.masked_fill(~mask, float("nan")).requires_grad_()
        append_rollouts(
            path,
            step=step,
            logp=logp.bfloat16() if step else logp,
            old_logp=old,
            ref_logp=ref,
            sampler_logp=None,
            mask=mask,
            advantage=torch.tensor([1.0, -1.0, 0.5, -0.5]),
        )
    found = read_rollouts(path)
    assert (found.tokens, found.sequences, found.rows) == (2 * 11, 8, 2 * 11), "without its padding"
    first = batches[0][0][0].double().numpy()
    assert np.abs(found.logp[:5] - first).max() < 1e-6
    assert found.advantage[:9].tolist() == [1.0] * 5 + [-1.0] * 3 + [0.5]
    with pytest.raises(UserError, match="differ in batch size"):
        append_rollouts(path, step=0, logp=torch.zeros(2, 3), ref_logp=torch.zeros(3, 3))
    with pytest.raises(UserError, match="ref_logp is None"):
        append_rollouts(path, step=0, logp=torch.zeros(2, 3), ref_logp=None)


@pytest.mark.peers
def test_the_snippet_for_openrlhf_says_where_the_reference_is_dropped():
    """Its log-probs reach the actor only if the lines that the snippet names are deleted."""
    try:
        package = metadata.distribution("openrlhf")
    except metadata.PackageNotFoundError:
        pytest.skip("openrlhf is not installed: make test-full")
    comments = [line[2:] for line in SNIPPETS["openrlhf"].splitlines() if line.startswith("# ")]
    (file,) = [line.rstrip(":") for line in comments if line.endswith("experience_maker.py:")]
    source = Path(package.locate_file(file)).read_text()
    deleted = [line for line in comments if line.startswith("    ")]
    assert len(deleted) == 2 and source.count("\n".join(deleted)) == 1


MEASURED = """
import json, re, sys, time
text = "[" + ",".join(["-1.234567"] * int(sys.argv[1])) + "]"
start = time.process_time()
json.loads(text)
yardstick = time.process_time() - start
del text
start = time.process_time()
from kl_term.cli.main import main
code = main(["diagnose", *sys.argv[2:]])
seconds = time.process_time() - start
# Of this process; what getrusage calls the peak begins with that of the one that started it.
peak = int(re.search(r"VmHWM:\\s+([0-9]+)", open("/proc/self/status").read())[1]) / 2**10
print("measured", code, seconds / yardstick, peak, "pandas" in sys.modules)
"""


def measured(numbers, *arguments):
    """What a diagnosis in a process of its own ends with and takes.

    Its exit code; processor time in that of parsing so many numbers; megabytes; whether pandas was
    imported.
    """
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(numbers), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
    )
    _, code, yardsticks, megabytes, pandas = done.stdout.splitlines()[-1].split()
    return code, float(yardsticks), float(megabytes), pandas == "True"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="its unit of memory is that of Linux")
@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_a_million_tokens_in_seconds_and_two_gigabytes(tmp_path, ending):
    """Processor time, over that of parsing three million numbers, so that neither a busy nor a slow
    machine decides; imports and the page included."""
    path = tmp_path / f"large.{ending}"
    frame = simulate(Run(sequences=1250, shortest=30, longest=50), 0)
    copies = 20
    if ending == "csv":
        body = frame.to_csv(index=False, float_format="%.6f").partition("\n")
        with open(path, "w") as file:
            file.write("copy_step," + body[0] + "\n")
            for copy in range(copies):
                rows = frame.assign(step=frame.step + 100 * copy)
                rows.insert(0, "copy_step", copy)
                rows.to_csv(file, index=False, header=False, float_format="%.6f")
    else:
        lists = frame.round(6).groupby("sequence")[["logp", "old_logp", "ref_logp"]].agg(list)
        text = lists.to_json(orient="records", lines=True)
        path.write_text(text * copies)
    assert len(read_rollouts(path).logp) >= 1_000_000 * 0.98
    code, yardsticks, megabytes, _ = measured(3_000_000, path, "--page", tmp_path / "page.html")
    assert code == "0" and yardsticks < 40 and megabytes < 2 * 2**10


@pytest.mark.peers
@pytest.mark.skipif(sys.platform != "linux", reason="its unit of memory is that of Linux")
def test_a_million_tokens_of_parquet_take_seconds_and_half_a_gigabyte(tmp_path):
    """The whole process: half of it is torch, without CUDA. Processor time is told in that of
    parsing a million numbers, about a tenth of a second."""
    pytest.importorskip("pyarrow", reason="the extra diagnose is not installed: make test-full")
    generator = torch.Generator().manual_seed(0)
    dump = Dump(tmp_path, format="parquet")

    def rows(center=0.0):
        return center + 0.02 * torch.randn(250, 250, generator=generator)

    for step in range(16):
        old_logp = -3 * torch.rand(250, 250, generator=generator)
        logp, ref_logp, sampler_logp = (rows(old_logp).clamp(max=0) for _ in range(3))
        reward = torch.randn(250, generator=generator)
        dump.write(
            step=step,
            generation=step,
            logp=logp,
            old_logp=old_logp,
            ref_logp=ref_logp,
            sampler_logp=sampler_logp,
            entropy=-old_logp,
            kl_term=rows(),
            token=torch.randint(50_000, (250, 250), generator=generator),
            advantage=reward,
            reward=reward,
            group=torch.arange(250) // 10,
        )
    assert dump.written == 1_000_000
    (tmp_path / "settings.json").write_text('{"framework": "trl", "kl": {"estimator": "k3"}}')
    _, yardsticks, megabytes, pandas = measured(1_000_000, tmp_path)
    assert not pandas and yardsticks < 50
    if torch.version.cuda is None:
        assert megabytes < 500


def test_a_line_that_was_torn_is_not_glued_to_the_next(tmp_path):
    path = tmp_path / "dump.jsonl"
    batch = {"logp": torch.zeros(1, 2), "ref_logp": torch.zeros(1, 2)}
    append_rollouts(path, step=0, **batch)
    with open(path, "a") as file:
        file.write('{"step": 1, "logp": [0.')
    append_rollouts(path, step=2, **batch)
    lines = path.read_text().splitlines()
    assert [json.loads(lines[i])["step"] for i in (0, 2)] == [0, 2] and len(lines) == 3


def test_what_a_dump_leaves_unchecked_is_said(tmp_path, capsys):
    frame = simulate(Run(sequences=80), 7)[["sequence", "position", "logp", "ref_logp"]]
    frame.to_csv(tmp_path / "few.csv", index=False)
    assert main(["diagnose", str(tmp_path / "few.csv")]) == 0
    said = capsys.readouterr().out
    assert "nothing found\nnot checked: staleness" in said and "no old_logp column" in said
    assert "exact KL" not in said, "what no dump can say is no news"


def test_an_option_takes_precedence_over_the_dump(tmp_path, monkeypatch, capsys):
    from kl_term.cli import diagnose as command

    heard = []
    monkeypatch.setattr(command, "measure", lambda rollouts, settings: heard.append(settings))
    monkeypatch.setattr(command, "report", lambda *_, **__: pytest.skip("heard enough"))
    monkeypatch.setattr(command, "read_rollouts", lambda file: None)
    (tmp_path / "settings.json").write_text('{"epsilon_high": 0.28, "kl": {"estimator": "k3"}}')
    for options in ([], ["--epsilon-high", "0.2", "--estimator", "k2"]):
        with pytest.raises(pytest.skip.Exception):
            main(["diagnose", str(tmp_path), *options])
    assert [(s.epsilon_high, s.kl.estimator) for s in heard] == [(0.28, "k3"), (0.2, "k2")]
    assert main(["diagnose", str(tmp_path), "--placement", "reward"]) == 1
    assert "name its estimator too" in capsys.readouterr().err
    options = ["--estimator", "exact", "--placement", "reward"]
    assert main(["diagnose", str(tmp_path), *options]) == 1
    assert "works in the loss only" in capsys.readouterr().err
