"""One training run: the steps, what is measured, checkpoints, and several processes (DDP)."""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import statistics
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

# Before any process group: imported later (DDP does, with torch.compile's machinery), its functions' default arguments
# keep the group for ever, and gloo's threads with it, which abort the process when they meet the end of Python.
import torch.distributed.nn
import torch.nn.functional as F
from gpt_data import Text, read_text
from gpt_model import GPT, VOCABULARY, generate
from progress import Progress
from torch.nn.parallel import DistributedDataParallel

# A checkpoint belongs to a run with these; any other value would not continue the same run.
SETTINGS = ("attention", "dtype", "seq_len", "steps", "batch", "seed", "layers", "width", "heads", "lr")
CURVE_TOKENS = 1 << 13  # held-out targets behind each point of the curve
FINAL_TOKENS = 1 << 16  # and behind the final figure
INTERRUPTED = 130  # exit status, as a shell reports SIGINT


class Processes:
    """This process among those of torchrun (or alone), with the few collectives that the run needs."""

    def __init__(self, name, device):
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device(device)
        if device == "cuda":
            self.device = torch.device(device, int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
        if self.world > 1:
            # The runs of one torchrun share its store one after the other: the prefix keeps their keys apart.
            agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(address, port, self.world, self.rank == 0 and not agent)
            prefix = f"{name}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
            backend = "nccl" if device == "cuda" else "gloo"
            store = dist.PrefixStore(prefix, store)
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world)

    def wrap(self, model):
        return DistributedDataParallel(model) if self.world > 1 else model

    def share(self, rows):
        """This process's equal share of the rows."""
        return rows[self.rank :: self.world].to(self.device)

    def sums(self, *values):
        """Each value summed over the processes."""
        if self.world == 1:
            return values
        values = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(values)
        return values.tolist()

    def close(self):
        if self.world > 1:
            dist.barrier()
            dist.destroy_process_group()
            gc.collect()  # a model still in a cycle holds the group, and so its threads


class StopSignal:
    """Within `with`, SIGINT and SIGTERM ask for a stop after the step in progress, so that no step is half done."""

    def __enter__(self):
        self.asked = False
        self.previous = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _ask(self, number, frame):
        self.asked = True

    def __exit__(self, *exception):
        for number, handler in self.previous.items():
            signal.signal(number, handler)


def learning_rate(step, steps, peak):
    """Linear warm-up over the first tenth of the steps, then a cosine down to a twentieth of the peak."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def loss_of(model, windows):
    """Mean cross-entropy in nats per byte of windows (B, S + 1)."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.float().reshape(-1, VOCABULARY), windows[:, 1:].reshape(-1))


def memory_peak(device):
    """Bytes: the most this process has held. On the CPU its resident memory, on a GPU torch's allocations there."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _process_memory("VmHWM")


def memory_now(device):
    """Bytes that this process holds now, counted as in memory_peak."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _process_memory("VmRSS")


def _process_memory(field):
    # /proc counts this program alone; getrusage's maximum can include that of the process which started it.
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(field))


class Run:
    """Training with one attention function; everything that a checkpoint holds is in `state()`."""

    def __init__(self, args):
        self.args = args
        self.processes = Processes(args.attention, args.device)
        self.main = self.processes.rank == 0
        if args.batch % self.processes.world:
            raise SystemExit(f"train_gpt: --batch {args.batch} is not a multiple of {self.processes.world} processes")
        self.text = Text(read_text(args.data), args.seq_len)
        torch.manual_seed(args.seed)
        self.model = GPT(args.layers, args.width, args.heads, args.attention).to(self.processes.device)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
        self.settings = {name: getattr(args, name) for name in SETTINGS}
        self.settings["data"] = self.text.digest
        self.losses, self.seconds, self.held_out = [], [], []
        self.first_loss_fp32 = None
        self.path = Path(args.out) / f"{args.attention}.pt"
        self.memory_before = memory_now(self.processes.device)

    def state(self):
        return {
            "settings": self.settings,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "losses": self.losses,
            "seconds": self.seconds,
            "held_out": self.held_out,
            "first_loss_fp32": self.first_loss_fp32,
        }

    def save(self):
        """Write the checkpoint beside its place and move it there: whenever this is cut short, a whole one remains."""
        if self.main:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_suffix(".partial")
            torch.save(self.state(), partial)
            os.replace(partial, self.path)

    def resume(self):
        if not self.path.exists():
            return
        state = torch.load(self.path, map_location=self.processes.device)
        for name, value in self.settings.items():
            if state["settings"][name] != value:
                option = "--" + name.replace("_", "-") + (" of SHA-256" if name == "data" else "")
                raise SystemExit(
                    f"train_gpt: {self.path} was made with {option} {state['settings'][name]}, not {value}: "
                    "resume with the same, or start afresh without --resume"
                )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses, self.seconds, self.held_out = state["losses"], state["seconds"], state["held_out"]
        self.first_loss_fp32 = state["first_loss_fp32"]

    def precision(self):
        """Weights stay fp32; with bf16 the matrix products and attention are computed in it."""
        if self.args.dtype == "fp32":
            return nullcontext()
        return torch.autocast(self.processes.device.type, dtype=torch.bfloat16)

    @torch.no_grad()
    def evaluate(self, tokens):
        """Held-out loss in nats per byte over about `tokens` bytes."""
        total = count = 0.0
        for windows in self.text.held_out_windows(tokens).split(self.args.batch):
            windows = self.processes.share(windows)
            if len(windows):
                with self.precision():
                    total += loss_of(self.model, windows).item() * len(windows)
                count += len(windows)
        total, count = self.processes.sums(total, count)
        return total / count

    @torch.no_grad()
    def first_loss(self):
        """Loss of the untrained model on the first batch, in fp32 whatever --dtype says."""
        windows = self.processes.share(self.text.batch(self.args.batch, self.args.seed, 0))
        (total,) = self.processes.sums(loss_of(self.model, windows).item())
        return total / self.processes.world

    def step(self, model):
        """One optimizer step; returns the loss over the batches of all processes."""
        args, index = self.args, len(self.losses)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(index, args.steps, args.lr)
        windows = self.processes.share(self.text.batch(args.batch, args.seed, index))
        with self.precision():
            loss = loss_of(model, windows)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()

    def train(self):
        """The steps that are left. Returns False when a signal asked for a stop."""
        args, world, stopping = self.args, self.processes.world, False
        model = self.processes.wrap(self.model)
        progress = Progress(args.attention, len(self.losses), args.steps, self.main)
        with StopSignal() as stop:
            while len(self.losses) < args.steps and not stopping:
                begin = time.perf_counter()
                loss = self.step(model)
                self.seconds.append(time.perf_counter() - begin)
                loss, stopping = self.processes.sums(loss, stop.asked)
                self.losses.append(loss / world)
                done = len(self.losses)
                if done % max(1, args.steps // 10) == 0 or done == args.steps:
                    self.held_out.append((done, self.evaluate(CURVE_TOKENS)))
                rate = args.batch * args.seq_len / self.seconds[-1]
                held_out = f"{self.held_out[-1][1]:.3f}" if self.held_out else "-"
                progress.step(loss=f"{loss / world:.3f}", held_out=held_out, tokens_s=f"{rate:,.0f}")
                if stopping or done % args.checkpoint_every == 0 or done == args.steps:
                    self.save()
        progress.close()
        return not stopping

    def report(self, peak):
        """Everything that the figures, the plot and the JSON show of this run."""
        args = self.args
        with torch.no_grad(), self.precision():
            sample = generate(self.model, b"def ", args.sample, args.seq_len, args.seed)
        step_seconds = statistics.median(self.seconds)
        return {
            "settings": self.settings,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "device": str(self.processes.device),
            "processes": self.processes.world,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "train_losses": self.losses,
            "held_out_curve": self.held_out,
            "held_out_loss": self.evaluate(FINAL_TOKENS),
            "first_loss_fp32": self.first_loss_fp32,
            "step_seconds": step_seconds,
            "tokens_per_second": args.batch * args.seq_len / step_seconds,
            "memory_before_bytes": self.memory_before,
            "memory_peak_bytes": peak,
            "sample": sample.decode("utf-8", "replace"),
        }


def run(args):
    """Train with args.attention and write OUT/<attention>.json. Returns the exit status."""
    if args.threads:
        torch.set_num_threads(args.threads)
    this = Run(args)
    report_path = this.path.with_suffix(".json")
    if args.resume:
        this.resume()
    if len(this.losses) == args.steps and report_path.exists():
        this.processes.close()
        return 0
    if this.first_loss_fp32 is None:
        this.first_loss_fp32 = this.first_loss()
    finished = this.train()
    if finished:
        report = this.report(memory_peak(this.processes.device))
        if this.main:
            report_path.write_text(json.dumps(report, indent=1))
    this.processes.close()
    return 0 if finished else INTERRUPTED
