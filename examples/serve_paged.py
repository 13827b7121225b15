#!/usr/bin/env python3
"""Serve many requests at once with the small GPT of train_gpt.py, over a paged key/value cache.

Continuous batching: every step runs one token of each sequence that generates and, beside them, up to --chunk tokens
of prompts that are still to be read. Keys and values live in --pages pages of --page-size slots; sequences that begin
alike share full pages. When pages run out, the sequence that came last gives up its own and waits again.

The requests are cut out of the text: a common beginning of --prefix bytes and a piece of its own for each. With
--prompt they are yours. Afterwards each request is generated once more alone and without a cache; if a single byte
differs, the exit status is 1 (--no-check leaves this out).

The model: --checkpoint, else out/flash.pt of `make run` (examples/train_gpt.py), else a small one that is trained
first, in about a minute on two free cores, and kept in out/serve for the next time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
TRAINED = Path("out/flash.pt")
SHORT = Path("out/serve/flash.pt")
INTERRUPTED = 130


def parse_arguments(arguments):
    def number(least, kind=int):
        def parse(text):
            value = kind(text)
            if not value >= least:
                raise argparse.ArgumentTypeError(f"{text} is below {least}")
            return value

        parse.__name__ = kind.__name__  # what argparse calls a text that is no number
        return parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoint", metavar="FILE", help=f"model of train_gpt.py [{TRAINED}, or a short training]")
    add("--train-steps", type=number(1), default=100, metavar="N", help="of that short training [100]")
    add("--data", metavar="FILE", help="text of the requests and the training [the standard library's sources]")
    add("--requests", type=number(1), default=16, metavar="N", help="how many [16]")
    add("--prefix", type=number(0), default=96, metavar="N", help="bytes with which all of them begin [96]")
    add("--prompt", action="append", metavar="TEXT", help="a request of your own instead; may be repeated")
    add("--new-tokens", type=number(1), default=64, metavar="N", help="bytes to generate for each [64]")
    add("--temperature", type=number(0, float), default=0.8, metavar="X", help="0 takes the likeliest byte [0.8]")
    add("--seed", type=number(0), default=0, metavar="N", help="of requests and samples [0]")
    add("--page-size", type=number(1), default=16, metavar="N", help="slots of a page [16]")
    add("--pages", type=number(1), default=128, metavar="N", help="of the cache [128]")
    add("--max-batch", type=number(1), default=8, metavar="N", help="sequences in a step [8]")
    add("--chunk", type=number(1), default=64, metavar="N", help="tokens of prompts in a step [64]")
    add("--threads", type=number(1), metavar="N", help="[torch's default]")
    add("--no-share", action="store_true", help="let no sequences share pages")
    add("--no-check", action="store_true", help="do not generate the requests alone for comparison")
    add("--json", metavar="FILE", help="write all figures and texts there")
    args = parser.parse_args(arguments)
    for name in ("checkpoint", "data"):
        path = getattr(args, name)
        if path is not None and not Path(path).is_file():
            more = "; train one with examples/train_gpt.py, or leave it out" if name == "checkpoint" else ""
            parser.error(f"--{name} {path}: no such file{more}")
    if args.prompt is not None and "" in args.prompt:
        parser.error("--prompt is empty; give at least one character")
    return args


def find_checkpoint(args):
    """Path of a trained model; trains one if there is none."""
    if args.checkpoint:
        return Path(args.checkpoint)
    # A run that was interrupted has a checkpoint, but no figures.
    for path in (TRAINED, SHORT):
        if path.is_file() and path.with_suffix(".json").is_file():
            return path
    print(f"serve_paged: no {TRAINED} (of `make run`): training a small model into {SHORT}", file=sys.stderr)
    command = [sys.executable, str(HERE / "train_gpt.py"), "--attention=flash", "--no-check", f"--out={SHORT.parent}"]
    command += [f"--steps={args.train_steps}", "--seq-len=256", "--sample=1"]
    command += [f"--data={args.data}"] if args.data else []
    command += [f"--threads={args.threads}"] if args.threads else []
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise SystemExit("serve_paged: the training failed; train a model with `make run` and pass its --checkpoint")
    return SHORT


def load(path):
    """(a GPT of that checkpoint with plain causal attention, one for the server)."""
    import torch
    from gpt_model import GPT

    try:
        state = torch.load(path, map_location="cpu")
        settings, weights = state["settings"], state["model"]
    except Exception as error:
        raise SystemExit(f"serve_paged: {path} is no checkpoint of train_gpt.py ({error})") from error
    models = []
    for _ in range(2):
        models.append(GPT(settings["layers"], settings["width"], settings["heads"], "flash").eval())
        models[-1].load_state_dict(weights)
    return models


def make_requests(args):
    import torch
    from gpt_data import read_text
    from serving import Request

    prompts = [text.encode() for text in args.prompt or ()]
    if not prompts:
        text = read_text(args.data)
        longest = 64
        if len(text) < args.prefix + longest:
            raise SystemExit(
                f"serve_paged: the text has {len(text)} bytes; --prefix {args.prefix} needs {longest} more"
            )
        generator = torch.Generator().manual_seed(args.seed)
        for _ in range(args.requests):
            own = torch.randint(1, longest + 1, (), generator=generator).item()
            start = torch.randint(len(text) - own + 1, (), generator=generator).item()
            prompts.append(text[: args.prefix] + text[start : start + own])
    # Seeds of their own: equal prompts need not have equal answers.
    return [Request(p, args.new_tokens, args.temperature, args.seed + n) for n, p in enumerate(prompts)]


def serve(server, requests):
    """(generated bytes of each request, seconds)."""
    from progress import Progress

    sequences = [server.submit(request) for request in requests]
    progress = Progress("serving", 0, sum(r.new_tokens for r in requests), True, "token")
    begin = time.perf_counter()
    while server:
        generated = server.step()
        pool = server.pool
        state = {"running": len(server.running), "waiting": len(server.waiting)}
        progress.step(generated, **state, pages=f"{pool.used}/{pool.pages}", shared=pool.shared)
    seconds = time.perf_counter() - begin
    progress.close()
    return [s.generated for s in sequences], seconds


def generate_each_alone(model, requests):
    """The same without a cache."""
    from progress import Progress
    from serving import generate_alone

    progress = Progress("checking", 0, sum(r.new_tokens for r in requests), True, "token")
    begin, texts = time.perf_counter(), []
    for request in requests:
        texts.append(generate_alone(model, request))
        progress.step(request.new_tokens)
    progress.close()
    return texts, time.perf_counter() - begin


def report(server, requests, seconds):
    """Print what was served and how; returns it as a dict."""
    figures, pool = dataclasses.asdict(server.figures), server.pool
    prompt_tokens = sum(len(r.prompt) for r in requests)
    figures.update(requests=len(requests), prompt_tokens=prompt_tokens, seconds=seconds)
    figures.update(tokens_per_second=figures["new_tokens"] / seconds, pages=pool.pages, page_size=pool.page_size)
    print(f"{len(requests)} requests, {prompt_tokens} bytes of prompts, {figures['new_tokens']} generated")
    print(f"{figures['tokens_per_second']:,.0f} generated tokens/s ({seconds:.2f} s)")
    print(f"{figures['steps']} steps, {figures['mixed_steps']} of them with prompts beside generating sequences")
    print(f"pages of {pool.page_size}: {pool.pages}, at most {figures['peak_pages_used']} used at a time, "
          f"{figures['peak_pages_shared']} shared, {pool.used} left held")  # fmt: skip
    print(f"{figures['found_tokens']} tokens found in the cache, {figures['computed_tokens']} computed")
    print(
        f"{figures['preemptions']} pre-emptions, after which {figures['recomputed_tokens']} tokens were computed again"
    )
    return figures


def check(model, requests, texts, figures):
    """Compare with generation alone; returns the exit status."""
    alone, seconds = generate_each_alone(model, requests)
    different = [n for n, (text, other) in enumerate(zip(texts, alone)) if text != other]
    figures.update(different_requests=different, tokens_per_second_alone=figures["new_tokens"] / seconds)
    print(f"alone and without a cache: {figures['tokens_per_second_alone']:,.0f} tokens/s")
    kept = f"{len(texts) - len(different)} of {len(texts)} outputs are, byte for byte, those without a cache"
    print(f"{'BROKEN' if different else 'kept'}: {kept}" + (f"; different: {different}" if different else ""))
    return 1 if different else 0


def main(arguments):
    args = parse_arguments(arguments)
    import torch
    from serving import Server

    if args.threads:
        torch.set_num_threads(args.threads)
    plain, paged = load(find_checkpoint(args))
    requests = make_requests(args)
    server = Server(paged, args.pages, args.page_size, args.max_batch, args.chunk, not args.no_share)
    try:
        texts, seconds = serve(server, requests)
    except ValueError as error:
        raise SystemExit(f"serve_paged: {error}") from error
    shown = range(len(requests)) if args.prompt else [0]
    for n in shown:
        print(f"\nRequest {n}:\n{(requests[n].prompt + texts[n]).decode('utf-8', 'replace')}\n")
    figures = report(server, requests, seconds)
    status = 0 if args.no_check else check(plain, requests, texts, figures)
    if args.json:
        pairs = [{"prompt": r.prompt.decode("latin-1"), "text": t.decode("latin-1")} for r, t in zip(requests, texts)]
        Path(args.json).write_text(json.dumps({**figures, "outputs": pairs}, indent=1))
    return status


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("serve_paged: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
