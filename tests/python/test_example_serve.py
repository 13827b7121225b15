"""examples/serve_paged.py: the same bytes as without a cache, whatever the pages, chunks and company; no page leaks.

Most tests serve a random model in fp64, where rounding cannot turn one byte into another.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.append(str(EXAMPLES))

import paged_cache  # noqa: E402
import serving  # noqa: E402
from gpt_model import GPT  # noqa: E402

COMMON = b"All requests begin like this; "
REQUESTS = [
    serving.Request(COMMON + b"one", 9),
    serving.Request(COMMON + b"another, and it goes on for a while", 6, temperature=1.0, seed=1),
    serving.Request(b"x", 12, temperature=0.7, seed=2),
    serving.Request(COMMON + b"one", 9, temperature=1.0, seed=3),
    serving.Request(COMMON[:16], 5),
    serving.Request(COMMON + b"one", 1),
]
LONGEST = max(len(r.prompt) + r.new_tokens - 1 for r in REQUESTS)


def make_model():
    """Two layers, with weights so large that every byte depends on all before it."""
    torch.manual_seed(0)
    model = GPT(2, 16, 2, "flash").double().eval()
    model.requires_grad_(False)
    for weight in (p for p in model.blocks.parameters() if p.dim() == 2):
        weight.normal_()
    for block in model.blocks:
        block.attention.slopes = block.attention.slopes.float() * 0.01  # gentle, so that far bytes count too
    return model


@pytest.fixture(scope="module")
def alone():
    model = make_model()
    return [serving.generate_alone(model, request) for request in REQUESTS]


def make_server(pages=64, page_size=4, max_batch=4, chunk=8, share=True):
    return serving.Server(make_model(), pages, page_size, max_batch, chunk, share)


def serve(server, requests=REQUESTS):
    sequences = [server.submit(request) for request in requests]
    while server:
        before, running = dataclasses.replace(server.figures), len(server.running)
        server.step()
        assert server.figures.computed_tokens > before.computed_tokens, "a step without progress"
        assert len(server.running) <= server.max_batch
        preempted = server.figures.preemptions - before.preemptions
        assert not preempted or len(server.running) <= running - preempted, "a step without room started one"
        assert server.pool.used == len({page for s in server.running for page in s.pages})
    check_pool(server.pool, [])
    return [s.generated for s in sequences]


def check_pool(pool, held):
    """held: a list of pages for each holder."""
    counts = [sum(pages.count(page) for pages in held) for page in range(pool.pages)]
    assert pool.holders == counts
    assert set(pool.free) == {page for page, holders in enumerate(counts) if holders == 0}
    assert pool.used == pool.pages - counts.count(0)
    assert pool.shared == sum(n > 1 for n in counts)
    assert {page: prefix for prefix, page in pool.page_of_prefix.items()} == pool.prefix_of_page


@pytest.mark.second_torch
@pytest.mark.parametrize("share", [True, False], ids=["shared", "unshared"])
@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("page_size", [1, 3, 16, 128])
def test_same_bytes_as_without_a_cache(alone, page_size, chunk, share):
    server = make_server(pages=5 * -(-LONGEST // page_size), page_size=page_size, chunk=chunk, share=share)
    assert serve(server) == alone
    assert server.figures.preemptions == 0
    assert server.figures.new_tokens == sum(r.new_tokens for r in REQUESTS)
    assert (server.figures.found_tokens > 0) == (share and page_size <= len(COMMON))


@pytest.mark.parametrize("share", [True, False], ids=["shared", "unshared"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_too_few_pages_cost_time_but_no_byte(alone, page_size, share):
    server = make_server(pages=-(-LONGEST // page_size), page_size=page_size, share=share)
    assert serve(server) == alone
    assert server.figures.preemptions > 0
    assert server.figures.peak_pages_used <= server.pool.pages
    if not share:
        assert server.figures.recomputed_tokens > 0
        once = sum(len(r.prompt) + r.new_tokens - 1 for r in REQUESTS)
        assert server.figures.computed_tokens - server.figures.recomputed_tokens == once


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.data())
def test_any_setting_gives_the_same_bytes(alone, data):
    page_size = data.draw(st.integers(1, 20))
    least = -(-LONGEST // page_size)
    chosen = data.draw(st.lists(st.integers(0, len(REQUESTS) - 1), min_size=1, max_size=8))
    server = make_server(
        pages=data.draw(st.integers(least, 3 * least)),
        page_size=page_size,
        max_batch=data.draw(st.integers(1, 6)),
        chunk=data.draw(st.integers(1, 40)),
        share=data.draw(st.booleans()),
    )
    assert serve(server, [REQUESTS[n] for n in chosen]) == [alone[n] for n in chosen]


def test_one_prompt_may_fill_the_pool():
    request = serving.Request(b"12345678", 1)  # the last token needs no slot
    assert serve(make_server(pages=2), [request]) == [serving.generate_alone(make_model(), request)]


def test_requests_that_begin_alike_hold_the_same_pages():
    server = make_server(chunk=64)
    server.submit(REQUESTS[0])
    server.step()
    server.submit(REQUESTS[1])
    server.step()
    first, second = server.running
    full = len(COMMON) // 4
    assert first.pages[:full] == second.pages[:full]
    assert not set(first.pages[full:]) & set(second.pages[full:])
    assert server.pool.shared == full
    assert server.figures.mixed_steps == 1


def test_sequences_that_generate_take_no_room_from_prompts():
    server = make_server(chunk=8)
    server.submit(REQUESTS[2])  # one byte: its row is a prompt's at first
    server.submit(REQUESTS[0])
    server.step()
    assert server.figures.computed_tokens == 8 and server.figures.mixed_steps == 0
    server.step()
    assert server.figures.computed_tokens == 8 + 1 + 8 and server.figures.mixed_steps == 1


def test_the_end_of_a_prefix_is_given_up_first():
    server = make_server(pages=6)
    serve(server, [REQUESTS[4]])  # 16 bytes and 4 more, in 5 pages
    for _ in range(2):
        server.pool.take()  # the page that was never used, and one of the five
    assert len(server.pool.hold_prefix(REQUESTS[4].prompt)) == 4


def test_a_released_prefix_is_found_again():
    server = make_server()
    serve(server, [REQUESTS[0]])
    computed = server.figures.computed_tokens
    serve(server, [REQUESTS[5]])
    assert server.figures.computed_tokens == computed + len(REQUESTS[5].prompt) - 32


def test_the_test_model_looks_at_all_bytes():
    """Otherwise wrong pages would go unnoticed here."""
    model = make_model()
    a, b = (serving.generate_alone(model, serving.Request(first + COMMON, 12)) for first in (b"a", b"b"))
    assert a != b


def test_samples_follow_the_softmax():
    logits = torch.tensor([2.0, 0.0, 1.0] + [-50.0] * 253)
    request = serving.Request(b"x", 1, temperature=2.0, seed=5)
    drawn = torch.tensor([serving.next_token(logits, request, n) for n in range(4000)]).bincount(minlength=256) / 4000
    torch.testing.assert_close(drawn, (logits / 2).softmax(0), atol=0.03, rtol=0)


def test_no_two_seeds_sample_alike():
    def sample(seed, start):
        request = serving.Request(b"x", 1, temperature=1.0, seed=seed)
        return [serving.next_token(torch.zeros(256), request, start + n) for n in range(20)]

    assert sample(3, 1) == sample(3, 1) and sample(3, 1) not in (sample(4, 1), sample(4, 0), sample(3, 2))


class PoolMachine(RuleBasedStateMachine):
    """Any order of the pool's operations, against lists of who holds what and what was written to each page."""

    def __init__(self):
        super().__init__()
        self.pool = paged_cache.PagePool(6, 2)
        self.sequences = []  # [tokens, pages]
        self.content = {}  # of each page, the prefix that it ended when it was last filled

    @rule(tokens=st.binary(min_size=1, max_size=8).map(lambda x: bytes(b % 2 for b in x)))
    def start(self, tokens):
        known = set(self.pool.page_of_prefix)
        pages = self.pool.hold_prefix(tokens)
        for n, page in enumerate(pages):
            assert self.content[page] == tokens[: 2 * n + 2]
        end = 2 * len(pages) + 2
        assert end > len(tokens) or tokens[:end] not in known
        self.sequences.append([tokens, pages])

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 9))
    def grow(self, which):
        tokens, pages = self.sequences[which % len(self.sequences)]
        if not self.pool.free:
            with pytest.raises(paged_cache.OutOfPages, match="all 6 pages are held"):
                self.pool.take()
            return
        pages.append(self.pool.take())
        self.content.pop(pages[-1], None)
        if 2 * len(pages) <= len(tokens):
            prefix = tokens[: 2 * len(pages)]
            self.content[pages[-1]] = prefix
            self.pool.publish(pages[-1], prefix)

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 9))
    def finish(self, which):
        for page in self.sequences.pop(which % len(self.sequences))[1]:
            self.pool.release(page)

    @invariant()
    def nothing_leaks(self):
        check_pool(self.pool, [pages for _, pages in self.sequences])


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)


def test_misuse_of_the_pool_raises():
    pool = paged_cache.PagePool(2, 4)
    page = pool.take()
    with pytest.raises(ValueError, match="with 1 holders cannot end 3 tokens"):
        pool.publish(page, b"abc")
    pool.release(page)
    with pytest.raises(ValueError, match="nothing holds it"):
        pool.release(page)
    with pytest.raises(ValueError, match="page_size 0; both must be 1 or more"):
        paged_cache.PagePool(2, 0)


def test_impossible_requests_say_what_is_wrong():
    with pytest.raises(ValueError, match=r"8 \+ 10 tokens needs 5 pages of 4, but there are 4; pass at least 5 pages"):
        make_server(pages=4).submit(serving.Request(b"12345678", 10))
    with pytest.raises(ValueError, match="0 bytes of prompt"):
        serving.Request(b"", 3)
    with pytest.raises(ValueError, match="temperature is -1"):
        serving.Request(b"a", 3, temperature=-1)
    with pytest.raises(ValueError, match="chunk is 0"):
        make_server(chunk=0)


# ---- The script.


def run(folder, *arguments, status=0):
    command = [sys.executable, str(EXAMPLES / "serve_paged.py"), "--threads=1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_bytes(b"".join(source.read_bytes() for source in sorted(EXAMPLES.glob("*.py"))))
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "flash.pt"
    torch.manual_seed(0)
    torch.save({"settings": dict(layers=1, width=32, heads=2), "model": GPT(1, 32, 2, "flash").state_dict()}, path)
    return path


@pytest.mark.second_torch
@pytest.mark.parametrize("options", [(), ("--temperature=0", "--pages=9", "--no-share")], ids=["roomy", "tight"])
def test_script_checks_and_reports(tmp_path, data, checkpoint, options):
    figures = tmp_path / "figures.json"
    small = [f"--data={data}", "--requests=5", "--new-tokens=8", "--prefix=32", "--max-batch=3", "--chunk=16"]
    printed = run(tmp_path, f"--checkpoint={checkpoint}", *small, f"--json={figures}", *options)
    assert "kept: 5 of 5 outputs are, byte for byte, those without a cache" in printed
    report = json.loads(figures.read_text())
    assert report["different_requests"] == [] and report["new_tokens"] == 40
    assert [len(pair["text"]) for pair in report["outputs"]] == [8] * 5
    assert 0 < report["peak_pages_used"] <= report["pages"]
    assert (report["peak_pages_shared"] > 0) == (report["preemptions"] == 0) == (options == ())


def test_script_trains_a_model_where_there_is_none(tmp_path, data):
    arguments = (f"--data={data}", "--train-steps=2", "--prompt=def ", "--prompt=class A", "--new-tokens=4")
    assert "training a small model" in run(tmp_path, *arguments)
    printed = run(tmp_path, *arguments)
    assert "training" not in printed
    assert "Request 1:\nclass A" in printed and "kept: 2 of 2" in printed


def test_equal_prompts_may_have_different_answers():
    import serve_paged

    requests = serve_paged.make_requests(serve_paged.parse_arguments(["--prompt=a", "--prompt=a", "--seed=3"]))
    first, second = (serving.generate_alone(make_model(), request) for request in requests)
    assert first != second


def test_a_checkpoint_without_figures_is_of_an_interrupted_run(tmp_path, monkeypatch):
    import serve_paged

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serve_paged.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))  # the training
    serve_paged.TRAINED.parent.mkdir()
    serve_paged.TRAINED.touch()
    args = serve_paged.parse_arguments([])
    assert serve_paged.find_checkpoint(args) == serve_paged.SHORT
    serve_paged.TRAINED.with_suffix(".json").touch()
    assert serve_paged.find_checkpoint(args) == serve_paged.TRAINED


def test_script_fails_if_a_byte_differs(tmp_path, data, checkpoint, monkeypatch, capsys):
    import serve_paged

    monkeypatch.setattr(serving, "generate_alone", lambda model, request: b"?" * request.new_tokens)
    arguments = [f"--checkpoint={checkpoint}", "--prompt=a", "--new-tokens=3"]
    assert serve_paged.main(arguments) == 1
    assert "BROKEN: 0 of 1 outputs" in capsys.readouterr().out
    assert serve_paged.main([*arguments, "--no-check"]) == 0


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--pages=0"], 2, "--pages: 0 is below 1"),
        (["--pages=many"], 2, "--pages: invalid int value: 'many'"),
        (["--temperature=-1"], 2, "--temperature: -1 is below 0"),
        (["--checkpoint=nowhere.pt"], 2, "--checkpoint nowhere.pt: no such file; train one with"),
        (["--prompt="], 2, "--prompt is empty"),
        (["--pages=1"], 1, "needs 2 pages of 16, but there are 1"),
        (["--checkpoint={data}"], 1, "is no checkpoint of train_gpt.py"),
    ],
)
def test_bad_arguments_say_what_is_wrong(tmp_path, data, checkpoint, arguments, status, message):
    filled = [argument.replace("{data}", str(data)) for argument in arguments]
    given = [f"--checkpoint={checkpoint}", "--prompt=def main", "--new-tokens=20", *filled]
    assert message in run(tmp_path, *given, status=status)
