"""Threads: how many there are changes no bit, calls may run at once, and a fork may follow the import."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace

import cases
import harness
import pytest
import same_bits
import torch
from cases import Case

from flash_attn import flash_attn_func

SAMPLES = {
    "few heads": Case(lengths=((130, 1100),), H=1, Hk=1, D=40, causal=True),
    "gqa": Case(lengths=((70, 600),) * 2, H=6, Hk=2, D=64, window=(200, 10)),
    # With few threads, what they pack of K and V goes around in memory of their own; with more threads than units not.
    "long window": Case(lengths=((900, 1300),) * 2, H=4, Hk=2, D=48, window=(150, 20)),
    # ... of more keys than a sum of bf16 products has, and no multiple of them.
    "longer window": Case(lengths=((900, 1300),) * 2, H=4, Hk=2, D=48, window=(250, 20)),
    "dropout": Case(lengths=((130, 1100),), H=3, Hk=1, D=32, dropout_p=0.2, alibi="BH"),
    "varlen": Case(lengths=((1, 900), (0, 5), (700, 64), (33, 33)), varlen=True, H=2, Hk=1, D=72, softcap=15.0),
    "heads of a key head": Case(lengths=((3, 1500),) * 2, H=50, Hk=1, D=64, causal=True),
    # Backward, tasks of a key block each are too few: query blocks, of several sums, meet it in chunks.
    "few keys": Case(lengths=((1300, 100),) * 2, H=4, Hk=1, D=40),
    "few keys, varlen": Case(lengths=((2500, 70), (900, 0), (40, 300)), varlen=True, H=3, Hk=1, D=64, window=(700, 30)),
    # Units that are left when each thread has had one are shared; with other numbers of threads none is left.
    "one unit left over": Case(lengths=((1100, 1100),), H=6, Hk=3, D=64, causal=True),
    "lengths apart, varlen": Case(lengths=((700, 700), (3, 3), (90, 90)), varlen=True, H=4, Hk=1, D=32, causal=True),
    # The long one is for whoever has time, the short ones are not.
    "one long, varlen": Case(lengths=((300, 300), *((9, 20),) * 9), varlen=True, H=4, Hk=1, D=64, causal=True),
    "few keys, dropout": Case(lengths=((1300, 300),), H=2, Hk=1, D=48, causal=True, dropout_p=0.1),
    "one row": Case(lengths=((1, 2000),), H=1, Hk=1, D=64),
}


@pytest.mark.second_torch
@pytest.mark.feature("same bits for every thread count")
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("sample", list(SAMPLES))
def test_same_bits_for_every_thread_count(sample, dtype):
    same_bits.check_every_thread_count(replace(SAMPLES[sample], dtype=dtype))


@pytest.mark.second_torch
def test_calls_from_many_python_threads():
    """Sixteen threads at once, each with a problem of its own, give what they give alone."""
    problems = [
        harness.make_inputs(Case(lengths=((20 + n, 300 + 40 * n),), H=2, Hk=1, D=16 + n, causal=n % 2 == 0), n)
        for n in range(16)
    ]

    def run(inputs):
        out, lse, _ = harness.public_call(inputs)
        return [out.detach(), lse, *torch.autograd.grad(out, inputs.leaves, inputs.dout)]

    alone = [run(p) for p in problems]
    together = [None] * len(problems)
    start = threading.Barrier(len(problems))

    def work(n):
        start.wait()
        for _ in range(5):
            together[n] = run(problems[n])

    workers = [threading.Thread(target=work, args=(n,)) for n in range(len(problems))]
    for w in workers:
        w.start()
    for w in workers:
        w.join(120)
    for a, b in zip(alone, together):
        assert b is not None and all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.mark.second_torch
def test_the_interpreter_runs_on_during_a_call():
    """The kernel holds no interpreter lock: another Python thread counts while it works."""
    q = torch.randn(1, 1500, 4, 64)
    counted, done = [0], threading.Event()

    def count():
        while not done.is_set():
            counted[0] += 1
            done.wait(0.0005)

    counter = threading.Thread(target=count)
    counter.start()
    try:
        # While calls run back to back, the counter moves only where a call lets it: a busy machine takes more calls.
        before, calls = counted[0], 0
        while counted[0] - before < 5 and calls < 300:
            flash_attn_func(q, q, q)
            calls += 1
        assert counted[0] - before >= 5, f"{counted[0] - before} steps during {calls} calls"
    finally:
        done.set()
        counter.join()


def run_script(script, timeout=120, **environment):
    env = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, env=env, timeout=timeout
    )


@pytest.mark.second_torch
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
@pytest.mark.parametrize("used_before", [False, True], ids=["after import", "after a call"])
def test_fork(used_before):
    """A forked child, as of a data loader, computes the same. With one thread, since torch's own pool cannot follow."""
    if used_before and torch.cuda.is_available():
        pytest.skip(
            "where there is a GPU, torch's autograd has threads of its own and refuses to run in a forked child"
        )
    script = f"""
        import os, torch
        from flash_attn import flash_attn_func
        torch.set_num_threads(1)
        torch.manual_seed(0)
        q = torch.randn(1, 70, 2, 16, requires_grad=True)

        def result():
            out = flash_attn_func(q, q, q, causal=True)
            return torch.cat([out.detach().flatten(), torch.autograd.grad(out.square().sum(), q)[0].flatten()])

        if {used_before}:
            result()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, result().numpy().tobytes())
            os._exit(0)
        os.close(write)  # Or a child that fails would leave the parent waiting.
        expected = result().numpy().tobytes()
        got = b""
        while len(got) < len(expected):
            piece = os.read(read, len(expected))
            assert piece, "the child wrote too little"
            got += piece
        assert os.waitpid(child, 0)[1] == 0
        assert got == expected
        print("same")
    """
    done = run_script(script)
    assert done.returncode == 0 and done.stdout == "same\n", done.stderr


@pytest.mark.second_torch
def test_dataloader_workers():
    """Worker processes started by torch after the parent has used the package."""
    script = """
        import torch
        from flash_attn import flash_attn_func
        torch.set_num_threads(1)

        class Rows(torch.utils.data.Dataset):
            def __len__(self):
                return 6
            def __getitem__(self, n):
                q = torch.full((1, 40, 2, 16), n + 1.0)
                return flash_attn_func(q, q, q)[0, 0, 0, 0].item()

        if __name__ == "__main__":
            Rows()[0]
            loader = torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=2, timeout=60)
            print([round(x, 4) for batch in loader for x in batch.tolist()])
    """
    done = run_script(script)
    assert done.returncode == 0 and done.stdout == "[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]\n", done.stderr


@pytest.mark.second_torch
def test_threads_follow_torch():
    """torch.set_num_threads(1) keeps a call on its own thread: the process gets no new ones."""
    script = """
        import os, torch
        torch.set_num_threads(1)
        from flash_attn import flash_attn_func
        q = torch.randn(2, 600, 4, 32, requires_grad=True)
        before = len(os.listdir("/proc/self/task"))
        with torch.no_grad():
            flash_attn_func(q, q, q)
        assert len(os.listdir("/proc/self/task")) == before
        print("none started")
    """
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("counts threads through /proc, which this platform lacks")
    done = run_script(script, OMP_NUM_THREADS="4")
    assert done.returncode == 0 and done.stdout == "none started\n", done.stderr
